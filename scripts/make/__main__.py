"""Make something that the repository keeps, or a checkpoint to try things with.

python scripts/make lock
python scripts/make lock --help

What there is:
"""

import sys
from pathlib import Path

if not __package__:  # it is run as the folder scripts/make: what it imports stands in the folder above
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.output import run_named

if __name__ == "__main__":
    sys.exit(run_named("make", __doc__, sys.argv[1:]))
