"""The figures of a recorded run, as JSON: seconds, tokens, and shares of 1. docs/performance.md defines them.

Time: the device is busy with a step from the end of its `submit`, or of the step before if that is later, until the
step is ready. Launching therefore counts as the host's time if nothing else runs meanwhile. All other time of a run is
idle. In part of it the host waited (the step was ready, but the loop had not woken up yet); the rest is host exposed:
the host computed while the device had nothing to do.

Work: what a step must do at least, from real lengths; padding, masks and second readings are the engine's loss. Bytes:
each weight once (an embedding that is not the output head isn't read), and K and V of all tokens of each sequence.
FLOPs: 2 for each weight of the layers and new token, 2 for each weight of the head and sequence, and 4 * head_dim for
each query head and token that it sees. The same rules as in `bench.kernels.cases`, for whole models.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from bench.offline.recording import Recording, Step, Turn
from bench.roofline import Roofline, Work
from bench.simulation.cost import num_params
from jaxsgl.engine.engine import Engine
from jaxsgl.messages.orders import FromEngine
from jaxsgl.messages.replies import Replies
from jaxsgl.requests.request import Request

_PERCENTILES = {"median": 50, "p90": 90, "p99": 99, "max": 100}
PHASES = ("receive", "launch", "submit", "collect", "encode", "rest")


def figures(
    recording: Recording,
    work: ModelWork,
    roofline: Roofline,
    requests: Sequence[Request],
    news: Sequence[FromEngine],
    at_running: int | None = None,
) -> dict[str, Any]:
    """All figures of one run.

    Args:
      recording: stamps of the run.
      work: work of the model.
      roofline: ceilings measured on this machine.
      requests: the requests that were served.
      news: messages that a front end would have received.
      at_running: the host's time is that of decode steps with this many rows; None for all decode steps.
    """
    steps, turns = recording.steps, recording.turns
    begin_s, end_s = turns[0].begin_s, turns[-1].sent_s
    duration_s = end_s - begin_s
    replies = [message for message in news if isinstance(message, Replies)]
    load = replies[-1].load
    prompt_tokens = sum(len(request.prompt_ids) for request in requests)
    output_tokens = sum(len(reply.token_ids) for message in replies for reply in message.replies)
    busy = busy_intervals((step.submitted_s, step.ready_s) for step in steps)
    waits = [(step.read_from_s, step.read_s) for step in steps if step.waited_s]
    parts = split((begin_s, end_s), busy, waits)
    return {
        "duration_s": duration_s,
        "requests": {
            "count": len(requests),
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "cached_prompt_tokens": load.totals.cached_prompt_tokens,
            "retractions": load.totals.retractions,
            "recompiles": load.totals.recompiles,
        },
        "output_tokens_per_s": output_tokens / duration_s,
        "total_tokens_per_s": (prompt_tokens + output_tokens) / duration_s,
        "time_split": {
            "busy": parts.busy_s / duration_s,
            "idle": parts.idle_s / duration_s,
            "host_exposed": parts.host_exposed_s / duration_s,
            "busy_s": parts.busy_s,
            "idle_s": parts.idle_s,
            "host_exposed_s": parts.host_exposed_s,
        },
        "steps": _by_kind(steps, busy),
        "waste": waste(steps),
        "roofline": _roofline(steps, busy, work, roofline, duration_s),
        "host": host(turns, at_running),
        "host_by_rows": _host_by_rows(turns),
        "step_ms": _by_bucket(steps, busy),
        "recording": {
            "loop_us": 1e6 * (sum(turn.recording_s for turn in turns) + _between_s(turns)) / len(steps),
            "watching_us": 1e6 * recording.watching_cpu_s / len(steps),
        },
    }


def waste(steps: Iterable[Step]) -> dict[str, float | None]:
    """Padded over real, less 1: rows of decode steps, tokens of all other steps; None if there was no such step."""
    sizes = {"decode_rows": (0, 0), "extend_tokens": (0, 0)}
    for step in steps:
        name = "decode_rows" if step.kind == "decode" else "extend_tokens"
        real, padded = sizes[name]
        sizes[name] = real + step.num_tokens, padded + step.bucket.padded_tokens
    return {name: padded / real - 1 if real else None for name, (real, padded) in sizes.items()}


def host(turns: Iterable[Turn], at_running: int | None = None) -> dict[str, Any]:
    """The host's time in turns that launch a decode step and read another one, without the waiting for the device.

    In milliseconds: wall time, CPU time of the loop's thread, and wall time by phases, without that of recording.
    """
    mine = [turn for turn in turns if _decodes(turn, at_running)]
    phases = [_phases(turn) for turn in mine]
    return {
        "at_running": at_running,
        "turns": len(mine),
        "wall_ms": _summary([sum(each.values()) for each in phases]),
        "cpu_ms": _summary([turn.end_cpu_s - turn.begin_cpu_s for turn in mine]),
        "phases_ms": {name: _summary([each[name] for each in phases]) for name in PHASES},
    }


def _decodes(turn: Turn, rows: int | None) -> bool:
    step = turn.submitted
    return bool(step and step.kind == "decode" and turn.read and rows in (None, step.num_seqs))


def _phases(turn: Turn) -> dict[str, float]:
    """Seconds of a turn that launched a step and read one, by what the host did.

    launch: schedule, and build the batch. submit: hand it to the device. collect: take the tokens, make the replies and
    the load. rest: checks between turns.
    """
    assert turn.submit_s is not None and turn.submitted_s is not None
    collect_s = turn.send_s - turn.submitted_s - turn.recording_s - sum(step.waited_s for step in turn.read)
    return {
        "receive": turn.received_s - turn.begin_s,
        "launch": turn.submit_s - turn.received_s,
        "submit": turn.submitted_s - turn.submit_s,
        "collect": collect_s,
        "encode": turn.sent_s - turn.send_s,
        "rest": turn.end_s - turn.sent_s,
    }


def _between_s(turns: Sequence[Turn]) -> float:
    """Seconds that recording took between turns. (Neither counts turns that did nothing.)"""
    return sum(max(0.0, next_.begin_s - turn.end_s) for turn, next_ in itertools.pairwise(turns))


def _host_by_rows(turns: Sequence[Turn]) -> dict[str, Any]:
    """The medians of `host` for each decode bucket."""
    by_size: dict[int, list[Turn]] = {}
    for turn in turns:
        if _decodes(turn, None) and turn.submitted:
            by_size.setdefault(turn.submitted.bucket.num_seqs, []).append(turn)
    found = {size: host(mine) for size, mine in sorted(by_size.items())}
    return {
        str(size): {"turns": told["turns"], **{name: told[name]["median"] for name in ("wall_ms", "cpu_ms")}}
        for size, told in found.items()
    }


def _by_kind(steps: Sequence[Step], busy: Sequence[Interval]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for step, (begin_s, end_s) in zip(steps, busy, strict=True):
        told = found.setdefault(step.kind, {"count": 0, "device_s": 0.0, "real": 0, "padded": 0})
        told["count"] += 1
        told["device_s"] += end_s - begin_s
        told["real"] += step.num_tokens
        told["padded"] += step.bucket.padded_tokens
    return found


def _by_bucket(steps: Sequence[Step], busy: Sequence[Interval]) -> dict[str, Any]:
    """By bucket: the number of steps, their real tokens on average, and milliseconds of the device."""
    found: dict[str, list[tuple[float, int]]] = {}
    for step, (begin_s, end_s) in zip(steps, busy, strict=True):
        found.setdefault(str(step.bucket), []).append((end_s - begin_s, step.num_tokens))
    return {
        bucket: {"count": len(mine), "tokens": sum(n for _, n in mine) / len(mine), **_summary([s for s, _ in mine])}
        for bucket, mine in sorted(found.items())
    }


def _roofline(
    steps: Sequence[Step], busy: Sequence[Interval], work: ModelWork, roofline: Roofline, duration_s: float
) -> dict[str, Any]:
    """Ideal over real time: of the whole run, of the time that the device was busy, and by kind of step."""
    by_kind: dict[str, dict[str, float]] = {}
    for step, (begin_s, end_s) in zip(steps, busy, strict=True):
        least = work.of_step(step)
        told = by_kind.setdefault(step.kind, dict.fromkeys(("ideal_s", "device_s", "num_bytes", "flops"), 0.0))
        for name, value in (("ideal_s", roofline.floor_s(least)), ("device_s", end_s - begin_s)):
            told[name] += value
        told["num_bytes"] += least.num_bytes
        told["flops"] += least.flops
    ideal_s = sum(told["ideal_s"] for told in by_kind.values())
    busy_s = sum(told["device_s"] for told in by_kind.values())
    return {
        "fraction": ideal_s / duration_s,
        "fraction_of_busy": ideal_s / busy_s,
        "ideal_s": ideal_s,
        "bytes_per_s": roofline.bytes_per_s,
        "flops_per_s": roofline.flops_per_s,
        "by_kind": {kind: _shares(told, roofline) for kind, told in by_kind.items()},
    }


def _shares(told: Mapping[str, float], roofline: Roofline) -> dict[str, float]:
    """Shares for one kind of step: of the ideal time, and of each ceiling alone."""
    device_s = told["device_s"]
    return {
        "fraction": told["ideal_s"] / device_s,
        "of_bytes_per_s": told["num_bytes"] / device_s / roofline.bytes_per_s,
        "of_flops_per_s": told["flops"] / device_s / roofline.flops_per_s,
    }


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles in milliseconds; empty without values."""
    if not seconds:
        return {}
    values = np.percentile(1e3 * np.array(seconds), list(_PERCENTILES.values()))
    return {"mean": 1e3 * float(np.mean(seconds)), **dict(zip(_PERCENTILES, values.tolist(), strict=True))}


Interval: TypeAlias = tuple[float, float]


@dataclass(frozen=True)
class TimeSplit:
    """Seconds of a run. `busy_s + idle_s` is the whole run; `host_exposed_s` is a part of `idle_s`."""

    busy_s: float
    idle_s: float
    host_exposed_s: float


def busy_intervals(submitted_and_ready: Iterable[Interval]) -> list[Interval]:
    """When the device worked on each step. It runs steps one after the other, in the order given."""
    busy: list[Interval] = []
    last_ready_s = float("-inf")
    for submitted_s, ready_s in submitted_and_ready:
        ready_s = max(ready_s, last_ready_s)
        busy.append((min(max(submitted_s, last_ready_s), ready_s), ready_s))
        last_ready_s = ready_s
    return busy


def split(run: Interval, busy: Sequence[Interval], waits: Sequence[Interval]) -> TimeSplit:
    """Splits `run`. `busy` and `waits` (the host waits for a step) are each in order and free of overlaps."""
    gaps = list(zip([run[0], *(end for _, end in busy)], [*(begin for begin, _ in busy), run[1]], strict=True))
    idle_s = sum(end - begin for begin, end in gaps)
    return TimeSplit(run[1] - run[0] - idle_s, idle_s, idle_s - _overlap_s(gaps, waits))


def _overlap_s(ones: Sequence[Interval], others: Sequence[Interval]) -> float:
    """Seconds that lie in both lists; each list is in order."""
    total_s, i, k = 0.0, 0, 0
    while i < len(ones) and k < len(others):
        total_s += max(0.0, min(ones[i][1], others[k][1]) - max(ones[i][0], others[k][0]))
        if ones[i][1] <= others[k][1]:
            i += 1
        else:
            k += 1
    return total_s


@dataclass(frozen=True)
class ModelWork:
    """Sizes of a model, from which the work of a step follows.

    Attributes:
      layer_params, head_params: numbers of weights in all layers, and in the output head.
      weight_bytes: bytes of one weight.
      kv_token_bytes: bytes of K and V of one token in all layers.
      pair_flops: FLOPs for a token that sees another one, in all heads and layers.
    """

    layer_params: int
    head_params: int
    weight_bytes: int
    kv_token_bytes: int
    pair_flops: int

    @classmethod
    def of(cls, engine: Engine) -> ModelWork:
        """The numbers of the model that `engine` holds."""
        arch, capacity = engine.arch, engine.capacity
        kv_tokens = capacity.pool_tokens + capacity.page_size  # the dummy page too
        pair_flops = 4 * arch.num_layers * arch.num_heads * arch.head_dim
        width = jnp.dtype(engine.info.dtype).itemsize
        return cls(*num_params(arch), width, engine.info.kv_bytes // kv_tokens, pair_flops)

    def of_step(self, step: Step) -> Work:
        """The least work that `step` can do."""
        lengths, new = step.lengths.astype(np.int64), step.new.astype(np.int64)
        pairs = (new * lengths - new * (new - 1) // 2).sum()
        weights = step.bucket.num_steps * (self.layer_params + self.head_params)
        several = step.bucket.num_steps > 1  # each of them reads K and V again, and yields tokens
        num_bytes = self.weight_bytes * weights + self.kv_token_bytes * (pairs if several else lengths.sum())
        products = 2 * (self.layer_params * step.num_tokens)
        products += 2 * self.head_params * (step.num_tokens if several else step.num_seqs)
        return Work(int(num_bytes), int(products + self.pair_flops * pairs))
