"""Two id arrays: steps get the tokens of the prompt, the prefix cache tells images apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxsgl.batch.buckets import Capacity
from jaxsgl.messages.orders import WatchCache
from jaxsgl.messages.replies import CacheEvents, PagesStored
from jaxsgl.requests.media import MediaItem, MediaLimits, digest_of
from jaxsgl.requests.request import Request, SamplingParams
from tests.scheduler.serving import Script, capacity, expected, last_reply, serve

PLACEHOLDER = 900
PROMPT = [*range(5), *[PLACEHOLDER] * 12, *range(30, 43)]  # 12 tokens of an image from token 5 on
LIMITS = MediaLimits(PLACEHOLDER, PLACEHOLDER + 1, patch_size=1)


def request(request_id: str, image: bytes) -> Request:
    return Request(request_id, PROMPT, SamplingParams(temperature=0.0, max_tokens=4), media=media_of(image))


def media_of(image: bytes) -> tuple[MediaItem, ...]:
    pixels = image * (48 * LIMITS.patch_bytes // len(image))
    return (MediaItem(digest_of(pixels, (1, 6, 8), ""), 5, 12, (1, 6, 8), pixels),)


def sizes_of(page_size: int, max_extend_tokens: int = 128) -> Capacity:
    sizes = capacity(page_size=page_size, max_extend_tokens=max_extend_tokens)
    return replace(sizes, media=LIMITS)


@pytest.mark.parametrize(("page_size", "before_image"), [(1, 5), (4, 4)])
def test_the_same_text_with_another_image_shares_nothing_from_the_image_on(page_size: int, before_image: int) -> None:
    script: Script = [[request("a", b"cat")], *[[]] * 9, [request("b", b"dog")], *[[]] * 9, [request("c", b"cat")],
              *[[]] * 9, [request("d", b"cow")]]  # fmt: skip
    mailbox, _ = serve(sizes_of(page_size), script)
    cached = {name: last_reply(mailbox, name).cached_tokens for name in "abcd"}
    whole = (len(PROMPT) - 1) // page_size * page_size
    assert cached == {"a": 0, "b": before_image, "c": whole, "d": before_image}
    assert all(mailbox.output_ids(name) == expected(PROMPT) for name in "abcd"), "steps embed the prompt's own ids"


def test_requests_that_arrive_together_wait_for_the_same_image_alone() -> None:
    long = [*PROMPT, *range(100, 170)]
    media = media_of(b"cat")
    reqs = [Request(name, long, SamplingParams(temperature=0.0, max_tokens=4), media=media) for name in "ab"]
    other = Request("c", long, SamplingParams(temperature=0.0, max_tokens=4), media=media_of(b"dog"))
    mailbox, _ = serve(sizes_of(4, 64), [[*reqs, other]])
    assert last_reply(mailbox, "b").cached_tokens > 0
    assert last_reply(mailbox, "c").cached_tokens <= 4


def test_kv_events_name_pages_by_hash_ids() -> None:
    script: Script = [[WatchCache(1)], [request("a", b"cat")], *[[]] * 9, [request("b", b"dog")]]
    mailbox, _ = serve(sizes_of(4), script)
    stored = [
        event for news in mailbox.other_news if isinstance(news, CacheEvents) for event in news.events
        if isinstance(event, PagesStored)
    ]  # fmt: skip
    tokens = [token for event in stored for token in event.token_ids]
    assert 0 in tokens and PLACEHOLDER not in tokens
    assert len({name for event in stored for name in event.hashes}) == sum(len(event.hashes) for event in stored)
