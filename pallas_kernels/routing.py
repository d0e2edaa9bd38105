"""How tokens choose experts: the rules of routers as data, and the definition of the choice in XLA.

Owns the arithmetic from a router's logits to experts and shares. Never knows weights, or what experts compute. Called
by `api` and by backends; models describe their routers with `Router`.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp

from pallas_kernels.sums import row_sums, softmax

Score: TypeAlias = Literal[
    "softmax", "softmax_of_chosen", "sigmoid", "sigmoid_of_chosen", "sparse_mixer", "root_of_softplus"
]  # fmt: skip

TINY = 1e-20  # keeps a sum of sigmoids from being 0


@dataclass(frozen=True)
class Router:
    """How a token's experts are chosen, and the shares with which their results are added up.

    Attributes:
      top_k: how many are chosen: those of the highest scores.
      score: what makes scores of logits. "softmax_of_chosen" and "sigmoid_of_chosen": the logits rank the experts, and
        scores are those of the chosen ones alone. "sparse_mixer": the logits rank them, and the share of each is its
        own of a softmax over those after it that are near it (arXiv 2409.12136).
      renormalize: the scores of the chosen experts are divided by their sum.
      scale: factor on the shares.
      num_groups, top_groups: experts stand in so many groups, of which so many may be chosen from: those whose best
        experts have the highest sums.
      group_best: of how many.
      choice_bias: a bias of each expert counts for the choice, and not for the share.
      bias: logits have a bias.
      num_shared: so many experts more, E and those after it, are taken by each token, after the chosen ones.
      margin: sparse_mixer: an expert is near one whose logit is larger by no more than twice this share of it.
    """

    top_k: int
    score: Score = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    choice_bias: bool = False
    bias: bool = False
    num_shared: int = 0
    margin: float = 0.0


def choose_by_xla(
    router: Router,
    logits: jax.Array,
    choice_bias: jax.Array | None = None,
    shared_logits: jax.Array | None = None,
    logit_bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """What `choose_experts` returns; it has several kernels on a GPU."""
    if logits.ndim == 3:
        logits = jnp.sum(logits, axis=0)
    if logit_bias is not None:
        logits = logits + logit_bias.astype(jnp.float32)
    if router.score == "sparse_mixer":
        return _by_sparse_mixer(router, logits)
    if router.score == "softmax":
        scores = softmax(logits)
    elif router.score == "sigmoid":
        scores = jax.nn.sigmoid(logits)
    elif router.score == "root_of_softplus":
        scores = root_of_softplus(logits)
    else:
        scores = logits
    ranks = scores if choice_bias is None else scores + choice_bias
    if router.top_groups < router.num_groups:
        ranks = jnp.where(_in_best_groups(router, ranks), ranks, -jnp.inf)
    _, experts = jax.lax.top_k(ranks, router.top_k)
    shares = jnp.take_along_axis(scores, experts, axis=-1)
    if router.score == "softmax_of_chosen":
        shares = softmax(shares)
    elif router.score == "sigmoid_of_chosen":
        shares = jax.nn.sigmoid(shares)
    if router.renormalize:
        shares = shares / (row_sums(shares, keepdims=True) + TINY)
    shares = shares * router.scale
    if not router.num_shared:
        return experts, shares
    numbers, all_of_it = jnp.arange(router.num_shared, dtype=jnp.int32) + logits.shape[-1], jnp.ones(len(logits))
    of_shared = all_of_it if shared_logits is None else jax.nn.sigmoid(shared_logits)
    shape = len(logits), router.num_shared
    return (
        jnp.concatenate([experts, jnp.broadcast_to(numbers, shape)], axis=1),
        jnp.concatenate([shares, jnp.broadcast_to(of_shared[:, None], shape)], axis=1),
    )


def shares_of_told(router: Router, logits: jax.Array, experts: jax.Array) -> jax.Array:
    """The shares `[T, k]` float32 of experts `[T, k]` that something else has chosen, by logits `[T, E]` or parts."""
    if logits.ndim == 3:
        logits = jnp.sum(logits, axis=0)
    shares = jnp.take_along_axis(root_of_softplus(logits), experts, axis=-1)
    return shares / (row_sums(shares, keepdims=True) + TINY) * router.scale


def root_of_softplus(logits: jax.Array) -> jax.Array:
    """The scores of DeepSeek V4."""
    return jnp.sqrt(jax.nn.softplus(logits))


def _by_sparse_mixer(router: Router, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of logits `[T, E]`, one expert after the other; what was chosen takes no part in what follows."""
    left, number = logits, jnp.arange(logits.shape[-1], dtype=jnp.int32)
    experts, shares = [], []
    for _ in range(router.top_k):
        best, top = jnp.argmax(left, axis=-1, keepdims=True), jnp.max(left, axis=-1, keepdims=True)
        is_far = (top - logits) / jnp.maximum(jnp.abs(logits), top) > 2 * router.margin
        experts.append(best.astype(jnp.int32))
        shares.append(1.0 / row_sums(jnp.where(is_far, 0.0, jnp.exp(left - top)), keepdims=True))
        left = jnp.where(number == best, -jnp.inf, left)
    return jnp.concatenate(experts, axis=-1), jnp.concatenate(shares, axis=-1) * router.scale


def _in_best_groups(router: Router, ranks: jax.Array) -> jax.Array:
    """Whether each expert `[T, E]` is in one of the groups whose best experts have the highest sums."""
    num_tokens, num_experts = ranks.shape
    by_group = ranks.reshape(num_tokens, router.num_groups, -1)
    sums = jnp.sum(jax.lax.top_k(by_group, router.group_best)[0], axis=-1)
    _, best = jax.lax.top_k(sums, router.top_groups)
    is_best = jnp.any(best[:, :, None] == jnp.arange(router.num_groups), axis=1)
    return jnp.repeat(is_best, num_experts // router.num_groups, axis=1)
