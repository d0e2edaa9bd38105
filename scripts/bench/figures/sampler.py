"""Measure what sampling costs on this machine's device, for a small and a large vocabulary.

    python scripts/bench sampler

Without filters (temperature only), with all of them, and featured: all filters, penalties, bias, log-probabilities.
"""

from __future__ import annotations

import timeit
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.output import figure_parser, write_figures
from jaxsgl.batch.sampling import SamplingRows, pack_edits, row_setup
from jaxsgl.engine.step import featured_step, filtered_step, sample_step
from jaxsgl.engine.tables import neutral_tables, set_row
from jaxsgl.requests.request import SamplingParams

SHAPES = "32x1024,8x151936"
CALLS, REPEATS = 5, 7
PROGRAMS = {" unfiltered": sample_step, "": filtered_step, " featured": featured_step}


def milliseconds(rows: int, vocab_size: int, name: str) -> float:
    """Milliseconds of one call of the sampling program that follows a forward program; the fastest repeat counts."""
    logits = 3 * jax.random.normal(jax.random.key(0), (rows, vocab_size))
    numbers, sampling = np.arange(rows, dtype=np.int32), SamplingRows(rows)
    filters: dict[str, Any] = {} if name == " unfiltered" else {"top_k": 50, "top_p": 0.9, "min_p": 0.01}
    for row in range(rows):
        sampling.set(row, SamplingParams(temperature=1.0, **filters), seed=row)
    best = np.asarray(jnp.argmax(logits, axis=-1), np.int32)
    packed = jnp.asarray(np.stack([numbers, numbers, best, *sampling.bits(numbers)]))
    arguments: list[Any] = [logits, packed, jnp.zeros(rows + 1, jnp.int32)]
    program: Any = PROGRAMS[name]
    if program is featured_step:
        tables = jax.device_put(neutral_tables(rows, vocab_size))
        setup = row_setup(0, pack_edits(SamplingParams(presence_penalty=1.0), (), 0), np.ones(vocab_size, np.int32))
        arguments += [set_row(tables, jnp.asarray(setup)), jnp.arange(rows)]
    compiled = jax.jit(program).lower(*arguments).compile()

    def call() -> None:
        jax.block_until_ready(compiled(*arguments))

    call()
    return 1e3 * min(timeit.repeat(call, number=CALLS, repeat=REPEATS)) / CALLS


def main(arguments: list[str]) -> None:
    """Measures every shape and prints the times."""
    parser = figure_parser(__doc__, __name__)
    parser.add_argument("--shapes", default=SHAPES, help=f"rows x vocabulary, with commas between them ({SHAPES})")
    args = parser.parse_args(arguments)
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes.split(",")]
    figures = {
        f"{rows} x {vocab_size}{name}": milliseconds(rows, vocab_size, name)
        for rows, vocab_size in shapes
        for name in PROGRAMS
    }
    for shape, time_ms in figures.items():
        print(f"{shape:>24}  {time_ms:8.2f} ms")
    write_figures(args.json, platform=jax.default_backend(), ms=figures)
