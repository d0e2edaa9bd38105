"""Rows sorted by the expert that each is sent to, and the sum of a token's results: what lies around `grouped_product`.

Owns the order of places and the arithmetic of the sum. Never knows how experts are chosen (`routing` does), nor what a
backend does with the rows of one. Called by models, by `api` and by backends.

A place is one (token, expert) pair. A mixture of experts sorts once, multiplies twice, and adds up:

    groups = group_by_expert(experts, num_experts)
    hidden = gated_product(x, groups, gate_up, "silu", of_tokens=True)
    out = add_choices(grouped_product(hidden, groups, down), groups, shares)  # or `Choices`, for who adds up itself
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.target import target_device

# What a gate passes through before it multiplies, by its name.
ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}
# What units without gates are.
WITHOUT_GATES: Mapping[str, Callable[[jax.Array], jax.Array]] = {"relu2": lambda up: jnp.square(jax.nn.relu(up))}
UNITS = (*ACTIVATIONS, *WITHOUT_GATES)


def unit_rows(activation: str) -> int:
    """U, the rows of weights that a unit of one of `UNITS` has: a gate's and what it multiplies, or one."""
    return 1 if activation in WITHOUT_GATES else 2


def unit_of(sides: Sequence[jax.Array], activation: str) -> jax.Array:
    """activation(gate) * up of two arrays, or activation(up) of one."""
    first, *others = sides
    return ACTIVATIONS[activation](first) * others[0] if others else WITHOUT_GATES[activation](first)


@dataclasses.dataclass(frozen=True)
class GatedUnit:
    """What becomes of a gate and what it multiplies: activation(gate) * up, or a unit with bounds."""

    activation: str = "silu"
    """One of `ACTIVATIONS`; no matter with a limit."""
    limit: float | None = None
    """Gates are at most this, and what they multiply at most this far from 0."""
    alpha: float = 1.0
    offset: float = 1.0

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Of equal shapes and dtypes. With a limit gate * sigmoid(alpha * gate) * (up + offset)."""
        if self.limit is None:
            return ACTIVATIONS[self.activation](gate) * up
        gate = jnp.minimum(gate, self.limit)
        up = jnp.clip(up, -self.limit, self.limit)
        turned = (np.float32(self.alpha) * gate).astype(gate.dtype)  # in bfloat16 the factor would be rounded first
        return gate * jax.nn.sigmoid(turned) * (up + self.offset)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Groups:
    """Where the rows of each expert are: M = T * k places, by expert, those of one expert in the order of tokens.

    Places of choices that are no expert come last, and have results of zero.
    """

    tokens: jax.Array
    """`[M]` int32, the token of each place."""
    experts: jax.Array
    """`[M]` int32, ascending; E where the choice was no expert."""
    sizes: jax.Array
    """`[E]` int32, the places of each expert."""
    place_of: jax.Array
    """`[T, k]` int32, the place of each choice."""
    tiles: "RowTiles | None" = None
    """Tiles of `tile_rows` places, if who grouped has made them too."""
    starts: jax.Array | None = None
    """`[E + 1]` int32, the first place of each expert and of those without one, if who grouped has made them too."""
    tile_rows: int = dataclasses.field(default=0, metadata={"static": True})

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.place_of.shape[0]

    @property
    def num_places(self) -> int:
        """M."""
        return self.tokens.shape[0]

    @property
    def num_experts(self) -> int:
        """E."""
        return self.sizes.shape[0]


def sort_by_expert(experts: jax.Array, num_experts: int, is_token: jax.Array | None = None) -> Groups:
    """What `group_by_expert` returns; it has several kernels on a GPU."""
    num_tokens, num_choices = experts.shape
    is_one = (experts >= 0) & (experts < num_experts)
    if is_token is not None:
        is_one &= is_token[:, None]
    flat = jnp.where(is_one, experts, num_experts).reshape(-1).astype(jnp.int32)
    places = jnp.arange(num_tokens * num_choices, dtype=jnp.int32)
    by_expert, choice_at = jax.lax.sort((flat, places), num_keys=1, is_stable=True)
    # Written over `flat`, which nothing needs any more, and sizes from `by_expert`: each array of zeros to write into
    # would be a kernel more on a GPU.
    place_of = flat.at[choice_at].set(places, unique_indices=True, mode="promise_in_bounds")
    sizes = jnp.zeros(num_experts, jnp.int32).at[by_expert].add(1, indices_are_sorted=True, mode="drop")
    tokens = jax.lax.div(choice_at, jnp.int32(num_choices))
    return Groups(tokens, by_expert, sizes, place_of.reshape(num_tokens, num_choices))


def product_dtype(x: jax.Array, weights: jax.Array) -> jnp.dtype:
    """What rows and weights are multiplied in: the weights' dtype, or x's for weights of a byte."""
    dtype: jnp.dtype = x.dtype if weights.dtype.itemsize == 1 else weights.dtype
    return dtype


def result_dtype(x: jax.Array, weights: jax.Array) -> jnp.dtype:
    """What a product returns: x's dtype, or float32 for weights of a byte, whose scales the caller has yet to apply."""
    dtype: jnp.dtype = jnp.dtype(jnp.float32) if weights.dtype.itemsize == 1 else x.dtype
    return dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Choices:
    """What tokens' choices yielded, yet to be added up."""

    rows: jax.Array
    """`[M, D]` by place."""
    place_of: jax.Array
    """`[T, k]` int32, the place of each choice."""
    shares: jax.Array
    """`[T, k]`; any number where the choice was no expert, since its row is zeros."""

    def total(self) -> jax.Array:
        """The sum over each token's k choices of its share times the row of its place: `[T, D]` in the rows' dtype.

        Added up in float32 in the order of choices, one after another, so that it depends on no other token.
        """
        total = jnp.zeros((self.place_of.shape[0], self.rows.shape[1]), jnp.float32)
        for choice, rows in enumerate(self._rows_by_choice()):
            total = total + self.shares[:, choice, None].astype(jnp.float32) * rows.astype(jnp.float32)
        return total.astype(self.rows.dtype)

    def _rows_by_choice(self) -> Sequence[jax.Array]:
        """`[T, D]` for each of the k choices."""

        def rows_at(places: jax.Array) -> jax.Array:
            return self.rows.at[places].get(mode="promise_in_bounds")

        # On a TPU a gather is four operations. On a CPU XLA fuses each of several with what follows, and no large one.
        num_choices = self.place_of.shape[1]
        if target_device().platform == "tpu":
            at_once = rows_at(self.place_of.T)
            return [at_once[choice] for choice in range(num_choices)]
        return [rows_at(self.place_of[:, choice]) for choice in range(num_choices)]


def with_bias(y: jax.Array, bias: jax.Array | None, groups: Groups) -> jax.Array:
    """y `[M, out]` plus the bias `[E, out]` of each place's expert, if there is one."""
    if bias is None:
        return y
    return y + bias.astype(y.dtype).at[groups.experts].get(mode="fill", fill_value=0)


def add_choices(y: jax.Array, groups: Groups, shares: jax.Array) -> jax.Array:
    """`Choices.total` of y `[M, D]`, the rows of places, and shares `[T, k]`."""
    return Choices(y, groups.place_of, shares).total()


class UnitWeights(NamedTuple):
    """The weights of MLPs, U rows of each unit (`unit_rows`).

    Attributes:
        gate_up: `[E, U F, in]` of experts, each the gate's rows first; `[U, F, in]` of one MLP.
        down: `[E, out, F]` of experts; `[out, F]` of one MLP.
    """

    gate_up: jax.Array
    down: jax.Array

    def and_shared(self, shared: "UnitWeights") -> "UnitWeights":
        """Of E experts, and of an MLP of n F units cut into n experts more, `[E + n, ..]`: a copy of all."""
        _, out, size = self.down.shape
        num_shared, num_in = shared.down.shape[1] // size, shared.gate_up.shape[-1]
        of_experts = shared.gate_up.reshape(-1, num_shared, size, num_in).swapaxes(0, 1)
        gate_up = of_experts.reshape(num_shared, -1, num_in)
        down = shared.down.reshape(out, num_shared, size).swapaxes(0, 1)
        return UnitWeights(jnp.concatenate([self.gate_up, gate_up]), jnp.concatenate([self.down, down]))


class RowTiles(NamedTuple):
    """Places cut into tiles of at most R of one expert, for backends that multiply tile by tile.

    Attributes:
        experts: `[n]` int32; E for tiles of choices that are no expert.
        begins, ends: `[n]` int32, places; equal where the tile doesn't exist.
    """

    experts: jax.Array
    begins: jax.Array
    ends: jax.Array


def most_tiles(num_places: int, num_experts: int, num_rows: int) -> int:
    """As many tiles of `num_rows` places as any choice of experts may need."""
    return min(num_places, num_places // num_rows + num_experts + 1)


def starts_of(groups: Groups) -> jax.Array:
    """`Groups.starts`: a masked sum, since XLA makes two kernels of a cumulated one."""
    if groups.starts is not None:
        return groups.starts
    experts = groups.num_experts
    return jnp.sum(jnp.tri(experts + 1, experts, -1, dtype=jnp.int32) * groups.sizes, axis=1)


def row_tiles(groups: Groups, num_rows: int) -> tuple[RowTiles, jax.Array]:
    """`most_tiles`, and how many of them are an expert's, `[]` int32; these come first."""
    experts = groups.num_experts
    tiles = jax.lax.div(groups.sizes + (num_rows - 1), jnp.int32(num_rows))
    # What lies before each expert, and behind the last.
    first_tile = jnp.sum(jnp.tri(experts + 1, experts, -1, dtype=jnp.int32) * tiles, axis=1)
    first_place = starts_of(groups)
    index = jnp.arange(most_tiles(groups.num_places, experts, num_rows), dtype=jnp.int32)
    expert = jnp.sum(index[:, None] >= first_tile[1:], axis=1, dtype=jnp.int32)
    end = jnp.append(first_place[1:], groups.num_places)[expert]
    begins = jnp.minimum(first_place[expert] + (index - first_tile[expert]) * num_rows, end)
    return RowTiles(expert, begins, jnp.minimum(begins + num_rows, end)), first_tile[experts]
