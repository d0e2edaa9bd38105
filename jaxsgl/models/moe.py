"""Mixtures of experts: a router chooses a few experts for each token, and their results are added up.

Routers are data (`pallas_kernels.Router`). Owns the parameters of experts and what lies between their products; choice,
grouping and products are functions of `pallas_kernels`. Never knows families or checkpoints. `dense.DecoderLayer`
builds a `MoE` where a layer's spec has one.

Some experts may compute nothing, and return x (LongCat-Flash): rows of x are added by their shares.

Experts may read a product of x, of fewer numbers, and another product goes back to the stream: LatentMoE (Nemotron 3).
Or the one expert of a token reads x times its share (Llama 4).

Shared experts are an MLP next to the others. On a GPU few rows take them for experts that all tokens choose, so that
two products with experts do all of it and no kernels of an MLP's own are launched.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxsgl.models.arch import ModelArch
from jaxsgl.models.layer_spec import DenseMlp, MoeMlp
from jaxsgl.models.layers import MLP, vector
from jaxsgl.models.matrix import Matrices, Matrix, Rows, Weights
from jaxsgl.models.precision import product, product_in_parts
from jaxsgl.models.quantization import WeightFormat
from jaxsgl.models.tensor_parallel import num_parts, on_first_part, part_index, sum_of_parts
from pallas_kernels import (
    Choices,
    GatedUnit,
    Groups,
    KernelChoice,
    ScaledMatrix,
    ScaledRows,
    UnitWeights,
    choose_experts,
    experts_multiply_float8,
    float8_rows,
    gated_packed_product,
    gated_product,
    group_by_expert,
    grouped_float8_product,
    grouped_packed_product,
    grouped_product,
    grouped_scaled_product,
    joins_shared,
    products_with_shared,
)
from pallas_kernels.choice import AUTO, AUTO_CHOICE, ON_GPUS, XLA
from pallas_kernels.experts import unit_of, with_bias
from pallas_kernels.native import grouped_product as native_product
from pallas_kernels.norm import Update, sum_parts
from pallas_kernels.order import is_order_fixed
from pallas_kernels.paged_kv import FLOAT8
from pallas_kernels.routing import shares_of_told
from pallas_kernels.target import target_device

# Up to as many rows of an expert on average, reading its weights takes a GPU longer than multiplying, and so rows of
# shared experts among the others cost nothing. With more, products of an MLP reach a higher share of the FLOPs; the
# forecasts of predict_gpu.py put both level at 110. Not measured.
MOST_ROWS_WITH_SHARED = 64
# More make an MLP so large that what its own kernels cost is little, by the same forecasts. Not measured.
MOST_SHARED = 4


class _Joined(NamedTuple):
    """Weights that products with experts read where some experts are shared."""

    experts: UnitWeights
    shared: UnitWeights

    @property
    def num_shared(self) -> int:
        """How many experts the shared ones are; 0 if they are no whole ones."""
        number, rest = divmod(self.shared.down.shape[1], self.experts.down.shape[2])
        return 0 if rest else number


class MoE(Matrices):
    """The experts of one layer and their router."""

    def __init__(
        self,
        arch: ModelArch,
        spec: MoeMlp,
        dtype: jnp.dtype,
        expert_format: WeightFormat | None,
        shared_format: WeightFormat | None,
    ) -> None:
        d, e, f = arch.hidden_size, spec.num_experts, spec.num_units
        u, w = arch.unit_rows, spec.width(arch.hidden_size)
        fmt = None
        if expert_format is not None:
            fmt = expert_format.of_experts(expert_shapes(arch, spec, expert_format.parts))
        self.spec = spec
        self.activation = arch.activation
        clamp = spec.clamp
        self.gated = arch.gated
        self.unit = GatedUnit(arch.activation)
        if clamp is not None:
            self.unit = GatedUnit(limit=clamp.limit, alpha=clamp.alpha, offset=clamp.offset)
        float32 = jnp.dtype(jnp.float32)
        # Scores that a bias or a sigmoid brings close together: such models compute their logits in float32.
        is_exact = spec.router.score.startswith(("sigmoid", "root")) or spec.router.choice_bias
        choices = spec.num_choices
        self.declare("router", (choices, d), (None, None), float32 if is_exact else dtype, None, fan_in=d)
        self.router_bias = vector((choices,), (None,), dtype, mean=0.0) if spec.router.bias else None
        self.choice_bias = vector((choices,), (None,), float32, mean=0.0) if spec.router.choice_bias else None
        by_token = (arch.vocab_size, spec.router.top_k), (None, None), jnp.dtype(jnp.int32)
        self.experts_of_tokens = vector(*by_token, mean=0.0) if spec.by_token else None
        self.expert_factor = vector((e,), (None,), float32, mean=1.0) if spec.expert_factors else None
        # Of devices that share the model, each has some of the experts or a part of each one.
        experts, ffn = ("experts", None) if arch.by_experts else (None, "ffn")
        self.declare("gate_up", (e, u, f, w), (experts, None, ffn, None), dtype, fmt, fan_in=w)
        self.gate_up_bias = vector((e, u, f), (experts, None, ffn), dtype, mean=0.0) if spec.bias else None
        self.declare("down", (e, w, f), (experts, None, ffn), dtype, fmt, fan_in=f)
        self.down_bias = vector((e, w), (experts, None), dtype, mean=0.0) if spec.bias else None
        if spec.latent_size:
            self.declare("latent_in", (w, d), (None, None), dtype, None, fan_in=d)
            self.declare("latent_out", (d, w), (None, None), dtype, None, fan_in=w)
        shared = DenseMlp(spec.shared_ffn_size)
        unit = None if clamp is None else self.unit
        self.shared = MLP(arch, shared, dtype, shared_format, shared_format, unit) if spec.shared_ffn_size else None
        if spec.shared_gate:
            self.declare("shared_gate", (1, d), (None, None), dtype, None, fan_in=d)

    def __call__(
        self,
        x_TD: jax.Array,
        is_token: jax.Array | None = None,
        told: list[jax.Array] | None = None,
        kernels: KernelChoice = AUTO_CHOICE,
        routed_TD: jax.Array | None = None,
        token_ids: jax.Array | None = None,
        *,
        summed: bool = True,
    ) -> Update:
        """`[T, D]` to `[T, D]`. Tokens where `is_token [T]` is false go to no expert.

        The router reads `routed_TD`; None: what experts read. A table of experts needs `token_ids [T]`. Not `summed`,
        it is what this device adds to the result, for a sum that the caller makes.

        On a GPU the results of experts may be left to the reader to add up, which saves a kernel.

        The experts of all tokens, `[T, k]` int32, are appended to `told`. With "xla" for `grouped_product` all that
        experts need is XLA's.
        """
        backend = kernels.grouped_product
        others = XLA if backend == XLA else AUTO
        joined = self._joined(len(x_TD), backend)
        num_shared = 0 if joined is None else joined.num_shared
        choice_bias_E, logit_bias_E = (
            None if bias is None else bias[...] for bias in (self.choice_bias, self.router_bias)
        )
        logits_TE = self._logits(x_TD if routed_TD is None else routed_TD)
        router = replace(self.spec.router, num_shared=num_shared)
        shared_T = self._shared_logits(x_TD) if num_shared else None
        if self.experts_of_tokens is not None:
            assert token_ids is not None, "its experts are those of the tokens' ids"
            experts_Tk = self.experts_of_tokens[...].at[token_ids].get(mode="clip")
            shares_Tk = shares_of_told(router, logits_TE, experts_Tk)
        else:
            experts_Tk, shares_Tk = choose_experts(
                router, logits_TE, choice_bias_E, shared_T, logit_bias_E, backend=others
            )
        if self.expert_factor is not None:
            shares_Tk = shares_Tk * self.expert_factor[...][experts_Tk]
        if told is not None:
            told.append(experts_Tk[:, : router.top_k].astype(jnp.int32))
        is_identity_Tk = experts_Tk >= self.spec.num_experts
        num_experts = self.matrix("gate_up").shape[0]  # on this device
        if num_experts < self.spec.num_experts:
            experts_Tk = experts_Tk - part_index("experts") * num_experts  # those of other devices are none here
        groups = group_by_expert(experts_Tk, num_experts + num_shared, is_token, backend=others)
        is_latent = self.spec.latent_size > 0
        read_TD = product(x_TD, self.matrix("latent_in")) if is_latent else x_TD
        if self.spec.scales_inputs:
            read_TD = _times_best_score(read_TD, logits_TE)
        y_MD = self._results(read_TD, groups, joined, kernels)
        choices = Choices(y_MD, groups.place_of, shares_Tk)
        mlp = None if joined is not None else self.shared
        has_identities = self.spec.num_identities > 0
        is_plain = mlp is None and not is_latent and not has_identities
        if is_plain and num_parts("experts") == 1 and target_device().platform == "gpu":
            return choices
        out_TD = product(choices.total(), self.matrix("latent_out")) if is_latent else choices.total()
        if has_identities:
            share_T1 = jnp.sum(jnp.where(is_identity_Tk, shares_Tk, 0.0), axis=-1, keepdims=True)
            unchanged_TD = (x_TD.astype(jnp.float32) * share_T1).astype(out_TD.dtype)
            out_TD = out_TD + on_first_part(unchanged_TD, "experts")
        out_TD = out_TD if mlp is None else out_TD + self._shared(mlp, x_TD, kernels)
        return sum_of_parts(out_TD) if summed else out_TD

    def _joined(self, num_rows: int, backend: str) -> _Joined | None:
        """This device's weights, if its products with experts are to read the shared ones, too; None: these are an MLP.

        Shared ones must be a few whole experts more, with a share of 1 or a gate, on devices that have a part of each
        expert, and no weights may be quantized. In fixed order they are an MLP for any number of rows.
        """
        spec, shared = self.spec, self.shared
        if shared is None or spec.shared_scale != 1 or backend not in ON_GPUS or is_order_fixed():
            return None
        is_plain = spec.clamp is None and not spec.bias and not spec.expert_factors and shared.down_bias is None
        reads_x = not spec.latent_size and not spec.scales_inputs
        if not is_plain or not reads_x or num_rows * spec.router.top_k > MOST_ROWS_WITH_SHARED * spec.num_experts:
            return None
        weights = [each.matrix(name) for each in (self, shared) for name in ("gate_up", "down")]
        plain = [each for each in weights if not isinstance(each, Matrix)]
        if len(plain) < len(weights):
            return None
        gate_up, down, *of_shared = plain
        stacked = UnitWeights(gate_up.reshape(len(gate_up), -1, gate_up.shape[-1]), down)
        joined = _Joined(stacked, UnitWeights(*of_shared))
        if len(down) < spec.num_experts or not 0 < joined.num_shared <= MOST_SHARED:
            return None
        return joined if joins_shared(*joined, backend=backend) else None

    def _results(self, x_TD: jax.Array, groups: Groups, joined: _Joined | None, kernels: KernelChoice) -> jax.Array:
        """What experts make of the tokens of their places, `[M, D]`."""
        backend = kernels.grouped_product
        if joined is not None:
            return products_with_shared(x_TD, groups, *joined, self.activation, backend=backend)
        gate_up, down = (self.matrix(name, kernels) for name in ("gate_up", "down"))
        gated_MF = self._gated(x_TD, groups, gate_up, down, backend)
        down_bias = None if self.down_bias is None else self.down_bias[...]
        if down_bias is not None and groups.num_experts == self.spec.num_experts:
            down_bias = on_first_part(down_bias, "ffn")
        return _product(gated_MF, groups, down, backend, down_bias)

    def _gated(self, x_TD: jax.Array, groups: Groups, gate_up: Weights, down: Weights, backend: str) -> Rows:
        """What lies between the two products, `[M, F]`, rounded where the second one takes it so."""
        is_plain = self.spec.clamp is None and self.gate_up_bias is None
        if is_plain and not isinstance(gate_up, Matrix) and backend in ON_GPUS:
            weights = gate_up.reshape(len(gate_up), -1, gate_up.shape[-1])
            return gated_product(x_TD, groups, weights, self.activation, of_tokens=True, backend=backend)
        if not self.gated:
            return unit_of([_product(x_TD, groups, gate_up, backend, of_tokens=True)], self.activation)
        bias = None if self.gate_up_bias is None else self.gate_up_bias[...].reshape(groups.num_experts, -1)
        if isinstance(gate_up, Matrix) and gate_up.packing:
            return gated_packed_product(
                x_TD, groups, gate_up.packed.stacked(1), self.unit, bias, of_tokens=True,
                dtype=gate_up.widened_to, row_bits=gate_up.row_bits, backend=backend,
            )  # fmt: skip
        hidden_MF = _product(x_TD, groups, gate_up, backend, bias, of_tokens=True)
        in_float8 = _float8_backend(hidden_MF.dtype, down)
        if is_plain and in_float8 is not None:
            both = hidden_MF.reshape(len(hidden_MF), 2, -1)
            return float8_rows(both, self.activation, backend=in_float8)
        return self.unit(*jnp.split(hidden_MF, 2, axis=1))

    def _logits(self, x_TD: jax.Array) -> jax.Array:
        """The router's but for its bias, `[T, E]` float32, or parts `[P, T, E]` whose sum they are."""
        return product_in_parts(x_TD, self.matrix("router"), jnp.float32)

    def _shared_logits(self, x_TD: jax.Array) -> jax.Array | None:
        """Of the shared experts' shares, `[T]` float32; None: these are 1."""
        return product(x_TD, self.matrix("shared_gate"), jnp.float32)[:, 0] if self.spec.shared_gate else None

    def _shared(self, shared: MLP, x_TD: jax.Array, kernels: KernelChoice) -> jax.Array:
        out_TD = sum_parts(shared(x_TD, summed=num_parts("ffn") == 1, kernels=kernels), x_TD)
        if self.spec.shared_scale != 1:
            out_TD = out_TD * self.spec.shared_scale
        return out_TD * jax.nn.sigmoid(product(x_TD, self.matrix("shared_gate"))) if self.spec.shared_gate else out_TD


def _times_best_score(x_TD: jax.Array, logits_TE: jax.Array) -> jax.Array:
    """Rows times the sigmoid of the largest of their logits, `[T, E]` or in parts `[P, T, E]`."""
    whole_TE = jnp.sum(logits_TE, axis=0) if logits_TE.ndim == 3 else logits_TE
    score_T = jax.nn.sigmoid(jnp.max(whole_TE, axis=-1))
    return (x_TD.astype(jnp.float32) * score_T[:, None]).astype(x_TD.dtype)


def expert_shapes(arch: ModelArch, spec: MoeMlp, num_devices: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """What a device of so many has of an expert's gate or up, and of its down, as `(out, in)`."""
    size, width = spec.num_units // (1 if arch.by_experts else num_devices), spec.width(arch.hidden_size)
    return (size, width), (width, size)


def _product(
    x: Rows, groups: Groups, weights: Weights, backend: str, bias: jax.Array | None = None, *, of_tokens: bool = False
) -> jax.Array:
    """Rows times the weights `[E, .., in]` of their experts, plus the experts' bias `[E, out]`: `[M, out]` as x."""
    if isinstance(weights, Matrix) and weights.packing:
        assert isinstance(x, jax.Array), "rows are rounded for weights in float8"
        return grouped_packed_product(
            x, groups, weights.packed.stacked(1), bias, of_tokens=of_tokens,
            dtype=weights.widened_to, row_bits=weights.row_bits, backend=backend,
        )  # fmt: skip
    return with_bias(_sums(x, groups, weights, backend, of_tokens), bias, groups)


def _sums(x: Rows, groups: Groups, weights: Weights, backend: str, of_tokens: bool) -> jax.Array:
    """`_product` without a bias, of weights that aren't packed.

    Scales of outputs are applied to sums. Rows are rounded to float8 where layers' products would round them
    (`matrix.rounds_rows`).
    """
    in_float8 = _float8_backend(x.dtype, weights)
    if in_float8 is not None:
        rows = x if isinstance(x, ScaledRows) else float8_rows(x, backend=in_float8)
        assert isinstance(weights, Matrix)
        return grouped_float8_product(rows, groups, _stacked(weights), of_tokens=of_tokens, backend=in_float8)
    assert isinstance(x, jax.Array), "rows are rounded for weights in float8"
    if isinstance(weights, Matrix) and _has_scales_of_groups(weights):
        return grouped_scaled_product(x, groups, _stacked(weights), of_tokens=of_tokens, backend=backend)
    numbers = weights.numbers if isinstance(weights, Matrix) else weights
    stacked = numbers.reshape(len(numbers), -1, numbers.shape[-1])
    if isinstance(weights, Matrix) and _is_native(x, groups, weights, stacked, backend):
        sums_MN = native_product.grouped_int8_product(x, groups, stacked, of_tokens, weights.row_bits)
    else:
        sums_MN = grouped_product(x, groups, stacked, of_tokens=of_tokens, backend=backend)
    if not isinstance(weights, Matrix):
        return sums_MN
    scale_MN = weights.scale.reshape(len(numbers), -1).at[groups.experts].get(mode="fill", fill_value=0)
    return (sums_MN.astype(jnp.float32) * scale_MN).astype(x.dtype)


def _has_scales_of_groups(weights: Matrix) -> bool:
    """Whether sums can't be scaled after a product of numbers; those of int4 have none."""
    return weights.scale.shape[-1] > 1 or weights.zero is not None or weights.numbers.dtype == jnp.int4


def _float8_backend(dtype: DTypeLike, weights: Weights) -> str | None:
    """What multiplies rows in `dtype`, rounded to float8, with experts' weights; None: they are not rounded."""
    if not isinstance(weights, Matrix) or weights.packing or weights.numbers.dtype != FLOAT8:
        return None
    kernels = weights.kernels
    backend = XLA if kernels.grouped_product == XLA else kernels.float8_product
    return backend if experts_multiply_float8(dtype, _stacked(weights), backend=backend) else None


def _stacked(weights: Matrix) -> ScaledMatrix:
    """The weights `[E, .., in]` with one axis of outputs."""

    def stacked(part: jax.Array) -> jax.Array:
        return part.reshape(len(part), -1, part.shape[-1])

    zero = None if weights.zero is None else stacked(weights.zero)
    return ScaledMatrix(stacked(weights.numbers), stacked(weights.scale), zero, weights.group, weights.block_outputs)


def _is_native(x: jax.Array, groups: Groups, weights: Matrix, stacked: jax.Array, backend: str) -> bool:
    """Whether rows become integers of as many bits as the weights' format says: where C++ multiplies integers."""
    if weights.numbers.dtype != jnp.int8 or target_device().platform != "cpu" or backend not in (AUTO, "native"):
        return False
    return native_product.refuse_grouped_product(x, groups, stacked) is None
