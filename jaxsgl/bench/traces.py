"""Traces of requests, made up from a seed or read from a recorded file. Each yields `Ask`s in order of arrival.

Made-up traces replay exactly from their seed; lengths are uniform in n x range_ratio .. n. In recorded traces, hashes
stand for blocks of prompt tokens: the same id means the same tokens. Mooncake's (github.com/kvcache-ai/Mooncake) have
timestamps in milliseconds and 512 tokens per id. Qwen-Bailian's (github.com/alibaba-edu/qwen-bailian-usagetraces-anon)
have seconds and 16 tokens. Outputs are not recorded, so a later turn finds the KV of earlier prompts but not that of
earlier outputs. Knows no scheduler and no clock.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxsgl.bench.requests import OUTPUT, Ask
from jaxsgl.config.flags import flag
from jaxsgl.errors import ConfigError

T = TypeVar("T")
UNIQUE = 1 << 62  # seeds from here on belong to one request; smaller ones may be shared


@dataclass(frozen=True)
class TraceConfig:
    """Settings of a trace. A flag that is left out takes the default of its trace, see `DEFAULTS`."""

    trace: str = flag(
        "random",
        "random; shared-prefix: groups with a system prompt of their own; chat: conversations, each turn extends the "
        "one before; bursts: short requests, and bursts of long ones; mooncake, bailian: --trace-file",
        choices=("random", "shared-prefix", "chat", "bursts", "mooncake", "bailian"),
    )
    trace_file: str | None = flag(None, "JSON lines with timestamp, input_length, output_length, hash_ids")
    slowdown: float = flag(1.0, "factor on the timestamps of --trace-file")
    num_prompts: int = flag(1000, "requests in all, every turn counted; of --trace-file at most")
    request_rate: float | None = flag(
        None, "Poisson arrivals a second (of conversations in chat, of short requests in bursts); inf: all at once"
    )
    input_len: int | None = flag(None, "tokens of a prompt, a question, or what a turn adds")
    output_len: int | None = flag(None, "tokens of an output")
    range_ratio: float | None = flag(None, "lengths are uniform from this share of the length to the length")
    system_len: int | None = flag(None, "tokens of a system prompt (shared-prefix: of each group; chat: of all)")
    groups: int = flag(64, "groups of shared-prefix")
    turns: int = flag(8, "turns of a conversation at most, in chat")
    think_s: float = flag(10.0, "mean seconds from an answer to the next turn, in chat")
    long_len: int = flag(16_384, "prompt tokens of the long requests, in bursts")
    burst_size: int = flag(4, "long requests that come at once, in bursts")
    burst_every_s: float = flag(3.0, "seconds between bursts")

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len", "groups", "turns", "long_len", "burst_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}, but must be 1 and more")
        for name in ("request_rate", "slowdown", "burst_every_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}, but must be more than 0")
        if self.think_s < 0:
            raise ConfigError(f"--think-s is {self.think_s}, but must be 0 and more")


DEFAULTS: dict[str, dict[str, float]] = {  # the first two are those of SGLang's bench_serving
    "random": {"input_len": 1024, "output_len": 1024},
    "shared-prefix": {"input_len": 128, "output_len": 256, "range_ratio": 1.0, "system_len": 2048},
    "chat": {"input_len": 256, "output_len": 256, "system_len": 512, "request_rate": 1.0},
    "bursts": {"input_len": 512, "output_len": 256, "request_rate": 4.0},
}
COMMON_DEFAULTS: dict[str, float] = {"range_ratio": 0.0, "request_rate": float("inf")}


def made_up(config: TraceConfig, seed: int) -> Iterator[Ask]:
    """Yields the trace that `config` names, with `num_prompts` requests."""
    defaults: dict[str, Any] = COMMON_DEFAULTS | DEFAULTS[config.trace]
    left_out = {name: value for name, value in defaults.items() if getattr(config, name) is None}
    full = replace(config, **left_out)
    return MAKERS[config.trace](_Dice(full, seed), full)


def _filled(value: T | None) -> T:
    assert value is not None, "made_up fills in the defaults"
    return value


class _Dice:
    """Draws arrivals and lengths, and gives out seeds for pieces that no other request has."""

    def __init__(self, config: TraceConfig, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self._config = config
        self._seeds = itertools.count(UNIQUE)

    def input_len(self) -> int:
        return self._length(_filled(self._config.input_len))

    def output_len(self) -> int:
        return self._length(_filled(self._config.output_len))

    def seed(self) -> int:
        return next(self._seeds)

    def arrivals(self) -> Iterator[float]:
        now_s = 0.0
        while True:
            now_s += float(self.rng.exponential(1 / _filled(self._config.request_rate)))
            yield now_s

    def _length(self, most: int) -> int:
        return int(self.rng.integers(max(1, int(most * _filled(self._config.range_ratio))), most, endpoint=True))


def _random(dice: _Dice, config: TraceConfig) -> Iterator[Ask]:
    for at_s in itertools.islice(dice.arrivals(), config.num_prompts):
        yield Ask(at_s, (dice.seed(),), (dice.input_len(),), dice.output_len())


def _shared_prefix(dice: _Dice, config: TraceConfig) -> Iterator[Ask]:
    groups = dice.rng.permutation(np.arange(config.num_prompts) % config.groups).tolist()
    for at_s, group in zip(dice.arrivals(), groups, strict=False):
        lengths = (_filled(config.system_len), dice.input_len())
        yield Ask(at_s, (group, dice.seed()), lengths, dice.output_len())


def _chat(dice: _Dice, config: TraceConfig) -> Iterator[Ask]:
    left = config.num_prompts
    for at_s in dice.arrivals():
        if not left:
            return
        num_turns = min(int(dice.rng.integers(1, config.turns, endpoint=True)), left)
        left -= num_turns
        yield _conversation(dice, config, at_s, num_turns)


def _conversation(dice: _Dice, config: TraceConfig, at_s: float, num_turns: int) -> Ask:
    """The first turn, linked to the later ones; each prompt holds all earlier prompts and outputs."""
    seeds: tuple[int, ...] = (0,)
    lengths: tuple[int, ...] = (_filled(config.system_len),)
    first = last = Ask(at_s, (), (), 0)
    for turn in range(num_turns):
        if turn:
            last.then = Ask(float(dice.rng.exponential(config.think_s)), (), (), 0)
            seeds, lengths, last = (*seeds, OUTPUT), (*lengths, last.output_len), last.then
        seeds, lengths = (*seeds, dice.seed()), (*lengths, dice.input_len())
        last.seeds, last.lengths, last.output_len = seeds, lengths, dice.output_len()
    return first


def _bursts(dice: _Dice, config: TraceConfig) -> Iterator[Ask]:
    """Short requests mixed with bursts of long ones; both count in `num_prompts`.

    The first burst comes after one interval.
    """
    short = (Ask(at_s, (dice.seed(),), (dice.input_len(),), dice.output_len()) for at_s in dice.arrivals())
    long = (
        Ask(number * config.burst_every_s, (dice.seed(),), (config.long_len,), dice.output_len())
        for number in itertools.count(1)
        for _ in range(config.burst_size)
    )
    return itertools.islice(heapq.merge(short, long, key=lambda ask: ask.at_s), config.num_prompts)


MAKERS = {"random": _random, "shared-prefix": _shared_prefix, "chat": _chat, "bursts": _bursts}


FORMATS = {"mooncake": (512, 1e-3), "bailian": (16, 1.0)}  # tokens per block, seconds per unit of a timestamp


def replayed(path: Path, form: str, num_prompts: int, slowdown: float = 1.0) -> list[Ask]:
    """The first `num_prompts` requests of a recorded trace in order of time; the first one arrives at 0.

    Raises:
      ValueError: a line is not such a request; the message names it.
    """
    block, unit_s = FORMATS[form]
    asks = []
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    asks.append(_ask(json.loads(line), number, block, unit_s * slowdown))
                except (KeyError, TypeError, ValueError) as error:
                    raise ValueError(
                        f"{path}, line {number}: {error!r}; a line must be a JSON object with timestamp, input_length, "
                        "output_length and hash_ids"
                    ) from error
    asks = sorted(asks, key=lambda ask: ask.at_s)[:num_prompts]
    start_s = asks[0].at_s if asks else 0.0
    for ask in asks:
        ask.at_s -= start_s
    return asks


def _ask(fields: dict[str, Any], number: int, block: int, unit_s: float) -> Ask:
    left = int(fields["input_length"])
    if left < 1:
        raise ValueError(f"input_length is {left}, but must be 1 and more")
    seeds, lengths = [], []
    for hash_id in fields["hash_ids"][: -(-left // block)]:
        seeds.append(int(hash_id) % UNIQUE)  # ids may have 64 bits
        lengths.append(min(block, left))
        left -= lengths[-1]
    if left:  # a tail without an id is shared with no other request
        seeds.append(UNIQUE + number)
        lengths.append(left)
    return Ask(float(fields["timestamp"]) * unit_s, seeds, lengths, max(1, int(fields["output_length"])))
