"""A model that isn't served: the error names what it needs and the family that comes near."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxsgl.errors import CheckpointError
from jaxsgl.models import arch_from_folder
from jaxsgl.models.families import FAMILIES
from jaxsgl.models.unserved import IN_ANOTHER_FORM, UNLIKE_IN_NAME, nearest

pytestmark = pytest.mark.device

MODELS: list[tuple[str, dict[str, Any], str, str | None]] = [
    ("MambaForCausalLM", {"state_size": 16}, "no family of its form has layers with a state-space model (Mamba)", None),
    (
        "Lfm2AudioForConditionalGeneration",
        {"conv_L_cache": 3},
        "no family of its form has short",
        "Lfm2VlForConditionalGeneration",
    ),
    ("DeepseekV33ForCausalLM", {"index_topk": 9}, "no family of its form has sparse", "DeepseekV32ForCausalLM"),
    ("Llama5ForCausalLM", {"attention_chunk_size": 8192}, "no family of its form has attention", "Llama4ForCausalLM"),
    (
        "DeepseekV41ForCausalLM",
        {"compress_rates": [4], "index_topk": 512, "hc_mult": 4},
        "has sparse attention that an index chooses for and attention to compressed tokens and several residual",
        "DeepseekV4ForCausalLM",
    ),
    ("BailingHybridForCausalLM", {"kda_lower_bound": -5.0}, "here: linear attention", "BailingMoeV2ForCausalLM"),
    ("RecurrentGemmaForCausalLM", {"lru_width": 2560}, "here: recurrent blocks (RG-LRU); run", None),
    ("Step3p7ForConditionalGeneration", {"num_sliding_attention_heads": 96}, "no family of its form has other", None),
    ("MiMoV3ForCausalLM", {"v_head_dim": 128}, "no family of its form has values", "MiMoV2FlashForCausalLM"),
    ("BloomForCausalLM", {"model_type": "bloom"}, "here: positions by ALiBi", None),
    (
        "Gemma5ForConditionalGeneration",
        {"text_config": {"hidden_size_per_layer_input": 256, "hc_mult": 4}},
        "no family of its form has an embedding for each layer and several residual streams",
        "Gemma4ForConditionalGeneration",
    ),
    (
        "JAISLMHeadModel",
        {"position_embedding_type": "alibi", "layer_norm_epsilon": 1e-5},
        "here: positions by ALiBi",
        "Jais2ForCausalLM",
    ),
    ("GPTNeoForCausalLM", {"n_positions": 2048}, "no family of its form has learned positions", "GPTNeoXForCausalLM"),
    ("T5ForConditionalGeneration", {"is_encoder_decoder": True}, "an encoder", None),
    (
        "LongcatNextForCausalLM",
        {"zero_expert_num": 256, "n_routed_experts": 512},
        "no family of its form has experts that compute nothing and experts",
        "LongcatFlashForCausalLM",
    ),
    ("Exaone4MoeForCausalLM", {"num_experts": 8}, "no family of its form has experts", "Exaone4ForCausalLM"),
]


@pytest.mark.parametrize(("name", "config", "mechanism", "family"), MODELS, ids=lambda value: str(value)[:24])
def test_the_error_names_the_mechanism_and_the_nearest_family(
    name: str, config: dict[str, Any], mechanism: str, family: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], **config}))
    with pytest.raises(CheckpointError) as caught:
        arch_from_folder(tmp_path)
    message = str(caught.value)
    assert f"architecture {name} is not supported" in message and mechanism in message
    assert "InternVLForConditionalGeneration" in message and "InternVLLlama" not in message, "a name of our own"
    if family is None:
        assert "nearest" not in message
    else:
        assert f"the nearest family is {family}" in message


def test_a_model_whose_code_is_its_folders_own_is_served_in_transformers_form(tmp_path: Path) -> None:
    told = {"architectures": ["InternVLChatModel"], "llm_config": {"model_type": "qwen2"}, "vision_config": {"a": 1}}
    (tmp_path / "config.json").write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match=r"ChatModel is not supported; .* same name that ends with -HF"):
        arch_from_folder(tmp_path)
    for text in IN_ANOTHER_FORM.values():
        assert any(name in text for name in FAMILIES)


def test_a_model_that_differs_by_nothing_known_gets_the_list() -> None:
    assert nearest("ExampleForCausalLM", FAMILIES) is None
    assert (nearest("Qwen3OmniForCausalLM", FAMILIES) or "").startswith("Qwen3")


def test_a_family_may_come_near_whose_name_is_another() -> None:
    assert nearest("GlmMoeNextForCausalLM", FAMILIES) == "GlmMoeDsaForCausalLM"
    assert nearest("KimiLinearForCausalLM", FAMILIES) == "DeepseekV3ForCausalLM"
    assert set(UNLIKE_IN_NAME.values()) <= set(FAMILIES)
