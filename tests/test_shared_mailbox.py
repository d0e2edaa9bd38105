from __future__ import annotations

import math
from collections.abc import Sequence

from jaxsgl.config.engine import Limits
from jaxsgl.messages.orders import (
    PARENT_LINE,
    Abort,
    AbortMatching,
    Answer,
    CloseLine,
    FlushCache,
    FromEngine,
    OpenLine,
    Ping,
    ToMailbox,
    WatchCache,
    Withdraw,
    first_number,
)
from jaxsgl.messages.replies import (
    CacheCleared,
    CacheEvents,
    EngineFailed,
    EngineInfo,
    EngineReady,
    Load,
    Refusal,
    RefusalKind,
    Replies,
    Reply,
    Totals,
)
from jaxsgl.requests.request import FinishReason, Request, SamplingParams
from jaxsgl.shared_mailbox import LOAD_S, SharedMailbox

INFO = EngineInfo(
    model_path="/models/a", architecture="FakeForCausalLM", dtype="float32",
    limits=Limits(vocab_size=100, context_length=100, pool_tokens=100), eos_token_ids=(1,), page_size=2,
    max_running_requests=8, attention_backend="xla", platform="cpu", kv_bytes=1, weight_bytes=1, warmup_s=0.1,
)  # fmt: skip
LENGTH = FinishReason.LENGTH


class Lines:
    """A transport whose other ends the test plays, and a clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.coming: list[ToMailbox] = []
        self.sent: dict[int, list[FromEngine]] = {}
        self.mailbox = SharedMailbox(self, lambda: self.now_s)

    def receive(self, wait_s: float) -> Sequence[ToMailbox]:
        coming, self.coming = self.coming, []
        return coming

    def wake_at(self, fd: int) -> None:
        raise AssertionError("nothing else wakes the engine here")

    def connect(self, line: int) -> None:
        self.sent[line] = []

    def disconnect(self, line: int) -> None:
        del self.sent[line]

    def send(self, line: int, message: FromEngine) -> None:
        self.sent[line].append(message)

    def come(self, *messages: ToMailbox) -> list[object]:
        """Has messages arrive; returns what the scheduler receives."""
        self.coming += messages
        return list(self.mailbox.receive(0.0))

    def heard(self, line: int) -> list[FromEngine]:
        """What a line was sent since the last call."""
        heard, self.sent[line] = self.sent[line], []
        return heard


def two_lines() -> Lines:
    lines = Lines()
    assert lines.come(OpenLine(1), OpenLine(2)) == []
    return lines


def request(line: int, client_id: str = "r", number: int = 0, n: int = 1) -> Request:
    return Request(f"{client_id}/{first_number(line) + number}", [5], SamplingParams(n=n))


def test_replies_go_to_the_line_of_their_request_alone() -> None:
    lines = two_lines()
    one, other = request(1, "a/b"), request(2)
    assert lines.come(one, other) == [one, other]
    load = Load(num_running=2)
    lines.mailbox.send(Replies([Reply(other.request_id, (8,)), Reply(one.request_id, (7,))], load))
    assert lines.heard(1) == [Replies([Reply(one.request_id, (7,))], load)]
    assert lines.heard(2) == [Replies([Reply(other.request_id, (8,))], load)]
    assert lines.heard(PARENT_LINE) == []


def test_lines_without_replies_hear_the_load_now_and_then_and_before_the_engine_waits() -> None:
    lines = two_lines()
    lines.come(mine := request(1))
    for step in range(1, 4):
        lines.now_s += LOAD_S * 0.4
        lines.mailbox.send(Replies([Reply(mine.request_id, (step,))], Load(waiting_tokens=step)))
    assert len(lines.heard(1)) == 3
    assert lines.heard(2) == [Replies([], Load(waiting_tokens=3))], "one in three steps"
    lines.mailbox.send(Replies([Reply(mine.request_id, (9,), LENGTH)], Load()))
    assert lines.heard(2) == []
    lines.mailbox.receive(math.inf)
    assert lines.heard(2) == lines.heard(PARENT_LINE)[-1:] == [Replies([], Load())]
    lines.mailbox.receive(math.inf)
    assert lines.heard(2) == [], "the load has not changed"


def test_a_line_that_is_opened_late_hears_the_load_before_it_is_told_to_serve() -> None:
    lines = two_lines()
    lines.mailbox.announce(INFO)
    lines.come(mine := request(1))
    load = Load(totals=Totals(output_tokens=7))
    lines.mailbox.send(Replies([Reply(mine.request_id, (1,), LENGTH)], load))
    lines.come(OpenLine(3))
    assert lines.heard(3) == [Replies([], load), EngineReady(INFO)]


def test_no_line_knows_an_older_load_than_an_answer_shows() -> None:
    lines = two_lines()
    ping = Ping(first_number(2) + 4)
    assert lines.come(ping) == [ping]
    lines.mailbox.send(Replies([], Load(paused=True)))
    lines.mailbox.send(Answer(ping.number, True))
    assert lines.heard(1) == [Replies([], Load(paused=True))]
    assert lines.heard(2) == [Replies([], Load(paused=True)), Answer(ping.number, True)]


def test_nothing_is_left_of_requests_that_have_ended() -> None:
    lines = two_lines()
    one, refused, several = request(1, "a"), request(1, "b", 1, n=3), request(2, "c", n=2)
    lines.come(one, refused, several)
    ends = [Reply(one.request_id, (7,), LENGTH), Reply(refused.request_id, refusal=Refusal(RefusalKind.RAN, "late"))]
    lines.mailbox.send(Replies(ends))
    lines.mailbox.send(Replies([Reply(several.request_id, (7,), LENGTH, index=1)]))
    assert lines.mailbox.num_running == 1
    lines.mailbox.send(Replies([Reply(several.request_id, (), FinishReason.ABORT)]))
    assert lines.mailbox.num_running == 0
    again = [request(2, "a"), request(2, "b", 1), request(1, "c")]
    assert lines.come(*again) == again, "their ids are free on every line"


def test_an_id_that_runs_on_another_line_is_refused() -> None:
    lines = two_lines()
    mine = request(1, "a")
    lines.come(mine)
    late = request(2, "a")
    assert lines.come(late) == []
    (answer,) = lines.heard(2)
    assert isinstance(answer, Replies)
    (reply,) = answer.replies
    assert reply.request_id == late.request_id
    assert reply.refusal is not None and reply.refusal.kind is RefusalKind.INVALID
    assert reply.refusal.text == "request_id a is the id of a running request: choose another"
    again = request(1, "a", 1)  # its own front end refuses that, or knows that the first one is as good as ended
    assert lines.come(again) == [again]
    lines.mailbox.send(Replies([Reply(mine.request_id, (), FinishReason.ABORT)]))
    assert lines.come(request(2, "a", 5)) == [], "the second one still runs"


def test_an_id_is_free_on_every_line_while_the_engine_clears_up_what_had_it() -> None:
    """The front end lets its client use it again, as the last sample has ended or its client has left."""
    lines = two_lines()
    left, stopped, other = request(1, "a"), request(1, "b", 1), request(1, "c", 2, n=2)
    lines.come(left, stopped, other)
    aborts = [Abort(left.request_id), Abort(stopped.request_id, 0), Abort(other.request_id, 1)]
    assert lines.come(*aborts) == aborts
    again = [request(2, "a"), request(2, "b", 1)]
    assert lines.come(*again) == again
    assert lines.come(request(2, "c", 2)) == [], "its sample 0 runs"
    lines.mailbox.send(Replies([Reply(other.request_id, (), FinishReason.ABORT, index=1)]))
    last = Abort(other.request_id, 0)
    assert lines.come(last, third := request(2, "c", 3)) == [last, third]
    lines.mailbox.send(Replies([Reply(each.request_id, (), FinishReason.ABORT) for each in (left, stopped, other)]))
    assert lines.mailbox.num_running == 3
    assert lines.come(request(1, "a", 5)) == [], "it runs on the other line"


def test_requests_of_all_lines_are_aborted_by_the_ids_of_their_clients() -> None:
    lines = two_lines()
    requests = [request(1, "a"), request(2, "ab"), request(2, "a/0", 1)]
    lines.come(*requests)
    ids = [request.request_id for request in requests]
    number = first_number(2) + 9
    assert lines.come(AbortMatching(number, "a")) == [Abort(ids[0])]
    assert lines.come(AbortMatching(number, "a", prefix=True)) == list(map(Abort, ids))
    assert lines.come(AbortMatching(number, "", prefix=True)) == list(map(Abort, ids))
    assert lines.come(AbortMatching(number, "x")) == []
    assert lines.heard(2) == [Answer(number, True, count) for count in "1330"]
    assert lines.heard(1) == []


def test_a_closed_line_has_its_requests_aborted_and_hears_nothing_more() -> None:
    lines = two_lines()
    lines.mailbox.announce(INFO)
    mine, other = request(1, "a"), request(2, "b")
    lines.come(mine, other)
    assert lines.come(CloseLine(1)) == [Abort(mine.request_id)]
    lines.mailbox.send(Replies([Reply(mine.request_id, (), FinishReason.ABORT), Reply(other.request_id, (3,))]))
    lines.mailbox.send(Answer(first_number(1), True))
    lines.mailbox.send(CacheEvents([], first_number(1)))
    assert 1 not in lines.sent
    assert lines.come(request(1, "late", 1)) == [], "what it sent before its death"
    lines.come(OpenLine(3))
    assert lines.heard(3) == [EngineReady(INFO)]
    assert lines.come(request(3, "a")), "the id is free again"


def test_what_a_closed_line_has_ordered_is_withdrawn() -> None:
    lines = two_lines()
    flushes = [FlushCache(first_number(line) + count, 60.0) for line in (1, 2) for count in (1, 2, 3)]
    lines.come(*flushes, Withdraw(flushes[1].number))
    lines.mailbox.send(Answer(flushes[0].number, True))
    assert lines.mailbox.num_unanswered == 4
    assert lines.come(CloseLine(1)) == [Withdraw(flushes[2].number)]
    assert lines.come(CloseLine(2)) == [Withdraw(flush.number) for flush in flushes[3:]]
    assert lines.mailbox.num_unanswered == 0


def test_cache_events_go_to_the_lines_that_watch_from_their_snapshot_on() -> None:
    lines = two_lines()
    cleared = CacheEvents([CacheCleared()])
    for line in (2, 1):
        number = first_number(line) + 3
        lines.come(WatchCache(number))
        lines.mailbox.send(CacheEvents([], number))
        lines.mailbox.send(cleared)
    assert lines.heard(1) == [CacheEvents([], first_number(1) + 3), cleared]
    assert lines.heard(2) == [CacheEvents([], first_number(2) + 3), cleared, cleared]
    assert lines.heard(PARENT_LINE) == []


def test_the_parent_alone_hears_of_a_failure() -> None:
    lines = two_lines()
    lines.mailbox.fail("why")
    assert (lines.heard(PARENT_LINE), lines.heard(1), lines.heard(2)) == ([EngineFailed("why")], [], [])
