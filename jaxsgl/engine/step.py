"""One step of the engine as pure functions: forward (embed, layers, logits, greedy tokens), then sampling.

Everything that the host decides arrives in one packed int32 array; everything that stays on the device (parameters,
KV pages, last tokens) is an argument, and what it changes is donated and returned. Knows nothing about how programs
are compiled or when they run: `programs` compiles, `engine` runs.

Two programs, not one: a sampled batch runs its forward program and then a small sampling program, which depends on
the number of sequences only. Half as many models to compile, and what sampling grows doesn't multiply them: penalties,
bias and log-probabilities are one more small program, the featured one, in place of the sampling program. Neither
waits for the host, and a greedy batch runs one program.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsgl.batch.inputs import FLOAT_FIELDS, Bucket, StepArrays, layout, packed_len
from jaxsgl.cache.pages import DUMMY_PAGE, slots_at
from jaxsgl.engine import edits, sampler
from jaxsgl.engine.edits import EditTables
from jaxsgl.engine.sampler import Logprobs, score, score_in_slices
from jaxsgl.engine.state import KvBuffers
from pallas_kernels import STORE_BACKENDS, paged_decode_attention, paged_extend_attention, store_kv

SAMPLING_FIELDS = ("lengths", "sample_rows", "top_k", "seeds", "temperature", "top_p", "min_p")


class Forwarded(NamedTuple):
    """What a forward program returns.

    Attributes:
      kv: all pages, with this step's keys and values.
      last_tokens: `[rows + 1]` int32, with `tokens` at their rows.
      tokens: `[S]` int32, the most likely ones.
      logits: `[S, V]` float32.
      sampling: `[7, S]` int32, the fields of SAMPLING_FIELDS as they came, for the sampling program.
      prompt_scores: `[T]` of the targets, from "score" programs only.
    """

    kv: KvBuffers
    last_tokens: jax.Array
    tokens: jax.Array
    logits: jax.Array
    sampling: jax.Array
    prompt_scores: Logprobs | None = None


class Featured(NamedTuple):
    """What a featured program returns.

    Attributes:
      last_tokens: `[rows + 1]` int32, with `tokens` at their rows.
      tables: with `tokens` counted.
      tokens: `[S]` int32.
      scores: `[S]` of the tokens.
    """

    last_tokens: jax.Array
    tables: EditTables
    tokens: jax.Array
    scores: Logprobs


Forward: TypeAlias = Callable[[list[jax.Array], KvBuffers, jax.Array, jax.Array], Forwarded]
FORWARD_DONATES = (1, 2)  # kv, last_tokens
SAMPLING_DONATES = (2,)  # last_tokens
FEATURED_DONATES = (2, 3)  # last_tokens, tables
SET_ROW_DONATES = (0,)  # tables


def make_forward(graphdef: nnx.GraphDef, treedef: Any, bucket: Bucket, attention_backend: str) -> Forward:
    """`forward(params, kv, last_tokens, packed) -> Forwarded` for `bucket`; neither `sampled` nor `featured` matters.

    params: leaves of the model's state, whose structure is `treedef` (a flat list costs less per call). kv: all pages.
    last_tokens: `[rows + 1]` int32, the newest token of each row, the dummy row last. packed: `[packed_len(bucket)]`
    int32. Padding writes only the dummy page and the dummy row.
    """

    def forward(params: list[jax.Array], kv: KvBuffers, last_tokens: jax.Array, packed: jax.Array) -> Forwarded:
        model = nnx.merge(graphdef, jax.tree.unflatten(treedef, params))
        arrays = unpack(packed, bucket)
        pages = Pages(kv, arrays, bucket, attention_backend)
        hidden = model(_token_ids(arrays.token_ids, last_tokens), arrays.positions, pages.attend)
        logits = model.logits(_last_of_each(hidden, arrays, bucket))
        tokens = sampler.greedy(logits)
        sampling = jnp.stack([_field(packed, bucket, name) for name in SAMPLING_FIELDS])
        last_tokens = last_tokens.at[arrays.sample_rows].set(tokens)
        scores = None if arrays.targets is None else score_in_slices(model.logits, hidden, arrays.targets)
        return Forwarded(pages.buffers(), last_tokens, tokens, logits, sampling, scores)

    return forward


def sample_step(logits: jax.Array, sampling: jax.Array, last_tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sampled `(last_tokens, tokens [S])` in place of the greedy ones; arguments as in `Forwarded`."""
    fields = _sampling_fields(sampling)
    tokens = _sample(logits, fields)
    return last_tokens.at[fields["sample_rows"]].set(tokens), tokens


def featured_step(
    logits: jax.Array, sampling: jax.Array, last_tokens: jax.Array, tables: EditTables, edit_rows: jax.Array
) -> Featured:
    """As `sample_step`, from logits as `tables` say for `edit_rows [S]`, and with log-probabilities of the tokens."""
    fields = _sampling_fields(sampling)
    tokens = _sample(edits.apply(logits, tables, edit_rows, fields["lengths"]), fields)
    return Featured(
        last_tokens.at[fields["sample_rows"]].set(tokens),
        edits.count(tables, edit_rows, tokens),
        tokens,
        score(logits, tokens),
    )


def _sampling_fields(sampling: jax.Array) -> dict[str, jax.Array]:
    fields = dict(zip(SAMPLING_FIELDS, sampling, strict=True))
    floats = {name: jax.lax.bitcast_convert_type(fields[name], jnp.float32) for name in FLOAT_FIELDS}
    return fields | floats


def _sample(logits: jax.Array, fields: dict[str, jax.Array]) -> jax.Array:
    return sampler.sample(
        logits,
        positions=fields["lengths"],  # the drawn token stands behind all that have KV
        **{name: fields[name] for name in ("top_k", "seeds", *FLOAT_FIELDS)},
    )


class Pages:
    """The KV pages during one trace: each layer replaces its pair, so that XLA sees one in-place update per buffer."""

    def __init__(self, kv: KvBuffers, arrays: StepArrays[jax.Array], bucket: Bucket, backend: str) -> None:
        self._k, self._v = list(kv.k), list(kv.v)
        self._arrays, self._bucket, self._backend = arrays, bucket, backend

    def attend(self, layer_index: int, q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array) -> jax.Array:
        """Stores this step's K and V of the layer, then attends over all of each sequence's; `[T, N, H]`."""
        a, backend = self._arrays, self._backend
        old = self._k[layer_index], self._v[layer_index]
        store_backend = backend if backend in STORE_BACKENDS else "auto"
        k_pages, v_pages = store_kv(*old, k_TKH, v_TKH, a.slots, backend=store_backend)
        self._k[layer_index], self._v[layer_index] = k_pages, v_pages
        if self._bucket.kind == "decode":
            return paged_decode_attention(q_TNH, k_pages, v_pages, a.page_table, a.lengths, backend=backend)
        return paged_extend_attention(
            q_TNH, k_pages, v_pages, a.page_table, a.lengths, a.query_offsets, backend=backend
        )

    def buffers(self) -> KvBuffers:
        """The pages as the layers left them."""
        return KvBuffers(tuple(self._k), tuple(self._v))


def unpack(packed: jax.Array, bucket: Bucket) -> StepArrays[jax.Array]:
    """The fields of `packed`, inside a jitted function; the host's twin is `host_views`."""

    def field(name: str) -> jax.Array:
        part = _field(packed, bucket, name)
        return jax.lax.bitcast_convert_type(part, jnp.float32) if name in FLOAT_FIELDS else part

    return StepArrays(**{name: field(name) for name in layout(bucket)})


def _field(packed: jax.Array, bucket: Bucket, name: str) -> jax.Array:
    """One field's bits."""
    offset, shape = layout(bucket)[name]
    return packed[offset : offset + math.prod(shape)].reshape(shape)


def _token_ids(token_ids: jax.Array, last_tokens: jax.Array) -> jax.Array:
    """Ids `[T]` with those that only the device knows filled in: an id below 0 is the last token of row ~id."""
    known = token_ids >= 0
    return jnp.where(known, token_ids, last_tokens[jnp.where(known, 0, ~token_ids)])


def _last_of_each(hidden: jax.Array, arrays: StepArrays[jax.Array], bucket: Bucket) -> jax.Array:
    """Hidden states `[S, D]` of each sequence's last token; of any token for padding sequences."""
    if bucket.kind == "decode":
        return hidden
    return hidden[jnp.maximum(arrays.query_offsets[1:] - 1, 0)]


class Decoded(NamedTuple):
    """What such a program returns.

    Attributes:
      kv: all pages, with the keys and values of all steps.
      last_tokens: `[rows + 1]` int32, with each sequence's last one.
      tokens: `[num_steps, S]` int32.
    """

    kv: KvBuffers
    last_tokens: jax.Array
    tokens: jax.Array


DecodeSteps: TypeAlias = Callable[[list[jax.Array], KvBuffers, jax.Array, jax.Array], Decoded]


def make_decode_steps(graphdef: nnx.GraphDef, treedef: Any, bucket: Bucket, attention_backend: str) -> DecodeSteps:
    """`decode_steps(params, kv, last_tokens, packed) -> Decoded` for `bucket`; arguments as for `step.make_forward`.

    A loop, not the step written `num_steps` times: it compiles as fast as one step, and the buffers of the pages stay
    where they are.
    """
    forward = make_forward(graphdef, treedef, replace(bucket, num_steps=1), attention_backend)

    def decode_steps(params: list[jax.Array], kv: KvBuffers, last_tokens: jax.Array, packed: jax.Array) -> Decoded:
        page_size, dummy_row = kv.k[0].shape[2], len(last_tokens) - 1

        def step(carry: tuple[KvBuffers, jax.Array], i: jax.Array) -> tuple[tuple[KvBuffers, jax.Array], jax.Array]:
            # Behind the barrier weights seem to depend on the step: else XLA would convert them to other formats before
            # the loop, that is, copy them, where a single step converts as it multiplies.
            weights, i = jax.lax.optimization_barrier((params, i))
            out = forward(weights, *carry, _inputs_of_step(packed, bucket, i, page_size, dummy_row))
            last_tokens, tokens = out.last_tokens, out.tokens
            if bucket.sampled:
                last_tokens, tokens = sample_step(out.logits, out.sampling, last_tokens)
            return (out.kv, last_tokens), tokens

        (kv, last_tokens), tokens = jax.lax.scan(step, (kv, last_tokens), jnp.arange(bucket.num_steps))
        return Decoded(kv, last_tokens, tokens)

    return decode_steps


def _inputs_of_step(packed: jax.Array, bucket: Bucket, i: jax.Array, page_size: int, dummy_row: int) -> jax.Array:
    """What a program of one step takes as step `i`; a sequence that has taken all its steps is padding by then."""
    first = unpack(packed, bucket)
    assert first.steps is not None
    on = i < first.steps
    positions = jnp.where(on, first.positions + i, 0)
    moved = {
        "positions": positions,
        "slots": jnp.where(on, slots_at(first.page_table, positions, page_size), DUMMY_PAGE),
        "lengths": jnp.where(on, first.lengths + i, 0),
        "sample_rows": jnp.where(on, first.sample_rows, dummy_row),
    }
    for name, values in moved.items():
        offset, _ = layout(bucket)[name]
        packed = packed.at[offset : offset + len(values)].set(values)
    return packed[: packed_len(replace(bucket, num_steps=1))]
