"""`Capacity`, what one engine can hold, and `BucketSet`, the shapes that it compiles for that.

The capacity is decided at the start, from flags, the model and its memory. The shapes are derived from it, or given by
flags, or read from a file (`buckets_of`). Few buckets mean a short warm-up, many mean little waste. Derived sizes
double. Those of decode go on in equal steps once such a step is an eighth of all rows and at least 32: a batch is large
most of the time, and shrinks by one request at a time when no request waits. So a decode step pays for less than twice
its rows, and an extend step beyond the smallest size for less than twice its tokens; the scheduler defers tails of
chunks that would be padded much. Knows nothing about requests.

The file of `--auto-buckets` is what `scripts/bench_buckets.py --json` writes: a JSON object, of which only this part is
read, so that one can be written by hand:

    {"suggested": {"decode_buckets": [1, 4, 16, 32], "extend_buckets": [16, 128, 512]}}

decode_buckets: sequences of decode programs; extend_buckets: tokens of extend programs; both ascending, 1 and more.
Sizes that no batch can reach, since fewer requests run or chunks are shorter, are left out.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxsgl.batch.inputs import Bucket
from jaxsgl.batch.patches import EncodeBucket, TowerCapacity
from jaxsgl.batch.sampling import Variant
from jaxsgl.cache.pages import pages_for, tokens_in
from jaxsgl.config.engine import EngineConfig, Limits
from jaxsgl.errors import ConfigError
from jaxsgl.requests.media import MediaLimits
from jaxsgl.requests.outputs import PoolingSpec, StatesSpec


@dataclass(frozen=True)
class Capacity:
    """What one engine can hold, fixed at start-up. Scheduler and engine share it.

    Attributes:
      page_size: tokens per page.
      num_pages: pages in the pool, the dummy page 0 included.
      num_rows: requests running at once; row `num_rows` is the dummy row of padding.
      context_length: the most tokens of one request.
      max_extend_tokens: the most tokens of one extend step.
      vocab_size: size of the vocabulary.
      whole_prompts: each prompt is extended in one step; else long ones are cut into chunks.
      media: images and video frames of a request; None: the model has no vision tower.
      pooling: how embeddings and scores are made; None: there are none.
      generates: whether tokens are; without, every step extends prompts and pools.
      max_adapters: LoRA adapters that may be on the device; 0: there are none.
      adapter_columns: columns of the pool for them, enough for `max_adapters` of the highest rank.
      tower: what the tower encodes and the pool of embeddings holds; None: the model has no vision tower.
      has_axes: tokens have positions other than their indices.
      sees_ahead: tokens of an image see up to its end, so that it is extended whole.
      states: what is returned of single tokens; None: nothing.
      num_snapshots: states of sequences that are kept as prefixes; None: layers keep no states by row.
      index_covers: sequences of so many tokens are attended to as a whole, since an index would choose all of them; 0:
        there is no index.
    """

    page_size: int
    num_pages: int
    num_rows: int
    context_length: int
    max_extend_tokens: int
    vocab_size: int
    whole_prompts: bool = False
    media: MediaLimits | None = None
    pooling: PoolingSpec | None = None
    generates: bool = True
    max_adapters: int = 0
    adapter_columns: int = 0
    tower: TowerCapacity | None = None
    has_axes: bool = False
    sees_ahead: bool = False
    states: StatesSpec | None = None
    num_snapshots: int | None = None
    index_covers: int = 0

    @property
    def max_mixed_decodes(self) -> int:
        """Sequences that may decode in a step that extends prompts."""
        return self.max_extend_tokens - (self.context_length if self.whole_prompts else 1)

    @property
    def pool_tokens(self) -> int:
        """Tokens that all pages except the dummy page hold."""
        return tokens_in(self.num_pages - 1, self.page_size)

    @property
    def max_pages_per_seq(self) -> int:
        """P, the width of page tables: pages of a request that fills the context."""
        return pages_for(self.context_length, self.page_size)

    @property
    def limits(self) -> Limits:
        """The limits that requests are checked against."""
        sizes = self.vocab_size, self.context_length, self.pool_tokens
        return Limits(*sizes, self.media, self.pooling, self.generates, self.states)


MIN_EXTEND_TOKENS = 16
GREEDY = Variant(False)
VARIANTS = (GREEDY, Variant(True), Variant(True, filtered=True), Variant(True, featured=True))
MIN_DECODE_STEP = 32  # rows; smaller sizes double, since every program costs seconds to compile
SCORE_STRIDE = 2  # of the sizes of extend programs, every second one has a program that scores prompts
MIN_COLUMNS, COLUMN_FACTOR = 16, 4  # sizes of the adapters' pool: each is so many times the next smaller one
MIN_VERIFY_TOKENS = 64  # of the largest verify step, even if fewer rows run: each may have several drafts
FEW_SEQS = 8  # most extend steps hold few sequences; per-sequence work in the step is padded to this at least
FEW_SIZES_FACTOR = 4  # where few sizes are compiled, each is so many times the next smaller one


@dataclass(frozen=True)
class BucketSet:
    """All shapes that may run.

    Attributes:
      decode_sizes: S of decode programs, ascending.
      extend_sizes: T of extend programs, ascending.
      extend_seqs: S of extend programs, ascending; a program has S <= T.
      score_sizes: T of the programs that score prompts, ascending.
      decode_steps: number of steps of the decode programs that take several steps; 1: there are no such programs.
      shared_tokens: the most tokens of an extend step of several sequences; None: as many as fit.
      pools: whether there are programs that pool hidden states; those that score prompts pool then, too.
      generates: whether there are any other programs.
      column_sizes: R of the programs for batches with adapters, ascending; of "score" programs the last one.
      states: whether there are programs that return what is computed for single tokens.
      rope_axes: of steps without images; see `Bucket`.
      images: whether steps may have images.
      sees_ahead: see `Capacity`.
      sees_whole: see `PoolingSpec`.
      encode: shapes of calls of the vision tower, ascending; (): there is none.
      encode_in_parts: those that may be run in parts, too.
      verify_sizes: T of the programs that verify drafts, ascending; (): nothing speculates.
      max_drafts: the most drafts of a sequence in a step.
      snapshots: whether steps may begin at snapshots and keep some.
      index_covers: see `Capacity`; 0 also where no sequence is that long.
      joint_decode, joint_extend: shapes of the steps that ranks share, see `joint_shapes`; (): there is one rank.
    """

    decode_sizes: tuple[int, ...]
    extend_sizes: tuple[int, ...]
    extend_seqs: tuple[int, ...]
    score_sizes: tuple[int, ...]
    decode_steps: int = 1
    shared_tokens: int | None = None
    pools: bool = False
    generates: bool = True
    column_sizes: tuple[int, ...] = ()
    states: bool = False
    rope_axes: int = 0
    images: bool = False
    sees_ahead: bool = False
    sees_whole: bool = False
    encode: tuple[EncodeBucket, ...] = ()
    encode_in_parts: tuple[EncodeBucket, ...] = ()
    verify_sizes: tuple[int, ...] = ()
    max_drafts: int = 0
    snapshots: bool = False
    index_covers: int = 0
    joint_decode: tuple[tuple[int, int], ...] = ()
    joint_extend: tuple[tuple[int, int], ...] = ()

    @classmethod
    def derive(
        cls,
        capacity: Capacity,
        decode_sizes: tuple[int, ...] = (),
        extend_sizes: tuple[int, ...] = (),
        decode_steps: int = 1,
        shared_tokens: int | None = None,
        max_drafts: int = 0,
        few_sizes: bool = False,
        num_ranks: int = 1,
    ) -> BucketSet:
        """The default shapes for `capacity`. Sizes that are given replace the default ones, as far as batches reach.

        The largest batch is added to given sizes that end below it. With `few_sizes` the default ones are a quarter of
        each other: half as many programs, more padding.
        """
        rows, tokens = capacity.num_rows, capacity.max_extend_tokens
        default_decode = _few_decode_sizes(rows) if few_sizes else _default_decode_sizes(rows)
        least = min(MIN_EXTEND_TOKENS, tokens)
        default_extend = _quarters(least, tokens) if few_sizes else doubling(least, tokens)
        decode_sizes = _reaching(decode_sizes, rows) or default_decode
        reached = _reaching(extend_sizes, tokens) or default_extend
        return cls(
            decode_sizes=decode_sizes,
            extend_sizes=reached,
            extend_seqs=tuple(sorted({min(FEW_SEQS, rows), rows})),
            score_sizes=reached[::-SCORE_STRIDE][::-1] if capacity.generates else reached,
            decode_steps=decode_steps,
            shared_tokens=shared_tokens,
            pools=capacity.pooling is not None,
            generates=capacity.generates,
            column_sizes=_column_sizes(capacity.adapter_columns),
            states=capacity.states is not None,
            rope_axes=int(capacity.has_axes),
            images=capacity.tower is not None,
            sees_ahead=capacity.sees_ahead,
            sees_whole=capacity.pooling is not None and capacity.pooling.sees_whole,
            encode=() if capacity.tower is None else capacity.tower.buckets,
            encode_in_parts=() if capacity.tower is None else capacity.tower.buckets_in_parts,
            verify_sizes=_verify_sizes(decode_sizes, rows, max_drafts) if capacity.generates else (),
            max_drafts=max_drafts,
            snapshots=bool(capacity.num_snapshots),
            index_covers=capacity.index_covers if capacity.index_covers < capacity.context_length else 0,
            joint_decode=joint_shapes(decode_sizes, num_ranks, few_sizes),
            joint_extend=joint_shapes(reached, num_ranks, few_sizes),
        )

    def decode(self, num_seqs: int, variant: Variant = GREEDY, num_steps: int = 1, columns: int = 0) -> Bucket:
        """The smallest decode bucket that holds `num_seqs` sequences, of 1 or `decode_steps` steps.

        `columns` are those of the pool up to the last one of their adapters, here as below.
        """
        size = self.decode_sizes[bisect_left(self.decode_sizes, num_seqs)]
        return self._turned(_decode_bucket(size, variant, num_steps, self._columns(columns)))

    def verify(self, num_tokens: int, variant: Variant = GREEDY, columns: int = 0) -> Bucket:
        """The smallest verify bucket that holds `num_tokens` tokens, of as many sequences as there may be."""
        tokens = self.verify_sizes[bisect_left(self.verify_sizes, num_tokens)]
        seqs = min(tokens, self.decode_sizes[-1])
        return self._turned(Bucket("verify", tokens, seqs, *_forms(variant), adapter_columns=self._columns(columns)))

    def extend(self, num_tokens: int, num_seqs: int, variant: Variant = GREEDY, columns: int = 0) -> Bucket:
        """The smallest extend bucket that holds `num_tokens` tokens of `num_seqs` sequences."""
        tokens = self.extend_sizes[bisect_left(self.extend_sizes, num_tokens)]
        seqs = self.extend_seqs[bisect_left(self.extend_seqs, num_seqs)]
        forms = _forms(variant)
        bucket = Bucket("extend", tokens, min(seqs, tokens), *forms, adapter_columns=self._columns(columns))
        return self._turned(bucket)

    def pool(self, num_tokens: int, num_seqs: int, variant: Variant = GREEDY, columns: int = 0) -> Bucket:
        """The smallest bucket that extends `num_tokens` tokens of `num_seqs` sequences and pools hidden states.

        Beside generation there are as few of them as of those that score prompts.
        """
        if not self.generates:
            bucket = self.extend(num_tokens, num_seqs, columns=columns)
            return replace(bucket, pools=True, sees_ahead=self.sees_whole)
        return replace(self.score(num_tokens, variant, columns), kind="extend")

    def score(self, num_tokens: int, variant: Variant = GREEDY, columns: int = 0) -> Bucket:
        """The smallest bucket that extends `num_tokens` tokens with log-probabilities of the prompt.

        That is a rare need, so there are fewer sizes, and one number of sequences.
        """
        tokens = self.score_sizes[bisect_left(self.score_sizes, num_tokens)]
        seqs = min(self.extend_seqs[-1], tokens)
        most = self.column_sizes[-1] if columns else 0
        forms = _forms(variant)
        return self._turned(Bucket("score", tokens, seqs, *forms, pools=self.pools, adapter_columns=most))

    def joint(self, bucket: Bucket, num_tokens: int) -> Bucket:
        """The smallest bucket in which ranks share a step of `num_tokens` tokens in all.

        `bucket` holds the batch of each of them.
        """
        for mlps, tokens in self._joint_shapes(bucket):
            if mlps >= num_tokens and tokens >= bucket.num_tokens:
                return self._shared(bucket, mlps, tokens)
        return bucket

    def _joint_shapes(self, bucket: Bucket) -> tuple[tuple[int, int], ...]:
        """Shapes of the steps that take the place of `bucket`; (): it is shared as it is.

        So are steps that score prompts, or pool next to generation, which are rare: their MLPs compute R T places.
        """
        if bucket.kind == "score" or (bucket.pools and self.generates):
            return ()
        return self.joint_decode if bucket.kind == "decode" else self.joint_extend

    def _shared(self, bucket: Bucket, mlps: int, tokens: int) -> Bucket:
        most, largest = self.joint_extend[-1]
        seqs = tokens if bucket.kind == "decode" else min(self.extend_seqs[-1], tokens)
        is_whole = mlps >= most // largest * tokens
        return replace(bucket, num_tokens=tokens, num_seqs=seqs, mlp_tokens=0 if is_whole else mlps)

    def _shared_forms(self, bucket: Bucket) -> list[Bucket]:
        shapes = self._joint_shapes(bucket)
        if not shapes:
            return [bucket]
        return [self._shared(bucket, *shape) for shape in shapes if shape[1] == bucket.num_tokens]

    def _turned(self, bucket: Bucket) -> Bucket:
        if not (self.rope_axes or self.snapshots):
            return bucket
        return _turned(bucket, self.rope_axes, self.snapshots)

    def with_images(self, bucket: Bucket) -> Bucket:
        """The bucket for the same batch if it has images, which batches that only decode have not."""
        if bucket.kind in ("decode", "verify"):
            return bucket
        return replace(bucket, rope_axes=3, sees_ahead=self.sees_ahead)

    def for_longest(self, bucket: Bucket, length: int) -> Bucket:
        """The bucket for the same batch if its longest sequence has `length` tokens."""
        return replace(bucket, chooses=True) if 0 < self.index_covers < length else bucket

    def encode_of(self, num_patches: int) -> EncodeBucket:
        """The smallest call of the tower that holds `num_patches` on each device that encodes other images."""
        return next(bucket for bucket in self.encode if bucket.num_patches >= num_patches)

    def _columns(self, columns: int) -> int:
        return self.column_sizes[bisect_left(self.column_sizes, columns)] if columns else 0

    def largest(self) -> list[Bucket]:
        """Of each kind of step the buckets that take most memory; with images, if there may be any."""
        largest = [self.with_images(bucket) if self.images else bucket for bucket in self._largest_without_images()]
        if self.joint_extend:
            most = self.joint_extend[-1][0]
            largest = list(dict.fromkeys(self.joint(bucket, most) for bucket in largest))
        chooses = self.index_covers > 0
        return [replace(each, states=self.states and each.num_steps == 1, chooses=chooses) for each in largest]

    def _largest_without_images(self) -> list[Bucket]:
        size, tokens_by_seqs = self.decode_sizes[-1], {seqs: tokens for tokens, seqs in self._extend_shapes()}
        most = self.column_sizes[-1] if self.column_sizes else 0
        if not self.generates:
            return [self.pool(tokens, seqs, columns=most) for seqs, tokens in tokens_by_seqs.items()]
        buckets = [
            self.extend(tokens, seqs, variant) for seqs, tokens in tokens_by_seqs.items() for variant in VARIANTS
        ]
        buckets += [self.score(self.score_sizes[-1], variant) for variant in VARIANTS]
        buckets += [self.decode(size, variant) for variant in VARIANTS]
        buckets += [self.verify(size, variant) for size in self.verify_sizes[-1:] for variant in VARIANTS]
        if self.pools:
            buckets += [self.pool(self.score_sizes[-1], 1, variant) for variant in VARIANTS]
        if self.decode_steps > 1:
            buckets += [self.decode(size, variant, self.decode_steps) for variant in VARIANTS[:2]]
        return [replace(bucket, adapter_columns=most) for bucket in buckets]

    def all(self) -> list[Bucket]:
        """Every bucket that warm-up compiles; larger ones first, so that the last programs to compile are short."""
        buckets = self._all_without_images()
        if self.joint_extend:
            buckets = {form for bucket in buckets for form in self._shared_forms(bucket)}
        if self.images:
            buckets |= {self.with_images(bucket) for bucket in buckets}
        if self.states:
            buckets |= {replace(bucket, states=True) for bucket in buckets if bucket.num_steps == 1}
        if self.index_covers:
            buckets |= {replace(bucket, chooses=True) for bucket in buckets}
        return sorted(buckets, key=lambda bucket: (-bucket.num_tokens, bucket))

    def _all_without_images(self) -> set[Bucket]:
        buckets = set() if self.generates else {self.pool(*shape) for shape in self._extend_shapes()}
        for variant in VARIANTS if self.generates else ():
            if self.pools:
                buckets |= {self.pool(size, 1, variant) for size in self.score_sizes}
            buckets |= {self.decode(size, variant) for size in self.decode_sizes}
            buckets |= {self.extend(*shape, variant) for shape in self._extend_shapes()}
            buckets |= {self.score(size, variant) for size in self.score_sizes}
            buckets |= {self.verify(size, variant) for size in self.verify_sizes}
        if self.decode_steps > 1 and self.generates:
            buckets |= {
                self.decode(size, variant, self.decode_steps) for size in self.decode_sizes for variant in VARIANTS[:2]
            }
        for size in self.column_sizes:
            without = [bucket for bucket in buckets if not bucket.adapter_columns]
            buckets |= {
                replace(bucket, adapter_columns=size)
                for bucket in without
                if size == self.column_sizes[-1] or not (bucket.kind == "score" or (bucket.pools and self.generates))
            }
        return buckets

    def _extend_shapes(self) -> list[tuple[int, int]]:
        """`(tokens, sequences)` of the extend programs, ascending: without shapes that no step can have."""
        few, shared = self.extend_seqs[0], self.shared_tokens
        return [
            (tokens, seqs)
            for smaller, tokens in pairwise((0, *self.extend_sizes))
            for seqs in self.extend_seqs
            if seqs == few or shared is None or smaller < shared
        ]


def _forms(variant: Variant, num_steps: int = 1) -> tuple[bool, bool, int, bool]:
    """The last fields of a bucket.

    Featured programs and those of several steps filter always: forms of them without filters would be as many large
    programs more to compile.
    """
    sampled, featured, filtered = variant
    return sampled or featured, featured, num_steps, filtered and not featured and num_steps == 1


@cache
def _decode_bucket(size: int, variant: Variant, num_steps: int, columns: int) -> Bucket:
    """Made once: each step asks for one."""
    return Bucket("decode", size, size, *_forms(variant, num_steps), adapter_columns=columns)


@cache
def _turned(bucket: Bucket, rope_axes: int, snapshots: bool) -> Bucket:
    return replace(bucket, rope_axes=rope_axes, snapshots=snapshots)


def _default_decode_sizes(rows: int) -> tuple[int, ...]:
    """Doubles up to a step, then adds that step: the least power of two that reaches `rows` in 8 steps at most."""
    step = MIN_DECODE_STEP
    while 8 * step < rows:
        step *= 2
    return (*doubling(1, min(step, rows)), *range(2 * step, rows, step), *((rows,) if rows > step else ()))


def _few_decode_sizes(rows: int) -> tuple[int, ...]:
    """One, since a request is often alone, and few sizes up to `rows`."""
    return (1, *_quarters(FEW_SIZES_FACTOR, rows)) if rows > 1 else (1,)


def _quarters(least: int, last: int) -> tuple[int, ...]:
    """`last`, a quarter of it, and so on, as long as that is `least` or more; ascending."""
    sizes = [last]
    while sizes[0] >= FEW_SIZES_FACTOR * least:
        sizes.insert(0, -(-sizes[0] // FEW_SIZES_FACTOR))
    return tuple(sizes)


def _verify_sizes(decode_sizes: tuple[int, ...], rows: int, max_drafts: int) -> tuple[int, ...]:
    """The sizes of decode steps, which sampling programs have anyway, and larger ones where few requests may run."""
    if not max_drafts:
        return ()
    most = max(min(MIN_VERIFY_TOKENS, rows * (1 + max_drafts)), decode_sizes[-1])
    sizes = [size for size in decode_sizes if size > 1]
    return tuple(sizes) if decode_sizes[-1] == most else (*sizes, *doubling(2 * decode_sizes[-1], most))


def _column_sizes(most: int) -> tuple[int, ...]:
    """`most` and parts of it: few sizes, since each stands for as many programs as batches without adapters have."""
    sizes = [most] if most else []
    while sizes and sizes[0] >= COLUMN_FACTOR * MIN_COLUMNS:
        sizes.insert(0, -(-sizes[0] // COLUMN_FACTOR))
    return tuple(sizes)


def doubling(first: int, last: int) -> tuple[int, ...]:
    """first, 2 first, 4 first, ... below `last`, and `last`."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)


def _reaching(sizes: Sequence[int], largest: int) -> tuple[int, ...]:
    """Returns `sizes` in order, up to the first that holds `largest`, which is added if none does; () of none."""
    if not sizes:
        return ()
    ascending = sorted({*sizes, largest} if max(sizes) < largest else set(sizes))
    return tuple(ascending[: bisect_left(ascending, largest) + 1])


def joint_shapes(sizes: tuple[int, ...], num_ranks: int, few_sizes: bool) -> tuple[tuple[int, int], ...]:
    """Shapes (M, T) of steps that ranks share, ascending; () of one rank.

    `sizes` are those of one rank's batches, ascending. M, places in MLPs for the tokens of all ranks, grows by halves
    and thirds in turns. Each M has two T, places in each rank: for a rank that has all of the step, and for ranks of
    which none has twice the mean. So there are not as many programs as pairs, and attention is padded by less.
    """
    if num_ranks == 1:
        return ()
    most = num_ranks * sizes[-1]
    if few_sizes:
        places = {*sizes, *_quarters(sizes[-1], most)}
    else:
        doubled = doubling(sizes[0], most)
        places = {*doubled, *(3 * size // 2 for size in doubled if 3 * size // 2 < most)}
    wanted = {(mlps, min(tokens, mlps, sizes[-1])) for mlps in places for tokens in (mlps, 2 * -(-mlps // num_ranks))}
    return tuple(sorted({(mlps, sizes[bisect_left(sizes, tokens)]) for mlps, tokens in wanted}))


def buckets_of(config: EngineConfig, capacity: Capacity, few_sizes: bool = False) -> BucketSet:
    """The shapes that `config` asks for; `few_sizes` of those that it leaves to us.

    Raises `ConfigError` for a file of sizes that can't be used, or was made for a smaller capacity.
    """
    scheduling, steps, drafts = config.scheduling, config.decode_steps, config.speculation.num_draft_tokens
    alone = capacity.whole_prompts and not config.mixes_steps  # a prompt beyond --max-prefill-tokens
    shared_tokens = scheduling.max_prefill_tokens if alone else None
    if config.auto_buckets is None:
        decode, extend = config.decode_buckets, config.extend_buckets
        return BucketSet.derive(
            capacity, decode, extend, steps, shared_tokens, drafts, few_sizes, num_ranks=config.num_ranks
        )
    decode, extend = suggested_sizes(config.auto_buckets)
    for sizes, largest, what, flag in (
        (decode, capacity.num_rows, "requests at once", "--max-running-requests"),
        (extend, capacity.max_extend_tokens, "tokens in a step", "--chunked-prefill-size"),
    ):
        if sizes[-1] < largest:
            raise ConfigError(
                f"--auto-buckets {config.auto_buckets} was made for {sizes[-1]} {what}, but there may be {largest}: "
                f"run scripts/bench_buckets.py with the flags of this server, or use {flag} {sizes[-1]}"
            )
    return BucketSet.derive(capacity, decode, extend, steps, shared_tokens, drafts, num_ranks=config.num_ranks)


def suggested_sizes(path: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the decode and extend sizes of a file of `--auto-buckets`, ascending. Raises `ConfigError`."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--auto-buckets {path} can't be read as JSON: {error}") from error
    suggested = found.get("suggested") if isinstance(found, dict) else None
    if not isinstance(suggested, dict):
        raise ConfigError(
            f'--auto-buckets {path} holds no object "suggested": name a file that scripts/bench_buckets.py --json wrote'
        )
    return _sizes(path, suggested, "decode_buckets"), _sizes(path, suggested, "extend_buckets")


def _sizes(path: str, suggested: dict[str, Any], name: str) -> tuple[int, ...]:
    sizes = suggested.get(name)
    if not isinstance(sizes, list) or not sizes or not all(type(size) is int and size >= 1 for size in sizes):
        raise ConfigError(f"--auto-buckets {path}: {name} is {sizes!r}, but must be a list of numbers of 1 and more")
    return tuple(sorted(set(sizes)))
