"""Attention whose tokens are their own values, over a window and over entries of groups of tokens (DeepSeek V4).

    q    = turned(normed(q_b normed(q_a x)))          each head to unit mean square, without scales
    kv   = turned(normed(kv x))                       one head, key and value at once
    out  = o_b [o_a of each group of heads](turned back(attended))

These are the projections around `Attend`; `pallas_kernels/grouped_tokens.py` has what groups are. What is attended has
turned with the positions of keys, since these are values, too: it is turned back by the query's position, so that it
depends on distances alone. Heads keep the checkpoint's order of numbers, of which the last R turn in pairs of
neighbours. Devices that share the model have some groups of heads each, and make entries each for itself. Never knows
pages or checkpoints. Source: DeepSeek-V4's report, 2.3.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxsgl.models.arch import ModelArch
from jaxsgl.models.layer_spec import GroupedAttention, LayerSpec
from jaxsgl.models.layers import Attend, LayerRows, LayerVectors, last_product, vector
from jaxsgl.models.lora import LayerAdapters
from jaxsgl.models.matrix import Matrices, Rows, Weights
from jaxsgl.models.precision import product
from jaxsgl.models.rope import RopeTables, inverse_frequencies
from pallas_kernels import GroupedQkv, GroupParts, KernelChoice
from pallas_kernels.choice import AUTO_CHOICE
from pallas_kernels.dots import dot_precision
from pallas_kernels.grouped_tokens import turn_pairs
from pallas_kernels.norm import Update, rms_norm

_FLOAT32 = jnp.dtype(jnp.float32)


class GroupedMixer(Matrices):
    """See the module. Parameters of an index are rows after those of entries, where both are made alike."""

    def __init__(self, arch: ModelArch, spec: LayerSpec, dtype: jnp.dtype) -> None:
        mixer = spec.mixer
        assert isinstance(mixer, GroupedAttention) and spec.rope is not None
        d, n, h, rank = arch.hidden_size, arch.num_heads, arch.head_dim, mixer.q_rank
        self.mixer, self.eps, self.rope = mixer, arch.rms_norm_eps, arch.ropes[spec.rope]
        self.declare("q_a", (rank, d), (None, None), dtype, arch.format_of(spec, "q_a"), fan_in=d)
        self.declare("q_b", (n, h, rank), ("kv_heads", None, None), dtype, arch.format_of(spec, "q_b"), fan_in=rank)
        self.declare("kv", (h, d), (None, None), dtype, arch.format_of(spec, "kv"), fan_in=d)
        inputs, outputs = n * h // mixer.out_groups, mixer.out_groups * mixer.out_rank
        self.declare(
            "o_a", (mixer.out_groups, mixer.out_rank, inputs), ("kv_heads", None, None), dtype, None, fan_in=inputs
        )
        self.declare("o_b", (d, outputs), (None, "kv_heads"), dtype, arch.format_of(spec, "o_b"), fan_in=outputs)
        self.q_a_norm, self.kv_norm = (vector((size,), (None,), _FLOAT32, mean=1.0) for size in (rank, h))
        self.sinks = vector((n,), ("kv_heads",), _FLOAT32, mean=0.0)
        groups = mixer.groups
        if groups is None:
            return
        size, parts = groups.entry_size(h), groups.parts
        for name in ("group_numbers", "group_gates"):
            self.declare(name, (parts, size, d), (None, None, None), dtype, None, fan_in=d)
        self.group_bias = vector((groups.size, parts, size), (None, None, None), _FLOAT32, mean=0.0)
        self.group_norm = vector((size,), (None,), _FLOAT32, mean=1.0)
        if groups.index is not None:
            heads, keys = groups.index.num_heads, groups.index.size
            self.declare("index_q", (heads, keys, rank), (None, None, None), dtype, None, fan_in=rank)
            self.declare("index_weights", (heads, d), (None, None), dtype, None, fan_in=d)

    def reader(self, kernels: KernelChoice) -> Weights | None:
        """Several matrices multiply x."""
        return None

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
        """`x [T, D]` to `[T, D]`, or parts of it as `add_and_norm` takes them; `tables` are those of whole heads."""
        assert adapters is None and isinstance(x_TD, jax.Array), "several matrices read rows as they are"
        mixer, n = self.mixer, len(self.sinks[...])
        cos, sin = (each[..., : mixer.rotated // 2] for each in tables[:2])
        low = rms_norm(product(x_TD, self.matrix("q_a", kernels)), self.q_a_norm[...], self.eps)
        q_TNH = product(low, self.matrix("q_b", kernels)).reshape(len(x_TD), n, -1)
        q_TNH = turn_pairs(rms_norm(q_TNH, jnp.ones(q_TNH.shape[-1], q_TNH.dtype), self.eps), cos, sin)
        kv_TH = rms_norm(product(x_TD, self.matrix("kv", kernels)), self.kv_norm[...], self.eps)
        kv_TH = turn_pairs(kv_TH, cos[:, 0], sin[:, 0])
        qkv = GroupedQkv(q_TNH, kv_TH, self._groups(x_TD, low, RopeTables(cos, sin), kernels))
        out_TNH = turn_pairs(attend(place, qkv, self.sinks[...]), cos, -sin)
        return last_product(self._by_group(out_TNH), self.matrix("o_b", kernels), None)

    def _by_group(self, out_TNH: jax.Array) -> jax.Array:
        """`[T, G * rank]` of the heads' outputs."""
        matrices = self.matrix("o_a")
        assert isinstance(matrices, jax.Array)
        of_groups = out_TNH.reshape(len(out_TNH), len(matrices), -1).astype(matrices.dtype)
        made = jnp.einsum(
            "tgi,gri->tgr", of_groups, matrices, precision=dot_precision(of_groups), preferred_element_type=_FLOAT32
        )
        return made.astype(out_TNH.dtype).reshape(len(out_TNH), -1)

    def _groups(
        self, x_TD: jax.Array, low_TQ: jax.Array, tables: RopeTables, kernels: KernelChoice
    ) -> GroupParts | None:
        """What tokens give to the entries of their groups, and ask the index."""
        groups = self.mixer.groups
        if groups is None:
            return None
        numbers, gates = (product(x_TD, self.matrix(name), _FLOAT32) for name in ("group_numbers", "group_gates"))
        queries = weights = None
        if groups.index is not None:
            queries = turn_pairs(product(low_TQ, self.matrix("index_q")), *tables[:2])
            weights = product(x_TD, self.matrix("index_weights"), _FLOAT32)
        turned = inverse_frequencies(self.rope, self.mixer.rotated)
        return GroupParts(
            numbers, gates, self.group_bias[...], self.group_norm[...], jnp.asarray(turned), queries, weights,
            self.eps, 0 if groups.index is None else groups.index.num_chosen,
        )  # fmt: skip
