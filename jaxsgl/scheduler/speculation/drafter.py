"""`Drafter`: proposes the tokens that may follow those of one request; a step then verifies them.

    extend(tokens)        tokens were appended to the request: its prompt first, then what each step yielded
    propose(most)         up to `most` drafts to verify in the next step; a question, which changes nothing
    judge(drafted, kept)  so many drafts were verified, and so many of them are the request's tokens now

A request holds one from its arrival to its end; `NO_DRAFTS` where it doesn't speculate.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxsgl.messages.replies import Speculated


class Drafter:
    """Proposes nothing. Others propose."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes tokens that were appended to the request's known ones."""

    def propose(self, most: int) -> tuple[int, ...]:
        """Up to `most` tokens that may come next, in order; () where nothing is likely."""
        return ()

    def judge(self, drafted: int, kept: int) -> None:
        """Takes how many drafts a step verified, and how many of them the request kept."""

    @property
    def speculated(self) -> Speculated | None:
        """What has become of all its drafts; None if none was verified."""
        return None


NO_DRAFTS = Drafter()
