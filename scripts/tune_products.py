"""Measure block sizes of the products that are not attention's, on this machine's GPU, many of them in little time.

    python scripts/tune_products.py --json sizes.json                        # all products, for 150 s
    python scripts/tune_products.py --json sizes.json --match int4 --budget-s 60

Processes compile side by side, and take turns to measure. A candidate's result is compared with that of the table's
sizes, which the ladder of `gpu_report.py` has checked; a wrong one is left out. Prints for each product its sizes of
the table and the fastest ones; the file gets all. Nothing is written into a table: sizes that serve several products
are chosen by hand. Candidates are tried in a fixed order that spreads over the products, so that an early end leaves
each with some.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import itertools
import multiprocessing
import os
import queue
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from bench.kernels.inputs import layers_beyond_cache
from bench.kernels.measure import first_line
from bench.kernels.runners import JaxRunner, Prepared, time_alone
from bench.output import command_parser, write_json
from bench.processes import num_cores

from pallas_kernels import (
    GatedUnit,
    Groups,
    ScaledMatrix,
    float8_product,
    float8_rows,
    gated_packed_product,
    gated_product,
    group_by_expert,
    grouped_float8_product,
    grouped_packed_product,
    grouped_product,
    packed,
    quantized_product,
    tuning,
)
from pallas_kernels.packed import PackedMatrix
from pallas_kernels.selftest.weights import packed_weights

Sizes = Mapping[str, int]
Layers = list[tuple[Any, ...]]  # the arrays of each layer
PACKED_EXPERTS = ("gated_packed_product", "grouped_packed_product")
MOST_SHARED_KIB = 224  # of a multiprocessor of a Hopper
MOST_DIFFERENCE, COMPARED_ROWS = 2e-2, 256
EXPERT_LAYERS = 2  # that have weights of their own; further ones choose others of these experts
MOST_JOBS, GPU_SHARE = 12, 0.9  # all products' arrays take a process some 6 GB, and as much again while they are made
SHUFFLE = 7  # coprime to most counts: neighbours in a grid are far from each other in time


@dataclasses.dataclass(frozen=True)
class Product:
    """One product of Qwen3-30B-A3B's experts or of Qwen3-8B's matrices.

    Attributes:
      op: by which the table knows it.
      rows: T.
      outputs, inputs: of its weights.
      dtype, group: of its weights; 0: no scales.
      in_parts: sums may have parts, as the layers' next kernels take them.
      backend: of the op.
    """

    op: str
    rows: int
    outputs: int
    inputs: int
    dtype: str
    group: int = 0
    in_parts: bool = False
    backend: str = "triton"

    @property
    def name(self) -> str:
        """Unique."""
        of_xla = "" if self.backend == "triton" else f" by {self.backend}"
        return f"{self.op}{of_xla}, {self.rows} rows, {self.outputs} x {self.inputs} {self.dtype}"


EXPERTS, CHOICES = 128, 8
GATE_UP, DOWN = (24_576, 4096), (4096, 12_288)  # of Qwen3-8B
ROWS = (1, 32, 64, 128, 256, 4096)
PRODUCTS = (
    *(Product(*each, "bfloat16") for rows in (32, 256, 4096)
      for each in (("gated_product", rows, 1536, 2048), ("grouped_product", rows, 2048, 768))),
    *(Product("grouped_float8_product", rows, *shape, "float8_e4m3fn", 128)
      for rows in (1, 32, 256, 4096) for shape in ((1536, 2048), (2048, 768))),
    *(Product(*each, *weights) for rows in (1, 32, 256, 4096) for weights in (("int4", 128), ("mxfp4", 32))
      for each in (("gated_packed_product", rows, 1536, 2048), ("grouped_packed_product", rows, 2048, 768))),
    *(Product("product", rows, *shape, "bfloat16", backend="xla") for shape in (GATE_UP, DOWN) for rows in ROWS),
    *(Product("quantized_product", rows, *GATE_UP, "int4", 128, backend="xla") for rows in (128, 256, 512)),
    *(Product("float8_product", rows, *GATE_UP, "float8_e4m3fn", 128) for rows in ROWS),
    *(Product("float8_product", rows, *DOWN, "float8_e4m3fn", 128, in_parts=True) for rows in (1, 32, 256)),
    *(Product("float8_product", rows, *shape, "float8_e4m3fn", 128, backend="mosaic_gpu")
      for rows in (256, 512, 4096) for shape in (GATE_UP, DOWN)),
    *(Product("grouped_float8_product", rows, *shape, "float8_e4m3fn", 128, backend="mosaic_gpu")
      for rows in (2048, 4096) for shape in ((1536, 2048), (2048, 768))),
    *(Product(*each, "bfloat16", backend="mosaic_gpu") for rows in (2048, 4096)
      for each in (("gated_product", rows, 1536, 2048), ("grouped_product", rows, 2048, 768))),
    *(Product("quantized_product", rows, *GATE_UP, "int4", 128) for rows in ROWS if rows < 512),
    *(Product("quantized_product", rows, *DOWN, "int4", 128, in_parts=True) for rows in (1, 32)),
    *(Product("quantized_product", rows, *GATE_UP, "float8_e4m3fn", 128) for rows in (1, 32, 64)),
)  # fmt: skip


def candidates(product: Product) -> list[Sizes]:
    """Sizes whose tiles fit a multiprocessor's shared memory, without the table's own; none of others than Triton's."""
    grid: dict[str, Sequence[int]]
    if product.backend != "triton":
        return []
    if product.op in ("grouped_product", "gated_product"):
        few = product.rows * CHOICES // EXPERTS <= 16
        grid = {
            "tile_outputs": (32, 64, 128) if few else (64, 128, 256),
            "tile_bytes": (128, 256, 512) if few else (64, 128, 256),
        }
        rows = 16 if few else 128
    elif product.op == "grouped_float8_product":
        rows = 16 if product.rows * CHOICES // EXPERTS <= 16 else 128
        grid = {"tile_outputs": (64, 128)}
    elif product.op in PACKED_EXPERTS:
        rows = 16 if product.rows * CHOICES // EXPERTS <= 16 else 128
        least = 128 if product.op == "gated_packed_product" else 64
        grid = {"tile_outputs": (least, 2 * least), "tile_inputs": (64, 128)}
    elif product.op == "quantized_product":
        rows = min(128, max(16, product.rows))
        sides = (16, 32) if rows <= 16 else (128, 256) if product.rows >= 256 else (rows,)
        grid = {"tile_rows": sides, "tile_outputs": (64, 128), "tile_inputs": (64, 128)}
    else:
        rows = min(128, max(16, product.rows))
        grid = {"tile_rows": (rows,) if rows < 128 else (64, 128, 256), "tile_outputs": (64, 128)}
    grid |= {"num_warps": (4, 8), "num_stages": (3, 4, 5, 6, 8) if rows < 128 else (2, 3, 4, 5)}
    found = [dict(zip(grid, sizes, strict=True)) for sizes in itertools.product(*grid.values())]
    return [sizes for sizes in found if _shared_kib(product, sizes, rows) <= MOST_SHARED_KIB]


def _shared_kib(product: Product, sizes: Sizes, rows: int) -> float:
    rows, outputs = sizes.get("tile_rows", rows), sizes["tile_outputs"]
    stage: float
    match product.op:
        case "float8_product" | "grouped_float8_product":
            stage = (rows + outputs) * 128
        case "quantized_product" | "grouped_packed_product" | "gated_packed_product":
            is_packed = product.dtype in ("int4", "mxfp4")
            stage = sizes["tile_inputs"] * (2 * rows + outputs * (0.5 if is_packed else 1))
        case _:
            stage = sizes["tile_bytes"] * (rows + outputs)
    return stage * sizes["num_stages"] / 1024


def main() -> None:
    """Gives candidates to processes until time is up."""
    parser = command_parser(__doc__)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="gets every time, again while it runs")
    parser.add_argument("--match", default="", metavar="REGEX", help="only products in whose names it is found")
    parser.add_argument("--budget-s", type=float, default=150, help="for everything (150)")
    parser.add_argument(
        "--jobs", type=int, default=min(MOST_JOBS, max(1, num_cores() - 2)), help="processes (cores less 2)"
    )
    options = parser.parse_args()
    deadline = time.time() + options.budget_s
    products = [product for product in PRODUCTS if re.search(options.match, product.name)]
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{GPU_SHARE / options.jobs:.3f}")
    context = multiprocessing.get_context("spawn")
    tasks, found = context.Queue(), context.Queue()
    for task in spread(products):
        tasks.put(task)
    with tempfile.NamedTemporaryFile() as lock:
        workers = [
            context.Process(target=work, args=(tasks, found, lock.name, deadline), daemon=True)
            for _ in range(options.jobs)
        ]
        for worker in workers:
            worker.start()
        rows: list[dict[str, Any]] = []
        while time.time() < deadline and any(worker.is_alive() for worker in workers):
            with contextlib.suppress(queue.Empty):
                rows.append(found.get(timeout=1))
                if len(rows) % 20 == 0:
                    write_json(options.json, {"rows": rows})
        for worker in workers:
            worker.kill()
    write_json(options.json, {"jax": jax.__version__, "rows": rows})
    for product in products:
        mine = [row for row in rows if row["product"] == product.name and row["us"]]
        print(f"{product.name}: {sum(row['product'] == product.name for row in rows)} tried")
        usual = [row for row in mine if not row["sizes"]]
        for row in [*usual[:1], *sorted(mine, key=lambda row: row["us"])[:5]]:
            print(f"    {row['us']:9.1f} us  {row['sizes'] or 'as the table has it'}")


def spread(products: Sequence[Product]) -> Iterator[tuple[int, Sizes]]:
    """Yields products, by their places, with sizes: the table's first, then candidates of each in turn."""
    yield from ((PRODUCTS.index(product), {}) for product in products)
    lists = []
    for product in products:
        all_ = candidates(product)
        step = SHUFFLE if len(all_) % SHUFFLE else SHUFFLE + 2
        lists.append([all_[i * step % len(all_)] for i in range(len(all_))])
    for several in itertools.zip_longest(*lists):
        yield from ((PRODUCTS.index(p), sizes) for p, sizes in zip(products, several, strict=True) if sizes)


def work(tasks: Any, found: Any, lock_file: str, deadline: float) -> None:
    """Measures what `tasks` holds until nothing is left."""
    made: dict[int, tuple[Callable[..., jax.Array], Layers, np.ndarray]] = {}
    with Path(lock_file).open() as lock:
        while time.time() < deadline:
            try:
                index, sizes = tasks.get(timeout=1)
            except queue.Empty:
                return
            product = PRODUCTS[index]
            told: dict[str, Any] = {"product": product.name, "sizes": sizes, "us": None}
            try:
                if index not in made:
                    call, own = arrays(product)
                    usual = jax.jit(call).lower(*own[0]).compile()
                    with _alone(lock):
                        made[index] = call, own, _whole(product, usual(*own[0]))
                call, own, right = made[index]
                told |= measured(product, sizes, call, own, right, lock)
            except Exception as error:  # sizes that a compiler refuses
                told["note"] = first_line(error)
            found.put(told)


def measured(
    product: Product,
    sizes: Sizes,
    call: Callable[..., jax.Array],
    own: Layers,
    right: np.ndarray,
    lock: TextIO,
) -> dict[str, Any]:
    """Microseconds of a call with these sizes, if its result is right."""
    with tuning.override(product.op, "triton", sizes):
        runner = JaxRunner(Prepared.of(call, own))
    assert runner.program is not None  # compiled while others measure
    told = {"compile_s": round(runner.compile_s, 2)}
    with _alone(lock):
        out = _whole(product, runner.check())
        difference = float(np.linalg.norm(out - right) / np.linalg.norm(right))
        if not difference < MOST_DIFFERENCE:
            return {**told, "note": f"differs by {difference:.2g}"}
        timing = time_alone(runner, repeats=5, target_s=0.015)
    return {**told, "us": round(timing.seconds * 1e6, 2), "least_us": round(timing.fastest * 1e6, 2)}


@contextlib.contextmanager
def _alone(lock: TextIO) -> Iterator[None]:
    """No other process runs a product on the GPU meanwhile."""
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)


def _whole(product: Product, out: jax.Array) -> np.ndarray:
    """The result of all parts, of the first rows."""
    wide = np.asarray(out[..., :COMPARED_ROWS, :], np.float32)
    return wide.sum(axis=0) if product.in_parts and wide.ndim == 3 else wide


def arrays(product: Product) -> tuple[Callable[..., jax.Array], Layers]:
    """The product as a function of a layer's arrays, and those of so many layers that no cache holds their weights."""
    keys = jax.random.split(jax.random.key(0), 2)
    if product.op in PACKED_EXPERTS:
        return _packed_experts(product, keys)
    if product.group and product.op != "grouped_float8_product":
        return _scaled(product, keys)
    if product.op == "product":
        x = jax.random.normal(keys[0], (product.rows, product.inputs), jnp.bfloat16)
        return functools.partial(jnp.einsum, "td,nd->tn"), [(x, each) for each in _matrices(product)]
    of_tokens = product.op == "gated_product" or product.outputs < product.inputs  # else it is the second product
    x, choices = _chosen(product, keys, of_tokens=of_tokens)
    shape = EXPERTS, product.outputs, product.inputs
    weights_of = [_weights(layer, shape, product.dtype) for layer in range(EXPERT_LAYERS)]
    in_float8 = product.op == "grouped_float8_product"
    scale = jnp.ones((*shape[:2], shape[2] // product.group), jnp.float32) if in_float8 else None
    rounded = float8_rows(x) if in_float8 else None

    def call(x: jax.Array, groups: Groups, weights: jax.Array) -> jax.Array:
        if rounded is not None and scale is not None:
            matrices = ScaledMatrix(weights, scale, None, product.group, product.group)
            return grouped_float8_product(rounded, groups, matrices, of_tokens=of_tokens, backend=product.backend)
        if product.op == "gated_product":
            return gated_product(x, groups, weights, "silu", of_tokens=True, backend=product.backend)
        return grouped_product(x, groups, weights, backend=product.backend)

    return call, [(x, groups, weights_of[layer % EXPERT_LAYERS]) for layer, groups in enumerate(choices)]


def _chosen(product: Product, keys: jax.Array, *, of_tokens: bool) -> tuple[jax.Array, list[Groups]]:
    """Rows of tokens or places, and which experts take them in each layer."""
    num_rows = product.rows * (1 if of_tokens else CHOICES)
    x = jax.random.normal(keys[0], (num_rows, product.inputs), jnp.bfloat16)

    def chosen_by(layer: int) -> jax.Array:
        return jax.lax.top_k(jax.random.normal(jax.random.fold_in(keys[1], layer), (product.rows, EXPERTS)), CHOICES)[1]

    num_layers = layers_beyond_cache(len(np.unique(np.asarray(chosen_by(0)))) * _num_bytes(product))
    grouped = jax.jit(group_by_expert, static_argnums=1)
    return x, [grouped(chosen_by(layer), EXPERTS) for layer in range(num_layers)]


def _num_bytes(product: Product) -> int:
    """Of one matrix."""
    bits = 4 if product.dtype == "mxfp4" else jax.dtypes.itemsize_bits(product.dtype)
    return product.outputs * product.inputs * bits // 8


def _matrices(product: Product) -> list[jax.Array]:
    """Of all layers of a product that isn't experts'."""
    shape = product.outputs, product.inputs
    return [_weights(layer, shape, product.dtype) for layer in range(layers_beyond_cache(_num_bytes(product)))]


def _packed_experts(product: Product, keys: jax.Array) -> tuple[Callable[..., jax.Array], Layers]:
    is_gated = product.op == "gated_packed_product"
    packing = packed.FRAGMENTS if product.dtype == "int4" else packed.MXFP4_FRAGMENTS
    x, choices = _chosen(product, keys, of_tokens=is_gated)
    shape, has_zeros = (EXPERTS, product.outputs, product.inputs), product.dtype == "int4"
    own = [packed_weights(packing, shape, product.group, has_zeros, seed=layer) for layer in range(EXPERT_LAYERS)]

    def call(x: jax.Array, groups: Groups, weights: PackedMatrix) -> jax.Array:
        if is_gated:
            return gated_packed_product(x, groups, weights, GatedUnit("silu"), of_tokens=True)
        return grouped_packed_product(x, groups, weights)

    return call, [(x, groups, own[layer % EXPERT_LAYERS]) for layer, groups in enumerate(choices)]


def _scaled(product: Product, keys: jax.Array) -> tuple[Callable[..., jax.Array], Layers]:
    x = jax.random.normal(keys[0], (product.rows, product.inputs), jnp.bfloat16)
    groups = product.outputs, product.inputs // product.group
    scale = jax.random.uniform(keys[1], groups, jnp.float32, 0.5, 1.5)
    zero, blocks = None, 1
    if product.op == "float8_product":
        blocks = product.group
        scale = jnp.repeat(scale[::blocks], blocks, axis=0)
    if product.dtype == "int4":
        scale = packed.pack_groups(packed.FRAGMENTS, scale)
        zero = jnp.ones_like(scale)
    rows = float8_rows(x) if product.op == "float8_product" else None
    options: dict[str, Any] = {"in_parts": product.in_parts, "backend": product.backend}

    def call(x: jax.Array, numbers: jax.Array) -> jax.Array:
        if product.dtype == "int4":
            kept = PackedMatrix(numbers, scale, zero, product.group, packed.FRAGMENTS)
            return quantized_product(x, kept, **options)
        weights = ScaledMatrix(numbers, scale, zero, product.group, blocks)
        if rows is not None:
            return float8_product(rows, weights, **options)
        return quantized_product(x, weights, **options)

    return call, [(x, each) for each in _matrices(product)]


@functools.cache
def _weights(layer: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Random numbers, which products of several numbers of rows share."""
    key = jax.random.key(1 + layer)
    if dtype == "int4":
        return packed.pack_numbers(packed.FRAGMENTS, jax.random.randint(key, shape, -8, 8, jnp.int8))
    return jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)


if __name__ == "__main__":
    main()
