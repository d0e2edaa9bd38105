"""One subscriber of cache events: a snapshot or the batches that it missed, then news; the engine's load beside them.

Owns what this subscriber has seen. The load goes with every batch, and alone when it changed without one or when
nothing has been said for a while. service.py runs it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

from smg_grpc_proto.generated import common_pb2

from jaxsgl.errors import EngineUnavailable
from jaxsgl.frontend.engine_client import EngineClient
from jaxsgl.frontend.grpc.sglang.kv_log import KvLog
from jaxsgl.frontend.grpc.sglang.loads import Busy, load_record
from jaxsgl.messages import Load

LOOK_S = 0.1  # so often the load is looked at, and told alone if it changed
HEARTBEAT_S = 1.0


class KvStream:
    """What one subscriber is sent. `busy` tells how busy the engine is."""

    def __init__(self, log: KvLog, engine: EngineClient, busy: Callable[[], Busy], loads_at_once: bool) -> None:
        """`loads_at_once`: the subscriber understands loads before the first batch."""
        self._log = log
        self._engine = engine
        self._busy = busy
        self._loads_at_once = loads_at_once
        self._seen = 0
        self._num_records = 0
        self._told: Load | None = None
        self._told_s = 0.0
        self._busy_since_s: float | None = None

    async def batches(self, start: int) -> AsyncGenerator[common_pb2.KvEventBatch, None]:
        """All there is to send, without end. Raises `OutOfRange`, `DataLoss` and `EngineUnavailable`."""
        if start:
            self._seen = self._log.after(start)
        else:
            async for batch in self._snapshot():
                yield batch
        while True:
            while (batch := self._log.get(self._seen + 1)) is not None:
                self._seen += 1
                yield self._with_load(batch)
            if (load_only := self._load_only()) is not None:
                yield load_only
            await self._log.news(LOOK_S)

    async def _snapshot(self) -> AsyncGenerator[common_pb2.KvEventBatch, None]:
        """What is cached now. A busy engine may be a while, so the load is told meanwhile."""
        asking = asyncio.ensure_future(self._log.snapshot())
        try:
            while not asking.done():
                if self._loads_at_once and (load_only := self._load_only()) is not None:
                    yield load_only
                self._check_engine()
                await asyncio.wait({asking}, timeout=LOOK_S)
            for chunk in asking.result():
                self._seen = chunk.sequence_number
                yield self._with_load(chunk)
        finally:
            asking.cancel()

    def _load_only(self) -> common_pb2.KvEventBatch | None:
        """A batch that repeats the last number, if there is something to say."""
        self._check_engine()
        due_s = HEARTBEAT_S if self._engine.load == self._told else LOOK_S
        if time.monotonic() - self._told_s < due_s:
            return None
        batch = common_pb2.KvEventBatch(sequence_number=self._seen, timestamp=time.time(), dp_rank=0)
        batch.load.CopyFrom(self._record(telemetry=True))
        batch.load.load_only = True
        return batch

    def _with_load(self, batch: common_pb2.KvEventBatch) -> common_pb2.KvEventBatch:
        """A copy, since the log's batches are everybody's."""
        copy = common_pb2.KvEventBatch()
        copy.CopyFrom(batch)
        copy.load.CopyFrom(self._record(telemetry=not self._num_records))
        return copy

    def _record(self, telemetry: bool) -> common_pb2.EngineLoad:
        busy = self._busy()
        self._num_records += 1
        self._told, self._told_s = busy.load, time.monotonic()
        return load_record(busy, self._num_records, self._silence_s(), telemetry)

    def _silence_s(self) -> float | None:
        """Seconds since the engine said something, or was given something to do."""
        if not self._engine.num_running:
            self._busy_since_s = None
            return None
        now_s = time.monotonic()
        self._busy_since_s = self._busy_since_s or now_s
        return now_s - max(self._busy_since_s, self._engine.heard_s)

    def _check_engine(self) -> None:
        """Ends the stream of a server that stops. One that is only stuck goes on: the records tell of its silence."""
        if self._engine.refusal is not None and self._engine.stuck is None:
            raise EngineUnavailable(self._engine.refusal)
