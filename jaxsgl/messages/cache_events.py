"""What comes into the prefix cache and leaves it, as gateways hear of it."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class PagesStored(msgspec.Struct, frozen=True, tag="stored"):
    """Pages came into the prefix cache, one behind the other.

    Attributes:
      hashes: of each page; a page's hash depends on all tokens up to its end. Signed 64 bits.
      token_ids: of all pages, page after page.
      parent: hash of the page before the first, None at the start of a sequence.
    """

    hashes: list[int]
    token_ids: list[int]
    parent: int | None


class PagesRemoved(msgspec.Struct, frozen=True, tag="removed"):
    """Pages left the prefix cache."""

    hashes: list[int]


class CacheCleared(msgspec.Struct, frozen=True, tag="cleared"):
    """Nothing is cached any more."""


CacheEvent: TypeAlias = PagesStored | PagesRemoved | CacheCleared


class CacheEvents(msgspec.Struct, frozen=True, tag="cache_events"):
    """What happened to the prefix cache in one step, in order.

    Attributes:
      number: of the `WatchCache` that this answers: all that is cached, parents before children; None: news.
    """

    events: list[CacheEvent]
    number: int | None = None
