"""`GrammarQueue`: compiles grammars in threads while requests wait for them, and keeps what came of each.

    ask(request) -> at once, if its grammar is known      threads: prepare() once, then compile(grammar)
                    otherwise later, by poll()            known: the last 256 grammars, those that failed too,
                                                          as far as they take 128 MiB together

Requests with equal grammars share the compilation. Such a request stands in the scheduler's queue meanwhile and is
passed over. A compilation that was begun is waited for: it has limits of its own (constraints/trial.py). Knows no
samples and no steps; arrivals.py calls it between steps. Only `_work` runs in threads. `NoGrammars` stands in its place
on servers that take none. Ranks share one queue, each of which sees the requests that it has asked for alone
(`GrammarsOfRank`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from jaxsgl.errors import EngineUnavailable, InvalidRequest
from jaxsgl.messages.replies import Refusal, RefusalKind
from jaxsgl.requests.grammar import Grammar
from jaxsgl.scheduler.grammars.constraint import AnyTokens, Matcher

Answer: TypeAlias = Matcher | Refusal
Compile: TypeAlias = Callable[[Grammar], Matcher]

NUM_THREADS = 2
IDLE_S = 10.0  # after which a thread without work ends
_ANY = AnyTokens()
MAX_KNOWN, MAX_KNOWN_CHARS, MAX_KNOWN_BYTES = 256, 1 << 24, 128 << 20

logger = logging.getLogger(__name__)


class Grammars(Protocol):
    """What a scheduler takes: a `GrammarQueue`, its rank's part of one, or `NoGrammars`."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their grammars."""
        ...

    def ask(self, request_id: str, grammar: Grammar | None) -> Answer | None:
        """See `GrammarQueue`."""
        ...

    def forget(self, request_id: str) -> None:
        """See `GrammarQueue`."""
        ...

    def poll(self) -> list[tuple[str, Answer]]:
        """See `GrammarQueue`."""
        ...

    def wait(self, timeout_s: float) -> None:
        """See `GrammarQueue`."""
        ...


class NoGrammars:
    """The queue of a server that takes no grammars.

    Attributes:
      num_waiting: see `GrammarQueue`.
    """

    num_waiting = 0

    def ask(self, request_id: str, grammar: Grammar | None) -> Answer | None:
        """Refuses the request."""
        text = "the server takes no grammars, allowed_token_ids or bad_words (--grammar-backend none): leave them out"
        return Refusal(RefusalKind.INVALID, text)

    def forget(self, request_id: str) -> None:
        """Does nothing, as no request waits."""

    def poll(self) -> list[tuple[str, Answer]]:
        """Nothing was asked for."""
        return []

    def wait(self, timeout_s: float) -> None:
        """Doesn't wait."""


class _Job:
    """A grammar to compile. `start_s` is set by a thread when it begins, `answer` when it is done."""

    __slots__ = ("answer", "cancelled", "grammar", "lasts", "request_ids", "start_s")

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.request_ids: dict[str, float] = {}  # and since when they wait
        self.start_s: float | None = None
        self.answer: Answer | None = None
        self.lasts = True  # whether the answer would be the same next time
        self.cancelled = False


class GrammarQueue:
    """Grammars that are being compiled, and those that were.

    Args:
      compile: gives the matcher of an empty output, in any thread and in bounded time; raises `InvalidRequest` for a
        grammar that is bad, or takes too much, and `EngineUnavailable` for one that may do later.
      timeout_s: that a request waits at most until its grammar is begun.
      prepare: is called once before the first grammar, in a thread; its time doesn't count.
      clock: gives seconds.
    """

    def __init__(
        self,
        compile: Compile,
        timeout_s: float,
        prepare: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._compile = compile
        self._prepare = prepare
        self._timeout_s = timeout_s
        self._clock = clock
        self._known: OrderedDict[Grammar, Answer] = OrderedDict()
        self._known_chars = self._known_bytes = 0
        self._jobs: dict[Grammar, _Job] = {}
        self._job_of: dict[str, _Job] = {}
        self._num_threads = 0
        self._ready_s: float | None = None  # when `prepare` was done
        self._changed = threading.Condition()  # for all below, which threads share
        self._todo: deque[_Job] = deque()
        self._done: deque[_Job] = deque()
        self._preparing = threading.Lock()

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their grammars."""
        return len(self._job_of)

    def ask(self, request_id: str, grammar: Grammar | None) -> Answer | None:
        """The grammar's matcher, or why there is none, if that is known; None: a `poll` will tell.

        Without a grammar it is the matcher of any text, at once.
        """
        if grammar is None:
            return _ANY
        if (known := self._known.get(grammar)) is not None:
            self._known.move_to_end(grammar)
            return known
        job = self._jobs.get(grammar)
        if job is None:
            job = self._jobs[grammar] = _Job(grammar)
            with self._changed:
                self._todo.append(job)
                self._changed.notify_all()
            self._start_threads()
        job.request_ids[request_id] = self._clock()
        self._job_of[request_id] = job
        return None

    def forget(self, request_id: str) -> None:
        """Takes back what a request that has ended asked for; a grammar that only it wanted isn't begun any more."""
        job = self._job_of.pop(request_id, None)
        if job is None:
            return
        del job.request_ids[request_id]
        self._drop_unless_begun(job)

    def poll(self) -> list[tuple[str, Answer]]:
        """What requests have asked for and is known now, each once."""
        answers: list[tuple[str, Answer]] = []
        while self._done:
            job = self._done.popleft()
            assert job.answer is not None
            del self._jobs[job.grammar]
            if job.lasts:
                self._keep(job.grammar, job.answer)
            answers += self._answer(job, list(job.request_ids), job.answer)
        return answers + self._overdue()

    def wait(self, timeout_s: float) -> None:
        """Waits until there may be something to `poll`."""
        with self._changed:
            if not self._done:
                self._changed.wait(timeout_s)

    def _answer(self, job: _Job, request_ids: list[str], answer: Answer) -> list[tuple[str, Answer]]:
        for request_id in request_ids:
            del job.request_ids[request_id], self._job_of[request_id]
        return [(request_id, answer) for request_id in request_ids]

    def _overdue(self) -> list[tuple[str, Answer]]:
        """Refuses requests that have waited too long for a grammar that no thread has begun."""
        if self._ready_s is None:
            return []
        answers: list[tuple[str, Answer]] = []
        now = self._clock()
        for job in [job for job in self._jobs.values() if job.start_s is None]:
            late = [
                id for id, since_s in job.request_ids.items() if now - max(since_s, self._ready_s) > self._timeout_s
            ]
            if not late:
                continue
            text = f"the grammar waited longer than {self._timeout_s:g} s for others (--grammar-timeout): try later"
            answers += self._answer(job, late, Refusal(RefusalKind.WAITED, text))
            self._drop_unless_begun(job)
        return answers

    def _drop_unless_begun(self, job: _Job) -> None:
        """Takes back a job that no request waits for, unless a thread has begun it: then it is kept for others."""
        with self._changed:
            if job.request_ids or job.start_s is not None:
                return
            job.cancelled = True
        del self._jobs[job.grammar]

    def _keep(self, grammar: Grammar, answer: Answer) -> None:
        assert grammar not in self._known, "a grammar is compiled twice"
        self._known[grammar] = answer
        self._known_chars += len(grammar.text)
        self._known_bytes += _bytes_of(answer)
        while (
            len(self._known) > MAX_KNOWN or self._known_chars > MAX_KNOWN_CHARS or self._known_bytes > MAX_KNOWN_BYTES
        ):
            oldest, its_answer = self._known.popitem(last=False)
            self._known_chars -= len(oldest.text)
            self._known_bytes -= _bytes_of(its_answer)

    def _start_threads(self) -> None:
        """Daemons, since one may be busy when the process ends. They end when there is nothing to do."""
        with self._changed:
            num_missing = NUM_THREADS - self._num_threads
            self._num_threads += num_missing
        for _ in range(num_missing):
            threading.Thread(target=self._work, name="grammar", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._todo, IDLE_S):
                    self._num_threads -= 1
                    return
                job = self._todo.popleft()
            now_s = self._clock()
            with self._changed:
                if job.cancelled:
                    continue
                job.start_s = now_s
            answer, lasts = self._answer_of(job.grammar)
            with self._changed:
                job.answer, job.lasts = answer, lasts
                self._done.append(job)
                self._changed.notify_all()

    def _answer_of(self, grammar: Grammar) -> tuple[Answer, bool]:
        """What came of `grammar`, and whether the same would come of it again."""
        try:
            self._prepare_once()
            return self._compile(grammar), True
        except InvalidRequest as error:
            return Refusal(RefusalKind.INVALID, str(error)), True
        except EngineUnavailable as error:
            return Refusal(RefusalKind.WAITED, str(error)), False
        except Exception:
            logger.exception("a grammar can't be compiled")
            return Refusal(RefusalKind.FAILED, "the server failed at the request's grammar"), False

    def _prepare_once(self) -> None:
        with self._preparing:
            if self._ready_s is None:
                self._prepare()
                self._ready_s = self._clock()


def _bytes_of(answer: Answer) -> int:
    return 0 if isinstance(answer, Refusal) else answer.num_bytes


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
