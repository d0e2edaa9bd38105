"""`python -m jaxsgl.serve`, but with the fake engine process."""

import os
import sys
import threading
from pathlib import Path

from jaxsgl.serve import run


def follow_the_tests() -> None:
    sys.stdin.read()  # a pipe that closes when the tests end
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=follow_the_tests, daemon=True).start()
    run([sys.executable, str(Path(__file__).parent / "fake_engine_process.py")])
