"""The metrics of KV beyond the pool, as rows for exposition.py: the host tier (`Load.host`), transfers between prefill
and decode servers (`Load.transfer`)."""

from __future__ import annotations

from collections.abc import Callable

from jaxsgl.frontend.metric_rows import Row, Value
from jaxsgl.frontend.metrics import Metrics, Snapshot


def _on_the_way(mode: str, attribute: str) -> Callable[[Metrics, Snapshot], Value]:
    """A number of the `TransferLoad`; 0 on a server of another mode than `mode` ("": of either)."""

    def value(_: Metrics, engine: Snapshot) -> Value:
        transfer = engine.load.transfer
        return 0 if transfer is None or mode not in ("", transfer.mode) else getattr(transfer, attribute)

    return value


KV_ROWS = (
    Row(
        ("sglang:hicache_host_total_tokens",),
        "Tokens of KV that host memory holds at most (--host-kv-gib).",
        lambda _, engine: engine.load.host.total_tokens,
    ),
    Row(
        ("sglang:hicache_host_used_tokens",),
        "Tokens of KV in host memory.",
        lambda _, engine: engine.load.host.used_tokens,
    ),
    Row(
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
    Row(
        ("jaxsgl:host_kv_loads_given_up_total",),
        "Loads from host memory that were stopped, so that the request computed the rest.",
        lambda _, engine: engine.load.host.given_up,
    ),
    Row(
        ("sglang:num_prefill_prealloc_queue_reqs",),
        "Requests of a prefill server that wait for their other leg, or for staging memory.",
        _on_the_way("prefill", "num_bootstrapping"),
    ),
    Row(
        ("sglang:num_prefill_inflight_queue_reqs",),
        "Requests of a prefill server whose pages are sent.",
        _on_the_way("prefill", "num_moving"),
    ),
    Row(
        ("sglang:num_decode_prealloc_queue_reqs",),
        "Requests of a decode server that wait for their other leg, or for staging memory.",
        _on_the_way("decode", "num_bootstrapping"),
    ),
    Row(
        ("sglang:num_decode_transfer_queue_reqs",),
        "Requests of a decode server whose pages are received.",
        _on_the_way("decode", "num_moving"),
    ),
    Row(
        ("jaxsgl:kv_staged_bytes",),
        "Host memory that KV pages on their way between servers take, or are promised.",
        _on_the_way("", "staged_bytes"),
    ),
    Row(
        ("jaxsgl:kv_moved_bytes_total",),
        "Bytes of KV pages that a prefill server has sent, or a decode server received.",
        _on_the_way("", "moved_bytes"),
    ),
    Row(
        ("jaxsgl:kv_hidden_bytes_total",),
        "Bytes of KV pages that a prefill server sent before their prompt was computed.",
        _on_the_way("prefill", "hidden_bytes"),
    ),
)
