"""What JAX has in no public place. No other file imports `jax._src`.

Each function looks for its part when it is called, since another JAX may have it elsewhere, or not at all.
"""

import contextlib
from typing import Any


def is_running() -> bool:
    """Whether JAX has started its devices in this process; False if this JAX doesn't say."""
    try:
        from jax._src import xla_bridge

        return bool(xla_bridge.backends_are_initialized())
    except (ImportError, AttributeError):
        return False


def drop_trace() -> None:
    """Gives up a profiler's trace that couldn't be written; JAX would keep it in memory and record no other one."""
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import profiler

        profiler._profile_state.reset()


def gpu_interpreter(**options: Any) -> Any:
    """The parameters of Mosaic GPU's interpreter, which JAX 0.10 doesn't export. Raises ImportError."""
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams(**options)


def triton_lowering() -> Any:
    """The module that lowers Pallas to Triton: its rules, and what registers another one. Raises ImportError."""
    from jax._src.pallas.triton import lowering

    return lowering
