"""Makes the packages beside the scripts importable, as they are for a script that runs, and the front end's fakes."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS.parent / "scripts"), str(TESTS / "frontend")]
