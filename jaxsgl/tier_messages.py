"""What the engine tells of its host tier, as a msgspec struct; a `Load` (messages.py) carries it."""

from __future__ import annotations

import msgspec


class HostLoad(msgspec.Struct, array_like=True):
    """How full the host tier is, and counters since the start of the engine; zeros without such a tier.

    Attributes:
      total_tokens, used_tokens: tokens that host memory can hold, and holds.
      written_tokens: copied from the pool.
      loaded_tokens: copied to the pool instead of being computed.
      evicted_tokens: that left host memory because others needed their room.
      not_written_tokens: that found no room in host memory.
      given_up: loads that were stopped, so that their requests computed the rest.
    """

    total_tokens: int = 0
    used_tokens: int = 0
    written_tokens: int = 0
    loaded_tokens: int = 0
    evicted_tokens: int = 0
    not_written_tokens: int = 0
    given_up: int = 0
