"""Converted checkpoints: the same parameters on any number of devices, and refusals that say what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from jaxsgl.config.engine import EngineConfig
from jaxsgl.convert import convert as convert_folder
from jaxsgl.convert import main as convert_command
from jaxsgl.engine.weight_store import read_arch
from jaxsgl.errors import CheckpointError
from jaxsgl.json_file import read_object
from jaxsgl.models import arch_from_folder
from jaxsgl.models.quantization import FORMATS_AT_LOAD
from jaxsgl.text.tokenizer import load_tokenizer
from jaxsgl.weights import (
    as_stored,
    is_converted,
    load_kv_scales,
    load_params,
    resolve_model_folder,
    save_converted,
)
from jaxsgl.weights.converted import LAYOUT_VERSION, MANIFEST, restore_groups
from tests.checkpoints import make_checkpoint
from tests.grids import daily
from tests.plain_model import checkpoint_logits, mesh_of
from tests.scripts.running import run_command
from tests.text.small_tokenizers import save
from tests.weights.stored_weights import quantize_folder
from tests.weights.test_loading import rewrite

TOKENS = list(range(3, 60))
FLOAT32 = jnp.dtype("float32")

# Runs with 4 devices: restores a folder onto 1, 2 and 4 of them, says how many rows of qkv each has, saves the logits.
ON_FOUR_DEVICES = """
import sys
from pathlib import Path
import numpy as np, jax, jax.numpy as jnp
from flax import nnx
from jaxsgl.models import arch_from_folder
from jaxsgl.weights import load_params
from tests.plain_model import mesh_of, plain_logits
original, converted = map(Path, sys.argv[1:])
arch = arch_from_folder(original)
expected = jax.tree.leaves(load_params(original, arch, jnp.dtype("float32"), mesh_of(1)))
for number in (1, 2, 4):
    params = load_params(converted, arch, jnp.dtype("float32"), mesh_of(number))
    for restored, loaded in zip(jax.tree.leaves(params), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(restored), np.asarray(loaded))
    qkv = params["layers"][0]["attention"]["qkv"][...]
    print(number, len(qkv.addressable_shards), qkv.addressable_shards[0].data.shape[0])
    np.save(converted / f"{number}.npy", plain_logits(arch, params, list(range(3, 60))))
"""


def load(folder: Path, dtype: str = "float32") -> nnx.State:
    return load_params(folder, arch_from_folder(folder), jnp.dtype(dtype), mesh_of())


def convert(original: Path, folder: Path) -> Path:
    save_converted(original, folder, load(original))
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint with a tokenizer, and what `jaxsgl convert` makes of it."""
    original, converted = (tmp_path_factory.mktemp(name) for name in ("original", "converted"))
    make_checkpoint("qwen3", original, num_attention_heads=8, num_key_value_heads=4)
    save(Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="b")), original)
    done = run_command("convert", "--model", original, "--output", converted)
    assert f"{converted}: 0.00 GB" in done.stdout
    return original, converted


def test_it_is_restored_onto_one_two_and_four_devices_with_equal_outputs(pair: tuple[Path, Path]) -> None:
    original, converted = pair
    done = subprocess.run(
        [sys.executable, "-c", ON_FOUR_DEVICES, *map(str, pair)],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "1", "4", "2", "2", "2", "4", "4", "1"]
    expected = checkpoint_logits(original, TOKENS)
    # The other process compiles in another way, so it rounds in another; that weights have equal bits it has checked.
    for number in (1, 2, 4):
        np.testing.assert_allclose(np.load(converted / f"{number}.npy"), expected, atol=1e-5)


def test_what_is_restored_at_a_time_is_little_beside_what_is_there() -> None:
    sizes = {"head": 90, "embedding": 90, **{f"up {layer}": 20 for layer in range(8)}, "norm": 1}
    groups = restore_groups(sizes, most=50)
    assert groups[:2] == [["embedding"], ["head"]]
    assert sorted(name for group in groups for name in group) == sorted(sizes)
    assert all(sum(sizes[name] for name in group) <= 50 for group in groups[2:]) and len(groups) == 6


def test_the_folder_serves_by_itself(pair: tuple[Path, Path]) -> None:
    original, converted = pair
    assert is_converted(converted) and not is_converted(original)
    assert arch_from_folder(converted) == arch_from_folder(original)
    assert load_tokenizer(str(converted)).encode("a") == [0]


def test_another_dtype_is_converted_as_it_is_restored(pair: tuple[Path, Path]) -> None:
    original, converted = pair
    for restored, loaded in zip(
        jax.tree.leaves(load(converted, "bfloat16")), jax.tree.leaves(load(original, "bfloat16")), strict=True
    ):
        assert restored.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(restored), np.asarray(loaded))


def test_a_converted_model_makes_embeddings_as_folders_of_sentence_transformers_say(tmp_path: Path) -> None:
    """With a matrix after the pooling, and without the head that such folders lack, though config.json has one."""
    original, converted = tmp_path / "original", tmp_path / "converted"
    make_checkpoint("qwen3", original)
    tensors = load_file(original / "model.safetensors")
    config = read_object(original / "config.json")
    (original / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    save_file(
        {name: each for name, each in tensors.items() if name != "lm_head.weight"}, original / "model.safetensors"
    )
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense"}
    listed = [{"type": f"models.{kind}", "path": path} for path, kind in kinds.items()]
    (original / "modules.json").write_text(json.dumps(listed))
    size = config["hidden_size"]
    for path, told in (
        ("1_Pooling", {"pooling_mode": "lasttoken"}),
        ("2_Dense", {"in_features": size, "out_features": 3, "bias": False}),
    ):
        (original / path).mkdir()
        (original / path / "config.json").write_text(json.dumps(told))
    save_file({"linear.weight": np.ones((3, size), np.float32)}, original / "2_Dense" / "model.safetensors")
    convert_folder(str(original), converted, "float32")
    archs = [read_arch(EngineConfig(), folder) for folder in (original, converted)]
    assert archs[0] == archs[1]
    params = load_params(converted, archs[1], FLOAT32, mesh_of())
    assert "lm_head" not in params and params["dense_net"]["matrix_0"][...].shape == (3, size)


@pytest.mark.parametrize("name", daily(["gptq desc_act", "awq", "fp8 in blocks", "compressed-tensors int8"], every=2))
def test_quantized_weights_are_restored_in_the_format_that_a_device_keeps(name: str, tmp_path: Path) -> None:
    """The converted copy has them as the checkpoint does: of 4 bits, with offsets."""
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192}
    original = quantize_folder(make_checkpoint("qwen2", tmp_path / "plain", **sizes), tmp_path / "original", name)
    converted = convert(original, tmp_path / "converted")
    arch = arch_from_folder(converted)
    assert arch.weight_format is not None
    formats = arch.weight_format, arch.weight_format.on_cpu("bfloat16"), arch.weight_format.on_gpu("bfloat16", parts=1)
    for kept in (replace(arch, weight_format=fmt) for fmt in formats):
        restored, loaded = (
            {path: param[...] for path, param in nnx.to_flat_state(load_params(folder, kept, FLOAT32, mesh_of()))}
            for folder in (converted, original)
        )
        assert {path: array.dtype for path, array in restored.items()} == {path: loaded[path].dtype for path in loaded}
        for path, array in restored.items():
            np.testing.assert_array_equal(array, loaded[path], err_msg=str(path))


def test_a_dtype_that_the_configuration_leaves_out_is_the_parameters(tmp_path: Path) -> None:
    original = make_checkpoint("llama_tied", tmp_path / "original", dtype=torch.float16)
    values = {key: value for key, value in read_object(original / "config.json").items() if "dtype" not in key}
    (original / "config.json").write_text(json.dumps(values))
    convert_folder(str(original), tmp_path / "converted", "auto")
    assert as_stored(arch_from_folder(tmp_path / "converted"), tmp_path / "converted").dtype == "float16"


def test_scales_of_the_kv_cache_come_along(tmp_path: Path) -> None:
    original = make_checkpoint("llama_tied", tmp_path / "original")
    names = [f"model.layers.{layer}.self_attn.k_scale".replace(".", "__") for layer in range(2)]
    rewrite(original, **{name: torch.tensor(0.5) for name in names})
    converted = convert(original, tmp_path / "converted")
    arch = arch_from_folder(converted)
    assert load_kv_scales(converted, arch) == load_kv_scales(original, arch)
    assert [float(scale) for scale in load_kv_scales(converted, arch).k if scale is not None] == [0.5, 0.5]


def test_another_layout_is_refused_with_the_way_out(tmp_path: Path) -> None:
    converted = convert(make_checkpoint("llama_tied", tmp_path / "original"), tmp_path / "converted")
    manifest = json.loads((converted / MANIFEST).read_text())
    for changes, words in (
        (
            {"layout_version": LAYOUT_VERSION + 1},
            f"have layout version {LAYOUT_VERSION + 1}, but .* reads {LAYOUT_VERSION}",
        ),
        (
            {"params": {**manifest["params"], "final_norm": {"shape": [65]}}},
            r"final_norm among them: .*\(64,\).*\[65\]",
        ),
        (
            {"params": {**manifest["params"], "layers.0.new": {"shape": [65]}}},
            r"1 parameters are not those .*layers\.0\.new",
        ),
    ):
        (converted / MANIFEST).write_text(json.dumps({**manifest, **changes}))
        with pytest.raises(
            CheckpointError, match=words + ".*convert the original checkpoint again with jaxsgl convert"
        ):
            load(converted)
    (converted / MANIFEST).write_text("[")
    with pytest.raises(CheckpointError, match=f"{MANIFEST} can't be read as a manifest"):
        load(converted)


def test_broken_files_are_named(tmp_path: Path) -> None:
    converted = convert(make_checkpoint("llama_tied", tmp_path / "original"), tmp_path / "converted")
    (converted / "params" / "_METADATA").write_bytes(b"broken")
    with pytest.raises(CheckpointError, match=r"params can't be restored \(.*convert the original checkpoint again"):
        load(converted)


def test_weights_that_are_not_safetensors_cannot_be_quantized_at_load(pair: tuple[Path, Path]) -> None:
    _, converted = pair
    arch = replace(arch_from_folder(converted), weight_format=FORMATS_AT_LOAD["int8"])
    with pytest.raises(
        CheckpointError, match="--quantization works on checkpoints in safetensors files only: leave it"
    ):
        load_params(converted, arch, jnp.dtype("float32"), mesh_of())


def test_a_folder_with_files_is_not_overwritten(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not empty: name a new folder"):
        save_converted(pair[0], pair[1], load(pair[0]))


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_read(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxsgl.convert.load_params", lambda *_: pytest.fail("the weights are read"))
    (tmp_path / "file").touch()
    for folder, words in ((pair[1], "is not empty"), (tmp_path / "file" / "x", "can't be made: Not a directory")):
        with pytest.raises(CheckpointError, match=words):
            convert_folder(str(pair[0]), folder, "auto")


def test_a_folder_that_could_not_be_written_is_named_and_never_served(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_up(*_: object, **__: object) -> None:
        raise ValueError("OUT_OF_RANGE: Failed to write: No space left on device [os_error_code='28']\n[spec='...']")

    monkeypatch.setattr("orbax.checkpoint.Checkpointer.save", fill_up)
    with pytest.raises(
        CheckpointError, match=r"new can't be written: .*: No space left on device; remove it, and conv"
    ):
        convert(pair[0], tmp_path / "new")
    with pytest.raises(CheckpointError, match=f"is a conversion that was not finished, as it has no {MANIFEST}"):
        resolve_model_folder(str(tmp_path / "new"))
    assert resolve_model_folder(str(pair[1])) == pair[1]


def test_ctrl_c_says_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def press(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxsgl.convert.convert", press)
    monkeypatch.setattr("jax.config.update", lambda *_: None)  # this process has its devices
    assert convert_command(["--output", str(tmp_path / "new")]) == 130
    assert f"stopped: remove {tmp_path / 'new'}" in capsys.readouterr().err


def test_the_version_names_this_layout(tmp_path: Path) -> None:
    """If this fails, folders that were converted before would be read wrongly: raise LAYOUT_VERSION, and change the
    sums here. They are of parameters whose tensors count up."""
    found = {}
    for kind in ("llama_linear_rope_bias", "qwen3"):
        folder = make_checkpoint(kind, tmp_path / kind)
        tensors = load_file(folder / "model.safetensors")
        counted = {
            name: (np.arange(tensor.size, dtype=np.float32) % 4093 + index).reshape(tensor.shape)
            for index, (name, tensor) in enumerate(sorted(tensors.items()))
        }
        save_file(counted, folder / "model.safetensors", metadata={"format": "pt"})
        params: Any = load(folder)
        text = [(*path, np.asarray(param[...]).tobytes()) for path, param in nnx.to_flat_state(params)]
        found[kind] = zlib.crc32(repr(sorted(text, key=repr)).encode())
    assert (LAYOUT_VERSION, found) == (1, {"llama_linear_rope_bias": 2648106002, "qwen3": 2208578534})
