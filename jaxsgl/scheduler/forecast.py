"""When each of the requests that run to their max_tokens ends, and whether the pool suffices until then.

Exact, since requests that ignore EOS are known to go on. Made for one step by the `PrefillAdder`; decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from jaxsgl.cache.manager import CacheManager
from jaxsgl.scheduler.req import Req


class Forecast:
    """Of `reqs`, which are admitted; nothing of theirs changes as long as this is used.

    Args:
      reqs: all that hold pages.
      cache: theirs.
    """

    def __init__(self, reqs: Iterable[Req], cache: CacheManager) -> None:
        self._cache = cache
        self._reqs = list(reqs)
        self._table = self._rows(self._reqs)

    def add(self, req: Req) -> None:
        """`req` is admitted as well."""
        self._reqs.append(req)
        self._table = np.concatenate((self._table, self._rows([req])))

    def fits(self, req: Req) -> bool:
        """Whether the pool suffices until the last one has ended, if `req`, which holds its prefix, is admitted.

        Between two ends each request grows by the same number of tokens, so the pool is tightest right before an end.
        What a request holds comes free at its end. Pages that it shares with others do only when nobody else locks
        them.
        """
        assert req.lease is not None
        if req.lease.num_shared:  # others may hold the same prefix: it comes free later than when they held it alone
            self._table = self._rows(self._reqs)
        table = np.concatenate((self._table, self._rows([req])))
        steps, known, held, exclusive = table[np.argsort(table[:, 0], kind="stable")].T
        freed = np.cumsum(exclusive) - exclusive
        return bool(
            (_pages(steps, known, self._cache.page_size) - _of_later(held) <= self._cache.num_available + freed).all()
        )

    def _rows(self, reqs: Iterable[Req]) -> npt.NDArray[np.int64]:
        """`[n, 4]` steps until its end, tokens that it knows now, pages that it has, pages that its end sets free."""
        rows = []
        for req in reqs:
            assert req.lease is not None
            known = req.kv_len + req.extend_left
            rows.append((req.max_kv_len - known, known, req.lease.num_pages, self._cache.num_exclusive(req.lease)))
        return np.array(rows, dtype=np.int64).reshape(-1, 4)


def _pages(steps: npt.NDArray[np.int64], known: npt.NDArray[np.int64], page_size: int) -> npt.NDArray[np.int64]:
    """`[n]` pages right before each end of those that have not ended, in order of their ends.

    The sum over i >= k of ceil((known_i + steps_k) / page_size), without n x n terms: apart from whole pages it depends
    only on which remainders carry over, and those are counted.
    """
    whole, rest = np.divmod(known + page_size - 1, page_size)
    more, more_rest = np.divmod(steps, page_size)
    carries = _of_later(rest[:, None] >= np.arange(page_size + 1))  # [k, r]: of i >= k, those with a rest of r and more
    places = np.arange(len(steps))
    num_carried: npt.NDArray[np.int64] = carries[places, page_size - more_rest]
    return _of_later(whole) + (len(steps) - places) * more + num_carried


def _of_later(values: npt.NDArray[np.generic]) -> npt.NDArray[np.int64]:
    """`[n, ...]` sums over i >= k."""
    sums: npt.NDArray[np.int64] = np.cumsum(values[::-1], axis=0, dtype=np.int64)[::-1]
    return sums
