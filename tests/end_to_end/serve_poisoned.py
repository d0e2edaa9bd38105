"""`python -m jaxsgl.serve`, but the batch of a request whose frequency_penalty is `POISON` can't be built.

The server starts this file again as its engine process, with the argument "engine".
"""

from __future__ import annotations

import sys
from pathlib import Path

POISON = 1.125


def plant() -> None:
    """Plants a fault in the work for one request, as int32 overflows in the packing of its numbers have been."""
    from jaxsgl.scheduler.req import Req

    plain = Req.edit_setup

    def edit_setup(self: Req, vocab_size: int) -> object:
        if self.sampling.frequency_penalty == POISON:
            raise OverflowError("planted")
        return plain(self, vocab_size)

    Req.edit_setup = edit_setup  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    if sys.argv[1:] == ["engine"]:
        from jaxsgl.engine_process import main

        plant()
        sys.exit(main())
    from jaxsgl.serve import run

    run([sys.executable, str(Path(__file__)), "engine"])
