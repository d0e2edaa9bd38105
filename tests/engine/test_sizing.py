from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxsgl
from jaxsgl.config.engine import EngineConfig, SchedulingConfig
from jaxsgl.config.features import VisionConfig
from jaxsgl.engine.layer_state import LayerStates, attention_state, layer_states
from jaxsgl.engine.start.memory import HEADROOM, Memory, free_host_bytes, free_memory
from jaxsgl.engine.start.model_flags import check_flags
from jaxsgl.engine.start.sizing import (
    choose_num_pages,
    choose_page_size,
    choose_pages,
    choose_states,
    media_limits,
    slow_images,
    tower_capacity,
)
from jaxsgl.engine.state import allocate_kv
from jaxsgl.errors import ConfigError
from jaxsgl.models import arch_from_folder
from jaxsgl.models.tensor_parallel import TENSOR_AXIS
from jaxsgl.models.towers.arch import (
    LayerShape,
    MergerShape,
    Norms,
    PatchShape,
    Positioning,
    TowerArch,
    TowerTokens,
)
from pallas_kernels.tpu.common import refuse_pages
from tests.plain_model import mesh_of

GIB = 2**30
BFLOAT16 = jnp.dtype("bfloat16")
BUNDLED = arch_from_folder(Path(jaxsgl.__file__).parent / "bundled_model")
TOWER = TowerArch(
    hidden_size=8,
    out_size=BUNDLED.hidden_size,
    patches=PatchShape(size=16, frames=2, channels=3),
    positioning=Positioning("square", side=8),
    norms=Norms(),
    layers=LayerShape(count=1, num_heads=1, head_dim=8, ffn_size=8),
    merger=MergerShape("mlp", side=2),
    tokens=TowerTokens(image_id=1, video_id=2),
)
PAGE = LayerStates((attention_state(8, 16, 128, jnp.dtype("bfloat16")),) * 4, page_size=16)


@dataclass
class Accelerator:
    """Stands for a device with `limit` bytes of memory, `used` of them by the weights."""

    limit: int
    used: int
    platform: str = "gpu"

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": self.limit, "bytes_in_use": self.used}


def num_pages(device: Any, page: LayerStates = PAGE, **options: Any) -> int:
    return pages_in(free_memory(device, options.pop("mem_fraction_static", 0.85)), page, **options)


def pages_in(memory: Memory, page: LayerStates = PAGE, **options: Any) -> int:
    defaults = {
        "max_total_tokens": None,
        "useful_tokens": 10**12,
        "rows_bytes": 0,
        "reserved_bytes": 0,
        "step_bytes": 0,
    }
    return choose_num_pages(page, memory, **{**defaults, **options})


@pytest.mark.parametrize(
    ("platform", "head_dim", "tokens"), [("cpu", 128, 16), ("gpu", 128, 64), ("gpu", 64, 64), ("tpu", 128, 64)]
)
def test_pages_are_longer_on_accelerators_unless_the_flag_says_otherwise(
    platform: str, head_dim: int, tokens: int
) -> None:
    assert choose_page_size(EngineConfig(), platform, 8, head_dim) == tokens
    assert choose_page_size(EngineConfig(page_size=32), platform, 8, head_dim) == 32


@pytest.mark.parametrize("page_size", ["auto", 1, 8, 16, 64, 128, 256])
@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim"), [(8, 64), (2, 64), (1, 64), (8, 32), (8, 80), (3, 96), (8, 128), (1, 256)]
)
def test_pages_on_tpus_have_a_form_that_kernels_take_and_waste_little(
    num_kv_heads: int, head_dim: int, page_size: int
) -> None:
    arch = replace(BUNDLED, num_kv_heads=num_kv_heads, head_dim=head_dim)
    tokens, heads = choose_pages(EngineConfig(page_size=page_size), arch, "tpu", 1)
    assert heads.takes(head_dim)
    fills_a_tile = tokens > 1 or heads.kept_heads in (2, 4, 8)  # of bfloat16
    pages: Any = jax.ShapeDtypeStruct((9, heads.kept_heads, tokens, heads.width), BFLOAT16)
    assert (refuse_pages(pages) is None) == fills_a_tile
    wasted = heads.kept_heads * heads.width / (num_kv_heads * head_dim)
    if head_dim in (32, 64) and (num_kv_heads == 8 or tokens % 128 == 0) and tokens > 1:
        assert wasted == 1
    assert wasted < 2 or (head_dim <= 64 and (num_kv_heads == 1 or tokens == 1))


def test_pages_divide_the_chunks_that_layers_attend_within() -> None:
    first, *others = BUNDLED.layers
    arch = replace(BUNDLED, layers=(replace(first, chunk=96), *others))
    assert choose_pages(EngineConfig(), arch, "gpu", 1)[0] == 32
    assert choose_pages(EngineConfig(), arch, "cpu", 1)[0] == 16
    check_flags(EngineConfig(page_size=48), arch)
    with pytest.raises(ConfigError, match=r"--page-size is 64, but layers of .* within chunks of 96 tokens"):
        check_flags(EngineConfig(page_size=64), arch)


def test_devices_that_share_heads_of_64_keep_pairs_of_their_own() -> None:
    arch = replace(BUNDLED, num_kv_heads=8, head_dim=64)
    states = {tp: choose_states(EngineConfig(), arch, "tpu", BFLOAT16, tp) for tp in (1, 4, 8)}
    shapes = {tp: each.page_layout.page_shape[2:] for tp, each in states.items()}
    assert shapes == {1: (4, 64, 128), 4: (4, 64, 128), 8: (8, 128, 64)}  # of one head each device keeps long pages


@pytest.mark.parametrize(
    ("head_dim", "on_gpu", "on_tpu"),
    [(64, 64, 128), (80, 128, 128), (96, 128, 128), (128, 128, 128), (160, 256, 256), (192, 256, 256), (256, 256, 256)],
)
def test_pages_keep_heads_as_wide_as_kernels_take_them(head_dim: int, on_gpu: int, on_tpu: int) -> None:
    arch = replace(BUNDLED, head_dim=head_dim)
    of_platform = {name: choose_states(EngineConfig(), arch, name, BFLOAT16) for name in ("cpu", "gpu", "tpu")}
    assert {name: states.page_layout.page_shape[-1] for name, states in of_platform.items()} == {
        "cpu": head_dim, "gpu": on_gpu, "tpu": on_tpu
    }  # fmt: skip
    padded, own = of_platform["gpu"], layer_states(arch, of_platform["gpu"].page_size, BFLOAT16)
    assert padded.page_bytes * head_dim == own.page_bytes * on_gpu
    assert (padded.page_layout.name == own.page_layout.name) == (head_dim == on_gpu)


def test_an_accelerators_pool_takes_the_static_fraction_less_the_weights() -> None:
    device = Accelerator(limit=20 * GIB, used=7 * GIB)
    assert PAGE.page_bytes == 2 * 4 * 8 * 128 * 16 * 2
    assert num_pages(device, mem_fraction_static=0.85) == 10 * GIB // PAGE.page_bytes
    assert num_pages(device, mem_fraction_static=0.85, useful_tokens=32) == 10 * GIB // PAGE.page_bytes


def test_a_pool_on_cpu_is_no_larger_than_all_rows_can_fill() -> None:
    cpu = jax.devices("cpu")[0]
    assert num_pages(cpu, useful_tokens=1000) == 1 + 63
    bounded = num_pages(cpu)
    assert 2 <= bounded <= free_host_bytes() // 2 // PAGE.page_bytes


def test_a_pool_on_cpu_is_the_same_at_the_next_start_with_other_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another pool size no program would be found in the compilation cache."""
    sizes = set()
    for free_gib in (19.9, 20, 20.7, 22.3):
        monkeypatch.setattr("jaxsgl.engine.start.memory.free_host_bytes", lambda free=free_gib: int(free * GIB))
        sizes.add(num_pages(jax.devices("cpu")[0]))
    assert sizes == {4 * GIB // PAGE.page_bytes}


def test_tokens_asked_for_are_rounded_up_to_pages_besides_the_dummy_page() -> None:
    device = Accelerator(limit=GIB, used=0)
    assert num_pages(device, max_total_tokens=160) == 11
    assert num_pages(device, max_total_tokens=161) == 12


def test_more_tokens_than_fit_are_an_error_that_names_the_free_memory() -> None:
    with pytest.raises(ConfigError, match=r"--max-total-tokens 10000000 needs \d+ MiB, but 870 MiB are free"):
        num_pages(Accelerator(limit=GIB, used=0), max_total_tokens=10_000_000)


@pytest.mark.parametrize("options", [{"max_total_tokens": 1}, {}])
def test_a_pool_that_holds_no_request_is_an_error(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"--max-total-tokens is 1|MiB are the least"):
        num_pages(Accelerator(limit=GIB, used=int(0.84999 * GIB)), **options)


def test_weights_beyond_the_static_fraction_are_an_error() -> None:
    with pytest.raises(ConfigError, match="raise --mem-fraction-static"):
        num_pages(Accelerator(limit=GIB, used=GIB))


def test_a_step_takes_what_the_static_fraction_leaves_and_then_from_the_pool() -> None:
    """So a pool with more than its fraction of memory gets smaller by what the largest step takes."""
    device = Accelerator(limit=20 * GIB, used=7 * GIB)
    assert num_pages(device, step_bytes=2 * GIB) == num_pages(device) == 10 * GIB // PAGE.page_bytes
    left = int(20 * GIB * (1 - HEADROOM)) - 7 * GIB
    for step_gib in (0, 3, 5):
        pages = num_pages(device, mem_fraction_static=0.99, step_bytes=step_gib * GIB)
        assert pages == (left - step_gib * GIB) // PAGE.page_bytes


@pytest.mark.parametrize("options", [{}, {"max_total_tokens": 160}])
def test_a_step_that_leaves_no_room_for_a_pool_is_an_error_that_says_how_to_make_steps_smaller(
    options: dict[str, Any],
) -> None:
    with pytest.raises(ConfigError, match=r"MiB that a step takes.* --chunked-prefill-size or --max-running-requests"):
        num_pages(Accelerator(limit=20 * GIB, used=7 * GIB), step_bytes=13 * GIB, **options)


@pytest.mark.parametrize("options", [{}, {"max_total_tokens": 160}])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_rows_that_leave_no_room_for_a_pool_are_named_in_the_error(platform: str, options: dict[str, Any]) -> None:
    memory = Memory(platform, 10 * GIB, 10 * GIB)
    words = r"0 MiB are free.* beside the 11264 MiB that tables of running requests take and the 1024 MiB that a step "
    with pytest.raises(ConfigError, match=rf"{words}takes.*: lower --max-running-requests") as caught:
        pages_in(memory, rows_bytes=11 * GIB, step_bytes=GIB, **options)
    assert "raise" not in str(caught.value) and "lower it" not in str(caught.value)


def test_buffers_are_zeros_of_the_mesh_one_pair_per_layer() -> None:
    states = LayerStates((attention_state(2, 4, 8, jnp.dtype("float16")),) * 3, page_size=4)
    buffers = allocate_kv(states, 5, mesh_of())
    leaves = jax.tree.leaves(buffers)
    assert len(buffers.k) == len(buffers.v) == 3
    assert {(leaf.shape, leaf.dtype.name) for leaf in leaves} == {((5, 2, 4, 8), "float16")}
    assert all(leaf.sharding.spec[1] == TENSOR_AXIS for leaf in leaves)
    assert sum(leaf.nbytes for leaf in leaves) == 5 * states.page_bytes
    assert not any(leaf.any() for leaf in leaves)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == 6


@pytest.mark.parametrize(
    ("flags", "max_tokens", "max_items"),
    [
        ({}, 32_768, 1024),
        ({"context_length": 5000}, 5000, 1024),
        ({"vision": VisionConfig(media_max_tokens=115_200)}, 100_000, 3600),
        ({"vision": VisionConfig(media_max_tokens=2000)}, 2000, 256),
        ({"chunked_prefill_size": -1, "vision": VisionConfig(mm_pool_tokens=8192)}, 8192, 1024),
    ],
)
def test_pictures_of_a_request_may_fill_its_context_within_the_flag(
    flags: dict[str, Any], max_tokens: int, max_items: int
) -> None:
    """And within the pool of embeddings, if a step extends the whole prompt."""
    config, arch = EngineConfig(**flags), replace(BUNDLED, tower=TOWER, max_context=100_000)
    limits = media_limits(config, arch, tower_capacity(config, arch, "cpu"))
    assert limits is not None
    assert (limits.max_request_patches, limits.max_items) == (4 * max_tokens, max_items)


@pytest.mark.parametrize(
    ("max_itl_ms", "num_devices", "shares", "is_told"),
    [(30, 2, True, True), (30, 2, False, False), (30, 1, True, False), (None, 2, True, False)],
)
def test_sharing_images_says_that_it_breaks_the_bound_on_the_time_between_tokens(
    max_itl_ms: float | None, num_devices: int, shares: bool, is_told: bool
) -> None:
    scheduling = SchedulingConfig(max_itl_ms=max_itl_ms)
    config = EngineConfig(tp=num_devices, vision=VisionConfig(mm_enable_dp_encoder=shares), scheduling=scheduling)
    warning = slow_images(config, tower_capacity(config, replace(BUNDLED, tower=TOWER), "cpu"))
    assert (warning is not None and warning.startswith("--max-itl-ms 30 doesn't hold")) == is_told
