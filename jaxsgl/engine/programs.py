"""The compiled programs of an engine, held by shape: a shape that warm-up didn't compile raises, it never compiles.

Called by `engine`. Knows what the programs' arguments look like, not what is in them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.batch.inputs import Bucket, packed_len
from jaxsgl.engine.kv_buffers import KvBuffers
from jaxsgl.engine.mesh import replicated
from jaxsgl.engine.step import (
    FORWARD_DONATES,
    SAMPLING_DONATES,
    SAMPLING_FIELDS,
    Forwarded,
    make_forward,
    sample_step,
)
from jaxsgl.engine.warmup import compile_all
from jaxsgl.errors import JaxsglError


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

    def trace_forward(self, bucket: Bucket) -> jax.stages.Traced:
        """The forward program of `bucket`, traced."""
        leaves, treedef = jax.tree.flatten(self.params)
        everywhere = replicated(self.mesh)
        kv_shardings = jax.tree.map(lambda pages: pages.sharding, self.kv)
        jitted = jax.jit(
            make_forward(self.graphdef, treedef, bucket, self.attention_backend),
            donate_argnums=FORWARD_DONATES,
            out_shardings=Forwarded(kv_shardings, everywhere, everywhere, everywhere, everywhere),
        )
        return jitted.trace(leaves, self.kv, self._int32(self.num_rows + 1), self._int32(packed_len(bucket)))

    def trace_sampling(self, num_seqs: int) -> jax.stages.Traced:
        """The sampling program for `num_seqs` padded sequences, traced."""
        jitted = jax.jit(sample_step, donate_argnums=SAMPLING_DONATES, out_shardings=replicated(self.mesh))
        logits = jax.ShapeDtypeStruct((num_seqs, self.vocab_size), jnp.float32, sharding=replicated(self.mesh))
        return jitted.trace(logits, self._int32(len(SAMPLING_FIELDS), num_seqs), self._int32(self.num_rows + 1))

    def _int32(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=replicated(self.mesh))


class ProgramKey(NamedTuple):
    """Which program: a forward one by its bucket (`sampled` False), or a sampling one by its number of sequences."""

    kind: str
    shape: Bucket | int


def keys_of(bucket: Bucket) -> list[ProgramKey]:
    """The programs that a step of `bucket` runs, in order."""
    keys = [ProgramKey("forward", replace(bucket, sampled=False))]
    return [*keys, ProgramKey("sampling", bucket.num_seqs)] if bucket.sampled else keys


class Programs:
    """The programs of all buckets."""

    def __init__(self, spec: ProgramSpec, buckets: BucketSet, *, progress: bool) -> None:
        """Compiles everything."""
        keys = dict.fromkeys(key for bucket in buckets.all() for key in keys_of(bucket))
        self._compiled = compile_all({key: _lowering(spec, key) for key in keys}, progress=progress)
        # One look-up per step instead of building keys.
        self._of_bucket = {bucket: tuple(self._compiled[key] for key in keys_of(bucket)) for bucket in buckets.all()}

    def __len__(self) -> int:
        return len(self._compiled)

    def of(self, bucket: Bucket) -> tuple[jax.stages.Compiled, ...]:
        """The forward program of `bucket`, and its sampling program if it is sampled."""
        try:
            return self._of_bucket[bucket]
        except KeyError:
            raise JaxsglError(
                f"no program was compiled for bucket [{bucket}]; the {len(self._of_bucket)} buckets of warm-up are "
                "the only shapes that may run"
            ) from None


def _lowering(spec: ProgramSpec, key: ProgramKey) -> Callable[[], Any]:
    if isinstance(key.shape, Bucket):
        bucket = key.shape
        return lambda: spec.trace_forward(bucket).lower()
    num_seqs = key.shape
    return lambda: spec.trace_sampling(num_seqs).lower()
