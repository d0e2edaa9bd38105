"""The parts of Pallas Mosaic GPU that differ between JAX versions, or that an interpreter can't run as the chip does.

Owns the call of `plgpu.kernel`, the few operations that an interpreter on a CPU can't run as the chip does, and what
the chip's copies and products can't take. Never knows attention. Called by the kernels of this package; everything else
they take from `plgpu`, which is the same on JAX 0.10, 0.11 and 0.12.

Where the versions differ: the names of `plgpu.kernel`'s arguments, thread semantics (0.10 lowers per lane by default,
0.11 and later per warpgroup; every kernel here is written for, and lowered per, lane), and where the interpreter's
parameters are found. Interpreters lack, on 0.10, `wgmma` with a transposed operand and `layout_cast`, and on all
versions `wgmma` with an operand in registers; there the operations below compute the same on values. Copies, barriers,
loads, stores and loops are interpreted. JAX 0.10 imports the package absl-py here without requiring it.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu_compiler import choose_mosaic_ptxas, refuse_for_hopper
from pallas_kernels.jax_internals import gpu_interpreter
from pallas_kernels.paged_kv import PagedKv, refuse_mixed_dtypes
from pallas_kernels.target import target_device

_Between = TypeVar("_Between")

# Bytes in a row of a tile that `wgmma` reads from shared memory; TMA permutes the tile's 16-byte pieces to match.
SWIZZLE_BYTES = 128
# Rows of `wgmma`'s left operand and result.
WGMMA_ROWS = 64
# The fewest rows that a copy between global and swizzled shared memory moves: the height of a swizzled tile.
COPY_ROWS = 8


def refuse_device() -> str | None:
    """Why kernels with TMA and `wgmma` can't run on the target device, or None when they can."""
    device = target_device()
    if device.platform == "gpu" and not device.is_hopper:
        return f"it needs TMA and wgmma, which Hopper GPUs have (H100, H200) and {device.kind} lacks"
    return refuse_for_hopper() if device.platform == "gpu" and device.is_here else None


def refuse_operands(q: jax.Array, kv: PagedKv) -> str | None:
    """Why TMA and `wgmma` can't work on q `[T, N, H]` and the cache for the target device, or None when they can."""
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"q has dtype {q.dtype}; wgmma takes bfloat16 and float16"
    if kv.page_size % COPY_ROWS:
        return f"page_size is {kv.page_size}; TMA copies {COPY_ROWS} tokens at a time, so it takes multiples of that"
    return refuse_device() or refuse_mixed_dtypes(q, kv)


def gpu_kernel(
    body: Callable[..., None],
    *,
    name: str,
    out_type: Any,
    scratch_types: Mapping[str, Any],
    grid: tuple[int, ...],
    grid_names: tuple[str, ...],
    interpret: bool,
    num_warpgroups: int | None = None,
    warpgroup_name: str | None = None,
    **compiler_params: Any,
) -> Callable[..., Any]:
    """`plgpu.kernel`: body(*input refs, *output refs, **scratch refs) over the grid, each warpgroup its own thread.

    May put a right `ptxas` first in PATH: kernels are traced, and then compiled, where no engine has prepared for it.
    """
    if not interpret:
        choose_mosaic_ptxas()
    # JAX 0.10.0 has the old names only, 0.11 the new ones only.
    names = ("out_type", "scratch_types")
    if "out_type" not in inspect.signature(plgpu.kernel).parameters:
        names = ("out_shape", "scratch_shapes")
    kernel: Callable[..., Any] = plgpu.kernel(
        body,
        **dict(zip(names, (out_type, dict(scratch_types)), strict=True)),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, **compiler_params),
        grid=grid,
        grid_names=grid_names,
        num_threads=num_warpgroups,
        thread_name=warpgroup_name,
        kernel_name=name,
        interpret=_interpret_params() if interpret else None,
    )
    return kernel


def _interpret_params() -> Any:
    """The interpreter looks for races too: a copy into memory that is still read, a read without a wait."""
    if hasattr(plgpu, "InterpretGPUParams"):
        return plgpu.InterpretGPUParams(detect_races=True)
    return gpu_interpreter(detect_races=True)


def operand(shape: tuple[int, ...], dtype: Any, row_bytes: int = SWIZZLE_BYTES) -> Any:
    """Shared memory for operands of `wgmma`, swizzled; row_bytes 128, 64 or 32 divide its last axis."""
    itemsize = jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, row_bytes // itemsize)), plgpu.SwizzleTransform(row_bytes))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def matmul(
    a: Any,
    b: Any,
    acc: jax.Array | None = None,
    *,
    transpose_b: bool = False,
    meanwhile: Callable[[], None] | None = None,
    interpret: bool,
) -> jax.Array:
    """acc + a @ b by `wgmma`, float32 in layout WGMMA; done, and its operands free for reuse by this warp, on return.

    a: a ref made by `operand`, or an array `[64, k]` in layout WGMMA. b: a ref made by `operand`, `[k, n]`, or `[n, k]`
    with transpose_b. acc `[rows, n]`, by default zero. meanwhile: called between the start and the wait.
    """
    shape = (a.shape[0], b.shape[0] if transpose_b else b.shape[1])
    if interpret:
        if meanwhile is not None:
            meanwhile()
        left = a if isinstance(a, jax.Array) else a[...]
        right = b[...].T if transpose_b else b[...]
        plgpu.commit_smem()  # as after the wait for `wgmma`: the operands may be overwritten by a copy
        product = jnp.dot(left.astype(jnp.float32), right.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        return product if acc is None else acc + product

    def accumulate(acc_ref: Any) -> None:
        plgpu.wgmma(acc_ref, a, b.transpose((1, 0)) if transpose_b else b)
        if meanwhile is not None:
            meanwhile()

    if acc is None:

        def from_zero(acc_ref: Any) -> Any:
            accumulate(acc_ref)
            return acc_ref[...]

        return pl.run_scoped(from_zero, plgpu.ACC(shape, jnp.float32))  # type: ignore[attr-defined]
    return pl.run_state(accumulate)(plgpu.ACC.init(acc))  # type: ignore[attr-defined]


def overlapped(
    first: tuple[Any, Any],
    second: tuple[jax.Array, Any, jax.Array],
    *,
    started: Callable[[], None],
    between: Callable[[jax.Array], _Between],
    interpret: bool,
) -> tuple[_Between, jax.Array]:
    """Both products by `wgmma`, started together: between(a @ b.T) is computed while acc + weights @ v may still run.

    first: a and b, refs made by `operand`, `[64, k]` and `[n, k]`. second: weights `[64, m]` in registers, v, a ref
    `[m, h]`, and acc `[64, h]`, float32. started: called as soon as both are on their way. Returns what `between`
    returns, and the second product; each product is done, and its operands are free for reuse by this warp, when its
    result is seen. Memory that `between` gives back must not be v.
    """
    (a, b), (weights, v, acc) = first, second
    if interpret:
        scores = matmul(a, b, transpose_b=True, meanwhile=started, interpret=True)
        result = between(scores)
        return result, matmul(weights, v, acc, interpret=True)

    def run(scores_ref: Any, acc_ref: Any) -> tuple[_Between, jax.Array]:
        acc_ref[...] = acc
        plgpu.wgmma(scores_ref, a, b.transpose((1, 0)))
        plgpu.wgmma(acc_ref, weights, v)
        started()
        result = between(plgpu.wgmma_accumulator_load(scores_ref, wait_n=1))
        return result, acc_ref[...]

    shapes = ((a.shape[0], b.shape[0]), (acc.shape[0], acc.shape[1]))
    result, out = pl.run_scoped(run, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))  # type: ignore[attr-defined]
    return result, out


def in_layout(x: jax.Array, layout: Any, *, interpret: bool) -> jax.Array:
    """x in the given register layout; the interpreter knows none."""
    return x if interpret else plgpu.layout_cast(x, layout)


def scalar_of(number: jax.Array) -> jax.Array:
    """The number as each branch of a `lax.cond` has to return it: JAX 0.10.0 tells constants from computed numbers."""
    return number + jnp.int32(0)


def iota(shape: tuple[int, ...], axis: int, layout: Any, *, interpret: bool) -> jax.Array:
    """int32 numbers along one axis, in the given register layout."""
    return in_layout(jax.lax.broadcasted_iota(jnp.int32, shape, axis), layout, interpret=interpret)


def load_vector(ref: Any, layout: Any, *, interpret: bool) -> jax.Array:
    """The numbers of a ref with one axis, of global or shared memory, in the given register layout."""
    if interpret:
        loaded: jax.Array = ref[...]
        return loaded
    old_form = inspect.signature(plgpu.load).parameters.get("idx")  # JAX 0.11 warns of it, 0.12 has none
    index = ((),) if old_form is not None and old_form.default is inspect.Parameter.empty else ()
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def on_one_warp(run: Callable[[], None]) -> None:
    """Run on the first warp of the warpgroup; the others wait until it is done."""
    plgpu.warp_map(lambda warp: pl.when(warp == 0)(run))


def store_plain(ref: Any, value: jax.Array) -> None:
    """Store to shared memory in plain rows, unswizzled: slower, since rows share banks, but sliceable."""
    if hasattr(plgpu, "store"):  # JAX 0.12, which refuses `ref[...] = value` where banks conflict
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
