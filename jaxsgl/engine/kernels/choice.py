"""Which kernels an engine asks for: their backends, as flags say, and the shapes with which a model's layers call them.

Never knows which backends can run: `pallas_kernels.dispatch` does. Called by `engine`, at start, and by `tester`.
"""

from __future__ import annotations

import dataclasses
import math

from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.kernels import OP_OF_NAME, read_kernels
from jaxsgl.errors import ConfigError
from jaxsgl.models import ModelArch
from jaxsgl.models.layer_spec import (
    ChannelDeltaNet,
    DeltaNet,
    DenseMlp,
    GroupedAttention,
    Latent,
    Mamba,
    MoeMlp,
    RecurrentNet,
    Selective,
    TokenGroups,
)
from jaxsgl.models.layers import norm_dtype, qkv_heads
from jaxsgl.models.matrix import group_of_part
from jaxsgl.models.moe import MOST_SHARED, expert_shapes
from jaxsgl.models.precision import Precision
from jaxsgl.models.quantization import FLOAT8, WeightFormat
from pallas_kernels import KernelChoice
from pallas_kernels.choice import ON_GPUS, XLA
from pallas_kernels.kept_heads import KeptHeads
from pallas_kernels.packed import ON_ACCELERATORS, refuse
from pallas_kernels.selftest.shapes import (
    RULES,
    ExpertShape,
    GroupedShape,
    KernelShapes,
    LatentShape,
    MatrixShape,
    StateShape,
)


def asked_kernels(config: EngineConfig, arch: ModelArch) -> KernelChoice:
    """The choice that flags make. Raises `ConfigError` for kernels of what the model doesn't have."""
    chosen = read_kernels(config.kernels)
    fmt = arch.weight_format
    if chosen.get(OP_OF_NAME["quantized"], "auto") != "auto" and (fmt is None or not fmt.is_in_groups):
        raise ConfigError(
            f"--kernels names quantized, but {arch.name} has no weights whose scales are those of groups: leave it out"
        )
    if chosen.get(OP_OF_NAME["experts"], "auto") != "auto" and arch.mixture is None:
        raise ConfigError(f"--kernels names experts, but {arch.name} has none: leave them out")
    if chosen.get(OP_OF_NAME["states"], "auto") != "auto" and arch.recurrent_net is None:
        raise ConfigError(f"--kernels names states, but the layers of {arch.name} keep none: leave it out")
    has_chosen = arch.latent is not None and arch.latent.index is not None
    attends_by = {
        "chosen": (has_chosen, "latents of which an index chooses"),
        "grouped": (arch.grouped is not None, "entries of groups of tokens"),
        "index": (has_chosen or any(each.index is not None for each in arch.token_groups), "index"),
    }
    for name, (has_it, what) in attends_by.items():
        if chosen.get(OP_OF_NAME[name], "auto") != "auto" and not has_it:
            raise ConfigError(f"--kernels names {name}, but {arch.name} has no {what}: leave it out")
    if chosen.get(OP_OF_NAME["float8"], "auto") != "auto" and (fmt is None or fmt.numbers != FLOAT8):
        raise ConfigError(f"--kernels names float8, but {arch.name} has no weights in float8: leave it out")
    if config.weight_only and fmt is not None and fmt.numbers == FLOAT8:
        chosen.setdefault(OP_OF_NAME["float8"], XLA)
    return KernelChoice.of_attention(config.attention_backend).with_backends(chosen)


def may_round_rows_of_experts(kernels: KernelChoice) -> bool:
    """Whether products with experts may round their rows to float8, as those of layers do, if the device can."""
    return kernels.float8_product != XLA and kernels.grouped_product in ON_GPUS


def kernel_flags(config: EngineConfig) -> str:
    """The flags that name kernels, for errors; empty if none does."""
    flags = [] if config.attention_backend == "auto" else [f"--attention-backend {config.attention_backend}"]
    return " ".join(flags + ([f"--kernels {','.join(config.kernels)}"] if config.kernels else []))


def kernel_shapes(
    arch: ModelArch,
    precision: Precision,
    page_size: int,
    heads: KeptHeads,
    num_devices: int,
    num_ranks: int = 1,
    *,
    in_fixed_order: bool = False,
) -> KernelShapes:
    """Those of `arch`, kept in `precision` on `num_devices` that share it; pages keep a device's heads as `heads`.

    The devices of each rank share attention and states, all devices MLPs and experts.

    Where layers have other heads than the model, these are theirs in `arch.with_heads(..)`.
    """
    by_heads = arch.qk_norm in (None, "head")  # else XLA adds biases and normalizes
    options = (  # no kernel sees chunks
        dataclasses.replace(arch.attention_options(layer), in_fixed_order=in_fixed_order, chunk=None)
        for layer in range(arch.num_layers)
    )
    return KernelShapes(
        num_kv_heads=heads.kept_heads,
        num_groups=arch.num_heads // arch.num_kv_heads * heads.together,
        head_dim=heads.width,
        page_size=page_size,
        hidden_size=arch.hidden_size,
        dtype=precision.activations.name,
        kv_dtype=precision.kv.name,
        norm_dtype=norm_dtype(arch, precision.weights).name,
        attention=tuple(dict.fromkeys(options)),
        has_sinks=arch.has_sinks,
        has_bias=arch.attention_bias and by_heads,
        has_out_bias=arch.attention_out_bias or arch.mlp_bias or arch.down_bias,
        has_out_norms=bool(arch.normed["mlp_out_norm"]),
        is_centred=arch.centred,
        residual_scale=arch.residual_scale,
        has_stream_factors=arch.layer_factors,
        has_norm_bias=arch.norm_bias,
        has_head_norms=arch.qk_norm == "head" or any(layer.unit_heads for layer in arch.layers),
        rotates_first=arch.rotates_first,
        normalizes_values=arch.normalizes_values,
        experts=_expert_shapes(arch, precision, num_devices),
        matrices=_matrix_shapes(arch, num_devices, num_ranks),
        states=_state_shapes(arch, num_devices // num_ranks),
        latents=() if arch.latent is None else (_latent_shape(arch.latent),),
        grouped=_grouped_shapes(arch),
        in_fixed_order=in_fixed_order,
    )


def _latent_shape(latent: Latent) -> LatentShape:
    index, plain = latent.index, LatentShape(latent.unrotated, latent.value)
    if index is None:
        return plain
    sizes = {"num_chosen": index.num_chosen, "index_heads": index.num_heads, "index_size": index.size}
    return dataclasses.replace(plain, key_size=latent.kv_rank + latent.rotated, **sizes)


def _grouped_shapes(arch: ModelArch) -> tuple[GroupedShape, ...]:
    """Of each kind of layers over windows and groups of tokens."""
    mixers = (layer.mixer for layer in arch.layers)
    kinds = dict.fromkeys(mixer.groups for mixer in mixers if isinstance(mixer, GroupedAttention))
    return tuple(_grouped_shape(groups, arch.head_dim) for groups in kinds)


def _grouped_shape(groups: TokenGroups | None, head_dim: int) -> GroupedShape:
    if groups is None:
        return GroupedShape()
    plain, index = GroupedShape(groups.size, groups.entry_size(head_dim)), groups.index
    return (
        plain if index is None else dataclasses.replace(plain, num_chosen=index.num_chosen, index_heads=index.num_heads)
    )


_RULES = dict(zip((DeltaNet, ChannelDeltaNet, Mamba, Selective), RULES, strict=True))  # of kinds of layers


def _state_shapes(arch: ModelArch, num_devices: int) -> tuple[StateShape, ...]:
    """Of the layers that keep some. What else keeps states is XLA's on accelerators, so there is nothing to test."""
    nets = [layer.mixer for layer in arch.layers if isinstance(layer.mixer, RecurrentNet)]
    shapes = (
        StateShape(
            net.key_heads // num_devices, net.group, net.key_size, net.value_size, net.taps, _RULES[type(net)],
            rank=net.rank if isinstance(net, Selective) else 0,
        )
        for net in nets
        if type(net) in _RULES
    )  # fmt: skip
    return tuple(dict.fromkeys(shapes))


def _expert_shapes(arch: ModelArch, precision: Precision, num_devices: int) -> tuple[ExpertShape, ...]:
    """Of the products of a mixture: gate and up, and down."""
    mixture = arch.mixture
    if mixture is None:
        return ()
    fmt = _format_of_experts(arch, mixture)
    packing = _packing(fmt)
    has_groups = fmt is not None and (fmt.is_in_groups or fmt.numbers == "int4")
    is_scaled = fmt is not None and fmt.scaled_experts and has_groups and not packing
    in_groups = fmt is not None and (fmt.group is not None or is_scaled)
    dtype = precision.weights.name if fmt is None or in_groups else fmt.numbers  # which takes its place if it fails
    experts, parts = (num_devices, 1) if arch.by_experts else (1, num_devices)
    num_experts, ffn = mixture.num_experts // experts, mixture.num_units // parts
    width = mixture.width(arch.hidden_size)
    router = dataclasses.replace(mixture.router, num_shared=_num_joined(arch, mixture, fmt))

    def shape(outputs: int, inputs: int, all_inputs: int, *, of_tokens: bool) -> ExpertShape:
        common = num_experts, outputs, inputs, dtype, router, mixture.num_choices, of_tokens
        plain = ExpertShape(*common, activation=arch.activation)
        if fmt is None or not (packing or is_scaled or fmt.numbers == FLOAT8):
            return plain
        group = group_of_part(fmt.group_of(all_inputs), all_inputs, all_inputs // inputs)
        if is_scaled:
            return dataclasses.replace(plain, numbers=fmt.numbers, group=group, has_zeros=fmt.has_zeros)
        if not packing:
            blocks = fmt.block_outputs(outputs // arch.unit_rows if of_tokens else outputs, reordered=False)
            return dataclasses.replace(plain, float8_group=group, block_outputs=blocks)
        return dataclasses.replace(plain, packing=packing, group=group, has_zeros=fmt.has_zeros)

    return (
        shape(arch.unit_rows * ffn, width, width, of_tokens=True),
        shape(width, ffn, mixture.num_units, of_tokens=False),
    )


def _format_of_experts(arch: ModelArch, mixture: MoeMlp) -> WeightFormat | None:
    """The format that kernels get experts in; None: they are not quantized, or not after they are loaded."""
    if arch.expert_format is not None:
        told: WeightFormat | None = arch.expert_format
    else:
        has_plain = any("experts" in layer.unquantized for layer in arch.layers)
        told = None if has_plain else arch.weight_format
    fmt = None if told is None else told.of_experts(expert_shapes(arch, mixture, told.parts))
    return None if arch.expert_format is not None and not _packing(fmt) else fmt


def _packing(fmt: WeightFormat | None) -> str:
    """How accelerators have it packed; "" if they don't."""
    return fmt.packing if fmt is not None and fmt.packing in ON_ACCELERATORS else ""


def _num_joined(arch: ModelArch, mixture: MoeMlp, fmt: WeightFormat | None) -> int:
    """Shared experts that products with the others may read, too; see `MoE`."""
    num_shared, rest = divmod(mixture.shared_ffn_size, mixture.num_units)
    is_refused = rest or fmt is not None or arch.by_experts or mixture.latent_size or mixture.scales_inputs
    is_refused = is_refused or mixture.clamp is not None
    return 0 if is_refused or num_shared > MOST_SHARED else num_shared


def _matrix_shapes(arch: ModelArch, num_devices: int, num_ranks: int) -> tuple[MatrixShape, ...]:
    """Of the layers' quantized matrices that are no experts', each device's part; in the order of a layer."""
    fmt = arch.weight_format
    if fmt is None:
        return ()
    mlps = [mlp for layer in arch.layers for mlp in (layer.mlp, layer.experts) if mlp is not None]
    ffns = dict.fromkeys(mlp.ffn_size if isinstance(mlp, DenseMlp) else mlp.shared_ffn_size for mlp in mlps)
    hidden = arch.hidden_size
    of_rank = _mixer_matrices(arch)
    rows = arch.unit_rows
    of_all = [each for ffn in ffns if ffn for each in ((rows * ffn, hidden, "outputs"), (hidden, ffn, "inputs"))]
    if arch.embedding_size:
        of_all += [(arch.embedding_size, hidden, ""), (hidden, arch.embedding_size, "")]

    def shape(outputs: int, inputs: int, group: int) -> MatrixShape:
        is_packed = fmt.packing in ON_ACCELERATORS and refuse(fmt.packing, (outputs, inputs), group) is None
        packing = fmt.packing if is_packed else ""
        blocks = fmt.block_outputs(outputs, reordered=False)  # of runs of outputs some may be shorter
        return MatrixShape(outputs, inputs, fmt.numbers, group, fmt.has_zeros, packing, blocks)

    def part(outputs: int, inputs: int, shared: str, parts: int) -> MatrixShape:
        group = fmt.group_of(inputs)
        if shared != "inputs":
            outputs = outputs // parts if shared == "outputs" else outputs
            return shape(outputs, inputs, group)
        return shape(outputs, inputs // parts, group_of_part(group, inputs, parts))

    whole = [(*each, num_devices // num_ranks) for each in of_rank] + [(*each, num_devices) for each in of_all]
    return tuple(dict.fromkeys(part(*each) for each in whole))


def _mixer_matrices(arch: ModelArch) -> list[tuple[int, int, str]]:
    """Outputs and inputs of each matrix around attention and states, and which of them devices share: "" for none."""
    hidden, n, latent, net = arch.hidden_size, arch.num_heads, arch.latent, arch.recurrent_net
    if (grouped := arch.grouped) is not None:
        outputs, rank = grouped.out_groups * grouped.out_rank, grouped.q_rank
        of_queries = (rank, hidden, ""), (n * arch.head_dim, rank, "outputs")
        return [*of_queries, (arch.head_dim, hidden, ""), (hidden, outputs, "inputs")]
    others = []
    if net is not None:
        values = net.value_heads * net.value_size
        others = [(net.key_heads * net.rows, hidden, "outputs"), (hidden, values, "inputs")]
    if latent is None:
        out = n * (arch.value_dim or arch.head_dim)
        if arch.reading_layers:
            others = [(n * arch.head_dim, hidden, "outputs")]  # queries without keys
        return [(math.prod(qkv_heads(arch)), hidden, "outputs"), *others, (hidden, out, "inputs")]
    query = n * (latent.unrotated + latent.rotated)
    queries = [(query, hidden, "outputs")]
    if latent.q_rank is not None:
        queries = [(latent.q_rank, hidden, ""), (query, latent.q_rank, "outputs")]
    index = latent.index
    if index is not None:
        queries += [(index.num_heads * index.size, latent.q_rank or 0, ""), (index.size, hidden, "")]
    return [*queries, (latent.kv_rank + latent.rotated, hidden, ""), *others, (hidden, n * latent.value, "inputs")]
