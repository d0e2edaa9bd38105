"""How busy the engine is, in two shapes: the answer of GetLoads, and the record that goes with batches of cache events.

Both are made of one `Busy`, so that a gateway sees the same numbers whether it polls or subscribes. Pure functions of
the engine's latest load; service.py and kv_events.py call them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import fmean
from typing import Any

import msgspec
from smg_grpc_proto import sglang_scheduler_pb2 as pb
from smg_grpc_proto.generated import common_pb2

import jaxsgl
from jaxsgl.config.features import ALL_IN_ONE
from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.metrics.measurements import Rates
from jaxsgl.messages.replies import EngineInfo, Load

GIB = 1 << 30
SECTIONS = ("core", "memory", "spec", "lora", "disagg", "queues", "all")


@dataclass(frozen=True)
class Busy:
    """A replica or a rank at one moment, of which both shapes are made."""

    info: EngineInfo
    load: Load
    rates: Rates

    def of_rank(self, rank: int) -> Busy:
        """The part of a rank, of an engine that has several; how much of the rates is its own is not known."""
        count = self.info.num_ranks
        if count == 1:
            return self
        info = msgspec.structs.replace(
            self.info,
            max_running_requests=self.info.max_running_requests // count,
            kv_bytes=self.info.kv_bytes // count,
            weight_bytes=self.info.weight_bytes // count,
        )
        load = self.load
        if load.ranks:  # an engine that starts has none yet
            load = msgspec.structs.replace(load, **msgspec.structs.asdict(load.ranks[rank]))
        rates = replace(self.rates, busy_tokens_per_s=self.rates.busy_tokens_per_s / count)
        return Busy(info, load, rates)

    @property
    def token_usage(self) -> float:
        """Share of the KV pool that running requests need; pages that only the prefix cache holds count as free."""
        return self.load.used_tokens / self.info.limits.pool_tokens

    @property
    def utilization(self) -> float:
        """Share that is taken of the scarcer one of rows and KV slots."""
        return max(self.token_usage, self.load.num_running / self.info.max_running_requests)

    def queues(self) -> dict[str, int]:
        """Fields of both shapes' queue section. Paused requests are those that hold their pages during a pause."""
        load = self.load
        return {
            "waiting": load.num_waiting,
            "paused": load.num_running if load.paused else 0,
            "retracted": load.num_retracted,
        }

    def disaggregation(self) -> dict[str, Any]:
        """Fields of the disaggregation section, under SGLang's names of its queues."""
        transfer = self.load.transfer
        if transfer is None:
            return {"mode": ALL_IN_ONE}
        names = {
            "prefill": ("prefill_prealloc_queue_reqs", "prefill_inflight_queue_reqs"),
            "decode": ("decode_prealloc_queue_reqs", "decode_transfer_queue_reqs"),
        }[transfer.mode]
        counts = zip(names, (transfer.num_bootstrapping, transfer.num_moving), strict=True)
        return {"mode": transfer.mode, **dict(counts)}

    def speculative(self) -> dict[str, float]:
        """Fields of both shapes' section about drafts, of which no replica without speculation has any."""
        if not self.load.speculation.runs:
            return {}
        return {"accept_length": self.rates.accept_length, "accept_rate": self.rates.accept_rate}

    def memory(self) -> dict[str, float | int]:
        """Fields of both shapes' memory section. Graphs take none: compiled programs own no memory between steps."""
        return {
            "weight_gb": self.info.weight_bytes / GIB,
            "kv_cache_gb": self.info.kv_bytes / GIB,
            "token_capacity": self.info.limits.pool_tokens,
        }


def check_loads_request(request: pb.GetLoadsRequest, num_replicas: int) -> None:
    """Raises `InvalidRequest` for a rank or a section that doesn't exist."""
    if not 0 <= request.dp_rank < num_replicas:
        raise InvalidRequest(f"dp_rank is {request.dp_rank}, but must be 0 to {num_replicas - 1}: leave it out")
    for section in request.include:
        if section not in SECTIONS:
            raise InvalidRequest(f"include holds {section[:50]!r}, but sections are {', '.join(SECTIONS)}")


def loads_response(replicas: Sequence[Busy], include: Sequence[str], rank: int | None = None) -> pb.GetLoadsResponse:
    """Returns the loads of all replicas, given by rank, or of the replica `rank` alone.

    They hold the sections named by `include`, all if it is empty. Sections that this engine lacks stay empty.
    """
    loads = [_load(busy, number, include) for number, busy in enumerate(replicas) if rank in (None, number)]
    running, waiting = sum(load.num_running_reqs for load in loads), sum(load.num_waiting_reqs for load in loads)
    return pb.GetLoadsResponse(
        timestamp=datetime.now(UTC).isoformat(),
        version=f"jaxsgl-{jaxsgl.__version__}",
        dp_rank_count=len(replicas),
        loads=loads,
        aggregate=pb.AggregateMetrics(
            total_running_reqs=running,
            total_waiting_reqs=waiting,
            total_reqs=running + waiting,
            avg_token_usage=fmean(load.token_usage for load in loads),
            avg_throughput=fmean(load.gen_throughput for load in loads),
            avg_utilization=fmean(load.utilization for load in loads),
        ),
    )


def _load(busy: Busy, rank: int, include: Sequence[str]) -> pb.SchedulerLoad:
    load = _core(busy, rank)
    wanted = set(include or ("all",))
    everything = "all" in wanted
    if everything or "memory" in wanted:
        load.memory.CopyFrom(pb.MemoryMetrics(**busy.memory()))
    if (everything or "spec" in wanted) and (drafts := busy.speculative()):
        load.speculative.CopyFrom(pb.SpeculativeMetrics(**drafts))
    if everything or "disagg" in wanted:
        load.disaggregation.CopyFrom(pb.DisaggregationMetrics(**busy.disaggregation()))
    if everything or "queues" in wanted:
        load.queues.CopyFrom(pb.QueueMetrics(**busy.queues()))
    return load


def _core(busy: Busy, rank: int) -> pb.SchedulerLoad:
    load = busy.load
    return pb.SchedulerLoad(
        dp_rank=rank,
        num_running_reqs=load.num_running,
        num_waiting_reqs=load.num_waiting,
        num_total_reqs=load.num_running + load.num_waiting,
        num_waiting_uncached_tokens=load.waiting_tokens,  # at most: what is cached is known at admission
        num_used_tokens=load.used_tokens,
        max_total_num_tokens=busy.info.limits.pool_tokens,
        token_usage=busy.token_usage,
        gen_throughput=busy.rates.busy_tokens_per_s,
        cache_hit_rate=busy.rates.cache_hit_rate,
        utilization=busy.utilization,
        max_running_requests=busy.info.max_running_requests,
    )


def load_record(busy: Busy, sample: int, silence_s: float | None, telemetry: bool) -> common_pb2.EngineLoad:
    """Returns the record number `sample` of a stream.

    Args:
      busy: the engine now.
      sample: counts the records of a stream.
      silence_s: how long the engine has said nothing while requests are open, or None if none is open.
      telemetry: include the fields that only dashboards read.
    """
    load = busy.load
    record = common_pb2.EngineLoad(
        running_requests=load.num_running,
        waiting_requests=load.num_waiting,
        waiting_uncached_tokens=load.waiting_tokens,
        token_usage=busy.token_usage,
        active_token_usage=busy.token_usage,
        gen_throughput=busy.rates.busy_tokens_per_s,
        max_running_requests=busy.info.max_running_requests,
        sample=sample,
        engine_reports_steps=True,
    )
    if silence_s is not None:
        record.engine_silence_ms = int(silence_s * 1000)
    if telemetry:
        record.cache_hit_rate = busy.rates.cache_hit_rate
        record.num_used_tokens = load.used_tokens
        record.max_total_num_tokens = busy.info.limits.pool_tokens
        record.memory.CopyFrom(common_pb2.EngineMemory(**busy.memory()))
        record.queues.CopyFrom(common_pb2.EngineQueues(**busy.queues()))
        if drafts := busy.speculative():
            record.speculative.CopyFrom(common_pb2.EngineSpeculative(**drafts))
        record.disaggregation.mode = busy.disaggregation()["mode"]
    return record
