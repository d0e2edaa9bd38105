"""Functions that tests/test_sandbox.py runs in a helper process."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from jaxsgl.errors import InvalidRequest

_kept: list[bytes] = []


def make(argument: bytes) -> Callable[[bytes], bytes]:
    """Does what the first word of a request names; `argument` comes before each echo."""
    if argument == b"invalid":
        raise InvalidRequest("no such thing")
    if argument == b"broken":
        raise RuntimeError("a fault of ours")

    def run(request: bytes) -> bytes:
        word, _, rest = request.partition(b" ")
        return _FUNCTIONS[word.decode()](argument + rest if word == b"echo" else rest)

    return run


def _spin(_: bytes) -> bytes:
    while True:
        pass


def _in_c(_: bytes) -> bytes:
    return b"%d" % ((9 ** (9**8)) % 7)  # one call of C, which holds Python's lock


def _allocate(count: bytes) -> bytes:
    return b"%d" % len(bytearray(int(count)))


def _abort_in_c(_: bytes) -> bytes:
    os.write(2, b"memory allocation of 99 bytes failed")
    ctypes.CDLL(None).abort()
    return b""


def _keep(rest: bytes) -> bytes:
    _kept.append(rest)
    return b"%d" % len(_kept)


def _invalid(rest: bytes) -> bytes:
    raise InvalidRequest(rest.decode())


def _raise(rest: bytes) -> bytes:
    raise RuntimeError(rest.decode())


def _leave(_: bytes) -> bytes:
    os._exit(7)


def _kill_helper(_: bytes) -> bytes:
    os.kill(os.getppid(), 9)
    time.sleep(0.2)
    os._exit(0)


def _sleep(seconds: bytes) -> bytes:
    time.sleep(float(seconds))
    return b"slept"


def _write(path: bytes) -> bytes:
    Path(path.decode()).write_bytes(b"x")
    return b"written"


def _modules(_: bytes) -> bytes:
    return " ".join(sorted(sys.modules)).encode()


def _variables(_: bytes) -> bytes:
    return " ".join(sorted(os.environ)).encode()


_FUNCTIONS: dict[str, Callable[[bytes], bytes]] = {
    "echo": bytes,
    "spin": _spin,
    "in_c": _in_c,
    "allocate": _allocate,
    "abort": _abort_in_c,
    "keep": _keep,
    "invalid": _invalid,
    "raise": _raise,
    "leave": _leave,
    "kill_helper": _kill_helper,
    "sleep": _sleep,
    "write": _write,
    "modules": _modules,
    "variables": _variables,
}
