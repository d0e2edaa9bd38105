"""Snapshots of states: which prefixes requests find, with a scheduler and a fake engine whose states are hashes.

The fake engine refuses a sequence whose state is not that of its tokens: a stale, early or overwritten snapshot fails.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.batch.build import BatchBuilder, Work
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.cache.snapshots import SnapshotCache, Snapshots
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.speculation.drafter import drafts_nothing
from jaxsgl.testing.engine import FakeEngine, ScriptedMailbox, generate
from tests.checked import CheckedScheduler
from tests.scheduler.drafters import knowing

PAGE, VOCAB = 4, 50
SYSTEM = [3 + i % 40 for i in range(22)]  # a shared beginning: 5 pages and 2 tokens


def answer_of(request: Request) -> list[int]:
    assert request.sampling.max_tokens is not None
    return generate(request.prompt_ids, request.sampling.max_tokens, frozenset(), VOCAB)


class Server:
    """Serves requests one after the other."""

    def __init__(
        self,
        num_snapshots: int = 12,
        num_pages: int = 100,
        chunk: int = 16,
        overlap: bool = True,
        drafts: str | None = None,
    ) -> None:
        capacity = Capacity(PAGE, num_pages, 4, 80, chunk, VOCAB, num_snapshots=num_snapshots)
        buckets = BucketSet.derive(capacity, max_drafts=0 if drafts is None else PAGE - 1)
        drafter_of = drafts_nothing if drafts is None else knowing(answer_of, drafts, VOCAB)
        self.scheduler = CheckedScheduler(capacity, buckets, (), drafter_of=drafter_of)
        self.engine, self.overlap = FakeEngine(capacity), overlap
        self.count = 0

    def ask(self, *prompts: Sequence[int], max_tokens: int = 3, n: int = 1) -> list[tuple[list[int], int]]:
        """The answer of each, and the tokens of its prompt that were cached; all arrive at once."""
        requests = []
        for prompt in prompts:
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, n=n)
            requests.append(Request(f"r{self.count}", list(prompt), params))
            self.count += 1
        mailbox = ScriptedMailbox([requests])
        run_loop(self.scheduler, self.engine, mailbox, int(self.overlap))
        found = []
        for request in requests:
            right = generate(request.prompt_ids, max_tokens, frozenset(), VOCAB)
            replies = [reply for reply in mailbox.replies if reply.request_id == request.request_id]
            for index in range(n):
                tokens = [token for reply in replies if reply.index == index for token in reply.token_ids]
                assert tokens == right
            found.append((right, max(reply.cached_tokens for reply in replies)))
        return found

    def cached(self, prompt: Sequence[int], max_tokens: int = 3) -> int:
        ((_, cached),) = self.ask(prompt, max_tokens=max_tokens)
        return cached

    @property
    def books(self) -> Snapshots:
        books = self.scheduler.cache.snapshots
        assert isinstance(books, Snapshots)
        return books


def test_a_shared_beginning_is_found_from_the_third_request_on() -> None:
    server = Server()
    assert [server.cached([*SYSTEM, i, 1, 2, 7]) for i in range(4)] == [0, 0, 20, 20]


def test_a_prompt_that_comes_again_begins_at_its_last_page() -> None:
    server = Server()
    assert [server.cached(SYSTEM) for _ in range(3)] == [0, 20, 20]
    assert server.cached(SYSTEM[:20]) == 0, "a state after 20 tokens leaves none to compute"


@pytest.mark.parametrize("overlap", [True, False])
def test_each_turn_of_a_chat_begins_where_the_answer_before_it_ended(overlap: bool) -> None:
    server = Server(overlap=overlap)
    history, last = list(SYSTEM), 0
    for turn in range(4):
        ((answer, cached),) = server.ask(history, max_tokens=9)
        assert cached == last
        stored = len(history) + len(answer) - 1  # the last token has no state
        last = stored - stored % PAGE
        history += [*answer, 5 + turn, 6]
    assert last > 50


@pytest.mark.parametrize("kind", ["right", "half", "wrong"])
def test_turns_begin_where_they_do_without_drafts_whichever_of_them_stand(kind: str) -> None:
    """Runs reach the end of a page with any of their drafts, and answers end anywhere."""
    runs = 0
    for max_tokens in range(3, 10):
        server = Server(drafts=kind)
        assert turns_of(server, max_tokens) == turns_of(Server(), max_tokens)
        runs += server.scheduler.load(0).speculation.runs
    assert runs > 20


def turns_of(server: Server, max_tokens: int) -> list[int]:
    """The cached tokens of each turn of a chat."""
    history, found = list(SYSTEM), []
    for turn in range(4):
        ((answer, cached),) = server.ask(history, max_tokens=max_tokens)
        found.append(cached)
        history += [*answer, 5 + turn, 6]
    return found


def test_samples_of_one_prompt_compute_it_once() -> None:
    server = Server()
    server.ask(SYSTEM, n=3)
    assert server.scheduler.state.totals.extend_tokens == len(SYSTEM) + 2 * (len(SYSTEM) - 20)


def test_the_snapshot_that_was_unused_for_longest_goes_first() -> None:
    server = Server(num_snapshots=2)
    prompts = [[i] * 9 for i in (1, 2, 3)]
    for prompt in prompts[:2]:
        assert server.cached(prompt, max_tokens=1) == 0
    assert server.cached(prompts[0], max_tokens=1) == 8
    assert server.cached(prompts[2], max_tokens=1) == 0
    assert [server.cached(prompt, max_tokens=1) for prompt in (prompts[0], prompts[1])] == [8, 0]
    assert server.books.num_kept == 2 and server.books.num_dropped == 2


def test_running_answers_leave_half_of_the_places_to_prefixes() -> None:
    server = Server(num_snapshots=8)
    assert [server.cached([*SYSTEM, i, 1, 2, 7]) for i in range(3)] == [0, 0, 20]
    server.ask([1, 2], [3, 4], [5, 6], [7, 8], max_tokens=60)
    assert server.cached([*SYSTEM, 9, 1, 2, 7]) == 20


def test_turns_begin_where_the_answers_before_ended_although_each_has_one_place_only() -> None:
    server = Server(num_snapshots=8)
    prompts = [[1, 2], [3, 4], [5, 6], [7, 8]]
    answers = server.ask(*prompts, max_tokens=9)
    turns = [[*prompt, *answer, 9] for prompt, (answer, _) in zip(prompts, answers, strict=True)]
    assert [cached for _, cached in server.ask(*turns)] == [8] * 4


def test_requests_run_without_a_free_place() -> None:
    server = Server(num_snapshots=1)
    prompts = [[i, *SYSTEM] for i in range(4)]
    server.ask(*prompts, max_tokens=20)
    server.scheduler.check()


def test_pages_and_their_snapshots_leave_together() -> None:
    server = Server(num_pages=14)
    assert [server.cached([9 + i, *SYSTEM], max_tokens=1) for i in range(4)] == [0] * 4
    tree = server.scheduler.cache.prefixes
    assert isinstance(tree, SnapshotCache) and 0 < tree.num_kept < 4
    server.scheduler.flush_cache()
    assert tree.num_kept == 0 and len(tree.free) == server.books.num_places


class FailingBuilder(BatchBuilder):
    """Fails at prompts with a certain token."""

    def extend(self, works: Sequence[Work]) -> StepInputs:
        if any(VOCAB - 1 in work.token_ids for work in works):
            raise ValueError("poison")
        return super().extend(works)


def test_places_for_the_states_of_a_step_that_is_not_launched_are_free_again() -> None:
    """A request fails while its batch is built, with places taken for its own states and for those of another one."""
    capacity = Capacity(PAGE, 100, 4, 80, 64, VOCAB, num_snapshots=2)
    scheduler = CheckedScheduler(capacity, BucketSet.derive(capacity), (), make_builder=FailingBuilder)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    whole, poisoned = Request("whole", SYSTEM, params), Request("poisoned", [1] * 9 + [VOCAB - 1], params)
    mailbox = ScriptedMailbox([[whole, poisoned]])
    run_loop(scheduler, FakeEngine(capacity), mailbox, 1)
    assert mailbox.output_ids("whole") == generate(SYSTEM, 3, frozenset(), VOCAB)
    assert [reply.request_id for reply in mailbox.replies if reply.refusal is not None] == ["poisoned"]


def test_the_audit_finds_lost_and_doubled_places() -> None:
    server = Server()
    server.cached(SYSTEM)
    tree = server.scheduler.cache.prefixes
    assert isinstance(tree, SnapshotCache)
    place = tree.free.pop()
    assert any(f"place {place} of a snapshot is in 0 places" in leak for leak in server.books.wrong([]))
    tree.free += [place, place]
    assert any(f"place {place} of a snapshot is in 2 places" in leak for leak in server.books.wrong([]))
