"""Loading from the host tier: whether it pays, and which pages come next.

`LoadRule` compares the measured costs of loading a page and of computing its tokens. `plan_loads` decides what one
step loads; it reads only, planner.py calls it. apply.py measures and carries out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jaxsgl.scheduler.req import Req

LEAST_TOKENS = 32  # a load costs a turn of the loop at least
_SMOOTHING = 0.1  # weight of the newest step


class LoadRule:
    """When to load instead of computing.

    Args:
      load_token_s: seconds that a token takes from host memory to the pool, as measured at the start.
      timeout_s: seconds that a request waits for its pages; then it computes what it lacks.
      least_tokens: fewer are computed.
    """

    def __init__(self, load_token_s: float, timeout_s: float, least_tokens: int = LEAST_TOKENS) -> None:
        self.timeout_s = timeout_s
        self._load_token_s = load_token_s
        self._least_tokens = least_tokens
        self._compute_token_s: float | None = None

    def pays(self, num_tokens: int) -> bool:
        """Whether `num_tokens` tokens should be loaded; supposed to, as long as no prompt was computed."""
        if num_tokens < self._least_tokens:
            return False
        return self._compute_token_s is None or self._load_token_s <= self._compute_token_s

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Takes the time of a step that extended prompts by `num_tokens` tokens."""
        token_s = seconds / num_tokens
        known = self._compute_token_s
        self._compute_token_s = token_s if known is None else known + _SMOOTHING * (token_s - known)


def plan_loads(
    loading: Iterable[Req], admitted: Mapping[Req, int], most_pages: int, available: int
) -> tuple[list[tuple[Req, int]], list[Req]]:
    """The pages that each request loads next, in order, and the requests that must compute instead.

    Args:
      loading: PREFETCHING requests.
      admitted: requests that this plan admits, with the pages that they are to load.
      most_pages: of one step.
      available: pages of the pool that are left.
    """
    wanted = [*((req, len(req.to_load)) for req in loading), *admitted.items()]
    loads: list[tuple[Req, int]] = []
    stuck: list[Req] = []
    for req, num_pages in wanted:
        count = min(num_pages, most_pages, available)
        if count:
            loads.append((req, count))
            most_pages, available = most_pages - count, available - count
        elif not available:
            stuck.append(req)
    return loads, stuck
