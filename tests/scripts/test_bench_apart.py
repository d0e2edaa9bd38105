"""Prefill and decode apart beside servers that do both: what is sent, and what is made of the answers."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest
from bench.figures import apart as script
from bench.fleet import Fleet

from jaxsgl.bench.backend import Answer, Served, Turn

LOAD = script.Load(64, num_alone=2, num_streams=2, stream_tokens=101, num_bursts=3, burst_size=2, busy=0.5)
FIRST_S = 0.01


class PlayedFleet:
    """Answers after 10 ms, then every `gap_s`, and ten times as late at each tenth token; and moves bytes."""

    def __init__(self, name: str, gap_s: float, moves: bool) -> None:
        self.name, self.gap_s, self.moves = name, gap_s, moves
        self.prompts: list[list[int]] = []
        self.num_moved = 0

    def cpu_s(self) -> float:
        return float(len(self.prompts))

    def transfer(self) -> dict[str, Any] | None:
        return {"mode": "prefill", "moved_bytes": self.num_moved, "hidden_bytes": self.num_moved // 4 * 3}

    async def describe(self) -> Served:
        return Served(None, None)

    async def generate(self, turn: Turn, answer: Answer) -> None:
        self.prompts.append(turn.prompt_ids())
        self.num_moved += 4 * len(self.prompts[-1]) if self.moves else 0
        answer.sent_s = time.monotonic()
        now_s = answer.sent_s + FIRST_S
        for number in range(1, turn.output_len + 1):
            answer.add(now_s, "a", number)
            now_s += self.gap_s * (10 if number % 10 == 0 else 1)
        answer.count(len(self.prompts[-1]), turn.output_len, 0)
        answer.finish(complete=True)
        await asyncio.sleep(self.gap_s * turn.output_len / 10)

    async def flush_cache(self) -> None:
        raise AssertionError("prompts differ anyway")

    async def close(self) -> None:
        pass


def test_fleets_get_the_same_prompts_in_turns_and_are_compared() -> None:
    played = [PlayedFleet("apart", 0.001, True), PlayedFleet("both in each", 0.004, False)]
    fleets = cast(list[Fleet], played)
    results = asyncio.run(script.measure(fleets, LOAD, 2, lambda fleet: cast(PlayedFleet, fleet)))
    long = [[tuple(prompt) for prompt in fleet.prompts if len(prompt) == LOAD.long_tokens] for fleet in played]
    per_round = LOAD.num_alone + LOAD.num_bursts * LOAD.burst_size
    assert long[0] == long[1] and len(set(long[0][-2 * per_round :])) == 2 * per_round  # none finds another's prefix
    for figures, gap_s in zip(results, (0.001, 0.004), strict=True):
        assert figures.ttfts_s == pytest.approx([FIRST_S] * 4)
        assert len(figures.burst_ttfts_s) == 12 and len(figures.itls_s) >= 400
        assert figures.percentile_itl_ms(50) == pytest.approx(1e3 * gap_s)
        assert figures.percentile_itl_ms(99) == pytest.approx(1e4 * gap_s)
        assert figures.alone_cpu_s == 4.0 and figures.burst_cpu_s >= 2 * (per_round - 2) + 4
    assert results[0].hidden_share("alone") == results[0].hidden_share("bursts") == 0.75
    assert results[1].hidden_share("alone") is None
    text = script.report(results)
    assert "4.0 times lower apart" in text and "75% of" in text
