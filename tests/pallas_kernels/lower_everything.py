"""Lower every op on shapes of the grid for CUDA and TPU with the JAX at hand, without such hardware.

Run as a program, so that it works in an environment that has JAX alone: prints a line of JSON per kernel, why it was
refused or which custom call it became. An exception ends it. By day some shapes of attention and of quantized products
are lowered, from the ones on whose number is the argument; by night every second shape of attention is, so that two
versions that begin at an even and at an odd one lower all of them, and every latent and product is.
"""

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.specs import (
    GRID_SPECS,
    GROUPED_SPECS,
    HOPPER_PRODUCT_SPECS,
    LATENT_SPECS,
    PRODUCT_SPECS,
    TPU_PRODUCT_SPECS,
    ArgSpec,
    GroupedSpec,
    ProductSpec,
    store_decoded,
)
from tests.grids import daily

TARGETS = {
    "cuda": ("NVIDIA H200", 132, ("triton", "mosaic_gpu")),
    "tpu": ("TPU v6 lite", 1, ("mosaic_tpu",)),
}
# Function, arguments as shapes, and keyword arguments.
Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
# Mosaic's first: its decode is merged by a kernel of Triton.
CUSTOM_CALLS = ("mosaic_gpu", "triton_kernel_call", "__gpu$xla.gpu.triton", "tpu_custom_call")


def on_a_device(platform: str, kind: str, num_cores: int):
    """Traces inside see this device as their target although it isn't there."""
    fields: dict[str, Any] = {"device_kind": kind, "num_cores": num_cores, "platform": platform}
    known = inspect.signature(AbstractDevice).parameters  # `platform` isn't there in every version
    device = AbstractDevice(**{name: value for name, value in fields.items() if name in known})
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def lower(op, args, options, backend: str, platform: str) -> dict[str, str]:
    """How the lowering of one kernel ended."""
    try:
        traced = jax.jit(lambda *arrays: op(*arrays, backend=backend, **options)).trace(*args)
    except ValueError as error:
        if "is impossible here" in str(error) or "is not implemented" in str(error):
            return {"refused": str(error)}
        raise
    try:
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    except NotImplementedError as error:  # JAX 0.10.0 takes every GPU that isn't there for an A100
        if jax.__version_info__ > (0, 10, 1) or not re.search("cannot cast (from|to) `float8_e4m3fn`", str(error)):
            raise
        return {"refused": str(error)}
    return {"custom_call": next((name for name in CUSTOM_CALLS if name in text), "none")}


def specs_of(begin: int) -> tuple[ArgSpec, ...]:
    """The specs of attention that one run lowers."""
    return tuple(daily((GRID_SPECS[begin:] + GRID_SPECS[:begin])[::2], every=8))


def products_of(begin: int) -> tuple[ProductSpec, ...]:
    """The products that one run lowers."""
    all_specs = PRODUCT_SPECS, HOPPER_PRODUCT_SPECS, TPU_PRODUCT_SPECS
    turned = (specs[begin:] + specs[:begin] for specs in all_specs)
    return tuple(spec for specs in turned for spec in daily(specs, every=4))


def latents_of(begin: int) -> tuple[ArgSpec, ...]:
    """The latents that one run lowers."""
    return tuple(daily(LATENT_SPECS[begin:] + LATENT_SPECS[:begin], every=8))


def grouped_of(begin: int) -> tuple[GroupedSpec, ...]:
    """The windows and groups of tokens that one run lowers."""
    return tuple(daily(GROUPED_SPECS[begin:] + GROUPED_SPECS[:begin], every=6))


def calls(begin: int) -> Iterator[tuple[str, Call]]:
    """The calls that one run lowers, with the names of their specs."""
    for spec in specs_of(begin):
        yield from ((spec.name, call) for call in spec.calls())
        yield spec.name, (store_decoded, spec.store_and_decode_args(), spec.attention)
    yield from ((spec.name, call) for spec in latents_of(begin) for call in spec.calls())
    yield from ((spec.name, call) for spec in grouped_of(begin) for call in spec.calls())
    yield from ((product.name, product.call()) for product in products_of(begin))


def main() -> None:
    for platform, (kind, num_cores, backends) in TARGETS.items():
        for backend in backends:
            for spec, (op, args, options) in calls(int(sys.argv[1])):
                with on_a_device(platform, kind, num_cores):
                    result = lower(op, args, options, backend, platform)
                line = {"jax": jax.__version__, "backend": backend, "op": op.__name__, "spec": spec, **result}
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
