"""Random LoRA adapters made and judged by peft."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from tests.checkpoints import load_reference

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


def make_adapter(
    model: Path, folder: Path, *, r: int = 4, modules: list[str] | str = "all-linear", seed: int = 0, **settings: Any
) -> Path:
    """Saves an adapter with random A and B for the checkpoint in `model`; returns its folder."""
    torch.manual_seed(seed)
    config = LoraConfig(r=r, target_modules=modules, **{"lora_alpha": 2 * r, "init_lora_weights": False, **settings})
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of peft: what it asks of transformers, and what it saves
        adapted = get_peft_model(load_reference(model), config)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
        adapted.save_pretrained(str(folder))
    return folder


def adapted_logits(model: Path, adapter: Path | None, token_ids: list[int]) -> torch.Tensor:
    """peft's float32 logits `[T, V]` of one sequence."""
    reference: Any = load_reference(model)
    if adapter is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reference = PeftModel.from_pretrained(reference, adapter)
    with torch.no_grad():
        logits: torch.Tensor = reference.eval()(torch.tensor([token_ids])).logits[0].float()
    return logits
