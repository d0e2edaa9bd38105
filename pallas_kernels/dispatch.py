"""The one place where a backend is chosen, by target device, shapes and the caller's flag.

Owns the list of backends and the reasons for which one is refused. Never knows how a backend computes: an op
hands in which of them it implements and what each cannot do. Called by every op's `api`, and by start-up code that
wants to validate a flag early.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from pallas_kernels import tuning
from pallas_kernels.target import target_device

logger = logging.getLogger(__name__)

# "reference" is never chosen by "auto": it defines what is right and is slow.
BACKENDS = ("auto", "reference", "xla", "native", "triton", "mosaic_gpu", "mosaic_tpu")

# Says why a backend can't run these shapes, or None when it can.
Refusal = Callable[[], str | None]

_PLATFORM_OF_PALLAS = {"triton": "gpu", "mosaic_gpu": "gpu", "mosaic_tpu": "tpu"}


def choose_backend(op: str, backend: str, implemented: Mapping[str, Refusal], *, interpret: bool = False) -> str:
    """The name of the backend that `op` should run.

    `implemented` maps each backend that the op has to a function saying why these shapes are impossible for it.
    A named backend runs or raises. "auto" takes the first that can run of those that the tuning table lists for the
    target device, else "xla", and logs once why the ones before it can't.

    Raises:
        ValueError: the name is unknown, the op lacks the backend, the platform is wrong, or the shapes are.
    """
    if backend == "auto":
        return _choose_automatically(op, implemented)
    possible = ", ".join(("auto", *implemented))
    if backend not in BACKENDS:
        raise ValueError(f"{op}: unknown backend {backend!r}; choose one of {possible}")
    if backend not in implemented:
        raise ValueError(f"{op}: backend {backend!r} is not implemented for this op; choose one of {possible}")
    reason = _refusal(backend, implemented, interpret)
    if reason is not None:
        raise ValueError(f"{op}: backend {backend!r} is impossible here: {reason}; choose one of {possible}")
    return backend


def _choose_automatically(op: str, implemented: Mapping[str, Refusal]) -> str:
    for wanted in tuning.preferred_backends(op):
        if wanted not in implemented:
            continue
        reason = _refusal(wanted, implemented, interpret=False)
        if reason is None:
            return wanted
        _log_once(f"{op}: not using {wanted}: {reason}")
    return "xla"


def _refusal(backend: str, implemented: Mapping[str, Refusal], interpret: bool) -> str | None:
    needed = _PLATFORM_OF_PALLAS.get(backend)
    device = target_device()
    if needed is not None and needed != device.platform and not interpret:
        return f"it needs a {needed}, this is a {device.platform} (interpret=True runs it slowly anywhere)"
    if needed == "gpu" and device.is_before_ampere and not interpret:
        return f"it needs an Ampere GPU or a newer one, and {device.kind} is older"
    return implemented[backend]()


@functools.cache
def _log_once(message: str) -> None:
    logger.info(message)


def takes_all_shapes(*_args: Any) -> str | None:
    """The `refuse` of a backend that takes all shapes."""
    return None


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One backend of one op."""

    run: Callable[..., Any]
    """Takes the op's arrays and options in one order for all backends; Pallas backends take `interpret` too."""
    refuse: Callable[..., str | None] = takes_all_shapes
    """Takes the arrays that decide; says why the shapes are impossible, or None."""


def run(
    op: str,
    backend: str,
    implementations: Mapping[str, Implementation],
    deciding: tuple[Any, ...],
    args: tuple[Any, ...],
    *,
    interpret: bool,
) -> Any:
    """Choose a backend by the arrays in `deciding`, then run it on `args`. Raises as `choose_backend`."""
    refusals = {name: functools.partial(each.refuse, *deciding) for name, each in implementations.items()}
    chosen = choose_backend(op, backend, refusals, interpret=interpret)
    if chosen in _PLATFORM_OF_PALLAS:
        return implementations[chosen].run(*args, interpret=interpret)
    return implementations[chosen].run(*args)
