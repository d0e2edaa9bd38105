"""`Sandbox`: runs a function on a client's data in a child process, within limits that the kernel enforces.

    owner, any thread           helper: imports, makes the function once, forks        child: one call
    call(request, limits)  -->  a pair of sockets for the call's data and verdict -->  timers, memory limit
                           <--  waits for the child, says how it ended            <--  function(request) -> reply

Native libraries (grammar compilers, FFmpeg, libjpeg) can take minutes and gigabytes for some hundred bytes, and no
limit inside their process can end them. Here a call that goes beyond its limits is ended alone: by SIGPROF (processor
time), SIGALRM (time) or a failed allocation (address space), even in the middle of C code. A child is forked for each
call, so that nothing of one call, memory or damage, is left for the next one. The helper has one thread, imports
no JAX, gets no secrets in its environment, and ends with its owner. Knows nothing of what its functions do.

constraints/ and preprocess/ name functions for it; this file is also the helper's program (`python -m jaxsgl.sandbox`).
"""

from __future__ import annotations

import base64
import contextlib
import gc
import importlib
import json
import math
import os
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn, TypeAlias

from jaxsgl import logs
from jaxsgl.errors import InvalidRequest
from jaxsgl.parent import be_killed_with_parent

Function: TypeAlias = Callable[[bytes], bytes]
LimitKind: TypeAlias = Literal["memory", "processor time", "time"]

START_S = 120.0  # that the helper may take until it is ready
GRACE_S = 10.0  # after a call's time is over: for the helper to report how its child ended
MAX_TEXT_CHARS = 2000
_KEPT_VARIABLES = ("PATH", "PYTHONHOME", "LD_LIBRARY_PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "VIRTUAL_ENV")
_LIMIT_OF_SIGNAL: dict[int, LimitKind] = {
    signal.SIGPROF: "processor time", signal.SIGXCPU: "processor time", signal.SIGALRM: "time",
}  # fmt: skip
_HEAD = struct.Struct("<cQ")  # what it is, and bytes that follow
_REPLY, _INVALID, _MEMORY, _RAISED = b"R", b"I", b"M", b"E"


class Limits(NamedTuple):
    """What one call may use.

    Attributes:
      memory_bytes: address space beyond what the helper has when the call begins.
      cpu_s: processor time, of all threads of the child.
      time_s: time by the clock.
    """

    memory_bytes: int
    cpu_s: float
    time_s: float


class SandboxError(Exception):
    """A call had no reply."""


class SandboxLimit(SandboxError):
    """A call was ended at one of its limits.

    Attributes:
      kind: which one.
    """

    def __init__(self, kind: LimitKind, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class SandboxCrash(SandboxError):
    """The function raised what it shouldn't, or its process ended by itself; the text says how."""


class SandboxKilled(SandboxCrash):
    """Something else ended the process of the call, or the helper, as the kernel does where memory runs out."""


class Sandbox:
    """A helper process and the calls in it. Safe to use from several threads, whose calls run at the same time.

    Args:
      make: "package.module:name" of a function that the helper calls once; `name(argument)` returns what calls run.
      argument: of `make`; up to 64 KiB.
      name: of the helper in log lines.
    """

    def __init__(self, make: str, argument: bytes = b"", name: str = "sandbox") -> None:
        self._make = make
        self._argument = argument
        self._name = name
        self._lock = threading.Lock()  # for `_helper`, and for one message at a time
        self._helper: _Helper | None = None

    @property
    def pid(self) -> int | None:
        """The helper's process, if it was started."""
        return self._helper.process.pid if self._helper is not None else None

    def start(self) -> None:
        """Starts the helper, unless it runs, and waits until it is ready.

        Raises:
          InvalidRequest: `make` raised it.
          SandboxCrash: the helper didn't get ready.
        """
        with self._lock:
            self._running()

    def call(self, request: bytes, limits: Limits) -> bytearray:
        """Returns the function's reply to `request`.

        Raises:
          InvalidRequest: the function raised it.
          SandboxLimit: the call was ended at one of `limits`.
          SandboxCrash: it ended in any other way.
        """
        data, childs_data = socket.socketpair()
        verdict, helpers_verdict = socket.socketpair()
        with data, verdict:
            with childs_data, helpers_verdict:
                self._send(json.dumps(limits).encode(), childs_data.fileno(), helpers_verdict.fileno())
            data.settimeout(limits.time_s + GRACE_S)
            verdict.settimeout(GRACE_S)
            try:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the verdict says why
                    data.sendall(_HEAD.pack(_REPLY, len(request)))
                    data.sendall(request)
                kind, reply = _receive(data)
            except TimeoutError:
                raise SandboxLimit("time", f"no reply within {limits.time_s:g} s") from None
            except (EOFError, ConnectionResetError):
                raise _told_by(verdict, limits) from None
        if kind == _REPLY:
            return reply
        text = reply.decode(errors="replace")
        if kind == _INVALID:
            raise InvalidRequest(text)
        if kind == _MEMORY:
            raise SandboxLimit("memory", _of_memory(limits))
        raise SandboxCrash(text)

    def close(self) -> None:
        """Ends the helper, and its calls on Linux; elsewhere they end at their limits. A later call starts another."""
        with self._lock:
            if self._helper is not None:
                self._helper.close()
                self._helper = None

    def _send(self, message: bytes, *fds: int) -> None:
        with self._lock:
            try:
                socket.send_fds(self._running().control, [message], fds)
            except OSError:  # the helper ended since its last call, so that another one is started
                assert self._helper is not None
                self._helper.close()
                self._helper = None
                socket.send_fds(self._running().control, [message], fds)

    def _running(self) -> _Helper:
        if self._helper is None or self._helper.process.poll() is not None:
            self._helper = _Helper(self._make, self._argument, self._name)
        return self._helper


class _Helper:
    """The owner's side of a helper process; `close` is also called when the last reference to it goes."""

    def __init__(self, make: str, argument: bytes, name: str) -> None:
        self.control, its_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {key: value for key, value in os.environ.items() if key in _KEPT_VARIABLES}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        # Threads of libraries wouldn't survive a fork, and each arena of malloc takes address space.
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
        command = [sys.executable, "-m", "jaxsgl.sandbox", str(its_control.fileno()), make]
        stderr = logs.child_stderr(name)
        try:
            with its_control:
                self.process = subprocess.Popen(
                    [*command, base64.b64encode(argument).decode()],
                    stdin=subprocess.DEVNULL,
                    stderr=stderr,
                    env=environment,
                    pass_fds=(its_control.fileno(),),
                    process_group=0,  # Ctrl-C in the terminal is the server's alone
                )
        finally:
            if stderr is not None:
                os.close(stderr)
        self._finalizer = weakref.finalize(self, _end, self.control, self.process)
        self._wait_until_ready(name)

    def close(self) -> None:
        self._finalizer()

    def _wait_until_ready(self, name: str) -> None:
        self.control.settimeout(START_S)
        try:
            message = self.control.recv(MAX_TEXT_CHARS * 4 + 1)
        except (TimeoutError, ConnectionResetError):
            message = b""
        self.control.settimeout(None)
        if message[:1] == _REPLY:
            return
        self.close()
        text = message[1:].decode(errors="replace")
        if message[:1] == _INVALID:
            raise InvalidRequest(text)
        raise SandboxCrash(text or f"the helper process {name} did not get ready within {START_S:g} s")


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()  # which the helper sees
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _told_by(verdict: socket.socket, limits: Limits) -> SandboxError:
    """Why there is no reply: the helper says how its child ended."""
    try:
        _, message = _receive(verdict)
    except (EOFError, TimeoutError, ConnectionResetError):
        return SandboxKilled("the helper process ended during the call")
    status, stderr = json.loads(message)
    if -status in _LIMIT_OF_SIGNAL:
        kind = _LIMIT_OF_SIGNAL[-status]
        seconds = limits.cpu_s if kind == "processor time" else limits.time_s
        return SandboxLimit(kind, f"it took more than {seconds:g} s of {kind}")
    if "memory allocation of" in stderr or "MemoryError" in stderr:  # as Rust and Python end without memory
        return SandboxLimit("memory", _of_memory(limits))
    how = f"signal {-status}" if status < 0 else f"exit status {status}"
    crash = SandboxKilled if status == -signal.SIGKILL else SandboxCrash
    return crash(f"its process ended by {how}: {stderr}" if stderr else f"its process ended by {how}")


def _of_memory(limits: Limits) -> str:
    return f"it took more than {limits.memory_bytes >> 20} MiB of memory"


def _send(to: socket.socket, kind: bytes, payload: bytes) -> None:
    to.sendall(_HEAD.pack(kind, len(payload)))
    to.sendall(payload)


def _receive(source: socket.socket) -> tuple[bytes, bytearray]:
    """Returns one message; raises `EOFError` if the other side ended before it was whole."""
    head = _receive_exactly(source, _HEAD.size)
    kind, length = _HEAD.unpack(head)
    return kind, _receive_exactly(source, length)


def _receive_exactly(source: socket.socket, length: int) -> bytearray:
    buffer = bytearray(length)
    view = memoryview(buffer)
    while view:
        count = source.recv_into(view)
        if count == 0:
            raise EOFError
        view = view[count:]
    return buffer


# ---- the helper's side ----


class _Child:
    """A child as the helper knows it. Its output's pipe ends with it."""

    def __init__(self, pid: int, output: int, verdict: socket.socket) -> None:
        self.pid = pid
        self.output = output
        self.verdict = verdict
        self.text = b""

    def read(self) -> bool:
        """Reads what the child printed; False: it has ended."""
        part = os.read(self.output, 65536)
        self.text = (self.text + part)[:MAX_TEXT_CHARS]
        return bool(part)

    def report(self) -> None:
        """Tells the owner how the child has ended, which matters if its reply isn't whole."""
        _, status = os.waitpid(self.pid, 0)
        told = json.dumps((os.waitstatus_to_exitcode(status), self.text.decode(errors="replace")))
        with contextlib.suppress(OSError):  # the owner has its reply and reads no verdict
            _send(self.verdict, _REPLY, told.encode())
        self.close()

    def close(self) -> None:
        """Closes the helper's side of it, in the helper or in another child."""
        os.close(self.output)
        self.verdict.close()


def _main(control: socket.socket, make: str, argument: bytes) -> None:
    """Serves calls until the owner ends. One thread; `function` runs in forked children alone."""
    try:
        module, _, name = make.partition(":")
        function: Function = getattr(importlib.import_module(module), name)(argument)
    except Exception as error:
        kind = _INVALID if isinstance(error, InvalidRequest) else _RAISED
        text = str(error) if isinstance(error, InvalidRequest) else traceback.format_exc()[-MAX_TEXT_CHARS:]
        control.send(kind + text[:MAX_TEXT_CHARS].encode())
        return
    gc.collect()
    gc.freeze()  # so that a child's collections don't touch, and thereby copy, the helper's pages
    control.send(_REPLY)
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is not None:
                    child: _Child = key.data
                    if not child.read():
                        selector.unregister(child.output)
                        child.report()
                    continue
                message, fds, _, _ = socket.recv_fds(control, 4096, 2)
                if not message:
                    return
                child = _fork(function, Limits(*json.loads(message)), fds, control, selector)
                selector.register(child.output, selectors.EVENT_READ, child)


def _fork(
    function: Function, limits: Limits, fds: list[int], control: socket.socket, selector: selectors.BaseSelector
) -> _Child:
    """Starts a child for one call, with the sockets of its data and its verdict."""
    data, verdict = (socket.socket(fileno=fd) for fd in fds)
    output, childs_output = os.pipe()
    pid = os.fork()
    if pid == 0:
        control.close()
        verdict.close()
        os.close(output)
        for key in selector.get_map().values():
            if key.data is not None:
                key.data.close()
        _run(function, limits, data, childs_output)
    os.close(childs_output)
    data.close()
    return _Child(pid, output, verdict)


def _run(function: Function, limits: Limits, data: socket.socket, output: int) -> NoReturn:
    """The life of a child."""
    status = 1
    try:
        be_killed_with_parent()  # an owner that ends wants no reply
        signal.setitimer(signal.ITIMER_REAL, limits.time_s)
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
        # A library may change the timers, but not this. SIGXCPU comes a second before SIGKILL.
        most_s = math.ceil(limits.cpu_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        _, request = _receive(data)
        _limit_memory(limits.memory_bytes)
        try:
            kind, reply = _REPLY, function(bytes(request))
        except InvalidRequest as error:
            kind, reply = _INVALID, str(error).encode()
        except MemoryError:
            kind, reply = _MEMORY, b""
        except Exception:
            kind, reply = _RAISED, traceback.format_exc()[-MAX_TEXT_CHARS:].encode()
        _send(data, kind, reply)
        status = 0
    except BaseException as error:  # such as the owner's end; nothing of the helper may run on in its child
        os.write(2, type(error).__name__.encode())
    finally:
        os._exit(status)


def _limit_memory(more_bytes: int) -> None:
    """Lets this process have `more_bytes` of address space beyond what it has, where the system says what that is."""
    with contextlib.suppress(FileNotFoundError):
        most_bytes = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], base64.b64decode(sys.argv[3]))
