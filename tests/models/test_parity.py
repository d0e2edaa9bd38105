"""The decoder's logits are those of transformers, for every kind of checkpoint, and both are those of float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.torch import load_file, save_file
from transformers import Llama4Config, Llama4ForConditionalGeneration

from jaxsgl.models import StepContext, abstract_model, arch_from_folder
from jaxsgl.models.layer_spec import ShortConv
from jaxsgl.weights import load_params
from jaxsgl.weights.recipe import sizes
from tests.agreement import check_agreement
from tests.checkpoint_kinds import CHECKPOINT_KINDS, FAMILY_KINDS, OF_D_NUMBERS, VARIANTS, values_of
from tests.checkpoint_kinds.sizes import OF_FAMILIES, VOCAB_SIZE
from tests.checkpoints import make_checkpoint, reference_logits
from tests.exact_model import exact_logits
from tests.grids import NIGHTLY
from tests.plain_model import causal_attend, checkpoint_logits, mesh_of, plain_recur

ATOL = 1e-4
PROMPT = np.random.default_rng(7).integers(0, VOCAB_SIZE, 300).tolist()


@pytest.mark.parametrize("kind", CHECKPOINT_KINDS)
def test_logits_equal_those_of_transformers_in_float32(kind: str, tmp_path: Path) -> None:
    folder = make_checkpoint(kind, tmp_path)
    exact = exact_logits(folder, PROMPT)
    assert exact.std() > 0.5  # else any model would be close
    sides = {
        "jaxsgl": lambda: checkpoint_logits(folder, PROMPT),
        "transformers": lambda: reference_logits(folder, PROMPT).numpy(),
    }
    check_agreement(sides, exact, ATOL, f"torch {torch.__version__} with {torch.get_num_threads()} threads")


@pytest.mark.parametrize("kind", [kind for kind in FAMILY_KINDS if NIGHTLY or kind not in VARIANTS])
def test_logits_of_every_family_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    folder = make_checkpoint(kind, tmp_path, seed=1)
    arch = arch_from_folder(folder)
    axes = {**sizes(arch), "L": arch.num_layers, "K": arch.num_kv_heads}
    if arch.latent is not None:  # one kv head, of C + R numbers
        axes = {name: length for name, length in axes.items() if name not in ("K", "H", "KH", "NH", "QKV")}
    if isinstance(arch.recurrent_net, ShortConv):  # all channels are D
        axes = {name: length for name, length in axes.items() if "G" not in name or name == "GT"}
    lengths = [*filter(None, axes.values())]
    with_shared_experts = "hunyuan_moe", "llama4", "deepseek_v4"
    alike = (*OF_D_NUMBERS, "phi3", "olmoe", "helium", "olmo_hybrid", "kimi_linear", "jamba", *with_shared_experts)
    assert kind in alike or len(set(lengths)) == len(lengths), "else axes could be mistaken for each other"
    prompt = [token % OF_FAMILIES["vocab_size"] for token in PROMPT[:80]]
    expected = reference_logits(folder, prompt).numpy()
    assert expected.std() > 0.5
    atol = ATOL if arch.recurrent_net is None else 5e-4  # transformers takes states from block to block
    np.testing.assert_allclose(checkpoint_logits(folder, prompt), expected, atol=atol)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gemma3", "Gemma3ForConditionalGeneration"),
        ("mistral", "Mistral3ForConditionalGeneration"),
        ("ministral3", "Mistral3ForConditionalGeneration"),
        ("mistral4", "Mistral3ForConditionalGeneration"),
    ],
)
@pytest.mark.parametrize("layout", ["published", "in memory"])
def test_the_text_of_a_model_that_sees_images_is_its_decoders(
    kind: str, name: str, layout: str, tmp_path: Path
) -> None:
    """The tower and its projector are left out, and the keys of the decoder stand in an object of their own.

    These towers are served, unless config.json describes none, as here. Tensors go by the names of published folders,
    or by those of transformers' `state_dict()`.
    """
    folder = make_checkpoint(kind, tmp_path / "text")
    config = json.loads((folder / "config.json").read_text())
    whole = {
        "architectures": [name], "text_config": config, "image_token_index": 10,
        "tie_word_embeddings": config["tie_word_embeddings"],
    }  # fmt: skip
    stored, start = load_file(folder / "model.safetensors"), "" if layout == "published" else "model."
    if layout == "published":
        tensors = {f"language_model.{key}": tensor for key, tensor in stored.items()}
    else:
        tensors = {key.replace("model.", "model.language_model.", 1): tensor for key, tensor in stored.items()}
    tensors |= {f"{start}{part}.bias": torch.zeros(3) for part in ("vision_tower", "multi_modal_projector")}
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").write_text(json.dumps(whole))
    save_file(tensors, tmp_path / "whole" / "model.safetensors")
    expected = checkpoint_logits(folder, PROMPT[:5])
    np.testing.assert_array_equal(checkpoint_logits(tmp_path / "whole", PROMPT[:5]), expected)


# Of Kimi's published folders.
_TOLD_BESIDE = {"media_placeholder_token_id": 9, "use_unified_vision_chunk": True, "ignore_index": -100}
_KIMI_TOWER = {
    "hidden_size": 16, "intermediate_size": 24, "patch_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2,
    "pos_emb_height": 4, "pos_emb_width": 4,
}  # fmt: skip


def test_the_text_of_a_model_whose_tower_is_left_out_is_that_of_transformers(tmp_path: Path) -> None:
    _, _, text = values_of("deepseek_v3")
    config = transformers.Kimi_K25Config(
        text_config={**text, "model_type": "deepseek_v3"}, vision_config=_KIMI_TOWER, tie_word_embeddings=False,
        projection_hidden_size=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Kimi_K25ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                (1.0 if "norm" in name else 0.0) + 1.5 * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
            )
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")  # transformers renames more of Kimi's than is published so
    published = {
        key.replace("language_model.model.blocks", "language_model.model.layers"): stored[key] for key in stored
    }
    save_file(published, tmp_path / "model.safetensors")
    prompt = [token % OF_FAMILIES["vocab_size"] for token in PROMPT[:40]]
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0].float().numpy()
    assert expected.std() > 0.3
    np.testing.assert_allclose(checkpoint_logits(tmp_path, prompt), expected, atol=ATOL)
    told = json.loads((tmp_path / "config.json").read_text())
    told |= {"architectures": ["KimiK25ForConditionalGeneration"], **_TOLD_BESIDE}
    (tmp_path / "config.json").write_text(json.dumps(told))
    np.testing.assert_allclose(checkpoint_logits(tmp_path, prompt), expected, atol=ATOL)


@pytest.mark.parametrize(("kind", "changes", "factor"), [
    ("granite", {"embedding_multiplier": 12.3}, 12.3), ("afmoe", {}, OF_FAMILIES["hidden_size"] ** 0.5),
])  # fmt: skip
def test_factors_on_embeddings_in_bfloat16_are_not_rounded_first(
    kind: str, changes: dict[str, Any], factor: float, tmp_path: Path
) -> None:
    """Gemma's are, in which it was trained; here rounding would scale the whole stream by something else."""
    folder = make_checkpoint(kind, tmp_path, dtype=torch.bfloat16, **changes)
    arch, dtype = arch_from_folder(folder), jnp.dtype("bfloat16")
    assert float(jnp.asarray(factor, dtype)) != factor
    graphdef, _ = abstract_model(arch, dtype)
    model, streams = nnx.merge(graphdef, load_params(folder, arch, dtype, mesh_of(1))), {0: None}
    tokens = jnp.arange(20, dtype=jnp.int32)
    model(tokens, tokens, StepContext(causal_attend(arch), plain_recur, streams=streams))
    exact = np.asarray(model.embedded(tokens), np.float32) * np.float32(factor)
    np.testing.assert_array_equal(np.asarray(streams[0]), np.asarray(jnp.asarray(exact, dtype)))


@pytest.mark.skipif(not NIGHTLY, reason="a variant of a kind; by night")
def test_what_falcon_h1_reads_from_states_may_be_normalized(tmp_path: Path) -> None:
    folder = make_checkpoint("falcon_h1", tmp_path, mamba_rms_norm=True, mamba_norm_before_gate=False)
    prompt = [token % OF_FAMILIES["vocab_size"] for token in PROMPT[:40]]
    np.testing.assert_allclose(checkpoint_logits(folder, prompt), reference_logits(folder, prompt).numpy(), atol=5e-4)


def test_gates_of_laguna_may_be_of_numbers(tmp_path: Path) -> None:
    folder = make_checkpoint("laguna", tmp_path, gating="per-element")
    tokens = [token % OF_FAMILIES["vocab_size"] for token in PROMPT[:40]]
    np.testing.assert_allclose(checkpoint_logits(folder, tokens), reference_logits(folder, tokens).numpy(), atol=ATOL)


def test_gates_of_lfm3_go_by_their_name_in_memory_too(tmp_path: Path) -> None:
    folder = make_checkpoint("lfm3", tmp_path)
    expected = checkpoint_logits(folder, PROMPT[:5])
    stored = load_file(folder / "model.safetensors")
    renamed = {key.replace(".self_attn.gate_proj.", ".self_attn.g_proj."): each for key, each in stored.items()}
    assert renamed.keys() != stored.keys()
    save_file(renamed, folder / "model.safetensors")
    np.testing.assert_array_equal(checkpoint_logits(folder, PROMPT[:5]), expected)


def test_ax_k1_is_published_without_biases_of_routers_and_with_norms_that_nothing_reads(tmp_path: Path) -> None:
    folder = make_checkpoint("axk1", tmp_path)
    path, bias, norm = folder / "model.safetensors", "gate.e_score_correction_bias", "post_mlp_layernorm.weight"
    stored = load_file(path)
    save_file({key: each * ("bias" not in key) for key, each in stored.items()}, path)
    expected = checkpoint_logits(folder, PROMPT[:5])
    published = {key: each for key, each in stored.items() if not key.endswith(bias)}
    assert f"model.layers.1.{norm}" not in published and f"model.layers.2.{norm}" in published
    save_file({**published, f"model.layers.1.{norm}": torch.ones(OF_FAMILIES["hidden_size"])}, path)
    np.testing.assert_array_equal(checkpoint_logits(folder, PROMPT[:5]), expected)


@pytest.mark.parametrize(
    ("kind", "start", "mask"),
    [
        ("gpt2", "transformer.", "h.0.attn.bias"),
        ("gpt_neox", "gpt_neox.", "layers.0.attention.masked_bias"),
        ("opt", "model.", None),
    ],
)
def test_a_decoder_that_was_saved_without_its_head_has_its_names_without_a_start(
    kind: str, start: str, mask: str | None, tmp_path: Path
) -> None:
    """GPT-2 and OPT are published so, and older folders hold constant masks, too."""
    folder = make_checkpoint(kind, tmp_path)
    expected = checkpoint_logits(folder, PROMPT[:5])
    stored = {key.removeprefix(start): each for key, each in load_file(folder / "model.safetensors").items()}
    save_file(stored | ({} if mask is None else {mask: torch.ones(2, 2)}), folder / "model.safetensors")
    np.testing.assert_array_equal(checkpoint_logits(folder, PROMPT[:5]), expected)


@pytest.mark.parametrize(("kind", "stem"), [("gemma3n", "Gemma3n"), ("gemma4_small", "Gemma4")])
def test_the_text_of_a_gemma_that_hears_is_its_decoders(kind: str, stem: str, tmp_path: Path) -> None:
    """The part for sound is left out, and so is what would make the keys that layers take from others."""
    folder = make_checkpoint(kind, tmp_path / "text")
    config = json.loads((folder / "config.json").read_text())
    whole = {
        "architectures": [f"{stem}ForConditionalGeneration"], "text_config": config, "vision_config": None,
        "audio_config": {"layers": 2}, "image_token_id": 7, "tie_word_embeddings": True,
    }  # fmt: skip
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.4.self_attn.k_proj.weight"] = stored["model.layers.1.self_attn.k_proj.weight"]
    tensors = {key.replace("model.", "model.language_model.", 1): tensor.clone() for key, tensor in stored.items()}
    tensors |= {f"model.{part}.bias": torch.zeros(3) for part in ("embed_audio", "audio_tower")}
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").write_text(json.dumps(whole))
    save_file(tensors, tmp_path / "whole" / "model.safetensors")
    expected = checkpoint_logits(folder, PROMPT[:5])
    np.testing.assert_array_equal(checkpoint_logits(tmp_path / "whole", PROMPT[:5]), expected)


def test_the_text_of_a_llama_4_is_that_of_the_whole_model(tmp_path: Path) -> None:
    """Its tower is left out, and names are those that transformers writes, as in published folders."""
    sizes = dict.fromkeys(("hidden_size", "vision_output_dim", "projector_input_dim", "projector_output_dim"), 16)
    tower = {**sizes, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 28}
    torch.manual_seed(0)
    whole = Llama4ForConditionalGeneration(Llama4Config(text_config=values_of("llama4")[2], vision_config=tower)).eval()
    whole.save_pretrained(tmp_path)
    tokens = torch.tensor([[token % OF_FAMILIES["vocab_size"] for token in PROMPT[:40]]])
    with torch.no_grad():
        expected = whole(input_ids=tokens).logits[0].numpy()
    assert expected.std() > 0.2
    np.testing.assert_allclose(checkpoint_logits(tmp_path, tokens[0].tolist()), expected, atol=ATOL)
    assert arch_from_folder(tmp_path).tower is None


def test_rope_scaling_of_the_test_checkpoints_changes_their_logits(tmp_path: Path) -> None:
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    for kind in ("llama_untied_llama3_rope", "llama_linear_rope_bias"):
        scaled = checkpoint_logits(make_checkpoint(kind, tmp_path / kind), PROMPT)
        unscaled = checkpoint_logits(make_checkpoint(kind, tmp_path / "plain" / kind, rope_parameters=plain), PROMPT)
        assert np.abs(scaled - unscaled).max() > 0.1


@pytest.mark.parametrize("kind", ["qwen3", "gemma3", "starcoder2"])
def test_bfloat16_compute_stays_near_float32_and_returns_float32_logits(kind: str, tmp_path: Path) -> None:
    folder = make_checkpoint(kind, tmp_path, dtype=torch.bfloat16)
    prompt = [token % OF_FAMILIES["vocab_size"] for token in PROMPT[:40]]
    exact = reference_logits(folder, prompt).numpy()
    logits = checkpoint_logits(folder, prompt, dtype="bfloat16")
    assert logits.dtype == np.float32
    assert 0 < np.abs(logits - exact).max() < 0.15 * exact.std()
