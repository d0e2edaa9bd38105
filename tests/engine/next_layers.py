"""Random checkpoints with a layer after the last one, and what it drafts by transformers' layers, from all tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint_kinds import two_layers
from tests.checkpoints import load_reference, make_checkpoint

NUM_LAYERS = 2
# What a checkpoint of a draft head calls the tensors around its layer.
DRAFT_HEAD = {
    "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "eh_proj.weight": "mtp.fc.weight",
    "shared_head.norm.weight": "mtp.norm.weight",
}


def write_draft_head(kind: str, folder: Path, **changes: Any) -> PlainNextLayer:
    """Writes a checkpoint of `kind` whose draft head is the last layer of another one, which attends."""
    model = make_checkpoint(kind, folder / "model", seed=3, **two_layers(kind), **changes)
    other = make_checkpoint(kind, folder / "other", seed=4, **two_layers(kind), **changes)
    tensors, own = _with_own_tensors(model, other, mean=0.0)
    tensors |= {DRAFT_HEAD.get(name, f"mtp.layers.0.{name}"): value for name, value in own.items()}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return PlainNextLayer(model, other, {name: value + (value.ndim == 1) for name, value in own.items()})


def write_next_layer(kind: str, folder: Path, **changes: Any) -> PlainNextLayer:
    """Writes a checkpoint of `kind` whose next layer is that of another one with another seed."""
    model = make_checkpoint(kind, folder / "model", seed=3, num_hidden_layers=NUM_LAYERS, **changes)
    other = make_checkpoint(kind, folder / "other", seed=4, num_hidden_layers=NUM_LAYERS, **changes)
    tensors, own = _with_own_tensors(model, other, mean=1.0)
    own |= {"shared_head.head.weight": torch.zeros(1), "embed_tokens.weight": torch.zeros(1)}  # not read here
    tensors |= {f"model.layers.{NUM_LAYERS}.{name}": value for name, value in own.items()}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return PlainNextLayer(model, other, own)


def _with_own_tensors(model: Path, other: Path, mean: float) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The model's tensors, and those of a next layer, by their names within it; norms are about `mean`."""
    tensors, others = (load_file(each / "model.safetensors") for each in (model, other))
    size = len(others["model.norm.weight"])
    generator = torch.Generator().manual_seed(5)
    own = {
        "enorm.weight": mean + 0.2 * torch.randn(size, generator=generator),
        "hnorm.weight": mean + 0.2 * torch.randn(size, generator=generator),
        "eh_proj.weight": torch.randn(size, 2 * size, generator=generator) / size**0.5,
        "shared_head.norm.weight": others["model.norm.weight"].clone(),
    }
    last = f"model.layers.{NUM_LAYERS - 1}."
    own |= {name.removeprefix(last): value.clone() for name, value in others.items() if name.startswith(last)}
    return tensors, own


class PlainNextLayer:
    """Drafts after a text, without pages, chunks or steps.

    Args:
      folder: the model's.
      other: of a model whose last layer and norm are the next layer's.
      own: the next layer's tensors.
      shift: how many tokens too early its states are: not 0 for a test of tests.
    """

    def __init__(self, folder: Path, other: Path, own: dict[str, torch.Tensor], shift: int = 0) -> None:
        self.folder, self._other, self._own, self._shift = folder, other, own, shift
        self._model = load_reference(folder)
        self._layer = load_reference(other).model
        self._layer.layers = self._layer.layers[-1:]
        self._layer.config.num_hidden_layers = 1
        if getattr(self._layer.config, "layer_types", None):
            self._layer.config.layer_types = self._layer.config.layer_types[-1:]
        self._eps = self._model.config.rms_norm_eps
        self._known: dict[tuple[int, ...], list[int]] = {}

    def shifted(self) -> PlainNextLayer:
        """One that reads the state of the token before the one before."""
        return PlainNextLayer(self.folder, self._other, self._own, 1)

    def drafts(self, ids: Sequence[int], count: int) -> list[int]:
        """The greedy chain after `ids`, of which the model has not computed the last one."""
        if (*ids, count) not in self._known:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # so few numbers; on a busy machine threads wait for each other
            self._known[*ids, count] = self._drafts(ids, count)
            torch.set_num_threads(threads)
        return self._known[*ids, count]

    @torch.no_grad()
    def _drafts(self, ids: Sequence[int], count: int) -> list[int]:
        hidden = self._model.model(torch.tensor([ids[:-1]]), use_cache=False).last_hidden_state[0]
        zeros = torch.zeros(1 + self._shift, hidden.shape[1])
        tokens, states = list(ids), torch.cat([zeros, hidden])[: len(ids)]
        for _ in range(count):
            embedded = self._model.model.embed_tokens(torch.tensor(tokens))
            both = [self._normed(embedded, "enorm.weight"), self._normed(states, "hnorm.weight")]
            joined = torch.cat(both, dim=-1) @ self._own["eh_proj.weight"].T
            out = self._layer(inputs_embeds=joined[None], use_cache=False).last_hidden_state[0, -1:]
            tokens.append(int(self._model.lm_head(out).argmax()))
            states = torch.cat([states, out])
        return tokens[len(ids) :]

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self._own[name], self._eps)
