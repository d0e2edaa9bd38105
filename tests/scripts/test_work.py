"""The useful bytes and FLOPs of a call equal a count one by one."""

import numpy as np
import pytest
from bench.kernels.cases import ACCELERATOR_CASES, CPU_CASES, cases_for, decode, extend, store, work_of
from bench.roofline import Roofline, Work

pytestmark = pytest.mark.device

SMALL = {"num_kv_heads": 2, "num_groups": 3, "head_dim": 8}
BATCHES = [
    extend("whole prompts", [0, 0], [5, 1], page_size=4, **SMALL),
    extend("chunks", [7, 3], [4, 9], page_size=4, **SMALL),
    extend("padding", [7, 0, 0], [4, 0, 2], page_size=4, padding_tokens=5, **SMALL),
    extend("window", [7, 20, 0], [6, 1, 9], page_size=4, sliding_window=3, **SMALL),
    extend("float8", [7, 3], [4, 9], page_size=4, float8_cache=True, **SMALL),
    extend("float32", [7, 3], [4, 9], page_size=4, dtype="float32", **SMALL),
    decode("decode", [9, 0, 1, 16], page_size=4, **SMALL),
    decode("decode with a window", [9, 0, 1, 16], page_size=4, sliding_window=5, **SMALL),
]


def seen_by(case, s: int) -> list[list[int]]:
    """The KV positions that each new token of sequence s sees."""
    window = case.sliding_window or 10**9
    positions = range(case.cached[s], case.cached[s] + case.new[s])
    return [[i for i in range(p + 1) if i > p - window] for p in positions]


@pytest.mark.parametrize("case", BATCHES, ids=lambda case: case.name)
def test_attention_is_counted_as_one_by_one(case) -> None:
    width = {"float32": 4, "bfloat16": 2}[case.dtype]
    cache_width = 1 if case.float8_cache else width
    num_bytes = flops = 0
    for s in range(len(case.new)):
        seen = seen_by(case, s)
        needed = sorted(set().union(*seen))
        for _ in needed:
            num_bytes += 2 * case.num_kv_heads * case.head_dim * cache_width  # K and V
        num_bytes += 4 * len({position // case.page_size for position in needed})
        for tokens in seen:
            for _head in range(case.num_kv_heads * case.num_groups):
                num_bytes += 2 * case.head_dim * width  # the query and its output
                flops += sum(2 * case.head_dim + 2 * case.head_dim for _ in tokens)
    assert work_of(case) == Work(num_bytes, flops)


def test_a_store_reads_and_writes_each_new_row_and_reads_its_slot() -> None:
    case = store(1030, float8_cache=True, **SMALL)
    assert sum(case.new) == 1030
    assert work_of(case) == Work(1030 * (2 * 2 * 8 * (2 + 1) + 4), 0)


def test_causality_halves_a_whole_prompt() -> None:
    case = extend("prompt", [0], [1000], **SMALL)
    whole = 4 * 8 * 6 * 1000 * 1000
    assert work_of(case).flops == pytest.approx(whole / 2, rel=2e-3)


def test_the_floor_is_the_slower_of_the_two_ceilings() -> None:
    roofline = Roofline(bytes_per_s=10.0, flops_per_s=100.0)
    assert (roofline.floor_s(Work(20, 100)), roofline.bound(Work(20, 100))) == (2.0, "memory")
    assert (roofline.floor_s(Work(20, 900)), roofline.bound(Work(20, 900))) == (9.0, "compute")


@pytest.mark.parametrize("cases", [ACCELERATOR_CASES, CPU_CASES])
def test_labels_are_unique_and_pages_suffice(cases) -> None:
    assert len({case.label for case in cases}) == len(cases)
    for case in cases:
        assert (case.spec.pages_per_seq * case.page_size >= case.lengths).all()


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_the_quick_list_has_every_op(platform: str) -> None:
    quick = cases_for(platform, quick=True)
    assert {case.op for case in quick} == {case.op for case in cases_for(platform)}
    assert len(quick) < 8


def test_the_promised_shapes_are_in_the_list() -> None:
    labels = {case.label: case for case in ACCELERATOR_CASES}
    for page in (1, 16, 64, 128):
        for rows in (8, 64):
            case = labels[f"decode {rows} x 4096, page {page}"]
            assert (case.num_kv_heads, case.num_groups, case.head_dim, case.dtype) == (8, 4, 128, "bfloat16")
            assert np.array_equal(case.lengths, [4096] * rows)
    assert labels["extend mixed, page 16"].new == (1,) * 31 + (2048,)
    for tokens in (4096, 16384, 65536):
        assert sum(labels[f"store {tokens}, page 64"].new) == tokens
