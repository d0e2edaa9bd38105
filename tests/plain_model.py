"""The models run the plain way: one sequence, causal attention over all of it, no pages. The oracle of the tests."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxsgl.models import Attend, ModelArch, Qkv, abstract_model
from jaxsgl.models.layers import Queries
from jaxsgl.weights import load_params
from jaxsgl.weights.sharding import make_mesh
from pallas_kernels import AttentionOptions, LatentQkv
from pallas_kernels.delta_tokens import DeltaTokens


def causal_attend(arch: ModelArch) -> Attend:
    stored: dict[int, tuple[jax.Array, jax.Array]] = {}

    def attend(place: int, qkv: Qkv | Queries, sinks: jax.Array | None) -> jax.Array:
        if isinstance(qkv, Queries):
            q_TNH, (k_TKH, v_TKH) = qkv.heads, stored[place]
        else:
            q_TNH, k_TKH, v_TKH = qkv.split()
            stored[place] = k_TKH, v_TKH
        options = arch.attention_options(arch.attention_layers[place])
        out = causal_attention(q_TNH, k_TKH, v_TKH, options, sinks)
        return qkv.heads.outputs(out) if isinstance(qkv, LatentQkv) else out

    return attend


def causal_attention(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    options: AttentionOptions = AttentionOptions(),
    sinks: jax.Array | None = None,
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
    scores = jnp.where(mask, scores, -jnp.inf)
    if sinks is not None:  # as a last token without a value
        column = jnp.broadcast_to(sinks[:, None, None], (num_heads, num_tokens, 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :num_tokens].astype(v.dtype)
    return jnp.einsum("nts,snh->tnh", weights, v)


def plain_recur(place: int, tokens: DeltaTokens) -> jax.Array:
    """The gated delta rule, token by token, from a state of zeros."""
    num_taps, num_tokens = tokens.taps.shape[-1], len(tokens.mixed)
    padded = jnp.pad(tokens.mixed.astype(jnp.float32), ((num_taps - 1, 0), (0, 0), (0, 0)))
    windows = jnp.stack([padded[i : i + num_tokens] for i in range(num_taps)], axis=-1)
    convolved = jax.nn.silu((windows * tokens.taps).sum(axis=-1))
    h, group = tokens.key_size, tokens.beta.shape[-1]
    q, k, v = convolved[..., :h], convolved[..., h : 2 * h], convolved[..., 2 * h :]
    q, k = (x / jnp.sqrt((x**2).sum(axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    v = v.reshape(*v.shape[:2], group, -1)

    def one(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, log_decay, beta = token
        state = state * jnp.exp(log_decay)[..., None, None]
        change = beta[..., None] * (v - jnp.einsum("kh,krhv->krv", k, state))
        state = state + jnp.einsum("kh,krv->krhv", k, change)
        return state, jnp.einsum("kh,krhv->krv", q, state) / h**0.5

    zeros = jnp.zeros((*v.shape[1:3], h, v.shape[-1]))
    read = jax.lax.scan(one, zeros, (q, k, v, tokens.log_decay, tokens.beta))[1]
    vectors = tokens.vectors
    z = tokens.fused[..., tokens.mixed.shape[-1] : -2 * group].astype(jnp.float32).reshape(read.shape)
    normed = read / jnp.sqrt((read**2).mean(axis=-1, keepdims=True) + vectors.eps) * vectors.scales[vectors.row]
    return (normed * jax.nn.silu(z)).astype(tokens.fused.dtype)


def mesh_of(num_devices: int = 1) -> Mesh:
    return make_mesh(jax.devices()[:num_devices])


def plain_logits(arch: ModelArch, params: nnx.State, token_ids: list[int], dtype: str = "float32") -> np.ndarray:
    """Logits `[T, V]` of one sequence."""
    graphdef, _ = abstract_model(arch, jnp.dtype(dtype))

    @jax.jit
    def run(params: nnx.State, token_ids: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, params)
        positions = jnp.arange(len(token_ids), dtype=jnp.int32)
        return model.logits(model(token_ids, positions, causal_attend(arch), recur=plain_recur))

    return np.asarray(run(params, jnp.asarray(token_ids, jnp.int32)))


def checkpoint_logits(folder: Path, token_ids: list[int], dtype: str = "float32", num_devices: int = 1) -> np.ndarray:
    arch = ModelArch.from_folder(folder)
    return plain_logits(arch, load_params(folder, arch, jnp.dtype(dtype), mesh_of(num_devices)), token_ids, dtype)
