"""From a request as it arrived to what the scheduler works with, or a refusal in words for the client."""

from __future__ import annotations

import random
from collections.abc import Iterable

from jaxsgl.batch.sampling import MAX_EOS_TOKEN_IDS
from jaxsgl.config import Limits
from jaxsgl.errors import CheckpointError, InvalidRequest
from jaxsgl.messages import Refusal, RefusalKind
from jaxsgl.request import Request, check_request, max_new_tokens
from jaxsgl.scheduler.req import Req


class Intake:
    """Checks requests and makes their samples.

    Args:
      limits: of a request.
      eos_token_ids: tokens that end every request that doesn't ignore them.
      random_seed: seeds of requests that bring none are drawn from it.
      max_queued: a request that finds so many samples waiting is refused; None: none is.

    Raises:
      CheckpointError: the model has more EOS tokens than the step can hold back until min_tokens.
    """

    def __init__(self, limits: Limits, eos_token_ids: Iterable[int], random_seed: int, max_queued: int | None) -> None:
        self._limits = limits
        self._eos_token_ids = frozenset(eos_token_ids)
        self._seeds = random.Random(random_seed)
        self._max_queued = max_queued
        if len(self._eos_token_ids) > MAX_EOS_TOKEN_IDS:
            raise CheckpointError(
                f"the model has {len(self._eos_token_ids)} EOS tokens, but {MAX_EOS_TOKEN_IDS} are the most: shorten "
                "eos_token_id in its generation_config.json"
            )

    def refusal(self, request: Request, num_waiting: int) -> Refusal | None:
        """Why `request` can't be taken. The queue holds samples, but a request is taken or refused as a whole."""
        try:
            check_request(request, self._limits)
        except InvalidRequest as error:
            return Refusal(RefusalKind.INVALID, str(error))
        if self._max_queued is not None and num_waiting >= self._max_queued:
            text = (
                f"the queue is full: {num_waiting} wait for admission, and --max-queued-requests is "
                f"{self._max_queued}: try again later"
            )
            return Refusal(RefusalKind.OVERLOADED, text)
        return None

    def samples(self, request: Request) -> list[Req]:
        """All samples of a request that was not refused; sample 0 leads the others."""
        sampling = request.sampling
        seed = sampling.seed if sampling.seed is not None else self._seeds.getrandbits(32)
        max_new = max_new_tokens(request, self._limits)
        leader = Req(request, max_new, self._eos_token_ids, seed)
        others = (Req(request, max_new, self._eos_token_ids, seed, index, leader) for index in range(1, sampling.n))
        return [leader, *others]
