"""Pictures become the patches that transformers' processor makes of them, bit by bit."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageOps
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
    GotOcr2ImageProcessorPil,
    get_optimal_tiled_canvas,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

from jaxsgl.errors import InvalidRequest
from jaxsgl.preprocess.loading import Bounds, load, sampled_frames
from jaxsgl.preprocess.patches import view_sizes
from jaxsgl.preprocess.pictures import open_picture
from jaxsgl.preprocess.placeholders import Part
from jaxsgl.preprocess.settings import PixelSettings, ProcessorSettings
from jaxsgl.preprocess.sources import ImageFile, VideoFile
from tests.grids import daily
from tests.preprocess.pictures import (
    CROPPED,
    FILLED,
    IN_LINES,
    JOINED,
    LIFTED,
    OLDER,
    PIXELS,
    SETTINGS,
    SHRUNK,
    SMALL,
    SQUARE,
    STEPPED,
    TILED,
    TOLD_TILES,
    UNMERGED,
    file_of,
    picture,
)

pytestmark = pytest.mark.device  # imports torch, by transformers

BOUNDS = Bounds(max_patches=65536, max_request_patches=1 << 20)
ORIENTATION = 0x0112


def part_of(file: bytes | Image.Image, settings: ProcessorSettings = SETTINGS, bounds: Bounds = BOUNDS) -> Part:
    (visual,) = load([ImageFile(file)], settings, bounds)
    (part,) = visual.parts
    assert not visual.is_video and part.time_s is None
    return part


@cache
def oracle(settings: ProcessorSettings) -> Qwen2VLImageProcessorPil:
    limits = settings.image
    return Qwen2VLImageProcessorPil(
        size={"shortest_edge": limits.min_pixels, "longest_edge": limits.max_pixels},
        patch_size=settings.patch_size, merge_size=settings.merge_size,
        temporal_patch_size=settings.temporal_patch_size, image_mean=limits.mean, image_std=limits.std,
    )  # fmt: skip


def normalized(part: Part, settings: ProcessorSettings) -> npt.NDArray[np.float32]:
    """What the engine computes of an item's pixels, as the processor does it: by channel, from a table of 256."""
    pixels = np.frombuffer(part.pixels, np.uint8).reshape(part.num_patches, 3, -1)
    table = (np.arange(256, dtype=np.uint8).astype(np.float64) * (1 / 255)).astype(np.float32)
    values = table[pixels].transpose(0, 2, 1)
    mean, std = np.array(settings.image.mean, np.float32), np.array(settings.image.std, np.float32)
    return ((values - mean) / std).transpose(0, 2, 1).reshape(part.num_patches, -1)


def check(part: Part, given: Image.Image, settings: ProcessorSettings = SETTINGS) -> None:
    """`given` is what a user would hand to the processor: upright."""
    expected = oracle(settings)(images=[given], return_tensors="np")
    assert [list(part.grid)] == expected["image_grid_thw"].tolist()
    np.testing.assert_array_equal(normalized(part, settings), expected["pixel_values"])


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "RGBA", "LA", "CMYK", "YCbCr"])
def test_every_mode_gives_the_processors_patches(mode: str) -> None:
    given = picture(300, 217, mode)
    check(part_of(given), given)


@pytest.mark.parametrize(
    ("width", "height"),
    daily(
        [(1, 1), (417, 300), (1, 200), (200, 1), (31, 33), (2000, 10), (17, 900), (640, 480), (64, 64), (1921, 1079)],
        every=1,
    ),
)
def test_every_size_gives_the_processors_patches(width: int, height: int) -> None:
    given = picture(width, height)
    check(part_of(given, SMALL), given, SMALL)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (417, 300), (2000, 10), (640, 480)])
def test_patches_of_qwen2_vl_are_its_processors(width: int, height: int) -> None:
    given = picture(width, height)
    check(part_of(given, OLDER), given, OLDER)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (27, 400), (417, 300), (2000, 10), (2600, 2000)])
def test_patches_of_glm_4v_are_its_processors(width: int, height: int) -> None:
    """Pixels of a picture count twice, as those of two frames: the last one has too many."""
    given, limits = picture(width, height), STEPPED.image
    size = {"shortest_edge": limits.min_pixels, "longest_edge": limits.max_pixels}
    expected = Glm4vImageProcessorPil(size=size)(images=[given], return_tensors="np")
    part = part_of(given, STEPPED)
    assert [list(part.grid)] == expected["image_grid_thw"].tolist()
    np.testing.assert_array_equal(normalized(part, STEPPED), expected["pixel_values"])


@pytest.mark.parametrize(
    ("width", "height"), [(1, 1), (27, 400), (400, 27), (417, 300), (2000, 11), (4, 700), (2600, 2000)]
)
def test_patches_of_paddleocr_vl_are_its_processors(width: int, height: int) -> None:
    """A side shorter than a token's is scaled to that first."""
    given = picture(width, height)
    expected = PaddleOCRVLImageProcessorPil()(images=[given], return_tensors="np")
    part = part_of(given, LIFTED)
    assert [list(part.grid)] == expected["image_grid_thw"].tolist()
    rows, columns = part.grid[1:]
    squares = expected["pixel_values"].reshape(rows // 2, 2, columns // 2, 2, -1).transpose(0, 2, 1, 3, 4)
    np.testing.assert_array_equal(normalized(part, LIFTED), squares.reshape(part.num_patches, -1))


@pytest.mark.parametrize(
    ("width", "height"), [(1, 1), (28, 29), (417, 300), (2000, 10), (1540, 1541), (3000, 2000), (1541, 1539)]
)
@pytest.mark.parametrize("settings", [IN_LINES, UNMERGED], ids=["Mistral 3", "Pixtral 12B"])
def test_patches_of_mistral_3_are_its_processors(width: int, height: int, settings: ProcessorSettings) -> None:
    given = picture(width, height)
    pixels, longest, patch, merge = settings.image, settings.longest_side, settings.patch_size, settings.merge_size
    processor = PixtralImageProcessorPil(
        size={"longest_edge": longest}, patch_size=settings.unit, image_mean=pixels.mean, image_std=pixels.std
    )
    expected = processor(images=[given], return_tensors="np")
    part = part_of(given, settings)
    assert [patch * side for side in part.grid[1:]] == expected["image_sizes"][0].tolist()
    h, w = (side // merge for side in part.grid[1:])
    squares = expected["pixel_values"][0].reshape(3, h, merge, patch, w, merge, patch).transpose(1, 4, 2, 5, 0, 3, 6)
    np.testing.assert_array_equal(normalized(part, settings), squares.reshape(part.num_patches, -1))


@pytest.mark.parametrize(
    ("width", "height"), [(1, 1), (336, 336), (417, 300), (300, 418), (20, 2000), (2000, 11), (335, 337), (1921, 1079)]
)
def test_patches_of_llava_are_its_processors(width: int, height: int) -> None:
    """The middle of the longer side."""
    given, side = picture(width, height), {"height": 336, "width": 336}
    processor = CLIPImageProcessorPil(size={"shortest_edge": 336}, crop_size=side)
    (expected,) = processor(images=[given], return_tensors="np")["pixel_values"]
    part = part_of(given, CROPPED)
    assert part.grid == (1, 24, 24)
    squares = expected.reshape(3, 24, 14, 24, 14).transpose(1, 3, 0, 2, 4)
    np.testing.assert_array_equal(normalized(part, CROPPED), squares.reshape(576, -1))


@pytest.mark.parametrize(("width", "height"), [(1, 1), (896, 896), (417, 300), (200, 2000), (1921, 1079)])
def test_patches_of_gemma_3_are_its_processors(width: int, height: int) -> None:
    given = picture(width, height)
    pixels, side = SQUARE.image, {"height": 896, "width": 896}
    processor = Gemma3ImageProcessorPil(size=side, resample=2, image_mean=pixels.mean, image_std=pixels.std)
    (expected,) = processor(images=[given], return_tensors="np")["pixel_values"]
    part = part_of(given, SQUARE)
    assert part.grid == (1, 64, 64)
    squares = expected.reshape(3, 16, 4, 14, 16, 4, 14).transpose(1, 4, 2, 5, 0, 3, 6)
    np.testing.assert_array_equal(normalized(part, SQUARE), squares.reshape(part.num_patches, -1))


@pytest.mark.parametrize(
    ("width", "height"), [(3, 2), (48, 48), (417, 300), (200, 2000), (2, 300), (399, 2), (1921, 1079), (1680, 3840)]
)
def test_patches_of_gemma_4_are_its_processors(width: int, height: int) -> None:
    given = picture(width, height)
    cut = Gemma4ImageProcessorPil()(images=[given], return_tensors="np")
    part = part_of(given, FILLED)
    count, (columns, rows) = part.num_patches, cut["image_position_ids"][0].max(axis=0) + 1
    assert part.grid == (1, rows, columns) and count == 9 * cut["num_soft_tokens_per_image"][0] > 630
    squares = cut["pixel_values"][0][:count].reshape(rows // 3, 3, columns // 3, 3, 256, 3).transpose(0, 2, 1, 3, 5, 4)
    ours = normalized(part, FILLED)  # by what the tower does to the processor's pixels
    np.testing.assert_array_equal(ours, 2 * (squares.reshape(count, -1) - np.float32(0.5)))


def test_frames_of_gemma_4_fill_fewer_tokens() -> None:
    clip = VideoFile(tuple(file_of(picture(640, 480, seed=i)) for i in range(3)), 1.0)
    (visual,) = load([clip], FILLED, BOUNDS)
    assert [(part.grid, part.time_s) for part in visual.parts] == [((1, 21, 27), float(second)) for second in range(3)]


@pytest.mark.parametrize("count", [1, 31, 32, 33, 1001])
def test_frames_of_gemma_4_are_those_of_transformers(count: int) -> None:
    metadata = VideoMetadata(total_num_frames=count, fps=25.0)
    expected = default_sample_indices_fn(metadata, num_frames=min(count, 32))
    assert sampled_frames(count, 25.0, FILLED) == expected.tolist()


@pytest.mark.parametrize(
    ("width", "height", "count"),
    [(1, 1, 1), (448, 448, 1), (300, 217, 12 + 1), (2000, 200, 10 + 1), (60, 121, 2 + 1), (100, 51, 2 + 1)],
)
def test_tiles_of_internvl_are_its_processors(width: int, height: int, count: int) -> None:
    """Those of the picture line by line, and the whole picture after several."""
    given, pixels = picture(width, height), TILED.image
    processor = GotOcr2ImageProcessorPil(
        size={"height": 448, "width": 448}, image_mean=pixels.mean, image_std=pixels.std, crop_to_patches=True
    )
    expected = processor(images=[given], return_tensors="np")["pixel_values"]
    (visual,) = load([ImageFile(file_of(given))], TILED, BOUNDS)
    assert len(visual.parts) == len(expected) == count and not visual.has_words
    for part, tile in zip(visual.parts, expected, strict=True):
        assert part.grid == (1, 32, 32)
        squares = tile.reshape(3, 16, 2, 14, 16, 2, 14).transpose(1, 4, 2, 5, 0, 3, 6)
        np.testing.assert_array_equal(normalized(part, TILED), squares.reshape(part.num_patches, -1))


ONEVISION = LlavaOnevisionImageProcessorPil(image_mean=[0.5] * 3, image_std=[0.5] * 3)
SHAPES = [(1, 1), (336, 336), (300, 217), (2000, 200), (60, 331), (1920, 1080), (403, 1207)]


@pytest.mark.parametrize(("width", "height"), SHAPES)
def test_joined_tiles_of_llava_next_are_its_processors(width: int, height: int) -> None:
    cut = LlavaNextImageProcessorPil(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336})(
        images=[picture(width, height)], return_tensors="np"
    )
    writer = object.__new__(LlavaNextProcessor)
    writer.image_processor, writer.image_token, writer.patch_size = resolutions_of(JOINED), "i", 14
    writer.num_additional_image_tokens, writer.vision_feature_select_strategy = 1, "default"
    part = part_of(picture(width, height), JOINED)
    check_joined(part, JOINED, cut["pixel_values"][0], len(writer.replace_image_token(cut, 0)))


@pytest.mark.parametrize(("width", "height"), daily(SHAPES, every=2))
def test_joined_tiles_of_llava_onevision_are_its_processors(width: int, height: int) -> None:
    """Of which 6 pixels are left out."""
    cut = ONEVISION(images=[picture(width, height)], return_tensors="np")
    part = part_of(picture(width, height), SHRUNK)
    check_joined(part, SHRUNK, cut["pixel_values"][0][:, :, :378, :378], onevision_tokens(cut))


def test_of_several_pictures_llava_onevision_sees_each_whole_alone() -> None:
    given = [picture(300, 217), picture(60, 331, seed=1)]
    cut = ONEVISION(images=[given], return_tensors="np")
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    turned = file_of(given[1].transpose(Image.Transpose.ROTATE_90), exif=exif)
    visuals = load([ImageFile(file_of(given[0])), ImageFile(turned)], SHRUNK, BOUNDS)
    for number, visual in enumerate(visuals):
        (part,) = visual.parts
        check_joined(part, SHRUNK, cut["pixel_values"][number][:1, :, :378, :378], onevision_tokens(cut))
    (alone,) = load([ImageFile(file_of(given[0]))], SHRUNK, BOUNDS)
    assert alone.parts[0].num_patches > 729


def resolutions_of(settings: ProcessorSettings) -> SimpleNamespace:
    return SimpleNamespace(image_grid_pinpoints=[list(each) for each in settings.resolutions or ()])


def onevision_tokens(cut: Any) -> int:
    writer = object.__new__(LlavaOnevisionProcessor)
    writer.image_processor = resolutions_of(SHRUNK)
    writer.num_image_tokens, writer.vision_aspect_ratio, writer.image_token = 729, "anyres_max_9", "i"
    writer.vision_feature_select_strategy = "full"
    return len(writer.replace_image_token(cut, 0))


def check_joined(part: Part, settings: ProcessorSettings, tiles: npt.NDArray[np.float32], num_tokens: int) -> None:
    """The tiles are the processor's, and so is the number of tokens."""
    count, side = len(tiles), tiles.shape[-1] // 14
    assert part.grid == (1, count * side, side) and part.tiling is not None
    assert part.tiling.num_tokens(side) == num_tokens
    patches = tiles.reshape(count, 3, side, 14, side, 14).transpose(0, 2, 4, 1, 3, 5).reshape(part.num_patches, -1)
    np.testing.assert_array_equal(normalized(part, settings), patches)


@pytest.mark.parametrize(
    ("width", "height", "columns", "rows"),
    [(1, 1, 1, 1), (512, 513, 1, 2), (700, 700, 2, 2), (1600, 100, 4, 1), (9000, 9000, 3, 3), (4000, 3000, 4, 3)],
)
def test_tiles_of_command_a_vision_scale_a_picture_least(width: int, height: int, columns: int, rows: int) -> None:
    """By an own reading of its processor, which needs torchvision: here Pillow scales."""
    given = picture(width, height) if width < 4000 else Image.new("RGB", (width, height), (90, 30, 7))
    (visual,) = load([ImageFile(given)], replace(TILED, fixed_side=512, patch_size=16, tiles_fit=True), BOUNDS)
    sizes = [(512 * columns, 512 * rows), (512, 512)][: 1 + (columns * rows > 1)]
    views = [given.resize(size, Image.Resampling.BICUBIC) for size in sizes]
    boxes = [(512 * (i % columns), 512 * (i // columns)) for i in range(columns * rows)]
    tiles = [views[0].crop((x, y, x + 512, y + 512)) for x, y in boxes] + views[1:]
    assert len(visual.parts) == len(tiles)
    for part, tile in zip(visual.parts, tiles, strict=True):
        squares = np.asarray(tile).reshape(16, 2, 16, 16, 2, 16, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        assert part.pixels == squares.tobytes()


BY_SIZE = replace(TOLD_TILES, fixed_side=None, tiles_longest=None, patch_size=16, merge_size=2, tiles=(2, 10),
                  tile_side=512, image=PixelSettings(65_536, 262_144, PIXELS.mean, PIXELS.std), resample=2)  # fmt: skip


@pytest.mark.parametrize(
    ("width", "height", "columns", "rows", "whole"),
    [
        (512, 512, 0, 0, (512, 512)),
        (10, 10, 0, 0, (256, 256)),
        (3000, 20, 0, 0, (3008, 32)),
        (700, 700, 0, 0, (512, 512)),  # not more than twice as many pixels as one may have
        (800, 700, 2, 2, (544, 448)),
        (1600, 900, 4, 2, (672, 384)),
        (900, 2600, 1, 3, (288, 864)),
    ],
)
def test_tiles_of_lfm2_vl_follow_from_the_size(
    width: int, height: int, columns: int, rows: int, whole: tuple[int, int]
) -> None:
    """By an own reading of its processor, which needs torchvision: here Pillow scales."""
    given = picture(width, height)
    (visual,) = load([ImageFile(given)], BY_SIZE, BOUNDS)
    way = Image.Resampling.BILINEAR
    large = given.resize((512 * columns, 512 * rows), way) if columns else given
    boxes = [(512 * (i % columns), 512 * (i // columns)) for i in range(columns * rows)]
    seen = [*(large.crop((x, y, x + 512, y + 512)) for x, y in boxes), given.resize(whole, way)]
    assert len(visual.parts) == len(seen) and visual.columns == (columns or max(whole[0] // 512, 1))
    for part, view in zip(visual.parts, seen, strict=True):
        w, h = view.size
        squares = np.asarray(view).reshape(h // 32, 2, 16, w // 32, 2, 16, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        assert part.grid == (1, h // 16, w // 16) and part.pixels == squares.tobytes()


def test_joined_tiles_are_fewer_where_a_picture_may_have_fewer_patches() -> None:
    few = replace(BOUNDS, max_picture_patches=3 * 24**2)
    part = part_of(picture(1920, 1080), JOINED, few)
    assert part.grid == (1, 3 * 24, 24) and part.tiling is not None and part.tiling.columns == 2
    for given in (picture(1000, 600), picture(600, 1000)):  # the least one, if none is small enough
        assert part_of(given, JOINED, replace(BOUNDS, max_picture_patches=24**2)).num_patches == 3 * 24**2


@pytest.mark.parametrize(
    ("width", "height", "longest"),
    [
        (1, 1, 1536),
        (384, 384, 384),
        (300, 217, 1536),
        (700, 200, 1152),
        (20, 3000, 1536),
        (1921, 1079, 1100),
        (9, 8, 1000),
    ],
)
def test_tiles_of_smolvlm_are_its_processors(width: int, height: int, longest: int) -> None:
    """Scaled twice before they are cut, and what is whole a third time."""
    given, settings = picture(width, height), replace(TOLD_TILES, tiles_longest=longest)
    processor = Idefics3ImageProcessorPil(size={"longest_edge": longest}, max_image_size={"longest_edge": 384})
    expected = processor(images=[given], return_tensors="np", return_row_col_info=True)
    (visual,) = load([ImageFile(file_of(given))], settings, BOUNDS)
    (tiles,), ((rows,), (columns,)) = expected["pixel_values"], (expected["rows"][0], expected["cols"][0])
    assert len(visual.parts) == len(tiles) == rows * columns + 1 and visual.columns == max(columns, 1)
    for part, tile in zip(visual.parts, tiles, strict=True):
        assert part.grid == (1, 27, 27)
        squares = tile[:, :378, :378].reshape(3, 9, 3, 14, 9, 3, 14).transpose(1, 4, 2, 5, 0, 3, 6)
        np.testing.assert_array_equal(normalized(part, settings), squares.reshape(part.num_patches, -1))


def test_sizes_of_tiles_of_smolvlm_are_its_processors() -> None:
    rng, processor = np.random.default_rng(0), Idefics3ImageProcessorPil()
    images = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}
    settings = replace(TOLD_TILES, fixed_side=512, tiles_longest=2048)
    for height, width in rng.integers(20, 3000, (400, 2)).tolist():
        count, rows, columns = processor.get_number_of_image_patches(height, width, images)
        (high, wide), *_ = view_sizes(height, width, settings, 1)[1:]
        assert (high // 512, wide // 512, high // 512 * (wide // 512) + 1) == (rows, columns, count)


def test_tilings_of_internvl_are_its_processors() -> None:
    rng = np.random.default_rng(0)
    for tiles in ((1, 12), (2, 6), (1, 1)):
        settings = replace(TILED, tiles=tiles)
        for height, width in [(448, 448), (633, 633), (634, 634), *rng.integers(20, 3000, (400, 2)).tolist()]:
            columns, rows = get_optimal_tiled_canvas((height, width), (448, 448), *tiles)
            sizes = view_sizes(height, width, settings, 1 << 30)
            assert sizes == [(448 * rows, 448 * columns), (448, 448)][: 1 + (rows * columns > 1)]


@pytest.mark.parametrize(("max_patches", "most"), [(1024, 1), (2048, 1), (3 * 1024, 2), (6 * 1024, 5), (14 * 1024, 12)])
def test_a_picture_has_as_many_tiles_as_the_tower_may_see_patches_of_it(max_patches: int, most: int) -> None:
    """The whole one included."""
    for height, width in ((217, 300), (1000, 310)):
        columns, rows = get_optimal_tiled_canvas((height, width), (448, 448), 1, most)
        (visual,) = load([ImageFile(picture(width, height))], TILED, replace(BOUNDS, max_picture_patches=max_patches))
        assert len(visual.parts) == columns * rows + (columns * rows > 1) <= max_patches // 1024


def test_a_turned_picture_has_the_tiles_of_the_upright_one() -> None:
    given, exif = picture(80, 31), Image.Exif()
    exif[ORIENTATION] = 6
    file = file_of(given, "PNG", exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(file)))
    (turned,), (expected,) = (load([ImageFile(each)], TILED, BOUNDS) for each in (file, file_of(upright)))
    assert turned == expected and len(turned.parts) > 1


def test_a_picture_of_mistral_3_that_is_too_large_for_the_tower_is_scaled_down() -> None:
    part = part_of(picture(640, 480), IN_LINES, Bounds(64, 1 << 20))
    assert part.grid == (1, 6, 8)


def test_a_picture_may_have_as_many_pixels_as_its_limit_says() -> None:
    """Pillow's own limit is 178,956,970."""
    header = bytearray(file_of(Image.new("1", (8, 8))))
    header[16:24] = struct.pack(">II", 1 << 14, 1 << 14)
    header[29:33] = struct.pack(">I", zlib.crc32(bytes(header[12:29])))
    assert open_picture(bytes(header), 1 << 28, "image 0").size == (1 << 14, 1 << 14)
    with pytest.raises(InvalidRequest, match=r"16384 x 16384 = 268435456 pixels, but may have 268435455"):
        open_picture(bytes(header), (1 << 28) - 1, "image 0")


def test_pictures_larger_than_the_limit_are_scaled_down() -> None:
    given = picture(640, 480)
    part = part_of(given, SMALL, Bounds(64, 1 << 20))
    assert part.num_patches <= 64
    assert 64 < part_of(given, SMALL).num_patches <= 4096 // 16


def test_files_give_the_patches_of_their_pictures() -> None:
    for kind, mode in (("PNG", "RGBA"), ("PNG", "P"), ("BMP", "RGB"), ("GIF", "P")):
        given = picture(90, 70, mode)
        check(part_of(file_of(given, kind)), given)
    for kind, mode in (("JPEG", "RGB"), ("JPEG", "CMYK"), ("JPEG", "L"), ("WEBP", "RGBA")):
        file = file_of(picture(90, 70, mode), kind)
        part = part_of(file)
        check(part, Image.open(io.BytesIO(file)))


def test_transparent_palettes_are_taken_as_the_processor_takes_them() -> None:
    given = picture(60, 50, "P")
    given.info["transparency"] = 3
    check(part_of(given), given)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_upright_as_exif_says(orientation: int) -> None:
    given = picture(80, 48)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    file = file_of(given, "PNG", exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(file)))
    assert upright is not None and (upright.size == (48, 80)) == (orientation > 4)
    check(part_of(file, SMALL), upright, SMALL)


@pytest.mark.parametrize(("width", "height"), [(1, 201), (4001, 20)])
def test_extreme_ratios_are_refused(width: int, height: int) -> None:
    with pytest.raises(InvalidRequest, match=f"{width} x {height} pixels, but one side may be at most 200 times"):
        part_of(file_of(picture(width, height)))


def test_equal_pictures_have_equal_digests_whatever_their_files() -> None:
    given = picture(60, 50)
    assert part_of(file_of(given)).digest == part_of(file_of(given, "BMP")).digest
    assert part_of(file_of(given)).digest != part_of(file_of(picture(60, 50, seed=1))).digest
