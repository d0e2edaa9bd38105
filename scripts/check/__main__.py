"""Check one thing, on this machine or of this tree.

python scripts/check kernels --backends triton
python scripts/check kernels --help

The checks:
"""

import sys
from pathlib import Path

if not __package__:  # it is run as the folder scripts/check: what it imports stands in the folder above
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.output import run_named

if __name__ == "__main__":
    sys.exit(run_named("check", __doc__, sys.argv[1:]))
