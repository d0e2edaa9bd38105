"""The compiled programs of an engine, held by shape: a shape that warm-up didn't compile raises, it never compiles.

Called by `engine`. Knows the shapes of the programs' arguments and where they lie, not what is in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.batch.inputs import TABLE_CHANGES, Bucket, packed_len
from jaxsgl.batch.patches import EncodeBucket, EncodeInputs, TowerCapacity
from jaxsgl.batch.sampling import EDITS_LEN
from jaxsgl.engine import edits, page_table
from jaxsgl.engine.encoding import ENCODE_DONATES, call_shapes, make_encode
from jaxsgl.engine.on_mesh import each_device
from jaxsgl.engine.state import DeviceState
from jaxsgl.engine.step import (
    FEATURED_DONATES,
    FORWARD_DONATES,
    SAMPLING_DONATES,
    SAMPLING_ROWS,
    SET_PAGES_DONATES,
    SET_ROW_DONATES,
    Decoded,
    DecodeSteps,
    Forward,
    Forwarded,
    featured_step,
    filtered_step,
    make_decode_steps,
    make_forward,
    sample_step,
)
from jaxsgl.engine.tower_parts import PART_DONATES, PART_KINDS, Between, make_part
from jaxsgl.engine.warmup import Compilation, compile_all
from jaxsgl.errors import JaxsglError
from jaxsgl.models import Decoder, Params
from jaxsgl.weights import KvScales
from jaxsgl.weights.sharding import logits_sharding, replicated


@dataclass(frozen=True)
class ProgramSpec:
    """What all programs of one engine share.

    Attributes:
      graphdef: structure of the model.
      params: its parameters, as arrays or as `jax.ShapeDtypeStruct`s with shardings.
      state: what stays on the device, likewise.
      attention_backend: for the kernels.
      mesh: where everything lies.
      kv_scales: of a float8 KV cache; None for any other, and where all are 1.
      adapters: shapes and places of the adapters' pool; None: there is none.
      tower: what the vision tower encodes, if there is one.
    """

    graphdef: nnx.GraphDef[Decoder]
    params: Params
    state: DeviceState
    attention_backend: str
    mesh: Mesh
    kv_scales: KvScales | None = None
    adapters: list[dict[str, jax.ShapeDtypeStruct]] | None = None
    tower: TowerCapacity | None = None

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.state.edit_tables.counts.shape[1]

    @property
    def num_logits(self) -> int:
        """V, and the padding that makes the devices' parts equal."""
        return -(-self.vocab_size // self.mesh.size) * self.mesh.size

    def trace(self, key: ProgramKey) -> jax.stages.Traced:
        """The program of `key`, traced."""
        if isinstance(key.shape, Bucket):
            return self.trace_forward(key.shape)
        if isinstance(key.shape, EncodeBucket):
            return self.trace_encode(key.shape) if key.kind == "encode" else self.trace_part(key.kind, key.shape)
        if key == SET_ROW:
            return self.trace_set_row()
        if key == SET_PAGES:
            return self.trace_set_pages()
        if key.kind == "featured":
            return self.trace_featured(key.shape)
        return self.trace_sampling(key.shape, filtered=key.kind == "filtered")

    def trace_forward(self, bucket: Bucket) -> jax.stages.Traced:
        """The forward program of `bucket`, traced."""
        leaves, treedef = jax.tree.flatten(self.params)
        pool, pool_treedef = jax.tree.flatten(self.adapters)
        everywhere: Any = replicated(self.mesh)  # takes the place of an array in the trees of shardings
        state_shardings = jax.tree.map(lambda array: array.sharding, self.state)
        if bucket.num_steps > 1:
            program: Forward | DecodeSteps = make_decode_steps(
                self.graphdef, treedef, bucket, self.attention_backend, self.kv_scales, pool_treedef
            )
            shardings: Forwarded | Decoded = Decoded(state_shardings, everywhere)
        else:
            program = make_forward(self.graphdef, treedef, bucket, self.attention_backend, self.kv_scales, pool_treedef)
            scores = everywhere if bucket.kind == "score" else None
            logits: Any = logits_sharding(self.mesh)
            pooled = everywhere if bucket.pools else None
            states = everywhere if bucket.states else None
            shardings = Forwarded(state_shardings, everywhere, logits, everywhere, scores, pooled, states)
        arguments: tuple[Any, ...] = (leaves, self.state, self._int32(packed_len(bucket)))
        if bucket.adapter_columns:
            arguments += (pool,)
        return self.traced(program, FORWARD_DONATES, arguments, shardings)

    def trace_encode(self, bucket: EncodeBucket) -> jax.stages.Traced:
        """The program that runs the vision tower on `bucket`, traced."""
        assert self.tower is not None and self.state.images is not None
        leaves, treedef = jax.tree.flatten(self.params)
        program = make_encode(self.graphdef, treedef, bucket.num_bins)
        arguments = (leaves, self.state.images, *call_shapes(bucket, self.tower, self.mesh))
        return self.traced(program, ENCODE_DONATES, arguments, replicated(self.mesh))

    def trace_part(self, kind: str, bucket: EncodeBucket) -> jax.stages.Traced:
        """One of the programs that run the vision tower on `bucket` in parts, traced."""
        assert self.tower is not None and self.state.images is not None
        leaves, treedef = jax.tree.flatten(self.params)
        pixels, columns, rows = call_shapes(bucket, self.tower, self.mesh)
        begin = make_part(PART_KINDS[0], self.graphdef, treedef)
        hidden = jax.eval_shape(begin, leaves, pixels, columns).hidden
        between: Any = Between(cast(Any, self._placed(hidden.shape, hidden.dtype)), cast(Any, columns))
        number = self._int32()
        arguments = {
            "encode begin": (leaves, pixels, columns),
            "encode layer": (leaves, between, number),
            "encode tap": (leaves, self.state.images, between.hidden, rows, number),
            "encode end": (leaves, self.state.images, between.hidden, rows),
        }[kind]
        everywhere: Any = replicated(self.mesh)
        shardings = Between(everywhere, everywhere) if kind in PART_KINDS[:2] else everywhere
        return self.traced(make_part(kind, self.graphdef, treedef), PART_DONATES[kind], arguments, shardings)

    def trace_sampling(self, num_seqs: int, filtered: bool) -> jax.stages.Traced:
        """The sampling program for `num_seqs` padded sequences, which may filter or not, traced."""
        program = self.told_of_padding(filtered_step if filtered else sample_step)
        return self.traced(program, SAMPLING_DONATES, self._sampling_arguments(num_seqs), replicated(self.mesh))

    def trace_featured(self, num_seqs: int) -> jax.stages.Traced:
        """The featured program for `num_seqs` padded sequences, traced."""
        arguments = (*self._sampling_arguments(num_seqs), self.state.edit_tables, self._int32(num_seqs))
        return self.traced(featured_step, FEATURED_DONATES, arguments, replicated(self.mesh))

    def trace_set_row(self) -> jax.stages.Traced:
        """The program that writes a row of the edit tables, traced."""
        arguments = (self.state.edit_tables, self._int32(1 + EDITS_LEN + self.vocab_size))
        return self.traced(edits.set_row, SET_ROW_DONATES, arguments, replicated(self.mesh))

    def trace_set_pages(self) -> jax.stages.Traced:
        """The program that writes entries of the page table, traced."""
        arguments = (self.state.page_table, self._int32(3, TABLE_CHANGES))
        return self.traced(page_table.set_pages, SET_PAGES_DONATES, arguments, replicated(self.mesh))

    def told_of_padding(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """`program`, given `vocab_size` if logits have padding behind the vocabulary."""
        return program if self.num_logits == self.vocab_size else partial(program, vocab_size=self.vocab_size)

    def traced(
        self, program: Callable[..., Any], donated: tuple[int, ...], arguments: tuple[Any, ...], shardings: Any
    ) -> jax.stages.Traced:
        """Traces `program` for the mesh; `shardings` are those of its result."""
        on_devices = each_device(program, self.mesh, arguments, shardings)
        return jax.jit(on_devices, donate_argnums=donated, out_shardings=shardings).trace(*arguments)

    def _sampling_arguments(self, num_seqs: int) -> tuple[Any, ...]:
        """Logits, packed sampling inputs and last tokens."""
        logits = jax.ShapeDtypeStruct((num_seqs, self.num_logits), jnp.float32, sharding=logits_sharding(self.mesh))
        return logits, self._int32(SAMPLING_ROWS, num_seqs), self.state.last_tokens

    def _int32(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self._placed(shape, jnp.int32)

    def _placed(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(self.mesh))


class ProgramKey(NamedTuple):
    """Names a program: "forward" and "encode" by their bucket; "sampled", "filtered" or "featured" by its sequences;
    "set_row" or "set_pages"."""

    kind: str
    shape: Bucket | EncodeBucket | int = 0


SET_ROW, SET_PAGES = ProgramKey("set_row"), ProgramKey("set_pages")


def keys_of(bucket: Bucket) -> list[ProgramKey]:
    """The programs that a step of `bucket` runs, in order."""
    if bucket.num_steps > 1:  # each step needs the tokens of the one before, so the program samples itself
        return [ProgramKey("forward", bucket)]
    keys = [ProgramKey("forward", replace(bucket, sampled=False, featured=False, filtered=False))]
    if bucket.sampled:
        keys.append(ProgramKey(bucket.sampling, bucket.num_seqs))
    return keys


def all_keys(buckets: BucketSet) -> list[ProgramKey]:
    """Every program that warm-up compiles, in its order."""
    of_steps = (key for bucket in buckets.all() for key in keys_of(bucket))
    return list(dict.fromkeys([*encode_keys(buckets), *of_steps, SET_ROW, SET_PAGES]))


def encode_keys(buckets: BucketSet) -> list[ProgramKey]:
    """The programs that run the vision tower, the largest first, and those that run it in parts."""
    parts = [ProgramKey(kind, bucket) for bucket in buckets.encode_in_parts for kind in PART_KINDS]
    return [*(ProgramKey("encode", bucket) for bucket in reversed(buckets.encode)), *parts]


Compilations: TypeAlias = Mapping[ProgramKey, Compilation]
MaskBytes: TypeAlias = Callable[[int], "StageBytes"]


def compile_keys(spec: ProgramSpec, keys: Iterable[ProgramKey], *, progress: bool) -> Compilations:
    """Compiles the programs of `keys`."""
    return compile_all({key: _lowering(spec, key) for key in dict.fromkeys(keys)}, progress=progress)


class StageBytes(NamedTuple):
    """Device memory of a program: what it leaves until its step has ended, and what it takes while it runs."""

    kept: int
    temporary: int


def step_bytes(compilations: Compilations, buckets: Iterable[Bucket], mask_bytes: MaskBytes | None = None) -> int:
    """Device memory that the largest step of `buckets`, or call of the tower, takes beside parameters and state.

    That is a program's temporaries and outputs, together with the outputs of the programs of the step before it. What
    a program donates and returns is part of the state. `mask_bytes` tells what masks take of a step that samples, by
    its sequences: their programs are compiled later; None: there will be none.
    """

    def stages(bucket: Bucket) -> list[StageBytes]:
        forward, *after = (_stage(compilations[key].compiled) for key in keys_of(bucket))
        masks = [] if mask_bytes is None or not after else [mask_bytes(bucket.num_seqs)]
        return [forward, *masks, *after]

    of_steps = (_most_bytes(stages(bucket)) for bucket in buckets)
    of_tower = (_most_bytes([_stage(one.compiled)]) for key, one in compilations.items() if key.kind == "encode")
    return max((*of_steps, *of_tower)) + _bytes_between(compilations)


def _bytes_between(compilations: Compilations) -> int:
    """What is kept between layers of an image that is encoded in parts."""
    begins = [_stage(one.compiled).kept for key, one in compilations.items() if key.kind == PART_KINDS[0]]
    return max(begins, default=0)


def _stage(program: jax.stages.Compiled) -> StageBytes:
    memory = program.memory_analysis()
    if memory is None:  # the platform doesn't tell
        return StageBytes(0, 0)
    return StageBytes(memory.output_size_in_bytes - memory.alias_size_in_bytes, memory.temp_size_in_bytes)


def _most_bytes(stages: Iterable[StageBytes]) -> int:
    held = most = 0
    for stage in stages:
        held += stage.kept
        most = max(most, held + stage.temporary)
    return most


class Programs:
    """The programs of all buckets, and those that write a row of the edit tables and entries of the page table.

    Attributes:
      spec, buckets: what they were made from.
      compilations: by key, with the time that each took.
    """

    def __init__(
        self,
        spec: ProgramSpec,
        buckets: BucketSet,
        *,
        done: Compilations,
        progress: bool,
        mask_bytes: MaskBytes | None = None,
    ) -> None:
        """Compiles everything but what is `done` already; `mask_bytes` as in `step_bytes`."""
        self.spec = spec
        self._mask_bytes = mask_bytes
        self.buckets = buckets
        rest = [key for key in all_keys(buckets) if key not in done]
        self.compilations: Compilations = {**done, **compile_keys(spec, rest, progress=progress)}
        self.set_row = self.compilations[SET_ROW].compiled
        self.set_pages = self.compilations[SET_PAGES].compiled
        # One look-up per step instead of building keys.
        self._of_bucket = {
            bucket: tuple(self.compilations[key].compiled for key in keys_of(bucket)) for bucket in buckets.all()
        }

        self._encode = {key: self.compilations[key].compiled for key in encode_keys(buckets)}

    def __len__(self) -> int:
        return len(self.compilations)

    @property
    def step_bytes(self) -> int:
        """Device memory that the largest step takes beside parameters and state."""
        return step_bytes(self.compilations, self._of_bucket, self._mask_bytes)

    def of(self, bucket: Bucket) -> tuple[jax.stages.Compiled, ...]:
        """The forward program of `bucket`, and its sampling or featured program if it is sampled."""
        try:
            return self._of_bucket[bucket]
        except KeyError:
            raise JaxsglError(
                f"no program was compiled for bucket [{bucket}]; the {len(self._of_bucket)} buckets of warm-up are "
                "the only shapes that may run"
            ) from None

    def encode(self, bucket: EncodeBucket) -> jax.stages.Compiled:
        """The program that runs the vision tower on `bucket`."""
        return self._encode[ProgramKey("encode", bucket)]

    def encode_part(self, kind: str, call: EncodeInputs) -> jax.stages.Compiled:
        """A program of `PART_KINDS` for the shape of `call`."""
        return self._encode[ProgramKey(kind, call.bucket)]


def _lowering(spec: ProgramSpec, key: ProgramKey) -> Callable[[], jax.stages.Lowered]:
    return lambda: spec.trace(key).lower()
