"""A scheduler with a fake engine behind the real loop: what the scheduler's tests drive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.messages.orders import ToEngine
from jaxsgl.messages.replies import Reply
from jaxsgl.requests.request import FinishReason, Request, SamplingParams
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.scheduler import Scheduler
from jaxsgl.testing.engine import FakeEngine, ScriptedMailbox, generate
from tests.checked import CheckedScheduler

VOCAB = 1000
Script: TypeAlias = list[list[ToEngine]]  # what arrives before each turn of the loop


def capacity(
    page_size: int = 4, num_pages: int = 200, rows: int = 8, context: int = 128, max_extend_tokens: int = 128
) -> Capacity:
    return Capacity(page_size, num_pages, rows, context, max_extend_tokens, VOCAB)


def request(
    request_id: str, prompt: Sequence[int], max_tokens: int | None = 4, *, stop: tuple[int, ...] = ()
) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop_token_ids=stop)
    return Request(request_id, list(prompt), params)


def new_scheduler(sizes: Capacity, *, eos: tuple[int, ...] = (), radix: bool = True) -> Scheduler:
    return Scheduler(sizes, BucketSet.derive(sizes), eos, radix_cache=radix)


def expected(prompt: Sequence[int], max_tokens: int = 4, stop: frozenset[int] = frozenset()) -> list[int]:
    return generate(prompt, max_tokens, stop, VOCAB)


def serve(
    sizes: Capacity,
    script: Sequence[Sequence[ToEngine]],
    *,
    overlap: bool = True,
    radix: bool = True,
    max_queued_requests: int | None = None,
    max_queued_tokens: int | None = None,
) -> tuple[ScriptedMailbox, CheckedScheduler]:
    """Runs the loop over `script` until all is served."""
    scheduler = CheckedScheduler(
        sizes,
        BucketSet.derive(sizes),
        (),
        radix_cache=radix,
        max_queued_requests=max_queued_requests,
        max_queued_tokens=max_queued_tokens,
    )
    mailbox = ScriptedMailbox(script)
    run_loop(scheduler, FakeEngine(sizes), mailbox, int(overlap))
    assert scheduler.is_idle
    assert scheduler.cache.num_available == sizes.num_pages - 1
    return mailbox, scheduler


def last_reply(mailbox: ScriptedMailbox, request_id: str) -> Reply:
    return [reply for reply in mailbox.replies if reply.request_id == request_id][-1]


def finish_reason(mailbox: ScriptedMailbox, request_id: str) -> FinishReason | None:
    return last_reply(mailbox, request_id).finish_reason
