"""Inputs of the simulator: replayed traces, and device models fitted to measured steps."""

from dataclasses import astuple
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from bench.simulation.cost import HARDWARE, MODELS, StepCost, data_sheet_costs, equal_pairs, num_params, weight_bytes
from bench.simulation.engine import Clock, SimulatedHandle
from bench.simulation.fit import fit, record

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.bench.requests import prompt_ids
from jaxsgl.bench.traces import replayed
from jaxsgl.cache.pages import tokens_in
from jaxsgl.testing.device import FakePageTable

pytestmark = pytest.mark.device

MOONCAKE = """\
{"timestamp": 2000, "input_length": 1300, "output_length": 7, "hash_ids": [46, 47, 90]}

{"timestamp": 1000, "input_length": 1024, "output_length": 0, "hash_ids": [46, 47]}
{"timestamp": 2500, "input_length": 600, "output_length": 1, "hash_ids": [18446744073709551615]}
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    return path


def test_a_mooncake_trace_has_milliseconds_and_blocks_of_512(trace: Path) -> None:
    first, second, third = replayed(trace, "mooncake", 10)
    assert [ask.at_s for ask in (first, second, third)] == [0.0, 1.0, 1.5]
    assert [ask.output_len for ask in (first, second, third)] == [1, 7, 1], "one token is the least"
    ids = [prompt_ids(ask, 1000) for ask in (first, second, third)]
    assert list(map(len, ids)) == [1024, 1300, 600]
    assert ids[0] == ids[1][:1024]
    assert ids[0][:512] != ids[0][512:] and ids[2][:512] != ids[0][:512]


def test_a_bailian_trace_has_seconds_and_blocks_of_16(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.25, "input_length": 40, "output_length": 9, "turn": 1, '
        '"hash_ids": [5, 6, 7]}\n'
        '{"chat_id": 2, "parent_chat_id": 1, "timestamp": 63.75, "input_length": 60, "output_length": 9, "turn": 2, '
        '"hash_ids": [5, 6, 8]}\n'
    )
    first, second = replayed(path, "bailian", 10, slowdown=2.0)
    assert (first.at_s, second.at_s) == (0.0, 5.0)
    ids = [prompt_ids(ask, 1000) for ask in (first, second)]
    assert ids[0][:32] == ids[1][:32] and ids[0][32:40] != ids[1][32:40]
    assert len(ids[1]) == 60, "12 tokens behind the last block are shared with no other request"


def test_only_the_first_requests_are_replayed(trace: Path) -> None:
    assert len(replayed(trace, "mooncake", 2)) == 2


@pytest.mark.parametrize(
    "line", ["{", "[1]", '{"timestamp": 1}', '{"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": []}']
)
def test_a_line_that_is_not_a_request_is_named(trace: Path, line: str) -> None:
    trace.write_text(MOONCAKE + line)
    with pytest.raises(ValueError, match="line 5"):
        replayed(trace, "mooncake", 10)


KNOWN = {
    "decode": StepCost(launch_s=2e-4, weights_s=3e-3, token_s=2e-5, kv_token_s=4e-8, pair_s=0.0),
    "extend": StepCost(launch_s=3e-4, weights_s=4e-3, token_s=1e-5, kv_token_s=5e-8, pair_s=1e-9),
}


def measured(noise: float) -> list[dict]:
    """Steps that take what `KNOWN` says, give or take `noise`."""
    rng = np.random.default_rng(0)
    steps = []
    for kind, cost in KNOWN.items():
        for tokens in (1, 8, 64, 256, 512, 2048):
            for length in (10, 1000, 30_000):
                seqs = tokens if kind == "decode" else min(tokens, 4)
                kv_tokens = seqs * length + tokens
                pairs = equal_pairs(tokens, seqs, kv_tokens) if kind == "extend" else 0.0
                seconds = cost.seconds(tokens, kv_tokens, pairs) * (1 + noise * rng.standard_normal())
                steps.append({"kind": kind, "tokens": tokens, "seqs": seqs, "kv_tokens": kv_tokens, "seconds": seconds})
    return steps


def test_the_fit_recovers_the_coefficients_of_exact_measurements() -> None:
    costs, errors = fit(measured(noise=0.0))
    for kind, known in KNOWN.items():
        found = costs[kind]
        for name in ("launch_s", "weights_s", "token_s", "kv_token_s", "pair_s"):
            assert getattr(found, name) == pytest.approx(getattr(known, name), rel=1e-6, abs=1e-15), (kind, name)
        assert errors[kind] < 1e-6


def test_the_fit_of_noisy_measurements_predicts_better_than_their_noise() -> None:
    costs, errors = fit(measured(noise=0.05))
    assert max(errors.values()) < 0.06
    for kind, known in KNOWN.items():
        for step in (64, 64_000, 1e5), (2048, 60_000, 3e7):
            assert costs[kind].seconds(*step) == pytest.approx(known.seconds(*step), rel=0.1)


def test_a_fit_without_steps_of_a_kind_says_so() -> None:
    with pytest.raises(ValueError, match="'extend'"):
        fit([step for step in measured(0.0) if step["kind"] == "decode"])


class EngineThatLooks:
    """An engine that runs nothing, but checks that a batch has its own pages for every token."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.buckets = BucketSet.derive(capacity)
        self.submitted: list[StepInputs] = []
        self._table = FakePageTable(capacity)

    def submit(self, inputs: StepInputs) -> SimulatedHandle:
        arrays, capacity = inputs.arrays, self.capacity
        self._table.update(inputs)
        slots = np.concatenate([self._table.slots(*seq) for seq in zip(arrays.rows, arrays.lengths, strict=True)])
        assert len(np.unique(slots)) == len(slots) and slots.max() < tokens_in(capacity.num_pages, capacity.page_size)
        self.submitted.append(inputs)
        return SimulatedHandle(Clock(), 0.0, (1, inputs.num_seqs))


@pytest.mark.parametrize("num_pages", [2000, 40])
def test_a_recording_has_each_size_once_and_says_what_ran(num_pages: int) -> None:
    engine = EngineThatLooks(
        Capacity(16, num_pages, num_rows=16, context_length=600, max_extend_tokens=256, vocab_size=9)
    )
    steps = list(record(cast(Any, engine), repeats=1))
    ran = engine.submitted[::2]
    assert {step["tokens"] for step in steps if step["kind"] == "decode"} == {1, 2, 4, 8, 16}
    assert {step["tokens"] for step in steps if step["kind"] == "extend"} == {16, 32, 64, 128, 256}
    assert len({(step["kind"], step["tokens"], step["seqs"], step["kv_tokens"]) for step in steps}) == len(steps)
    for step, inputs in zip(steps, ran, strict=True):
        arrays = inputs.arrays
        assert (step["kind"], step["tokens"], step["seqs"]) == (*astuple(inputs.bucket)[:2], inputs.num_seqs)
        assert step["kv_tokens"] == arrays.lengths.sum() and step["seconds"] > 0
        assert step["pairs"] == (arrays.positions[: inputs.num_tokens] + 1).sum()


def test_pairs_are_what_counting_gives() -> None:
    assert equal_pairs(tokens=5, seqs=1, kv_tokens=12) == sum(position + 1 for position in range(7, 12))
    assert equal_pairs(tokens=10, seqs=2, kv_tokens=24) == 2 * equal_pairs(5, 1, 12)


def test_shapes_have_the_size_in_their_names() -> None:
    layers, embedding = num_params(MODELS["qwen3-8b"])
    assert layers + 2 * embedding == pytest.approx(8.19e9, rel=1e-3)
    layers, embedding = num_params(MODELS["qwen3-0.6b"])
    assert layers + embedding == pytest.approx(0.596e9, rel=1e-3)
    assert weight_bytes(MODELS["qwen3-0.6b"]) == 2 * (layers + embedding)


def test_a_long_decode_reads_memory_and_a_long_extend_computes() -> None:
    costs = data_sheet_costs(HARDWARE["h200"], MODELS["qwen3-8b"])
    decode, extend = costs["decode"], costs["extend"]
    assert decode.seconds(64, 64_000, 0) == decode.seconds(128, 64_000, 0) < decode.seconds(64, 128_000, 0)
    assert extend.seconds(4096, 4096, 8e6) == pytest.approx(2 * extend.seconds(2048, 4096, 4e6), rel=0.01)
