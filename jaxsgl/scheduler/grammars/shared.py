"""One queue of grammars for several ranks, each of which sees the requests that it has asked for alone."""

from __future__ import annotations

from collections.abc import Sequence

from jaxsgl.requests.grammar import Grammar
from jaxsgl.scheduler.grammars.queue import Answer, Grammars


class GrammarsOfRank:
    """What a rank's scheduler takes for the queue.

    Args:
      queue: of all ranks.
      all_ranks: every rank's, this one among them.
    """

    def __init__(self, queue: Grammars, all_ranks: Sequence[GrammarsOfRank]) -> None:
        self._queue = queue
        self._all_ranks = all_ranks
        self._asked: set[str] = set()
        self._answers: list[tuple[str, Answer]] = []

    @property
    def num_waiting(self) -> int:
        """Requests of this rank that wait for their grammars."""
        return len(self._asked)

    def ask(self, request_id: str, grammar: Grammar | None) -> Answer | None:
        """See `GrammarQueue`."""
        answer = self._queue.ask(request_id, grammar)
        if answer is None:
            self._asked.add(request_id)
        return answer

    def forget(self, request_id: str) -> None:
        """See `GrammarQueue`."""
        if request_id in self._asked:
            self._asked.remove(request_id)
            self._answers = [(asker, answer) for asker, answer in self._answers if asker != request_id]
            self._queue.forget(request_id)

    def poll(self) -> list[tuple[str, Answer]]:
        """What this rank has asked for and is known now; keeps what others have asked for until they poll."""
        for request_id, answer in self._queue.poll():
            (asker,) = (rank for rank in self._all_ranks if request_id in rank._asked)
            asker._answers.append((request_id, answer))
        answers, self._answers = self._answers, []
        self._asked.difference_update(request_id for request_id, _ in answers)
        return answers

    def wait(self, timeout_s: float) -> None:
        """Doesn't wait, as other ranks may have work; see `RankedScheduler.launch`."""


def grammars_of_ranks(queue: Grammars, num_ranks: int) -> list[GrammarsOfRank]:
    """One for each rank."""
    ranks: list[GrammarsOfRank] = []
    ranks += [GrammarsOfRank(queue, ranks) for _ in range(num_ranks)]
    return ranks
