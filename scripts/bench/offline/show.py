"""The figures, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Figures = Mapping[str, Any]


def table(report: Figures) -> str:
    """Lines of text."""
    split, waste, model, load = report["time_split"], report["waste"], report["model"], report["requests"]
    lines = [
        f"{model['model_path']}, {model['dtype']}, on {report['device']['kind']}: {load['count']} requests of "
        f"{load['prompt_tokens']:,} tokens got {load['output_tokens']:,} in {report['duration_s']:.1f} s",
        f"tokens/s: {report['output_tokens_per_s']:,.1f} output, {report['total_tokens_per_s']:,.1f} total",
        f"time: device busy {split['busy']:.1%}, idle {split['idle']:.1%}; host exposed {split['host_exposed']:.1%}",
        *(_kind(kind, told, report["duration_s"]) for kind, told in report["steps"].items()),
        "padding: " + ", ".join(f"{name} {share:.1%}" for name, share in waste.items() if share is not None),
        *_roofline(report["roofline"]),
        *_host(report["host"]),
        "host by decode bucket, ms: "
        + ", ".join(f"{size}: {told['wall_ms']:.2f}" for size, told in report["host_by_rows"].items()),
        f"recording took {report['recording']['loop_us']:.0f} us of the loop and "
        f"{report['recording']['watching_us']:.0f} us of another thread a step; stamps are "
        f"{report['recording']['seen_late_us']:.0f} us late ({report['recording']['seen_late_p99_us']:.0f} at p99)",
        *_buckets(report["step_ms"]),
    ]
    return "\n".join(lines)


def _kind(kind: str, told: Figures, duration_s: float) -> str:
    each_ms, share = 1e3 * told["device_s"] / told["count"], told["device_s"] / duration_s
    return f"  {kind}: {told['count']:,} steps of {each_ms:.2f} ms, {share:.1%} of the time"


def _roofline(told: Figures) -> list[str]:
    return [
        f"roofline: {told['fraction']:.1%} ({told['fraction_of_busy']:.1%} while busy), measured here: "
        f"{told['bytes_per_s'] / 1e9:.1f} GB/s, {told['flops_per_s'] / 1e12:.3f} TFLOP/s",
        *(
            f"  {kind}: {shares['fraction']:.1%}; {shares['of_bytes_per_s']:.1%} of the bytes/s, "
            f"{shares['of_flops_per_s']:.1%} of the FLOP/s"
            for kind, shares in told["by_kind"].items()
        ),
    ]


def _host(told: Figures) -> list[str]:
    which = "" if told["at_running"] is None else f" of {told['at_running']} rows"
    if not told["turns"]:
        return [f"host: no decode step{which}"]
    wall, cpu, phases = told["wall_ms"], told["cpu_ms"], told["phases_ms"].items()
    return [
        f"host per decode step{which}: {wall['median']:.2f} ms ({wall['p99']:.2f} at p99), of which CPU "
        f"{cpu['median']:.2f} ({cpu['p99']:.2f}); {told['turns']:,} turns",
        "  " + ", ".join(f"{name} {each['median']:.3f} ({each['p99']:.3f})" for name, each in phases),
    ]


def _buckets(by_bucket: Figures) -> list[str]:
    columns = ("count", "tokens", "mean", "median", "p90", "p99", "max")
    return [
        f"{'step, ms':40}" + "".join(f"{name:>10}" for name in columns),
        *(
            f"{bucket:40}{told['count']:10,}" + "".join(f"{told[name]:10,.2f}" for name in columns[1:])
            for bucket, told in by_bucket.items()
        ),
    ]
