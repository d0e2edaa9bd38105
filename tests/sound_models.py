"""Tiny checkpoints of models that hear, requests with random sounds, and what transformers says of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from jaxsgl.requests.media import FRAMES_OF_PATCH, MediaItem, SoundShape, digest_of, patches_of
from jaxsgl.requests.request import Request, SamplingParams

VOCAB, AUDIO, FIRST_SPECIAL = 256, 250, 250
# All sizes differ, and no two axes of a tensor can be mistaken for each other.
TOWER = {
    "num_mel_bins": 10, "max_source_positions": 50, "hidden_size": 20, "intermediate_size": 40,
    "num_hidden_layers": 3, "num_attention_heads": 2,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
# Configurations and models of the whole and of its tower, and what differs from `TEXT`.
KINDS: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "qwen2_audio": (
        transformers.Qwen2AudioConfig,
        transformers.Qwen2AudioForConditionalGeneration,
        transformers.Qwen2AudioEncoderConfig,
        {"model_type": "qwen2"},
    ),
    "voxtral": (
        transformers.VoxtralConfig,
        transformers.VoxtralForConditionalGeneration,
        transformers.VoxtralEncoderConfig,
        {"model_type": "llama", "head_dim": 20},
    ),
}
SHAPES = {"qwen2_audio": SoundShape(50, 10, 2, False), "voxtral": SoundShape(50, 10, 2, True)}


def make_model(folder: Path, kind: str, *, seed: int = 0, **tower: Any) -> Any:
    """Saves a random model of one of `KINDS` into `folder`; returns it. It never answers with a placeholder.

    `tower` are values of the tower's configuration that differ from `TOWER`.
    """
    transformers.logging.disable_progress_bar()
    config_class, model_class, tower_class, of_kind = KINDS[kind]
    given = {tower_class.attribute_map.get(key, key): value for key, value in {**TOWER, **tower}.items()}
    if kind == "voxtral":
        given = {**TOWER, **tower}
    token = {"audio_token_index" if kind == "qwen2_audio" else "audio_token_id": AUDIO}
    heard = {"model_type": tower_class.model_type, **given}
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = model_class(config_class(text_config={**TEXT, **of_kind}, audio_config=heard, **token)).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.15 if parameter.ndim > 1 else 0.1))
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
        model.lm_head.weight[FIRST_SPECIAL:] = 0
    torch.random.set_rng_state(state)
    model.save_pretrained(folder)
    return model


def sound(offset: int, shape: SoundShape, filled: int, seed: int) -> MediaItem:
    """A chunk of random frames that stands at `offset`, of which a sound fills so many patches."""
    frames = np.random.default_rng(seed).normal(size=(FRAMES_OF_PATCH * shape.num_patches, shape.bins))
    content = frames.astype("<f4").tobytes()
    digest = digest_of(content, shape.grid, f"test {filled}")
    return MediaItem(digest, offset, shape.num_tokens(filled), shape.grid, content, filled=filled)


def request(request_id: str, kind: str, num_sounds: int, seed: int, **params: Any) -> Request:
    """Text with sounds between it, which follow each other at times, as the chunks of a long one do."""
    rng, shape = np.random.default_rng(seed), SHAPES[kind]
    ids: list[int] = rng.integers(5, 240, rng.integers(1, 6)).tolist()
    items: list[MediaItem] = []
    for i in range(num_sounds):
        filled = int(rng.integers(2 * shape.merge, shape.num_patches + 1))
        items.append(sound(len(ids), shape, filled, 100 * seed + i))
        ids += [*[AUDIO] * items[-1].length, *rng.integers(5, 240, rng.integers(0, 5)).tolist()]
    ids += rng.integers(5, 240, 2).tolist()
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **params})
    return Request(request_id, ids, sampling, media=tuple(items))


def features(media: Sequence[MediaItem]) -> dict[str, Any]:
    """What transformers takes of chunks: their frames, and which of them sounds fill."""
    frames = [
        np.frombuffer(patches_of(item).tobytes(), "<f4").reshape(FRAMES_OF_PATCH * item.num_patches, -1)
        for item in media
    ]
    lengths = torch.tensor([[FRAMES_OF_PATCH * item.filled] for item in media])
    taken = torch.tensor(np.stack(frames)).transpose(1, 2)
    return {"input_features": taken, "feature_attention_mask": (torch.arange(taken.shape[2])[None] < lengths).int()}


def taken(model: Any, media: Sequence[MediaItem]) -> dict[str, Any]:
    """What the model takes of `media`."""
    given = features(media) if media else {}
    if model.config.model_type == "voxtral":
        given.pop("feature_attention_mask", None)
    return given


def is_greedy(model: Any, request: Request, answer: Sequence[int]) -> bool:
    """Whether each token of `answer` is the one that transformers finds most likely after those before it."""
    ids = torch.tensor([[*request.prompt_ids, *answer]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False, **taken(model, request.media)).logits[0].numpy()
    best = logits[len(request.prompt_ids) - 1 : -1].argmax(axis=-1)
    return bool(best.tolist() == list(answer))
