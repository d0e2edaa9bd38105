"""`Capacity`: what one engine can hold, decided at its start from its flags, its model and its memory.

Scheduler, batch builder and engine share it. Knows no shapes of programs; `buckets` derives them from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxsgl.batch.patches import TowerCapacity
from jaxsgl.cache.pages import pages_for, tokens_in
from jaxsgl.config.engine import Limits
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
      states: what is returned of single tokens; None: nothing.
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
    states: StatesSpec | None = None

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
