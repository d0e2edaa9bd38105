"""Decoders that count neither scans nor what boxes declare, as if nobody had thought of them. Tests' helpers run it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from jaxsgl.preprocess import decoding, movies, pictures

CRASH = b"a picture that ends its decoder"
KILLED = b"a picture whose decoder the system kills"
KILLED_HELPER = b"a picture whose decoder's parent the system kills"


def make(argument: bytes) -> Callable[[bytes], bytes]:
    """As `decoding.make`. A request with `CRASH` in it ends as by a fault in C, with the others as without memory."""
    for module, name in ((pictures, "check_scans"), (movies, "check_boxes")):
        assert hasattr(module, name)
        setattr(module, name, lambda content, name: None)
    run = decoding.make(argument)

    def run_or_crash(request: bytes) -> bytes:
        if CRASH in request:
            os.kill(os.getpid(), signal.SIGSEGV)
        if KILLED in request:
            os.kill(os.getpid(), signal.SIGKILL)
        if KILLED_HELPER in request:
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(1)
        return run(request)

    return run_or_crash
