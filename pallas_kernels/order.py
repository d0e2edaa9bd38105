"""Whether the program that is being traced adds each result in one order, whatever its number of rows.

Owns that one question. XLA, its libraries and our splits of attention choose tiles and parts for the batch at hand,
which is fast, and gives a row other bits in other company; a program in fixed order takes the same ones always. On a
CPU the kernels in C++ do so in any case. `sums`, the models' products and `api` ask while a program is traced, and the
engine, which traces it, says so: by a context and not by an argument, since sums are far below what knows flags.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_is_fixed: ContextVar[bool] = ContextVar("pallas_kernels.order.is_fixed", default=False)


@contextlib.contextmanager
def fixed_order() -> Iterator[None]:
    """What this thread traces inside adds in one order. JAX keeps traces by function, and knows nothing of this."""
    token = _is_fixed.set(True)
    try:
        yield
    finally:
        _is_fixed.reset(token)


def is_order_fixed() -> bool:
    """Whether the program that is being traced adds in one order."""
    return _is_fixed.get()
