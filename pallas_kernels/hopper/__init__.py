"""Kernels for NVIDIA's Hopper GPUs: TMA and wgmma, on Pallas Mosaic GPU. docs/kernels/hopper.md explains them.

Why every wait of the decode is enough (`decode_program`)

One warpgroup does everything, so no handshake between producers and consumers can hang. K and V each have a ring of
`num_stages` tiles in shared memory, and a barrier per tile.

1. Arrival. Every copy into a tile announces its bytes on the tile's barrier, which expects as many arrivals as a tile
   has copies. The cursor visits the tiles of the chain in the order in which they are computed, a ring's length ahead:
   `num_stages` tiles are started before the loop, and the iteration that waits for a tile starts the next one in the
   same place after that wait. So each start is followed by exactly one wait before the next start in the same place,
   phases cannot drift, whatever the lengths, and nothing is in flight at the end. Items without tiles must come last:
   the cursor stops at the first of them.
2. Reuse. A place is refilled after the product that reads it is done (`wgmma.wait_group 0` in every warp), then a
   barrier among the four warps (Mosaic puts `bar.sync` before every copy), then TMA.
3. Ordinary stores that `wgmma` or TMA read (cleared V, widened float8, the output's staging) are followed by
   `fence.proxy.async` and `bar.sync` (`commit_smem`).
4. Queries. Their barrier is waited for once per item that has tiles, at its beginning. The next item's copy starts
   after the present one's last product with them, hence after that wait.
5. Staging. The last V tile's place is written after the last product, and by all warps after a barrier. Its refill
   waits until the copies to global memory have read it. With float8 the staging is the wide tile, which the next
   conversion overwrites after the same wait. The program ends when all copies have arrived.

Mosaic's automatic barriers stay on (2 `bar.sync` per tile with pages of 64, 8 with pages of 16), in place of a proof
that none is missing.

Barriers of the extend (`extend_plan`), and why no wait lasts forever

Arrivals are per warpgroup or per copy; each waiter sees every completion once, in order.

- `q_arrived` (1): the copies of a query tile arrive; both consumers wait, at an item's start.
- `arrived[2 x stages]` (K, V): the copies of a tile arrive, or the producer on their behalf (cleared, converted); both
  consumers wait.
- `free[2 x stages]` (K, V): both consumers arrive, after the product that read the stage; the producer waits before it
  refills.
- `free[last]` (1): both consumers arrive, after an item's last scores; the producer waits before the next item's
  queries.
- `raw_arrived[2]` (K, V): copies arrive that the producer changes; the producer's four warps wait.
- `turn[2]` (one for each consumer): the other consumer arrives after it has started its products; that consumer waits
  before it starts its own.

Each thread counts the completions that it waited for, so all waits for a barrier are made by the same warps: those for
`free` by the copying warp alone (float8: by all four), those for `raw_arrived` by all four.

- Producer and consumers walk the same items and derive the same counts of steps from the same table. The producer's
  waits need only consumers' progress on earlier tiles, and never a turn. Consumers' waits need the producer's fill of
  this tile, and the turn.
- Both consumers take n turns per item of n steps, alternately, consumer 0 first; consumer 1 gives one turn before its
  first item, and consumer 0 waits for one more after its last. A consumer gives the turn before it waits for anything
  but memory that the producer fills.
- With one stage the scores of tile j + 1 need K's stage, which is free since the scores of tile j, and not V's.
- The producer's writes to shared memory are followed by a proxy fence (`commit_smem`) before its arrival.
- Registers: 2 x 232 + 40 and 2 x 224 + 56 are 504 = 3 x 168, what the kernel starts with; more would make `setmaxnreg`
  wait forever.

Barriers of the products (`product_tiles`), and why no wait lasts forever

- `arrived[stages]` (2 or 3): the copies of a stage's weights (gated ones come in two), of its first block of rows and
  of their scales arrive; both consumers wait. `arrived_too[stages]` (1 or 2): those of the other block.
- `free[stages]` (2): both consumers arrive, after the stage's last product; the producer waits before it refills, and
  for the last stages before it ends.

The three warpgroups walk over the same tiles in as many steps, which follow from sizes and the table of tiles, and
count stages on from one tile to the next. Each copy has a fixed size, and a consumer whose rows a tile lacks waits and
arrives all the same: no phase drifts. The producer waits for consumers' progress on earlier steps only, and consumers
for the producer's fill of this one; a tile's results leave through memory of its warpgroup alone.
"""

from typing import Any

from pallas_kernels.backend import Backend, Kernel
from pallas_kernels.lazily import imported
from pallas_kernels.triton import backend as triton


def _kernel(module: str, run: str, refuse: str) -> Kernel[Any]:
    """The functions `run` and `refuse` of a module of this package."""
    return Kernel(imported(f"hopper.{module}", run), imported(f"hopper.{module}", refuse))


BACKEND = Backend(
    "mosaic_gpu",
    _kernel("decode", "decode_attention", "refuse_decode"),
    _kernel("extend", "extend_attention", "refuse_extend"),
    # Few rows are Triton's, and so is what else these operations need: one backend has all of it.
    grouped_product=_kernel("grouped_product", "grouped_product", "refuse_grouped_product"),
    gated_product=_kernel("grouped_product", "gated_product", "refuse_gated_product"),
    products_with_shared=triton.BACKEND.products_with_shared,
    grouped_packed_product=triton.BACKEND.grouped_packed_product,
    gated_packed_product=triton.BACKEND.gated_packed_product,
    float8_rows=triton.BACKEND.float8_rows,
    float8_product=_kernel("float8_product", "float8_product", "refuse_float8_product"),
    grouped_float8_product=Kernel(
        imported("hopper.grouped_product", "grouped_float8_product"),
        imported("hopper.float8_product", "refuse_float8_product"),
    ),
    platform="gpu",
    has_interpreter=True,
)
