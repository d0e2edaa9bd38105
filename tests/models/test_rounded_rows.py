"""The kernels that layers with FP8 weights launch for many rows: one more a layer than where rows stay as they are."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxsgl.config.engine import BUNDLED_MODEL
from jaxsgl.models import StepContext, abstract_model, arch_from_folder
from jaxsgl.models.layer_spec import DenseMlp
from jaxsgl.models.quantization import WeightFormat
from pallas_kernels import KernelChoice
from tests.pallas_kernels.lower_everything import on_a_device

NUM_LAYERS = 3


def launched(num_rows: int, kernels: KernelChoice) -> Counter[str]:
    """How often each kernel of Pallas is called in the layers, but for attention, on an H200."""
    bundled = arch_from_folder(Path(BUNDLED_MODEL))
    layers = (dataclasses.replace(bundled.layers[0], mlp=DenseMlp(ffn_size=512)),) * NUM_LAYERS
    blocks = WeightFormat("fp8", "float8_e4m3fn", group=128)
    arch = dataclasses.replace(
        bundled, hidden_size=256, layers=layers, num_heads=4, num_kv_heads=2, head_dim=64, weight_format=blocks
    )
    graphdef, params = abstract_model(arch, jnp.dtype(jnp.bfloat16))

    def attend(_layer: int, qkv: Any, _sinks: Any) -> jax.Array:
        queries: jax.Array = qkv.product[:, :, :-2]
        return queries.reshape(num_rows, arch.num_heads, arch.head_dim)

    def hidden(params: Any, ids: jax.Array) -> jax.Array:
        out: jax.Array = nnx.merge(graphdef, params)(ids, ids, StepContext(attend, kernels=kernels))
        return out

    ids = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    with on_a_device("cuda", "NVIDIA H200", 132):
        equations = jax.make_jaxpr(hidden)(params, ids).eqns
    return Counter(str(each.params["name"]) for each in equations if each.primitive.name in ("jit", "pjit"))


@pytest.mark.parametrize(
    ("num_rows", "kernels", "product", "rounding"),
    [
        # The first norm, and of each layer what attention returns and the gated unit; all other norms are rounded
        # where they are made.
        (256, KernelChoice(), "float8_product", 1 + 2 * NUM_LAYERS),
        (256, KernelChoice(float8_product="xla"), "quantized_product", 0),
        (1, KernelChoice(), "float8_product", 1 + 2 * NUM_LAYERS),
    ],
)
def test_a_layer_launches_one_kernel_more_and_its_gated_unit_in_the_place_of_another(
    num_rows: int, kernels: KernelChoice, product: str, rounding: int
) -> None:
    calls = launched(num_rows, kernels)
    assert {name: calls[name] for name in ("float8_product", "quantized_product") if name in calls} == {
        product: 4 * NUM_LAYERS
    }
    assert calls["float8_rows"] == rounding
    assert calls["_of_any_row"] == 2 * NUM_LAYERS  # `add_and_norm`
