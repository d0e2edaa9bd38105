"""What the engine is meant to reach on a GPU, and whether its sections show it. Pure functions of their results.

Shares of the roofline are those of `bench_offline.py`: bytes and FLOPs that steps need at least, over what the same run
measured. Sampling's share is of a sampled decode step: the forward program (the offline benchmark's step) and the
sampling program (bench_sampler.py) behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.kernels.criteria import Verdict

SHAPES = ("qwen3-0.6b", "qwen3-8b")
LEAST_SHARE, GOAL_SHARE = 0.60, 0.85  # of the roofline
MOST_IDLE = 0.05
ROWS, VOCAB = 256, 151_936
MOST_SAMPLING = 0.05  # of a step
LEAST_RATIO = 3.0  # to transformers' best

Results = Mapping[str, Any]


def judge_engine(results: Results) -> list[Verdict]:
    """Every criterion; "not measured" where its section didn't run."""
    verdicts = []
    for shape in SHAPES:
        run = results["offline"].get(shape)
        verdicts += [_judge_roofline(shape, run), _judge_idle(shape, run), _judge_sampling(shape, run, results)]
    return [*verdicts, _judge_peers(results.get("peers"))]


def offline_lines(results: Results) -> list[str]:
    """A line for each run of the offline benchmark."""
    return [f"- {name}: {_offline_line(run)}" for name, run in results["offline"].items()]


def _offline_line(run: Results) -> str:
    waste = ", ".join(f"{name} {share:.1%}" for name, share in run["waste"].items() if share is not None)
    host = run["host"]["wall_ms"].get("median")
    told = f"host {host:.2f} ms per decode step; " if host is not None else ""
    return (
        f"{run['output_tokens_per_s']:,.0f} output tokens/s, {run['total_tokens_per_s']:,.0f} in all; {told}"
        f"padding: {waste}; ready after {run['model']['warmup_s']:.0f} s"
    )


def _judge_roofline(shape: str, run: Results | None) -> Verdict:
    what = f"offline, {shape}: at least {LEAST_SHARE:.0%} of the roofline (goal {GOAL_SHARE:.0%})"
    if run is None:
        return Verdict(what, None, "not measured")
    share, busy = run["roofline"]["fraction"], run["roofline"]["fraction_of_busy"]
    return Verdict(what, share >= LEAST_SHARE, f"{share:.1%} ({busy:.1%} while the device was busy)")


def _judge_idle(shape: str, run: Results | None) -> Verdict:
    what = f"offline, {shape}: device idle less than {MOST_IDLE:.0%}"
    if run is None:
        return Verdict(what, None, "not measured")
    idle, exposed = run["time_split"]["idle"], run["time_split"]["host_exposed"]
    return Verdict(what, idle < MOST_IDLE, f"{idle:.1%} (host exposed {exposed:.1%})")


def _judge_sampling(shape: str, run: Results | None, results: Results) -> Verdict:
    what = f"{shape}: sampling less than {MOST_SAMPLING:.0%} of a step of {ROWS} rows, vocabulary {VOCAB:,}"
    sampling_ms = results.get("sampling", {}).get("ms", {}).get(f"{ROWS} x {VOCAB}")
    buckets = run["step_ms"].items() if run is not None else ()
    step_ms = next((told["median"] for name, told in buckets if name.startswith(f"decode T={ROWS} ")), None)
    if sampling_ms is None or step_ms is None:
        return Verdict(what, None, "not measured")
    share = sampling_ms / (sampling_ms + step_ms)
    return Verdict(what, share < MOST_SAMPLING, f"{share:.1%}: {sampling_ms:.2f} ms beside {step_ms:.2f} ms")


def _judge_peers(peers: Results | None) -> Verdict:
    what = f"{SHAPES[0]}: at least {LEAST_RATIO:.0f} times transformers' best"
    if peers and peers["settings"]["model"] != SHAPES[0]:
        peers = None
    ratios = {
        name: told["ratio_of_best_jaxsgl"]["median"]
        for name, told in (peers["contenders"] if peers else {}).items()
        if name.startswith("transformers") and told["ratio_of_best_jaxsgl"]
    }
    if not ratios:
        absent = "; ".join(f"{name}: {why}" for name, why in (peers or {}).get("could_not_run", {}).items())
        return Verdict(what, None, f"not measured{': ' + absent if absent else ''}")
    best = min(ratios, key=lambda name: ratios[name])
    return Verdict(what, ratios[best] >= LEAST_RATIO, f"{ratios[best]:.1f} times {best}")
