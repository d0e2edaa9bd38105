"""The models run the plain way: one sequence, causal attention over all of it, no pages. The oracle of the tests."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxsgl.models import Attend, ModelArch, Qkv, StepContext, abstract_model, arch_from_folder
from jaxsgl.models.layers import Queries
from jaxsgl.weights import load_params
from jaxsgl.weights.sharding import make_mesh
from pallas_kernels import AttentionOptions, GroupedQkv, GroupParts, LatentQkv, TokenIndex
from pallas_kernels.delta_tokens import ChannelTokens, DeltaTokens, MambaTokens, SelectiveTokens, StateTokens
from pallas_kernels.grouped_tokens import turn_pairs
from pallas_kernels.short_conv import ConvTokens


def causal_attend(arch: ModelArch) -> Attend:
    stored: dict[int, tuple[jax.Array, jax.Array]] = {}
    chosen: list[jax.Array] = []  # `[T, T]` by each index in turn

    def attend(place: int, qkv: Qkv | Queries, sinks: jax.Array | None) -> jax.Array:
        if isinstance(qkv, GroupedQkv):
            return plain_grouped_attention(qkv, arch.attention_options(arch.attention_layers[place]), sinks)
        if isinstance(qkv, Queries):
            q_TNH, (k_TKH, v_TKH) = qkv.heads, stored[place]
        else:
            q_TNH, k_TKH, v_TKH = qkv.split()
            stored[place] = k_TKH, v_TKH
        options = arch.attention_options(arch.attention_layers[place])
        is_chosen = None
        if isinstance(qkv, LatentQkv) and qkv.num_chosen:
            if qkv.index is not None:
                chosen.append(plain_choice(qkv.index, qkv.num_chosen))
            is_chosen = chosen[-1]
        out = causal_attention(q_TNH, k_TKH, v_TKH, options, sinks, is_chosen)
        return qkv.heads.outputs(out) if isinstance(qkv, LatentQkv) else out

    return attend


def plain_choice(index: TokenIndex, count: int) -> jax.Array:
    """Whether each query attends to each token, `[T, T]`, by the place of its score among all that the query sees."""
    q, k = (each.astype(jnp.float32) for each in (index.queries, index.keys))
    of_heads = jnp.einsum("qhi,ki->qkh", q, k, precision="highest")
    scores = (jnp.maximum(of_heads, 0) * index.weights[:, None]).sum(axis=-1)
    mask = jnp.tril(jnp.ones(scores.shape, bool))
    places = jnp.argsort(jnp.argsort(jnp.where(mask, -scores, jnp.inf), axis=-1), axis=-1)
    return mask & (places < count)


def plain_grouped_attention(qkv: GroupedQkv, options: AttentionOptions, sinks: jax.Array | None) -> jax.Array:
    """Each query attends to the tokens of its window, and to one entry of each whole group up to itself."""
    num_tokens, _, head_dim = qkv.queries.shape
    number = jnp.arange(num_tokens)
    seen = (number <= number[:, None]) & (number > number[:, None] - (options.sliding_window or num_tokens))
    keys = qkv.entries
    if qkv.groups is not None and num_tokens >= qkv.groups.size:
        entries, sees_entry = plain_entries(qkv.groups, head_dim)
        keys, seen = jnp.concatenate([keys, entries]), jnp.concatenate([seen, sees_entry], axis=1)
    scores = jnp.einsum("tnh,sh->nts", qkv.queries, keys, precision="highest") * options.scale(head_dim)
    scores = jnp.where(seen, scores, -jnp.inf)
    assert sinks is not None
    column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("nts,sh->tnh", weights, keys, precision="highest").astype(qkv.queries.dtype)


def plain_entries(parts: GroupParts, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """The entries `[T // m, H]` of whole groups, and which of them each token attends to."""
    m, num_tokens = parts.size, len(parts.numbers)
    number = num_tokens // m
    numbers, gates = (x[: number * m].reshape(number, m, *x.shape[1:]) for x in (parts.numbers, parts.gates))
    gates = gates + parts.bias
    of_own, gates_of_own = numbers[:, :, -1], gates[:, :, -1]
    if numbers.shape[2] == 2:
        before = jnp.pad(numbers[:-1, :, 0], ((1, 0), (0, 0), (0, 0)))
        gates_before = jnp.pad(gates[:-1, :, 0], ((1, 0), (0, 0), (0, 0)), constant_values=-jnp.inf)
        of_own = jnp.concatenate([before, of_own], axis=1)
        gates_of_own = jnp.concatenate([gates_before, gates_of_own], axis=1)
    means = (of_own * jax.nn.softmax(gates_of_own, axis=1)).sum(axis=1)
    angles = (jnp.arange(number) * m)[:, None] * parts.frequencies

    def finished(means: jax.Array, scales: jax.Array) -> jax.Array:
        normed = means / jnp.sqrt((means**2).mean(axis=-1, keepdims=True) + parts.eps) * scales
        return turn_pairs(normed, jnp.cos(angles), jnp.sin(angles))

    entries = finished(means[:, :head_dim], parts.scales[:head_dim])
    seen = jnp.arange(number) < ((jnp.arange(num_tokens) + 1) // m)[:, None]
    if parts.index_queries is None or parts.index_weights is None:
        return entries, seen
    keys = finished(means[:, head_dim:], parts.scales[head_dim:])
    of_heads = jnp.einsum("qhi,ki->qkh", parts.index_queries, keys, precision="highest")
    scores = (jnp.maximum(of_heads, 0) * parts.index_weights[:, None]).sum(axis=-1)
    places = jnp.argsort(jnp.argsort(jnp.where(seen, -scores, jnp.inf), axis=-1), axis=-1)
    return entries, seen & (places < parts.num_chosen)


def causal_attention(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    options: AttentionOptions = AttentionOptions(),
    sinks: jax.Array | None = None,
    is_chosen: jax.Array | None = None,
) -> jax.Array:
    num_tokens, num_heads, head_dim = q_TNH.shape
    group_size = num_heads // k_TKH.shape[1]
    k, v = (jnp.repeat(x, group_size, axis=1) for x in (k_TKH, v_TKH))
    scores = jnp.einsum("tnh,snh->nts", q_TNH, k).astype(jnp.float32) * options.scale(head_dim)
    if options.logit_soft_cap is not None:
        scores = options.logit_soft_cap * jnp.tanh(scores / options.logit_soft_cap)
    mask = jnp.tril(jnp.ones((num_tokens, num_tokens), bool))
    if options.sliding_window is not None:
        mask &= ~jnp.tril(mask, -options.sliding_window)
    if options.chunk is not None:
        chunk = jnp.arange(num_tokens) // options.chunk
        mask &= chunk[:, None] == chunk
    if is_chosen is not None:
        mask &= is_chosen
    scores = jnp.where(mask, scores, -jnp.inf)
    if sinks is not None:  # as a last token without a value
        column = jnp.broadcast_to(sinks[:, None, None], (num_heads, num_tokens, 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :num_tokens].astype(v.dtype)
    return jnp.einsum("nts,snh->tnh", weights, v)


def plain_recur(place: int, tokens: StateTokens | ConvTokens) -> jax.Array:
    """The gated delta rule or that of Mamba-2, token by token, from a state of zeros; or a convolution alone."""
    num_taps, num_tokens = tokens.taps.shape[-1], len(tokens.mixed)
    padded = jnp.pad(tokens.mixed.astype(jnp.float32), ((num_taps - 1, 0), (0, 0), (0, 0)))
    windows = jnp.stack([padded[i : i + num_tokens] for i in range(num_taps)], axis=-1)
    convolved = (windows * tokens.taps).sum(axis=-1)
    if isinstance(tokens, ConvTokens):
        assert tokens.product.ndim == 3, "products of tests don't come in parts"
        gates = jnp.split(tokens.product.astype(jnp.float32), 3, axis=-1)[1]
        return (gates * convolved).astype(tokens.dtype)[:, :, None]
    others = tokens.fused[..., tokens.mixed.shape[-1] :].astype(jnp.float32)
    if isinstance(tokens, MambaTokens):
        return _plain_mamba(tokens, convolved, others)
    if isinstance(tokens, SelectiveTokens):
        return _plain_selective(tokens, convolved, others)
    return _plain_delta_rule(tokens, convolved, others)


def _plain_delta_rule(tokens: DeltaTokens | ChannelTokens, convolved: jax.Array, others: jax.Array) -> jax.Array:
    vectors, h = tokens.vectors, tokens.key_size
    log_rate, bias, *most = jnp.moveaxis(vectors.rates[vectors.row], 1, 0)
    by_channel = isinstance(tokens, ChannelTokens)
    group = 1 if by_channel else log_rate.shape[-1]
    q, k, v = jnp.split(jax.nn.silu(convolved), (h, 2 * h), axis=-1)
    q, k = (x / jnp.sqrt((x**2).sum(axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    v = v.reshape(*v.shape[:2], group, -1)
    if by_channel:
        write, z, forget = jnp.split(others, (1, others.shape[-1] - h), axis=-1)
    else:
        z, write, forget = jnp.split(others, (others.shape[-1] - 2 * group, others.shape[-1] - group), axis=-1)
    decay, beta = jnp.exp(-jnp.exp(log_rate) * jax.nn.softplus(forget + bias)), jax.nn.sigmoid(write)
    decay = decay[:, :, None] if by_channel else decay[..., None]  # [T, K, r, h or 1]
    beta = beta * most[0] if most else beta

    def one(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, decay, beta = token
        state = state * decay[..., None]
        change = beta[..., None] * (v - jnp.einsum("kh,krhv->krv", k, state))
        state = state + jnp.einsum("kh,krv->krhv", k, change)
        return state, jnp.einsum("kh,krhv->krv", q, state) / h**0.5

    read = jax.lax.scan(one, jnp.zeros((*v.shape[1:3], h, v.shape[-1])), (q, k, v, decay, beta))[1]
    normed = read / jnp.sqrt((read**2).mean(axis=-1, keepdims=True) + vectors.eps) * vectors.scales[vectors.row]
    gates = jax.nn.sigmoid(z) if by_channel else jax.nn.silu(z)
    return (normed * gates.reshape(read.shape)).astype(tokens.dtype)


def _plain_mamba(tokens: MambaTokens, convolved: jax.Array, others: jax.Array) -> jax.Array:
    vectors, h = tokens.vectors, tokens.key_size
    log_rate, bias, skip = jnp.moveaxis(vectors.rates[vectors.row], 1, 0)
    group = log_rate.shape[-1]
    c, b, x = jnp.split(jax.nn.silu(convolved + vectors.bias[vectors.row]), (h, 2 * h), axis=-1)
    x = x.reshape(*x.shape[:2], group, -1)
    z, dt = jnp.split(others, (others.shape[-1] - group,), axis=-1)
    dt = jax.nn.softplus(dt + bias)

    def one(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        c, b, x, dt = token
        state = state * jnp.exp(-jnp.exp(log_rate) * dt)[..., None, None]
        state = state + jnp.einsum("kh,krv->krhv", b, dt[..., None] * x)
        return state, jnp.einsum("kh,krhv->krv", c, state) + skip[..., None] * x

    read = jax.lax.scan(one, jnp.zeros((*x.shape[1:3], h, x.shape[-1])), (c, b, x, dt))[1]
    gated = read.reshape(z.shape) * jax.nn.silu(z)
    if vectors.scales is None:
        return gated.reshape(read.shape).astype(tokens.dtype)
    normed = gated / jnp.sqrt((gated**2).mean(axis=-1, keepdims=True) + vectors.eps) * vectors.scales[vectors.row]
    return normed.reshape(read.shape).astype(tokens.dtype)


def _plain_selective(tokens: SelectiveTokens, convolved: jax.Array, others: jax.Array) -> jax.Array:
    vectors, h, rank = tokens.vectors, tokens.key_size, tokens.vectors.steps.shape[1]
    *_, conv_bias, step_bias, skip = vectors.channels.T
    x = jax.nn.silu(convolved[:, 0] + conv_bias)
    parts = jnp.split(x @ vectors.low.astype(jnp.float32).T, (rank, rank + h), axis=-1)
    scales = jnp.split(vectors.low_norms, (rank, rank + h))
    low, b, c = (
        part / jnp.sqrt((part**2).mean(axis=-1, keepdims=True) + vectors.eps) * scale
        for part, scale in zip(parts, scales, strict=True)
    )
    dt = jax.nn.softplus(low @ vectors.steps.astype(jnp.float32).T + step_bias)

    def one(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        b, c, x, dt = token
        state = state * jnp.exp(-jnp.exp(vectors.rates) * dt) + b[:, None] * (dt * x)
        return state, c @ state + skip * x

    read = jax.lax.scan(one, jnp.zeros(vectors.rates.shape), (b, c, x, dt))[1]
    return (read[:, None] * jax.nn.silu(others))[:, :, None].astype(tokens.dtype)


def mesh_of(num_devices: int = 1) -> Mesh:
    return make_mesh(jax.devices()[:num_devices])


def plain_logits(arch: ModelArch, params: nnx.State, token_ids: list[int], dtype: str = "float32") -> np.ndarray:
    """Logits `[T, V]` of one sequence."""
    graphdef, _ = abstract_model(arch, jnp.dtype(dtype))

    @jax.jit
    def run(params: nnx.State, token_ids: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, params)
        positions = jnp.arange(len(token_ids), dtype=jnp.int32)
        return model.logits(model(token_ids, positions, StepContext(causal_attend(arch), plain_recur)))

    return np.asarray(run(params, jnp.asarray(token_ids, jnp.int32)))


def checkpoint_logits(folder: Path, token_ids: list[int], dtype: str = "float32", num_devices: int = 1) -> np.ndarray:
    arch = arch_from_folder(folder)
    return plain_logits(arch, load_params(folder, arch, jnp.dtype(dtype), mesh_of(num_devices)), token_ids, dtype)
