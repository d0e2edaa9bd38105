"""`choose_experts` as a Pallas kernel for the Triton backend. Called through `triton.BACKEND`.

A program takes a few tokens, each a row of scores that one warp holds, and takes the best expert of a row, then the
best of the rest, and so on. Where experts stand in groups, it takes the best groups first, likewise. XLA makes a
softmax, a sort, a gather and a normalization of it, each a kernel, and ten of groups.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.routing import TINY, Router
from pallas_kernels.triton.tiles import load_rows, store_rows

_TILE_TOKENS = 4  # one for each warp
_MOST_EXPERTS = 1024  # 32 numbers of each array in a thread
_MOST_GROUPS = 32  # one after another


def refuse_choose_experts(router: Router, logits: jax.Array) -> str | None:
    """Why this backend can't take the call, or None when it can."""
    if router.score == "sparse_mixer":
        return "the share of an expert depends on those near it (sparse_mixer)"
    if router.num_groups > _MOST_GROUPS:
        return f"experts stand in {router.num_groups} groups; it takes at most {_MOST_GROUPS}"
    if logits.shape[-1] > _MOST_EXPERTS:
        return f"there are {logits.shape[-1]} experts; it takes at most {_MOST_EXPERTS}"
    return None


@functools.partial(jax.jit, static_argnames=("router", "interpret"))
def choose_experts(
    router: Router,
    logits: jax.Array,
    choice_bias: jax.Array | None,
    shared_logits: jax.Array | None,
    logit_bias: jax.Array | None,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """See `backend.ChooseExperts`."""
    num_tokens = logits.shape[-2]
    shape = num_tokens, router.top_k + router.num_shared
    # Biases as rows: a kernel reshapes no array in memory.
    of_logits, of_choice = ([] if bias is None else [bias[None]] for bias in (logit_bias, choice_bias))
    gates = [] if shared_logits is None else [shared_logits]
    experts, shares = pl.pallas_call(
        functools.partial(_kernel, router=router, num_biases=(len(of_logits), len(of_choice))),
        out_shape=(jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)),
        grid=(pl.cdiv(num_tokens, _TILE_TOKENS),),
        compiler_params=plgpu.CompilerParams(num_warps=_TILE_TOKENS),
        interpret=interpret,
        name="choose_experts",
    )(logits, *of_logits, *of_choice, *gates)
    return experts, shares


def _kernel(logits_ref: Any, *refs: Any, router: Router, num_biases: tuple[int, int]) -> None:
    *input_refs, experts_ref, shares_ref = refs
    of_logits_refs, rest = input_refs[: num_biases[0]], input_refs[num_biases[0] :]
    of_choice_refs, gate_refs = rest[: num_biases[1]], rest[num_biases[1] :]
    *parts, num_tokens, num_experts = logits_ref.shape
    token = pl.program_id(0) * _TILE_TOKENS + jnp.arange(_TILE_TOKENS, dtype=jnp.int32)
    is_real = token < num_tokens
    width = pl.next_power_of_2(num_experts)
    columns = 0, width, 1, num_experts
    expert = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None, :], (_TILE_TOKENS, width))
    is_out = expert >= num_experts  # of the choice

    where = [(part, token) for part in range(parts[0])] if parts else [(token,)]
    logits = functools.reduce(jnp.add, [load_rows(logits_ref, index, is_real, columns) for index in where])
    only_row = (jnp.zeros(1, jnp.int32),)
    for bias_ref in of_logits_refs:
        logits = logits + load_rows(bias_ref, only_row, None, columns).astype(jnp.float32)
    scores = _scores(router, logits, is_out)
    ranks = scores
    for bias_ref in of_choice_refs:
        ranks = ranks + load_rows(bias_ref, only_row, None, columns)

    if router.top_groups < router.num_groups:
        group = lax.div(expert, jnp.int32(num_experts // router.num_groups))
        is_out = is_out | ~_is_in_best(router, jnp.where(is_out, -jnp.inf, ranks), expert, group)

    # What is out, or has been chosen, ranks after all others: a mask besides would have `ptxas` spill 384 experts.
    ranks = jnp.where(is_out, -jnp.inf, jnp.maximum(ranks, jnp.finfo(jnp.float32).min))
    num_all = router.top_k + router.num_shared
    num_choices = pl.next_power_of_2(num_all)
    choice = jnp.broadcast_to(jnp.arange(num_choices, dtype=jnp.int32)[None, :], (_TILE_TOKENS, num_choices))
    chosen, shares = jnp.zeros(choice.shape, jnp.int32), jnp.zeros(choice.shape, jnp.float32)
    for number in range(router.top_k):
        best = jnp.max(ranks, axis=1)[:, None]
        first = jnp.min(jnp.where(ranks == best, expert, width), axis=1)[:, None]
        is_first = expert == first
        share = jnp.sum(jnp.where(is_first, scores, 0.0), axis=1)[:, None]
        chosen, shares = jnp.where(choice == number, first, chosen), jnp.where(choice == number, share, shares)
        ranks = jnp.where(is_first, -jnp.inf, ranks)

    columns = 0, num_choices, 1, num_all
    if router.num_shared:
        chosen = jnp.where(choice < router.top_k, chosen, num_experts + choice - router.top_k)
    store_rows(experts_ref, (token,), is_real, chosen, columns)
    shares = _shares(router, shares, choice < router.top_k)
    if router.num_shared:
        of_shared = jnp.ones(_TILE_TOKENS, jnp.float32)
        for gate_ref in gate_refs:
            of_shared = jax.nn.sigmoid(plgpu.load(gate_ref.at[token], mask=is_real, other=0))
        shares = jnp.where(choice < router.top_k, shares, of_shared[:, None])
    store_rows(shares_ref, (token,), is_real, shares, columns)


def _is_in_best(router: Router, ranks: jax.Array, expert: jax.Array, group: jax.Array) -> jax.Array:
    """Whether each expert `[tokens, E]` of a group is in one of those whose best experts have the highest sums."""
    num_tokens, width = ranks.shape
    shape = num_tokens, pl.next_power_of_2(router.num_groups)
    number = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32)[None, :], shape)
    sums = jnp.full(shape, -jnp.inf, jnp.float32)
    for of_group in range(router.num_groups):
        mine, total = jnp.where(group == of_group, ranks, -jnp.inf), jnp.zeros((num_tokens, 1), jnp.float32)
        for _ in range(router.group_best):
            best = jnp.max(mine, axis=1)[:, None]
            total += best
            mine = jnp.where(expert == jnp.min(jnp.where(mine == best, expert, width), axis=1)[:, None], -jnp.inf, mine)
        sums = jnp.where(number == of_group, total, sums)
    is_best = jnp.zeros(ranks.shape, jnp.int32)  # as numbers: Triton carries no arrays of one bit
    for _ in range(router.top_groups):
        best = jnp.max(sums, axis=1)[:, None]
        first = jnp.min(jnp.where(sums == best, number, shape[1]), axis=1)[:, None]
        is_best, sums = jnp.where(group == first, 1, is_best), jnp.where(number == first, -jnp.inf, sums)
    return is_best > 0


def _scores(router: Router, logits: jax.Array, is_out: jax.Array) -> jax.Array:
    if router.score == "softmax":
        return _softmax(logits, ~is_out)
    if router.score == "root_of_softplus":
        return jnp.sqrt(jnp.maximum(logits, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(logits))))
    return jax.nn.sigmoid(logits) if router.score == "sigmoid" else logits


def _shares(router: Router, shares: jax.Array, is_choice: jax.Array) -> jax.Array:
    """Shares of scores `[tokens, choices]`, which are zeros where there is no choice."""
    if router.score == "softmax_of_chosen":
        shares = _softmax(shares, is_choice)
    elif router.score == "sigmoid_of_chosen":
        shares = jnp.where(is_choice, jax.nn.sigmoid(shares), 0.0)
    if router.renormalize:
        shares = shares / (jnp.sum(shares, axis=1)[:, None] + TINY)
    return shares * router.scale


def _softmax(x: jax.Array, is_there: jax.Array) -> jax.Array:
    """Of each row; zeros where nothing is."""
    top = jnp.max(jnp.where(is_there, x, -jnp.inf), axis=1)[:, None]
    powers = jnp.where(is_there, jnp.exp(x - top), 0.0)
    return powers / jnp.sum(powers, axis=1)[:, None]
