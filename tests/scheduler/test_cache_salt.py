"""Requests of different salts tell nothing about each other's prompts: neither by cached tokens nor by the steps."""

from __future__ import annotations

import random

import pytest

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.config.engine import POLICIES, SchedulingConfig
from jaxsgl.messages.orders import FlushCache, WatchCache
from jaxsgl.messages.replies import CacheEvents, PagesRemoved, PagesStored
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.testing.engine import FakeEngine, ScriptedMailbox
from tests.cache_mirror import CacheMirror, cached_prefixes
from tests.checked import CheckedScheduler
from tests.scheduler.serving import Script, capacity, expected, last_reply, serve

PROMPT = list(range(60))


def salted(request_id: str, salt: str, prompt: list[int] = PROMPT) -> Request:
    return Request(request_id, prompt, SamplingParams(temperature=0.0, max_tokens=4), cache_salt=salt)


def test_prefixes_are_shared_among_requests_of_an_equal_salt_alone() -> None:
    salts = ["", "mine", "yours", "", "mine", "yours"]
    script: Script = []
    for i, salt in enumerate(salts):
        script += [[salted(f"r{i}", salt)], *[[]] * 9]
    mailbox, _ = serve(capacity(), script)
    assert [last_reply(mailbox, f"r{i}").cached_tokens for i in range(6)] == [0, 0, 0, 56, 56, 56]
    assert all(mailbox.output_ids(f"r{i}") == expected(PROMPT) for i in range(6))


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_that_arrive_together_share_within_their_salt_under_every_policy(policy: str) -> None:
    sizes = capacity(max_extend_tokens=64)
    scheduler = CheckedScheduler(sizes, BucketSet.derive(sizes), (), SchedulingConfig(schedule_policy=policy))
    mailbox = ScriptedMailbox([[salted(f"r{i}", "ab"[i % 2]) for i in range(6)]])
    run_loop(scheduler, FakeEngine(sizes), mailbox, depth=1)
    cached = [last_reply(mailbox, f"r{i}").cached_tokens for i in range(6)]
    for salt in (0, 1):
        assert sorted(cached[salt::2]) == [0, 56, 56], "the first of each salt computes its whole prompt"


def test_events_tell_nothing_of_salted_prefixes() -> None:
    script: Script = [[WatchCache(1), salted("a", "mine")], *[[]] * 9, [FlushCache(2)], [salted("b", "mine")]]
    mailbox, _ = serve(capacity(), [*script, *[[]] * 9, [WatchCache(3)]])
    told = [event for news in mailbox.other_news if isinstance(news, CacheEvents) for event in news.events]
    assert not any(isinstance(event, PagesStored | PagesRemoved) for event in told)


def test_events_are_true_of_the_rest_while_salted_pages_come_and_go() -> None:
    """The pool is small, so pages change hands between salted and other prefixes."""
    rng = random.Random(5)
    prompts = [[*range(8 * k), *range(100 * k, 100 * k + 9)] for k in range(4)]
    script: Script = [[WatchCache(1)]]
    for i in range(60):
        script += [[salted(f"r{i}", rng.choice(["", "", "a", "b"]), rng.choice(prompts))], [], []]
    mailbox, scheduler = serve(capacity(num_pages=20, context=60), script)
    mirror = CacheMirror()
    for news in mailbox.other_news:
        if isinstance(news, CacheEvents):
            mirror.take(news.events)
    assert mirror.prefixes == cached_prefixes(scheduler.cache.edges())
    assert any(edge.salt for edge in scheduler.cache.prefixes.edges())
