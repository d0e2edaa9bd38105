"""The one place where a backend is chosen, by platform, shapes and the caller's flag.

Owns the list of backends and the reasons for which one is refused. Never knows how a backend computes: an op
hands in which of them it implements and what each cannot do. Called by every op's `api`, and by start-up code that
wants to validate a flag early.
"""

import functools
import logging
from collections.abc import Callable, Mapping

import jax
from jax.sharding import get_abstract_mesh

logger = logging.getLogger(__name__)

# "reference" is never chosen by "auto": it defines what is right and is slow.
BACKENDS = ("auto", "reference", "xla", "pallas_gpu", "pallas_tpu")

# Says why a backend can't run these shapes, or None when it can.
Refusal = Callable[[], str | None]

_PLATFORM_OF_PALLAS = {"pallas_gpu": "gpu", "pallas_tpu": "tpu"}


def target_platform() -> str:
    """ "cpu", "gpu" or "tpu": what the program being traced is for.

    The abstract mesh's device, when one is set, wins over the process's own devices: this is how JAX compiles
    for hardware that isn't there (`jax.sharding.use_abstract_mesh`).
    """
    device = get_abstract_mesh().abstract_device
    if device is None:
        return _family(jax.default_backend())
    platform = getattr(device, "platform", None)
    if platform is None:  # JAX 0.11 has no such field
        platform = "tpu" if "TPU" in device.device_kind else "gpu"
    return _family(platform)


def _family(platform: str) -> str:
    return "gpu" if platform in ("cuda", "rocm") else platform


def choose_backend(op: str, backend: str, implemented: Mapping[str, Refusal], *, interpret: bool = False) -> str:
    """The name of the backend that `op` should run.

    `implemented` maps each backend that the op has to a function saying why these shapes are impossible for it.
    A named backend runs or raises; "auto" falls back to "xla" and logs the reason once.

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
    platform = target_platform()
    wanted = {"gpu": "pallas_gpu", "tpu": "pallas_tpu"}.get(platform)
    if wanted is None:
        return "xla"
    if wanted not in implemented:
        _log_once(f"{op}: no {wanted} backend, using xla")
        return "xla"
    reason = implemented[wanted]()
    if reason is not None:
        _log_once(f"{op}: using xla instead of {wanted}: {reason}")
        return "xla"
    return wanted


def _refusal(backend: str, implemented: Mapping[str, Refusal], interpret: bool) -> str | None:
    needed = _PLATFORM_OF_PALLAS.get(backend)
    platform = target_platform()
    if needed is not None and needed != platform and not interpret:
        return f"it needs a {needed}, this is a {platform} (interpret=True runs it slowly anywhere)"
    return implemented[backend]()


@functools.cache
def _log_once(message: str) -> None:
    logger.info(message)


def no_refusal() -> str | None:
    """The `Refusal` of a backend that takes all shapes."""
    return None
