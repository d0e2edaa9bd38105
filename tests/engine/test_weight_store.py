"""Weights of a running model: exchanged for those of a folder or a tree, released, taken back; without a compile."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxsgl.engine import weight_store
from jaxsgl.errors import CheckpointError, EngineUnavailable, InvalidRequest
from jaxsgl.offline.llm import LLM
from jaxsgl.requests.request import SamplingParams
from jaxsgl.weights import KvScales
from jaxsgl.weights.sharding import make_mesh
from jaxsgl.wiring import whole
from tests.checkpoints import make_checkpoint
from tests.engine.driving import greedy_programs
from tests.grids import NIGHTLY, count

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [list(range(3, 40)), list(range(90, 100))]


def new_llm(folder: Path, **flags: Any) -> LLM:
    return LLM(
        str(folder), page_size=4, max_running_requests=2, max_total_tokens=256, context_length=128,
        chunked_prefill_size=48, decode_buckets=(2,), extend_buckets=(48,), **flags,
    )  # fmt: skip


def answers(llm: LLM) -> list[list[int]]:
    return [completion.token_ids for completion in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = [tmp_path_factory.mktemp(f"weights{seed}") for seed in range(2)]
    for seed, folder in enumerate(made):
        make_checkpoint("qwen3", folder, seed=seed)
    return made


@pytest.fixture(scope="module")
def llms(folders: list[Path]) -> Iterator[tuple[LLM, LLM]]:
    """One to change, and one that serves the other weights."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        greedy_programs(monkeypatch)
        both = new_llm(folders[0]), new_llm(folders[1], enable_weights_cpu_backup=True, weight_version="second")
    yield both
    for llm in both:
        llm.close()


@pytest.fixture(scope="module")
def expected(llms: tuple[LLM, LLM]) -> list[list[list[int]]]:
    both = [answers(llm) for llm in llms]
    assert both[0] != both[1]
    return both


@pytest.fixture
def llm(llms: tuple[LLM, LLM], folders: list[Path], expected: list[list[list[int]]]) -> LLM:
    llms[0].resume_memory_occupation()
    llms[0].update_weights(folders[0], "first")
    return llms[0]


def test_weights_of_a_folder_are_served_without_a_compile(
    llm: LLM, folders: list[Path], expected: list[list[list[int]]]
) -> None:
    num_compiled = llm.engine.recompiles  # those of the other engine's start
    assert answers(llm) == expected[0]
    llm.update_weights(folders[1], "new")
    (first, _) = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert first.cached_tokens == 0 and first.weight_version == llm.weight_version == "new"
    assert answers(llm) == expected[1]
    assert llm.engine.recompiles == num_compiled


def test_weights_staged_on_another_device_come_to_lie_where_the_old_ones_did(
    llm: LLM, folders: list[Path], expected: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if jax.device_count() < 2:
        if not NIGHTLY:
            pytest.skip("needs two devices, which a process of its own has by night")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"{__file__}",
            "-k",
            "another_device",
        ]
        env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
        return
    num_compiled = llm.engine.recompiles
    places = [leaf.sharding for leaf in whole(llm.engine).weight_store.leaves]
    monkeypatch.setattr(weight_store, "_staging_mesh", lambda mesh: make_mesh(jax.devices()[1:2]))
    llm.update_weights(folders[1])
    assert [leaf.sharding for leaf in whole(llm.engine).weight_store.leaves] == places
    assert answers(llm) == expected[1]
    assert llm.engine.recompiles == num_compiled


@pytest.mark.parametrize("to_array", [np.array, jnp.array, lambda tensor: nnx.Param(jnp.array(tensor))])
def test_tensors_by_the_names_of_a_checkpoint_are_fused_as_a_folders_are(
    llm: LLM, folders: list[Path], expected: list[list[list[int]]], to_array: Callable[..., Any]
) -> None:
    named = {name: to_array(tensor) for name, tensor in load_file(folders[1] / "model.safetensors").items()}
    num_compiled = llm.engine.recompiles
    llm.update_weights(dict(named))
    for broken, words in (
        ({**named, NORM: np.ones(3, np.float32)}, "shape"),
        ({**named, "model.x": np.ones(3)}, "model.x"),
        ({name: tensor for name, tensor in named.items() if name != NORM}, "missing"),
    ):
        with pytest.raises(CheckpointError, match=words):
            llm.update_weights(broken)
    for tensor in named.values():
        if isinstance(tensor, np.ndarray):
            tensor[...] = 0
        else:
            tensor.delete()
    assert answers(llm) == expected[1]
    assert llm.engine.recompiles == num_compiled


def as_numpy(tree: nnx.State[Any, Any]) -> Any:
    return jax.tree.map(lambda leaf: np.array(leaf, np.float32), nnx.to_pure_dict(tree))


@pytest.mark.parametrize("form", [lambda tree: tree, nnx.to_pure_dict, as_numpy])
def test_a_tree_is_copied(
    llm: LLM, llms: tuple[LLM, LLM], expected: list[list[list[int]]], form: Callable[[Any], Any]
) -> None:
    tree = form(jax.tree.map(jnp.copy, llms[1].params))
    num_compiled = llm.engine.recompiles
    llm.update_weights(tree)
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, np.ndarray):
            leaf[...] = 0
        else:
            leaf.delete()
    assert answers(llm) == expected[1]
    assert llm.engine.recompiles == num_compiled


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def change_tensors(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


NORM = "model.norm.weight"
BREAK: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (shutil.rmtree, "is not a"),
    "truncated": (truncate, "truncated"),
    "a tensor is missing": (lambda folder: change_tensors(folder, lambda tensors: tensors.pop(NORM)), NORM),
    "a tensor is misshapen": (
        lambda folder: change_tensors(folder, lambda tensors: tensors.update({NORM: np.ones(63, np.float32)})),
        NORM,
    ),
    "another size": (
        lambda folder: change_config(folder, intermediate_size=128),
        r"another model: its layers\[0\].mlp.ffn_size is 128, but \d+ is served",
    ),
    "another depth": (
        lambda folder: change_config(folder, num_hidden_layers=1, layer_types=["full_attention"]),
        r"another model: its number of layers is 1, but \d+ is served",
    ),
    "another architecture": (lambda folder: change_config(folder, architectures=["Foo"]), "Foo"),
}


@pytest.mark.parametrize("how", BREAK)
def test_a_broken_folder_changes_nothing(
    llm: LLM, folders: list[Path], expected: list[list[list[int]]], tmp_path: Path, how: str
) -> None:
    broken = shutil.copytree(folders[1], tmp_path / "broken")
    change, words = BREAK[how]
    change(broken)
    before = list(whole(llm.engine).weight_store.leaves)
    with pytest.raises(CheckpointError, match=words):
        llm.update_weights(broken)
    assert all(map(lambda a, b: a is b, whole(llm.engine).weight_store.leaves, before))
    assert llm.weight_version == "first"
    assert answers(llm) == expected[0]


def deleted(tree: dict[str, Any]) -> None:
    tree["embedding"] = jnp.ones_like(tree["embedding"])
    tree["embedding"].delete()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tree: tree.pop("final_norm"), "misses 1 parameters, as final_norm"),
        (lambda tree: tree.update(extra=jnp.ones(3)), "has 1 parameters, as extra"),
        (lambda tree: tree.update(final_norm=jnp.ones(3)), r"final_norm has shape \(3,\)"),
        (lambda tree: tree.update(final_norm=jnp.ones(64, jnp.int32)), "final_norm is int32"),
        (deleted, "embedding is deleted"),
    ],
)
def test_a_tree_of_another_form_changes_nothing(
    llm: LLM, expected: list[list[list[int]]], change: Callable[[Any], object], words: str
) -> None:
    tree = dict(nnx.to_pure_dict(llm.params))
    change(tree)
    with pytest.raises(CheckpointError, match=words):
        llm.update_weights(tree)
    assert llm.weight_version == "first"
    assert answers(llm) == expected[0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model.norm.weight": torch.ones(64)}, r"model.norm.weight is a torch.Tensor.*jax.dlpack.from_dlpack"),
        ({"embedding": torch.ones(64)}, r"embedding is a torch.Tensor.*jax.dlpack.from_dlpack"),
        ([("model.norm.weight", np.ones(64))], "a list that holds no parameter.*a dict of arrays by the names"),
        (iter(()), "that holds no parameter"),
        (None, "weights are None"),
    ],
)
def test_what_is_no_tree_of_arrays_is_refused_with_what_to_give(llm: LLM, given: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        llm.update_weights(given)
    assert llm.weight_version == "first"


@pytest.mark.parametrize("number", [np.nan, -np.inf])
def test_weights_that_are_not_finite_change_nothing(
    llm: LLM, folders: list[Path], expected: list[list[list[int]]], tmp_path: Path, number: float
) -> None:
    def diverge(tensors: dict[str, Any]) -> None:
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.embed_tokens.weight"][200, 3] = number

    folder = shutil.copytree(folders[1], tmp_path / "diverged")
    change_tensors(folder, diverge)
    tree = dict(nnx.to_pure_dict(llm.params))
    tree["embedding"] = tree["embedding"].at[200, 3].set(number)
    for source in (folder, load_file(folder / "model.safetensors"), tree):
        with pytest.raises(CheckpointError, match="embedding holds NaN or infinity"):
            llm.update_weights(source)
    assert llm.weight_version == "first"
    assert answers(llm) == expected[0]


def test_other_scales_of_a_float8_cache_are_refused(
    llm: LLM, folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are constants of the compiled programs."""
    monkeypatch.setattr(llm.engine.weight_store, "_kv_scales", KvScales.of_one(llm.engine.arch.num_layers))
    scaled = shutil.copytree(folders[1], tmp_path / "scaled")
    name = "model.layers.1.self_attn.k_scale"
    change_tensors(scaled, lambda tensors: tensors.update({name: np.ones(1, np.float32)}))
    llm.update_weights(scaled)
    change_tensors(scaled, lambda tensors: tensors.update({name: np.full(1, 2, np.float32)}))
    with pytest.raises(CheckpointError, match="scales of its KV cache differ"):
        llm.update_weights(scaled, "scaled")
    assert llm.weight_version != "scaled"


def live_bytes() -> int:
    gc.collect()  # what earlier tests have left
    return sum(array.nbytes for array in jax.live_arrays())


def test_many_updates_keep_memory_flat(llm: LLM, folders: list[Path]) -> None:
    def update(step: int) -> int:
        llm.update_weights(folders[step % 2])
        return live_bytes()

    first = update(0)
    assert [update(step) for step in range(1, count(4, 20))] == [first] * (count(4, 20) - 1)


def test_released_memory_is_given_back_and_taken_again(llm: LLM, expected: list[list[list[int]]]) -> None:
    answers(llm)
    num_compiled, info, full = llm.engine.recompiles, llm.engine.info, live_bytes()
    llm.release_memory_occupation(["weights"])
    llm.release_memory_occupation(["weights"])
    assert full - live_bytes() == info.weight_bytes
    llm.release_memory_occupation(["kv_cache"])
    assert full - live_bytes() == info.weight_bytes + info.kv_bytes
    with pytest.raises(EngineUnavailable, match="kv_cache, weights is released"):
        answers(llm)
    with pytest.raises(CheckpointError, match="released"):
        _ = llm.params
    llm.resume_memory_occupation(["kv_cache"])
    llm.resume_memory_occupation()
    assert live_bytes() == full
    assert answers(llm) == expected[0] and llm.weight_version == "first"
    assert llm.engine.recompiles == num_compiled


@pytest.mark.parametrize("tags", ["kv_cache", ["kv_cache", "weight"]])
def test_what_is_no_memory_is_refused_by_name(llm: LLM, tags: Any) -> None:
    for order in (llm.release_memory_occupation, llm.resume_memory_occupation):
        with pytest.raises(InvalidRequest, match=r"tags are .* must be a list of some of weights, kv_cache"):
            order(tags)
    assert not llm.engine.weight_store.released


def test_an_update_takes_the_place_of_released_weights(
    llm: LLM, folders: list[Path], expected: list[list[list[int]]], tmp_path: Path
) -> None:
    llm.release_memory_occupation()
    with pytest.raises(CheckpointError):
        llm.update_weights(tmp_path / "nothing")
    llm.update_weights(folders[1])
    llm.resume_memory_occupation()
    assert answers(llm) == expected[1]


def test_weights_that_came_from_memory_are_kept_on_the_host_or_not_at_all(
    llm: LLM, llms: tuple[LLM, LLM], expected: list[list[list[int]]]
) -> None:
    first = jax.tree.map(jnp.copy, llm.params)
    llm.update_weights(first)
    llm.release_memory_occupation(["weights"])
    with pytest.raises(CheckpointError, match="no copy of them: update them"):
        llm.resume_memory_occupation()
    llm.update_weights(first)
    with_copy = llms[1]
    with_copy.update_weights(first)
    with_copy.release_memory_occupation()
    with_copy.resume_memory_occupation()
    assert answers(with_copy) == answers(llm) == expected[0]


def test_a_head_that_differs_from_the_embedding_is_no_head_of_a_tied_model(llm: LLM, folders: list[Path]) -> None:
    named = load_file(folders[1] / "model.safetensors")
    embedding = named["model.embed_tokens.weight"]
    llm.update_weights({**named, "lm_head.weight": embedding.copy()})
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from"):
        llm.update_weights({**named, "lm_head.weight": embedding[::-1]})


def test_an_update_of_made_up_weights_reads_the_folder(
    folders: list[Path], expected: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is released after that is read again; before it is made up again."""
    greedy_programs(monkeypatch)
    llm = new_llm(folders[0], load_format="dummy")
    made_up = answers(llm)
    llm.release_memory_occupation()
    llm.resume_memory_occupation()
    assert answers(llm) == made_up != expected[0]
    for _ in range(2):
        llm.update_weights(folders[0])
        assert answers(llm) == expected[0]
        llm.release_memory_occupation()
        llm.resume_memory_occupation()
        assert answers(llm) == expected[0]
    llm.close()


def test_a_swap_that_fails_midway_leaves_weights_to_be_read_again(
    llm: LLM, folders: list[Path], expected: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    put, calls = jax.device_put, 0

    def full(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise MemoryError("no room")
        return put(*args, **kwargs)

    store = llm.engine.weight_store
    staged = store.stage_weights(str(folders[1]))
    monkeypatch.setattr(jax, "device_put", full)
    with pytest.raises(MemoryError):
        store.swap_weights(staged, None)
    monkeypatch.undo()
    with pytest.raises(EngineUnavailable, match="the memory of weights is released"):
        answers(llm)
    llm.update_weights(folders[0])
    assert answers(llm) == expected[0]
