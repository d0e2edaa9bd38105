"""Figures for people, in the form that users of SGLang's bench_serving know, and what failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from bench.serving.answer import Answer

WIDTH = 50
HEAD = (
    ("Backend:", "backend"),
    ("Traffic request rate:", "request_rate"),
    ("Max request concurrency:", "max_concurrency"),
    ("Successful requests:", "completed"),
    ("Failed requests:", "failed"),
    ("Answers shorter than asked for:", "short_answers"),
    ("Benchmark duration (s):", "duration"),
    ("Total input tokens:", "total_input_tokens"),
    ("Total cached input tokens:", "total_cached_tokens"),
    ("Total generated tokens:", "total_output_tokens"),
    ("Request throughput (req/s):", "request_throughput"),
    ("Request goodput (req/s):", "request_goodput"),
    ("Input token throughput (tok/s):", "input_throughput"),
    ("Output token throughput (tok/s):", "output_throughput"),
    ("Total token throughput (tok/s):", "total_throughput"),
    ("Output tokens per chunk:", "tokens_per_chunk"),
    ("Concurrency:", "concurrency"),
    ("This program's share of a core:", "load_cpu"),
)
LATENCIES = (
    ("End-to-End Latency", "E2E Latency", "e2e_latency"),
    ("Time to First Token", "TTFT", "ttft"),
    ("Time per Output Token (excl. 1st token)", "TPOT", "tpot"),
    ("Inter-Token Latency", "ITL", "itl"),
)
STATISTICS = ("mean", "median", "std", "p90", "p95", "p99", "max")
MAX_ERRORS = 5  # kinds that are listed


def table(result: dict[str, Any]) -> str:
    """The figures."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    lines += [
        _line(title, result[name]) for title, name in HEAD if name != "request_goodput" or result[name] is not None
    ]
    for title, short, name in LATENCIES:
        lines.append(f"{title:-^{WIDTH}}")
        values = ((statistic, result.get(f"{statistic}_{name}_ms")) for statistic in STATISTICS)
        lines += [_line(f"{what.capitalize()} {short} (ms):", value) for what, value in values if value is not None]
    return "\n".join([*lines, "=" * WIDTH])


def failures(answers: Sequence[Answer]) -> str:
    """Errors, the most frequent first; empty if there is none."""
    counts = Counter(answer.error for answer in answers if answer.error)
    lines = [f"{count:,} x {error}" for error, count in counts.most_common(MAX_ERRORS)]
    left = len(counts) - len(lines)
    return "\n".join([*lines, *([f"and {left} other errors: see --output-details"] if left > 0 else [])])


def _line(title: str, value: Any) -> str:
    shown = "not set" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{title:<40} {shown:<9}".rstrip()
