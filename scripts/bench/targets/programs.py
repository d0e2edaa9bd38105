"""The programs to compile: every kernel on the grid of shapes, and whole engine steps, as shapes without arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from bench.processes import ROOT
from bench.targets.collectives import Wanted
from bench.targets.launch_report import Layers
from jaxsgl.batch.inputs import Bucket
from jaxsgl.cache.pages import pages_for
from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.start.sizing import choose_states
from jaxsgl.engine.state import DeviceState, abstract_kv
from jaxsgl.engine.step_programs import ProgramSpec
from jaxsgl.engine.tables import neutral_tables
from jaxsgl.models import ModelArch, abstract_model, arch_from_folder
from jaxsgl.models.layer_spec import DenseMlp
from jaxsgl.weights.sharding import param_sharding, replicated
from pallas_kernels import STORE_BACKENDS, KernelChoice, store_kv
from pallas_kernels.dispatch import ROTATE_AND_STORE_BACKENDS, STORE_AND_DECODE_BACKENDS
from pallas_kernels.specs import ArgSpec, GroupedSpec, ProductSpec, store_decoded, store_latents, store_rotated

BUNDLED_MODEL = ROOT / "jaxsgl/bundled_model"
NUM_LAYERS = 4  # of the small model
POOL_TOKENS = 131_072  # more than a v6e could move into its VMEM


@dataclasses.dataclass(frozen=True)
class Program:
    """A program to compile.

    Attributes:
      name: an identifier, and the compiler's name for the program.
      backend: backend of its kernels.
      trace: traces it; must be called inside `Target.traced_for`. An engine's takes `in_fixed_order`.
      cache: shape and dtype of one of its cache arrays, on one device.
      num_donated: number of cache arrays that it updates in place.
      donated_bytes: of these on one device, where they differ in size; 0: they have that of `cache`.
      states: shapes of a layer's other arrays, which it updates in place as well.
      on_matrix_units: whether its products must run on matrix units; float32 products stay exact, on other units.
      layers: of the model that a forward program of few layers stands for; None: the program is complete.
      page_table: shape of its page table, if it has one.
      steps: the engine's steps that run it, such as "qwen3-0.6b triton decode 256 greedy".
      facts: see `Served.facts`.
      weight_bytes: of the weights that a device must read, for all layers of the model.
      argument_bytes: of a device's part of parameters and state; None: not checked.
      wanted: what devices that share it must exchange; None on one device.
    """

    name: str
    backend: str
    trace: Callable[..., jax.stages.Traced]
    cache: jax.ShapeDtypeStruct
    num_donated: int
    on_matrix_units: bool
    layers: Layers | None = None
    page_table: tuple[int, int] | None = None
    steps: tuple[str, ...] = ()
    facts: dict[str, int] | None = None
    weight_bytes: int = 0
    argument_bytes: int | None = None
    wanted: Wanted | None = None
    states: tuple[tuple[int, ...], ...] = ()
    donated_bytes: int = 0

    @property
    def is_step(self) -> bool:
        """Whether it is one of the engine's programs for a step, which should be one command buffer."""
        return bool(self.steps)

    @property
    def has_kernels(self) -> bool:
        """Whether Pallas kernels are in it; programs that only sample have none."""
        return not self.is_step or self.layers is not None

    @property
    def cache_bytes(self) -> int:
        """Bytes of one cache array."""
        return int(self.cache.size * jnp.dtype(self.cache.dtype).itemsize)


_BACKENDS_OF_STORE: dict[Any, tuple[str, ...]] = {
    store_kv: STORE_BACKENDS,
    store_rotated: ROTATE_AND_STORE_BACKENDS,
    store_decoded: STORE_AND_DECODE_BACKENDS,
    store_latents: ("triton",),
}


def kernel_programs(spec: ArgSpec, backend: str, mesh: Mesh) -> Iterator[Program]:
    """Yields the ops on one spec, as far as the backend has them."""
    several = [(store_decoded, spec.store_and_decode_args(), spec.attention)] if spec.value_dim is None else []
    for op, args, options in (*spec.calls(), *several):
        stores = op in _BACKENDS_OF_STORE
        if stores and backend not in _BACKENDS_OF_STORE[op]:
            continue
        name = f"{op.__name__}_{spec.name}_{backend}"

        def trace(
            op: Any = op, args: Any = args, options: Any = options, stores: bool = stores, name: str = name
        ) -> jax.stages.Traced:
            def program(*arrays: Any) -> Any:
                return op(*arrays, backend=backend, **options)

            program.__name__ = name
            shapes = jax.tree.map(functools.partial(_shape, mesh=mesh), args)
            return jax.jit(program, donate_argnums=(0,) if stores else ()).trace(*shapes)

        on_matrix_units = op not in (store_kv, store_rotated) and spec.dtype != jnp.float32
        cache: Any = spec.paged_kv().k
        num_arrays = 2 if spec.value_dim is None else 1
        yield Program(name, backend, trace, cache, num_arrays if stores else 0, on_matrix_units)


def grouped_programs(spec: GroupedSpec, backend: str, mesh: Mesh) -> Iterator[Program]:
    """Yields a decode and an extend of attention to windows and groups of tokens."""
    for op, args, options in spec.calls():
        name = f"{op.__name__}_{spec.name}_{backend}"
        trace = _trace(functools.partial(op, backend=backend, **options), args, name, mesh)
        cache: Any = spec.pages(spec.page_size, spec.head_dim)
        yield Program(name, backend, trace, cache, 0, on_matrix_units=spec.dtype != jnp.float32)


def _trace(op: Callable[..., Any], args: Any, name: str, mesh: Mesh) -> Callable[[], jax.stages.Traced]:
    """What traces the op, which donates nothing, as a program of that name."""

    def trace() -> jax.stages.Traced:
        def program(*arrays: Any) -> Any:
            return op(*arrays)

        program.__name__ = name
        return jax.jit(program).trace(*jax.tree.map(functools.partial(_shape, mesh=mesh), args))

    return trace


def product_program(spec: ProductSpec, backend: str, mesh: Mesh) -> Program:
    """A `quantized_product`; what must not be made is an array of the widened weights, in the place of a cache."""
    op, args, options = spec.call()
    name = f"{op.__name__}_{spec.name}_{backend}"
    trace = _trace(functools.partial(op, backend=backend, **options), args, name, mesh)
    widened = jax.ShapeDtypeStruct((spec.num_outputs, spec.num_inputs), spec.dtype)
    return Program(name, backend, trace, widened, 0, on_matrix_units=True)


def step_programs(platform: str, backend: str, mesh: Mesh) -> Iterator[Program]:
    """Yields decode, several decode steps and extend of a small bfloat16 model with heads and pages as in serving.

    `platform` is "gpu" or "tpu", as the engine names it.
    """
    bundled = arch_from_folder(BUNDLED_MODEL)
    layers = (dataclasses.replace(bundled.layers[0], mlp=DenseMlp(ffn_size=3072)),) * NUM_LAYERS
    arch = dataclasses.replace(
        bundled, vocab_size=32_000, hidden_size=1024, layers=layers, num_heads=16, num_kv_heads=8, head_dim=128
    )
    graphdef, params = abstract_model(arch, jnp.dtype(jnp.bfloat16))
    leaves = nnx.from_flat_state([(path, placed(param, mesh)) for path, param in nnx.to_flat_state(params)])
    config = EngineConfig(model=str(BUNDLED_MODEL))
    states = choose_states(config, arch, platform, jnp.dtype(jnp.bfloat16), mesh.size)
    kv = abstract_kv(states, pages_for(POOL_TOKENS, states.page_size), mesh)
    pages_of_a_layer: Any = kv.k[0]  # a description in the place of an array
    tables = jax.tree.map(
        lambda array: _shape(array, mesh),
        (np.zeros((65, 128), np.int32), np.zeros(65, np.int32), neutral_tables(64, arch.vocab_size)),
    )
    spec = ProgramSpec(graphdef, leaves, DeviceState(kv, *tables), KernelChoice.of_attention(backend), mesh)
    decode = Bucket("decode", 64, 64, False)
    several = dataclasses.replace(decode, sampled=True, num_steps=4)
    for bucket in (decode, several, Bucket("extend", 1024, 8, False)):

        def trace(bucket: Bucket = bucket) -> jax.stages.Traced:
            return spec.forward(bucket).trace()

        is_one = bucket.num_steps == 1  # several steps are a loop, which no command buffer holds by default
        name = f"step{'' if is_one else 's'}_{bucket.kind}_{backend}"
        program = Program(name, backend, trace, pages_of_a_layer, 2 * arch.num_layers, on_matrix_units=True)
        if is_one:
            program = dataclasses.replace(
                program,
                layers=Layers(NUM_LAYERS, NUM_LAYERS),
                steps=(name,),
                weight_bytes=2 * weights_read(arch, params),
            )
        yield program


def weights_read(arch: ModelArch, params: Any) -> int:
    """How many weights each step reads: all but an embedding that is not the head; of that it reads a row per token."""
    embedding = 0 if arch.tie_embeddings else arch.vocab_size * arch.hidden_size
    return sum(map(_num_numbers, jax.tree.leaves(params))) - embedding


def _num_numbers(array: Any) -> int:
    """How many numbers an array has; words have eight of 4 bits each."""
    return int(array.size) * (8 if array.dtype == jnp.uint32 else 1)


def on_one_device(array: Any) -> jax.ShapeDtypeStruct:
    """The part of a placed shape that each device has."""
    return jax.ShapeDtypeStruct(array.sharding.shard_shape(array.shape), array.dtype)


def weights_on_one_device(tree: Any) -> int:
    """How many numbers of a tree of placed shapes each device has."""
    return sum(_num_numbers(on_one_device(leaf)) for leaf in jax.tree.leaves(tree))


def bytes_on_one_device(tree: Any) -> int:
    """Bytes of a tree of placed shapes on each device."""
    parts = map(on_one_device, jax.tree.leaves(tree))
    return sum(int(part.size) * jax.dtypes.itemsize_bits(part.dtype) // 8 for part in parts)


def _shape(array: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=replicated(mesh))


def placed(param: nnx.Param[Any], mesh: Mesh) -> Any:
    """The parameter as a shape that lies on `mesh`."""
    return param.replace(jax.ShapeDtypeStruct(param.shape, param.dtype, sharding=param_sharding(param, mesh)))
