"""Attention to the keys and values that an earlier layer has made: of its own, a layer has queries alone.

So its tokens take no room in the cache. Never knows pages or checkpoints; `dense.DecoderLayer` builds it where a
layer's spec has `keys_from`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxsgl.models.arch import ModelArch
from jaxsgl.models.layer_spec import LayerSpec
from jaxsgl.models.layers import Attend, LayerRows, LayerVectors, Queries, last_product, own_scales, qkv_heads
from jaxsgl.models.lora import LayerAdapters
from jaxsgl.models.matrix import Matrices, Rows, Weights
from jaxsgl.models.precision import product
from pallas_kernels import KernelChoice
from pallas_kernels.choice import AUTO_CHOICE
from pallas_kernels.norm import Update, rms_norm, scale_of
from pallas_kernels.qkv import rotate


class SharedKeysAttention(Matrices):
    """The projections around `Attend` of a layer that attends to another one's keys and values."""

    def __init__(self, arch: ModelArch, spec: LayerSpec, dtype: jnp.dtype) -> None:
        assert spec.keys_from is not None
        self.keys_at = arch.places[spec.keys_from]
        self.eps = arch.rms_norm_eps
        num_kv_heads, num_rows, h = qkv_heads(arch.with_heads_of(spec))
        d, out = arch.hidden_size, arch.num_heads * h
        queries = num_kv_heads, num_rows - 2, h, d
        by_head = ("kv_heads", None, None, None)
        # Named as where keys and values come with them: so quantized checkpoints except it by the same words.
        self.declare("qkv", queries, by_head, dtype, arch.format_of(spec, "qkv"), fan_in=d)
        self.declare("o", (d, out), (None, "kv_heads"), dtype, arch.format_of(spec, "o"), fan_in=out)

    def reader(self, kernels: KernelChoice) -> Weights | None:
        """The only matrix that multiplies x."""
        return self.matrix("qkv", kernels)

    def __call__(
        self,
        x_TD: Rows,
        vectors: LayerVectors,
        rows: LayerRows,
        tables: tuple[jax.Array, jax.Array],
        place: int,
        attend: Attend,
        adapters: LayerAdapters | None = None,
        kernels: KernelChoice = AUTO_CHOICE,
    ) -> Update:
        """As `Attention.__call__`; `place` is that of the layer among all that attend."""
        assert adapters is None, "models with such layers take no adapters"
        q = product(x_TD, self.matrix("qkv", kernels))
        num_tokens, num_kv_heads, groups, h = q.shape
        q_TNH = q.reshape(num_tokens, num_kv_heads * groups, h)
        q_norm = own_scales(rows.stack(vectors.q_norm, place), h)
        if q_norm is not None:
            q_TNH = rms_norm(q_TNH, scale_of(q_norm, rows.row(place), q_TNH.dtype), self.eps)
        out_TNH = attend(self.keys_at, Queries(rotate(q_TNH, *tables), num_kv_heads), None)
        return last_product(out_TNH.reshape(num_tokens, -1), self.matrix("o", kernels), None)
