"""Tiny random-weight Hugging Face checkpoints of those kinds; made with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.checkpoint_kinds import FAMILIES, KINDS, values_of


def make_checkpoint(
    kind: str,
    folder: Path,
    *,
    seed: int = 0,
    max_shard_size: str | None = None,
    dtype: torch.dtype = torch.float32,
    **config_changes: object,
) -> Path:
    """Saves a random model of `kind` into `folder` and returns the folder.

    Args:
      max_shard_size: such as "50KB", for several files and an index; None: one file.
      config_changes: configuration values that differ from the kind's.
    """
    config_class, model_class, values = values_of(kind)
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = model_class(config_class(**{**values, **config_changes})).to(dtype)
    fill(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modality_router" in name:
                parameter.mul_(parameter.shape[-1] ** 0.5)  # else streams hardly depend on each other
            if "olmo" in kind and "embed" in name:
                parameter.mul_(8)  # else the normalized updates hide which token it is
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.3 * torch.randn_like(buffer))
            elif name.endswith("tid2eid"):
                count = model.config.n_routed_experts
                buffer.copy_(torch.rand(len(buffer), count).argsort(dim=1)[:, : buffer.shape[1]])
            elif name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.2 * torch.randn_like(buffer))
    torch.random.set_rng_state(generator_state)
    model.save_pretrained(folder, **({} if max_shard_size is None else {"max_shard_size": max_shard_size}))
    return folder


def fill(model: torch.nn.Module) -> None:
    """Draws parameters away from the initial ones, zeros and near-uniform logits, so that each one matters."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name.lower() or ".ln_" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(1.5 * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)


def configuration(kind: str, without: str = "") -> dict[str, Any]:
    """All values of config.json of `kind`; that of `without` is the default of transformers' configuration class."""
    config_class, model_class, values = values_of(kind)
    config = config_class(**{key: value for key, value in values.items() if key != without})
    return {**json.loads(config.to_json_string(use_diff=False)), "architectures": [model_class.__name__]}


def reference_logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """transformers' float32 logits `[T, V]` of one sequence."""
    model = load_reference(folder)
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].float()


def load_reference(folder: Path) -> PreTrainedModel:
    """The checkpoint in `folder` as a transformers model in float32."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    kinds = (*KINDS.values(), *FAMILIES.values())
    classes: dict[str, Any] = {model_class.__name__: model_class for _, model_class, _ in kinds}
    return classes[architecture].from_pretrained(folder, dtype=torch.float32).eval()
