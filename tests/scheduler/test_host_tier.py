"""Prefixes that outlive the pool in host memory: what is written, what is loaded, and that tokens never change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxsgl.batch.engine_api import Insert
from jaxsgl.cache import kv_file
from jaxsgl.cache.host_pages import extend_names
from jaxsgl.cache.pages import as_pages
from jaxsgl.cache.tiers import WRITE_AFTER_REUSE, WRITE_THROUGH
from jaxsgl.messages.orders import Abort
from jaxsgl.requests.request import Request
from jaxsgl.scheduler.orders.journal import CacheJournal
from jaxsgl.scheduler.resources.host_tier import LoadRule
from tests.cache_mirror import CacheMirror, cached_prefixes
from tests.checked import CheckedScheduler
from tests.scheduler.serving import capacity, expected, request, serve
from tests.scheduler.tiered import Stepper, serve_tiered, small, tier_of

A, B, C = (list(range(first, first + 48)) for first in (100, 300, 500))


def asked(name: str, prompt: list[int], max_tokens: int = 4) -> Request:
    return request(name, prompt, max_tokens)


def page_names(prompt: list[int]) -> list[bytes]:
    names: list[bytes] = []
    extend_names(names, as_pages(np.array(prompt, np.int32), 4), b"")
    return names


def extended(stepper: Stepper) -> int:
    return stepper.scheduler.state.totals.extend_tokens


@pytest.mark.parametrize("overlap", [True, False])
def test_an_evicted_prefix_comes_back_from_the_host(overlap: bool) -> None:
    """The pool holds one of three prompts; each comes twice."""
    script = [[asked(f"{name}{i}", prompt)] for i in (1, 2) for name, prompt in (("a", A), ("b", B), ("c", C))]
    spread = [turn for entry in script for turn in (entry, *[[]] * 12)]
    mailbox, scheduler = serve_tiered(small(), spread, tier_of(small()), overlap=overlap)
    for i in (1, 2):
        for name, prompt in (("a", A), ("b", B), ("c", C)):
            assert mailbox.output_ids(f"{name}{i}") == expected(prompt)
    host = scheduler.load(0).host
    assert host.loaded_tokens > 60 and host.written_tokens >= 120
    assert scheduler.state.totals.cached_prompt_tokens >= host.loaded_tokens


def test_only_the_rest_behind_a_loaded_prefix_is_computed() -> None:
    stepper = Stepper(small(), tier_of(small()))
    for name, prompt in (("a1", A), ("b", B)):
        stepper.run(asked(name, prompt))
    before = extended(stepper)
    stepper.run(asked("a2", [*A, 7, 8, 9]))
    assert stepper.outputs["a2"] == expected([*A, 7, 8, 9])
    assert extended(stepper) - before <= 8 and stepper.cached["a2"] >= 44


def test_what_first_follows_a_prefix_that_came_back_is_written_at_once() -> None:
    """A chat's next turn is. Another prompt behind the same prefix is not, nor is anything behind a first prompt."""
    tier = tier_of(small(), policy="write_through_selective", most_pages=100)
    turn, other = [*A, *range(20)], [*A, *range(50, 70)]
    pages = np.arange(1, 18, dtype=np.int32)

    def enter(prompt: list[int], pages: np.ndarray, first: int) -> None:
        tier.entered(page_names(prompt), pages, first, as_pages(np.array(prompt, np.int32), 4), b"")

    enter(A, pages[:12], 0)
    assert tier.to_write() == ()
    tier.reused(page_names(A), pages[:12])
    enter(turn, pages, 12)
    assert tier.to_write() == tuple(pages.tolist())
    enter(other, np.concatenate([pages[:12], np.arange(18, 23, dtype=np.int32)]), 12)
    assert tier.to_write() == tuple(pages.tolist())


def loading(stepper: Stepper) -> list[str]:
    return [req.request_id for req in stepper.scheduler.state.requests.prefetching.values()]


def begun(most_pages: int = 2, host_pages: int = 100, **kwargs: Any) -> Stepper:
    """Prompt A is on the host alone, and a request for it has loaded a part of it."""
    stepper = Stepper(small(), tier_of(small(), host_pages, most_pages=most_pages), **kwargs)
    for name, prompt in (("a1", A), ("b", B), ("c", C)):
        stepper.run(asked(name, prompt))
    stepper.receive(asked("a2", [*A, 1, 2]))
    stepper.turn()
    stepper.turn()
    assert loading(stepper) == ["a2"]
    return stepper


def test_a_split_during_a_write_leaves_both_parts_written() -> None:
    """Nodes of the prefix tree split and lengthen while their pages are gathered: writes know pages by name."""
    stepper = Stepper(small(), tier_of(small()))
    stepper.holds_gathers = True
    stepper.run(asked("a1", A))
    stepper.run(asked("fork", [*A[:20], 1, 2, 3, 4, 5]))
    assert stepper.tier.is_writing
    stepper.holds_gathers = False
    stepper.run(asked("b", B), asked("c", C))
    for name, prompt in (("a2", [*A, 9]), ("fork2", [*A[:20], 1, 2, 3, 4, 5, 6])):
        stepper.run(asked(name, prompt))
        assert stepper.outputs[name] == expected(prompt)
    assert stepper.scheduler.load(0).host.loaded_tokens > 0


def test_a_page_may_leave_the_pool_before_its_host_copy_is_there() -> None:
    """Until then it can't be loaded, so a request that asks for it computes."""
    stepper = Stepper(small(), tier_of(small()))
    stepper.holds_gathers = True
    stepper.run(asked("a1", A), asked("b", B), asked("c", C), asked("a2", [*A, 9]))
    assert stepper.outputs["a2"] == expected([*A, 9])
    assert stepper.scheduler.load(0).host.loaded_tokens == 0
    stepper.holds_gathers = False
    stepper.run(asked("b2", B), asked("c2", C), asked("a3", [*A, 9]))
    assert stepper.outputs["a3"] == expected([*A, 9]) and stepper.scheduler.load(0).host.loaded_tokens > 0


def test_the_host_evicts_nothing_that_a_request_loads() -> None:
    stepper = begun(host_pages=40)
    stepper.scheduler.receive([asked(f"other{i}", list(range(600 + 60 * i, 648 + 60 * i))) for i in range(4)])
    stepper.run()
    assert stepper.outputs["a2"] == expected([*A, 1, 2])
    assert stepper.tier.host.num_evicted > 0 and stepper.cached["a2"] >= 44


def test_the_same_prefix_is_inserted_by_another_request_during_a_load() -> None:
    """The other one is not held back, since it was retracted, say; its pages replace those that are loaded."""
    stepper = begun()
    state = stepper.scheduler.state
    req = next(iter(state.requests.prefetching.values()))
    names, salt = req.page_names, req.namespace
    cache = stepper.scheduler.cache
    lease = cache.acquire(cache.match(np.array(A, np.int32), salt), "other", salt, names[:1].copy())
    cache.grow(lease, 48)
    pages = tuple(cache.table.pages[lease.row, lease.num_shared : 12].tolist())
    data = stepper.tier.host.read(stepper.tier.run_of(names, lease.num_shared)[: len(pages)])
    stepper.engine.apply(Insert(pages[: len(data)], data), 0)
    cache.release(lease, np.array(A[: 4 * (12 - len(pages) + len(data))], np.int32))
    stepper.run()
    assert stepper.outputs["a2"] == expected([*A, 1, 2])


def test_two_requests_for_one_hosted_prefix_load_it_once() -> None:
    stepper = begun()
    before = stepper.scheduler.load(0).host.loaded_tokens
    stepper.run(asked("a3", [*A, 3, 4]), asked("a4", [*A, 5, 6]))
    for name, end in (("a2", [1, 2]), ("a3", [3, 4]), ("a4", [5, 6])):
        assert stepper.outputs[name] == expected([*A, *end])
        assert stepper.cached[name] >= 44
    assert stepper.scheduler.load(0).host.loaded_tokens - before <= 48


@pytest.mark.parametrize("host_pages", [1, 5])
def test_a_page_that_finds_no_room_on_the_host_is_left_out_with_all_behind_it(host_pages: int) -> None:
    """All of a small arena is pinned by a write, so no further page finds room; requests are served nevertheless."""
    stepper = Stepper(small(), tier_of(small(), host_pages))
    stepper.holds_gathers = True
    stepper.run(asked("a1", A), asked("b", B), asked("c", C))
    assert stepper.scheduler.load(0).host.not_written_tokens > 0
    assert stepper.tier.host.num_used == host_pages
    stepper.holds_gathers = False
    stepper.run(asked("a2", [*A, 1]), asked("b2", [*B, 1]))
    assert stepper.outputs["a2"] == expected([*A, 1]) and stepper.outputs["b2"] == expected([*B, 1])


def test_a_child_is_never_hosted_under_a_parent_that_is_not() -> None:
    """The prefix leaves the host while the device keeps it: what is computed behind it waits until it is hosted again.

    `Stepper` checks after every event that each hosted page's parent is hosted.
    """
    stepper = Stepper(small(41), tier_of(small(41), 14))
    stepper.run(asked("a1", A[:20], 1))
    stepper.run(asked("b", B))  # takes all of the host
    stepper.run(asked("a2", [*A[:20], *range(20)], 1))
    assert stepper.tier.host.num_evicted > 0
    stepper.run(asked("a3", [*A[:20], *range(20), 5], 1))
    names = [entry.name for entry in stepper.tier.host.all()]
    assert len(set(names)) == len(names)
    assert stepper.outputs["a3"] == expected([*A[:20], *range(20), 5], 1)


def test_an_abort_during_prefetching_releases_every_pin() -> None:
    """`Stepper` checks pins and pages after every event."""
    stepper = begun()
    stepper.receive(Abort("a2"))
    assert not loading(stepper) and not any(entry.num_loads for entry in stepper.tier.host.all())
    stepper.run(asked("a3", [*A, 1, 2]))
    assert stepper.outputs["a3"] == expected([*A, 1, 2])


def test_a_retraction_during_prefetching_releases_every_pin_and_loads_again() -> None:
    stepper = begun()
    stepper.scheduler.pause()
    while stepper.scheduler.state.steps_in_flight:
        stepper.turn()
    stepper.scheduler.retract_all()
    stepper.settle()
    assert not any(entry.num_loads for entry in stepper.tier.host.all())
    stepper.scheduler.resume()
    before = extended(stepper)
    stepper.run()
    assert stepper.outputs["a2"] == expected([*A, 1, 2]) and extended(stepper) - before <= 8


def test_past_its_deadline_a_request_computes_what_it_lacks() -> None:
    stepper = begun(timeout_s=5.0)
    before = extended(stepper)
    stepper.now_s = 5.1
    stepper.run()
    assert stepper.outputs["a2"] == expected([*A, 1, 2])
    assert extended(stepper) - before > 20 and stepper.scheduler.load(0).host.given_up == 1


@pytest.mark.parametrize(("timeout_s", "loads"), [(3.0, False), (60.0, True)])
def test_a_request_does_not_wait_for_loads_that_take_up_its_time(timeout_s: float, loads: bool) -> None:
    """Turns of a second load two pages each; the first chat has most of 12 to load when the second comes."""
    stepper = Stepper(small(36), tier_of(small(36), most_pages=2), timeout_s=timeout_s)
    for name, prompt in (("a1", A), ("b1", B), ("c", C), ("d", list(range(700, 748))), ("e", list(range(800, 848)))):
        stepper.run(asked(name, prompt))
    stepper.receive(asked("a2", [*A, 1, 2]))
    for _ in range(3):
        stepper.turn()
        stepper.now_s += 1.0
    assert loading(stepper) == ["a2"]
    stepper.receive(asked("b2", [*B, 1, 2]))
    stepper.turn()
    assert loading(stepper) == (["a2", "b2"] if loads else ["a2"])
    stepper.turn()
    stepper.turn()
    assert ("b2" in stepper.outputs) != loads
    stepper.run()
    assert stepper.outputs["b2"] == expected([*B, 1, 2]) and stepper.outputs["a2"] == expected([*A, 1, 2])


def test_new_weights_find_nothing_on_the_host_and_stop_loads() -> None:
    stepper = begun()
    stepper.scheduler.pause()
    while stepper.scheduler.state.steps_in_flight:
        stepper.turn()
    stepper.scheduler.retire_cache()
    stepper.scheduler.resume()
    stepper.settle()
    assert not loading(stepper) and stepper.tier.run_of([entry.name for entry in stepper.tier.host.all()], 0) == []
    stepper.run()
    before = extended(stepper)
    stepper.run(asked("b2", [*B, 1]))
    assert extended(stepper) - before >= 49, "nothing of the old weights is found"


def test_a_flush_empties_both_tiers_and_loads_end_well() -> None:
    stepper = begun()
    stepper.scheduler.flush_cache()
    stepper.settle()
    stepper.run()
    assert stepper.outputs["a2"] == expected([*A, 1, 2])
    before = stepper.scheduler.load(0).host.loaded_tokens
    stepper.run(asked("c2", [*C, 1]))
    assert stepper.scheduler.load(0).host.loaded_tokens == before


@pytest.mark.parametrize(("policy", "after"), [(WRITE_THROUGH, (12, 12)), (WRITE_AFTER_REUSE, (0, 12))])
def test_pages_are_written_at_once_or_when_they_are_needed_again(policy: str, after: tuple[int, int]) -> None:
    """Also when they were evicted before anyone needed them again, and had to be computed a second time."""
    for between in ([], [asked("b", B), asked("c", C)]):
        stepper = Stepper(small(), tier_of(small(), policy=policy))
        stepper.run(asked("a1", A, 1))
        assert stepper.tier.host.num_used == after[0]
        if between:
            stepper.run(*between)
        stepper.run(asked("a2", A, 1))
        of_a = stepper.tier.run_of(page_names(A), 0)
        assert len(of_a) >= after[1] - 1


def test_short_and_slow_loads_are_computed_instead() -> None:
    rule = LoadRule(load_token_s=0.001, timeout_s=1.0, least_tokens=32)
    assert not rule.pays(31) and rule.pays(32), "before anything was measured"
    rule.computed(100, 0.05)
    assert not rule.pays(1000), "computing takes half as long"
    for _ in range(50):
        rule.computed(100, 0.2)
    assert rule.pays(32)


def test_salts_are_apart_on_the_host_too() -> None:
    stepper = Stepper(small(), tier_of(small()))
    salted = [msgspec.structs.replace(asked(f"a{salt}", A), cache_salt=salt) for salt in ("", "x", "y")]
    stepper.run(*salted)
    stepper.run(asked("b", B), asked("c", C))
    before = extended(stepper)
    again = msgspec.structs.replace(asked("ax2", [*A, 1]), cache_salt="z")
    stepper.run(again)
    assert extended(stepper) - before >= 49
    for name in ("a", "ax", "ay"):
        assert stepper.outputs[name] == expected(A)


def test_events_say_removed_only_when_no_tier_holds_the_page() -> None:
    stepper = Stepper(small(), tier_of(small(), 24))
    journal = CacheJournal(stepper.scheduler.cache)
    mirror = CacheMirror()

    def follow() -> set[int]:
        mirror.take(journal.take())
        assert mirror.prefixes == cached_prefixes(stepper.scheduler.cache.edges())
        late = CacheMirror(CacheJournal(stepper.scheduler.cache).snapshot())
        stepper.scheduler.cache.observe(journal)
        assert late.prefixes == mirror.prefixes, "a snapshot tells what the events told"
        return set(mirror.prefixes)

    stepper.run(asked("a1", A))
    of_a = follow()
    stepper.run(asked("b", B))
    assert of_a <= follow(), "the pool lacks some of it, the host has it"
    stepper.run(asked("a2", [*A, 1, 2]))
    assert of_a <= follow() and stepper.scheduler.load(0).host.loaded_tokens
    stepper.run(*(asked(f"o{i}", list(range(600 + 60 * i, 648 + 60 * i))) for i in range(4)))
    assert not of_a <= follow(), "no tier has room for all"
    stepper.scheduler.flush_cache()
    assert not follow()


def test_without_a_tier_a_plan_copies_nothing_and_requests_carry_no_names() -> None:
    mailbox, scheduler = serve(small(), [[asked("a", A)]])
    assert mailbox.output_ids("a") == expected(A)
    assert scheduler.last_plan is not None and scheduler.last_plan.actions == ()
    assert not (scheduler.ops.queued or scheduler.ops.waiting) and scheduler.ops.take() == []


def test_a_restarted_scheduler_finds_a_known_prefix_in_the_file(tmp_path: Path) -> None:
    """What only the pool held is written at the end, too: a prompt of 4,000 tokens leaves fewer than 100 to compute."""
    sizes = capacity(page_size=16, num_pages=300, rows=2, context=4200, max_extend_tokens=512)
    prompt = [(7 * i + i // 300) % 900 for i in range(4000)]
    first = Stepper(sizes, tier_of(sizes, 300, WRITE_AFTER_REUSE, 16), checked=CheckedScheduler)
    first.run(asked("a", prompt))
    assert first.tier.host.num_used == 0
    first.scheduler.before_exit(first.engine)
    assert kv_file.save(first.tier.host, tmp_path / "x.kv", 16) == 250
    again = Stepper(sizes, tier_of(sizes, 300, WRITE_AFTER_REUSE, 16), checked=CheckedScheduler)
    assert kv_file.load(again.tier.host, tmp_path / "x.kv", 16) == 250
    again.run(asked("b", [*prompt, 1, 2, 3]))
    assert again.outputs["b"] == expected([*prompt, 1, 2, 3]) and extended(again) < 100
