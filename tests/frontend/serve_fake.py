"""`python -m jaxsgl.serve`, but with the fake engine process."""

import sys
from pathlib import Path

from jaxsgl.serve import main

if __name__ == "__main__":
    sys.exit(main(engine_command=[sys.executable, str(Path(__file__).parent / "fake_engine_process.py")]))
