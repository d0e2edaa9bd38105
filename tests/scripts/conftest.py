"""Makes the front end's fakes importable, and the packages beside the scripts, as for a script that runs."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS.parent / "scripts"), str(TESTS / "frontend")]
