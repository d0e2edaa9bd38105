"""Sizes fixed at start-up, once the model and the free memory are known. Scheduler and engine share them."""

from __future__ import annotations

from dataclasses import dataclass

from jaxsgl.cache.pages import pages_for, tokens_in
from jaxsgl.config import Limits


@dataclass(frozen=True)
class Capacity:
    """What one engine can hold.

    Attributes:
      page_size: tokens per page.
      num_pages: pages in the pool, the dummy page 0 included.
      num_rows: requests running at once; row `num_rows` is the dummy row of padding.
      context_length: tokens of one request at most.
      max_extend_tokens: tokens of one extend step at most.
      vocab_size: size of the vocabulary.
    """

    page_size: int
    num_pages: int
    num_rows: int
    context_length: int
    max_extend_tokens: int
    vocab_size: int

    @property
    def pool_tokens(self) -> int:
        """Tokens that all pages but the dummy page hold."""
        return tokens_in(self.num_pages - 1, self.page_size)

    @property
    def max_pages_per_seq(self) -> int:
        """Width P of page tables: pages of a request that fills the context."""
        return pages_for(self.context_length, self.page_size)

    @property
    def limits(self) -> Limits:
        """What requests are checked against."""
        return Limits(self.vocab_size, self.context_length, self.pool_tokens)
