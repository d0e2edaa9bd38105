"""What mixes a layer's tokens in place of attention to the layer's own keys and values, a class of each kind.

`dense.DecoderLayer` builds the one that a layer's spec asks for. None of them knows pages, states' places or
checkpoints.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

from jaxsgl.models.arch import ModelArch
from jaxsgl.models.layer_spec import ChannelDeltaNet, Latent, LayerSpec, Mamba, RecurrentNet, Selective
from jaxsgl.models.layers import (
    Attend,
    LayerRows,
    LayerVectors,
    Queries,
    Recur,
    last_product,
    own_scales,
    qkv_heads,
    vector,
)
from jaxsgl.models.lora import LayerAdapters
from jaxsgl.models.matrix import Matrices, Rows, Weights
from jaxsgl.models.precision import flat_product_in_parts, product, product_in_parts, products_side_by_side
from jaxsgl.models.rope import RopeTables, reorders_heads
from pallas_kernels import KernelChoice, LatentHeads, LatentQkv, TokenIndex
from pallas_kernels.choice import AUTO_CHOICE
from pallas_kernels.delta_tokens import (
    ChannelTokens,
    DeltaTokens,
    DeltaVectors,
    MambaTokens,
    MambaVectors,
    SelectiveTokens,
    SelectiveVectors,
    StateTokens,
)
from pallas_kernels.norm import Update, centred, multiplied, rms_norm, scale_of, sum_parts
from pallas_kernels.parts import whole
from pallas_kernels.qkv import rotate
from pallas_kernels.short_conv import ConvTokens

LATENT_NORM_EPS = 1e-6  # of the norms of latents, whatever the model's others have


class LatentAttention(Matrices):
    """Attention over a latent: the cache has one vector a token, of which keys and values of all heads are made (MLA).

    These are the projections around `Attend`. The matrices that make keys and values change sides, which is exact but
    for rounding: queries become what multiplies the latent itself, and of the weighted sum of latents each head makes
    its output. So this is attention with one kv head, C + R numbers of a key, and values that are the first C of them.
    docs/notes/2026-11-mla.md has the arithmetic. Source: DeepSeek-V2 (arXiv 2405.04434).

    Devices that share the model have some of the heads each, and make the latent each for itself; so they do with what
    an index reads.
    """

    def __init__(self, arch: ModelArch, spec: LayerSpec, dtype: jnp.dtype) -> None:
        mixer = spec.mixer
        assert isinstance(mixer, Latent)
        d, n, c, r = arch.hidden_size, arch.num_heads, mixer.kv_rank, mixer.rotated
        self.mixer = mixer
        by_head = ("kv_heads", None, None)
        query = n, mixer.unrotated + r

        def runs(before: int) -> dict[str, Any]:
            """Of rows of which R after others, or before them, may be reordered."""
            return {"run": 1 if before % r else r, "reordered": True}

        if mixer.q_rank is None:
            self.declare("q", (*query, d), by_head, dtype, arch.format_of(spec, "q"), fan_in=d, **runs(mixer.unrotated))
        else:
            self.declare("q_a", (mixer.q_rank, d), (None, None), dtype, arch.format_of(spec, "q_a"), fan_in=d)
            self.q_a_norm = vector((mixer.q_rank,), (None,), dtype, mean=1.0)
            of_rank = arch.format_of(spec, "q_b")
            of_q = runs(mixer.unrotated)
            self.declare("q_b", (*query, mixer.q_rank), by_head, dtype, of_rank, fan_in=mixer.q_rank, **of_q)
        self.declare("kv_a", (c + r, d), (None, None), dtype, arch.format_of(spec, "kv_a"), fan_in=d, **runs(c))
        # With a factor, which 16 bits would round.
        of_norm = dtype if mixer.factor == 1 else jnp.dtype(jnp.float32)
        self.kv_a_norm = vector((c,), (None,), of_norm, mean=1.0)
        # Multiplied from both sides, so it is never kept quantized.
        self.declare("kv_b", (n, mixer.unrotated + mixer.value, c), by_head, dtype, None, fan_in=c)
        out = n * mixer.value
        self.declare("o", (d, out), (None, "kv_heads"), dtype, arch.format_of(spec, "o"), fan_in=out)

        def bias(size: int) -> nnx.Param[jax.Array] | None:
            return vector((size,), (None,), dtype, mean=0.0) if mixer.has_bias else None

        self.q_a_bias = None if mixer.q_rank is None else bias(mixer.q_rank)
        self.kv_a_bias, self.o_bias = bias(c + r), bias(d)
        index = mixer.own_index
        if index is not None:
            assert mixer.q_rank is not None, "an index's queries are made of what queries are"
            rows = runs(index.size) if index.interleaved else {}
            asking, float32 = (index.num_heads, index.size, mixer.q_rank), jnp.dtype(jnp.float32)
            fmt = arch.format_of(spec, "index_q")
            self.declare("index_q", asking, (None, None, None), dtype, fmt, fan_in=mixer.q_rank, **rows)
            fmt = arch.format_of(spec, "index_k")
            self.declare("index_k", (index.size, d), (None, None), dtype, fmt, fan_in=d, **rows)
            self.declare("index_weights", (index.num_heads, d), (None, None), float32, None, fan_in=d)
            self.index_k_norm, self.index_k_norm_bias = (
                vector((index.size,), (None,), float32, mean=mean) for mean in (1.0, 0.0)
            )

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
        """`x [T, D]` to `[T, D]`, or parts of it as `add_and_norm` takes them; `tables` are those of R numbers."""
        assert adapters is None, "adapters are refused for models with a latent"
        assert isinstance(x_TD, jax.Array), "several matrices read rows as they are"
        mixer = self.mixer
        first, second = products_side_by_side(
            x_TD, self.matrix("q" if mixer.q_rank is None else "q_a", kernels), self.matrix("kv_a", kernels)
        )
        index: TokenIndex | None = None
        if mixer.q_rank is None:
            queries, entries = first, None if second is first else second
        else:
            low = _plus(sum_parts(first, x_TD)[:, : mixer.q_rank], self.q_a_bias)
            low = rms_norm(low, self.q_a_norm[...], LATENT_NORM_EPS)
            queries, entries = flat_product_in_parts(low, self.matrix("q_b", kernels)), second
            if mixer.own_index is not None:
                index = self._index(x_TD, low, tables, kernels)
            if tables.growth is not None:
                queries = queries * tables.growth[:, None].astype(queries.dtype)
        if self.kv_a_bias is not None:
            entries = _plus(sum_parts(second, x_TD)[:, -len(self.kv_a_bias[...]) :], self.kv_a_bias)
        kv_b = self.matrix("kv_b")
        assert isinstance(kv_b, jax.Array)
        heads = LatentHeads(kv_b, mixer.unrotated)
        turns = tables.cos, tables.sin
        num_chosen = 0 if mixer.index is None else mixer.index.num_chosen
        qkv = LatentQkv(
            queries, entries, self.kv_a_norm[...], heads, *turns, LATENT_NORM_EPS, x_TD.dtype, index, num_chosen
        )
        out = attend(place, qkv, None)
        return last_product(out.reshape(len(x_TD), -1), self.matrix("o", kernels), self.o_bias)

    def _index(self, x_TD: jax.Array, low_TQ: jax.Array, tables: RopeTables, kernels: KernelChoice) -> TokenIndex:
        """What the tokens ask the index, of what queries are made of, and their keys, of which LayerNorm is taken."""
        turned = self.mixer.rotated

        def rotated(heads: jax.Array) -> jax.Array:
            parts = rotate(heads[..., :turned], tables.cos, tables.sin), heads[..., turned:]
            return jnp.concatenate(parts, axis=-1).astype(x_TD.dtype)

        keys = centred(product(x_TD, self.matrix("index_k", kernels)), jnp.dtype(jnp.float32))
        keys = rms_norm(keys, self.index_k_norm[...], LATENT_NORM_EPS) + self.index_k_norm_bias[...]
        return TokenIndex(
            rotated(product(low_TQ, self.matrix("index_q", kernels))),
            product(x_TD, self.matrix("index_weights"), jnp.float32),
            rotated(keys.astype(x_TD.dtype)[:, None])[:, 0],
        )


def _plus(x: jax.Array, bias: nnx.Param[jax.Array] | None) -> jax.Array:
    return x if bias is None else x + bias[...].astype(x.dtype)


class RecurrentMixer(Matrices):
    """Mixes tokens through a state of fixed size instead of all keys and values before them.

    These are the products around `Recur`, which `pallas_kernels/delta.py` computes. Rows of the fused product lie by
    key head, so that devices that share the model have whole groups each. Where it is quantized, what each value head
    has few of (`num_gates`) are products of their own that are not.
    """

    def __init__(self, arch: ModelArch, spec: LayerSpec, dtype: jnp.dtype) -> None:
        net = spec.mixer
        assert isinstance(net, RecurrentNet)
        self.key_size, self.eps = net.key_size, arch.rms_norm_eps if net.norm_eps is None else net.norm_eps
        self.net = net
        d, values = arch.hidden_size, net.value_heads * net.value_size
        # Rows of a key head: q, k, v, z; what each value head has few of.
        large, small = net.rows, net.gate_rows
        fmt = arch.format_of(spec, "state_inputs")
        parts = {"qkvz": (large, fmt), "gates": (small, None)} if fmt and small else {"inputs": (large + small, fmt)}
        for name, (rows, kept) in parts.items():
            run = math.gcd(net.key_size, net.value_size)
            self.declare(name, (net.key_heads, rows, d), ("key_heads", None, None), dtype, kept, fan_in=d, run=run)
        self.inputs_in = tuple(parts)
        of_output = arch.format_of(spec, "state_output")
        self.declare("output", (d, values), (None, "key_heads"), dtype, of_output, fan_in=values)

    def reader(self, kernels: KernelChoice) -> Weights | None:
        """The matrix that multiplies x, if it is only one."""
        return self.matrix(self.inputs_in[0], kernels) if len(self.inputs_in) == 1 else None

    def made_of(self, x_TD: Rows, kernels: KernelChoice) -> jax.Array:
        """What the layer makes of its tokens, `[T, K', rows]` or parts of it."""
        matrices = [self.matrix(name, kernels) for name in self.inputs_in]
        if len(matrices) == 1:
            return product_in_parts(x_TD, matrices[0])
        return jnp.concatenate([product(x_TD, matrix) for matrix in matrices], axis=-1)

    def tokens(
        self, fused: jax.Array, vectors: LayerVectors, rows: LayerRows, place: int, dtype: jnp.dtype
    ) -> StateTokens | ConvTokens:
        """What moves the states, of the product or parts of it."""
        raise NotImplementedError

    def __call__(
        self,
        x_TD: Rows,
        vectors: LayerVectors,
        rows: LayerRows,
        place: int,
        recur: Recur,
        kernels: KernelChoice = AUTO_CHOICE,
    ) -> Update:
        """`x [T, D]` to `[T, D]`, or parts of it as `add_and_norm` takes them.

        `place` is that of the layer in `ModelArch.recurrent_layers`.
        """
        fused = self.made_of(x_TD, kernels)
        factors = _factors_of_rows(self.net)
        if factors is not None:
            fused = multiplied(fused, factors)
        out = recur(place, self.tokens(fused, vectors, rows, place, x_TD.dtype))
        if self.net.out_factor != 1:
            out = multiplied(out, self.net.out_factor)
        return last_product(out.reshape(len(out), -1), self.matrix("output", kernels), None)


def _factors_of_rows(net: RecurrentNet) -> npt.NDArray[np.float32] | None:
    """Those of what a layer of Mamba-2 makes of a token, for each row of a group; None: there are none."""
    if not isinstance(net, Mamba) or not net.row_factors:
        return None
    values = net.group * net.value_size
    return np.repeat(np.asarray(net.row_factors, np.float32), [net.key_size, net.key_size, values, values, net.group])


class GatedDeltaNet(RecurrentMixer):
    """A gated delta-net:

        q, k, v = silu(conv(x Wqkv))                      depthwise and causal, over the last few tokens
        q, k    = l2norm(q) / sqrt(h), l2norm(k)
        S       = a S;  S = S + k outer (b (v - S^T k))   a and b of each value head and token
        out     = (rms_norm(S^T q) w silu(x Wz)) Wo

    Source: Gated DeltaNet (Yang et al., arXiv 2412.06464), as Qwen3-Next and Qwen3.5 have it.
    """

    def tokens(
        self, fused: jax.Array, vectors: LayerVectors, rows: LayerRows, place: int, dtype: jnp.dtype
    ) -> DeltaTokens | ChannelTokens:
        """See `RecurrentMixer`."""
        return DeltaTokens(fused, self.small(vectors, rows, place), self.key_size, dtype)

    def small(self, vectors: LayerVectors, rows: LayerRows, place: int) -> DeltaVectors:
        """The layer's small parameters."""
        stacks = vectors.delta_taps, vectors.delta_decay, vectors.delta_norm
        taps, rates, scales = (rows.stack(stack, place) for stack in stacks)
        assert taps is not None and rates is not None and scales is not None
        return DeltaVectors(taps, rates, scales, rows.row(place), self.eps)


class KimiDeltaNet(GatedDeltaNet):
    """A gated delta-net with a decay for each number of a key (Kimi Delta Attention); of each head

        q, k, v = silu(conv(x Wqkv)), q and k normalized as there
        a       = exp(-exp(A) softplus(x Wfa Wfb + dt))   of each row of S
        S       = diag(a) S;  S = S + k outer (b (v - S^T k))
        out     = (rms_norm(S^T q) w sigmoid(x Wga Wgb)) Wo

    Wfa and Wga make few numbers for all heads, which devices that share the model make each for itself.

    Source: Kimi Linear (Moonshot AI, arXiv 2510.26692).
    """

    def __init__(self, arch: ModelArch, spec: LayerSpec, dtype: jnp.dtype) -> None:
        super().__init__(arch, spec, dtype)
        net, by_head = spec.mixer, ("key_heads", None, None)
        assert isinstance(net, ChannelDeltaNet)
        d, rank = arch.hidden_size, net.rank
        self.declare("low", (2, rank, d), (None, None, None), dtype, None, fan_in=d)
        self.declare("read_gates", (net.key_heads, net.value_size, rank), by_head, dtype, None, fan_in=rank)
        self.declare("decays", (net.key_heads, net.key_size, rank), by_head, dtype, None, fan_in=rank)

    def reader(self, kernels: KernelChoice) -> Weights | None:
        """Several matrices multiply x."""
        return None

    def made_of(self, x_TD: Rows, kernels: KernelChoice) -> jax.Array:
        """See `RecurrentMixer`."""
        assert isinstance(x_TD, jax.Array), "several matrices read rows as they are"
        of_x = whole(super().made_of(x_TD, kernels), 3, x_TD.dtype)
        low_T2R = product(x_TD, self.matrix("low"))
        others = (product(low_T2R[:, i], self.matrix(name)) for i, name in ((1, "read_gates"), (0, "decays")))
        return jnp.concatenate([of_x, *others], axis=-1)

    def tokens(
        self, fused: jax.Array, vectors: LayerVectors, rows: LayerRows, place: int, dtype: jnp.dtype
    ) -> ChannelTokens:
        """See `RecurrentMixer`."""
        return ChannelTokens(fused, self.small(vectors, rows, place), self.key_size, dtype)


class Mamba2(RecurrentMixer):
    """A state-space model whose states decay by one number a head (Mamba-2), with the heads of a group sharing B and C:

        x, B, C = silu(conv(u Wxbc) + bias)               depthwise and causal, over the last few tokens
        S       = exp(-exp(A) dt) S + B outer (dt x)      dt = softplus(u Wdt + bias) of each head and token
        out     = (rms_norm((S^T C + D x) silu(u Wz)) w) Wo

    The norm is over all heads of a group; Falcon-H1 has none.

    Source: Dao and Gu, arXiv 2405.21060, as Bamba and Granite 4.0 have it.
    """

    def tokens(
        self, fused: jax.Array, vectors: LayerVectors, rows: LayerRows, place: int, dtype: jnp.dtype
    ) -> MambaTokens:
        """See `RecurrentMixer`."""
        stacks = vectors.mamba_taps, vectors.mamba_bias, vectors.mamba_rates, vectors.mamba_norm
        taps, bias, rates, scales = (rows.stack(stack, place) for stack in stacks)
        assert taps is not None and bias is not None and rates is not None
        of_layer = MambaVectors(taps, bias, rates, scales, rows.row(place), self.eps)
        return MambaTokens(fused, of_layer, self.key_size, dtype)


class SelectiveScan(RecurrentMixer):
    """A state-space model whose states decay by numbers of each channel (Mamba), as Jamba has it:

        x       = silu(conv(u Wx) + bias)                 depthwise and causal, over the last few tokens
        t, B, C = norms of x Wl                           the same for all channels
        dt      = softplus(t Wt + bias)                   of each channel
        S       = exp(-exp(A) dt) S + B outer (dt x)
        out     = ((S^T C + D x) silu(u Wz)) Wo

    All channels make t, B and C, so devices don't share them.

    Source: Gu and Dao, arXiv 2312.00752; Jamba (arXiv 2403.19887).
    """

    def __init__(self, arch: ModelArch, spec: LayerSpec, dtype: jnp.dtype) -> None:
        super().__init__(arch, spec, dtype)
        net, float32 = spec.mixer, jnp.dtype(jnp.float32)
        assert isinstance(net, Selective)
        channels, rank, low = net.channels, net.rank, net.rank + 2 * net.key_size
        small = jnp.zeros((channels, net.taps + 3), float32)
        self.channels = nnx.Param(small, axes=(None, None), mean=0.0, std=net.taps**-0.5)
        self.rates = vector((net.key_size, channels), (None, None), float32, mean=0.0)
        self.declare("low", (low, channels), (None, None), dtype, None, fan_in=channels)
        self.low_norms = vector((low,), (None,), dtype, mean=1.0)
        self.declare("steps", (channels, rank), (None, None), dtype, None, fan_in=rank)

    def tokens(
        self, fused: jax.Array, vectors: LayerVectors, rows: LayerRows, place: int, dtype: jnp.dtype
    ) -> SelectiveTokens:
        """See `RecurrentMixer`."""
        low, steps = self.matrix("low"), self.matrix("steps")
        assert isinstance(low, jax.Array) and isinstance(steps, jax.Array)
        small = SelectiveVectors(self.channels[...], self.rates[...], low, self.low_norms[...], steps, self.eps)
        return SelectiveTokens(fused, small, self.key_size, dtype)


class ShortConvolution(RecurrentMixer):
    """A convolution over a few tokens between two gates:

        b, c, x = u Wb, u Wc, u Wx
        out     = (c conv(b x)) Wo                        depthwise and causal

    Source: Liquid AI, LFM2 (arXiv 2511.23404).
    """

    def tokens(
        self, fused: jax.Array, vectors: LayerVectors, rows: LayerRows, place: int, dtype: jnp.dtype
    ) -> ConvTokens:
        """See `RecurrentMixer`."""
        taps = rows.stack(vectors.conv_taps, place)
        assert taps is not None
        return ConvTokens(fused, taps, rows.row(place), dtype)


class SharedKeysAttention(Matrices):
    """Attention to the keys and values that an earlier layer has made: of its own, a layer has queries alone.

    So its tokens take no room in the cache. These are the projections around `Attend`.
    """

    def __init__(self, arch: ModelArch, spec: LayerSpec, dtype: jnp.dtype) -> None:
        assert spec.keys_from is not None
        self.keys_at = arch.places[spec.keys_from]
        self.eps = arch.rms_norm_eps
        arch = arch.with_heads_of(spec)
        num_kv_heads, num_rows, h = qkv_heads(arch)
        d, out = arch.hidden_size, arch.num_heads * h
        queries = num_kv_heads, num_rows - 2, h, d
        by_head = ("kv_heads", None, None, None)
        # Named as where keys and values come with them: so quantized checkpoints except it by the same words.
        reordered = reorders_heads(arch.ropes, h)
        self.declare("qkv", queries, by_head, dtype, arch.format_of(spec, "qkv"), fan_in=d, reordered=reordered)
        self.declare("o", (d, out), (None, "kv_heads"), dtype, arch.format_of(spec, "o"), fan_in=out)

    def reader(self, kernels: KernelChoice) -> Weights | None:
        """The only matrix that multiplies x."""
        return self.matrix("qkv", kernels)

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
        """As `Attention.__call__`; `place` is that of the layer among all that attend."""
        assert adapters is None, "models with such layers take no adapters"
        q = product(x_TD, self.matrix("qkv", kernels))
        num_tokens, num_kv_heads, groups, h = q.shape
        q_TNH = q.reshape(num_tokens, num_kv_heads * groups, h)
        q_norm = own_scales(rows.stack(vectors.q_norm, place), h)
        if q_norm is not None:
            q_TNH = rms_norm(q_TNH, scale_of(q_norm, rows.row(place), q_TNH.dtype), self.eps)
        out_TNH = attend(self.keys_at, Queries(rotate(q_TNH, tables.cos, tables.sin), num_kv_heads), None)
        return last_product(out_TNH.reshape(num_tokens, -1), self.matrix("o", kernels), None)
