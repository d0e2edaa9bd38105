"""The metrics of the host tier (`Load.host`), as rows for exposition.py: names, help, value and labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from jaxsgl.frontend.metrics import Metrics, Snapshot

HostValue: TypeAlias = float | Mapping[Any, float]
HostRow: TypeAlias = tuple[tuple[str, ...], str, Callable[[Metrics, Snapshot], HostValue], tuple[str, ...]]

HOST_ROWS: tuple[HostRow, ...] = (
    (
        ("sglang:hicache_host_total_tokens",),
        "Tokens of KV that host memory holds at most (--host-kv-gib).",
        lambda _, engine: engine.load.host.total_tokens,
        (),
    ),
    (
        ("sglang:hicache_host_used_tokens",),
        "Tokens of KV in host memory.",
        lambda _, engine: engine.load.host.used_tokens,
        (),
    ),
    (
        ("jaxsgl:host_kv_tokens_total",),
        "Tokens of KV that were written to host memory, loaded from it, evicted from it, or found no room in it.",
        lambda _, engine: {
            "written": engine.load.host.written_tokens,
            "loaded": engine.load.host.loaded_tokens,
            "evicted": engine.load.host.evicted_tokens,
            "not_written": engine.load.host.not_written_tokens,
        },
        ("what",),
    ),
    (
        ("jaxsgl:host_kv_loads_given_up_total",),
        "Loads from host memory that were stopped, so that the request computed the rest.",
        lambda _, engine: engine.load.host.given_up,
        (),
    ),
)
