"""Measure one figure of the engine or the server.

python scripts/bench step --shape mid --steps 32x1+400
python scripts/bench step --help

The figures:
"""

import sys
from pathlib import Path

if not __package__:  # it is run as the folder scripts/bench: what it imports stands in the folder above
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.output import run_named

if __name__ == "__main__":
    sys.exit(run_named("bench.figures", __doc__, sys.argv[1:]))
