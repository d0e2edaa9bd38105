"""Sizes, places and the host form follow from what each layer says that it keeps."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxsgl.engine.layer_state import LayerState, LayerStates, StateArray, attention_state, layer_states
from jaxsgl.models.tensor_parallel import TENSOR_AXIS
from tests.models.test_arch import DEEPSEEK, read
from tests.plain_model import mesh_of

FLOAT32, BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
LATENT = LayerState((StateArray("k", (1, 16, 576), BFLOAT16, (None, None, None)),))
RECURRENT = LayerState((), (StateArray("delta", (32, 128, 128), FLOAT32, ("kv_heads", None, None)),))


def test_devices_hold_parts_of_what_is_split_and_all_of_the_rest() -> None:
    attention = attention_state(8, 16, 128, BFLOAT16)
    for num_devices in (1, 2, 4):
        split = LayerStates((attention, attention), 16, num_devices)
        assert split.page_bytes * num_devices == 2 * 2 * 8 * 16 * 128 * 2
        assert LayerStates((LATENT,), 16, num_devices).page_bytes == 16 * 576 * 2
        assert LayerStates((RECURRENT, attention), 16, num_devices).row_bytes * num_devices == 32 * 128 * 128 * 4
    assert attention.by_page[0].sharding(mesh_of()).spec == PartitionSpec(None, TENSOR_AXIS, None, None)
    assert LATENT.by_page[0].sharding(mesh_of()).spec == PartitionSpec(*(None,) * 4)


def test_a_latent_of_deepseek_v3_takes_1152_bytes_a_token_and_layer_on_each_device(tmp_path: Path) -> None:
    arch = read(tmp_path, **DEEPSEEK, max_position_embeddings=4096)
    for num_devices in (1, 2, 4):
        shared = arch.on_devices(num_devices, by_experts=False)
        states = layer_states(shared, 16, BFLOAT16, num_devices)
        assert states.page_bytes == arch.num_layers * 16 * 1152
        assert states.by_page("v") == () and states.page_layout.page_shape == (arch.num_layers, 1, 1, 16, 576)


def test_the_host_form_has_the_layers_that_keep_pages() -> None:
    attention = attention_state(8, 16, 128, BFLOAT16)
    layout = LayerStates((RECURRENT, attention, RECURRENT, attention), 16).page_layout
    assert layout.page_shape == (2, 2, 8, 16, 128)
    assert layout.page_bytes == 2 * 2 * 8 * 16 * 128 * 2
    assert layout.host_dtype == "uint16"
    assert LayerStates((LATENT,) * 3, 16).page_layout.page_shape == (3, 1, 1, 16, 576)


def test_layers_whose_pages_differ_have_no_host_form() -> None:
    wide, narrow = attention_state(8, 16, 128, BFLOAT16), attention_state(4, 16, 256, BFLOAT16)
    assert LayerStates((wide, narrow), 16).page_bytes == 2 * LayerStates((wide,), 16).page_bytes
    with pytest.raises(AssertionError, match="no place for pages"):
        _ = LayerStates((wide, narrow), 16).page_layout


def test_the_name_of_a_layout_is_that_in_files_that_are_kept() -> None:
    layout = LayerStates((attention_state(8, 16, 128, BFLOAT16),) * 4, 16).page_layout
    assert layout.name == (
        "PageLayout(num_layers=4, num_kv_heads=8, page_size=16, head_dim=128, dtype='bfloat16', itemsize=2)"
    )
    others = {LayerStates((LATENT,), 16).page_layout.name, LayerStates((LATENT,) * 2, 16).page_layout.name}
    assert len(others | {layout.name}) == 3
