"""What mixtures of experts need: the choice of each token's experts, their groups, and products by group.

Owns the checks of the arguments. Never knows models, nor how a backend computes: it asks `dispatch` for one and calls
it. The values that go from one function to the next are those of `pallas_kernels.experts`.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dispatch import choose_kernel, choose_kernel_or_xla, has_kernel, refusals_of
from pallas_kernels.experts import UNITS, GatedUnit, Groups, UnitWeights, sort_by_expert, unit_of, unit_rows
from pallas_kernels.packed import PackedMatrix
from pallas_kernels.routing import Router, choose_by_xla
from pallas_kernels.scaled import ScaledMatrix, ScaledRows


def choose_experts(
    router: Router,
    logits: jax.Array,
    choice_bias: jax.Array | None = None,
    shared_logits: jax.Array | None = None,
    logit_bias: jax.Array | None = None,
    *,
    backend: str = "auto",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The experts `[T, k]` int32 of each token, best first, and their shares `[T, k]` float32.

    Of experts that score alike the first ones are chosen. Shared ones, if the router counts some, follow: `[T, k + n]`.

    Args:
        router: the rule.
        logits: `[T, E]` float32, or `[P, T, E]`, parts whose sum they are.
        choice_bias: `[E]` float32, or None.
        shared_logits: `[T]` float32, whose sigmoids are the shares of shared experts; None: these are 1.
        logit_bias: `[E]` float, which is added to the logits, or None.
        backend: a backend that has the op, or "auto"; "xla" always has it.
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    if logits.ndim not in (2, 3) or logits.dtype != jnp.float32 or router.top_k > logits.shape[-1]:
        raise ValueError(
            f"logits are {logits.shape} {logits.dtype}; they must be [T, E] float32, or parts of that, with E >= "
            f"{router.top_k}, of which that many are chosen"
        )
    for name, bias in (("choice_bias", choice_bias), ("logit_bias", logit_bias)):
        if bias is not None and bias.shape != logits.shape[-1:]:
            raise ValueError(f"{name} is {bias.shape}; it must be [{logits.shape[-1]}], one for each expert")
    if shared_logits is not None and shared_logits.shape != logits.shape[-2:-1]:
        raise ValueError(f"shared_logits is {shared_logits.shape}; it must be [{logits.shape[-2]}], one for each token")
    kernel = choose_kernel_or_xla(
        "choose_experts", lambda each: each.choose_experts, backend, router, logits, interpret=interpret
    )
    if kernel is None:
        return choose_by_xla(router, logits, choice_bias, shared_logits, logit_bias)
    return kernel(router, logits, choice_bias, shared_logits, logit_bias, interpret)


def group_by_expert(
    experts: jax.Array,
    num_experts: int,
    is_token: jax.Array | None = None,
    *,
    backend: str = "auto",
    interpret: bool = False,
) -> Groups:
    """The choices of all tokens by expert, those of one expert in the order of tokens.

    Args:
        experts: `[T, k]` int32, the experts of each token; others than 0 .. E - 1 are no expert.
        num_experts: E.
        is_token: `[T]`, whether a token's choices count; those of others are no expert. None: all count.
        backend: a backend that has the op, or "auto"; "xla" always has it.
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    if experts.ndim != 2 or (is_token is not None and is_token.shape != experts.shape[:1]):
        raise ValueError(f"experts are {experts.shape}; they must be [T, k], and is_token [T]")
    kernel = choose_kernel_or_xla("group_by_expert", lambda each: each.group_by_expert, backend, interpret=interpret)
    if kernel is None:
        return sort_by_expert(experts, num_experts, is_token)
    return kernel(experts, num_experts, is_token, interpret)


def grouped_product(
    x: jax.Array,
    groups: Groups,
    weights: jax.Array,
    *,
    of_tokens: bool = False,
    backend: str = "auto",
    interpret: bool = False,
) -> jax.Array:
    """Each row times the weights of its expert; returns `[M, out]` in x's dtype, added up in float32.

    Weights of a byte, int8 or float8, are multiplied in x's format and return float32: the caller scales the results.

    Only the weights of experts that have rows are read, where they lie. A row's result depends on no other row.

    Args:
        x: `[M, in]`, a row for each place; with `of_tokens` `[T, in]`, a row for each token, which stands at the places
            of all its choices. Rounded to the weights' dtype, unless that is of a byte.
        groups: which places are whose, from `group_by_expert`. Places without an expert yield zeros.
        weights: `[E, out, in]`, as checkpoints store each expert's.
        of_tokens: whether x's rows are tokens' or places'.
        backend: a backend that has the op, or "auto".
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    num_rows = groups.num_tokens if of_tokens else groups.num_places
    if weights.ndim != 3 or weights.shape[0] != groups.num_experts or x.shape != (num_rows, weights.shape[-1]):
        raise ValueError(
            f"x is {x.shape} and weights are {weights.shape}; they must be [{num_rows}, in] and "
            f"[{groups.num_experts}, out, in]"
        )
    multiply = choose_kernel(
        "grouped_product", lambda each: each.grouped_product, backend, x, groups, weights, interpret=interpret
    )
    return multiply(x, groups, weights, of_tokens, interpret)


def grouped_scaled_product(
    x: jax.Array,
    groups: Groups,
    weights: ScaledMatrix,
    *,
    of_tokens: bool = False,
    backend: str = "auto",
    interpret: bool = False,
) -> jax.Array:
    """`grouped_product` with weights whose inputs share scales in groups; `[M, out]` in x's dtype.

    Numbers are converted to x's format and added up in float32. Where groups are small, and in XLA, the scaled weights
    are rounded to x's format.

    Args:
        x, groups, of_tokens: as for `grouped_product`.
        weights: `[E, out, in]`.
        backend: a backend that has the op, or "auto".
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    _check_numbers(x.shape, groups, weights, of_tokens)
    multiply = choose_kernel(
        "grouped_product", lambda each: each.grouped_scaled_product, backend, x, weights, interpret=interpret
    )
    return multiply(x, groups, weights, of_tokens, interpret)


def _check_numbers(rows: tuple[int, ...], groups: Groups, weights: ScaledMatrix, of_tokens: bool) -> None:
    num_rows, shape = groups.num_tokens if of_tokens else groups.num_places, weights.numbers.shape
    if len(shape) != 3 or shape[0] != groups.num_experts or rows != (num_rows, shape[-1]):
        raise ValueError(
            f"rows are {rows} and numbers {shape}; they must be [{num_rows}, in] and [{groups.num_experts}, out, in]"
        )


def grouped_packed_product(
    x: jax.Array,
    groups: Groups,
    weights: PackedMatrix,
    bias: jax.Array | None = None,
    *,
    of_tokens: bool = False,
    dtype: str = "bfloat16",
    row_bits: int = 16,
    backend: str = "auto",
    interpret: bool = False,
) -> jax.Array:
    """`grouped_product` with weights that are kept as small as they are published; `[M, out]` in x's dtype.

    Args:
        x, groups, of_tokens: as for `grouped_product`.
        weights: `[E, out, in]`.
        bias: `[E, out]`, which is added to the rows of an expert, or None.
        dtype: what floats become in products; on GPUs x's dtype.
        row_bits: of the integers that rows become where C++ multiplies int4 or int8.
        backend: "native", "triton", "xla" or "auto".
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: another backend, or one that can't run here.
    """
    multiply = choose_kernel(
        "grouped_product", lambda each: each.grouped_packed_product, backend, x, weights, interpret=interpret
    )
    return multiply(x, groups, weights, bias, of_tokens, dtype, row_bits, interpret)


def gated_packed_product(
    x: jax.Array,
    groups: Groups,
    weights: PackedMatrix,
    unit: GatedUnit,
    bias: jax.Array | None = None,
    *,
    of_tokens: bool = False,
    dtype: str = "bfloat16",
    row_bits: int = 16,
    backend: str = "auto",
    interpret: bool = False,
) -> jax.Array:
    """`grouped_packed_product` with the weights of gates and of what they multiply: their units, `[M, F]` in x's dtype.

    Args:
        x, groups, of_tokens, dtype, row_bits: as for `grouped_packed_product`.
        weights: `[E, 2 F, in]`, the gate's rows first.
        unit: computes `[M, F]` of both.
        bias: `[E, 2 F]`, which is added first, or None.
        backend: a backend that has the op, or "auto": where no kernel takes the call, XLA computes the unit after a
            `grouped_packed_product` of that backend.
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: a backend that can't run here.
    """
    is_fused = backend in ("auto", "triton")
    kernel = choose_kernel_or_xla(
        "gated_product",
        lambda each: each.gated_packed_product,
        backend if is_fused else "xla",
        x,
        weights,
        interpret=interpret,
    )
    if kernel is not None:
        return kernel(x, groups, weights, bias, unit, of_tokens, interpret)
    both = grouped_packed_product(
        x, groups, weights, bias,
        of_tokens=of_tokens, dtype=dtype, row_bits=row_bits, backend=backend, interpret=interpret,
    )  # fmt: skip
    return unit(*jnp.split(both, 2, axis=1))


def experts_multiply_float8(dtype: DTypeLike, weights: ScaledMatrix, *, backend: str = "auto") -> bool:
    """Whether a kernel multiplies rows in float8 with the experts' weights on the target device; with "xla" none does.

    Args:
        dtype: of the rows before they are rounded.
        weights: `[E, out, in]`.
        backend: as for `grouped_float8_product`.

    Raises:
        ValueError: a named backend that can't run here.
    """
    return has_kernel("float8_product", backend, refusals_of(lambda each: each.grouped_float8_product, dtype, weights))


def grouped_float8_product(
    rows: ScaledRows,
    groups: Groups,
    weights: ScaledMatrix,
    *,
    of_tokens: bool = False,
    backend: str = "auto",
    interpret: bool = False,
) -> jax.Array:
    """`grouped_product` of rows in float8 and weights of float8, both with scales; `[M, out]`, in the rows' old dtype.

    Args:
        rows: of `float8_rows`, of places or with `of_tokens` of tokens.
        groups, of_tokens: as for `grouped_product`.
        weights: `[E, out, in]` float8_e4m3fn without zero points.
        backend: a backend that has the op, "xla", or "auto".
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    _check_numbers(rows.numbers.shape, groups, weights, of_tokens)
    multiply = choose_kernel(
        "float8_product", lambda each: each.grouped_float8_product, backend, rows.dtype, weights, interpret=interpret
    )
    return multiply(rows, groups, weights, of_tokens, interpret)


def gated_product(
    x: jax.Array,
    groups: Groups,
    weights: jax.Array,
    activation: str,
    *,
    of_tokens: bool = False,
    backend: str = "auto",
    interpret: bool = False,
) -> jax.Array:
    """`grouped_product` with the weights of gates and of what they multiply: activation(gate) * up, `[M, F]`.

    Without gates it is activation(up).

    Args:
        x, groups, of_tokens: as for `grouped_product`.
        weights: `[E, U F, in]`, the gate's rows first; not of a byte. U is `unit_rows(activation)`.
        activation: one of `UNITS`.
        backend: a backend that has the op, "xla", or "auto": where no kernel takes the call, XLA computes the unit
            after the device's best `grouped_product`.
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    num_rows = groups.num_tokens if of_tokens else groups.num_places
    if weights.ndim != 3 or weights.shape[0] != groups.num_experts or x.shape != (num_rows, weights.shape[-1]):
        raise ValueError(
            f"x is {x.shape} and weights are {weights.shape}; they must be [{num_rows}, in] and "
            f"[{groups.num_experts}, {unit_rows(activation)} F, in]"
        )
    if activation not in UNITS or weights.shape[1] % unit_rows(activation) or weights.dtype.itemsize == 1:
        raise ValueError(
            f"activation is {activation!r} and weights are {weights.shape} {weights.dtype}; they must be one of "
            f"{', '.join(UNITS)} and [E, {unit_rows(activation)} F, in] in a format of more than a byte"
        )
    kernel = choose_kernel_or_xla(
        "gated_product", lambda each: each.gated_product, backend, x, groups, weights, activation, interpret=interpret
    )
    if kernel is not None:
        return kernel(x, groups, weights, activation, of_tokens, interpret)
    both = grouped_product(x, groups, weights, of_tokens=of_tokens, backend="xla" if backend == "xla" else "auto")
    return unit_of(jnp.split(both, unit_rows(activation), axis=1), activation)


def joins_shared(experts: UnitWeights, shared: UnitWeights, *, backend: str = "auto") -> bool:
    """Whether a kernel reads the weights of shared experts with those of others on the target device.

    Args:
        experts, shared: as for `products_with_shared`.
        backend: as for `gated_product`.

    Raises:
        ValueError: a named backend that can't run here.
    """
    return has_kernel("gated_product", backend, refusals_of(lambda each: each.products_with_shared, experts, shared))


def products_with_shared(
    x: jax.Array,
    groups: Groups,
    experts: UnitWeights,
    shared: UnitWeights,
    activation: str,
    *,
    backend: str = "auto",
    interpret: bool = False,
) -> jax.Array:
    """A `gated_product` of tokens and the `grouped_product` after it, `[M, out]`, with shared experts among the others.

    Args:
        x: `[T, in]`.
        groups: of E + n experts, of which the last n are the shared ones.
        experts: `[E, U F, in]` and `[E, out, F]`, as for `gated_product`.
        shared: `[U, n F, in]` and `[out, n F]`: those of n experts as one MLP.
        activation: one of `UNITS`.
        backend: a backend that has the op, "xla", or "auto": XLA copies all weights (see `joins_shared`).
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    num_experts, out, size = experts.down.shape
    sides = unit_rows(activation)
    all_units = (groups.num_experts - num_experts) * size
    shapes = [each.shape for each in (x, *experts, *shared)]
    wanted = [
        (groups.num_tokens, x.shape[-1]), (num_experts, sides * size, x.shape[-1]), (num_experts, out, size),
        (sides, all_units, x.shape[-1]), (out, all_units),
    ]  # fmt: skip
    if shapes != wanted or activation not in UNITS:
        raise ValueError(
            f"x, weights of experts and shared ones are {shapes} and the activation {activation!r}; for groups of "
            f"{groups.num_experts} experts they must be {wanted} and one of {', '.join(UNITS)}"
        )
    kernel = choose_kernel_or_xla(
        "gated_product", lambda each: each.products_with_shared, backend, experts, shared, interpret=interpret
    )
    if kernel is not None:
        return kernel(x, groups, experts, shared, activation, interpret)
    both = experts.and_shared(shared)
    gated = gated_product(x, groups, both.gate_up, activation, of_tokens=True, backend=backend)
    return grouped_product(gated, groups, both.down, backend=backend)
