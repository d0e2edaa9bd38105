"""The step as a pure function, and the programs made of it: forward, several decode steps, sampling, featured sampling.

`step(params, state, arrays)` embeds, runs the layers, and takes the most likely tokens. A program unpacks its inputs
once, where it begins: everything that the host decides arrives in one packed int32 array. What stays on the device is
`DeviceState`, donated and returned. Knows nothing about how programs are compiled or when they run: `programs` compiles
them, `engine` runs them.

A sampled batch runs two programs: its forward program, then a small sampling program that depends on the number of
sequences only, and on whether any of them filters. That halves the number of large programs to compile. A featured
batch (penalties, bias, log-probabilities) runs the featured program in place of the sampling program. Neither waits for
the host, and a greedy batch runs one program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsgl.batch.inputs import Bucket, StepArrays, StepKind, unpack
from jaxsgl.batch.outputs import NO_OUTPUTS, StepOutputs
from jaxsgl.batch.sampling import COLUMNS, SamplingArrays
from jaxsgl.engine.attending import Pages
from jaxsgl.engine.drafting.draft import NO_DRAFTING, Drafting, Ends, Seen, own_layers, with_own_layers
from jaxsgl.engine.running import Running, Unsettled
from jaxsgl.engine.sampling import outputs, sampler, vocabulary
from jaxsgl.engine.state import DeviceState
from jaxsgl.engine.tables import EditTables, count_tokens, edit_logits, note_tokens, pages_of_seqs, scored_ids
from jaxsgl.models import Decoder, ImageTokens, ModelArch, Params, StepContext
from jaxsgl.models.layers import no_states
from jaxsgl.models.lora import ActiveAdapters, PoolWeights
from jaxsgl.weights import KvScales
from pallas_kernels import AttentionOptions, KernelChoice

SAMPLING_ROWS = 3 + len(COLUMNS)  # of `pack_sampling`


class Stepped(NamedTuple):
    """What a step yields.

    Attributes:
      state: with this step's keys and values in its pages, these pages in its page table, and `tokens` at their rows
        of `last_tokens`, unless the step verifies drafts.
      tokens: `[C]` int32, the most likely ones; 0 if the model doesn't generate. C is `Bucket.num_choices`.
      logits: `[C, V]` float32, with V = 0 if it doesn't.
      outputs: those of its bucket that the forward program makes.
      unsettled: of a step that verifies drafts, if layers keep states; else None.
    """

    state: DeviceState
    tokens: jax.Array
    logits: jax.Array
    outputs: StepOutputs[jax.Array]
    unsettled: Unsettled | None = None


class Forwarded(NamedTuple):
    """What a forward program returns.

    Attributes:
      state, logits, outputs: see `Stepped`.
      tokens: likewise; in a verify step -1 after the last one that a sequence keeps of the most likely ones.
      sampling: `[SAMPLING_ROWS, C]` int32, what a sampling program needs of the inputs; see `pack_sampling`.
      runs: what the program that accepts drafts needs of them, see `pack_runs`; None: there are none.
      ends: what the draft program needs of the sequences; None: no program drafts.
      unsettled: what the program that moves states needs of the tokens; None: it has moved them.
    """

    state: DeviceState
    tokens: jax.Array
    logits: jax.Array
    sampling: jax.Array
    outputs: StepOutputs[jax.Array]
    runs: jax.Array | None = None
    ends: Ends | None = None
    unsettled: Unsettled | None = None


class Decoded(NamedTuple):
    """What a program of several decode steps returns.

    Attributes:
      state: after the last step.
      tokens: `[num_steps, S]` int32.
    """

    state: DeviceState
    tokens: jax.Array


class Featured(NamedTuple):
    """What a featured program returns.

    Attributes:
      last_tokens: `[rows + 1]` int32, with `tokens` at their rows.
      edit_tables: with `tokens` counted.
      tokens: `[S]` int32.
      outputs: those that the program makes which chooses tokens.
    """

    last_tokens: jax.Array
    edit_tables: EditTables
    tokens: jax.Array
    outputs: StepOutputs[jax.Array]


Step: TypeAlias = Callable[..., Stepped]  # as `make_step` says
Forward: TypeAlias = Callable[..., Forwarded]  # as `make_forward` says
DecodeSteps: TypeAlias = Callable[..., Decoded]
FORWARD_DONATES = (1,)  # state
SAMPLING_DONATES = (2,)  # last_tokens
FEATURED_DONATES = (2, 3)  # last_tokens, edit_tables
SET_ROW_DONATES = (0,)  # tables
SET_PAGES_DONATES = (0,)  # page table


def make_step(
    graphdef: nnx.GraphDef[Decoder],
    kind: StepKind,
    kernels: KernelChoice,
    kv_scales: KvScales | None = None,
    *,
    states: bool = False,
    drafting: Drafting = NO_DRAFTING,
    mlp_tokens: int = 0,
    chooses: bool = False,
) -> Step:
    """`step(params, state, arrays, adapter_pool, draft_params, stream) -> Stepped` of the model.

    Padding writes only the dummy page and the dummy row. `adapter_pool` holds the adapters; None: no sequence has one.
    `draft_params` are those of `drafting`. `stream [T, D]` comes from the pipeline stage before; None: this is
    the first one. `mlp_tokens` and `chooses` are those of `Bucket`.
    """

    def step(
        params: Params,
        state: DeviceState,
        arrays: StepArrays[jax.Array],
        adapter_pool: PoolWeights | None,
        draft_params: Params,
        stream: jax.Array | None = None,
    ) -> Stepped:
        model = nnx.merge(graphdef, params)
        page_size = state.kv.k[0].shape[2]
        table, table_SP = _noted(state, arrays)
        biases = model.attention_biases()
        pages = Pages(state.kv, table_SP, arrays, kind, _options(model.arch), kernels, kv_scales, biases, chooses)
        running = None
        if state.running is not None:
            running = Running(state.running, arrays, kind, page_size, len(state.last_tokens) - 1, kernels.delta_decode)
        context = StepContext(
            pages.attend,
            no_states if running is None else running.recur,
            is_token=_is_token(state, arrays),
            adapters=_adapters(arrays, adapter_pool),
            images=_image_tokens(state, arrays, model.arch),
            kernels=kernels,
            mlp_tokens=mlp_tokens,
            experts=[] if states else None,
            streams=dict.fromkeys(drafting.taps),
        )
        ids = _token_ids(arrays.token_ids, state.last_tokens) if stream is None else stream
        hidden = model(ids, _rope_positions(arrays), context)
        found = NO_OUTPUTS if context.experts is None else outputs.of_tokens(hidden, context.experts)
        last = hidden if kind in ("decode", "verify") else _last_of_each(hidden, arrays.query_offsets)
        last_tokens = state.last_tokens
        if model.arch.generates:
            logits = model.logits(last)
            tokens = vocabulary.greedy(logits)
            if kind != "verify":
                last_tokens = last_tokens.at[arrays.sample_rows].set(tokens)
        else:
            logits, tokens = jnp.zeros((len(last), 0), jnp.float32), jnp.zeros(len(last), jnp.int32)
        found = outputs.of_heads(model, hidden, last, logits if model.arch.generates else None, arrays, found)
        kv = pages.buffers()
        seen = Seen(model, ids, hidden, context.streams, arrays, kind, table_SP, kernels)
        kv = with_own_layers(kv, drafting.read(draft_params, seen, own_layers(kv, drafting)))
        kept = None if running is None else running.buffers()
        unsettled = None if running is None else running.unsettled()
        state = DeviceState(kv, table, last_tokens, state.edit_tables, state.images, kept)
        return Stepped(state, tokens, logits, found, unsettled)

    return step


def make_forward(
    graphdef: nnx.GraphDef[Decoder],
    treedef: Any,
    bucket: Bucket,
    kernels: KernelChoice,
    kv_scales: KvScales | None = None,
    pool_treedef: Any = None,
    drafting: Drafting = NO_DRAFTING,
) -> Forward:
    """`forward(params, state, packed) -> Forwarded` for `bucket`, whether it is `sampled` and `featured` or not.

    params: leaves of the model's parameters, whose structure is `treedef` (a flat list costs less per call). packed:
    `[packed_len(bucket)]` int32. Then come the leaves of the adapters' pool, whose structure is
    `pool_treedef`, in a bucket with adapter columns, else none; and those of `drafting`, if it has any.
    A pipeline stage after the first has neither, and then what the stage before passes on.
    """
    step = make_step(
        graphdef, bucket.kind, kernels, kv_scales,
        states=bucket.states, drafting=drafting, mlp_tokens=bucket.mlp_tokens, chooses=bucket.chooses,
    )  # fmt: skip
    draft_treedef = jax.tree.structure(drafting.params)

    def forward(
        params: list[jax.Array],
        state: DeviceState,
        packed: jax.Array,
        adapter_leaves: Sequence[jax.Array] = (),
        draft_leaves: Sequence[jax.Array] = (),
        stream: jax.Array | None = None,
    ) -> Forwarded:
        arrays = unpack(packed, bucket)
        adapters = jax.tree.unflatten(pool_treedef, adapter_leaves) if bucket.adapter_columns else None
        draft_params = jax.tree.unflatten(draft_treedef, draft_leaves)
        out = step(jax.tree.unflatten(treedef, params), state, arrays, adapters, draft_params, stream)
        ends = drafting.ends(arrays, bucket.kind)
        if bucket.kind == "verify":
            return _verified(out, arrays)._replace(ends=ends)
        sampling = pack_sampling(arrays, out.tokens)
        return Forwarded(out.state, out.tokens, out.logits, sampling, out.outputs, ends=ends)

    return forward


class Passed(NamedTuple):
    """What the program of a pipeline stage returns, unless it is the last one.

    Attributes:
      state: see `Stepped`.
      stream: `[T, D]` the residual stream, for the next stage.
    """

    state: DeviceState
    stream: jax.Array


Passing: TypeAlias = Callable[..., Passed]  # as `make_passing` says


def make_passing(
    graphdef: nnx.GraphDef[Decoder],
    treedef: Any,
    bucket: Bucket,
    kernels: KernelChoice,
    kv_scales: KvScales | None = None,
) -> Passing:
    """`passing(params, state, packed, stream) -> Passed` of a pipeline stage that is not the last one, for `bucket`.

    Arguments as for `make_forward`; `stream [T, D]` comes from the stage before; None: this is the first one.
    """

    def passing(
        params: list[jax.Array], state: DeviceState, packed: jax.Array, stream: jax.Array | None = None
    ) -> Passed:
        arrays = unpack(packed, bucket)
        model = nnx.merge(graphdef, jax.tree.unflatten(treedef, params))
        table, table_SP = _noted(state, arrays)
        options = _options(model.arch)
        pages = Pages(state.kv, table_SP, arrays, bucket.kind, options, kernels, kv_scales, chooses=bucket.chooses)
        ids = arrays.token_ids if stream is None else stream  # ids that the host knows
        context = StepContext(pages.attend, is_token=_is_token(state, arrays), kernels=kernels)
        given = model(ids, _rope_positions(arrays), context)
        return Passed(state._replace(kv=pages.buffers(), page_table=table), given)

    return passing


def _noted(state: DeviceState, arrays: StepArrays[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The page table with the pages of a step's tokens, and `[S, P]` the pages of its sequences."""
    page_size = state.kv.k[0].shape[2]
    token_rows = arrays.rows if arrays.token_rows is None else arrays.token_rows
    table = note_tokens(state.page_table, token_rows, arrays.positions, arrays.slots, page_size)
    return table, pages_of_seqs(table, arrays.rows, arrays.lengths, page_size)


def _options(arch: ModelArch) -> list[AttentionOptions]:
    """Those of each layer with attention."""
    return [arch.attention_options(layer) for layer in arch.attention_layers]


def _verified(out: Stepped, arrays: StepArrays[jax.Array]) -> Forwarded:
    """What the forward program of a verify step returns: drafts stand by the most likely tokens."""
    runs = sampler.pack_runs(arrays)
    last_tokens, tokens = sampler.accept(out.tokens, runs, out.state.last_tokens)
    dummy_rows = jnp.full_like(arrays.positions, len(last_tokens) - 1)
    of_choices = replace(arrays, lengths=arrays.positions + 1, sample_rows=dummy_rows)
    sampling = pack_sampling(of_choices, out.tokens)
    state = out.state._replace(last_tokens=last_tokens)
    return Forwarded(state, tokens, out.logits, sampling, out.outputs, runs, unsettled=out.unsettled)


def make_decode_steps(
    graphdef: nnx.GraphDef[Decoder],
    treedef: Any,
    bucket: Bucket,
    kernels: KernelChoice,
    kv_scales: KvScales | None = None,
    pool_treedef: Any = None,
) -> DecodeSteps:
    """`decode_steps(params, state, packed) -> Decoded` for `bucket`; arguments as for `make_forward`.

    A loop around the step: each step decodes the tokens of the one before, and the host launches and reads once for all
    of them. It compiles as fast as one step, and the pages stay in their buffers.
    """
    step = make_step(graphdef, bucket.kind, kernels, kv_scales, chooses=bucket.chooses)

    def decode_steps(
        params: list[jax.Array],
        state: DeviceState,
        packed: jax.Array,
        adapter_leaves: Sequence[jax.Array] = (),
        draft_leaves: Sequence[jax.Array] = (),  # none: nothing drafts where several steps are launched at once
    ) -> Decoded:
        first = unpack(packed, bucket)

        def one(state: DeviceState, i: jax.Array) -> tuple[DeviceState, jax.Array]:
            # Behind the barrier weights seem to depend on the step. Otherwise XLA would convert them to other formats
            # before the loop, that is, copy them, where a single step converts as it multiplies.
            weights, leaves, i = jax.lax.optimization_barrier((params, adapter_leaves, i))
            adapters = jax.tree.unflatten(pool_treedef, leaves) if bucket.adapter_columns else None
            arrays = arrays_of_step(first, i, state)
            out = step(jax.tree.unflatten(treedef, weights), state, arrays, adapters, NO_DRAFTING.params)
            if not bucket.sampled:
                return out.state, out.tokens
            sampling = SamplingArrays.unpack(arrays.sampling, jax.lax.bitcast_convert_type)
            tokens = vocabulary.sample(
                out.logits, sampling, arrays.lengths, out.tokens, filtered=True, vocab_size=_vocab_size(state)
            )
            last_tokens = out.state.last_tokens.at[arrays.sample_rows].set(tokens)
            return out.state._replace(last_tokens=last_tokens), tokens

        return Decoded(*jax.lax.scan(one, state, jnp.arange(bucket.num_steps)))

    return decode_steps


def arrays_of_step(first: StepArrays[jax.Array], i: jax.Array, state: DeviceState) -> StepArrays[jax.Array]:
    """The inputs of step `i` of several, from those of the first. A sequence past its last step is padding."""
    assert first.steps is not None
    dummy_row = len(state.last_tokens) - 1
    on = i < first.steps
    return replace(
        first,
        positions=jnp.where(on, first.positions + i, 0),
        rope_positions=None if first.rope_positions is None else jnp.where(on, first.rope_positions + i, 0),
        slots=first.slots[i],
        lengths=jnp.where(on, first.lengths + i, 0),
        rows=jnp.where(on, first.rows, dummy_row),
        sample_rows=jnp.where(on, first.sample_rows, dummy_row),
        snapshot_to=None if first.snapshot_to is None else jnp.where(on, first.snapshot_to, dummy_row),
    )


def sample_step(
    logits: jax.Array, packed: jax.Array, last_tokens: jax.Array, *, vocab_size: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Draws `(last_tokens, tokens [S])` in place of the greedy ones; `packed` is `Forwarded.sampling`.

    For batches in which no row filters. It reads the logits once more than a greedy step does. Logits behind the first
    `vocab_size` are padding; None: there is none.
    """
    return _sample_step(logits, packed, last_tokens, filtered=False, vocab_size=vocab_size)


def filtered_step(
    logits: jax.Array, packed: jax.Array, last_tokens: jax.Array, *, vocab_size: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """`sample_step` for batches in which rows may have top-k, top-p or min-p."""
    return _sample_step(logits, packed, last_tokens, filtered=True, vocab_size=vocab_size)


def _sample_step(
    logits: jax.Array, packed: jax.Array, last_tokens: jax.Array, *, filtered: bool, vocab_size: int | None
) -> tuple[jax.Array, jax.Array]:
    lengths, rows, best, sampling = unpack_sampling(packed)
    tokens = vocabulary.sample(logits, sampling, lengths, best, filtered=filtered, vocab_size=vocab_size)
    return last_tokens.at[rows].set(tokens), tokens


def featured_step(
    logits: jax.Array, packed: jax.Array, last_tokens: jax.Array, tables: EditTables, edit_rows: jax.Array
) -> Featured:
    """Like `sample_step`, but draws from logits edited by `tables` for `edit_rows [S]`, and scores the tokens."""
    lengths, rows, _, sampling = unpack_sampling(packed)

    def of_rows(
        logits: jax.Array, edit_rows: jax.Array, lengths: jax.Array, sampling: SamplingArrays[jax.Array]
    ) -> tuple[jax.Array, StepOutputs[jax.Array]]:
        edited = edit_logits(logits, tables, edit_rows, lengths)
        tokens = sampler.sample(edited, sampling, lengths, sampler.greedy(edited), filtered=True)
        return tokens, outputs.of_choice(logits, tokens, scored_ids(tables.edits, edit_rows))

    vocab_size = tables.counts.shape[1]
    tokens, found = vocabulary.by_rows(of_rows, logits, edit_rows, lengths, sampling, vocab_size=vocab_size)
    return Featured(last_tokens.at[rows].set(tokens), count_tokens(tables, edit_rows, tokens), tokens, found)


def _vocab_size(state: DeviceState) -> int:
    """V, without the padding that devices may have."""
    return state.edit_tables.counts.shape[1]


def pack_sampling(arrays: StepArrays[jax.Array], best: jax.Array) -> jax.Array:
    """`[SAMPLING_ROWS, C]` int32 for a sampling program: lengths, sample rows, `best`, the sampling arrays as bits.

    A length is the position of the drawn token: it follows all tokens that have KV. `best [S]` are the most likely
    tokens, which the sampling program then need not look for.
    """
    return jnp.concatenate([jnp.stack([arrays.lengths, arrays.sample_rows, best]), arrays.sampling])


def unpack_sampling(packed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, SamplingArrays[jax.Array]]:
    """What `pack_sampling` packed: `(lengths [S], sample_rows [S], best [S], sampling)`."""
    lengths, rows, best = packed[0], packed[1], packed[2]
    return lengths, rows, best, SamplingArrays.unpack(packed[3:], jax.lax.bitcast_convert_type)


def _token_ids(token_ids: jax.Array, last_tokens: jax.Array) -> jax.Array:
    """Ids `[T]`, where an id below 0 is replaced by the last token of row ~id, which only the device knows."""
    known = token_ids >= 0
    return jnp.where(known, token_ids, last_tokens[jnp.where(known, 0, ~token_ids)])


def _is_token(state: DeviceState, arrays: StepArrays[jax.Array]) -> jax.Array:
    """`[T]` which places hold tokens: padding is stored in the dummy page."""
    return arrays.slots >= state.kv.k[0].shape[2]


def _rope_positions(arrays: StepArrays[jax.Array]) -> jax.Array:
    """`[T]`, or `[3, T]` where tokens of images have rows and columns."""
    return arrays.positions if arrays.rope_positions is None else arrays.rope_positions


def _adapters(arrays: StepArrays[jax.Array], pool: PoolWeights | None) -> ActiveAdapters | None:
    """The adapters of a step's tokens; None: no sequence has one."""
    if pool is None:
        return None
    assert arrays.adapters is not None and arrays.column_owners is not None
    return ActiveAdapters(pool, arrays.adapters, arrays.column_owners)


def _image_tokens(state: DeviceState, arrays: StepArrays[jax.Array], arch: ModelArch) -> ImageTokens | None:
    """What the pool holds for the images of a step, if it may have any."""
    rows = arrays.pool_rows
    if rows is None:
        return None
    assert state.images is not None and arch.tower is not None
    gathered = state.images.at[rows].get(mode="promise_in_bounds")
    return ImageTokens(gathered, rows > 0, 1 + len(arch.tower.layers.taps))


def _last_of_each(hidden: jax.Array, query_offsets: jax.Array) -> jax.Array:
    """Hidden states `[S, D]` of each sequence's last token; of any token for padding sequences."""
    return hidden[jnp.maximum(query_offsets[1:] - 1, 0)]
