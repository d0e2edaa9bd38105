"""A layer's experts on this machine: each token through its own, against all tokens through all experts.

    python scripts/bench experts
    python scripts/bench experts --tokens 1 64 --experts 64 --top 8 --hidden 1024 --ffn 512 --json experts.json

"grouped" is `pallas_kernels.grouped_product` twice with SwiGLU between, with sorting and summing. "dense" multiplies
all tokens with all experts and weighs the results: in one einsum each, as XLA does it, and with the products of a dense
layer (`models.precision.product`), expert by expert. Every contender's output is compared with the float64 one first.
The contenders of one number of tokens take turns in one process, each over two layers' weights, and the fastest repeat
counts. How many times as fast "grouped" is, is told by the clock and in CPU time, which other processes change less.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.runners import JaxRunner, Prepared, time_in_turns
from bench.output import figure_parser, write_figures
from jaxsgl.models.precision import product
from pallas_kernels import add_choices, group_by_expert, grouped_product

LAYERS = 2
MOST_ERROR = {"float32": 1e-4, "bfloat16": 2e-2}  # of the output's norm
HEAD = f"{'tokens':>6}  {'contender':<28}{'ms':>9}{'times as fast':>15}{'CPU ms':>9}{'times':>7}"
# x [T, D], experts [T, k], shares [T, k], gate_up [E, 2 F, D], down [E, D, F] -> [T, D]
Layer = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def main(arguments: list[str]) -> None:
    """Measures and prints line by line."""
    parser = figure_parser(__doc__, __name__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top", type=int, default=8, help="experts of a token")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--ffn", type=int, default=512, help="of each expert")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(MOST_ERROR), default=list(MOST_ERROR), help="of weights")
    parser.add_argument("--repeats", type=int, default=10, help="of each, the fastest counts (default 10)")
    options = parser.parse_args(arguments)
    rows = []
    print(HEAD)
    for num_tokens in options.tokens:
        sizes = options.experts, options.top, options.hidden, options.ffn
        for found in measure(num_tokens, *sizes, options.dtypes, options.repeats):
            rows.append(found)
            print(line(found), flush=True)
    write_figures(options.json, jax=jax.__version__, rows=rows)


def grouped(x: jax.Array, experts: jax.Array, shares: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """Each token through its experts."""
    groups = group_by_expert(experts, len(gate_up))
    hidden = grouped_product(x, groups, gate_up, of_tokens=True)
    return add_choices(grouped_product(swiglu(hidden), groups, down), groups, shares)


def dense(x: jax.Array, experts: jax.Array, shares: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """All tokens through all experts, as three einsums."""
    rows = x.astype(gate_up.dtype)
    hidden = jnp.einsum("td,efd->etf", rows, gate_up, preferred_element_type=jnp.float32)
    gated = swiglu(hidden).astype(down.dtype)
    y = jnp.einsum("etf,edf->etd", gated, down, preferred_element_type=jnp.float32)
    return jnp.einsum("etd,te->td", y, share_of_all(experts, shares, len(gate_up)))


def dense_by_expert(
    x: jax.Array, experts: jax.Array, shares: jax.Array, gate_up: jax.Array, down: jax.Array
) -> jax.Array:
    """All tokens through all experts, with the products of a dense layer."""
    share = share_of_all(experts, shares, len(gate_up))
    hidden = product(x, gate_up)  # [T, E, 2 F]
    y = (share[:, e, None] * product(swiglu(hidden[:, e]), down[e]) for e in range(len(down)))
    return functools.reduce(jnp.add, y)


def swiglu(hidden: jax.Array) -> jax.Array:
    """`[.., 2 F]` to `[.., F]`."""
    gate, up = jnp.split(hidden, 2, axis=-1)
    return jax.nn.silu(gate) * up


def share_of_all(experts: jax.Array, shares: jax.Array, num_experts: int) -> jax.Array:
    """The share `[T, E]` of each expert, mostly 0."""
    rows = jnp.arange(len(experts))[:, None]
    return jnp.zeros((len(experts), num_experts)).at[rows, experts].set(shares)


CONTENDERS: dict[str, Layer] = {"grouped": grouped, "dense": dense, "dense, by expert": dense_by_expert}


def measure(
    num_tokens: int, num_experts: int, top: int, hidden: int, ffn: int, dtypes: list[str], repeats: int
) -> list[dict[str, Any]]:
    """Times all contenders, in turns. Raises `ValueError` if one is wrong."""
    keys = jax.random.split(jax.random.key(num_tokens), 2 + 2 * LAYERS)
    x = jax.random.normal(keys[0], (num_tokens, hidden))
    logits = jax.random.normal(keys[1], (num_tokens, num_experts))
    shares, experts = jax.lax.top_k(jax.nn.softmax(logits), top)
    runners = {}
    for dtype in dtypes:
        weights = [
            (
                (jax.random.normal(keys[2 + 2 * layer], (num_experts, 2 * ffn, hidden)) / hidden**0.5).astype(dtype),
                (jax.random.normal(keys[3 + 2 * layer], (num_experts, hidden, ffn)) / ffn**0.5).astype(dtype),
            )
            for layer in range(LAYERS)
        ]
        own = [(x, experts, shares, *each) for each in weights]
        right = exact(*map(np.asarray, own[0]))
        for name, layer in CONTENDERS.items():
            runner = JaxRunner(Prepared.of(layer, own))
            error = np.linalg.norm(np.asarray(runner.check(), np.float64) - right) / np.linalg.norm(right)
            if not error < MOST_ERROR[dtype]:
                raise ValueError(f"{name} with {dtype} weights is off by {error:.1e} of the output's norm")
            runners[f"{name}, {dtype}"] = runner
    timings = time_in_turns(runners, repeats)
    return [
        {
            "tokens": num_tokens,
            "contender": name,
            "seconds": timing.seconds,
            "times_as_fast": timing.seconds / grouped_timing.seconds,
            "cpu_seconds": timing.cpu_seconds,
            "cpu_times": timing.cpu_seconds / grouped_timing.cpu_seconds,
        }
        for name, timing in timings.items()
        for grouped_timing in [timings[f"grouped, {name.split(', ')[-1]}"]]
    ]


def exact(x: Any, experts: Any, shares: Any, gate_up: Any, down: Any) -> np.ndarray:
    """The layer in float64, expert by expert."""
    out = np.zeros(x.shape)
    for expert in np.unique(experts):
        tokens, choice = np.nonzero(experts == expert)
        gate, up = np.split(x[tokens].astype(np.float64) @ gate_up[expert].astype(np.float64).T, 2, axis=-1)
        y = (gate / (1 + np.exp(-gate)) * up) @ down[expert].astype(np.float64).T
        np.add.at(out, tokens, shares[tokens, choice, None] * y)
    return out


def line(row: dict[str, Any]) -> str:
    """A row as text, as wide as the head; beside each time stands how many times as fast "grouped" is."""
    wall = f"{1e3 * row['seconds']:>9.3f}{row['times_as_fast']:>15.1f}"
    return f"{row['tokens']:>6}  {row['contender']:<28}{wall}{1e3 * row['cpu_seconds']:>9.3f}{row['cpu_times']:>7.1f}"
