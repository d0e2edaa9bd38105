"""Reads the MLPs of a decoder's layers from config.json: which are dense, and what the mixtures of experts are.

Called by `layer_config`. Knows the keys; `families` says which of them a family has.
"""

from __future__ import annotations

from jaxsgl.errors import CheckpointError
from jaxsgl.models.config_file import ConfigFile
from jaxsgl.models.families import MoeFamily
from jaxsgl.models.layer_spec import Clamp, DenseMlp, MoeMlp, Router


def read_mlps(config: ConfigFile, family: MoeFamily | None, num_layers: int) -> list[DenseMlp | MoeMlp]:
    """The MLP of each layer. Raises `CheckpointError` for numbers that don't fit each other."""
    if family is None:
        return [DenseMlp(config.count("intermediate_size"))] * num_layers
    is_dense = _read_dense_layers(config, family, num_layers)
    mixture = _read_mixture(config, family)
    config.get("intermediate_size")  # without meaning where no layer is dense
    return [DenseMlp(config.count("intermediate_size")) if dense else mixture for dense in is_dense]


def _read_dense_layers(config: ConfigFile, family: MoeFamily, num_layers: int) -> list[bool]:
    if family.dense_layers == "first":
        first = config.get("first_k_dense_replace", 0)
        return [layer < first for layer in range(num_layers)]
    if family.dense_layers == "steps":
        step, dense = config.count("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
        return [layer in dense or (layer + 1) % step != 0 for layer in range(num_layers)]
    return [False] * num_layers


def _read_mixture(config: ConfigFile, family: MoeFamily) -> MoeMlp:
    counts = {key: config.get(key) for key in family.count_keys}
    key = next((key for key, value in counts.items() if value is not None), family.count_keys[0])
    num_experts, ffn_size = config.count(key), config.count(family.ffn_key)
    router = Router(
        top_k=config.count("num_experts_per_tok"),
        score=family.score,
        renormalize=bool(config.get("norm_topk_prob", False)) if family.renormalize is None else family.renormalize,
        scale=config.number("routed_scaling_factor", 1.0) if family.grouped else 1.0,
        num_groups=config.count("n_group", 1) if family.grouped else 1,
        top_groups=config.count("topk_group", 1) if family.grouped else 1,
        choice_bias=family.choice_bias,
        bias=family.router_bias,
    )
    group_size = num_experts // router.num_groups
    if router.top_k > num_experts or num_experts % router.num_groups or router.top_groups > router.num_groups:
        raise CheckpointError(
            f"{config.path}: {router.top_k} of {num_experts} experts in {router.top_groups} of {router.num_groups} "
            "groups can't be chosen"
        )
    if router.top_groups < router.num_groups and (group_size < 2 or router.top_k > router.top_groups * group_size):
        raise CheckpointError(
            f"{config.path}: {router.top_k} experts can't be chosen from {router.top_groups} groups of {group_size}"
        )
    clamp = Clamp(config.number("swiglu_limit", 7.0), config.number("swiglu_alpha", 1.702)) if family.clamped else None
    shared_size = _read_shared_size(config, family, ffn_size)
    return MoeMlp(num_experts, ffn_size, router, family.expert_bias, clamp, shared_size, family.shared_gate)


def _read_shared_size(config: ConfigFile, family: MoeFamily, ffn_size: int) -> int:
    """F of the experts that all tokens pass through; 0: there are none."""
    if family.shared_ffn_key is not None:
        return config.count(family.shared_ffn_key)
    return int(config.get(family.shared_key, 0)) * ffn_size if family.shared_key is not None else 0
