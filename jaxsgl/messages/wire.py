"""What the two processes say to each other, as msgspec structs (MessagePack on ZeroMQ; never pickle).

Front end to engine: `Request`, `Abort`, `Shutdown`, and commands (orders.py; those on weights: weights.py, on
adapters: adapters.py), each answered once unless a `Withdraw` comes first: by an `Answer`, or in the case of
`WatchCache` by `CacheEvents`.
Several front-end processes that share an engine send `LineOrder`s too, which shared_mailbox.py carries out.
Engine to front end: `EngineReady` once, then one `Replies` per turn of the loop (hence per step), `CacheEvents` after a
`WatchCache`, and `EngineFailed` as the final message.
"""

from __future__ import annotations

from typing import TypeAlias

from jaxsgl.messages.cache_events import CacheEvents
from jaxsgl.messages.orders import Abort, AbortMatching, Answer, CloseLine, Command, OpenLine, Shutdown, Withdraw
from jaxsgl.messages.replies import EngineFailed, EngineReady, Replies
from jaxsgl.requests.request import Request

ToEngine: TypeAlias = Request | Abort | Command | Withdraw | Shutdown
LineOrder: TypeAlias = OpenLine | CloseLine | AbortMatching
ToMailbox: TypeAlias = ToEngine | LineOrder
News: TypeAlias = Replies | Answer | CacheEvents
FromEngine: TypeAlias = EngineReady | News | EngineFailed
