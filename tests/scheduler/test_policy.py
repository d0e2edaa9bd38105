"""Which waiting request goes first, and that none waits forever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.errors import ConfigError
from jaxsgl.messages.replies import RefusalKind, Reply
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.scheduler.policy import MAX_OVERTAKEN, MAX_REORDERED
from jaxsgl.scheduler.scheduler import Scheduler
from jaxsgl.testing.engine import FakeEngine
from tests.checked import CheckedScheduler
from tests.scheduler.serving import capacity, expected

A, B, C = range(0, 40), range(100, 140), range(200, 240)


def of(name: str, prompt: Sequence[int], max_tokens: int = 4, priority: int = 0) -> Request:
    return Request(name, list(prompt), SamplingParams(temperature=0.0, max_tokens=max_tokens), priority)


class Serving:
    """A scheduler and a fake engine, a step at a time; notes the order in which requests get their first token."""

    def __init__(self, policy: str = "fcfs", rows: int = 1, num_pages: int = 400, **config: Any) -> None:
        sizes = capacity(rows=rows, num_pages=num_pages)
        config = {"schedule_policy": policy, **config}
        max_queued, max_queued_tokens = config.pop("max_queued", None), config.pop("max_queued_tokens", None)
        self.scheduler: Scheduler = CheckedScheduler(
            sizes,
            BucketSet.derive(sizes),
            (),
            SchedulingConfig(**config),
            max_queued_requests=max_queued,
            max_queued_tokens=max_queued_tokens,
        )
        self.engine = FakeEngine(sizes)
        self.order: list[str] = []
        self.replies: list[Reply] = []

    def step(self) -> None:
        inputs = self.scheduler.launch()
        if inputs is not None:
            handle = self.engine.submit(inputs)
            self.scheduler.collect(handle.tokens(), handle.outputs())
        self.hear()

    def hear(self) -> None:
        for reply in self.scheduler.take_replies():
            self.replies.append(reply)
            if reply.token_ids and reply.request_id not in self.order:
                self.order.append(reply.request_id)

    def serve(self, *requests: Request) -> list[str]:
        """Serves `requests`, which arrive at once; returns their ids in the order of their first tokens."""
        self.order = []
        self.scheduler.receive(requests)
        while not self.scheduler.is_idle:
            self.step()
        return self.order


def test_fcfs_keeps_the_order_of_arrival() -> None:
    serving = Serving("fcfs")
    serving.serve(of("warm", C))
    assert serving.serve(of("a", A), of("b", B), of("c", C)) == ["a", "b", "c"]


def test_lpm_serves_the_longest_cached_prefix_first() -> None:
    serving = Serving("lpm")
    serving.serve(of("warm", C), of("half", B[:20]))
    assert serving.serve(of("a", A), of("b", B), of("c", C)) == ["c", "b", "a"]


def test_lpm_is_fcfs_behind_the_first_128() -> None:
    serving = Serving("lpm")
    serving.serve(of("warm", C))
    others = [of(f"o{i}", range(i, i + 5), 1) for i in range(MAX_REORDERED)]
    order = serving.serve(*others, of("c", C, 1))
    assert order[0] == "o0", "c is number 129: its prefix is not looked up"
    assert order[1] == "c", "number 128"


def test_lpm_orders_the_first_128_however_many_wait() -> None:
    serving = Serving("lpm")
    serving.serve(of("warm", C))
    others = [of(f"o{i}", range(i, i + 5), 1) for i in range(2 * MAX_REORDERED)]
    assert serving.serve(*others[:100], of("c", C, 1), *others[100:])[:2] == ["c", "o0"]


def test_dfs_weight_goes_into_the_branch_where_most_wait() -> None:
    serving = Serving("dfs-weight", rows=2)
    serving.serve(of("warm a", A), of("warm b", B))
    order = serving.serve(of("a", [*A, 1]), of("b1", [*B, 1]), of("b2", [*B, 2]), of("none", C))
    assert set(order[:2]) == {"b1", "b2"}
    assert order[2:] == ["a", "none"]


def test_lof_serves_the_longest_output_first() -> None:
    assert Serving("lof").serve(of("a", A, 3), of("b", B, 9), of("c", C, 5)) == ["b", "c", "a"]


def test_random_depends_on_the_seed_alone() -> None:
    requests = [of(f"r{i}", range(i, i + 9)) for i in range(20)]
    first, second = Serving("random").serve(*requests), Serving("random").serve(*requests)
    assert first == second
    assert sorted(first) == sorted(r.request_id for r in requests)
    assert first != [r.request_id for r in requests]


def test_a_request_without_a_prefix_is_overtaken_a_limited_number_of_times() -> None:
    serving = Serving("lpm")
    serving.serve(of("warm", C))
    serving.scheduler.receive([of("alone", A, 1), of("first", C, 1)])
    for i in range(3 * MAX_OVERTAKEN):
        serving.scheduler.receive([of(f"c{i}", C, 1)])
        serving.step()
        if "alone" in serving.order:
            break
    assert serving.order.index("alone") == len(serving.order) - 1
    assert MAX_OVERTAKEN < len(serving.order) <= MAX_OVERTAKEN + 3


def test_priorities_go_before_arrival() -> None:
    serving = Serving(enable_priority_scheduling=True)
    assert serving.serve(of("low", A, 4, -1), of("none", B), of("high", C, 4, 7)) == ["high", "none", "low"]
    serving = Serving(enable_priority_scheduling=True, schedule_low_priority_values_first=True)
    assert serving.serve(of("low", A, 4, -1), of("none", B), of("high", C, 4, 7)) == ["low", "none", "high"]


@pytest.mark.parametrize(("priority", "first_to_end"), [(11, "urgent"), (10, "long")])
def test_a_running_request_gives_way_only_to_a_much_higher_priority(priority: int, first_to_end: str) -> None:
    serving = Serving(enable_priority_scheduling=True)
    serving.scheduler.receive([of("long", A, 30)])
    for _ in range(5):
        serving.step()
    serving.serve(of("urgent", B, 3, priority))
    ended = [reply.request_id for reply in serving.replies if reply.finish_reason]
    assert ended[0] == first_to_end
    tokens = [token for reply in serving.replies if reply.request_id == "long" for token in reply.token_ids]
    assert tokens == expected(A, 30), "the client sees no difference"


def test_a_full_queue_refuses_the_lowest_priority() -> None:
    serving = Serving(enable_priority_scheduling=True, max_queued=2)
    serving.scheduler.receive([of("a", A, 4, 1), of("b", B, 4, 2), of("c", C, 4, 3), of("d", C, 4, 1)])
    serving.hear()
    refused = [reply.request_id for reply in serving.replies if reply.refusal]
    assert refused == ["a", "d"]
    assert all(reply.refusal and reply.refusal.kind is RefusalKind.OVERLOADED for reply in serving.replies)
    assert serving.serve() == ["c", "b"]


def test_an_arrival_displaces_as_many_as_make_room_for_it() -> None:
    """All wait behind one that takes the only row; the queue takes what comes as long as fewer than 100 tokens wait."""
    serving = Serving(enable_priority_scheduling=True, max_queued_tokens=100)
    serving.scheduler.receive([of("runs", A, 30, 9)])
    serving.step()
    serving.scheduler.receive([of("a", A, 4, 1), of("b", A, 4, 2), of("c", A, 4, 1)])
    serving.scheduler.receive([of("large", range(100), 4, 3), of("larger", range(120), 4, 4)])
    serving.hear()
    assert [reply.request_id for reply in serving.replies if reply.refusal] == ["c", "a", "b", "large"]


def test_an_arrival_displaces_none_if_they_do_not_make_room_for_it() -> None:
    serving = Serving(enable_priority_scheduling=True, max_queued_tokens=100)
    serving.scheduler.receive([of("runs", A, 30, 9)])
    serving.step()
    serving.scheduler.receive([of("low", A, 4, 1), of("high", range(110), 4, 5)])
    serving.scheduler.receive([of("longer", range(41), 4, 3), of("as long", A, 4, 3)])
    serving.hear()
    assert [reply.request_id for reply in serving.replies if reply.refusal] == ["longer", "low"]


def test_a_request_that_found_no_room_can_still_be_refused_for_a_higher_priority() -> None:
    serving = Serving(rows=2, num_pages=20, enable_priority_scheduling=True, max_queued=1)
    serving.scheduler.receive([of("runs", A, 30, 3)])
    serving.step()
    serving.scheduler.receive([of("tried", B, 30, 1)])
    serving.step()
    serving.scheduler.receive([of("higher", C, 4, 2)])
    serving.hear()
    assert [reply.request_id for reply in serving.replies if reply.refusal] == ["tried"]


def test_priorities_and_prefix_policies_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="lpm"):
        SchedulingConfig(schedule_policy="lpm", enable_priority_scheduling=True)
