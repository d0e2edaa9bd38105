"""`ROWS`: the metrics of requests, steps, the engine and its KV: names, help, and where the number is found.

Where a metric of SGLang or vLLM means the same as ours, ours goes by that name as well, so that their dashboards show
it; what only we have starts with `jaxsgl:`. Measures nothing itself; exposition.py shows the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from jaxsgl.config.hosts import SILENCE_S
from jaxsgl.frontend.metrics.measurements import Histogram, Metrics, Replica, Snapshot
from jaxsgl.messages.replies import HostState, RankLoad

Value: TypeAlias = float | Histogram | Mapping[Any, float] | Mapping[Any, Histogram]


@dataclass(frozen=True)
class Row:
    """One metric under all its names. Those of counters end in `_total`.

    Attributes:
      value: a number, a histogram, or one of either for each value of the `labels` (a tuple for several).
      of_histograms: whether the values for labels, of which there may be none yet, are histograms.
    """

    names: tuple[str, ...]
    help: str
    value: Callable[[Metrics, Snapshot], Value]
    labels: tuple[str, ...] = ()
    of_histograms: bool = False


def of_each(engine: Snapshot, value: Callable[[Replica], float]) -> dict[str, float]:
    """Returns a value of each replica, by its rank."""
    return {str(rank): value(replica) for rank, replica in enumerate(engine.replicas)}


def of_ranks(engine: Snapshot, value: Callable[[RankLoad], float]) -> dict[str, float]:
    """Returns a value of each rank of an engine with data-parallel attention, by its number; none of any other."""
    return {str(rank): value(load) for rank, load in enumerate(engine.load.ranks)}


def of_hosts(engine: Snapshot, value: Callable[[HostState], float]) -> dict[str, float]:
    """Returns a value of each host that shares the model, by its rank; none on one host."""
    return {str(host.rank): value(host) for replica in engine.replicas for host in replica.hosts}


def _on_the_way(mode: str, attribute: str) -> Callable[[Metrics, Snapshot], Value]:
    """A number of the `TransferLoad`; 0 on a server of another mode than `mode` ("": of either)."""

    def value(_: Metrics, engine: Snapshot) -> Value:
        transfer = engine.load.transfer
        return 0 if transfer is None or mode not in ("", transfer.mode) else getattr(transfer, attribute)

    return value


ROWS = (
    Row(
        ("sglang:num_running_reqs", "vllm:num_requests_running"),
        "Samples that hold a row of the batch.",
        lambda front_end, engine: engine.load.num_running,
    ),
    Row(
        ("sglang:num_queue_reqs", "vllm:num_requests_waiting"),
        "Samples that wait for admission.",
        lambda front_end, engine: engine.load.num_waiting,
    ),
    Row(
        ("sglang:num_retracted_reqs",),
        "Of those that wait, samples that were taken back to the queue.",
        lambda front_end, engine: engine.load.num_retracted,
    ),
    Row(
        ("sglang:num_paused_reqs",),
        "Samples that hold a row while generation is paused.",
        lambda front_end, engine: engine.load.num_running if engine.load.paused else 0,
    ),
    Row(
        ("jaxsgl:paused",),
        "1 while generation is paused, else 0.",
        lambda front_end, engine: int(engine.load.paused),
    ),
    Row(
        ("jaxsgl:replica_up",),
        "1 while the replica takes requests, 0 while it is stuck and once it is dead.",
        lambda front_end, engine: of_each(engine, lambda replica: int(replica.is_up)),
        labels=("dp_rank",),
    ),
    Row(
        ("jaxsgl:replica_running_reqs",),
        "Samples that hold a row of the replica's batch.",
        lambda front_end, engine: of_each(engine, lambda replica: replica.load.num_running),
        labels=("dp_rank",),
    ),
    Row(
        ("jaxsgl:replica_queue_reqs",),
        "Samples that wait for admission at the replica.",
        lambda front_end, engine: of_each(engine, lambda replica: replica.load.num_waiting),
        labels=("dp_rank",),
    ),
    Row(
        ("jaxsgl:replica_token_usage",),
        "Share of the replica's KV pool that running samples need, 0 to 1.",
        lambda front_end, engine: of_each(engine, lambda replica: replica.token_usage),
        labels=("dp_rank",),
    ),
    Row(
        ("jaxsgl:replica_prompt_tokens_total",),
        "Prompt tokens of the samples that the replica admitted.",
        lambda front_end, engine: of_each(engine, lambda replica: replica.load.totals.prompt_tokens),
        labels=("dp_rank",),
    ),
    Row(
        ("jaxsgl:replica_cached_tokens_total",),
        "Of those, the ones found in the replica's prefix cache.",
        lambda front_end, engine: of_each(engine, lambda replica: replica.load.totals.cached_prompt_tokens),
        labels=("dp_rank",),
    ),
    Row(
        ("jaxsgl:rank_running_reqs",),
        "Samples that hold a row of the rank, with --enable-dp-attention.",
        lambda front_end, engine: of_ranks(engine, lambda rank: rank.num_running),
        labels=("dp_rank",),
    ),
    Row(
        ("jaxsgl:rank_queue_reqs",),
        "Samples that wait for admission in the rank.",
        lambda front_end, engine: of_ranks(engine, lambda rank: rank.num_waiting),
        labels=("dp_rank",),
    ),
    Row(
        ("jaxsgl:rank_used_tokens",),
        "KV slots of the rank in pages that running samples need.",
        lambda front_end, engine: of_ranks(engine, lambda rank: rank.used_tokens),
        labels=("dp_rank",),
    ),
    Row(
        ("jaxsgl:host_up",),
        "1 for each host that shares the model and has given a sign of life lately; one that is lost ends all.",
        lambda front_end, engine: of_hosts(engine, lambda host: int(host.silent_s < SILENCE_S)),
        labels=("node_rank",),
    ),
    Row(
        ("jaxsgl:host_silent_seconds",),
        "Seconds since the host gave a sign of life, as this host sees it; one comes every second.",
        lambda front_end, engine: of_hosts(engine, lambda host: host.silent_s),
        labels=("node_rank",),
    ),
    Row(
        ("jaxsgl:host_lag_calls",),
        "Calls of the engine that host 0 has sent and the host hadn't played at its last sign of life.",
        lambda front_end, engine: of_hosts(engine, lambda host: host.lag_calls),
        labels=("node_rank",),
    ),
    Row(
        ("jaxsgl:admission_stopped_total",),
        "Steps at which a request had to wait on, by what had no room: pool, batch, step or its adapter.",
        lambda front_end, engine: {
            "tokens": engine.load.totals.short_of_tokens,
            "rows": engine.load.totals.short_of_rows,
            "chunk": engine.load.totals.short_of_chunk,
            "adapters": engine.load.totals.short_of_adapters,
        },
        labels=("reason",),
    ),
    Row(
        ("jaxsgl:encoded_images_total",),
        "Images and frame pairs that the vision tower has encoded; an image whose embeddings are kept isn't again.",
        lambda front_end, engine: engine.load.totals.encoded_images,
    ),
    Row(
        ("jaxsgl:restored_images_total",),
        "Images and frame pairs whose embeddings came back from host memory, so that they were not encoded again.",
        lambda front_end, engine: engine.load.totals.restored_images,
    ),
    Row(
        ("jaxsgl:failed_requests_total",),
        "Requests that were ended because the work for them raised an exception; more than 0 is a bug.",
        lambda front_end, engine: engine.load.totals.failed_requests,
    ),
    Row(
        ("sglang:num_used_tokens",),
        "KV slots that running samples own or lock.",
        lambda front_end, engine: engine.load.used_tokens,
    ),
    Row(
        ("jaxsgl:num_cached_tokens",),
        "KV slots that only the prefix cache holds; given up when needed.",
        lambda front_end, engine: engine.load.cached_tokens,
    ),
    Row(
        ("sglang:max_total_num_tokens",),
        "KV slots of the pool.",
        lambda front_end, engine: engine.pool_tokens,
    ),
    Row(
        ("sglang:token_usage", "vllm:kv_cache_usage_perc"),
        "Share of the KV pool that running samples need, 0 to 1.",
        lambda front_end, engine: engine.token_usage,
    ),
    Row(
        ("sglang:cache_hit_rate",),
        "Share of prompt tokens found in the prefix cache, over the last 10 s in which any came.",
        lambda front_end, engine: engine.rates.cache_hit_rate,
    ),
    Row(
        ("sglang:gen_throughput",),
        "Output tokens per second over the last 10 s.",
        lambda front_end, engine: engine.rates.output_tokens_per_s,
    ),
    Row(
        ("sglang:prompt_tokens_total", "vllm:prompt_tokens_total", "vllm:prefix_cache_queries_total"),
        "Prompt tokens of admitted samples.",
        lambda front_end, engine: engine.load.totals.prompt_tokens,
    ),
    Row(
        ("sglang:cached_tokens_total", "vllm:prefix_cache_hits_total"),
        "Of the prompt tokens, those found in the prefix cache.",
        lambda front_end, engine: engine.load.totals.cached_prompt_tokens,
    ),
    Row(
        ("sglang:generation_tokens_total", "vllm:generation_tokens_total"),
        "Output tokens.",
        lambda front_end, engine: engine.load.totals.output_tokens,
    ),
    Row(
        ("vllm:spec_decode_num_drafts_total",),
        "Runs of drafts that steps verified: of each step one for each sample that had drafts.",
        lambda front_end, engine: engine.load.speculation.runs,
    ),
    Row(
        ("vllm:spec_decode_num_draft_tokens_total",),
        "Drafts that steps verified.",
        lambda front_end, engine: engine.load.speculation.draft_tokens,
    ),
    Row(
        ("vllm:spec_decode_num_accepted_tokens_total",),
        "Of those, the ones that were accepted.",
        lambda front_end, engine: engine.load.speculation.accepted_tokens,
    ),
    Row(
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total",),
        "Drafts that were accepted, by their place in the run, from 0 on.",
        lambda front_end, engine: {str(place): n for place, n in enumerate(engine.load.speculation.accepted_at)},
        labels=("position",),
    ),
    Row(
        ("sglang:spec_accept_length",),
        "Tokens that a sample got of a step that verified drafts for it, over the last 10 s in which any did.",
        lambda front_end, engine: engine.rates.accept_length,
    ),
    Row(
        ("sglang:spec_accept_rate",),
        "Share of the drafts that were accepted, over the last 10 s in which any were verified.",
        lambda front_end, engine: engine.rates.accept_rate,
    ),
    Row(
        ("jaxsgl:spec_plain_decodes_total",),
        "Tokens that were decoded without drafts for samples that may have some, by the reason.",
        lambda front_end, engine: engine.load.speculation.plain_decodes,
        labels=("reason",),
    ),
    Row(
        ("sglang:num_retracted_requests_total", "vllm:num_preemptions_total"),
        "Running samples that were taken back to the queue.",
        lambda front_end, engine: engine.load.totals.retractions,
    ),
    Row(
        ("sglang:num_requests_total",),
        "Samples that ended.",
        lambda front_end, engine: front_end.finished.total(),
    ),
    Row(
        ("vllm:request_success_total",),
        "Samples that ended, by the reason.",
        lambda front_end, engine: front_end.finished,
        labels=("finished_reason",),
    ),
    Row(
        ("sglang:num_aborted_requests_total",),
        "Samples that were aborted or left by their client.",
        lambda front_end, engine: front_end.finished["abort"],
    ),
    Row(
        ("jaxsgl:request_errors_total",),
        "Requests that were refused or ended with an error, by its name.",
        lambda front_end, engine: front_end.errors,
        labels=("error",),
    ),
    Row(
        ("sglang:queue_time_seconds", "vllm:request_queue_time_seconds"),
        "From a sample's arrival in the engine to its first admission.",
        lambda front_end, engine: front_end.queue_s,
    ),
    Row(
        ("vllm:request_prefill_time_seconds",),
        "From a sample's first admission to its first token.",
        lambda front_end, engine: front_end.prefill_s,
    ),
    Row(
        ("vllm:request_decode_time_seconds",),
        "From a sample's first token to its last; aborted ones left out.",
        lambda front_end, engine: front_end.decode_s,
    ),
    Row(
        ("vllm:request_inference_time_seconds",),
        "From a sample's first admission to its last token; aborted ones left out.",
        lambda front_end, engine: front_end.inference_s,
    ),
    Row(
        ("sglang:per_stage_req_latency_seconds",),
        "Time that a sample spends in each stage.",
        lambda front_end, engine: {
            "request_process": front_end.prepare_s,
            "prefill_waiting": front_end.queue_s,
            "prefill_forward": front_end.prefill_s,
            "decode_forward": front_end.decode_s,
        },
        labels=("stage",),
        of_histograms=True,
    ),
    Row(
        ("sglang:time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
        "From submission to a sample's first token.",
        lambda front_end, engine: front_end.first_token_s,
    ),
    Row(
        ("sglang:inter_token_latency_seconds", "vllm:inter_token_latency_seconds"),
        "Between tokens of a sample.",
        lambda front_end, engine: front_end.inter_token_s,
    ),
    Row(
        ("sglang:e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds"),
        "From submission to a sample's end; aborted ones left out.",
        lambda front_end, engine: front_end.request_s,
    ),
    Row(
        ("sglang:prompt_tokens_histogram", "vllm:request_prompt_tokens"),
        "Prompt tokens of a sample that ended; aborted ones left out.",
        lambda front_end, engine: front_end.prompt_tokens,
    ),
    Row(
        ("sglang:generation_tokens_histogram", "vllm:request_generation_tokens"),
        "Output tokens of a sample that ended; aborted ones left out.",
        lambda front_end, engine: front_end.output_tokens,
    ),
    Row(
        ("jaxsgl:step_seconds",),
        "How long steps take, by kind and padded shape.",
        lambda front_end, engine: engine.step_histograms(),
        labels=("kind", "bucket"),
        of_histograms=True,
    ),
    Row(
        ("sglang:forward_execution_seconds_total",),
        "Time that steps took, by their kind.",
        lambda front_end, engine: engine.step_seconds(),
        labels=("category",),
    ),
    Row(("jaxsgl:steps_total",), "Steps launched.", lambda front_end, engine: engine.load.totals.steps),
    Row(
        ("jaxsgl:decode_rows_total",),
        "Sequences of decode steps.",
        lambda front_end, engine: engine.load.totals.decode_rows,
    ),
    Row(
        ("jaxsgl:decode_rows_padded_total",),
        "Rows of the programs that ran decode steps, padding included.",
        lambda front_end, engine: engine.load.totals.decode_rows_padded,
    ),
    Row(
        ("jaxsgl:extend_tokens_total",),
        "Tokens of extend steps.",
        lambda front_end, engine: engine.load.totals.extend_tokens,
    ),
    Row(
        ("jaxsgl:extend_tokens_padded_total",),
        "Tokens of the programs that ran extend steps, padding included.",
        lambda front_end, engine: engine.load.totals.extend_tokens_padded,
    ),
    Row(
        ("jaxsgl:kernel_backend",),
        "1 for each kernel that the start tested: what it computes, its backend, and what came of it.",
        lambda front_end, engine: engine.kernels(),
        labels=("op", "backend", "verdict"),
    ),
    Row(
        ("jaxsgl:recompiles_total",),
        "Programs compiled while serving; more than 0 is a bug.",
        lambda front_end, engine: engine.load.totals.recompiles,
    ),
    Row(
        ("jaxsgl:leaks_total",),
        "Pages, rows and locks that the runtime check found lost or in two places; more than 0 is a bug.",
        lambda front_end, engine: engine.load.totals.leaks,
    ),
    Row(
        ("jaxsgl:log_lines_dropped_total",),
        "Log lines that were dropped because nothing read standard error.",
        lambda front_end, engine: front_end.log_lines["dropped"],
    ),
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
