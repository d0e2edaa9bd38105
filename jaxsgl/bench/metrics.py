"""The figures of SGLang's bench_serving, computed from answers by its definitions and names, and their table.

TTFT: first text - send. E2E: last event - send. TPOT: (E2E - TTFT) / (output tokens - 1), of answers with more than
one token. ITL: gap between chunks, divided by the tokens of the later one. Concurrency: sum of E2E / duration. Goodput
(vLLM's): answers per second that meet all of the given limits. Failed requests count only by number and error.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxsgl.bench.backend import Answer
from jaxsgl.bench.run import Outcome

PERCENTILES = (90, 95, 99)
LIMITS = {"ttft": "ttft_s", "tpot": "tpot_s", "e2el": "e2e_s"}  # what goodput may limit


def parse_goodput(text: str) -> dict[str, float]:
    """Reads "ttft:500 tpot:50 e2el:5000", milliseconds. Raises `ValueError`."""
    limits: dict[str, float] = {}
    for part in text.split():
        name, _, limit = part.partition(":")
        if name not in LIMITS or not (limit_ms := _number_in(limit)) > 0:
            forms = ", ".join(f"{known}:MS" for known in LIMITS)
            raise ValueError(f"--goodput has {part!r}, but must be of {forms}, each with milliseconds above 0")
        limits[name] = limit_ms
    return limits


def _number_in(text: str) -> float:
    """NaN: `text` is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def summary(outcome: Outcome, goodput: Mapping[str, float]) -> dict[str, Any]:
    """Totals, rates and latencies of a run; `goodput` are the limits in milliseconds that `parse_goodput` returns."""
    answers, duration_s = outcome.answers, outcome.duration_s
    good = [answer for answer in answers if not answer.error]
    per_s = 1 / duration_s if duration_s else 0.0
    inputs, outputs = sum(answer.input_len for answer in good), sum(answer.output_len for answer in good)
    itls_s = list(itertools.chain.from_iterable(answer.itls_s for answer in good))
    kept = sum(keeps(answer, goodput) for answer in good)
    return {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "short_answers": sum(answer.output_len < answer.asked_len for answer in good),
        "total_input_tokens": inputs,
        "total_cached_tokens": sum(answer.cached_len for answer in good),
        "total_output_tokens": outputs,
        "request_throughput": len(good) * per_s,
        "request_goodput": kept * per_s if goodput else None,
        "input_throughput": inputs * per_s,
        "output_throughput": outputs * per_s,
        "total_throughput": (inputs + outputs) * per_s,
        **spread("e2e_latency", [answer.e2e_s for answer in good]),
        **spread("ttft", [answer.ttft_s for answer in good]),
        **spread("tpot", [answer.tpot_s for answer in good if answer.output_len > 1]),
        **spread("itl", itls_s),
        "max_itl_ms": 1e3 * max(itls_s, default=0.0),
        "tokens_per_chunk": outputs / max(sum(len(answer.chunks) for answer in good), 1),
        "concurrency": sum(answer.e2e_s for answer in good) * per_s,
        "load_cpu": outcome.cpu_s * per_s,
        "accept_length": None,  # of speculative decoding; servers don't report it in their answers
    }


def details(answers: Sequence[Answer]) -> dict[str, list[Any]]:
    """Figures of each request in the order of sending; zeros for failed requests."""
    return {
        "input_lens": [answer.input_len for answer in answers],
        "output_lens": [0 if answer.error else answer.output_len for answer in answers],
        "ttfts": [0.0 if answer.error else answer.ttft_s for answer in answers],
        "itls": [[] if answer.error else answer.itls_s for answer in answers],
        "generated_texts": [answer.text for answer in answers],
        "errors": [answer.error for answer in answers],
    }


def keeps(answer: Answer, limits: Mapping[str, float]) -> bool:
    """Whether an answer is within all limits (milliseconds)."""
    return all(1e3 * getattr(answer, LIMITS[name]) <= limit_ms for name, limit_ms in limits.items())


def spread(name: str, seconds: Iterable[float]) -> dict[str, float]:
    """Mean, median, std and percentiles in milliseconds, as numpy defines them; all 0 without values."""
    ms = 1e3 * np.array(list(seconds) or [0.0])
    percentiles = zip(PERCENTILES, np.percentile(ms, PERCENTILES).tolist(), strict=True)
    return {
        f"mean_{name}_ms": float(ms.mean()),
        f"median_{name}_ms": float(np.median(ms)),
        f"std_{name}_ms": float(ms.std()),
        **{f"p{percent}_{name}_ms": value for percent, value in percentiles},
    }


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
MAX_ERRORS = 5  # different errors that are listed


def table(result: dict[str, Any]) -> str:
    """The figures as text, in the form that users of SGLang's bench_serving know."""
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
    """The errors of failed requests, the most frequent first; empty if there is none."""
    counts = Counter(answer.error for answer in answers if answer.error)
    lines = [f"{count:,} x {error}" for error, count in counts.most_common(MAX_ERRORS)]
    left = len(counts) - len(lines)
    return "\n".join([*lines, *([f"and {left} other errors: see --output-details"] if left > 0 else [])])


def _line(title: str, value: Any) -> str:
    shown = "not set" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{title:<40} {shown:<9}".rstrip()
