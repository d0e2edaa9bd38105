"""Programs for steps whose tokens are held to grammars: masks between the forward and the sampling program.

    forward -> logits -> masked_step(logits, packed, masks) -> the sampling program of any other step -> tokens
                   '---> copy_step(logits), if log-probabilities are wanted ------> score_step(copy, tokens)

Masks are written into the logits in place: on a CPU another array of that size costs four times as much as the mask.
Log-probabilities are the model's own, hence the copy.

`MaskPrograms` compiles them for every number of sequences when the first grammar comes: scheduler/grammar_queue.py has
`prepare` called in a thread, while requests with grammars wait. So a server without grammars neither compiles nor runs
them; what they will take of memory is counted at the start (`mask_bytes`). Called by `engine`.
"""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp

from jaxsgl.engine import vocabulary
from jaxsgl.engine.programs import Programs, ProgramSpec, StageBytes
from jaxsgl.engine.sampler import Logprobs, score
from jaxsgl.engine.step import SAMPLING_ROWS
from jaxsgl.engine.warmup import CompileCounter
from jaxsgl.models.tensor_parallel import num_parts, part_index
from jaxsgl.weights.sharding import logits_sharding, replicated

MASKED_DONATES = (0,)  # logits
_ROW_BYTES = 2048  # of temporaries whatever the vocabulary, as those of the likeliest tokens
BEST = 2  # row of the packed sampling inputs that holds the most likely tokens


def masked_step(logits: jax.Array, packed: jax.Array, masks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Takes from each row the tokens that its mask forbids; the results take the place of `logits` (donated), `packed`.

    Args:
      logits: `[S, V]` float32, this device's V.
      packed: `[SAMPLING_ROWS, S]` int32, as `pack_sampling` makes it.
      masks: `[S, ceil(V / 32)]` uint32, of the whole V; bit i % 32 of word i // 32 allows token i. No row is empty.
    """
    masked = jnp.where(_bits(masks, logits.shape[-1]), logits, -jnp.inf)
    return masked, packed.at[BEST].set(vocabulary.greedy(masked))


def copy_step(logits: jax.Array) -> jax.Array:
    """`logits`, to be kept."""
    return jnp.copy(logits)


def score_step(logits: jax.Array, tokens: jax.Array, *, vocab_size: int | None = None) -> Logprobs:
    """Log-probabilities of `tokens [S]` by `logits [S, V]`, which no mask has changed; padding as in `sample_step`."""
    return vocabulary.by_rows(score, logits, tokens, vocab_size=vocab_size)


def _bits(masks: jax.Array, vocab_size: int) -> jax.Array:
    """`[S, V]` bool, of this device's part of the vocabulary."""
    bits = (masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    flat = bits.reshape(len(masks), -1) != 0
    if num_parts() == 1:
        return flat[:, :vocab_size]
    padding = max(vocab_size * num_parts() - flat.shape[1], 0)  # logits' padding, which no mask allows
    flat = jnp.pad(flat, ((0, 0), (0, padding)))
    return jax.lax.dynamic_slice_in_dim(flat, part_index() * vocab_size, vocab_size, axis=1)


class MaskPrograms:
    """The compiled programs, by S, once they are prepared.

    Args:
      programs: of the other steps.
      compiles: isn't told of these.
    """

    def __init__(self, programs: Programs, compiles: CompileCounter) -> None:
        self._programs = programs
        self._compiles = compiles
        self._preparing = threading.Lock()
        self._masked: dict[int, jax.stages.Compiled] = {}
        self._copy: dict[int, jax.stages.Compiled] = {}
        self._score: dict[int, jax.stages.Compiled] = {}

    def __len__(self) -> int:
        return len(self._masked) + len(self._copy) + len(self._score)

    def prepare(self) -> None:
        """Compiles what isn't compiled yet; from any thread, in a few seconds."""
        spec = self._programs.spec
        with self._preparing, self._compiles.not_counting():
            for num_seqs in sorted({bucket.num_seqs for bucket in self._programs.buckets.all()}):
                if num_seqs not in self._masked:
                    self._copy[num_seqs] = trace_copy(spec, num_seqs).lower().compile()
                    self._score[num_seqs] = trace_score(spec, num_seqs).lower().compile()
                    self._masked[num_seqs] = trace_masked(spec, num_seqs).lower().compile()

    def mask(self, logits: jax.Array, packed: jax.Array, masks: Any) -> tuple[jax.Array, jax.Array]:
        """See `masked_step`; `logits` can't be used any more."""
        masked, changed = self._masked[len(logits)](logits, packed, masks)
        return masked, changed

    def copy(self, logits: jax.Array) -> jax.Array:
        """See `copy_step`."""
        copied: jax.Array = self._copy[len(logits)](logits)
        return copied

    def score(self, logits: jax.Array, tokens: jax.Array) -> Logprobs:
        """See `score_step`."""
        scores: Logprobs = self._score[len(logits)](logits, tokens)
        return scores


def mask_bytes(spec: ProgramSpec, num_seqs: int) -> StageBytes:
    """What a masked step of `num_seqs` takes at most of each device, beside its other programs.

    It keeps the masks, and a copy of the logits for log-probabilities. Temporaries are bounded by what compilers make
    of these programs (`scripts/compile_targets.py`): hardly any on GPUs and CPUs, two arrays like the logits on TPUs.
    """
    num_logits = num_seqs * spec.num_logits // spec.mesh.size
    per_logit = 8 if spec.mesh.devices.flat[0].platform == "tpu" else 1
    temporary = per_logit * num_logits + num_seqs * _ROW_BYTES
    return StageBytes(4 * num_logits + 4 * num_seqs * -(-spec.vocab_size // 32), temporary)


def trace_masked(spec: ProgramSpec, num_seqs: int) -> jax.stages.Traced:
    """`masked_step` for `num_seqs` padded sequences, traced."""
    logits, packed = _logits(spec, num_seqs), _replicated(spec, jnp.int32, SAMPLING_ROWS, num_seqs)
    masks = _replicated(spec, jnp.uint32, num_seqs, -(-spec.vocab_size // 32))
    shardings = (logits_sharding(spec.mesh), replicated(spec.mesh))
    return spec.traced(masked_step, MASKED_DONATES, (logits, packed, masks), shardings)


def trace_copy(spec: ProgramSpec, num_seqs: int) -> jax.stages.Traced:
    """`copy_step` for `num_seqs` padded sequences, traced."""
    return spec.traced(copy_step, (), (_logits(spec, num_seqs),), logits_sharding(spec.mesh))


def trace_score(spec: ProgramSpec, num_seqs: int) -> jax.stages.Traced:
    """`score_step` for `num_seqs` padded sequences, traced."""
    arguments = (_logits(spec, num_seqs), _replicated(spec, jnp.int32, num_seqs))
    return spec.traced(spec.told_of_padding(score_step), (), arguments, replicated(spec.mesh))


def _logits(spec: ProgramSpec, num_seqs: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((num_seqs, spec.num_logits), jnp.float32, sharding=logits_sharding(spec.mesh))


def _replicated(spec: ProgramSpec, dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(spec.mesh))
