"""The vision tower and the positions of tokens, against transformers."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.batch.patches import EncodeBucket, TowerCapacity, TowerShape, layout_of, pack, token_positions
from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.features import DisaggregationConfig
from jaxsgl.engine.encoding import patches_of_call, placed
from jaxsgl.engine.layer_state import layer_states
from jaxsgl.engine.start.memory import Memory
from jaxsgl.engine.start.sizing import plan_capacity
from jaxsgl.engine.step_programs import all_keys
from jaxsgl.engine.weight_store import read_arch
from jaxsgl.models import Params, abstract_model, arch_from_folder
from jaxsgl.models.towers.attention import Patches, segment_attention
from jaxsgl.requests.media import Grid
from jaxsgl.weights import load_params
from jaxsgl.wiring import norms_digest
from tests.plain_model import mesh_of
from tests.vision_models import (
    APART,
    JOINED_SIZES,
    OF_GEMMA4,
    OF_GLM,
    SECONDS,
    SQUARE,
    WITH_JOINED,
    WITH_LINES,
    image,
    joined_image,
    make_model,
    normalized,
    pictures,
    request,
    types_of,
)

GRIDS: list[Grid] = [(1, 4, 6), (1, 2, 2), (1, 4, 30), (1, 10, 8)]
FLOAT32 = jnp.dtype(jnp.float32)


@pytest.mark.parametrize(
    "kind",
    [
        "aya_vision", "cohere2_vision", "exaone4_5", "gemma3", "gemma4", "gemma4_small", "gemma4_unified", "glm4v",
        "glm4v_moe", "glm_ocr", "idefics3", "internvl", "internvl_moe", "lfm2_vl", "lighton_ocr", "llava", "llava_next",
        "llava_onevision", "mistral", "paddleocr_vl", "pixtral", "qwen2_vl", "qwen2_5_vl", "qwen3_vl",
        "qwen3_vl_moe", "qwen3_5",
    ],
)  # fmt: skip
def test_packed_images_have_the_rows_of_transformers_tower(kind: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, kind)
    arch = arch_from_folder(tmp_path)
    is_packed = kind.startswith(("qwen", "glm", "exaone"))  # by transformers, too
    assert arch.tower is not None and arch.has_axes == kind.startswith(("qwen", "glm", "paddle"))
    params = load_params(tmp_path, arch, FLOAT32, mesh_of())
    graphdef, _ = abstract_model(arch, FLOAT32, FLOAT32)
    merge, positions = arch.tower.merger.side, arch.tower.positioning.learned
    shape = TowerShape(
        merge, arch.tower.positioning.side, arch.tower.patch_len, window=arch.tower.layers.window,
        positions="square" if positions == "none" else positions,
        joined_side=4 if kind in WITH_JOINED else 0,
    )  # fmt: skip
    grids = [(1, 6, 9), (1, 3, 3), (1, 3, 30), (1, 12, 9)] if kind.startswith("gemma4") else GRIDS
    grids = [SQUARE] * 3 if arch.tower.positioning.image_side else grids
    frames = arch.tower.patches.frames
    items = [image(0, grid, seed, kind in WITH_LINES, frames, merge) for seed, grid in enumerate(grids)]
    if kind in WITH_JOINED:
        items = [joined_image(kind, 0, size, seed) for seed, size in enumerate(JOINED_SIZES)]
    count = sum(item.num_patches for item in items)
    with torch.no_grad():
        if not is_packed:
            exact = model.model.get_image_features(**pictures(model, items))
            exact.pooler_output = torch.cat([*exact.pooler_output])
            assert kind not in OF_GEMMA4 or len(exact.pooler_output) == sum(item.length for item in items)
        else:
            exact = model.model.visual(normalized(model, items), torch.tensor(GRIDS))
    if arch.tower.merger.centred:
        exact.pooler_output = exact.pooler_output - exact.pooler_output.mean(-1, keepdim=True)
    taps = exact.deepstack_features if arch.tower.layers.taps else ()
    expected = np.concatenate([exact.pooler_output.numpy(), *(each.numpy() for each in taps)], axis=-1)

    @jax.jit
    def tower(params: Params, patches: Patches, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        visual = nnx.merge(graphdef, params).visual
        assert visual is not None
        return placed(visual, visual(patches), rows)

    for size in (count, 513 if merge == 3 else 512):  # alone, and with padding, in blocks
        capacity = TowerCapacity(shape, 1000, size)
        stops = np.cumsum([item.num_rows for item in items])
        places = [
            np.arange(stop - item.num_rows, stop, dtype=np.int32) for item, stop in zip(items, stops, strict=True)
        ]
        call = pack([list(zip(items, places, strict=True))], EncodeBucket(size), capacity)
        patches = patches_of_call(jnp.asarray(call.pixels[0]), jnp.asarray(call.columns[0]))
        found, rows = tower(params, patches, jnp.asarray(call.rows[0]))
        in_order = np.argsort(rows, stable=True)[: len(expected)]
        assert np.asarray(rows)[in_order].tolist() == list(range(len(expected)))
        np.testing.assert_allclose(np.asarray(found)[in_order], expected, atol=5e-4 if kind == "gemma4_small" else 5e-5)


def test_a_decode_server_has_no_weights_of_the_tower_and_no_program_for_it(tmp_path: Path) -> None:
    make_model(tmp_path)
    whole, programs, norms = parts_of(tmp_path, "prefill")
    decode, of_decode, same_norms = parts_of(tmp_path, "decode")
    assert norms == same_norms, "the two would refuse each other"
    assert any(path.startswith("['visual']") for path in whole) and "encode" in programs
    assert decode == {path for path in whole if not path.startswith("['visual']")}
    assert of_decode == programs - {"encode"}, "it extends images, whose embeddings come from prefill"


def parts_of(folder: Path, mode: str) -> tuple[set[str], set[str], int]:
    """Paths of the parameters of a server's model, the kinds of its programs, and the digest that servers compare."""
    apart = DisaggregationConfig(disaggregation_mode=mode)
    config = EngineConfig(model=str(folder), context_length=128, max_total_tokens=600, disaggregation=apart)
    arch = read_arch(config, folder)
    capacity = plan_capacity(config, arch, layer_states(arch, 16, FLOAT32), Memory("cpu", 1 << 40, 1 << 40))
    assert capacity.tower is not None and capacity.media is not None and capacity.tower.host_bytes > 0
    buckets = BucketSet.derive(capacity)
    assert any(bucket.rope_axes == 3 for bucket in buckets.all())
    params = load_params(folder, arch, FLOAT32, mesh_of())
    paths = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)}
    return paths, {key.kind for key in all_keys(buckets)}, norms_digest(params)


def test_layouts_of_thin_and_least_images() -> None:
    shape = TowerShape(2, 48, 1536)
    places = layout_of((1, 2, 2), shape).columns[:, :2]
    assert places.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    corners = layout_of((1, 4, 30), shape).columns
    taps, weights = corners[:, 2:6], corners[:, 6:10].copy().view(np.float32)
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)
    first, last = 0, len(corners) - 1
    assert taps[first][weights[first].argmax()] == 0 and taps[last][weights[last].argmax()] == 48 * 48 - 1


@pytest.mark.parametrize(
    ("kind", "is_video"),
    [
        (kind, is_video)
        for kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "glm_ocr")
        for is_video in (False, True)
    ]
    + [("qwen3_5", True), ("paddleocr_vl", False)],
)
def test_positions_of_tokens_are_those_of_transformers(kind: str, is_video: bool, tmp_path: Path) -> None:
    model = make_model(tmp_path, kind)
    apart = APART.get(kind) if is_video else None
    as_images = is_video and kind in OF_GLM
    asked = request(
        "a", GRIDS[:1] * 3 if is_video else GRIDS, 5, is_video=is_video and not as_images, apart=apart,
        as_images=as_images,
    )  # fmt: skip
    ids = torch.tensor([asked.prompt_ids])
    grids = torch.tensor([(3, *GRIDS[0][1:])] if is_video else GRIDS)
    types = types_of(ids)
    name = "video_grid_thw" if is_video else "image_grid_thw"
    times = {"second_per_grid_ts": [SECONDS]} if kind == "qwen2_5_vl" else {}
    exact, delta = model.model.get_rope_index(ids, types, **{name: grids}, **times)
    positions, ours = token_positions(len(asked.prompt_ids), asked.media)
    assert positions.tolist() == exact[:, 0].tolist()
    assert ours == int(delta)


def test_patches_of_a_window_follow_each_other() -> None:
    """A window has 2 x 2 tokens of 2 x 2 patches, and less at the right and lower edges."""
    layout = layout_of((1, 6, 10), TowerShape(2, 0, 96, window=2))
    assert layout.order.tolist() == [0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10, 11, 12, 13, 14]
    windows = layout.columns[:, -1]
    assert windows.tolist() == np.repeat(np.arange(6), np.multiply(4, (4, 4, 2, 2, 2, 1))).tolist()
    assert layout.num_windows == 6
    assert layout.columns[:8, :2].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    assert layout.columns[8:10, :2].tolist() == [[2, 0], [2, 1]]


@pytest.mark.parametrize("most", [None, 7, 64, 600])
def test_attention_near_a_block_of_queries_is_attention_among_all(most: int | None) -> None:
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < 1024:
        lengths.append(int(rng.integers(1, (most or 64) + 1)))
    segments = jnp.asarray(np.repeat(np.arange(len(lengths)), lengths)[:1024].astype(np.int32))
    q, k, v = (jnp.asarray(rng.standard_normal((1024, 2, 4)).astype(np.float32)) for _ in range(3))
    scores = jnp.where(segments[:, None] == segments, jnp.einsum("qnh,knh->nqk", q, k) / 2, -jnp.inf)
    exact = jnp.einsum("nqk,knh->qnh", jax.nn.softmax(scores, axis=-1), v)
    np.testing.assert_allclose(segment_attention(q, k, v, segments, most), exact, atol=1e-5)


def test_text_goes_on_behind_the_largest_position_of_a_video() -> None:
    """Which is a time, if frames are far apart; a picture that follows begins there."""
    asked = request("a", [(1, 2, 4)] * 3, 5, apart=2.5)
    end, first = len(asked.prompt_ids), asked.media[0].offset
    items = (*asked.media, image(end, (1, 4, 4), 1))
    positions, delta = token_positions(end + 6, items)
    assert positions[0, first : first + 6].tolist() == [first + later for later in (0, 0, 2, 2, 5, 5)]
    assert positions[1, first : first + 6].tolist() == [first] * 6
    assert positions[2, first : first + 6].tolist() == [first, first + 1] * 3
    begin = first + 6 + (end - asked.media[-1].stop)  # 5 + 1 positions, and the text in between
    assert positions[:, end].tolist() == [begin] * 3
    assert positions[:, -2:].tolist() == [[begin + 2, begin + 3]] * 3
    assert delta == begin + 4 - (end + 6)
