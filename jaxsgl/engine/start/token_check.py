"""Once programs are compiled, on accelerators: real tokens by extend steps and by decode steps must agree.

The two run different kernels, on the very programs that will serve, and start from different places of their batches.
Owns the tokens and what counts as agreement. Called by `engine` at start, while all pages and rows are free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.batch.build import BatchBuilder, Work
from jaxsgl.batch.inputs import StepInputs, unpack
from jaxsgl.batch.sampling import SamplingRows
from jaxsgl.cache.pages import PageTable, pages_for

NUM_TOKENS, NUM_DECODED, NUM_OTHERS = 300, 100, 37  # the last ones stand before the others in their extend step
WHOLE, IN_TWO, OTHER = 0, 1, 2  # rows
# Of the logits' norm, by bytes of a number. Rounding moves them by some 1% in 16 bits, more where it changes a token's
# expert, and by 9% where extend steps alone round rows to float8 (Qwen3-0.6B with random weights); a kernel that is
# wrong for some of the tokens moves them by as much as other tokens would.
MOST_DIFFERENCE = {4: 1e-2, 2: 0.2}

Run = Callable[[StepInputs], jax.Array]  # a step's logits `[S, V]`


def fits(buckets: BucketSet, capacity: Capacity) -> bool:
    """Whether the engine can hold the tokens, and compute them in one extend step."""
    pages = 2 * pages_for(NUM_TOKENS, capacity.page_size) + pages_for(NUM_OTHERS, capacity.page_size)
    room = buckets.shared_tokens if buckets.shared_tokens is not None else capacity.max_extend_tokens
    return (
        buckets.generates
        and capacity.num_rows > OTHER
        and capacity.num_pages > pages
        and capacity.context_length >= NUM_TOKENS
        and min(room, capacity.max_extend_tokens) >= NUM_TOKENS + NUM_OTHERS
    )


def difference(run: Run, buckets: BucketSet, capacity: Capacity) -> tuple[float, int, int]:
    """How far the last logits of both ways are apart, over their norm; and the likeliest token by each.

    Leaves KV in pages that are free again, and tokens in rows of the state, which the caller clears.
    """
    table = PageTable(capacity.num_rows, capacity.max_pages_per_seq)
    first = 1
    for row, num_tokens in ((WHOLE, NUM_TOKENS), (IN_TWO, NUM_TOKENS), (OTHER, NUM_OTHERS)):
        count = pages_for(num_tokens, capacity.page_size)
        table.pages[row, :count] = np.arange(first, first + count)
        first += count
    builder = BatchBuilder(buckets, table, SamplingRows(capacity.num_rows), capacity.page_size)
    rng = np.random.default_rng(0)
    others, ids = (rng.integers(0, capacity.vocab_size, n).astype(np.int32) for n in (NUM_OTHERS, NUM_TOKENS))
    whole = run(builder.extend([Work(OTHER, others, 0, False), Work(WHOLE, ids, 0, False)]))
    begun = NUM_TOKENS - NUM_DECODED
    last = run(builder.extend([Work(IN_TWO, ids[:begun], 0, False)]))
    for position in range(begun, NUM_TOKENS):
        last = run(_decode(builder, position, int(ids[position]), capacity.num_rows))
    # Cut on the host: on the device that would compile programs.
    a, b = (np.asarray(step, np.float64)[s, : capacity.vocab_size] for step, s in ((whole, 1), (last, 0)))
    return float(np.linalg.norm(a - b) / np.linalg.norm(a)), int(np.argmax(a)), int(np.argmax(b))


def _decode(builder: BatchBuilder, position: int, token_id: int, dummy_row: int) -> StepInputs:
    """A decode step of a given token in place of the row's last one, whose own token goes to the dummy row."""
    inputs = builder.decode(np.array([IN_TWO], np.int32), np.array([position], np.int32))
    packed: npt.NDArray[Any] = inputs.packed.copy()
    arrays = unpack(packed, inputs.bucket)
    arrays.token_ids[0] = token_id
    arrays.sample_rows[0] = dummy_row
    packed.flags.writeable = False
    return replace(inputs, packed=packed)
