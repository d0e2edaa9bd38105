"""Payloads that the receiver reads from the sender's memory with NIXL, NVIDIA's library for such transfers.

UCX carries them for it: over RDMA where there is such a network, by a copy between processes on one machine, else over
TCP. `Nixl` is the agent of a worker. `InMemory`, the payloads of one connection: the sender copies them, one after the
other, to the slots of a window that NIXL knows, and says where that is in its first frame of this kind, `Memory`. The
k-th payload lies in slot k modulo `NUM_SLOTS`. The receiver reads each when its message comes, or doesn't if nobody
awaits it, and says `Taken`; then the slot is free. The greeting, messages and signs of life take the connection itself
as they do with tcp, so that a worker's state machine sees no difference.

What is read goes to memory of the connection first. A read that has to be given up may still write there, so that
memory is never used again; and a window that another worker may still read goes to the next connection, never back to
the system. UCX has neither keys nor proofs: whoever reaches its ports has to be trusted (docs/security.md).
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxsgl.errors import StartupError
from jaxsgl.transfer.frames import Media, Memory, Pages, Rows, Taken, WireError, encode
from jaxsgl.transfer.payloads import Stream
from jaxsgl.transfer.wire import Bytes

NUM_SLOTS = 4
MODULES = ("nixl_cu12", "nixl_cu13")  # the package `nixl`, which chooses one of these, imports torch
LOOK_S = 50e-6  # between two looks at a read
PROGRESS_US = (
    10_000  # between two looks of UCX's own thread, which events wake; 0, as NIXL's class has it, takes a core
)
_ENDED_S = 0.5  # between two looks whether a connection has ended


class Region(NamedTuple):
    """Memory that NIXL knows, `[num_bytes]`, and how it is called there."""

    memory: Bytes
    name: Any


class Nixl:
    """The agent of this worker; all threads may use it. Its methods raise `OSError` for what NIXL raises.

    Args:
      serves: whether others read memory from here, for which UCX needs a thread.
      on_loopback: whether all other workers are on this machine; UCX listens at no other address then, unless
        UCX_NET_DEVICES names some.

    Raises:
      StartupError: NIXL isn't installed, or doesn't start.
    """

    def __init__(self, serves: bool, on_loopback: bool) -> None:
        self._api = api = _bindings()
        if on_loopback:
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        config = api.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = serves, PROGRESS_US
        config.syncMode = api.NIXL_THREAD_SYNC_STRICT
        try:
            self._agent = api.nixlAgent(uuid.uuid4().hex, config)
            self._agent.createBackend("UCX", {})
        except Exception as error:
            raise StartupError(f"--disaggregation-transfer-backend nixl: NIXL's agent doesn't start: {error}") from None
        self._regions: list[Region] = []  # all, which stay as long as this
        self._spare: list[Region] = []
        self._added: Counter[str] = Counter()  # connections to each other agent: a worker may have several addresses
        self._lock = threading.Lock()

    def region(self, num_bytes: int) -> Region:
        """Memory that `give_back` takes again."""
        with self._lock:
            for i, region in enumerate(self._spare):
                if len(region.memory) == num_bytes:
                    return self._spare.pop(i)
        memory = np.empty(num_bytes, dtype=np.uint8)
        with _translated("can't register memory"):
            name = self._api.nixlRegDList(self._api.DRAM_SEG, [(memory.ctypes.data, num_bytes, 0, "")])
            self._agent.registerMem(name, [])
        region = Region(memory, name)
        self._regions.append(region)
        return region

    def give_back(self, region: Region) -> None:
        """Takes memory for the next that asks."""
        with self._lock:
            self._spare.append(region)

    def metadata(self, region: Region) -> bytes:
        """What others need to read it."""
        with _translated("can't describe its memory"):
            metadata: bytes = self._agent.getLocalPartialMD(region.name, True, [])
            return metadata

    def add(self, metadata: bytes) -> str:
        """Returns the name of the agent whose metadata this is."""
        with _translated("can't reach the other worker"):
            name: str = self._agent.loadRemoteMD(metadata).decode()
        with self._lock:
            self._added[name] += 1
        return name

    def remove(self, name: str) -> None:
        """Ends what `add` began."""
        with self._lock:
            self._added[name] -= 1
            if not self._added[name]:
                del self._added[name]
                with contextlib.suppress(Exception):  # of a worker that is gone
                    self._agent.invalidateRemoteMD(name)

    def start_read(self, name: str, address: int, into: Bytes) -> int:
        """Begins to copy memory of agent `name` to memory of a region here; returns the read's handle."""
        with _translated("can't read the other worker's memory"):
            here = self._api.nixlXferDList(self._api.DRAM_SEG, [(into.ctypes.data, len(into), 0)])
            there = self._api.nixlXferDList(self._api.DRAM_SEG, [(address, len(into), 0)])
            read: int = self._agent.createXferReq(self._api.NIXL_READ, here, there, name, "", [])
            try:
                self._agent.postXferReq(read, "")
            except Exception:
                self.end_read(read)
                raise
            return read

    def has_read(self, read: int) -> bool:
        """Whether it is over; brings it forward."""
        with _translated("can't read the other worker's memory"):
            status = self._agent.getXferStatus(read)
            return bool(status == self._api.NIXL_SUCCESS)

    def end_read(self, read: int) -> None:
        """Forgets a read; one that isn't over may go on."""
        with contextlib.suppress(Exception):  # of one that isn't over
            self._agent.releaseXferReq(read)


class InMemory:
    """The payloads of one connection, see above."""

    def __init__(self, stream: Stream, nixl: Nixl) -> None:
        self._stream = stream
        self._nixl = nixl
        self._region: Region | None = None  # the window, or where reads go
        self._num_payloads = 0
        # Of the side that sends:
        self._free = threading.Semaphore(NUM_SLOTS)
        self._on_way: deque[tuple[Pages | Media | Rows, int]] = deque()
        # Of the side that reads:
        self._theirs: Memory | None = None
        self._their_name = ""

    def send(self, message: Pages | Media | Rows, data: memoryview) -> None:
        """See `Payloads`."""
        slot_bytes = self._stream.slot_bytes
        if self._region is None:
            self._region = self._nixl.region(NUM_SLOTS * slot_bytes)
            address = self._region.memory.ctypes.data
            self._stream.write(encode(Memory(self._nixl.metadata(self._region), address, slot_bytes)))
        while not self._free.acquire(timeout=_ENDED_S):
            if self._stream.has_ended:
                raise OSError("the connection has ended")
        start = self._num_payloads % NUM_SLOTS * slot_bytes
        self._region.memory[start : start + len(data)] = np.frombuffer(data, dtype=np.uint8)
        self._num_payloads += 1
        self._on_way.append((message, len(data)))
        self._stream.write(encode(message, len(data)))

    def take(self, num_bytes: int, is_awaited: bool) -> Bytes | None:
        """See `Payloads`."""
        if self._theirs is None or num_bytes > self._theirs.slot_bytes:
            raise WireError(f"{num_bytes} bytes shall be read, but its memory is {self._theirs}")
        address = self._theirs.address + self._num_payloads % NUM_SLOTS * self._theirs.slot_bytes
        self._num_payloads += 1
        payload = self._read(address, num_bytes) if is_awaited else None
        self._stream.send(Taken())
        return payload

    def hear(self, message: Memory | Taken) -> None:
        """See `Payloads`."""
        if isinstance(message, Taken):
            if not self._on_way:
                raise WireError("it says that it has taken what was not sent")
            sent = self._on_way.popleft()
            self._free.release()
            self._stream.left(*sent)
        elif not self._stream.takes_payloads:
            raise WireError("it says where its memory is, but a prefill worker reads none")
        elif self._region is not None or not 0 < message.slot_bytes <= self._stream.slot_bytes:
            raise WireError(f"it says again where its memory is, or has slots of {message.slot_bytes} bytes")
        else:
            self._region = self._nixl.region(self._stream.slot_bytes)
            self._their_name = self._nixl.add(message.metadata)
            self._theirs = message

    def end(self) -> None:
        """See `Payloads`."""
        if self._their_name:
            self._nixl.remove(self._their_name)
        if self._region is not None:
            self._nixl.give_back(self._region)

    def _read(self, address: int, num_bytes: int) -> Bytes:
        assert self._region is not None
        deadline_s = time.monotonic() + self._stream.timeout_s
        into = self._region.memory[:num_bytes]
        read = self._nixl.start_read(self._their_name, address, into)
        try:
            while not self._nixl.has_read(read):
                if self._stream.has_ended or time.monotonic() > deadline_s:
                    self._region = None  # it may still be written to: nobody gets it again
                    raise OSError(f"its memory could not be read in {self._stream.timeout_s:g} s")
                time.sleep(LOOK_S)
        finally:
            self._nixl.end_read(read)
        return into.copy()


def _bindings() -> Any:
    """NIXL's classes, as its own Python classes use them: those have UCX's thread take a core."""
    raises = logging.raiseExceptions
    for name in MODULES:
        try:
            api = importlib.import_module(f"{name}._bindings")
        except ModuleNotFoundError:
            continue
        logging.raiseExceptions = raises  # importing it has switched this off, and has added a handler
        own = logging.getLogger("nixl")
        own.handlers.clear()
        own.propagate = True
        return api
    raise StartupError(
        "--disaggregation-transfer-backend nixl needs NIXL, which isn't installed: pip install --no-deps nixl-cu12, or "
        "nixl-cu13 with CUDA 13 (without --no-deps they bring torch, which they need only for torch's arrays)"
    )


@contextlib.contextmanager
def _translated(failure: str) -> Iterator[None]:
    """Raises `OSError` for what NIXL raises; its errors have no common type."""
    try:
        yield
    except Exception as error:
        raise OSError(f"NIXL {failure}: {str(error) or type(error).__name__}") from None
