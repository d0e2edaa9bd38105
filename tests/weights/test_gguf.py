"""GGUF files yield the logits and tokens of the checkpoints in safetensors that they were made of."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jaxsgl.errors import CheckpointError
from jaxsgl.models import arch_from_folder
from jaxsgl.models.layer_spec import Stage
from jaxsgl.models.matrix import part_name
from jaxsgl.models.rope import inverse_frequencies
from jaxsgl.text.tokenizer import load_tokenizer
from jaxsgl.weights import gguf_folder, load_params, resolve_model_folder
from tests.checkpoints import make_checkpoint
from tests.grids import daily
from tests.plain_model import mesh_of
from tests.text.small_tokenizers import TEXT
from tests.weights.gguf_files import KINDS, rounded, with_tokenizer, write_gguf

pytestmark = pytest.mark.device


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def files_of(kind: str, tmp_path: Path, stored: str = "F32", **flags: Any) -> tuple[Path, Path]:
    """The checkpoint, and the GGUF file of it."""
    arch, changes = KINDS[kind]
    folder = make_checkpoint(kind, tmp_path / "checkpoint", seed=4, **changes)
    return folder, write_gguf(folder, tmp_path / "some-model.gguf", arch, stored, **flags)


def params_of(folder: Path) -> list[np.ndarray]:
    """All parameters, dequantized."""
    arch = replace(arch_from_folder(folder), weight_format=None, stored_format=None)
    params = load_params(folder, arch, jnp.dtype(jnp.float32), mesh_of(1))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


def by_path(folder: Path) -> dict[tuple[Any, ...], np.ndarray]:
    """The parameters as they are served, by their places in the model."""
    params = load_params(folder, arch_from_folder(folder), jnp.dtype(jnp.float32), mesh_of(1))
    return {path: np.asarray(param.get_value()) for path, param in nnx.to_flat_state(params)}


@pytest.mark.parametrize("kind", ["llama_untied_llama3_rope", "qwen3"])  # the second one is tied
def test_pipeline_stages_leave_the_tensors_of_others_unread(kind: str, tmp_path: Path) -> None:
    found = resolve_model_folder(str(files_of(kind, tmp_path)[1]))
    arch, whole = arch_from_folder(found), by_path(found)
    seen = set()
    for layer in range(arch.num_layers):
        stage = load_params(found, arch.of_layers(layer, layer + 1), jnp.dtype(jnp.float32), mesh_of(1))
        for path, param in nnx.to_flat_state(stage):
            rows = slice(layer, layer + 1) if path[0] == "vectors" else slice(None)
            place = ("layers", layer, *path[2:]) if path[0] == "layers" else path
            np.testing.assert_array_equal(np.asarray(param.get_value()), whole[place][rows])
            seen.add(place)
    assert seen == whole.keys()


def test_a_pipeline_stage_refuses_what_no_stage_reads(tmp_path: Path) -> None:
    found = resolve_model_folder(str(files_of("olmo2", tmp_path)[1]))  # of three layers
    first_of_two = replace(arch_from_folder(found).of_layers(0, 1), stage=Stage(layers_after=1))
    with pytest.raises(CheckpointError, match=r"tensors are not part of .*, as blk\.2\."):
        load_params(found, first_of_two, jnp.dtype(jnp.float32), mesh_of(1))


@pytest.mark.parametrize("kind", daily(list(KINDS), every=3))
def test_every_family_has_the_parameters_and_the_arithmetic_of_its_checkpoint(kind: str, tmp_path: Path) -> None:
    folder, path = files_of(kind, tmp_path)
    found = resolve_model_folder(str(path))
    ours, theirs = arch_from_folder(found), arch_from_folder(folder)
    for own, told in zip(ours.ropes, theirs.ropes, strict=True):  # llama.cpp has factors in the place of a formula
        expected = inverse_frequencies(told, ours.head_dim)
        np.testing.assert_allclose(inverse_frequencies(own, ours.head_dim), expected, rtol=1e-6)
        assert own.amplitude == pytest.approx(told.amplitude)
    same = ("ropes", "eos_token_ids")
    assert replace(ours, **{name: getattr(theirs, name) for name in same}) == theirs
    for mine, other in zip(params_of(found), params_of(folder), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)  # norms with an offset are rounded twice


def test_pairs_with_factors_of_their_own_are_stretched_alike_besides(tmp_path: Path) -> None:
    folder, path = files_of("llama_untied_llama3_rope", tmp_path)
    told = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    stretched = write_gguf(folder, tmp_path / "stretched.gguf", "llama", metadata=told)
    plain, ours = (arch_from_folder(resolve_model_folder(str(each))) for each in (path, stretched))
    rotations = [inverse_frequencies(arch.ropes[0], arch.head_dim) for arch in (plain, ours)]
    np.testing.assert_allclose(rotations[1] * 8, rotations[0], rtol=1e-6)


def test_values_that_say_what_is_so_anyhow_change_nothing(tmp_path: Path) -> None:
    folder, path = files_of("qwen3_moe", tmp_path)
    plain = arch_from_folder(resolve_model_folder(str(path)))
    told = {"expert_weights_norm": True, "expert_weights_scale": 1.0, "expert_gating_func": 1, "expert_group_count": 1}
    told["embedding_length_out"] = plain.hidden_size
    write_gguf(folder, path, "qwen3moe", metadata=told)
    assert arch_from_folder(resolve_model_folder(str(path))) == plain
    write_gguf(folder, path, "qwen3moe", metadata={"expert_weights_norm": False})
    other = arch_from_folder(resolve_model_folder(str(path))).mixture
    assert plain.mixture is not None and other is not None
    assert (plain.mixture.router.renormalize, other.router.renormalize) == (True, False)


def test_a_file_says_that_it_is_made_for_embeddings(tmp_path: Path) -> None:
    folder, path = files_of("qwen3", tmp_path)
    assert not arch_from_folder(resolve_model_folder(str(path))).folder_pooling.made_for_it
    for number, kind in ((3, "last"), (1, "mean")):
        write_gguf(folder, path, "qwen3", metadata={"pooling_type": number})
        pooling = arch_from_folder(resolve_model_folder(str(path))).folder_pooling
        assert (pooling.kind, pooling.normalize, pooling.made_for_it) == (kind, True, True)


def test_a_text_that_only_tells_people_something_may_be_in_any_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = ["general.author"]

    class Latin(gguf.GGUFWriter):
        def write_header_to_file(self, path: Path | None = None) -> None:
            self.add_key_value(name[0], "José".encode("latin-1"), gguf.GGUFValueType.STRING)
            super().write_header_to_file(path)

    monkeypatch.setattr(gguf, "GGUFWriter", Latin)
    _, path = files_of("qwen3", tmp_path)
    assert params_of(resolve_model_folder(str(path)))
    name[0] = "qwen3.some_key"
    write_gguf(tmp_path / "checkpoint", path, "qwen3")
    with pytest.raises(CheckpointError, match=r"qwen3\.some_key is no text in UTF-8"):
        resolve_model_folder(str(path))


def test_numbers_in_another_byte_order_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = gguf.GGUFEndian.BIG if sys.byteorder == "little" else gguf.GGUFEndian.LITTLE
    monkeypatch.setattr(gguf, "GGUFWriter", partial(gguf.GGUFWriter, endianess=other))
    _, path = files_of("qwen3", tmp_path)
    with pytest.raises(CheckpointError, match=r"some-model\.gguf has its numbers in the other byte order"):
        resolve_model_folder(str(path))


# "llama" has rows in another order. The package can't write the last three formats: theirs is any other numbers'.
FORMATS = (
    *((stored, "llama") for stored in ("F16", "BF16", "Q8_0", "Q4_0")),
    *((stored, "qwen2") for stored in ("Q4_K", "Q5_K", "Q6_K")),
)


@pytest.mark.parametrize(("stored", "arch"), daily(FORMATS, every=2))
def test_every_format_yields_its_numbers(stored: str, arch: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 1}
    folder = make_checkpoint("llama_tied" if arch == "llama" else arch, tmp_path / "checkpoint", **sizes)
    path = write_gguf(folder, tmp_path / "model.gguf", arch, stored)
    save_file(rounded(folder, stored), folder / "model.safetensors")
    for mine, other in zip(params_of(resolve_model_folder(str(path))), params_of(folder), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_the_tokenizer_is_the_files_or_the_one_next_to_it(tmp_path: Path) -> None:
    folder, path = with_tokenizer(tmp_path)
    own, theirs = load_tokenizer(str(resolve_model_folder(str(path)))), load_tokenizer(str(folder))
    for text in (*TEXT, "<|start|>user\nhi<|end|> <think>5 €"):
        assert own.encode(text) == theirs.encode(text)
    assert own.special_ids == theirs.special_ids
    assert arch_from_folder(resolve_model_folder(str(path))).eos_token_ids == (own.encode("<|end|>")[0],)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    beside = resolve_model_folder(str(tmp_path))
    assert beside != resolve_model_folder(str(path))
    assert (beside / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("kind", "stored", "numbers", "kept"),
    [
        ("llama_tied", "Q8_0", "int8", {"qkv", "o", "gate_up", "down"}),
        ("llama_tied", "Q4_0", "int4", {"qkv", "o", "gate_up", "down"}),
        ("qwen3_moe", "Q8_0", "int8", {"qkv", "o"}),
        ("lfm2", "Q8_0", "int8", {"qkv", "o", "inputs", "output", "gate_up", "down"}),
    ],
)
def test_matrices_in_groups_stay_so(kind: str, stored: str, numbers: str, kept: set[str], tmp_path: Path) -> None:
    """Those of layers but experts; what the numbers and scales mean is the rounded checkpoint's weights."""
    arch, changes = KINDS[kind]
    sizes = {"moe_intermediate_size": 64} if arch == "qwen3moe" else {}
    folder = make_checkpoint(kind, tmp_path / "checkpoint", **{**changes, **sizes})
    path = write_gguf(folder, tmp_path / "model.gguf", arch, stored)
    save_file(rounded(folder, stored), folder / "model.safetensors")
    found, plain = by_path(resolve_model_folder(str(path))), by_path(folder)
    scales = {place: found.get((*place[:-1], part_name(place[-1], "scale"))) for place in plain}
    assert {place[-1] for place, scale in scales.items() if scale is not None} == kept
    for place, weights in plain.items():
        own, scale = found[place], scales[place]
        if scale is not None:
            assert own.dtype == numbers
            own = (own.astype(np.float32).reshape(*scale.shape, 32) * scale[..., None]).reshape(weights.shape)
        np.testing.assert_array_equal(own, weights)


def test_a_model_in_several_files_is_one(tmp_path: Path) -> None:
    folder, _ = files_of("qwen2", tmp_path, max_tensors=9)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    for named in (parts[0], parts[1], tmp_path):
        for mine, other in zip(params_of(resolve_model_folder(str(named))), params_of(folder), strict=True):
            np.testing.assert_array_equal(mine, other)
    parts[-1].unlink()
    with pytest.raises(CheckpointError, match=rf"one of {len(parts)} parts, of which 1 are missing: {parts[-1].name}"):
        resolve_model_folder(str(parts[0]))


def test_processes_that_start_with_a_file_at_once_have_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path = files_of("qwen3", tmp_path)
    write, others = gguf_folder._write, list[Path]()

    def write_slowly(paths: list[Path], tokenizer: list[Path], folder: Path) -> None:
        monkeypatch.setattr(gguf_folder, "_write", write)
        others.append(resolve_model_folder(str(path)))  # of another process, which is faster
        write(paths, tokenizer, folder)

    monkeypatch.setattr(gguf_folder, "_write", write_slowly)
    folder = resolve_model_folder(str(path))
    assert others == [folder] and (folder / gguf_folder.TABLE).is_file()
    assert [each.name for each in folder.parent.parent.iterdir()] == [folder.parent.name], "something is left beside it"


def test_what_a_start_that_was_killed_has_left_is_made_anew(tmp_path: Path) -> None:
    _, path = files_of("qwen3", tmp_path)
    folder = resolve_model_folder(str(path))
    (folder / gguf_folder.TABLE).unlink()
    (folder / "config.json").unlink()
    assert resolve_model_folder(str(path)) == folder
    assert params_of(folder)


def test_what_was_made_of_a_file_is_made_once_and_anew_if_the_file_changes(tmp_path: Path) -> None:
    _, path = files_of("qwen3", tmp_path)
    first = resolve_model_folder(str(path))
    assert resolve_model_folder(str(first)) == first  # as a front end asks for it
    os.utime(path, (1, 1))
    assert resolve_model_folder(str(path)) != first
    config = json.loads((first / "config.json").read_text())
    (first / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4}))
    with pytest.raises(
        CheckpointError, match=r"blk\.0\.attn_\w+\.weight has shape .*192.*, but its metadata asks for .*128"
    ):
        params_of(first)


def test_a_file_that_cannot_be_served_is_refused_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, path = files_of("qwen3", tmp_path)
    whole = path.read_bytes()
    bad = tmp_path / "bad.gguf"

    def refused(content: bytes, cause: str) -> None:
        bad.write_bytes(content)
        with pytest.raises(CheckpointError, match=cause):
            params_of(resolve_model_folder(str(bad)))

    refused(b"", "bad.gguf is not a GGUF file: it begins with b''")
    refused(b"PK\x03\x04" + whole[4:], "is not a GGUF file: it begins with b'PK")
    for length in (20, 300, 2000, len(whole) - 40):
        refused(whole[:length], "bad.gguf is truncated or not a GGUF file")
    found = resolve_model_folder(str(path))
    path.write_bytes(whole[:-400])
    with pytest.raises(CheckpointError, match=r"some-model.gguf is truncated: tensor \S+ lies beyond its end"):
        params_of(found)

    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"arch": "gemma3n"}, "architecture gemma3n, which is not served from GGUF; served are llama, qwen2"),
        ({"attention.scale": 0.5}, r"qwen3\.attention\.scale is 0\.5, which may change results"),
        ({"attention.value_length": 8}, r"attention\.value_length is 8, which is not supported"),
        ({"rope.dimension_count": 8}, r"rope\.dimension_count is 8, which is not supported"),
        ({"rope.scaling.type": "other"}, r"rope\.scaling\.type is other, which is not supported"),
        ({"attention.causal": False}, r"attention\.causal is False, which is not supported"),
        ({"embedding_length_out": 8}, r"embedding_length_out is 8, which is not supported"),
        ({"pooling_type": 2}, r"qwen3\.pooling_type is 2; supported are 1 \(mean\), 3 \(lasttoken\)"),
        ({"block_count": None}, "block_count is None, but must be a number"),
        ({"attention.head_count_kv": [2, 1]}, "head_count_kv differs by layer"),
        ({"block_count": 1}, "tensors are not part of Qwen3ForCausalLM as its metadata describes it"),
        ({"block_count": 3}, r"tensor \S+ is missing, but Qwen3ForCausalLM needs it"),
    )
    for made, cause in cases:
        write_gguf(folder, bad, made.pop("arch", "qwen3"), metadata=made)
        with pytest.raises(CheckpointError, match=cause):
            params_of(resolve_model_folder(str(bad)))
    with pytest.raises(
        CheckpointError, match=r"has 2 models as GGUF files \(bad.gguf, some-model.gguf\): name the one"
    ):
        resolve_model_folder(str(tmp_path))
    (tmp_path / "no folder").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no folder"))
    bad.write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"can't be kept in .*: name a cache with XDG_CACHE_HOME"):
        resolve_model_folder(str(bad))
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a folder"))
    bad.write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"need the gguf package: pip install 'jaxsgl\[gguf\]'"):
        resolve_model_folder(str(bad))
