"""The scheduler's state in plain values, for people who wonder why a server does what it does. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxsgl.cache.manager import CacheManager
from jaxsgl.scheduler.live import Live
from jaxsgl.scheduler.req import Req

MAX_LISTED = 256  # requests; the queue may hold thousands


def dump_cache(cache: CacheManager) -> dict[str, int]:
    """Pages and rows. Cached ones are in the prefix tree, where those that no request locks are evictable."""
    return {
        "page_size": cache.page_size,
        "pages": cache.num_pages - 1,
        "free_pages": cache.num_free,
        "cached_pages": cache.prefixes.num_pages,
        "evictable_pages": cache.prefixes.num_evictable,
        "rows": len(cache.table.pages),
        "free_rows": cache.table.num_free_rows,
    }


def dump_requests(reqs: Iterable[Req], live: Live) -> list[dict[str, Any]]:
    """The first `MAX_LISTED` of them."""
    return [_dump_request(req, live) for req, _ in zip(reqs, range(MAX_LISTED), strict=False)]


def _dump_request(req: Req, live: Live) -> dict[str, Any]:
    return {
        "request_id": req.request_id,
        "sample": req.index,
        "state": req.state.value,
        "priority": req.priority,
        "prompt_tokens": req.prompt_len,
        "output_tokens": len(req.output_ids),
        "max_new_tokens": req.max_new_tokens,
        "kv_tokens": req.kv_len,
        "pages": req.lease.num_pages if req.lease else 0,
        "row": req.lease.row if req.lease else None,
        "waited_s": live.waited_s(req.request_id),
        "running_s": live.running_s(req.request_id),
    }
