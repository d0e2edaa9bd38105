"""`GrammarQueue`: compiles grammars in threads while requests wait for them, and keeps what came of each.

    ask(request) -> at once, if its grammar is known      threads: prepare() once, then compile(grammar)
                    otherwise later, by poll()            known: the last 256 grammars, those that failed too

Requests with equal grammars share the compilation; those with masks but no grammar wait for `prepare` alone. Such a
request stands in the scheduler's queue meanwhile and is passed over. A thread can't be killed: one that is still busy
when its request's time is over gets a substitute, a few times. Knows no samples and no steps; arrivals.py calls it
between steps. Only `_work` runs in threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TypeAlias

from jaxsgl.errors import InvalidRequest
from jaxsgl.messages.replies import Refusal, RefusalKind
from jaxsgl.requests.grammar import Grammar
from jaxsgl.scheduler.constraint import AnyTokens, Matcher

Answer: TypeAlias = Matcher | Refusal
Compile: TypeAlias = Callable[[Grammar], Matcher]

NUM_THREADS = 2
IDLE_S = 10.0  # after which a thread without work ends
MAX_STUCK = 6  # threads that are still busy with grammars that were given up
_ANY = AnyTokens()
MAX_KNOWN, MAX_KNOWN_CHARS = 256, 1 << 24

logger = logging.getLogger(__name__)


class _Job:
    """A grammar to compile. `start_s` is set by a thread when it begins, `answer` when it is done."""

    __slots__ = ("answer", "cancelled", "given_up", "grammar", "lasts", "request_ids", "start_s")

    def __init__(self, grammar: Grammar | None) -> None:
        self.grammar = grammar
        self.request_ids: dict[str, float] = {}  # and since when they wait
        self.start_s: float | None = None
        self.answer: Answer | None = None
        self.lasts = True  # whether the answer would be the same next time
        self.cancelled = self.given_up = False


class GrammarQueue:
    """Grammars that are being compiled, and those that were.

    Args:
      compile: gives the matcher of an empty output, in any thread; raises `InvalidRequest` for a bad grammar.
      timeout_s: a request whose grammar takes longer is refused, and so is the next one with that grammar.
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
        self._known_chars = 0
        self._jobs: dict[Grammar | None, _Job] = {}
        self._job_of: dict[str, _Job] = {}
        self._stuck: set[_Job] = set()
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

        Without a grammar it is the matcher of any text.
        """
        if grammar is None and self._ready_s is not None:
            return _ANY
        if grammar is not None and (known := self._known.get(grammar)) is not None:
            self._known.move_to_end(grammar)
            return known
        job = self._jobs.get(grammar)
        if job is None:
            if len(self._stuck) >= MAX_STUCK:
                return Refusal(RefusalKind.OVERLOADED, "no grammar can be compiled, others take too long: try later")
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
        if not job.request_ids and job.start_s is None:
            job.cancelled = True
            del self._jobs[job.grammar]

    def poll(self) -> list[tuple[str, Answer]]:
        """What requests have asked for and is known now, each once."""
        answers: list[tuple[str, Answer]] = []
        while self._done:
            job = self._done.popleft()
            assert job.answer is not None
            self._stuck.discard(job)
            if self._jobs.get(job.grammar) is job:
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
        """Refuses requests that have waited too long. A grammar that was begun is refused from now on."""
        if self._ready_s is None:
            return []
        answers: list[tuple[str, Answer]] = []
        now = self._clock()
        for job in sorted(self._jobs.values(), key=lambda job: job.start_s is not None):
            late = [
                id for id, since_s in job.request_ids.items() if now - max(since_s, self._ready_s) > self._timeout_s
            ]
            if not late:
                continue
            if job.start_s is None:
                text = f"the grammar waited longer than {self._timeout_s:g} s for others (--grammar-timeout): try later"
                answers += self._answer(job, late, Refusal(RefusalKind.WAITED, text))
                if not job.request_ids:
                    job.cancelled = True
                    del self._jobs[job.grammar]
            elif now - max(job.start_s, self._ready_s) > self._timeout_s and self._give_up(job):
                text = (
                    f"the grammar takes longer than {self._timeout_s:g} s to compile (--grammar-timeout): simplify it"
                )
                refusal = Refusal(RefusalKind.INVALID, text)
                answers += self._answer(job, list(job.request_ids), refusal)
                del self._jobs[job.grammar]
                self._keep(job.grammar, refusal)
        return answers

    def _give_up(self, job: _Job) -> bool:
        """Has another thread take the place of the one that is busy with `job`; False if that is done just now."""
        with self._changed:
            job.given_up = job.answer is None
            self._num_threads -= job.given_up
        if job.given_up:
            self._stuck.add(job)
            self._start_threads()
        return job.given_up

    def _keep(self, grammar: Grammar | None, answer: Answer) -> None:
        if grammar is None:
            return
        if self._known.pop(grammar, None) is None:
            self._known_chars += len(grammar.text)
        self._known[grammar] = answer
        while len(self._known) > MAX_KNOWN or self._known_chars > MAX_KNOWN_CHARS:
            oldest, _ = self._known.popitem(last=False)
            self._known_chars -= len(oldest.text)

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
            if job.cancelled:
                continue
            job.start_s = self._clock()
            answer, lasts = self._answer_of(job.grammar)
            with self._changed:
                job.answer, job.lasts = answer, lasts
                self._done.append(job)
                self._changed.notify_all()
                if job.given_up:
                    return

    def _answer_of(self, grammar: Grammar | None) -> tuple[Answer, bool]:
        """What came of `grammar`, and whether the same would come of it again."""
        try:
            self._prepare_once()
            return (_ANY if grammar is None else self._compile(grammar)), True
        except InvalidRequest as error:
            return Refusal(RefusalKind.INVALID, str(error)), True
        except Exception:
            logger.exception("a grammar can't be compiled")
            return Refusal(RefusalKind.FAILED, "the server failed at the request's grammar"), False

    def _prepare_once(self) -> None:
        with self._preparing:
            if self._ready_s is None:
                self._prepare()
                self._ready_s = self._clock()
