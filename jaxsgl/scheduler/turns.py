"""`Turns`: which running requests decode in the next step, and what a step knows of their newest tokens.

    AllAtOnce   one stage: all decode in each step; the newest tokens are on the device, read one step late
    InTurns     pipeline stages: each step decodes those whose tokens are read, its share of all of them

With stages several steps are in flight, one on each stage (`engine/stages/engine.py`), and a request is in at most one
of them, so that its newest token is known when it decodes: nothing on the device links the last stage with the first,
grammars make masks at once, and no token is computed after a stop. Shares are equal: where requests end, the next steps
even them out. `RequestTable.decoding` is in the order in which requests were launched last, so those that wait longest
go first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxsgl.cache.pages import IntArray
from jaxsgl.scheduler.req import Req
from jaxsgl.scheduler.request_table import RequestTable


class AllAtOnce:
    """Of one stage.

    Attributes:
      in_lockstep: whether each decode step has all running requests, as forecasts of ends suppose.
    """

    in_lockstep = True

    def to_decode(self, requests: RequestTable) -> list[Req]:
        """The requests that decode in the next step, if it decodes."""
        return list(requests.decoding.values())

    def token_ids(self, reqs: Sequence[Req], rows: IntArray) -> IntArray:
        """`[n]` the newest token of each of `reqs`, of `rows [n]`, as steps embed it: the device knows it by row."""
        ids: IntArray = ~rows
        return ids

    def launched(self, requests: RequestTable, reqs: Sequence[Req]) -> None:
        """A step is launched in which `reqs` decode."""


class InTurns(AllAtOnce):
    """Of several stages.

    Args:
      num_steps: steps among which the running requests are shared out: the stages, and those that wait for the first.
    """

    in_lockstep = False

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps

    def to_decode(self, requests: RequestTable) -> list[Req]:
        """Those whose tokens are read; of all running ones a step's share at most, the longest waiting first."""
        running = requests.decoding.values()
        share = -(-len(running) // self._num_steps)
        return [req for req in running if req.is_read][:share]

    def token_ids(self, reqs: Sequence[Req], rows: IntArray) -> IntArray:
        """See `AllAtOnce`: they are read."""
        return np.array([req.output_ids[-1] for req in reqs], dtype=np.int32)

    def launched(self, requests: RequestTable, reqs: Sequence[Req]) -> None:
        """Moves `reqs` after those that wait for their turn."""
        requests.decoded(reqs)
