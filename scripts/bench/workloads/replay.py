"""Recorded traces in which hashes stand for blocks of prompt tokens: same id, same tokens.

Mooncake's (github.com/kvcache-ai/Mooncake): timestamps in milliseconds, 512 tokens an id. Qwen-Bailian's
(github.com/alibaba-edu/qwen-bailian-usagetraces-anon): seconds, 16 tokens. What was answered is not in them, so a later
turn finds the KV of earlier prompts only, not that of answers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.workloads.prompts import Ask
from bench.workloads.traces import UNIQUE

FORMATS = {"mooncake": (512, 1e-3), "bailian": (16, 1.0)}  # tokens of a block, seconds of a timestamp's unit


def replayed(path: Path, form: str, num_prompts: int, slowdown: float = 1.0) -> list[Ask]:
    """The first `num_prompts` requests in order of time; the first one comes at 0.

    Raises:
      ValueError: a line that isn't such a request; the message names it.
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
    if left:  # a tail without an id: shared with nobody
        seeds.append(UNIQUE + number)
        lengths.append(left)
    return Ask(float(fields["timestamp"]) * unit_s, seeds, lengths, max(1, int(fields["output_length"])))
