"""The masks of a launched step, once all tokens before it are collected: which token each constrained row may get.

scheduler.py calls it between the forward program of a step and the program that chooses tokens. Rows without any
may get any token, and so may rows of requests that have ended meanwhile: their tokens are dropped.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from jaxsgl.messages.replies import Reply
from jaxsgl.requests.request import FinishReason
from jaxsgl.scheduler.apply import Applier
from jaxsgl.scheduler.constraint import ALL, Words


class Mark(Protocol):
    """Notes whose mask is being made, where it is found if this process dies meanwhile."""

    def begin(self, request_id: str) -> None:
        """The mask of that request begins."""
        ...

    def end(self) -> None:
        """It is made."""
        ...


def masks_of_newest(applier: Applier, num_seqs: int, vocab_size: int, mark: Mark) -> tuple[Words, list[Reply]]:
    """`[num_seqs, ceil(V / 32)]` for the step that was launched last, and replies of requests that end here.

    A request ends if its output is complete and can't go on, or if its grammar can't be followed.
    """
    step = applier.newest_step
    words = np.full((num_seqs, -(-vocab_size // 32)), ALL, dtype=np.uint32)
    replies: list[Reply] = []
    for place, (req, number) in enumerate(zip(step.reqs, step.lease_numbers, strict=True)):
        if req.constraint is None or req.lease_number != number or req in step.silent:
            continue
        mark.begin(req.request_id)
        try:
            if req.constraint.mask_into(words[place], req.output_ids):
                continue
            replies.append(Reply(req.request_id, (), FinishReason.STOP, req.cached_tokens, index=req.index))
            applier.end(req)
        except Exception as error:
            replies.append(applier.fail(req.request_id, error))
        finally:
            mark.end()
        words[place] = ALL
    return words, replies
