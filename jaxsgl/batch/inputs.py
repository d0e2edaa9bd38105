"""The inputs of one device step: arrays of fixed shapes in one packed int32 buffer, so that one transfer carries all.

`layout(bucket)` names every field with its place in the buffer; the host (NumPy) and the compiled programs (JAX) unpack
by the same layout. Knows nothing about requests. `build.py` fills the buffer once; from then on it is read-only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from jaxsgl.batch.patches import EncodeInputs, EncodePart
from jaxsgl.batch.sampling import COLUMNS
from jaxsgl.requests.outputs import MAX_LABELS

ArrayT = TypeVar("ArrayT", bound=Any)
StepKind: TypeAlias = Literal["decode", "extend", "score", "verify"]
Axis: TypeAlias = Literal["T", "S", "C"]  # tokens, sequences, tokens to choose

MAX_SNAPSHOTS = 2  # of a chunk
TABLE_CHANGES = 512  # entries of the page table in one array of changes


@dataclass(frozen=True, order=True)
class Bucket:
    """The padded static shape of a compiled step.

    Attributes:
      kind: "decode" (one token per sequence, T = S), "extend", "score": an extend that also yields the
        log-probabilities of prompt tokens, or "verify": an extend by the last token and drafts of what follows it,
        which chooses a token after each of its tokens.
      num_tokens: T, padded tokens of a step.
      num_seqs: S, padded sequences.
      sampled: whether a sampling program follows the forward program; a greedy batch needs none.
      featured: whether that program also edits logits and yields log-probabilities; implies `sampled`.
      filtered: whether any row has top-k, top-p or min-p, in sampled buckets that aren't featured and take one step;
        the programs of all others can filter anyway.
      num_steps: steps that the program takes one after the other; more than 1 only in decode buckets, never featured.
      pools: whether it also pools the hidden states of each sequence; never in decode buckets.
      adapter_columns: R, the leading columns of the adapters' pool that it reads; 0: no sequence has an adapter.
      rope_axes: what queries and keys turn with. 0: `positions`. 1: `rope_positions`, one of each token, in models that
        see images, whose tokens of text have other positions than indices. 3: three of each token, in steps that
        extend images, which take their embeddings from the pool.
      states: whether it also yields what was computed for each of its tokens; never of several steps.
      snapshots: whether it may begin at a snapshot and keep some, in models whose layers keep states by row.
      sees_ahead: whether its tokens of images see up to the end of theirs, in models whose images are extended whole.
      mlp_tokens: M, of a step that ranks share: places for the tokens of all ranks in MLPs and experts, which take
        those that are no padding; 0: they take all T of each rank.
      chooses: whether an index chooses what queries attend to, since a sequence has more than that; else they attend to
        all. In models with an index.
    """

    kind: StepKind
    num_tokens: int
    num_seqs: int
    sampled: bool
    featured: bool = False
    num_steps: int = 1
    filtered: bool = False
    pools: bool = False
    adapter_columns: int = 0
    rope_axes: int = 0
    states: bool = False
    snapshots: bool = False
    sees_ahead: bool = False
    mlp_tokens: int = 0
    chooses: bool = False

    @property
    def padded_tokens(self) -> int:
        """Tokens of all its steps, padding included."""
        return self.num_tokens * self.num_steps

    @property
    def num_choices(self) -> int:
        """C, the padded number of tokens that are chosen: one after each sequence, or after each token to verify."""
        return self.num_tokens if self.kind == "verify" else self.num_seqs

    @property
    def sampling(self) -> str:
        """How its tokens are chosen, in a word."""
        if self.featured:
            return "featured"
        return "filtered" if self.filtered else "sampled" if self.sampled else "greedy"

    def __str__(self) -> str:
        steps = f" {self.num_steps} steps" if self.num_steps > 1 else ""
        pools = " pooled" if self.pools else ""
        adapters = f" {self.adapter_columns} adapter columns" if self.adapter_columns else ""
        images = " with images" if self.rope_axes == 3 else ""
        states = " with states" if self.states else ""
        mlps = f" {self.mlp_tokens} in MLPs" if self.mlp_tokens else ""
        chooses = " choosing" if self.chooses else ""
        extras = f"{steps}{pools}{adapters}{images}{states}{mlps}{chooses}"
        return f"{self.kind} T={self.num_tokens} S={self.num_seqs} {self.sampling}{extras}"


@dataclass(frozen=True)
class StepArrays(Generic[ArrayT]):
    """The fields of a step: NumPy views on the host, JAX arrays inside a program. Integers are int32.

    Attributes:
      token_ids: `[T]`; an id below 0 means "the last token of row ~id", which only the device knows yet.
      positions: `[T]` position of each token in its sequence; 0 for padding.
      slots: `[T]` where each token's K and V go; padding goes to slot 0, in the dummy page. In programs of several
        steps `[num_steps, S]`, a row for each step, 0 where a sequence takes no part any more.
      lengths: `[S]` KV tokens of each sequence, this step's included; 0 for padding.
      query_offsets: `[S + 1]` sequence s owns tokens query_offsets[s] .. query_offsets[s + 1] - 1, its last ones.
      rows: `[S]` row of the page table of each sequence; the dummy row for padding.
      sample_rows: `[S]` row of the last-token table that gets the sampled token; the dummy row for padding, and for a
        chunk that isn't the prompt's last, whose token is dropped.
      sampling: `[len(COLUMNS), C]` the bits that `SamplingArrays.unpack` reads, C being `Bucket.num_choices`; neutral
        in greedy buckets.
      token_rows: `[T]` the row of each token's sequence, the dummy row for padding; not in decode buckets, where it is
        `rows`.
      targets: `[T]` the prompt token that follows each token, where its log-probability is wanted; in "score" buckets
        only.
      label_ids: `[S, MAX_LABELS]` tokens whose logits are wanted after each sequence, any for padding; in buckets that
        pool only.
      steps: `[S]` in programs of several steps: in how many of them, from the first, each sequence takes part; 0 for
        padding. All other fields but `slots` are those of the first step.
      adapters: `[T]` the number of each token's adapter in this step, 0 for none; only if the bucket has columns of
        adapters, as the next.
      column_owners: `[R]` the number of the adapter that has each column, 0 for none.
      rope_positions: `[T]`, or `[3, T]` (time, row, column), as `Bucket.rope_axes` says; 0 for padding.
      pool_rows: `[T]` in steps that extend images: where in the pool of embeddings each token's is; 0: it is text.
      seen: `[T]` if it sees ahead: of how many tokens, from the sequence's first, each token sees none after.
      state_from: `[S]` if there are snapshots, not in decode buckets: the place of the state before a sequence's first
        token of this step, its row or a snapshot; it is not read at position 0. The dummy row for padding.
      snapshot_at: `[MAX_SNAPSHOTS, S]` with it: after how many of its tokens a sequence's state is kept; 0: not at all.
      snapshot_to: `[MAX_SNAPSHOTS, S]` the places for that, the dummy row for none; in decode buckets `[S]`, for the
        state after the token that fills a page.
    """

    token_ids: ArrayT
    positions: ArrayT
    slots: ArrayT
    lengths: ArrayT
    query_offsets: ArrayT
    rows: ArrayT
    sample_rows: ArrayT
    sampling: ArrayT
    token_rows: ArrayT | None = None
    targets: ArrayT | None = None
    label_ids: ArrayT | None = None
    steps: ArrayT | None = None
    adapters: ArrayT | None = None
    column_owners: ArrayT | None = None
    rope_positions: ArrayT | None = None
    pool_rows: ArrayT | None = None
    seen: ArrayT | None = None
    state_from: ArrayT | None = None
    snapshot_at: ArrayT | None = None
    snapshot_to: ArrayT | None = None


@cache
def layout(bucket: Bucket) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Name -> (offset in the buffer, shape) of every field of `StepArrays`, in order."""
    t, s = bucket.num_tokens, bucket.num_seqs
    shapes: dict[str, tuple[int, ...]] = {
        "token_ids": (t,),
        "positions": (t,),
        "slots": (t,) if bucket.num_steps == 1 else (bucket.num_steps, s),
        "lengths": (s,),
        "query_offsets": (s + 1,),
        "rows": (s,),
        "sample_rows": (s,),
        "sampling": (len(COLUMNS), bucket.num_choices),
    }
    if bucket.kind != "decode":
        shapes["token_rows"] = (t,)
    if bucket.kind == "score":
        shapes["targets"] = (t,)
    if bucket.pools:
        shapes["label_ids"] = (s, MAX_LABELS)
    if bucket.num_steps > 1:
        shapes["steps"] = (s,)
    if bucket.adapter_columns:
        shapes |= {"adapters": (t,), "column_owners": (bucket.adapter_columns,)}
    if bucket.rope_axes:
        shapes["rope_positions"] = (t,) if bucket.rope_axes == 1 else (bucket.rope_axes, t)
    if bucket.rope_axes == 3:
        shapes["pool_rows"] = (t,)
    if bucket.sees_ahead:
        shapes["seen"] = (t,)
    if bucket.snapshots and bucket.kind == "decode":
        shapes["snapshot_to"] = (s,)
    elif bucket.snapshots:
        shapes |= {"state_from": (s,), "snapshot_at": (MAX_SNAPSHOTS, s), "snapshot_to": (MAX_SNAPSHOTS, s)}
    places, offset = {}, 0
    for name, shape in shapes.items():
        places[name] = (offset, shape)
        offset += math.prod(shape)
    return places


def packed_len(bucket: Bucket) -> int:
    """Length of the packed int32 buffer of `bucket`."""
    offset, shape = list(layout(bucket).values())[-1]
    return offset + math.prod(shape)


@cache
def _parts(bucket: Bucket) -> tuple[tuple[str, slice, tuple[int, ...] | None], ...]:
    """`layout` as `unpack` needs it for each step: name, part of the buffer, and shape if that has several axes."""
    return tuple(
        (name, slice(at, at + math.prod(shape)), shape if len(shape) > 1 else None)
        for name, (at, shape) in layout(bucket).items()
    )


def unpack(packed: ArrayT, bucket: Bucket) -> StepArrays[ArrayT]:
    """The fields of `packed`; on the host they are views, and writing one writes the buffer."""
    return StepArrays(
        **{name: packed[part] if shape is None else packed[part].reshape(shape) for name, part, shape in _parts(bucket)}
    )


def unpack_ranks(packed: npt.NDArray[np.int32], bucket: Bucket) -> StepArrays[npt.NDArray[Any]]:
    """The fields of all ranks in `packed [R, packed_len(bucket)]`, as views with a first axis of ranks."""
    ranks = len(packed)
    return StepArrays(
        **{
            name: packed[:, part] if shape is None else packed[:, part].reshape(ranks, *shape)
            for name, part, shape in _parts(bucket)
        }
    )


@dataclass(frozen=True)
class StepFeatures:
    """What the engine needs for a featured batch besides `StepInputs.packed`.

    Attributes:
      edit_rows: `[C]` row of the edit tables of each token to choose; the dummy row where logits stay as they are.
      row_setups: arrays of `sampling.row_setup`, to be written to the tables before the batch runs.
      logprobs: whether the log-probabilities of the batch's tokens are wanted.
    """

    edit_rows: npt.NDArray[np.int32]
    row_setups: tuple[npt.NDArray[np.int32], ...]
    logprobs: bool


@dataclass(frozen=True)
class StepInputs:
    """One padded batch, ready for the device. Read-only: neither scheduler nor engine may change it.

    Attributes:
      bucket: which compiled program runs it.
      packed: `[packed_len(bucket)]` int32, the only array that is transferred by most steps.
      num_seqs: real sequences; the rest of S is padding.
      num_tokens: real tokens; the rest of `padded_tokens` is padding.
      features: in featured batches only.
      table_changes: `[3, TABLE_CHANGES]` each (row, place in it, page), to be written to the device's page table before
        the batch runs; padding writes the dummy page to the dummy row. Mostly none, since a step itself writes the
        pages of the tokens that it computes: what is left are pages shared with other requests.
      masked: whether tokens are chosen only when `MaskedHandle.choose` brings the masks of grammars. Those follow from
        the tokens of the step before.
      encodes: calls of the vision tower, or parts of one, that come before the batch.
      drafts: whether tokens are drafted after it, for the next step to verify; only where the engine can.
      of_ranks: the batch of each rank, in the bucket of all, where ranks share the step (`joint.py`): `packed` holds
        theirs one after the other, as do all arrays that go to the device. (): there is one rank.
    """

    bucket: Bucket
    packed: npt.NDArray[np.int32]
    num_seqs: int
    num_tokens: int
    features: StepFeatures | None = None
    table_changes: tuple[npt.NDArray[np.int32], ...] = ()
    masked: bool = False
    encodes: tuple[EncodeInputs | EncodePart, ...] = ()
    drafts: bool = False
    of_ranks: tuple[StepInputs, ...] = ()

    @property
    def num_choices(self) -> int:
        """Real ones of the bucket's `num_choices`."""
        return self.num_tokens if self.bucket.kind == "verify" else self.num_seqs

    @property
    def padded_tokens(self) -> int:
        """Places in which MLPs compute `num_tokens` tokens: of all steps, or of all ranks."""
        return self.bucket.mlp_tokens or max(len(self.of_ranks), 1) * self.bucket.padded_tokens

    def count(self, axis: Axis) -> int:
        """Real entries of an axis."""
        return {"T": self.num_tokens, "S": self.num_seqs, "C": self.num_choices}[axis]

    def without_padding(self, array: npt.NDArray[Any], axis: Axis) -> npt.NDArray[Any]:
        """The real entries of an array whose first axis is `axis`, rank after rank."""
        if not self.of_ranks:
            return array[: self.count(axis)]
        by_rank = np.split(array, len(self.of_ranks))  # entries may be empty, as the logits of no labels
        return np.concatenate([part[: rank.count(axis)] for part, rank in zip(by_rank, self.of_ranks, strict=True)])

    @property
    def arrays(self) -> StepArrays[npt.NDArray[Any]]:
        """The fields as NumPy views."""
        return unpack(self.packed, self.bucket)
