"""Towers that hear have the rows of transformers', and config.json is read as published or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jaxsgl.batch.patches import EncodeBucket, TowerCapacity, TowerShape, pack
from jaxsgl.engine.encoding import patches_of_call
from jaxsgl.errors import CheckpointError
from jaxsgl.models import abstract_model, arch_from_folder
from jaxsgl.models.towers.arch import LayerShape
from jaxsgl.preprocess.processors import load_settings
from jaxsgl.requests.media import SoundShape
from jaxsgl.weights import load_params
from tests.plain_model import mesh_of
from tests.sound_models import make_model, sound, taken

FLOAT32 = jnp.dtype(jnp.float32)
# What the published folders' config.json say, but for training and other software.
QWEN2_AUDIO: dict[str, Any] = {
    "architectures": ["Qwen2AudioForConditionalGeneration"], "model_type": "qwen2_audio",
    "audio_config": {"model_type": "qwen2_audio_encoder"}, "audio_token_index": 151646, "ignore_index": -100,
    "text_config": {
        "bos_token_id": 151643, "eos_token_id": 151645, "intermediate_size": 11008, "max_position_embeddings": 8192,
        "model_type": "qwen2", "rms_norm_eps": 1e-05, "rope_theta": 10000, "sliding_window": 32768,
        "torch_dtype": "bfloat16", "use_mrope": False, "vocab_size": 156032,
    },
    "torch_dtype": "bfloat16", "vocab_size": 156032,
}  # fmt: skip
VOXTRAL: dict[str, Any] = {
    "architectures": ["VoxtralForConditionalGeneration"], "model_type": "voxtral", "audio_token_id": 24,
    "audio_config": {
        "activation_dropout": 0.0, "activation_function": "gelu", "attention_dropout": 0.0, "dropout": 0.0,
        "head_dim": 64, "hidden_size": 1280, "initializer_range": 0.02, "intermediate_size": 5120, "layerdrop": 0.0,
        "max_source_positions": 1500, "model_type": "voxtral_encoder", "num_attention_heads": 20,
        "num_hidden_layers": 32, "num_key_value_heads": 20, "num_mel_bins": 128, "scale_embedding": False,
        "vocab_size": 51866,
    },
    "hidden_size": 3072, "projector_hidden_act": "gelu",
    "text_config": {
        "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192,
        "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32,
        "num_hidden_layers": 30, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 100000000.0,
        "vocab_size": 131072,
    },
    "torch_dtype": "bfloat16", "vocab_size": 131072,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "tower", "shape"),
    [
        ("qwen2_audio", {}, SoundShape(50, 10, 2, False)),
        ("voxtral", {"max_source_positions": 52, "intermediate_size": 80}, SoundShape(52, 10, 4, True)),
    ],
    ids=["qwen2_audio", "voxtral"],
)
def test_chunks_have_the_rows_of_transformers_tower(
    kind: str, tower: dict[str, Any], shape: SoundShape, tmp_path: Path
) -> None:
    """Of an odd number of patches that are heard the last one makes no token, but others look at it."""
    model = make_model(tmp_path, kind, **tower)
    arch, settings = arch_from_folder(tmp_path), load_settings(tmp_path)
    assert arch.tower is not None and settings is not None and settings.sound == arch.tower.sound == shape
    items = [sound(0, shape, filled, filled) for filled in (shape.num_patches, 17, 2, 30)]
    with torch.no_grad():
        given = taken(model, items)
        if kind == "voxtral":
            expected = model.model.get_audio_features(given["input_features"]).pooler_output.numpy()
        else:
            heard = torch.tensor([[item.filled] for item in items])
            mask = torch.where(torch.arange(shape.num_patches)[None] < heard, 0.0, -torch.inf)[:, None, None]
            made = model.model.audio_tower(given["input_features"], attention_mask=mask).last_hidden_state
            rows = model.model.multi_modal_projector(made)
            expected = torch.cat([of_one[: item.length] for of_one, item in zip(rows, items, strict=True)]).numpy()
    params = load_params(tmp_path, arch, FLOAT32, mesh_of())
    graphdef, _ = abstract_model(arch, FLOAT32, FLOAT32)
    visual = nnx.merge(graphdef, params).visual
    assert visual is not None
    size = 5 * shape.num_patches  # one is padding
    capacity = TowerCapacity(TowerShape(shape.merge, 0, arch.tower.patch_len, sound=shape), 1000, size)
    stops = np.cumsum([item.length for item in items])
    places = [np.arange(stop - item.length, stop, dtype=np.int32) for item, stop in zip(items, stops, strict=True)]
    call = pack([list(zip(items, places, strict=True))], EncodeBucket(size), capacity)
    patches = patches_of_call(jnp.asarray(call.pixels[0]), jnp.asarray(call.columns[0]))
    found, rows = np.asarray(jax.jit(lambda patches: visual(patches))(patches)), call.rows[0]
    in_order = np.argsort(rows, kind="stable")[: len(expected)]
    assert rows[in_order].tolist() == list(range(len(expected)))
    np.testing.assert_allclose(found[in_order], expected, atol=5e-5)


@pytest.mark.parametrize(
    ("config", "tokens", "num_layers"), [(QWEN2_AUDIO, 750, 32), (VOXTRAL, 375, 30)], ids=["qwen2_audio", "voxtral"]
)
def test_published_folders_are_read(config: dict[str, Any], tokens: int, num_layers: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    arch, settings = arch_from_folder(tmp_path), load_settings(tmp_path)
    assert arch.tower is not None and settings is not None and settings.sound == arch.tower.sound
    tower = arch.tower
    assert tower.layers == LayerShape(32, num_heads=20, head_dim=64, ffn_size=5120, activation="gelu")
    assert (tower.image_patches, tower.tokens.most, tower.out_size) == (1500, tokens, arch.hidden_size)
    assert tower.tokens.image_id == settings.image_token_id == (24 if config is VOXTRAL else 151646)
    assert (arch.num_layers, arch.head_dim) == (num_layers, 128)


@pytest.mark.parametrize(
    ("config", "tower", "beside", "words"),
    [
        (VOXTRAL, {"intermediate_size": 5000}, {}, "audio_config.intermediate_size is 5000, but must be a multiple of"),
        (VOXTRAL, {"max_source_positions": 1501}, {}, "max_source_positions is 1501, but must be a multiple of 4"),
        (VOXTRAL, {"activation_function": "relu"}, {}, "activation_function is relu, but must be gelu"),
        (VOXTRAL, {}, {"projector_hidden_act": "relu"}, "projector_hidden_act is relu, but must be gelu"),
        (QWEN2_AUDIO, {"scale_embedding": True}, {}, "audio_config.scale_embedding is true, which may change results"),
        (QWEN2_AUDIO, {"encoder_attention_heads": 19}, {}, "19 heads of audio_config can't share 1280"),
        (VOXTRAL, {}, {"text_config": {"model_type": "gemma"}}, "decoders of VoxtralFor"),
    ],
)
def test_a_form_that_is_not_built_is_refused(
    config: dict[str, Any], tower: dict[str, Any], beside: dict[str, Any], words: str, tmp_path: Path
) -> None:
    told = {**config, **beside, "audio_config": {**config["audio_config"], **tower}}
    (tmp_path / "config.json").write_text(json.dumps(told))
    with pytest.raises(CheckpointError) as caught:
        arch_from_folder(tmp_path)
    assert words in str(caught.value)


def test_frames_of_another_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_AUDIO))
    for told in ({"feature_size": 80}, {"hop_length": 320}, {"dither": 0.1}, {"do_normalize": True}):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(told))
        (name,) = told
        with pytest.raises(CheckpointError, match=f"{name} is .*, but only .* is supported"):
            load_settings(tmp_path)
