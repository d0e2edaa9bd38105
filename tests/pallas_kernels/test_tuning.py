"""Block sizes come from the tables, unless a tuning run overrides them."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import BACKENDS, tuning
from pallas_kernels.specs import ArgSpec
from tests.pallas_kernels.lower_everything import on_a_device

TABLES = Path(tuning.__file__).parent / "tables"
CLASSES = (
    dict.fromkeys(
        (
            "store_kv",
            "rotate_and_store",
            "absorb_and_store",
            "merge_latents",
            "attend_to_chosen",
            "attend_to_groups",
            "score_tokens",
            "paged_decode_attention",
            "paged_extend_attention",
        ),
        tuning.ShapeClass,
    )
    | dict.fromkeys(("quantized_product", "float8_product"), tuning.ProductClass)
    | dict.fromkeys(
        (
            "grouped_product",
            "gated_product",
            "grouped_float8_product",
            "grouped_packed_product",
            "gated_packed_product",
        ),
        tuning.ExpertClass,
    )
)
OP, BACKEND = "paged_extend_attention", "triton"
SPEC = ArgSpec("tuned", 3, 1000, 8, 16, 8, 4, 128, jnp.bfloat16)
SHAPE = tuning.shape_class(SPEC.extend_args()[0], SPEC.paged_kv())


@jax.jit
def traced_tile(x: jax.Array) -> jax.Array:
    """Stands for a kernel: its size is read while it is traced."""
    return x * tuning.blocks(OP, BACKEND, SHAPE)["num_warps"]


def test_counts_of_a_shape_class_are_powers_of_two() -> None:
    assert (SHAPE.num_tokens, SHAPE.num_seqs, SHAPE.num_groups) == (1024, 4, 4)
    assert (SHAPE.page_size, SHAPE.kv_bits, SHAPE.head_dim) == (16, 16, 128)


def test_an_overridden_size_enters_new_traces_and_leaves_them_again() -> None:
    usual = int(traced_tile(jnp.int32(1)))
    with tuning.override(OP, BACKEND, {"num_warps": 99}):
        assert int(traced_tile(jnp.int32(1))) == 99
    assert int(traced_tile(jnp.int32(1))) == usual != 99


def test_an_override_keeps_the_sizes_that_it_does_not_name_and_other_backends() -> None:
    usual = tuning.blocks(OP, BACKEND, SHAPE)
    with tuning.override(OP, BACKEND, {"num_warps": 99}):
        assert tuning.blocks(OP, BACKEND, SHAPE) == {**usual, "num_warps": 99}
    with tuning.override("store_kv", BACKEND, {"num_warps": 99}):
        assert tuning.blocks(OP, BACKEND, SHAPE) == usual


def test_an_override_lists_the_shape_classes_that_were_asked_for() -> None:
    with tuning.override(OP, BACKEND, {}) as asked:
        traced_tile(jnp.int32(1))
    assert asked == [SHAPE]


def entry(num_warps: int) -> dict:
    return {"op": OP, "backend": BACKEND, "when": {}, "blocks": {"num_warps": num_warps}, "source": "a test"}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("NVIDIA A10", 2), ("NVIDIA A100-SXM4-80GB", 3), ("NVIDIA RTX A1000", 1), ("NVIDIA H200", 1), ("NVIDIA H20", 4)],
)
def test_a_table_is_for_devices_that_have_its_names_as_whole_words(
    kind: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tables").mkdir()
    named = {"default": [], "one": ["NVIDIA A10"], "two": ["A100"], "three": ["NVIDIA H20"]}
    for num_warps, (name, devices) in enumerate(named.items(), start=1):
        table = {"devices": devices, "backends": {}, "blocks": [entry(num_warps)]}
        (tmp_path / "tables" / f"{name}.json").write_text(json.dumps(table))
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)
    monkeypatch.setattr(tuning, "_tables", tuning._tables.__wrapped__)  # which remembers nothing
    with on_a_device("cuda", kind, 1):
        assert tuning.blocks(OP, BACKEND, SHAPE) == {"num_warps": expected}


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_the_tables_name_real_backends_fields_and_positive_sizes_and_their_source(path: Path) -> None:
    table = json.loads(path.read_text())
    assert set(table) == {"devices", "backends", "blocks"} and bool(table["devices"]) == (path.stem != "default")
    for order in table["backends"].values():
        assert all(set(names) < set(BACKENDS) for names in order.values())
    for one in table["blocks"]:
        assert set(one) == {"op", "backend", "when", "blocks", "source"}
        assert one["op"] in CLASSES and one["backend"] in BACKENDS and one["source"]
        assert set(one["when"]) <= {field.name for field in dataclasses.fields(CLASSES[one["op"]])}
        assert all(isinstance(size, int) and size > 0 for size in one["blocks"].values())


def test_a_device_table_gives_no_sizes_that_the_default_lacks() -> None:
    """A misspelt name would never be read."""
    tables = {path.stem: json.loads(path.read_text())["blocks"] for path in TABLES.glob("*.json")}

    def names(blocks: list[dict]) -> set[tuple[str, str, str]]:
        return {(one["op"], one["backend"], name) for one in blocks for name in one["blocks"]}

    default = names(tables["default"])
    assert all(names(blocks) <= default for blocks in tables.values())


def test_a_kernel_without_an_entry_is_an_error_that_says_where_to_add_one() -> None:
    with pytest.raises(LookupError, match=r"no block sizes for store_kv on backend 'cuda'.*default.json"):
        tuning.blocks("store_kv", "cuda", SHAPE)
