"""`Req`: the scheduler's view of one sample of a request. Owns its lengths, output and state; nobody else moves them.

known_ids  |=========== cached ===========|=== chunk ===|.........|
           0                       kv_len before    kv_len after   extend_to
then one token a step: the token sampled last is stored (kv_len + 1) while the next one is sampled; or several steps in
one launch. What is known is the prompt, and for a request that was retracted its output so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from jaxsgl.batch.sampling import pack_edits, row_setup, token_counts
from jaxsgl.cache.lease import Lease
from jaxsgl.cache.pages import IntArray
from jaxsgl.messages import TokenLogprob
from jaxsgl.request import MAX_SEED, FinishReason, Request
from jaxsgl.scheduler.states import TRANSITIONS, State

Key: TypeAlias = tuple[str, int]  # request id, index of the sample


class Req:
    """One sample of a request from its arrival to its end.

    Attributes:
      request_id, index: of the request, as the front end knows it, and which of its samples this is.
      key: both, its name among all of the scheduler's.
      wants_scores: whether log-probabilities go into its replies.
      is_featured: whether the featured program samples for it.
      leader: sample 0 of the same request, whose prompt it waits for; None for sample 0 itself.
      prompt_ids: `[n]` int32; one array for all samples.
      output_ids: tokens read from the device so far.
      max_new_tokens: tokens it may generate, capped by context and pool.
      kv_len: tokens whose KV is stored, or will be by steps in flight.
      num_launched: sampled tokens that are read or in flight.
      extend_to: tokens known when it was admitted, all to be stored before it samples.
      cached_tokens: prompt tokens found in the prefix cache when it was admitted to yield its first token.
      lease_number: changes whenever it gets or gives back a lease: a step launched under another number yields
        nothing for it any more.
      prefilled: whether its whole prompt was launched once, so that its samples find it in the cache.
      priority: as the client sent it.
      num_ahead: admissions before its arrival, and requests that waited then: so many may go before it in good order.
      lease: what it holds of the cache while EXTENDING or RUNNING.
    """

    __slots__ = (
        "_prompt_logprobs",
        "cached_tokens",
        "extend_to",
        "index",
        "is_featured",
        "key",
        "kv_len",
        "leader",
        "lease",
        "lease_number",
        "max_new_tokens",
        "num_ahead",
        "num_launched",
        "output_ids",
        "prefilled",
        "priority",
        "prompt_ids",
        "request_id",
        "sampling",
        "seed",
        "state",
        "stop_ids",
        "wants_scores",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        max_new_tokens: int,
        eos_token_ids: frozenset[int],
        seed: int,
        index: int = 0,
        leader: Req | None = None,
    ) -> None:
        self.request_id = request.request_id
        self.index = index
        self.key: Key = (request.request_id, index)
        self.leader = leader
        self.sampling = request.sampling
        self.wants_scores = request.sampling.logprobs is not None or request.sampling.prompt_logprobs is not None
        self.is_featured = request.sampling.edits_logits or request.sampling.logprobs is not None
        self.prompt_ids: IntArray = leader.prompt_ids if leader else np.array(request.prompt_ids, dtype=np.int32)
        self.max_new_tokens = max_new_tokens
        self.stop_ids = frozenset(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            self.stop_ids |= eos_token_ids
        self.seed = (seed + index) & MAX_SEED
        self.output_ids: list[int] = []
        self.state = State.WAITING
        self.lease: Lease | None = None
        self.kv_len = 0
        self.num_launched = 0
        self.extend_to = self.prompt_len
        self.lease_number = 0
        self.prefilled = False
        self.priority = request.priority
        self.num_ahead = 0
        self.cached_tokens = 0
        self._prompt_logprobs: list[TokenLogprob] = []

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.request_id} (sample {self.index})"

    @property
    def may_start(self) -> bool:
        """Whether nothing is gained by waiting: the leader's prompt is launched, so its pages can be shared."""
        return self.leader is None or self.leader.prefilled or self.leader.state is State.FINISHED

    @property
    def scores_prompt(self) -> bool:
        """Whether it still computes the log-probabilities of its prompt: one of n samples does it for all."""
        return self.sampling.prompt_logprobs is not None and self.leader is None and not self.output_ids

    @property
    def known_ids(self) -> IntArray:
        """Prompt and output so far."""
        if not self.output_ids:
            return self.prompt_ids
        return np.concatenate((self.prompt_ids, np.array(self.output_ids, dtype=np.int32)))

    @property
    def matchable_ids(self) -> IntArray:
        """Tokens whose KV may come from the prefix cache; none if their logits are wanted."""
        return self.prompt_ids[:0] if self.scores_prompt else self.known_ids

    @property
    def extend_left(self) -> int:
        """Known tokens that are not stored or in flight, while EXTENDING; 0 then."""
        return max(self.extend_to - self.kv_len, 0)

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def max_kv_len(self) -> int:
        """Tokens of KV that it can ever store: the last sampled token's is never needed."""
        return self.prompt_len + self.max_new_tokens - 1

    @property
    def num_left(self) -> int:
        """Tokens that it may generate besides those that are read or in flight."""
        return self.max_new_tokens - self.num_launched

    @property
    def can_launch(self) -> bool:
        """Whether another decode step makes sense, for all that is known without reading tokens."""
        return self.state is State.RUNNING and self.num_launched < self.max_new_tokens

    def stored_ids(self) -> IntArray:
        """Token ids whose KV is stored or in flight and whose values are known: what may be shared."""
        return self.known_ids[: self.kv_len]

    def targets(self, start: int, stop: int) -> IntArray | None:
        """`[stop - start]` the prompt token behind each of a chunk's tokens, if its log-probability is wanted.

        Nothing is known to stand behind the last one: a 0, whose score nobody reads.
        """
        return np.append(self.prompt_ids, np.int32(0))[start + 1 : stop + 1] if self.scores_prompt else None

    def edit_setup(self, vocab_size: int) -> IntArray | None:
        """What the device must know before it samples, `sampling.row_setup`, if the request edits logits.

        Made of ids that the host knows, so it serves a request that starts over as well.
        """
        if not self.sampling.edits_logits or self.lease is None:
            return None
        edits = pack_edits(self.sampling, self.stop_ids, self.prompt_len)
        return row_setup(self.lease.row, edits, token_counts(self.prompt_ids, self.output_ids, vocab_size))

    def admit(self, lease: Lease, cached_tokens: int) -> None:
        """Takes what it needs to run."""
        self._move(State.EXTENDING)
        self.lease = lease
        self.kv_len = cached_tokens
        self.extend_to = self.prompt_len + len(self.output_ids)
        if not self.output_ids:
            self.cached_tokens = cached_tokens
        self.lease_number += 1

    def launch_chunk(self, num_tokens: int) -> None:
        """`num_tokens` more of the prompt are in flight."""
        self.kv_len += num_tokens
        if self.kv_len == self.extend_to:
            self._move(State.RUNNING)
            self.prefilled = True
            self.num_launched = len(self.output_ids) + 1

    def launch_decode(self, num_tokens: int = 1) -> None:
        """`num_tokens` more tokens are in flight."""
        self.kv_len += num_tokens
        self.num_launched += num_tokens

    def append(self, token_id: int) -> FinishReason | None:
        """Takes one token that was read from the device; says whether, and why, it is the last."""
        self.output_ids.append(token_id)
        if token_id in self.stop_ids:
            return FinishReason.STOP
        if len(self.output_ids) == self.max_new_tokens:
            return FinishReason.LENGTH
        return None

    def take(self, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Takes tokens up to the last one, if it is among them: what follows means nothing. Those, and why it ended."""
        if len(token_ids) == 1:  # nearly always: this runs for each request in each step
            return token_ids, self.append(token_ids[0])
        for count, token_id in enumerate(token_ids, 1):
            reason = self.append(token_id)
            if reason is not None:
                return token_ids[:count], reason
        return token_ids, None

    def add_prompt_logprobs(self, start: int, logprobs: Sequence[TokenLogprob]) -> None:
        """Takes those of the prompt tokens behind positions start, start + 1, ..., and not that of the output."""
        self._prompt_logprobs += logprobs[: self.prompt_len - 1 - start]

    def take_prompt_logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """All of them, once, with the first token."""
        if self.sampling.prompt_logprobs is None or self.leader is not None or len(self.output_ids) != 1:
            return None
        taken, self._prompt_logprobs = tuple(self._prompt_logprobs), []
        return taken

    def retract(self) -> Lease:
        """Back to the queue, with its output so far; hands over what it held. What is in flight is lost."""
        self._move(State.WAITING)
        lease, self.lease = self.lease, None
        assert lease is not None
        self.lease_number += 1
        self.kv_len, self.num_launched, self._prompt_logprobs = 0, len(self.output_ids), []
        return lease

    def finish(self) -> Lease | None:
        """Ends it, and hands over what it held."""
        self._move(State.FINISHED)
        self.lease_number += 1
        lease, self.lease = self.lease, None
        return lease

    def _move(self, state: State) -> None:
        assert state in TRANSITIONS[self.state], f"{self.key}: {self.state} can't become {state}"
        self.state = state
