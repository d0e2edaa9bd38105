"""The programs of steps and of the vision tower: which a bucket runs, their arguments' shapes, and what a step takes.

    forward -> [masks] -> sampled, filtered or featured -> [scores before masks] -> [accepted] -> [settled] -> [draft]
                                                                                      a step of a bucket, in order
    encode, or begin .. layer .. tap .. end                                           a call of the vision tower
    set_row, set_pages                                                                what the host writes between steps

Called by `engine`. Knows the shapes of the programs' arguments and where they lie, not what is in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.batch.inputs import MAX_SNAPSHOTS, TABLE_CHANGES, Bucket, packed_len
from jaxsgl.batch.outputs import of_forward
from jaxsgl.batch.patches import EncodeBucket, EncodeInputs, TowerCapacity
from jaxsgl.batch.sampling import EDITS_LEN
from jaxsgl.engine.drafting.draft import DRAFT_DONATES, NO_DRAFTING, Drafting, DraftProgram, Ends, own_layers
from jaxsgl.engine.encoding import (
    BEGIN,
    ENCODE_DONATES,
    PART_DONATES,
    PART_KINDS,
    TAP,
    Between,
    call_shapes,
    make_encode,
    make_part,
)
from jaxsgl.engine.programs import Program, ProgramKey, ProgramSet, StageBytes
from jaxsgl.engine.running import SETTLE_DONATES, SettleProgram, Unsettled
from jaxsgl.engine.sampling.masking import MASKED_DONATES, copy_step, masked_step, score_step
from jaxsgl.engine.sampling.sampler import ACCEPTED_DONATES, RUN_ROWS, accept
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
from jaxsgl.engine.tables import set_pages, set_row
from jaxsgl.errors import JaxsglError
from jaxsgl.models import Decoder, Params
from jaxsgl.models.tensor_parallel import DATA_AXIS, TENSOR_AXIS, mesh_axes
from jaxsgl.weights import KvScales
from jaxsgl.weights.sharding import by_rank, logits_sharding, replicated
from pallas_kernels import KernelChoice
from pallas_kernels.delta_tokens import Sequences

SET_ROW, SET_PAGES = ProgramKey("set_row"), ProgramKey("set_pages")


@dataclass(frozen=True)
class ProgramSpec:
    """What all programs of one engine's steps share. Its methods make the programs.

    Attributes:
      graphdef: structure of the model.
      params: its parameters, as arrays or as `jax.ShapeDtypeStruct`s with shardings.
      state: what stays on the device, likewise.
      kernels: the backend of each operation.
      mesh: where everything lies.
      kv_scales: of a float8 KV cache; None for any other, and where all are 1.
      adapters: shapes and places of the adapters' pool, or None if the engine has none.
      tower: what the vision tower encodes, if there is one.
      masks: whether steps may be held to grammars.
      drafting: what drafts after steps.
      state_product: `[K', ...]` what layers with states make of a token, on all devices; None: no layer has any.
    """

    graphdef: nnx.GraphDef[Decoder]
    params: Params
    state: DeviceState
    kernels: KernelChoice
    mesh: Mesh
    kv_scales: KvScales | None = None
    adapters: list[dict[str, jax.ShapeDtypeStruct]] | None = None
    tower: TowerCapacity | None = None
    masks: bool = False
    drafting: Drafting = NO_DRAFTING
    state_product: jax.ShapeDtypeStruct | None = None

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.state.edit_tables.counts.shape[1]

    @property
    def num_logits(self) -> int:
        """V, and the padding that makes the devices' parts equal."""
        return -(-self.vocab_size // self.mesh.shape[TENSOR_AXIS]) * self.mesh.shape[TENSOR_AXIS]

    @property
    def mask_words(self) -> int:
        """Words of a row's mask."""
        return -(-self.vocab_size // 32)

    def step(self, bucket: Bucket) -> list[Program]:
        """The programs that a step of `bucket` runs, in order, without those for masks."""
        forward, *after = keys_of(bucket)
        assert isinstance(forward.shape, Bucket)
        programs = [self.forward(forward.shape)]
        if after:
            programs.append(self.sampling(bucket.sampling, bucket.num_choices))
        if after[1:]:
            programs.append(self.accepting(bucket.num_choices))
        if self.settles(bucket):
            programs.append(self.settling(bucket))
        if self.drafting.num_drafts:
            programs.append(self.draft(bucket))
        return programs

    def forward(self, bucket: Bucket) -> Program:
        """The forward program of `bucket`."""
        leaves, treedef = jax.tree.flatten(self.params)
        pool, pool_treedef = jax.tree.flatten(self.adapters)
        # Shardings take the places of arrays in trees.
        everywhere, sampling = cast(Any, by_rank(self.mesh)), cast(Any, by_rank(self.mesh, 1))
        state_shardings = jax.tree.map(lambda array: array.sharding, self.state)
        if bucket.num_steps > 1:
            program: Forward | DecodeSteps = make_decode_steps(
                self.graphdef, treedef, bucket, self.kernels, self.kv_scales, pool_treedef
            )
            shardings: Forwarded | Decoded = Decoded(state_shardings, everywhere)
        else:
            program = make_forward(
                self.graphdef, treedef, bucket, self.kernels, self.kv_scales, pool_treedef, self.drafting
            )
            logits: Any = logits_sharding(self.mesh)
            found, runs = of_forward(bucket, everywhere), everywhere if bucket.kind == "verify" else None
            ends = everywhere if self.drafting.num_drafts else None
            unsettled: Any = Unsettled(cast(Any, self._product_sharding), everywhere) if self.settles(bucket) else None
            shardings = Forwarded(state_shardings, everywhere, logits, sampling, found, runs, ends, unsettled)
        draft_leaves = jax.tree.leaves(self.drafting.params)
        of_adapters: Any = pool if bucket.adapter_columns else ()
        arguments = leaves, self.state, self._int32_of_ranks(packed_len(bucket)), of_adapters, draft_leaves
        return Program(ProgramKey("forward", bucket), program, arguments, shardings, FORWARD_DONATES, self.mesh)

    def accepting(self, num_tokens: int) -> Program:
        """The program that keeps what stands of `num_tokens` tokens of a verify step, which were not greedy ones."""
        arguments = self._int32(num_tokens), self._int32(RUN_ROWS, num_tokens), self.state.last_tokens
        everywhere = replicated(self.mesh)
        return Program(_accepted(num_tokens), accept, arguments, everywhere, ACCEPTED_DONATES, self.mesh)

    def settles(self, bucket: Bucket) -> bool:
        """Whether a program moves states after a step of `bucket`, once it is known which tokens stand."""
        return bucket.kind == "verify" and self.state_product is not None

    def settling(self, bucket: Bucket) -> Program:
        """The program that moves states over the tokens of a step of `bucket` that stand."""
        leaves, treedef = jax.tree.flatten(self.params)
        product, running = self.state_product, self.state.running
        assert product is not None and running is not None
        one: Any = jax.ShapeDtypeStruct(
            (bucket.num_tokens, *product.shape), product.dtype, sharding=self._product_sharding
        )
        rows: Any = self._int32(bucket.num_seqs)
        kept: Any = self._int32(MAX_SNAPSHOTS if bucket.snapshots else 0, bucket.num_seqs)
        seqs = Sequences(cast(Any, self._int32(bucket.num_seqs + 1)), rows, rows, rows, kept, kept)
        arguments = leaves, running, Unsettled((one,) * len(running.inputs), seqs), self._int32(bucket.num_choices)
        shardings = jax.tree.map(lambda array: array.sharding, running)
        program = SettleProgram(self.graphdef, treedef, self.kernels.delta_decode)
        return Program(settle_key(bucket), program, arguments, shardings, SETTLE_DONATES, self.mesh)

    @property
    def _product_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(None, mesh_axes("key_heads", self.mesh)))

    def draft(self, bucket: Bucket) -> Program:
        """The program that drafts after a step of `bucket`."""
        leaves, treedef = jax.tree.flatten(self.params)
        draft_leaves, draft_treedef = jax.tree.flatten(self.drafting.params)
        program = DraftProgram(self.drafting, self.graphdef, treedef, draft_treedef, self.kernels)
        choices: Any = self._int32(bucket.num_choices)
        rows: Any = self._int32(bucket.num_seqs)
        state, ends = self.state, Ends(rows, choices, choices)
        kv = own_layers(state.kv, self.drafting)
        arguments = leaves, draft_leaves, kv, state.page_table, state.last_tokens, choices, ends
        shardings = jax.tree.map(lambda array: array.sharding, kv), replicated(self.mesh)
        return Program(draft_key(bucket), program, arguments, shardings, DRAFT_DONATES, self.mesh)

    def sampling(self, kind: str, num_seqs: int) -> Program:
        """The program of `kind`, "sampled", "filtered" or "featured", for `num_seqs` padded sequences.

        Here and for masks, that is the number of tokens to choose: `Bucket.num_choices`.
        """
        key, everywhere = ProgramKey(kind, num_seqs), by_rank(self.mesh)
        arguments: tuple[Any, ...] = self._logits(num_seqs), self._sampling(num_seqs), self.state.last_tokens
        if kind == "featured":
            arguments += (self.state.edit_tables, self._int32_of_ranks(num_seqs))
            return Program(key, featured_step, arguments, everywhere, FEATURED_DONATES, self.mesh)
        program = self._bound({"sampled": sample_step, "filtered": filtered_step}[kind])
        return Program(key, program, arguments, everywhere, SAMPLING_DONATES, self.mesh)

    def masking(self, num_seqs: int) -> list[Program]:
        """The programs that a step of `num_seqs` padded sequences runs besides if grammars hold it; see masking.py."""
        copied, masked, scored = mask_keys(num_seqs)
        logits, in_parts = self._logits(num_seqs), logits_sharding(self.mesh)
        packed, tokens = self._sampling(num_seqs), self._int32_of_ranks(num_seqs)
        masks = self._of_ranks((num_seqs, self.mask_words), jnp.uint32)
        return [
            Program(copied, copy_step, (logits,), in_parts, (), self.mesh),
            Program(
                masked,
                masked_step,
                (logits, packed, masks),
                (in_parts, by_rank(self.mesh, 1)),
                MASKED_DONATES,
                self.mesh,
            ),
            Program(
                scored,
                self._bound(score_step),
                (logits, tokens, self.state.edit_tables.edits, tokens),
                by_rank(self.mesh),
                (),
                self.mesh,
            ),
        ]

    def encode(self, bucket: EncodeBucket) -> Program:
        """The program that runs the vision tower on `bucket`."""
        assert self.tower is not None and self.state.images is not None
        leaves, treedef = jax.tree.flatten(self.params)
        program = make_encode(self.graphdef, treedef, bucket.num_bins)
        arguments = (leaves, self.state.images, *call_shapes(bucket, self.tower, self.mesh))
        key = ProgramKey("encode", bucket)
        return Program(key, program, arguments, replicated(self.mesh), ENCODE_DONATES, self.mesh)

    def encode_parts(self, bucket: EncodeBucket) -> list[Program]:
        """The programs that run the vision tower on `bucket` in parts: `PART_KINDS`, but for taps that it lacks."""
        assert self.tower is not None and self.state.images is not None
        leaves, treedef = jax.tree.flatten(self.params)
        pixels, columns, rows = call_shapes(bucket, self.tower, self.mesh)
        begin = make_part(BEGIN, self.graphdef, treedef)
        hidden = jax.eval_shape(begin, leaves, pixels, columns).hidden
        between: Any = Between(cast(Any, self._placed(hidden.shape, hidden.dtype)), cast(Any, columns))
        number, images, everywhere = self._int32(), self.state.images, cast(Any, replicated(self.mesh))
        arguments: dict[str, tuple[Any, ...]] = {
            "encode begin": (leaves, pixels, columns),
            "encode layer": (leaves, between, number),
            "encode tap": (leaves, images, between.hidden, rows, number),
            "encode end": (leaves, images, between.hidden, rows),
        }
        return [
            Program(
                ProgramKey(kind, bucket),
                make_part(kind, self.graphdef, treedef),
                arguments[kind],
                Between(everywhere, everywhere) if kind in PART_KINDS[:2] else everywhere,
                PART_DONATES[kind],
                self.mesh,
            )
            for kind in PART_KINDS
            if kind != TAP or self.tower.shape.num_taps
        ]

    def host_writes(self) -> list[Program]:
        """The programs that write a row of the edit tables, and entries of the page table."""
        everywhere, tables, table = by_rank(self.mesh), self.state.edit_tables, self.state.page_table
        row = (tables, self._int32_of_ranks(1 + EDITS_LEN + self.vocab_size))
        pages = (table, self._of_ranks((3, TABLE_CHANGES), jnp.int32, axis=1))
        return [
            Program(SET_ROW, set_row, row, everywhere, SET_ROW_DONATES, self.mesh),
            Program(SET_PAGES, set_pages, pages, everywhere, SET_PAGES_DONATES, self.mesh),
        ]

    def _bound(self, program: Any) -> Any:
        """`program`, given `vocab_size` if logits have padding after the vocabulary."""
        return program if self.num_logits == self.vocab_size else partial(program, vocab_size=self.vocab_size)

    def _logits(self, num_seqs: int) -> jax.ShapeDtypeStruct:
        dims = self.mesh.shape[DATA_AXIS] * num_seqs, self.num_logits
        return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=logits_sharding(self.mesh))

    def _sampling(self, num_seqs: int) -> jax.ShapeDtypeStruct:
        return self._of_ranks((SAMPLING_ROWS, num_seqs), jnp.int32, axis=1)

    def _int32_of_ranks(self, length: int) -> jax.ShapeDtypeStruct:
        return self._of_ranks((length,), jnp.int32)

    def _of_ranks(self, of_rank: tuple[int, ...], dtype: Any, axis: int = 0) -> jax.ShapeDtypeStruct:
        """An array in which each rank has a part `of_rank`, along `axis` one after the other."""
        dims = [*of_rank]
        dims[axis] *= self.mesh.shape[DATA_AXIS]
        return jax.ShapeDtypeStruct(tuple(dims), dtype, sharding=by_rank(self.mesh, axis))

    def _int32(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self._placed(shape, jnp.int32)

    def _placed(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(self.mesh))


def keys_of(bucket: Bucket) -> list[ProgramKey]:
    """The programs that a step of `bucket` runs, in order, without those for masks."""
    if bucket.num_steps > 1:  # each step needs the tokens of the one before, so the program samples itself
        return [ProgramKey("forward", bucket)]
    keys = [ProgramKey("forward", replace(bucket, sampled=False, featured=False, filtered=False))]
    if bucket.sampled:
        keys.append(ProgramKey(bucket.sampling, bucket.num_choices))
    if bucket.sampled and bucket.kind == "verify":
        keys.append(_accepted(bucket.num_choices))
    return keys


def draft_key(bucket: Bucket) -> ProgramKey:
    """The program that drafts after steps of `bucket`; the sequences of a verify step follow from its tokens."""
    return ProgramKey("draft after verify" if bucket.kind == "verify" else "draft", bucket.num_choices)


def settle_key(bucket: Bucket) -> ProgramKey:
    """The program that moves states after steps of `bucket`; the sequences of a verify step follow from its tokens."""
    return ProgramKey("settled", bucket.num_choices)


def _accepted(num_tokens: int) -> ProgramKey:
    return ProgramKey("accepted", num_tokens)


def mask_keys(num_seqs: int) -> tuple[ProgramKey, ProgramKey, ProgramKey]:
    """The programs that copy logits, apply masks to them and score tokens by the copy."""
    return ProgramKey("copied", num_seqs), ProgramKey("masked", num_seqs), ProgramKey("scored", num_seqs)


def all_programs(spec: ProgramSpec, buckets: BucketSet) -> Iterator[Program]:
    """Yields every program of steps and of the tower, in the order of warm-up; some of them more than once."""
    for encode in reversed(buckets.encode):  # the largest first
        yield spec.encode(encode)
    for encode in buckets.encode_in_parts:
        yield from spec.encode_parts(encode)
    for bucket in buckets.all():
        yield from spec.step(bucket)
    yield from spec.host_writes()
    if spec.masks:
        for num_seqs in mask_sizes(buckets):
            yield from spec.masking(num_seqs)


def largest_programs(spec: ProgramSpec, buckets: BucketSet) -> Iterator[Program]:
    """Yields the programs that take most memory: of the largest steps, and the largest call of the tower."""
    if buckets.encode:
        yield spec.encode(buckets.encode[-1])
    for bucket in buckets.largest():
        yield from spec.step(bucket)
        if spec.masks and len(keys_of(bucket)) > 1:
            yield from spec.masking(bucket.num_choices)


def mask_sizes(buckets: BucketSet) -> list[int]:
    """The numbers of choices that steps with masks may have: those of steps that sample in a program of their own."""
    return sorted({bucket.num_choices for bucket in buckets.all() if len(keys_of(bucket)) > 1})


def all_keys(buckets: BucketSet) -> list[ProgramKey]:
    """The programs that warm-up compiles for any flags: all but those for masks. Not each tower has taps."""
    of_tower = [ProgramKey("encode", bucket) for bucket in reversed(buckets.encode)]
    of_tower += [ProgramKey(kind, bucket) for bucket in buckets.encode_in_parts for kind in PART_KINDS]
    of_steps = (key for bucket in buckets.all() for key in keys_of(bucket))
    return list(dict.fromkeys([*of_tower, *of_steps, SET_ROW, SET_PAGES]))


def step_bytes(programs: ProgramSet, spec: ProgramSpec, buckets: Iterable[Bucket]) -> int:
    """Device memory that the largest step of `buckets`, or call of the tower, takes next to parameters and state.

    That is a program's temporaries and outputs, together with the outputs of the programs of the step before it. What
    a program donates and returns is part of the state.
    """

    def stages(bucket: Bucket) -> list[StageBytes]:
        of_draft = [programs.bytes_of(draft_key(bucket))] if spec.drafting.num_drafts else []
        of_states = [programs.bytes_of(settle_key(bucket))] if spec.settles(bucket) else []
        return [*of_choice(bucket), *of_states, *of_draft]

    def of_choice(bucket: Bucket) -> list[StageBytes]:
        forward, *after = (programs.bytes_of(key) for key in keys_of(bucket))
        if not spec.masks or not after:
            return [forward, *after]
        copied, masked, scored = (programs.bytes_of(key) for key in mask_keys(bucket.num_choices))
        words = StageBytes(4 * spec.mask_words * bucket.num_choices, 0)
        return [forward, words, copied, masked, *after, scored]

    kinds = {kind: [key for key in programs.compilations if key.kind == kind] for kind in ("encode", BEGIN)}
    of_steps = (_most_bytes(stages(bucket)) for bucket in buckets)
    of_tower = (_most_bytes([programs.bytes_of(key)]) for key in kinds["encode"])
    between = max((programs.bytes_of(key).kept for key in kinds[BEGIN]), default=0)
    return max((*of_steps, *of_tower)) + between


def _most_bytes(stages: Iterable[StageBytes]) -> int:
    held = most = 0
    for stage in stages:
        held += stage.kept
        most = max(most, held + stage.temporary)
    return most


class StepPrograms:
    """Finds the programs of a step by its bucket, those of the tower and those that the host's writes need.

    Args:
      programs: the engine's, with all of `all_programs`.
      spec, buckets: what they were made from.
    """

    def __init__(self, programs: ProgramSet, spec: ProgramSpec, buckets: BucketSet) -> None:
        self.spec = spec
        self.buckets = buckets
        self._programs = programs
        self.set_row, self.set_pages = programs[SET_ROW], programs[SET_PAGES]
        # One look-up per step instead of building keys.
        self._of_bucket = {bucket: tuple(programs[key] for key in keys_of(bucket)) for bucket in buckets.all()}

    @property
    def step_bytes(self) -> int:
        """Device memory that the largest step takes next to parameters and state."""
        return step_bytes(self._programs, self.spec, self._of_bucket)

    def of(self, bucket: Bucket) -> tuple[jax.stages.Compiled, ...]:
        """The forward program of `bucket`, and those that choose its tokens if it is sampled, in order."""
        try:
            return self._of_bucket[bucket]
        except KeyError:
            raise JaxsglError(
                f"no program was compiled for bucket [{bucket}]; the {len(self._of_bucket)} buckets of warm-up are "
                "the only shapes that may run"
            ) from None

    def settle(self, bucket: Bucket) -> jax.stages.Compiled:
        """The program that moves states after a step of `bucket`."""
        return self._programs[settle_key(bucket)]

    def draft(self, bucket: Bucket) -> jax.stages.Compiled:
        """The program that drafts after a step of `bucket`."""
        return self._programs[draft_key(bucket)]

    def masking(self, num_seqs: int) -> tuple[jax.stages.Compiled, jax.stages.Compiled, jax.stages.Compiled]:
        """The programs that copy logits, apply masks to them and score tokens by the copy."""
        copied, masked, scored = mask_keys(num_seqs)
        return self._programs[copied], self._programs[masked], self._programs[scored]

    def encode(self, bucket: EncodeBucket) -> jax.stages.Compiled:
        """The program that runs the vision tower on `bucket`."""
        return self._programs[ProgramKey("encode", bucket)]

    def encode_part(self, kind: str, call: EncodeInputs) -> jax.stages.Compiled:
        """A program of `PART_KINDS` for the shape of `call`."""
        return self._programs[ProgramKey(kind, call.bucket)]
