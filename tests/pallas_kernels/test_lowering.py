"""Every kernel lowers for CUDA and TPU without such hardware, on the oldest and the newest JAX that we support."""

import pytest

from pallas_kernels.specs import HOPPER_PRODUCT_SPECS
from tests.grids import daily
from tests.pallas_kernels.elsewhere import BEGINS, VERSIONS, lower
from tests.pallas_kernels.lower_everything import grouped_of, latents_of, products_of, specs_of

pytestmark = pytest.mark.foreign

CALL_OF = {"triton": ("triton_kernel_call", "__gpu$xla.gpu.triton"), "mosaic_gpu": ("mosaic_gpu",),
           "mosaic_tpu": ("tpu_custom_call",)}  # fmt: skip
OPS = {"triton": 10, "mosaic_gpu": 3, "mosaic_tpu": 5}
ROUNDS, MANY_ROWS = "round_and_multiply", [spec.name for spec in HOPPER_PRODUCT_SPECS]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", daily(list(VERSIONS)[::-1], every=2))  # by day the newest
def test_every_kernel_lowers_for_cuda_and_tpu(version: str) -> None:
    lines = lower(version)
    if isinstance(lines, str):
        pytest.skip(lines)
    begin = BEGINS[version]
    with_index = [spec for spec in latents_of(begin) if spec.index_size]  # choices and attention, each twice
    of_latents = 4 * len(latents_of(begin)) + 3 * len(with_index)
    others = of_latents + 2 * len(grouped_of(begin)) + len(products_of(begin))
    assert len(lines) == 3 * (5 * len(specs_of(begin)) + others)
    for backend, calls in CALL_OF.items():
        mine = [line for line in lines if line["backend"] == backend]
        lowered = [line for line in mine if "refused" not in line]
        # Of products in float8 Mosaic has those of many rows, and Triton the others for both.
        has_many = backend == "mosaic_gpu"
        of_mine = [
            line for line in lowered if not (has_many and line["op"] == ROUNDS and line["spec"] not in MANY_ROWS)
        ]
        assert {line["custom_call"] for line in of_mine} <= set(calls), lowered
        # JAX 0.10.0 takes every GPU that isn't there for one that can't round to float8.
        unknown = {ROUNDS} if version == "oldest" and backend in ("triton", "mosaic_gpu") else set()
        of_index = 4 if with_index and backend == "triton" else 0
        assert len({line["op"] for line in lowered} | unknown) == OPS[backend] + of_index, mine
