"""The engine's real steps on models that people serve, as programs to compile: what `Engine` would compile and run.

A table of models, of batches and of kinds of sampling gives the programs. Few layers are compiled: from the second on
all layers are alike, or recur in groups, so `report` reads one layer or group and multiplies. Called by `compile_for`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from bench.models import write_config
from bench.targets.collectives import Wanted
from bench.targets.launch_report import Layers
from bench.targets.programs import Program, bytes_on_one_device, on_one_device, placed, weights_on_one_device
from bench.targets.targets import Target
from jaxsgl.batch.buckets import BucketSet, Capacity, buckets_of
from jaxsgl.batch.inputs import Bucket
from jaxsgl.batch.patches import EncodeBucket
from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.features import SpeculationConfig, VisionConfig
from jaxsgl.engine.adapters import abstract_pool
from jaxsgl.engine.layer_state import LayerStates
from jaxsgl.engine.programs import Program as EngineProgram
from jaxsgl.engine.programs import ProgramKey
from jaxsgl.engine.running import product_of_token
from jaxsgl.engine.start.memory import Memory
from jaxsgl.engine.start.sizing import choose_states, plan_capacity
from jaxsgl.engine.state import abstract_state
from jaxsgl.engine.step_programs import ProgramSpec
from jaxsgl.engine.weight_formats import as_kept
from jaxsgl.engine.weight_store import read_arch
from jaxsgl.models import ModelArch, Params, abstract_model, arch_from_folder, resolve_precision
from jaxsgl.models.layer_spec import MoeMlp, RecurrentNet
from jaxsgl.models.lora import adaptable_modules
from jaxsgl.models.tensor_parallel import DATA_AXIS, TENSOR_AXIS
from pallas_kernels import KernelChoice

MODELS = (
    "qwen3-0.6b",
    "qwen3-8b",
    "qwen3-8b-fp8",
    "qwen3-8b-awq",
    "qwen3-30b-a3b",
    "qwen3-30b-a3b-fp8",
    "qwen3-30b-a3b-awq",
    "phi3-mini",
    "qwen3.5-9b",
    "granite-4.0-h-small",
    "nemotron-3-nano",
    "lfm2-8b-a1b",
    "deepseek-v2-lite",
    "deepseek-v3.2-32e-fp8",
    "gpt-oss-20b",
)  # of `bench.models`; a model more is a line more
ORDERED_MODELS = ("qwen3-0.6b", "qwen3-8b", "phi3-mini")  # of 16 bits, without experts
RANKED_MODELS = ("qwen3-235b-a22b", "qwen3-235b-a22b-fp8", "qwen3-30b-a3b")  # in ranks, where they fit
SHARED_MODELS = (
    *(f"{name}{weights}" for name in ("qwen3-8b", "qwen3-30b-a3b", "qwen3-235b-a22b") for weights in ("", "-fp8")),
    "qwen3-vl-30b-a3b",
    "qwen3-vl-235b-a22b",
)  # on several devices; those of experts have whole experts each (--ep)
COMPILED_LAYERS = 4  # after those of their own; of layers that recur in groups, three groups
MOST_OWN = 4  # first layers that differ from those that recur, such as those without experts
MEM_FRACTION = 0.85  # of the chip's memory for weights and pool, as the engine's own default
DECODE_ROWS = (1, 32, 256)
RANK_ROWS = 16  # that decode in each rank
EXTEND_TOKENS, EXTEND_SEQS = 4096, 4
NUM_DRAFTS = 3  # of a sequence, of which 16 fit into the larger verify step
VERIFY_TOKENS = 64
ADAPTER_COLUMNS = 128  # eight LoRA adapters of rank 16
# Fields of the bucket by the name of the sampling.
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"sampled": True},
    "filtered": {"sampled": True, "filtered": True},
    "featured": {"sampled": True, "featured": True},
}


@dataclasses.dataclass(frozen=True)
class Served:
    """A model as the engine would serve it on a mesh of chips: everything that its programs' shapes depend on.

    `params` are shapes that lie on the mesh.
    """

    name: str
    arch: ModelArch
    dtype: jnp.dtype
    states: LayerStates
    capacity: Capacity
    buckets: BucketSet
    params: Params
    mesh: Mesh

    @property
    def layers(self) -> Layers:
        """Those that are compiled, and stand for all: where no groups recur, all. Whole groups are left out."""
        of_all = self.arch.layers
        for period in range(1, len(of_all) // 3 + 1):
            for own in range(max(period, MOST_OWN) + 1):
                least = own + (COMPILED_LAYERS if period == 1 else 3 * period)
                compiled = least + (len(of_all) - least) % period
                if compiled <= len(of_all) and of_all[own:-period] == of_all[own + period :]:
                    return Layers(compiled, len(of_all), period, self._attending(compiled))
        return Layers(len(of_all), len(of_all), len(of_all))

    def _attending(self, compiled: int) -> tuple[int, ...]:
        """Indices of those layers that attend, of the first ones; (): all of them do."""
        attending = sorted((*self.arch.attention_layers, *self.arch.reading_layers))
        found = tuple(layer for layer in attending if layer < compiled)
        return () if len(found) == compiled else found

    def backends(self, target: Target) -> tuple[str, ...]:
        """Those of attention to compile for the target; Mosaic's on GPUs takes no latents."""
        if self.arch.latent is not None:
            return tuple(name for name in target.backends if name != "mosaic_gpu")
        return target.backends if self.mesh.size == 1 else target.backends[-1:]

    @property
    def num_ranks(self) -> int:
        """Ranks with attention of their own."""
        return self.mesh.shape[DATA_AXIS]

    def bucket(self, kind: str, size: int, sampling: str) -> Bucket:
        """The bucket of a batch of the table."""
        buckets = self.buckets
        if kind == "pool":
            return buckets.pool(size, EXTEND_SEQS)
        greedy = buckets.decode(size) if kind == "decode" else buckets.extend(size, EXTEND_SEQS)
        greedy = buckets.for_longest(greedy, self.capacity.context_length)
        return dataclasses.replace(greedy, **SAMPLINGS[sampling])

    def table(self) -> Iterator[tuple[str, Bucket | EncodeBucket]]:
        """Yields the steps of the table, such as "decode 256 greedy", each with its shape."""
        rows = [rows for rows in DECODE_ROWS if rows <= self.buckets.decode_sizes[-1]]
        for kind, size in (*(("decode", each) for each in rows), ("extend", EXTEND_TOKENS)):
            for sampling in SAMPLINGS:
                yield f"{kind} {size} {sampling}", self.bucket(kind, size, sampling)
        if self.buckets.encode:
            yield f"images {EXTEND_TOKENS}", self.buckets.with_images(self.bucket("extend", EXTEND_TOKENS, "greedy"))
            for bucket in self.buckets.encode[:: len(self.buckets.encode) - 1]:
                yield f"encode {bucket.num_patches}", bucket

    def facts(self) -> dict[str, int]:
        """What a prediction needs to know of a device's part of the model."""
        arch, parts = self.arch, self.mesh.size
        mixtures = [layer.mlp for layer in arch.layers if isinstance(layer.mlp, MoeMlp)]
        head = arch.vocab_size * arch.hidden_size // parts
        per_unit = arch.unit_rows + 1
        weights = (per_unit * each.num_experts * each.num_units * each.width(arch.hidden_size) for each in mixtures)
        expert_weights = sum(weights) // parts
        experts = _of_experts(self.params)
        of_experts, scales = bytes_on_one_device(experts), weights_on_one_device(experts) - expert_weights
        unread = scales + (0 if arch.tie_embeddings else head)
        embeddings = (1 if arch.tie_embeddings else 2) * head * self.dtype.itemsize
        attending = [layer.by_page for layer in self.states.layers if layer.by_page]
        keys, values = attending[0][0], arch.latent.kv_rank if arch.latent else attending[0][-1].shape[-1]
        nets = [layer.mixer for layer in arch.layers if isinstance(layer.mixer, RecurrentNet)]
        matrices, inputs = (
            sum(array.num_bytes(parts) for array in self.states.by_row(name)[:1]) for name in ("matrices", "inputs")
        )
        moved = 2 * matrices + inputs  # of the inputs all slots but one are read, and that one is written
        return {
            "num_devices": parts,
            "num_layers": arch.num_layers,
            "num_heads": arch.num_heads // parts,
            "num_kv_heads": arch.num_kv_heads // parts,
            "head_dim": self.states.page_layout.page_shape[-1],  # which kernels read and multiply
            "hidden_size": arch.hidden_size,
            "vocab_size": arch.vocab_size // parts,
            "weights_read": weights_on_one_device(_of_decoder(self.params)) - unread,
            "weight_itemsize": self.dtype.itemsize,
            "layer_bytes": bytes_on_one_device(_of_decoder(self.params)) - embeddings - of_experts,
            "kv_itemsize": self.states.page_layout.itemsize,
            "attending_layers": len(attending),
            "kv_token_bytes": self.states.page_bytes // (len(attending) * self.states.page_size),  # of a layer
            "pair_flops": 2 * arch.num_heads // parts * (keys.shape[-1] + values),  # of a layer
            "state_bytes_moved": len(nets) * moved,  # by a decode of a row, in all layers with states
            "layer_state_bytes_moved": moved,
            "state_flops": 6 * sum(net.value_heads * net.key_size * net.value_size for net in nets) // parts,  # a token
            "page_size": self.states.page_size,
            "expert_weights": expert_weights,
            "expert_bytes": of_experts,
            "num_experts": mixtures[0].num_experts if mixtures else 0,
            "experts_per_token": mixtures[0].router.top_k if mixtures else 0,
        }

    def weight_bytes(self) -> int:
        """Bytes of weights that a device reads in each step."""
        arch, parts = self.arch, self.mesh.shape[TENSOR_AXIS]
        is_read = arch.tie_embeddings or not arch.stage.is_first  # as the head, if it is there
        embedding = 0 if is_read else arch.vocab_size * arch.hidden_size // parts
        every, by_row = (bytes_on_one_device(each) for each in (_of_decoder(self.params), _of_tokens(self.params)))
        return every - by_row - embedding * self.dtype.itemsize

    def wanted(self, shape: Bucket | EncodeBucket | int) -> Wanted | None:
        """What devices must exchange in a step of the bucket, or to sample for that many sequences."""
        if self.mesh.size == 1 or isinstance(shape, EncodeBucket):
            return None
        if isinstance(shape, int):
            return Wanted(self.mesh.size, 0, shape)
        residual = shape.num_tokens * self.arch.hidden_size * self.dtype.itemsize
        return Wanted(self.mesh.size, residual, shape.num_seqs, self.num_ranks, self.layers.recurring)


def served(name: str, target: Target, mesh: Mesh, folder: Path, kv_cache_dtype: str = "auto") -> Served | None:
    """The model on those chips, `kv_cache_dtype` as the engine's flag; None where it doesn't fit."""
    return served_from(write_config(name, folder / name), name, target, mesh, kv_cache_dtype)


def served_from(
    home: Path, name: str, target: Target, mesh: Mesh, kv_cache_dtype: str = "auto", *, fits: bool = False
) -> Served | None:
    """The same of the folder `home`; if it `fits`, a smaller chip than twice its weights gets as much memory."""
    config = EngineConfig(
        model=str(home),
        chunked_prefill_size=EXTEND_TOKENS,
        kv_cache_dtype=kv_cache_dtype,
        tp=mesh.size,
        speculation=SpeculationConfig("NGRAM", NUM_DRAFTS),
    )
    num_ranks = mesh.shape[DATA_AXIS]
    if num_ranks > 1:
        config = dataclasses.replace(
            config, dp_size=num_ranks, enable_dp_attention=True, speculation=SpeculationConfig()
        )
    if mesh.size > 1 and arch_from_folder(home).mixture is not None:
        config = dataclasses.replace(config, ep=True, vision=VisionConfig(mm_enable_dp_encoder=True))
    arch = read_arch(config, home)
    platform = target.engine_platform
    dtype, _, kv_dtype = resolve_precision(
        config.dtype, config.kv_cache_dtype, arch, platform, cpu_multiplies_bfloat16=lambda: False
    )
    arch = as_kept(arch, dtype, platform, mesh.size, rounds_rows=target.multiplies_float8)
    states = choose_states(config, arch, platform, kv_dtype, mesh.shape[TENSOR_AXIS])
    params = placed_params(arch, dtype, mesh)
    weights = bytes_on_one_device(params)
    memory_bytes = max(target.memory_bytes, 2 * weights) if fits else target.memory_bytes
    static = int(memory_bytes * MEM_FRACTION) - weights
    if static <= 0:
        return None
    capacity = plan_capacity(config, arch, states, Memory(platform, static, memory_bytes - weights))
    shared = name if mesh.size == 1 else f"{name}-tp{mesh.size}"
    if num_ranks > 1:
        shared = f"{name}-{num_ranks}x{mesh.shape[TENSOR_AXIS]}"
    return Served(shared, arch, dtype, states, capacity, buckets_of(config, capacity), params, mesh)


def placed_params(arch: ModelArch, dtype: jnp.dtype, mesh: Mesh) -> Params:
    """The model's parameters as shapes that lie on the mesh."""
    _, params = abstract_model(arch, dtype)
    return nnx.from_flat_state([(path, placed(param, mesh)) for path, param in nnx.to_flat_state(params)])


def with_few_layers(model: Served, backend: str) -> ProgramSpec:
    """What the programs of `model` share, of as many layers as are compiled."""
    arch = dataclasses.replace(model.arch, layers=model.arch.layers[: model.layers.compiled])
    states = dataclasses.replace(model.states, layers=model.states.layers[: model.layers.compiled])
    graphdef, _ = abstract_model(arch, model.dtype)
    leaves = placed_params(arch, model.dtype, model.mesh)
    images = None if arch.tower is None else (arch.tower.row_len, model.dtype)
    state = abstract_state(states, model.capacity, model.mesh, images)
    kernels = KernelChoice.of_attention(backend)
    product = product_of_token(arch, model.dtype)
    return ProgramSpec(graphdef, leaves, state, kernels, model.mesh, tower=model.capacity.tower, state_product=product)


def as_step(program: Program, model: Served, spec: ProgramSpec, bucket: Bucket, backend: str) -> Program:
    """`program` as the forward program of a step of `bucket`, with all that is checked of such."""
    of_pages = [on_one_device(array) for array in jax.tree.leaves(spec.state.kv)]
    by_row = [array.shape for array in jax.tree.leaves(spec.state.running)]
    return dataclasses.replace(
        program,
        backend=backend,
        num_donated=len(of_pages),
        donated_bytes=bytes_on_one_device(spec.state.kv),
        states=tuple({array.shape for array in of_pages} - {program.cache.shape} | set(by_row)),
        layers=model.layers,
        page_table=(bucket.num_seqs, model.capacity.max_pages_per_seq),
        weight_bytes=model.weight_bytes(),
        argument_bytes=bytes_on_one_device((_of_decoder(spec.params), spec.state)),
    )


def engine_programs(model: Served, backend: str) -> Iterator[Program]:
    """Yields each program of the table once, with few layers."""
    mesh = model.mesh
    arch = dataclasses.replace(model.arch, layers=model.arch.layers[: model.layers.compiled])
    spec = with_few_layers(model, backend)
    facts = model.facts()
    pages: Any = on_one_device(spec.state.kv.k[0])  # a description in the place of an array
    found: dict[ProgramKey, EngineProgram] = {}
    steps: dict[ProgramKey, list[str]] = {}
    for step, shape in model.table():
        for each in [spec.encode(shape)] if isinstance(shape, EncodeBucket) else spec.step(shape):
            found.setdefault(each.key, each)
            steps.setdefault(each.key, []).append(f"{model.name} {backend} {step}")
    for key, names in steps.items():
        program = Program(
            program_name(model, key, backend),
            "any",
            found[key].trace,
            pages,
            num_donated=0,
            on_matrix_units=False,
            steps=() if key.kind == "encode" else tuple(names),
            facts=facts,
            wanted=model.wanted(key.shape),
        )
        if isinstance(key.shape, Bucket):
            program = as_step(program, model, spec, key.shape, backend)
        yield program
    yield from _mask_programs(spec, model, pages, facts)
    yield from _verify_programs(spec, model, backend, pages, facts)
    if model.name == MODELS[0]:
        pool = abstract_pool(arch, adaptable_modules(arch), ADAPTER_COLUMNS, model.dtype, mesh)
        bucket = dataclasses.replace(model.bucket("decode", DECODE_ROWS[-1], "greedy"), adapter_columns=ADAPTER_COLUMNS)
        trace = dataclasses.replace(spec, adapters=pool).forward(bucket).trace
        name = f"{model.name} adapters {bucket.num_tokens} {backend}"
        yield Program(name, backend, trace, pages, 2 * COMPILED_LAYERS, on_matrix_units=False, facts=facts)


def _mask_programs(spec: ProgramSpec, model: Served, pages: Any, facts: dict[str, int]) -> Iterator[Program]:
    """Yields what a step that grammars hold runs besides, for the most rows of the table."""
    for each in spec.masking(DECODE_ROWS[-1]):
        name = program_name(model, each.key, "any")
        yield Program(name, "any", each.trace, pages, num_donated=0, on_matrix_units=False, facts=facts)


def _verify_programs(
    spec: ProgramSpec, model: Served, backend: str, pages: Any, facts: dict[str, int]
) -> Iterator[Program]:
    """Yields what verifies drafts: a middling step of each model, and of the first one the smallest as well."""
    states = tuple({array.shape for array in jax.tree.leaves(spec.state.running)})
    most = min(VERIFY_TOKENS, model.buckets.verify_sizes[-1])  # where few states fit, few sequences run
    sizes = {most, model.buckets.verify_sizes[0]} if model.name == MODELS[0] else {most}
    for size in sorted(sizes):
        forward = spec.forward(model.buckets.verify(size))
        name = program_name(model, forward.key, backend)
        num_arrays = len(jax.tree.leaves(spec.state.kv))
        program = Program(name, backend, forward.trace, pages, num_arrays, on_matrix_units=False, facts=facts)
        yield dataclasses.replace(program, states=states)
    verify = model.buckets.verify(most)
    after = [spec.accepting(most), *([spec.settling(verify)] if spec.settles(verify) else [])]
    for each in after:
        name = program_name(model, each.key, "any")
        program = Program(name, "any", each.trace, pages, num_donated=0, on_matrix_units=False, facts=facts)
        yield dataclasses.replace(program, states=states if each.key.kind == "settled" else ())


def _of_decoder(params: Params) -> Params:
    """The parameters without those of a vision tower, which no step takes."""
    flat = nnx.to_flat_state(params)
    return nnx.from_flat_state([(path, param) for path, param in flat if path[0] != "visual"])


def _of_tokens(params: Params) -> Params:
    """Embeddings besides the model's own, of which a step reads its tokens' rows: layers' (Gemma 3n), and positions."""
    flat = nnx.to_flat_state(params)
    return nnx.from_flat_state(
        [(path, each) for path, each in flat if path[0] == "positions" or path[:2] == ("layer_embeddings", "table")]
    )


def _of_experts(params: Params) -> Params:
    """The weights of experts, and their scales if they are quantized."""
    dims = {"gate_up": 4, "gate_up_scale": 4, "down": 3, "down_scale": 3}  # with an axis of experts
    flat = nnx.to_flat_state(params)
    return nnx.from_flat_state([(path, each) for path, each in flat if dims.get(str(path[-1])) == len(each.shape)])


def programs_of_models(
    target: Target,
    mesh: Mesh,
    folder: Path,
    kv_cache_dtype: str = "auto",
    models: Sequence[str] = (),
) -> list[Program]:
    """Each program of the table once; those that only sample depend on the vocabulary and serve several models.

    `models` are by default those for so many devices.
    """
    found: dict[str, Program] = {}
    for name in models or (MODELS if mesh.size == 1 else SHARED_MODELS):
        model = served(name, target, mesh, folder, kv_cache_dtype)
        if model is None:
            continue
        for backend in model.backends(target):
            for each in engine_programs(model, backend):
                before = found.get(each.name)
                found[each.name] = dataclasses.replace(each, steps=(*before.steps, *each.steps)) if before else each
    return list(found.values())


def ranked_programs(target: Target, mesh: Mesh, folder: Path) -> Iterator[Program]:
    """Yields steps of models on a mesh of several ranks: all decode, and one extends a chunk meanwhile."""
    for name in RANKED_MODELS:
        model = served(name, target, mesh, folder)
        if model is None:
            continue
        (backend,) = model.backends(target)
        spec = with_few_layers(model, backend)
        pages: Any = on_one_device(spec.state.kv.k[0])
        buckets, num_decodes = model.buckets, RANK_ROWS * (model.num_ranks - 1)
        decode, extend = buckets.decode(RANK_ROWS), buckets.extend(buckets.extend_sizes[-1], EXTEND_SEQS)
        for bucket in (
            buckets.joint(decode, RANK_ROWS + num_decodes),
            buckets.joint(extend, extend.num_tokens + num_decodes),
        ):
            step = spec.forward(bucket)
            places = bucket.mlp_tokens or model.num_ranks * bucket.num_tokens
            program = Program(
                f"{model.name} {bucket.kind} {bucket.num_tokens} of {places} {backend}",
                backend,
                step.trace,
                pages,
                num_donated=0,
                on_matrix_units=False,
                steps=(f"{model.name} {backend} {bucket.kind} {bucket.num_tokens} greedy",),
                wanted=model.wanted(bucket),
            )
            yield as_step(program, model, spec, bucket, backend)


def ordered_programs(target: Target, mesh: Mesh, folder: Path) -> Iterator[Program]:
    """Yields the programs of the models that `--enable-deterministic-inference` takes, in fixed order."""
    yield from map(in_fixed_order, programs_of_models(target, mesh, folder, models=ORDERED_MODELS))


def in_fixed_order(program: Program) -> Program:
    """The same program of an engine in fixed order."""
    trace = functools.partial(program.trace, in_fixed_order=True)
    return dataclasses.replace(program, name=f"{program.name} ordered", trace=trace)


def program_name(model: Served, key: ProgramKey, backend: str) -> str:
    """Such as "qwen3-0.6b decode 256 triton", or "sampled 256 of 151936"."""
    if isinstance(key.shape, Bucket):
        kind = "images" if key.shape.rope_axes == 3 else key.shape.kind
        return f"{model.name} {kind} {key.shape.num_tokens} {backend}"
    if isinstance(key.shape, EncodeBucket):
        return f"{model.name} {key.kind} {key.shape.num_patches}"
    shared = "" if model.mesh.size == 1 else f" tp{model.mesh.size}"
    of = model.name if key.kind == "settled" else str(model.arch.vocab_size)
    return f"{key.kind} {key.shape} of {of}{shared}"
