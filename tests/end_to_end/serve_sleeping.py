"""`python -m jaxsgl.serve`, but each pipeline stage sleeps `STAGE_S` in each step, see `tests/engine/stage_times.py`.

The server starts this module again as its engine process, with the argument "engine".
"""

from __future__ import annotations

import sys

NAME = "tests.end_to_end.serve_sleeping"
STAGE_S = 1.0  # of which what servers and clients do besides is a small part

if __name__ == "__main__":
    if sys.argv[1:] == ["engine"]:
        from jaxsgl.engine_process import main
        from tests.engine import stage_times

        stage_times.plant(STAGE_S)
        sys.exit(main())
    from jaxsgl.serve import run

    run([sys.executable, "-m", NAME, "engine"])
