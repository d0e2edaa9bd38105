"""`Req`: the scheduler's view of one request. Owns its lengths, its output and its state; nobody else moves them.

prompt_ids  |=========== cached ===========|=== chunk ===|.........|
            0                       kv_len before    kv_len after   prompt_len
then one token a step: the token sampled last is stored (kv_len + 1) while the next one is sampled.
"""

from __future__ import annotations

import numpy as np

from jaxsgl.cache.manager import Lease
from jaxsgl.cache.pages import IntArray
from jaxsgl.request import FinishReason, Request
from jaxsgl.scheduler.states import TRANSITIONS, State


class Req:
    """One request from its arrival to its end.

    Attributes:
      prompt_ids: `[n]` int32.
      output_ids: tokens read from the device so far.
      max_new_tokens: tokens it may generate, capped by context and pool.
      kv_len: tokens whose KV is stored, or will be by steps in flight.
      num_launched: sampled tokens that are read or in flight.
      cached_tokens: prompt tokens found in the prefix cache at admission.
      lease: what it holds of the cache while EXTENDING or RUNNING.
    """

    __slots__ = (
        "cached_tokens", "kv_len", "lease", "max_new_tokens", "num_launched", "output_ids", "prompt_ids",
        "request_id", "sampling", "seed", "state", "stop_ids",
    )  # fmt: skip

    def __init__(self, request: Request, max_new_tokens: int, eos_token_ids: frozenset[int], seed: int) -> None:
        self.request_id = request.request_id
        self.sampling = request.sampling
        self.prompt_ids: IntArray = np.array(request.prompt_ids, dtype=np.int32)
        self.max_new_tokens = max_new_tokens
        self.stop_ids = frozenset(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            self.stop_ids |= eos_token_ids
        self.seed = seed
        self.output_ids: list[int] = []
        self.state = State.WAITING
        self.lease: Lease | None = None
        self.kv_len = 0
        self.num_launched = 0
        self.cached_tokens = 0

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def max_kv_len(self) -> int:
        """Tokens of KV that it can ever store: the last sampled token's is never needed."""
        return self.prompt_len + self.max_new_tokens - 1

    @property
    def can_launch(self) -> bool:
        """Whether another decode step makes sense, for all that is known without reading tokens."""
        return self.state is State.RUNNING and self.num_launched < self.max_new_tokens

    def stored_ids(self) -> IntArray:
        """Token ids whose KV is stored or in flight and whose values are known: what may be shared."""
        ids = np.concatenate((self.prompt_ids, np.array(self.output_ids, dtype=np.int32)))
        return ids[: self.kv_len]

    def admit(self, lease: Lease, cached_tokens: int) -> None:
        """Takes what it needs to run."""
        self._move(State.EXTENDING)
        self.lease = lease
        self.kv_len = self.cached_tokens = cached_tokens

    def launch_chunk(self, num_tokens: int) -> None:
        """`num_tokens` more of the prompt are in flight."""
        self.kv_len += num_tokens
        if self.kv_len == self.prompt_len:
            self._move(State.RUNNING)
            self.num_launched = 1

    def launch_decode(self) -> None:
        """One decode step is in flight."""
        self.kv_len += 1
        self.num_launched += 1

    def append(self, token_id: int) -> FinishReason | None:
        """Takes one token that was read from the device; says whether, and why, it is the last."""
        self.output_ids.append(token_id)
        if token_id in self.stop_ids:
            return FinishReason.STOP
        if len(self.output_ids) == self.max_new_tokens:
            return FinishReason.LENGTH
        return None

    def finish(self) -> Lease | None:
        """Ends it, and hands over what it held."""
        self._move(State.FINISHED)
        lease, self.lease = self.lease, None
        return lease

    def _move(self, state: State) -> None:
        assert state in TRANSITIONS[self.state], f"{self.request_id}: {self.state} can't become {state}"
        self.state = state
