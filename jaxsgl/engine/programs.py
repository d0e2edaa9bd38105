"""The compiled programs of an engine, held by shape: a shape that warm-up didn't compile raises, it never compiles.

Called by `engine`. Knows what the programs' arguments look like, not what is in them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.batch.inputs import Bucket, packed_len
from jaxsgl.batch.sampling import EDITS_LEN
from jaxsgl.engine import edits
from jaxsgl.engine.edits import EditTables
from jaxsgl.engine.state import KvBuffers
from jaxsgl.engine.step import (
    FEATURED_DONATES,
    FORWARD_DONATES,
    SAMPLING_DONATES,
    SAMPLING_FIELDS,
    SET_ROW_DONATES,
    Decoded,
    DecodeSteps,
    Forward,
    Forwarded,
    featured_step,
    make_decode_steps,
    make_forward,
    sample_step,
)
from jaxsgl.engine.warmup import Compilation, compile_all
from jaxsgl.errors import JaxsglError
from jaxsgl.weights.sharding import replicated


@dataclass(frozen=True)
class ProgramSpec:
    """What all programs of one engine share.

    Attributes:
      graphdef: structure of the model.
      params: its state, of arrays or of `jax.ShapeDtypeStruct`s with shardings.
      kv: the pages, likewise.
      num_rows: rows of the last-token table, the dummy row left out.
      vocab_size: V.
      attention_backend: for the kernels.
      mesh: where everything lies.
    """

    graphdef: nnx.GraphDef
    params: nnx.State
    kv: KvBuffers
    num_rows: int
    vocab_size: int
    attention_backend: str
    mesh: Mesh

    def trace(self, key: ProgramKey) -> jax.stages.Traced:
        """The program of `key`, traced."""
        if isinstance(key.shape, Bucket):
            return self.trace_forward(key.shape)
        if key == SET_ROW:
            return self.trace_set_row()
        return self.trace_featured(key.shape) if key.kind == "featured" else self.trace_sampling(key.shape)

    def trace_forward(self, bucket: Bucket) -> jax.stages.Traced:
        """The forward program of `bucket`, traced."""
        leaves, treedef = jax.tree.flatten(self.params)
        everywhere = replicated(self.mesh)
        kv_shardings = jax.tree.map(lambda pages: pages.sharding, self.kv)
        if bucket.num_steps > 1:
            program: Forward | DecodeSteps = make_decode_steps(self.graphdef, treedef, bucket, self.attention_backend)
            shardings: Forwarded | Decoded = Decoded(kv_shardings, everywhere, everywhere)
        else:
            program = make_forward(self.graphdef, treedef, bucket, self.attention_backend)
            scores = everywhere if bucket.kind == "score" else None
            shardings = Forwarded(kv_shardings, everywhere, everywhere, everywhere, everywhere, scores)
        jitted = jax.jit(program, donate_argnums=FORWARD_DONATES, out_shardings=shardings)
        return jitted.trace(leaves, self.kv, self._int32(self.num_rows + 1), self._int32(packed_len(bucket)))

    def trace_sampling(self, num_seqs: int) -> jax.stages.Traced:
        """The sampling program for `num_seqs` padded sequences, traced."""
        jitted = jax.jit(sample_step, donate_argnums=SAMPLING_DONATES, out_shardings=replicated(self.mesh))
        return jitted.trace(*self._sampling_arguments(num_seqs))

    def trace_featured(self, num_seqs: int) -> jax.stages.Traced:
        """The program of sampling features for `num_seqs` padded sequences, traced."""
        jitted = jax.jit(featured_step, donate_argnums=FEATURED_DONATES, out_shardings=replicated(self.mesh))
        return jitted.trace(*self._sampling_arguments(num_seqs), self._tables(), self._int32(num_seqs))

    def trace_set_row(self) -> jax.stages.Traced:
        """The program that writes a row of the edit tables, traced."""
        jitted = jax.jit(edits.set_row, donate_argnums=SET_ROW_DONATES, out_shardings=replicated(self.mesh))
        return jitted.trace(self._tables(), self._int32(1 + EDITS_LEN + self.vocab_size))

    def _sampling_arguments(self, num_seqs: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        logits = jax.ShapeDtypeStruct((num_seqs, self.vocab_size), jnp.float32, sharding=replicated(self.mesh))
        return logits, self._int32(len(SAMPLING_FIELDS), num_seqs), self._int32(self.num_rows + 1)

    def _tables(self) -> EditTables:
        rows = self.num_rows + 1
        return EditTables(self._int32(rows, EDITS_LEN), self._int32(rows, self.vocab_size))

    def _int32(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=replicated(self.mesh))


class ProgramKey(NamedTuple):
    """Which program: "forward" by its bucket, "sampling" or "featured" by its number of sequences, "set_row"."""

    kind: str
    shape: Bucket | int = 0


SET_ROW = ProgramKey("set_row")


def keys_of(bucket: Bucket) -> list[ProgramKey]:
    """The programs that a step of `bucket` runs, in order."""
    if bucket.num_steps > 1:  # they sample in between, so it is one program
        return [ProgramKey("forward", bucket)]
    keys = [ProgramKey("forward", replace(bucket, sampled=False, featured=False))]
    if bucket.sampled:
        keys.append(ProgramKey("featured" if bucket.featured else "sampling", bucket.num_seqs))
    return keys


def all_keys(buckets: BucketSet) -> list[ProgramKey]:
    """Every program that warm-up compiles, in its order."""
    return list(dict.fromkeys([*(key for bucket in buckets.all() for key in keys_of(bucket)), SET_ROW]))


class Programs:
    """The programs of all buckets, and the one that writes a row of the edit tables.

    Attributes:
      spec: what they were made from.
      compilations: by key, with what each took.
    """

    def __init__(self, spec: ProgramSpec, buckets: BucketSet, *, progress: bool) -> None:
        """Compiles everything."""
        self.spec = spec
        lowerings = {key: _lowering(spec, key) for key in all_keys(buckets)}
        self.compilations: Mapping[ProgramKey, Compilation] = compile_all(lowerings, progress=progress)
        self.set_row = self.compilations[SET_ROW].compiled
        # One look-up per step instead of building keys.
        self._of_bucket = {
            bucket: tuple(self.compilations[key].compiled for key in keys_of(bucket)) for bucket in buckets.all()
        }

    def __len__(self) -> int:
        return len(self.compilations)

    def of(self, bucket: Bucket) -> tuple[jax.stages.Compiled, ...]:
        """The forward program of `bucket`, and its sampling or featured program if it is sampled."""
        try:
            return self._of_bucket[bucket]
        except KeyError:
            raise JaxsglError(
                f"no program was compiled for bucket [{bucket}]; the {len(self._of_bucket)} buckets of warm-up are "
                "the only shapes that may run"
            ) from None


def _lowering(spec: ProgramSpec, key: ProgramKey) -> Callable[[], jax.stages.Lowered]:
    return lambda: spec.trace(key).lower()
