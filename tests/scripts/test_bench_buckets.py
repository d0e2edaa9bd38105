"""The suggestion is the best list, padding is counted right, and a server accepts what the script writes."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from bench.buckets import Choice, Costs, best_lists, best_pair, candidate_sizes, padding, steps_of, suggested, unpadded

from jaxsgl.batch.buckets import BucketSet, Capacity, buckets_of
from jaxsgl.bench.requests import Lengths, random_jobs
from jaxsgl.config.engine import EngineConfig
from tests.engine.conftest import MODEL
from tests.scripts.running import run_script

SIZES = Capacity(page_size=16, num_pages=400, num_rows=16, context_length=512, max_extend_tokens=128, vocab_size=1000)
ON_CPU = Capacity(16, 5000, num_rows=32, context_length=2048, max_extend_tokens=512, vocab_size=1000)
ON_GPU = Capacity(16, 40_000, num_rows=256, context_length=2048, max_extend_tokens=2048, vocab_size=1000)


@pytest.mark.parametrize("seed", range(6))
def test_lists_are_as_cheap_as_trying_all_of_them_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    candidates = sorted(rng.choice(np.arange(1, 30), 7, replace=False).tolist())
    demand = {
        (int(rng.integers(1, candidates[-1], endpoint=True)), name): int(rng.integers(1, 50))
        for name in ("few", "many", "many", "few")
    }
    times = {(size, name): float(rng.uniform(0.1, 2)) for size in candidates for name in ("few", "many")}
    prices = {size: float(rng.uniform(0, 20)) for size in candidates}

    def cost(sizes: tuple[int, ...]) -> float:
        steps = sum(
            count * times[min(size for size in sizes if size >= tokens), name]
            for (tokens, name), count in demand.items()
        )
        return steps + sum(prices[size] for size in sizes)

    found = best_lists(demand, candidates, lambda size, name: times[size, name], prices.__getitem__, most=7)
    assert len(found) == 7
    for num, choice in enumerate(found, start=1):
        every = [(*some, candidates[-1]) for some in itertools.combinations(candidates[:-1], num - 1)]
        assert choice.cost_s == pytest.approx(min(map(cost, every)))
        assert choice.sizes in every and cost(choice.sizes) == pytest.approx(choice.cost_s)


def test_the_cheapest_pair_within_the_number_of_programs_is_taken() -> None:
    decode = [Choice(9.0, (8,)), Choice(5.0, (2, 8)), Choice(4.0, (1, 2, 8))]
    extend = [Choice(3.0, (64,)), Choice(1.0, (16, 64))]

    def total(most: int | None) -> tuple[Choice, ...]:
        return best_pair(decode, extend, lambda *lists: sum(map(len, lists)), most)

    assert total(None) == (decode[2], extend[1])
    assert total(4) == (decode[1], extend[1])
    assert total(3) == (decode[1], extend[0])
    with pytest.raises(ValueError, match="--max-programs is 1, but one size of each kind takes 2"):
        total(1)


def test_candidates_reach_the_largest_size_and_hold_it_once() -> None:
    assert candidate_sizes(1, 4, 10) == [1, 2, 4, 8, 10]
    assert candidate_sizes(16, 16, 48) == [16, 32, 48]
    assert candidate_sizes(1, 4, 1) == [1]
    assert candidate_sizes(16, 16, 2048)[-3:] == [1920, 1984, 2048]


def test_padding_is_what_counting_gives() -> None:
    buckets = BucketSet.derive(SIZES, decode_sizes=(4, 16), extend_sizes=(32, 128))
    found = padding(Counter({("decode", 3, 3): 2, ("decode", 16, 16): 1, ("extend", 20, 1): 1}), buckets)
    assert found["decode"] == {"steps": 3, "real": 22, "padded": 24, "waste": pytest.approx(2 / 22)}
    assert found["extend"] == {"steps": 1, "real": 20, "padded": 32, "waste": pytest.approx(12 / 20)}


def test_steps_of_a_workload_hold_each_of_its_tokens_once() -> None:
    jobs = random_jobs(30, Lengths(10, 200), Lengths(5, 60), 1000)
    for buckets in (unpadded(SIZES), BucketSet.derive(SIZES)):
        steps = steps_of(jobs, EngineConfig(), SIZES, buckets)
        tokens = {
            kind: sum(n * count for (of, n, _), count in steps.items() if of == kind) for kind in ("decode", "extend")
        }
        assert tokens["extend"] == sum(len(job.prompt_ids) for job in jobs)
        assert tokens["decode"] == sum(job.output_len - 1 for job in jobs)


@pytest.mark.parametrize("capacity", [ON_CPU, ON_GPU], ids=["cpu", "gpu"])
def test_default_sizes_pad_little_in_the_offline_benchmark(capacity: Capacity) -> None:
    jobs = random_jobs(256, Lengths(100, 1024), Lengths(100, 1024), 1000)
    buckets = BucketSet.derive(capacity)
    found = padding(steps_of(jobs, EngineConfig(), capacity, buckets), buckets)
    assert found["decode"]["waste"] < 0.15
    assert found["extend"]["waste"] < 0.12


def costs(buckets: BucketSet, compile_s: float) -> Costs:
    """A step takes a millisecond a token; a program `compile_s`."""
    step_rows = [{"kind": "decode", "tokens": size, "seqs": size, "median_ms": size} for size in (1, 16)]
    step_rows += [
        {"kind": "extend", "tokens": size, "seqs": seqs, "median_ms": size} for size in (16, 128) for seqs in (8, 16)
    ]
    program_rows = [
        {"kind": kind, "tokens": size, "lower_s": 0.0, "compile_s": compile_s}
        for kind, size in (("decode", 1), ("decode", 16), ("sampled", 16), ("extend", 16), ("set_row", 0))
    ]
    return Costs(step_rows, program_rows, buckets, threads=2)


def test_sizes_follow_the_steps_where_compiling_is_cheap_and_are_few_where_it_is_not() -> None:
    steps = Counter({("decode", 5, 5): 100, ("decode", 12, 12): 100, ("extend", 50, 2): 30, ("extend", 128, 12): 1})
    cheap = suggested(steps, costs(BucketSet.derive(SIZES), 0.01), SIZES, compile_weight=1.0, max_programs=None)
    assert (cheap.decode_sizes, cheap.extend_sizes) == ((8, 12, 16), (64, 128))
    dear = suggested(steps, costs(BucketSet.derive(SIZES), 100.0), SIZES, compile_weight=1.0, max_programs=None)
    assert (dear.decode_sizes, dear.extend_sizes) == ((16,), (128,))


def test_times_between_measured_sizes_lie_between_them() -> None:
    made = costs(BucketSet.derive(SIZES), 8.0)
    assert made.step_s(4, "decode") == pytest.approx(4e-3) and made.step_s(48, "many") == pytest.approx(48e-3)
    assert made.compile_s(1, "decode") == 4.0 and made.compile_s(16, "decode") == 8.0, "half of it on each processor"
    steps = Counter({("decode", 3, 3): 10, ("extend", 20, 1): 5})
    assert made.seconds(steps, BucketSet.derive(SIZES)) == pytest.approx(10 * 4e-3 + 5 * 32e-3)


def test_the_script_measures_an_engine_and_a_server_takes_what_it_writes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    file = tmp_path / "buckets.json"
    sizes = {"max-running-requests": 4, "chunked-prefill-size": 32, "page-size": 4, "max-total-tokens": 400}
    work = {"num-prompts": 12, "input-lens": "5,30", "output-lens": "3,10", "repeats": 1, "max-programs": 16}
    flags = {"model": tmp_path, "load-format": "dummy", "extend-buckets": 32, "decode-buckets": "4", "json": file}
    options = [part for name, value in {**sizes, **work, **flags}.items() for part in (f"--{name}", value)]
    shown = run_script("bench_buckets.py", *options).stdout
    assert "suggested: " in shown

    report = json.loads(file.read_text())
    assert {row["kind"] for row in report["programs"]} == {
        "decode", "extend", "score", "sampled", "filtered", "featured", "set_row", "set_pages"
    }  # fmt: skip
    assert all(row["compile_s"] > 0 and row["cached_s"] > 0 for row in report["programs"])
    shapes = [(row["kind"], row["tokens"], row["sampling"]) for row in report["steps"]]
    assert sorted(shapes) == [
        *(("decode", 4, sampling) for sampling in ("featured", "filtered", "greedy", "sampled")),
        ("extend", 32, "greedy"),
    ]
    assert all(0 < row["min_ms"] <= row["median_ms"] and row["launch_us"] > 0 for row in report["steps"])
    assert report["present"]["decode_buckets"] == [4] and report["suggested"]["programs"] <= 16

    capacity = Capacity(**report["capacity"])
    taken = buckets_of(EngineConfig(auto_buckets=str(file)), capacity)
    assert list(taken.decode_sizes) == report["suggested"]["decode_buckets"]
    assert list(taken.extend_sizes) == report["suggested"]["extend_buckets"]
