"""LoRA adapters in the decoder: what several of them add to the products of one batch (arXiv 2106.09685).

All adapters that are on the device stand side by side in the columns of one pool: column c is a row of a module's A
matrices and a row of its B matrices. A token takes part in the columns of its own adapter,

    product(x) + where(column is of my adapter, x @ A.T, 0) @ B        x [T, in], A [R, in], B [R, out]

so any mix of adapters is two dense products of fixed shape for each module, and what a token without an adapter gets is
exactly 0. A program for R columns reads the first R of the pool. Scales are part of B.

Owns these arrays' shapes and the arithmetic. Never knows which adapter lies where: `engine/adapters.py` writes the
pool, the scheduler tells in each step whose columns are whose. `layers` adds the results where it multiplies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxsgl.models.arch import ModelArch
from jaxsgl.models.layer_spec import DenseMlp
from jaxsgl.models.precision import product
from pallas_kernels.dots import dot_precision

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # PEFT's names
QKV, GATE_UP = MODULES[:3], MODULES[4:6]

LayerWeights: TypeAlias = Mapping[str, jax.Array]  # by the names of `pool_arrays`
PoolWeights: TypeAlias = Sequence[LayerWeights]  # by layer


class PoolArray(NamedTuple):
    """One array of the pool, in the activations' dtype.

    Attributes:
      shape: with R columns.
      axes: logical axes, as those of parameters.
      column_axis: which axis are the columns.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    column_axis: int


def pool_arrays(arch: ModelArch, layer: int, modules: frozenset[str], num_columns: int) -> dict[str, PoolArray]:
    """The arrays of a layer by name, for adapters of `modules`. Experts have none, whatever `modules` says.

    The A matrices of modules that multiply the same x are one array `[modules, R, in]`, in the order of `MODULES`.
    """
    r, d, h, k = num_columns, arch.hidden_size, arch.head_dim, arch.num_kv_heads
    groups = arch.num_heads // k
    arrays: dict[str, PoolArray] = {}

    def add(name: str, shape: tuple[int, ...], *axes: str | None, column_axis: int = 0) -> None:
        arrays[name] = PoolArray(shape, axes, column_axis)

    def add_inputs(name: str, members: Sequence[str]) -> None:
        number = sum(module in modules for module in members)
        if number:
            add(name, (number, r, d), None, None, None, column_axis=1)

    add_inputs("qkv_a", QKV)
    for module, heads in zip(QKV, (groups, 1, 1), strict=True):
        if module in modules:
            add(f"{module}_b", (r, k, heads, h), None, "kv_heads", None, None)
    if "o_proj" in modules:
        add("o_proj_a", (r, k * groups * h), None, "kv_heads")
        add("o_proj_b", (r, d), None, None)
    mlp = arch.layers[layer].mlp
    if isinstance(mlp, DenseMlp):
        f = mlp.ffn_size
        add_inputs("gate_up_a", GATE_UP)
        for module in GATE_UP:
            if module in modules:
                add(f"{module}_b", (r, f), None, "ffn")
        if "down_proj" in modules:
            add("down_proj_a", (r, f), None, "ffn")
            add("down_proj_b", (r, d), None, None)
    return arrays


def adaptable_modules(arch: ModelArch) -> frozenset[str]:
    """The modules that an adapter of `arch` may change: attention's, and those of dense MLPs."""
    has_dense = any(isinstance(layer.mlp, DenseMlp) for layer in arch.layers)
    of_mlp = (*_of_units(arch.unit_rows), "down_proj") if has_dense else ()
    return frozenset((*MODULES[:4], *of_mlp))


def _of_units(unit_rows: int) -> Sequence[str]:
    """The modules of an MLP's first product, which has so many rows of a unit."""
    return GATE_UP[-unit_rows:]


class ActiveAdapters:
    """The adapters of one batch during a trace.

    Args:
      pool: all columns.
      adapter_T: `[T]` int32, the number of each token's adapter; 0: none.
      owner_R: `[R]` int32, the number of the adapter that has each of the first R columns; 0: none.
    """

    def __init__(self, pool: PoolWeights, adapter_T: jax.Array, owner_R: jax.Array) -> None:
        self._pool = pool
        self._num_columns = len(owner_R)
        self._is_mine_TR = (adapter_T[:, None] == owner_R) & (owner_R > 0)

    def of_layer(self, layer: int) -> LayerAdapters:
        """What they add in a layer."""
        return LayerAdapters(self._pool[layer], self._is_mine_TR, self._num_columns)


@dataclass(frozen=True)
class LayerAdapters:
    """The adapters of a batch in one layer."""

    weights: LayerWeights
    is_mine_TR: jax.Array
    num_columns: int

    def add_to_qkv(self, fused: jax.Array, x_TD: jax.Array) -> jax.Array:
        """The fused product `[T, K, G + 2, H]` of `x_TD` with what the adapters add."""
        outs = self._of_group("qkv_a", QKV, x_TD)
        if not outs:
            return fused
        num_tokens, num_kv_heads, num_heads, head_dim = fused.shape
        parts = [
            outs[module] if module in outs else jnp.zeros((num_tokens, num_kv_heads, count, head_dim), fused.dtype)
            for module, count in zip(QKV, (num_heads - 2, 1, 1), strict=True)
        ]
        return fused + jnp.concatenate(parts, axis=2)

    def add_to_gate_up(self, gate_up: jax.Array, x_TD: jax.Array) -> jax.Array:
        """The products of gate and up `[T, U, F]` of `x_TD` with what the adapters add."""
        outs = self._of_group("gate_up_a", GATE_UP, x_TD)
        if not outs:
            return gate_up
        none, modules = jnp.zeros_like(gate_up[:, 0]), _of_units(gate_up.shape[1])
        return gate_up + jnp.stack([outs.get(module, none) for module in modules], axis=1)

    def of_output(self, module: str, x: jax.Array) -> jax.Array | None:
        """What the adapters add to the product `[T, D]` of o_proj or down_proj with `x`; None: nothing.

        Of devices that share the model, each has a part of the inputs and returns a part of the sum, as of the product.
        """
        if f"{module}_a" not in self.weights:
            return None
        return self._out(f"{module}_b", product(x, self.weights[f"{module}_a"][: self.num_columns]))

    def _of_group(self, name: str, modules: Sequence[str], x_TD: jax.Array) -> dict[str, jax.Array]:
        """What the adapters add to the products of several modules with the same x, by module."""
        if name not in self.weights:
            return {}
        rows = product(x_TD, self.weights[name][:, : self.num_columns])  # [T, modules, R]
        present = [module for module in modules if f"{module}_b" in self.weights]
        return {module: self._out(f"{module}_b", rows[:, place]) for place, module in enumerate(present)}

    def _out(self, name: str, rows_TR: jax.Array) -> jax.Array:
        """Rows of all adapters, cut down to each token's own, times B `[R, ...]`: `[T, ...]` in the rows' dtype."""
        mine_TR = jnp.where(self.is_mine_TR, rows_TR, jnp.zeros_like(rows_TR))
        b = self.weights[name][: self.num_columns]
        flat = b.reshape(self.num_columns, -1)
        precision = dot_precision(rows_TR)
        out = jnp.einsum("tr,rn->tn", mine_TR, flat, precision=precision, preferred_element_type=rows_TR.dtype)
        return out.reshape(len(rows_TR), *b.shape[1:])
