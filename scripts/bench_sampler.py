"""What sampling costs on this machine's device: all filters on, for a small and a large vocabulary.

python scripts/bench_sampler.py
"""

from __future__ import annotations

import argparse
import json
import timeit
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxsgl.engine import sampler

SHAPES = ((32, 1024), (8, 151_936))  # rows, vocabulary
CALLS, REPEATS = 5, 7


def milliseconds(rows: int, vocab_size: int) -> float:
    """Time of one call, the fastest of several repeats."""
    logits = 3 * jax.random.normal(jax.random.key(0), (rows, vocab_size))
    ones = jnp.ones(rows, jnp.float32)
    filters = {"temperature": ones, "top_p": 0.9 * ones, "min_p": 0.01 * ones, "top_k": jnp.full(rows, 50)}
    draw = jax.jit(sampler.sample)

    def call() -> None:
        draw(logits, seeds=jnp.arange(rows), positions=jnp.arange(rows), **filters).block_until_ready()

    call()
    return 1e3 * min(timeit.repeat(call, number=CALLS, repeat=REPEATS)) / CALLS


def main() -> None:
    """Measures every shape and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    figures = {f"{rows} x {vocab_size}": milliseconds(rows, vocab_size) for rows, vocab_size in SHAPES}
    for shape, time_ms in figures.items():
        print(f"{shape:>12}  {time_ms:8.2f} ms")
    if args.json:
        args.json.write_text(json.dumps({"platform": jax.default_backend(), "ms": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
