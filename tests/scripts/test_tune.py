"""The search finds the fastest sizes that give right results, and the table records them."""

import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from bench.kernels import cases as bench_cases
from bench.kernels.cases import DECODE, EXTEND, STORE, store
from bench.kernels.inputs import make_inputs
from bench.kernels.search import Found, backend_order, neighbours, search, table_path, updated_table, write_table

from pallas_kernels import PagedKv, store_kv, tuning
from pallas_kernels.specs import ArgSpec
from pallas_kernels.target import TargetDevice
from tests.scripts.running import run_script

H200 = TargetDevice("gpu", "NVIDIA H200", 132)
CASE = store(8, num_kv_heads=2, num_groups=1, head_dim=16, dtype="float32")


def shape(num_seqs: int, num_tokens: int, page_size: int = 16) -> tuning.ShapeClass:
    spec = ArgSpec("shape", num_seqs, num_tokens, 1, page_size, 8, 4, 128, jnp.bfloat16)
    return tuning.shape_class(spec.extend_args()[0], spec.paged_kv())


def found(op: str, backend: str, case: str, seconds: float, asked=None, **best: int) -> Found:
    return Found(op, backend, case, asked, {}, seconds, best, seconds)


def fake_store(kv: PagedKv, k: jax.Array, v: jax.Array, slots: jax.Array, *, backend: str, interpret: bool) -> PagedKv:
    """A store that is right, and fastest with a tile of 16; it fails or lies where a test needs that."""
    sizes = tuning.blocks(STORE, backend, tuning.shape_class(k, kv, 1))
    if sizes["warps"] == 8:
        raise NotImplementedError("more registers than there are")
    waste = jnp.cumsum(jnp.broadcast_to(k.sum(), (30_000 * abs(sizes["tile"] - 16),))).sum()
    k = jnp.where(waste == 0.123, 0.0, k)
    lies = sizes["tile"] == 16 and sizes["num_stages"] == 3
    return store_kv(kv, 2 * k if lies else k, v, slots, backend="reference")


@pytest.fixture
def fake_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op with a backend "triton" whose sizes are those that `fake_store` reads."""
    usual: dict[str, Any] = {"devices": [], "backends": {}, "blocks": []}
    entry = {"op": STORE, "backend": "triton", "when": {}, "source": "a test"}
    usual["blocks"] = [{**entry, "blocks": {"tile": 32, "warps": 4, "num_stages": 2}}]
    monkeypatch.setattr(tuning, "_tables", lambda kind: (usual,))
    monkeypatch.setitem(bench_cases.FUNCTIONS, STORE, fake_store)


def test_the_search_ends_at_the_fastest_right_sizes(fake_kernel: None) -> None:
    lines: list[str] = []
    result = search("triton", make_inputs(CASE), "cpu", time.monotonic() + 100, lines.append, repeats=5)
    assert result is not None
    assert result.best["tile"] == 16 and result.best_s < result.usual_s
    assert result.usual == {"tile": 32, "warps": 4, "num_stages": 2}
    assert result.shape == tuning.shape_class(CASE.spec.store_args()[1], CASE.spec.paged_kv(), 1)
    assert not [line for line in lines if "'warps': 8" in line]  # it doesn't compile
    assert not [line for line in lines if "'tile': 16" in line and "'num_stages': 3" in line]  # it lies


def test_known_sizes_are_only_timed(fake_kernel: None) -> None:
    known = {"tile": 8, "warps": 4, "num_stages": 2}
    lines: list[str] = []
    result = search("triton", make_inputs(CASE), "cpu", time.monotonic(), lines.append, known=known, repeats=1)
    assert result is not None and result.best == known and len(lines) == 1


def test_sizes_that_never_work_give_nothing(fake_kernel: None) -> None:
    known = {"tile": 64, "warps": 8, "num_stages": 2}
    assert search("triton", make_inputs(CASE), "cpu", time.monotonic(), print, known=known, repeats=1) is None


def test_neighbours_differ_in_one_size() -> None:
    assert list(neighbours({"tile": 64, "num_stages": 2})) == [
        {"tile": 32, "num_stages": 2},
        {"tile": 128, "num_stages": 2},
        {"tile": 64, "num_stages": 1},
        {"tile": 64, "num_stages": 3},
    ]
    assert list(neighbours({"tile": 1})) == [{"tile": 2}]


def test_batches_between_two_measured_ones_take_the_nearer(monkeypatch: pytest.MonkeyPatch) -> None:
    results = [
        found(DECODE, "triton", "small", 1e-5, shape(8, 8), tile=1),
        found(DECODE, "triton", "large", 1e-4, shape(64, 64), tile=2),
        found(EXTEND, "triton", "long", 1e-3, shape(1, 8192), tile=3),
        found(EXTEND, "triton", "chunk", 1e-3, shape(1, 2048), tile=4),
        found(EXTEND, "triton", "many", 1e-3, shape(32, 8192), tile=5),
    ]
    table = updated_table({}, results, H200, "measured")
    monkeypatch.setattr(tuning, "_tables", lambda kind: (table,))

    def tile(op: str, num_seqs: int, num_tokens: int) -> int:
        return tuning.blocks(op, "triton", shape(num_seqs, num_tokens))["tile"]

    assert [tile(DECODE, n, n) for n in (1, 8, 16, 32, 64, 256)] == [1, 1, 1, 2, 2, 2]
    assert [tile(EXTEND, 1, n) for n in (16, 2048, 4096, 8192, 65536)] == [4, 4, 4, 3, 3]
    assert [tile(EXTEND, n, 512) for n in (1, 2, 16, 256)] == [4, 4, 5, 5]
    with pytest.raises(LookupError):  # another model's shapes stay with the default table
        tuning.blocks(DECODE, "triton", shape(8, 8, page_size=64))


def test_a_class_has_one_entry_and_it_says_where_it_is_from() -> None:
    results = [
        found(DECODE, "triton", "first", 1e-5, shape(8, 8), tile=1),
        found(DECODE, "triton", "second", 1e-5, shape(8, 8), tile=2),
        found(DECODE, "xla", "first", 1e-3),
    ]
    (entry,) = updated_table({}, results, H200, "measured today")["blocks"]
    assert entry["blocks"] == {"tile": 1}
    assert entry["source"] == "measured today: 10.0 us for first"


def test_backends_are_ordered_by_their_times_and_end_with_xla() -> None:
    results = [
        found(DECODE, "triton", "a", 2e-5),
        found(DECODE, "mosaic_gpu", "a", 1e-5),
        found(DECODE, "xla", "a", 9e-5),
        found(DECODE, "triton", "b", 2.1e-5),
        found(DECODE, "mosaic_gpu", "b", 2e-5),
        found(DECODE, "xla", "b", 9e-5),
        found(EXTEND, "mosaic_gpu", "c", 9e-5),
        found(EXTEND, "xla", "c", 1e-5),
        found(EXTEND, "triton", "c", 5e-5),
    ]
    assert backend_order(results) == {DECODE: ["mosaic_gpu", "triton", "xla"], EXTEND: ["xla"]}


def test_a_new_search_replaces_its_own_entries_only(tmp_path: Path) -> None:
    path = table_path(tmp_path, H200)
    assert path.name == "nvidia_h200.json"
    first = [
        found(DECODE, "triton", "a", 1e-5, shape(8, 8), tile=1),
        found(EXTEND, "triton", "b", 1, shape(1, 8), tile=2),
    ]
    write_table(path, updated_table({}, first, H200, "first"))
    again = [found(DECODE, "triton", "a", 1e-5, shape(64, 64), tile=3)]
    write_table(path, updated_table(json.loads(path.read_text()), again, H200, "again"))
    table = json.loads(path.read_text())
    assert table["devices"] == ["NVIDIA H200"]
    assert {(entry["op"], entry["blocks"]["tile"]) for entry in table["blocks"]} == {(EXTEND, 2), (DECODE, 3)}
    assert table["backends"] == {DECODE: {"gpu": ["triton"]}, EXTEND: {"gpu": ["triton"]}}


def test_the_script_writes_a_table_for_this_device(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    result = run_script("tune_kernels.py", "--quick", "--cases", "store", "--budget-s", 1, "--out", path)
    table = json.loads(path.read_text())
    assert table["devices"] == ["cpu"] and table["backends"] == {"store_kv": {"cpu": ["xla"]}}
    assert "store 1024, page 16: xla" in result.stdout
