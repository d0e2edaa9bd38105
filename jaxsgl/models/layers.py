"""The parts of a decoder layer: vectors, attention projections, gated MLP. Token-flat: the first axis is T.

Every parameter is declared with its logical axes (`weights/sharding.py` maps them to mesh axes) and its initial
distribution (`weights/loading.py` draws dummy weights from it). Knows nothing of pages, KV buffers or checkpoints.

Matrices are stored `[..., in]`, as in checkpoints: a CPU multiplies that form fastest (`precision.py`), and
accelerators multiply both forms equally fast. They may be quantized (`matrix.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxsgl.models.arch import ModelArch
from jaxsgl.models.family import GateFunction
from jaxsgl.models.layer_spec import DeltaNet, DenseMlp, LayerSpec, Mamba, RecurrentNet, ShortConv
from jaxsgl.models.lora import LayerAdapters
from jaxsgl.models.matrix import Axes, Matrices, Rows, Weights, gated_rows
from jaxsgl.models.precision import gated_product, product, product_in_parts, product_of_heads
from jaxsgl.models.quantization import WeightFormat
from jaxsgl.models.rope import RopeTables, reorders_heads
from jaxsgl.models.tensor_parallel import all_parts, num_parts, on_first_part, sum_of_parts
from jaxsgl.models.units import unit_of, xielu
from pallas_kernels import FusedQkv, GatedUnit, GroupedQkv, KernelChoice, LatentQkv
from pallas_kernels.choice import AUTO_CHOICE
from pallas_kernels.delta_tokens import StateTokens
from pallas_kernels.norm import Biased, Update, biased, centred, multiplied, rms_norm, row_of, scale_of, sum_parts
from pallas_kernels.short_conv import ConvTokens
from pallas_kernels.sums import mean_squares, row_sums
from pallas_kernels.target import target_device

Row: TypeAlias = tuple[jax.Array, int]  # a stack of vectors `[L, ...]`, and which of them


class Norm(NamedTuple):
    """A norm of rows `[T, D]`.

    Attributes:
      scale: what they are multiplied by.
      bias: what is added to them then; None: nothing is.
    """

    scale: Row
    bias: Row | None = None

    def __call__(self, x_TD: jax.Array, eps: float) -> jax.Array:
        """The rows, normalized."""
        normed_TD = rms_norm(x_TD, scale_of(*self.scale, x_TD.dtype), eps)
        return normed_TD if self.bias is None else biased(normed_TD, *self.bias)


class LayerRows:
    """Picks the rows of one layer in the vectors that all layers share, during one trace of the model.

    XLA compiles equal kernels once. A kernel that knows its row is equal to no other layer's: with 28 layers it would
    be compiled 28 times, in each program. So a CPU's kernels get the row's index from memory. Accelerators' kernels
    take the stack and the index, as `pallas_kernels` has it.
    """

    def __init__(self, num_layers: int, positions_T: jax.Array, activations: DTypeLike) -> None:
        self._activations = activations
        self._indices = _indices_in_memory(num_layers, positions_T) if target_device().platform == "cpu" else None

    def of(self, stack: nnx.Param[jax.Array] | None, row: int | None) -> Row | None:
        """A row of a stack `[L, ...]`; None where the model has no such vectors, or the layer no row."""
        vectors = None if row is None else self.stack(stack, row)
        return None if row is None or vectors is None else (vectors, self.row(row))

    def norm(
        self, scales: nnx.Param[jax.Array] | None, biases: nnx.Param[jax.Array] | None, row: int | None
    ) -> Norm | None:
        """The norm of a row in these stacks; None where the model has no such norms, or the layer no row."""
        scale = self.of(scales, row)
        return None if scale is None else Norm(scale, self.of(biases, row))

    def stack(self, stack: nnx.Param[jax.Array] | None, layer: int) -> jax.Array | None:
        """The stack, or what is left of it for `layer`; which row that layer has in it, `row` says."""
        if stack is None or self._indices is None:
            return None if stack is None else stack[...]
        # Converted before it is cut: XLA would make an array of its own of each row that is cut in 16 bits.
        wide = stack[...].astype(jnp.promote_types(stack.dtype, self._activations))
        return wide.at[self._indices[layer]].get(mode="promise_in_bounds")[None]

    def row(self, layer: int) -> int:
        """The row of `layer` in each stack that `stack` returns for it."""
        return layer if self._indices is None else 0


def _indices_in_memory(num_layers: int, positions_T: jax.Array) -> tuple[jax.Array, ...]:
    """0 to num_layers - 1, each in an array that XLA knows nothing about: it looks into no branch of a condition.

    An optimization barrier would not do, since XLA removes it before it forms kernels.
    """
    numbers = range(num_layers)
    indices: tuple[jax.Array, ...] = jax.lax.cond(
        positions_T[0] >= 0, lambda: tuple(map(jnp.int32, numbers)), lambda: tuple(jnp.int32(0) for _ in numbers)
    )
    return indices


@dataclass(frozen=True)
class Queries:
    """What a layer attends with to the keys and values of another one, which are stored already.

    Attributes:
      heads: `[T, N, H]`, normalized and turned.
      num_kv_heads: K, kv heads of the other layer.
    """

    heads: jax.Array
    num_kv_heads: int

    @property
    def head_dim(self) -> int:
        """H."""
        return int(self.heads.shape[-1])


Qkv: TypeAlias = FusedQkv | LatentQkv | GroupedQkv


class Attend(Protocol):
    """Stores this step's keys and values, and attends to all of each sequence; the caller of the model provides it."""

    def __call__(self, place: int, qkv: Qkv | Queries, sinks: jax.Array | None, /) -> jax.Array:
        """Returns the attention output `[T, N, H]`; `qkv.split()` says what is attended, and H is that of its values.

        Of a `LatentQkv` it is what `heads.outputs` makes of that, `[T, N, V]`.
        Of `Queries` nothing is stored: they attend to what the layer at `place` has stored before, in this step too.
        `place` is that of the layer in `ModelArch.attention_layers`; the softmax scale, the window and the soft cap are
        those of its `ModelArch.attention_options`. `sinks` `[N]` float32 join the denominators of the softmaxes; None:
        there are none.
        """
        ...


class Recur(Protocol):
    """Moves the states of this step's sequences over its tokens; the caller of the model provides it, as `Attend`."""

    def __call__(self, place: int, tokens: StateTokens | ConvTokens, /) -> jax.Array:
        """What each token reads from its sequence's state, normalized and gated: `[T, K', r, v]`.

        `place` is that of the layer among those that have states.
        """
        ...


def no_states(place: int, tokens: StateTokens | ConvTokens, /) -> jax.Array:
    """The `Recur` of a caller whose models have no states."""
    raise NotImplementedError("this caller keeps no states")


def vector(shape: tuple[int, ...], axes: Axes, dtype: jnp.dtype, *, mean: float) -> nnx.Param[jax.Array]:
    """Declares a bias (mean 0) or a norm's scale (mean 1)."""
    return nnx.Param(jnp.zeros(shape, dtype), axes=axes, mean=mean, std=0.0)


def _matrices(shape: tuple[int, int, int], dtype: jnp.dtype) -> nnx.Param[jax.Array]:
    """Declares small matrices `[L, out, in]`, which every device has whole."""
    return nnx.Param(jnp.zeros(shape, dtype), axes=(None, None, None), mean=0.0, std=shape[-1] ** -0.5)


class LayerVectors(nnx.Module):
    """The norms' scales, biases of attention, and the small parameters of what recurs, of all layers: one array each.

    Row p of what only some layers have is that of the layer at place p among these (`ModelArch.normed`,
    `ModelArch.places`). Where heads differ in size, the scales of smaller ones end in padding.

    As parameters of their own they would be five arguments per layer, and each argument costs the launch of a program
    about a microsecond.
    """

    def __init__(self, arch: ModelArch, dtype: jnp.dtype) -> None:
        self.norm_dtype = norm_dtype(arch, dtype)
        self.attention_norm, self.attention_out_norm = (
            self._norms(arch, name=name) for name in ("attention_norm", "attention_out_norm")
        )
        # The row of a layer that is an MLP alone, as of one that is a mixer alone, is in `attention_norm`.
        has_two = any(layer.mixer is not None and layer.mlp is not None for layer in arch.layers)
        self.mlp_norm = self._norms(arch, has_two and arch.parallel != "shared norm", "mlp_norm")
        self.attention_norm_bias, self.mlp_norm_bias = (
            None if norm is None or not arch.norm_bias else self._norms(arch, name=name, mean=0.0)
            for norm, name in ((self.attention_norm, "attention_norm"), (self.mlp_norm, "mlp_norm"))
        )
        self.mlp_out_norm = self._norms(arch, name="mlp_out_norm")
        attending = len(arch.attention_layers) + len(arch.reading_layers)
        self.q_norm = self._head_norms(arch, attending, arch.num_heads // arch.num_kv_heads)
        self.k_norm = self._head_norms(arch, len(arch.attention_layers), 1)
        self.qkv_bias = (
            vector((len(arch.attention_layers), *qkv_heads(arch)), (None, "kv_heads", None, None), dtype, mean=0.0)
            if arch.attention_bias
            else None
        )
        gates = len(arch.attention_layers), arch.num_kv_heads, arch.num_heads // arch.num_kv_heads, arch.head_dim
        self.gate_bias = (
            vector(gates, (None, "kv_heads", None, None), dtype, mean=0.0)
            if arch.attention_bias and arch.output_gate == "number"
            else None
        )
        # Of an MLP and experts next to it: norms of what each makes, and of what router and experts read.
        has_both = arch.layers[0].experts is not None and not arch.layers[0].shortcut
        self.mlp_part_norm, self.experts_part_norm, self.router_norm, self.experts_norm = (
            self._norms(arch, has_both) for _ in range(4)
        )
        self.embedding_norm = self._norms(arch, arch.embedding_size > 0)
        self.layer_factor = vector((arch.num_layers, 1), (None, None), dtype, mean=1.0) if arch.layer_factors else None
        # Of several residual streams (`models/streams.py`): norm and matrix of what routes, and what is made of that.
        self.laurel_norm = self._norms(arch, arch.laurel_rank > 0)
        s, d = arch.num_streams, arch.hidden_size
        self.stream_norm, self.stream_scale = (self._norms(arch, s > 1) for _ in range(2))
        self.stream_router, self.stream_predictions, self.stream_corrections = (
            _matrices((arch.num_layers, *shape), dtype) if s > 1 else None for shape in ((s, d), (s * s, s), (s, s))
        )
        # Of delta-nets: taps of the convolution; A_log and dt_bias, by which states decay; the norm of what is read.
        net, float32 = arch.recurrent_net, jnp.dtype(jnp.float32)

        def of_heads(is_there: bool, *shape: int) -> nnx.Param[jax.Array] | None:
            axes = None, "key_heads", *(None,) * (len(shape) - 1)
            return vector((len(arch.recurrent_layers), *shape), axes, float32, mean=0.0) if is_there else None

        has_deltas, has_mamba, has_conv = (isinstance(net, kind) for kind in (DeltaNet, Mamba, ShortConv))
        self.delta_taps, self.mamba_taps, self.conv_taps = (
            self._taps(arch, net if has else None) for has in (has_deltas, has_mamba, has_conv)
        )
        k, r, c, v = (0, 0, 0, 0) if net is None else (net.key_heads, net.group, net.channels, net.value_size)
        self.delta_decay = of_heads(has_deltas, k, *(net.rate_shape if isinstance(net, DeltaNet) else ()))
        self.delta_norm = vector((len(arch.recurrent_layers), v), (None, None), dtype, mean=1.0) if has_deltas else None
        # Of Mamba-2: the convolution's bias too; A_log, dt_bias and D; the norm of what a group's heads read.
        self.mamba_bias = of_heads(has_mamba, k, c)
        self.mamba_rates = of_heads(has_mamba, k, 3, r)
        groups = len(arch.recurrent_layers), k, r * v
        normalizes = isinstance(net, Mamba) and net.normalizes
        self.mamba_norm = vector(groups, (None, "key_heads", None), dtype, mean=1.0) if normalizes else None

    def _taps(self, arch: ModelArch, net: RecurrentNet | None) -> nnx.Param[jax.Array] | None:
        """`[L, K', C, taps]` float32, of convolutions."""
        if net is None:
            return None
        shape = len(arch.recurrent_layers), net.key_heads, net.channels, net.taps
        axes = None, "key_heads", None, None
        return nnx.Param(jnp.zeros(shape, jnp.float32), axes=axes, mean=0.0, std=net.taps**-0.5)

    def _norms(
        self, arch: ModelArch, exists: bool = True, name: str | None = None, mean: float = 1.0
    ) -> nnx.Param[jax.Array] | None:
        """`[L, D]`, of the layers that have this norm; None: all have it."""
        count = arch.num_layers if name is None else len(arch.normed[name])
        if not exists or not count:
            return None
        return vector((count, arch.hidden_size), (None, None), self.norm_dtype, mean=mean)

    def _head_norms(self, arch: ModelArch, num_layers: int, groups: int) -> nnx.Param[jax.Array] | None:
        """`[L, H]`, the same for all heads; or of all heads, `[L, K, groups, H]`."""
        if arch.qk_norm is None:
            return None
        if arch.qk_norm == "head":
            h = max(heads.size for heads in arch.all_heads)
            return vector((num_layers, h), (None, None), self.norm_dtype, mean=1.0)
        axes = (None, "kv_heads", None, None)
        shape = num_layers, arch.num_kv_heads, groups, arch.head_dim
        return vector(shape, axes, self.norm_dtype, mean=1.0)


def norm_dtype(arch: ModelArch, dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of the norms' scales, if that of the weights is `dtype`: 1 + w would lose most of w in 16 bits, and
    LayerNorm rounds once, after it has multiplied.
    """
    return jnp.dtype(jnp.float32) if arch.norm_offset or arch.centred else dtype


def qkv_heads(arch: ModelArch) -> tuple[int, int, int]:
    """`(K, G + 2, H)`: the rows of the fused weights, per kv head its G query heads, then its key, then its value.

    Tensor parallelism splits the K axis, and each part keeps whole groups.
    """
    return arch.num_kv_heads, arch.num_heads // arch.num_kv_heads + 2, arch.head_dim


class Attention(Matrices):
    """The projections around `Attend`."""

    def __init__(self, arch: ModelArch, spec: LayerSpec, dtype: jnp.dtype) -> None:
        arch = arch.with_heads_of(spec)
        d, n, h = arch.hidden_size, arch.num_heads, arch.head_dim
        self.eps, self.rotates_first, self.normalizes_values, self.qk_norm = (
            arch.rms_norm_eps, arch.rotates_first, arch.normalizes_values, arch.qk_norm,
        )  # fmt: skip
        self.qkv_limit, self.out_factor = arch.qkv_limit, arch.attention_out_factor
        self.value_dim = v = arch.value_dim or h
        # Kernels read a layer's row of scales. All layers have as many, so that their kernels are one.
        self.num_ones = len(arch.attention_layers) if spec.unit_heads else 0
        axes = ("kv_heads", None, None, None)
        num_kv_heads, num_rows, _ = qkv_heads(arch)
        # Gates of numbers are rows of each kv head after all others; those of heads a matrix of their own.
        self.num_gates = num_rows - 2 if arch.output_gate == "number" else 0
        self.has_head_gates, self.gate_function = arch.output_gate == "head", arch.gate_function
        if self.has_head_gates:
            self.declare("gates", (num_kv_heads, num_rows - 2, d), axes[:-1], dtype, None, fan_in=d)
        fused = num_kv_heads, num_rows + self.num_gates, h, d
        reordered = reorders_heads(arch.ropes, h) or v < h
        self.declare("qkv", fused, axes, dtype, arch.format_of(spec, "qkv"), fan_in=d, reordered=reordered)
        self.declare("o", (d, n * v), (None, "kv_heads"), dtype, arch.format_of(spec, "o"), fan_in=n * v)
        self.o_bias = vector((d,), (None,), dtype, mean=0.0) if arch.attention_out_bias else None
        # Attention takes no stack and an index: to cut a row from one would be a kernel.
        self.sinks = vector((n,), ("kv_heads",), jnp.dtype(jnp.float32), mean=0.0) if spec.has_sinks else None

    def reader(self, kernels: KernelChoice) -> Weights | None:
        """The only matrix that multiplies x; None: there are several."""
        return None if self.has_head_gates else self.matrix("qkv", kernels)

    def __call__(
        self,
        x_TD: Rows,
        vectors: LayerVectors,
        rows: LayerRows,
        tables: RopeTables,
        place: int,
        attend: Attend,
        adapters: LayerAdapters | None = None,
        kernels: KernelChoice = AUTO_CHOICE,
    ) -> Update:
        """`x [T, D]` to `[T, D]`, or parts of it as `add_and_norm` takes them; `tables` are the tokens' rope tables.

        `place` is that of the layer in `ModelArch.attention_layers`.
        """
        cos, sin, growth = tables
        bias, q_norm, k_norm = (
            rows.stack(stack, place) for stack in (vectors.qkv_bias, vectors.q_norm, vectors.k_norm)
        )
        row, head_dim = rows.row(place), 2 * cos.shape[-1]
        q_norm, k_norm = (own_scales(stack, head_dim) for stack in (q_norm, k_norm))
        if self.num_ones:
            q_norm = k_norm = jnp.ones((self.num_ones, head_dim), vectors.norm_dtype)
        fused = product_of_heads(x_TD, self.matrix("qkv", kernels))
        qkv = FusedQkv(
            fused, cos, sin, bias, q_norm, k_norm, row, self.eps, self.rotates_first, self.normalizes_values,
            self.num_gates, x_TD.dtype,
        )  # fmt: skip
        if adapters is not None:
            assert isinstance(x_TD, jax.Array), "adapters read rows as they are"
            qkv = qkv.with_heads(adapters.add_to_qkv(qkv.whole, x_TD))
        if growth is not None:
            assert q_norm is None and not self.num_gates, "queries grow with the product alone"
            qkv = qkv if bias is None else replace(qkv.with_heads(_with_bias(qkv)), bias=None)
            factors = _of_queries(growth, qkv.product.shape[-2])
            qkv = replace(qkv, product=qkv.product * factors.astype(qkv.product.dtype))
        if self.qkv_limit is not None:
            assert q_norm is None and not self.num_gates, "the product alone is limited"
            qkv = replace(qkv.with_heads(jnp.clip(_with_bias(qkv), -self.qkv_limit, self.qkv_limit)), bias=None)
        if q_norm is not None and q_norm.ndim > 2:
            qkv = _normalized_in_stacks(qkv, _of_each_head if self.qk_norm == "centred head" else _over_all_heads)
        out_TNH = attend(place, qkv, None if self.sinks is None else self.sinks[...])[..., : self.value_dim]
        out = out_TNH.reshape(len(x_TD), -1)
        if self.num_gates:
            gates, gate_bias = qkv.gates.astype(jnp.float32), rows.stack(vectors.gate_bias, place)
            gates = gates if gate_bias is None else gates + row_of(gate_bias, row, gates.dtype)
            out = out * _GATES[self.gate_function](gates).reshape(out.shape).astype(out.dtype)
        if self.has_head_gates:
            gates = product(x_TD, self.matrix("gates")).astype(jnp.float32).reshape(len(x_TD), -1, 1)
            out = (out_TNH * _GATES[self.gate_function](gates).astype(out.dtype)).reshape(out.shape)
        if self.out_factor is not None:
            out = multiplied(out, self.out_factor)
        added = None if adapters is None else adapters.of_output("o_proj", out)
        return last_product(out, self.matrix("o", kernels), self.o_bias, added)


_GATES: Mapping[GateFunction, Callable[[jax.Array], jax.Array]] = {
    "sigmoid": jax.nn.sigmoid,
    "softplus": jax.nn.softplus,
}


def _of_queries(growth: jax.Array, num_rows: int) -> jax.Array:
    """`[T, 1, num_rows, 1]`, factors on rows of a fused product: `growth [T]` on queries, 1 on its last two."""
    return jnp.where(jnp.arange(num_rows) < num_rows - 2, growth[:, None], 1.0)[:, None, :, None]


def own_scales(stack: jax.Array | None, head_dim: int) -> jax.Array | None:
    """The scales `[L, H]` of a stack of heads' norms, without the padding of other layers' larger heads."""
    return stack if stack is None or stack.shape[-1] == head_dim else stack[..., :head_dim]


def _with_bias(qkv: FusedQkv) -> jax.Array:
    """`[T, K, G + 2, H]`: the product as a whole, with its bias."""
    return qkv.whole if qkv.bias is None else qkv.whole + row_of(qkv.bias, qkv.layer, qkv.dtype)


# Queries `[T, K, G, H]` and keys `[T, K, 1, H]`, their scales `[K, G, H]` and `[K, 1, H]`, and eps -> both, normalized.
_Normalize: TypeAlias = Callable[[Sequence[jax.Array], Sequence[jax.Array], float], Sequence[jax.Array]]


def _normalized_in_stacks(qkv: FusedQkv, normalize: _Normalize) -> FusedQkv:
    """The product with its bias added, and with queries and keys normalized, by scales of all heads.

    Kernels have scales that heads share, so XLA does it.
    """
    fused, q_norm, k_norm, layer = _with_bias(qkv), qkv.q_norm, qkv.k_norm, qkv.layer
    assert q_norm is not None and k_norm is not None
    heads, values = (fused[:, :, :-2], fused[:, :, -2:-1]), fused[:, :, -1:]
    normed = normalize(heads, [scale_of(each, layer, fused.dtype) for each in (q_norm, k_norm)], qkv.eps)
    return replace(qkv.with_heads(jnp.concatenate([*normed, values], axis=2)), bias=None, q_norm=None, k_norm=None)


def _of_each_head(heads: Sequence[jax.Array], scales: Sequence[jax.Array], eps: float) -> Sequence[jax.Array]:
    """LayerNorm of each head by itself."""
    pairs = zip(heads, scales, strict=True)
    return [rms_norm(centred(each, jnp.dtype(jnp.float32)), scale, eps).astype(each.dtype) for each, scale in pairs]


def _over_all_heads(heads: Sequence[jax.Array], scales: Sequence[jax.Array], eps: float) -> Sequence[jax.Array]:
    """RMSNorm over all heads; devices that share these add up their squares, in one sum for both."""
    squares: tuple[jax.Array | None, ...] = (None, None)
    if num_parts() > 1:
        squares = tuple(sum_of_parts(jnp.stack([mean_square(each) for each in heads])) / num_parts())
    return [
        rms_norm(each.reshape(len(each), -1), scale.reshape(-1), eps, of_all).reshape(each.shape)
        for each, scale, of_all in zip(heads, scales, squares, strict=True)
    ]


def mean_square(heads: jax.Array) -> jax.Array:
    """`[T, 1]` float32 of heads `[T, ..]`."""
    return mean_squares(heads.reshape(len(heads), -1).astype(jnp.float32))


class MLP(Matrices):
    """An MLP: gated (arXiv 2002.05202), down(act(gate(x)) * up(x)), with gate and up in one product `[T, 2, F]`; or
    down(act(up(x))), with up alone in it.
    """

    def __init__(
        self,
        arch: ModelArch,
        spec: DenseMlp,
        dtype: jnp.dtype,
        gate_up_format: WeightFormat | None,
        down_format: WeightFormat | None,
        unit: GatedUnit | None = None,
    ) -> None:
        """With `unit` in the place of the model's activation, if it is given."""
        d, f = arch.hidden_size, spec.ffn_size
        self.activation, self.factors, self.unit = arch.activation, arch.unit_factors, unit
        self.sparsity = spec.sparsity
        u = arch.unit_rows
        self.declare("gate_up", (u, f, d), (None, "ffn", None), dtype, gate_up_format, fan_in=d)
        self.gate_up_bias = vector((u, f), (None, "ffn"), dtype, mean=0.0) if arch.mlp_bias else None
        is_learned = arch.activation == "xielu"
        self.curve = vector((2,), (None,), jnp.dtype(jnp.float32), mean=0.8) if is_learned else None
        self.declare("down", (d, f), (None, "ffn"), dtype, down_format, fan_in=f)
        self.down_bias = vector((d,), (None,), dtype, mean=0.0) if arch.mlp_bias or arch.down_bias else None

    def __call__(
        self,
        x_TD: Rows,
        *,
        summed: bool = True,
        adapters: LayerAdapters | None = None,
        kernels: KernelChoice = AUTO_CHOICE,
    ) -> Update:
        """`[T, D]` to `[T, D]`, or parts of it as `add_and_norm` takes them.

        Not `summed`, it is what this device adds to the result, for a sum that the caller makes.
        """
        down = self.matrix("down", kernels)
        own = self.gate_up_bias, self.curve, self.factors, self.unit, self.sparsity or None
        if adapters is None and all(each is None for each in own):
            rows = gated_product(x_TD, self.matrix("gate_up", kernels), self.activation, down)
        else:
            gate_up = self._gate_up(x_TD, adapters, kernels)
            if adapters is not None and summed:
                gated = self._units(gate_up)
                return last_product(gated, down, self.down_bias, adapters.of_output("down_proj", gated))
            is_plain = self.curve is None and self.unit is None
            rows = gated_rows(gate_up, self.activation, down) if is_plain else self._units(gate_up)
        if summed:
            return last_product(rows, down, self.down_bias)
        return _part_of_product(rows, down, self.down_bias, "ffn")

    def _units(self, gate_up: jax.Array) -> jax.Array:
        """`[T, F]` of the product `[T, U, F]`."""
        if self.curve is not None:
            return xielu(gate_up[:, 0], self.curve[...])
        if self.unit is not None:
            return self.unit(gate_up[:, 0], gate_up[:, 1])
        return unit_of([gate_up[:, side] for side in range(gate_up.shape[1])], self.activation)

    def _gate_up(self, x_TD: Rows, adapters: LayerAdapters | None, kernels: KernelChoice) -> jax.Array:
        """`[T, U, F]`: the product with its bias and what adapters add."""
        gate_up = product(x_TD, self.matrix("gate_up", kernels))
        if self.gate_up_bias is not None:
            gate_up = gate_up + self.gate_up_bias[...]
        if adapters is not None:
            assert isinstance(x_TD, jax.Array), "adapters read rows as they are"
            gate_up = adapters.add_to_gate_up(gate_up, x_TD)
        if self.sparsity:
            gate_up = gate_up.at[:, 0].set(_sparse(gate_up[:, 0], self.sparsity))
        return gate_up if self.factors is None else multiplied(gate_up, np.asarray(self.factors, np.float32)[:, None])


def _sparse(gates_TF: jax.Array, share: float) -> jax.Array:
    """Gates less what this share of them lies below if they are normally distributed, and 0 for those below.

    Devices that have a part of the gates each add up sums and sums of squares.
    """
    wide = gates_TF.astype(jnp.float32)
    sums = jnp.stack([row_sums(wide), row_sums(wide * wide)])
    of_parts = all_parts(sums[None], logical="ffn")
    mean, square = jnp.sum(of_parts, axis=0) / (len(of_parts) * gates_TF.shape[1])
    spread = jnp.sqrt(jnp.maximum(square - mean * mean, 0.0))
    least = mean + spread * NormalDist().inv_cdf(share)
    return jnp.maximum(wide - least[:, None], 0.0).astype(gates_TF.dtype)


def last_product(x: Rows, matrix: Weights, bias: nnx.Param[jax.Array] | None, added: jax.Array | None = None) -> Update:
    """The product that goes back to the residual stream, in parts unless there is more `[T, D]` to add.

    Devices that share the model have a part of the inputs each, and this is the one sum of their results in a block.
    """
    if num_parts() > 1:
        out = _part_of_product(x, matrix, bias, "kv_heads")
        return sum_of_parts(out if added is None else out + added)
    parts = product_in_parts(x, matrix)
    update: Update = parts if bias is None else Biased(parts, bias[...])
    if added is None:
        return update
    assert isinstance(x, jax.Array), "adapters read rows as they are"
    return sum_parts(update, x) + added


def _part_of_product(x: Rows, matrix: Weights, bias: nnx.Param[jax.Array] | None, logical: str) -> jax.Array:
    out = product(x, matrix)
    return out if bias is None else out + on_first_part(bias[...], logical).astype(out.dtype)
