"""The file of `--auto-buckets`, and which shapes an engine's flags ask for (`buckets_of`).

The file is what `scripts/bench_buckets.py --json` writes: a JSON object, of which only this part is read, so that one
can be written by hand:

    {"suggested": {"decode_buckets": [1, 4, 16, 32], "extend_buckets": [16, 128, 512]}}

decode_buckets: sequences of decode programs; extend_buckets: tokens of extend programs; both ascending, 1 and more.
Sizes that no batch can reach, since fewer requests run or chunks are shorter, are left out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.batch.capacity import Capacity
from jaxsgl.config.engine import EngineConfig
from jaxsgl.errors import ConfigError


def buckets_of(config: EngineConfig, capacity: Capacity) -> BucketSet:
    """The shapes that `config` asks for. Raises `ConfigError` if they can't be read or don't reach the capacity."""
    scheduling, steps = config.scheduling, config.decode_steps
    alone = capacity.whole_prompts and not scheduling.enable_mixed_chunk  # a prompt beyond --max-prefill-tokens
    shared_tokens = scheduling.max_prefill_tokens if alone else None
    if config.auto_buckets is None:
        return BucketSet.derive(capacity, config.decode_buckets, config.extend_buckets, steps, shared_tokens)
    path = Path(config.auto_buckets)
    suggested = _suggested(path)
    decode = _sizes(path, suggested, "decode_buckets", capacity.num_rows, "requests at once", "--max-running-requests")
    extend = _sizes(
        path, suggested, "extend_buckets", capacity.max_extend_tokens, "tokens in a step", "--chunked-prefill-size"
    )
    return BucketSet.derive(capacity, decode, extend, steps, shared_tokens)


def _suggested(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--auto-buckets {path} can't be read as JSON: {error}") from error
    suggested = found.get("suggested") if isinstance(found, dict) else None
    if not isinstance(suggested, dict):
        raise ConfigError(
            f'--auto-buckets {path} holds no object "suggested": name a file that scripts/bench_buckets.py --json wrote'
        )
    return suggested


def _sizes(path: Path, suggested: dict[str, Any], name: str, largest: int, what: str, flag: str) -> tuple[int, ...]:
    """The sizes in the file, which reach `largest`."""
    sizes = suggested.get(name)
    if not isinstance(sizes, list) or not sizes or not all(type(size) is int and size >= 1 for size in sizes):
        raise ConfigError(f"--auto-buckets {path}: {name} is {sizes!r}, but must be a list of numbers of 1 and more")
    sizes = sorted(set(sizes))
    if sizes[-1] < largest:
        raise ConfigError(
            f"--auto-buckets {path} was made for {sizes[-1]} {what}, but there may be {largest}: run "
            f"scripts/bench_buckets.py with the flags of this server, or use {flag} {sizes[-1]}"
        )
    return tuple(sizes)
