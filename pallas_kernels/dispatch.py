"""The one place where a backend is chosen, by target device, shapes and the caller's choice.

Owns the list of backends and the order of the reasons for which one is refused. Never knows how a backend computes.
Called by the public functions in `api`.
"""

import functools
import logging
from collections.abc import Callable, Mapping

from pallas_kernels import hopper, reference, tpu, tuning, xla
from pallas_kernels.backend import Backend, Kernel, RunT, refuse_nothing
from pallas_kernels.native import backend as native
from pallas_kernels.target import target_device
from pallas_kernels.triton import backend as triton

logger = logging.getLogger(__name__)

# The reference is never chosen by "auto": it defines what is right and is slow.
BACKEND_OF_NAME: Mapping[str, Backend] = {
    module.BACKEND.name: module.BACKEND for module in (reference, xla, native, triton, hopper, tpu)
}
BACKENDS = ("auto", *BACKEND_OF_NAME)
STORE_BACKENDS = tuple(name for name, each in BACKEND_OF_NAME.items() if each.store is not None)
ROTATE_AND_STORE_BACKENDS = tuple(name for name, each in BACKEND_OF_NAME.items() if each.rotate_and_store is not None)
STORE_AND_DECODE_BACKENDS = tuple(name for name, each in BACKEND_OF_NAME.items() if each.store_and_decode is not None)

# Says why a backend can't run a call, or None when it can.
Refusal = Callable[[], str | None]
KernelOf = Callable[[Backend], Kernel[RunT] | None]


class ImpossibleBackend(ValueError):
    """A named backend can't run a call."""


# What it costs that XLA computes an op on an accelerator, where kernels were meant to.
_COST_OF_XLA: Mapping[str, str] = {
    "paged_decode_attention": "a loop in each layer that the host steps, many times as slow",
    "paged_extend_attention": "a loop in each layer that the host steps, many times as slow",
    "attend_to_groups": "entries gathered into arrays, several times the traffic",
    "attend_to_chosen": "a loop in each layer that the host steps, many times as slow",
    "score_tokens": "a loop in each layer that the host steps, many times as slow",
    "grouped_product": "a loop over experts in each layer that the host steps, many times as slow",
    "ordered_product": "an order of sums that depends on the batch",
    "store_kv": "a scatter in each layer, slower where pages are tiled",
}
_COST_OF_OTHERS = "several kernels in each layer instead of one"


def refusals_of(kernel_of: KernelOf[RunT], *call: object) -> dict[str, Refusal]:
    """For each backend with the kernel, whether it refuses a call, of which `call` is what decides."""
    kernels = {name: kernel_of(each) for name, each in BACKEND_OF_NAME.items()}
    return {name: functools.partial(each.refuse, *call) for name, each in kernels.items() if each is not None}


def choose_kernel(op: str, kernel_of: KernelOf[RunT], backend: str, *call: object, interpret: bool) -> RunT:
    """What computes `op`, of which XLA has a kernel, too. `call` are the arguments of `Kernel.refuse`.

    Raises as `choose_backend`.
    """
    chosen = kernel_of(choose_backend(op, backend, refusals_of(kernel_of, *call), interpret=interpret))
    assert chosen is not None
    return chosen.run


def choose_kernel_or_xla(
    op: str, kernel_of: KernelOf[RunT], backend: str, *call: object, interpret: bool
) -> RunT | None:
    """The same for an op that XLA computes in parts: None if those are chosen, as "xla" or by "auto"."""
    refusals = {**refusals_of(kernel_of, *call), xla.BACKEND.name: refuse_nothing}
    chosen = kernel_of(choose_backend(op, backend, refusals, interpret=interpret))
    return None if chosen is None else chosen.run


def sees_ahead(backend: str) -> bool:
    """Whether `paged_extend_attention` by that name, or "auto", takes `seen`."""
    return backend == "auto" or BACKEND_OF_NAME[backend].extend_ahead is not None


def choose_backend(op: str, backend: str, refusals: Mapping[str, Refusal], *, interpret: bool = False) -> Backend:
    """The backend that `op` should run on.

    `refusals` maps each backend that has the op to a function saying why this call is impossible for it. A named
    backend runs or raises. "auto" takes the first that can run of those that the tuning table lists for the target
    device, else "xla", and logs once why the backends before it can't: with a warning where an accelerator is left with
    XLA.

    Raises:
        ValueError: the name is unknown, or the backend lacks the op.
        ImpossibleBackend: the platform is wrong, or the shapes are.
    """
    if backend == "auto":
        return _choose_automatically(op, refusals)
    possible = ", ".join(("auto", *refusals))
    if backend not in BACKENDS:
        raise ValueError(f"{op}: unknown backend {backend!r}; choose one of {possible}")
    if backend not in refusals:
        raise ValueError(f"{op}: backend {backend!r} is not implemented for this op; choose one of {possible}")
    reason = _refusal(backend, refusals, interpret)
    if reason is not None:
        raise ImpossibleBackend(f"{op}: backend {backend!r} is impossible here: {reason}; choose one of {possible}")
    return BACKEND_OF_NAME[backend]


def has_kernel(op: str, backend: str, refusals: Mapping[str, Refusal]) -> bool:
    """Whether "auto" or a named backend is one of `refusals`, for an op that XLA is not to compute.

    Raises as `choose_backend` does for other names.
    """
    if backend == "auto":
        wanted = [name for name in tuning.preferred_backends(op) if name in refusals]
        return any(_refusal(name, refusals, interpret=False) is None for name in wanted)
    return backend != xla.BACKEND.name and bool(choose_backend(op, backend, refusals))


def _choose_automatically(op: str, refusals: Mapping[str, Refusal]) -> Backend:
    reasons = []
    for wanted in tuning.preferred_backends(op):
        if wanted not in refusals:
            continue
        reason = _refusal(wanted, refusals, interpret=False)
        if reason is None:
            chosen = BACKEND_OF_NAME[wanted]
            break
        reasons.append(f"{wanted}: {reason}")
    else:
        chosen = xla.BACKEND
    if reasons:
        _log_once(*_about_refused(op, chosen, reasons))
    return chosen


def _about_refused(op: str, chosen: Backend, reasons: list[str]) -> tuple[int, str]:
    """A logging level, and what to say of the backends that can't run."""
    text = f"{op}: not using {'; '.join(reasons)}"
    if chosen is not xla.BACKEND or target_device().platform == "cpu":
        return logging.INFO, text
    return logging.WARNING, f"{text}. XLA computes it: {_COST_OF_XLA.get(op, _COST_OF_OTHERS)}"


def _refusal(name: str, refusals: Mapping[str, Refusal], interpret: bool) -> str | None:
    backend, device = BACKEND_OF_NAME[name], target_device()
    interpreted = interpret and backend.has_interpreter
    if backend.platform not in (None, device.platform) and not interpreted:
        instead = " (interpret=True runs it slowly anywhere)" if backend.has_interpreter else ""
        return f"it needs a {backend.platform}, this is a {device.platform}{instead}"
    if backend.platform == "gpu" and device.is_before_ampere and not interpreted:
        return f"it needs an Ampere GPU or a newer one, and {device.kind} is older"
    return refusals[name]()


@functools.cache
def _log_once(level: int, message: str) -> None:
    logger.log(level, message)
