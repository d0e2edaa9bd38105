"""Makes the packages beside the scripts importable, as they are for a script that runs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
