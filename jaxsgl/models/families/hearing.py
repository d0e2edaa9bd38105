"""Families that hear: decoders of other families next to Whisper's encoder (arXiv 2212.04356), and what these imply."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxsgl.models.families.dense import DENSE
from jaxsgl.models.family import Family
from jaxsgl.models.towers.family import HearingFamily

# Arxiv 2407.10759.
_QWEN2_AUDIO_TOWER = HearingFamily("audio_token_index", 151_646, "averaged", hears_all=False)
# Arxiv 2507.13264.
_VOXTRAL_TOWER = HearingFamily(
    "audio_token_id",
    24,
    "square",
    hears_all=True,
    keys={
        "d_model": "hidden_size",
        "encoder_attention_heads": "num_attention_heads",
        "encoder_ffn_dim": "intermediate_size",
        "encoder_layers": "num_hidden_layers",
    },
    required_beside={"projector_hidden_act": "gelu"},
)
# Of the tower: for training, or what its other half, of which nothing is here, reads.
_IGNORED = frozenset({"head_dim", "num_key_value_heads", "vocab_size"})


def _beside(tower: HearingFamily, decoder: Family, **sizes: Any) -> Family:
    """A family whose decoders stand next to the tower; `sizes` are those that published folders leave out."""
    return replace(
        decoder,
        section="text_config",
        hearing=tower,
        defaults={**decoder.defaults, **sizes},
        ignored=decoder.ignored | _IGNORED | {"hidden_size"},
    )


HEARING: dict[str, Family] = {
    "Qwen2AudioForConditionalGeneration": _beside(
        _QWEN2_AUDIO_TOWER,
        DENSE["Qwen2ForCausalLM"],
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=22_016,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=32_768,
    ),
    "VoxtralForConditionalGeneration": _beside(
        _VOXTRAL_TOWER,
        DENSE["LlamaForCausalLM"],
        vocab_size=131_072,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=30,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_theta=100_000_000.0,
        head_dim=128,
    ),
}
