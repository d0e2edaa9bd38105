"""What is pooled of one request's prompt while its chunks are computed: a `Req` has one of these if that is its answer.

The device pools each chunk: it yields the hidden state of the chunk's last token, or the sum over its tokens. The host
adds sums up in float64, so that a mean does not depend on how the prompt was cut. Never knows steps; apply.py hands
over what they yield.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsgl.batch.engine_api import PooledRows
from jaxsgl.requests.pooling import Pooled, Pooling, PoolingKind


class PooledPrompt:
    """The hidden states pooled so far.

    Attributes:
      pooling: what the request asks for.
      kind: the model's.
    """

    __slots__ = ("_hidden", "_log_total", "_logits", "kind", "pooling")

    def __init__(self, pooling: Pooling, kind: PoolingKind) -> None:
        self.pooling = pooling
        self.kind = kind
        self.clear()

    def clear(self) -> None:
        """Starts over: the request was retracted, and computes its prompt again."""
        self._hidden: npt.NDArray[Any] | float = 0.0
        self._logits: tuple[float, ...] = ()
        self._log_total: float | None = None

    def take(self, rows: PooledRows, place: int) -> None:
        """Takes what a chunk yields, the sequence at `place` of its step. Of a request that pools one chunk, once."""
        if self.pooling.label_ids:
            self._logits = tuple(rows.logits[place, : len(self.pooling.label_ids)].tolist())
            self._log_total = None if rows.log_total is None else float(rows.log_total[place])
            return
        self._hidden = self._hidden + rows.hidden[place].astype(np.float64)
        if rows.has_classes:
            self._logits = tuple(rows.logits[place].tolist())

    def result(self, num_tokens: int) -> Pooled:
        """The answer to a prompt of `num_tokens` tokens, all of whose chunks were taken."""
        if self.pooling.label_ids:
            return Pooled(b"", self._logits, self._log_total)
        hidden = np.asarray(self._hidden) / (num_tokens if self.kind == "mean" else 1)
        return Pooled(hidden.astype(np.float32).tobytes(), self._logits)
