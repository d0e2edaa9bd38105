"""Decode steps with LoRA adapters beside the same steps without any, in turns on one engine.

    python scripts/bench lora --shape mid --adapters 8 --rank 16 --rows 8 32

A step decodes so many sequences behind `--context` tokens. With adapters, sequence i has adapter i modulo one more than
there are, so that some have none. Weights and adapters are random. Without adapters the engine runs the programs of a
server that has none. Prints medians in milliseconds from submission to tokens on an idle device, and how many times as
long a step with adapters takes: the median over the rounds, least and most. Flags of the engine may follow.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench.models import SHAPES, write_config
from bench.output import figure_parser, write_figures
from bench.steps import GREEDY, Seq, first_run, page_tables, unsent_table
from jaxsgl.batch.build import BatchBuilder
from jaxsgl.batch.engine_api import PlaceAdapter
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.batch.sampling import AdapterRows, SamplingRows
from jaxsgl.cache.pages import pages_for
from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.features import LoraConfig
from jaxsgl.config.flags import add_flags, from_flags
from jaxsgl.engine.adapters import BLOCK, StagedAdapter
from jaxsgl.engine.engine import Engine

HEAD = f"{'rows':>5}{'without ms':>12}{'with ms':>10}{'times':>8}{'least':>7}{'most':>7}"


def main(arguments: list[str]) -> int:
    """Measures and prints a line for each number of rows."""
    parser = figure_parser(__doc__, __name__)
    parser.add_argument(
        "--shape", choices=SHAPES, help="random weights of this shape; else --model, a flag of the engine"
    )
    parser.add_argument("--adapters", type=int, default=8, help="adapters of a step (default 8)")
    parser.add_argument("--rank", type=int, default=16, help="of each adapter (default 16)")
    parser.add_argument("--modules", default="all", help="that they change, as q_proj,v_proj (default all)")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32], help="sequences of a step (default 8 32)")
    parser.add_argument("--context", type=int, default=256, help="cached tokens of each (default 256)")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each step (default 15)")
    options, flags = parser.parse_known_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-lora-") as folder:
        if options.shape:
            flags += ["--model", str(write_config(options.shape, Path(folder) / "model")), "--load-format", "dummy"]
        engine = Engine(engine_config(flags, options), progress=False)
    columns = place(engine, options.adapters, options.rank)
    rows = []
    print(HEAD)
    for num_rows in options.rows:
        steps = [built(engine, num_rows, options, of) for of in (None, columns)]
        rows.append(measured(engine, num_rows, steps, options.rounds))
        print(line(rows[-1]), flush=True)
    engine.close()
    write_figures(options.json, jax=jax.__version__, rows=rows)
    return 0


def engine_config(flags: list[str], options: argparse.Namespace) -> EngineConfig:
    """The config of the flags, with programs and a pool for these steps only."""
    parser = argparse.ArgumentParser()
    add_flags(parser, EngineConfig)
    config = from_flags(EngineConfig, parser.parse_args(flags))
    most, pages = max(options.rows), pages_for(options.context + 1, 16)
    return dataclasses.replace(
        config,
        lora=LoraConfig(
            enable_lora=True,
            max_loras_per_batch=options.adapters,
            max_lora_rank=options.rank,
            lora_target_modules=tuple(options.modules.split(",")),
        ),
        page_size=16,
        max_running_requests=most,
        decode_buckets=tuple(options.rows),
        extend_buckets=(16,),
        chunked_prefill_size=16,
        context_length=options.context + 16,
        max_total_tokens=(pages * most + 1) * 16,
    )


def place(engine: Engine, num_adapters: int, rank: int) -> AdapterRows:
    """Brings random adapters to the device; says where they are."""
    assert engine.adapters is not None
    columns = AdapterRows(engine.capacity.num_rows, num_adapters, engine.capacity.adapter_columns)
    rng = np.random.default_rng(0)
    for number in range(1, num_adapters + 1):
        blocks = [
            [0.02 * rng.standard_normal(leaf.shape).astype(leaf.dtype) for leaf in engine.adapters.abstract_block()]
            for _ in range(-(-rank // BLOCK))
        ]
        engine.adapters.keep(number, StagedAdapter("", rank, str(number), tuple(blocks)))
        engine.apply(PlaceAdapter(number, columns.place(number, rank)), 0)
    return columns


def built(engine: Engine, num_rows: int, options: argparse.Namespace, columns: AdapterRows | None) -> StepInputs:
    """A decode step; without `columns` no sequence has an adapter."""
    capacity = engine.capacity
    sampling = SamplingRows(capacity.num_rows)
    for row in range(num_rows):
        sampling.set(row, GREEDY, seed=row)
        if columns is not None:
            columns.set_row(row, (row + 1) % (options.adapters + 1))
    seqs = [Seq(1, options.context)] * num_rows
    table = unsent_table(page_tables(capacity, seqs, np.random.default_rng(0)))
    builder = BatchBuilder(engine.buckets, table, sampling, capacity.page_size, columns)
    rows = np.arange(num_rows, dtype=np.int32)
    return builder.decode(rows, np.full(num_rows, options.context, np.int32))


def measured(engine: Engine, num_rows: int, steps: list[StepInputs], rounds: int) -> dict[str, Any]:
    """The figures of a step without adapters and of one with them."""
    steps = [first_run(engine, inputs) for inputs in steps]
    times: list[list[float]] = []
    for _ in range(rounds):
        turn = []
        for inputs in steps:
            start = time.perf_counter()
            engine.submit(inputs).tokens()
            turn.append(1e3 * (time.perf_counter() - start))
        times.append(turn)
    ratios = [with_ms / without_ms for without_ms, with_ms in times]
    return {
        "rows": num_rows,
        "without_ms": statistics.median(turn[0] for turn in times),
        "with_ms": statistics.median(turn[1] for turn in times),
        "times": {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)},
    }


def line(of: dict[str, Any]) -> str:
    """A row as text."""
    times = of["times"]
    return (
        f"{of['rows']:5}{of['without_ms']:12.2f}{of['with_ms']:10.2f}"
        f"{times['median']:8.2f}{times['least']:7.2f}{times['most']:7.2f}"
    )
