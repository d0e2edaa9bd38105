"""Processors that cut a picture into tiles, each with tokens of its own, often with words around them."""

from __future__ import annotations

from typing import Any

from jaxsgl.errors import CheckpointError
from jaxsgl.preprocess.processors.files import HALF, ProcessorFiles, normalized
from jaxsgl.preprocess.settings import BILINEAR, LANCZOS, ProcessorSettings, TileWords

_IDEFICS3_LONGEST = 4096  # pixels, from which on its processor rounds once more
_FAKE = "<fake_token_around_image>"
_IDEFICS3_WORDS = TileWords(_FAKE + "<row_{row}_col_{column}>", "\n", "\n", f"{_FAKE}<global-img>", _FAKE)
_AYA_WORDS = TileWords(
    "TILE_{number}", "", "", "TILE_GLOBAL", "<|END_OF_IMG|>", start="<|START_OF_IMG|>", placeholder="<image>"
)
_LFM2_VL_WORDS = TileWords(
    "<|img_row_{row}_col_{column}|>", "", "<|img_thumbnail|>", "", "<|image_end|>", start="<|image_start|>"
)


def read_internvl(files: ProcessorFiles) -> ProcessorSettings:
    """Pictures in tiles of one size, and frames like one tile, whose placeholders are those of pictures.

    Sizes and normalization of frames are those of pictures, on which the model was trained: folders were published with
    384 pixels for frames, which transformers' model can't take.
    """
    side, patch_size = (_side(files.tower.get(key, usual)) for key, usual in (("image_size", 448), ("patch_size", 14)))
    files.check_image({"size": {"height": side, "width": side}, "do_center_crop": False})
    ids = files.added_tokens()
    with files.understood():
        pixels = normalized(files.image, side**2, side**2)
        return ProcessorSettings(
            patch_size=patch_size,
            merge_size=2,
            image=pixels,
            video=pixels,
            image_token_id=files.config.get("image_token_id", 151_667),
            video_token_id=ids.get("<video>", -1),
            vision_start_token_id=ids["<img>"],
            vision_end_token_id=ids["</img>"],
            num_frames=int(files.video.get("num_frames") or 8),  # as in what is published about the models
            sampling="middles",
            fixed_side=side,
            tiles=_tiles_of(files.image),
            written="image",
            times="numbers",
            frame_token_id=files.config.get("image_token_id", 151_667),
        )


def read_idefics3(files: ProcessorFiles) -> ProcessorSettings:
    """Pictures alone, in tiles whose places are told in words."""
    patch_size, merge_size = files.tower.get("patch_size", 32), files.config.get("scale_factor", 2)
    files.check_image({"do_image_splitting": True, "do_pad": True, "resample": LANCZOS})
    side = files.tower.get("image_size", 224)
    files.check_both({"image_seq_len": (side // patch_size // merge_size) ** 2})
    with files.understood():
        told = (
            files.image.get(key) or {"longest_edge": usual} for key, usual in (("size", 1456), ("max_image_size", 364))
        )
        longest, tile = (int(each["longest_edge"]) for each in told)
        if tile != side or longest > _IDEFICS3_LONGEST:
            raise CheckpointError(
                f"{files.folder}: max_image_size is {tile} and size {longest}, but supported are {side}, the tower's "
                f"own, and up to {_IDEFICS3_LONGEST}"
            )
        pixels = normalized(files.image, side**2, side**2, HALF, HALF)
        return ProcessorSettings(
            patch_size=patch_size,
            merge_size=merge_size,
            image=pixels,
            video=pixels,
            image_token_id=files.config.get("image_token_id", 128_257),
            fixed_side=side,
            tiles_longest=longest,
            tile_words=_IDEFICS3_WORDS,
            resample=LANCZOS,
        )


def read_aya_vision(files: ProcessorFiles) -> ProcessorSettings:
    """Pictures alone, in tiles as InternVL's, whose numbers are told in words."""
    side, patch_size = files.tower.get("image_size", 224), files.tower.get("patch_size", 16)
    merge_size = files.config.get("downsample_factor", 2)
    files.check_image({"size": {"height": side, "width": side}, "do_center_crop": False})
    words = {"image_token": "<image>", "tile_token": "TILE", "tile_global_token": "TILE_GLOBAL"}
    files.check_both({"img_size": side, "patch_size": patch_size, "downsample_factor": merge_size, **words})
    with files.understood():
        pixels = normalized(files.image, side**2, side**2)
        return ProcessorSettings(
            patch_size=patch_size,
            merge_size=merge_size,
            image=pixels,
            video=pixels,
            image_token_id=files.image_token_id(255_036),
            fixed_side=side,
            tiles=_tiles_of(files.image),
            tile_words=_AYA_WORDS,
        )


def read_cohere2_vision(files: ProcessorFiles) -> ProcessorSettings:
    """Pictures alone, in tiles of which a token ends each."""
    side, patch_size = files.tower.get("image_size", 512), files.tower.get("patch_size", 16)
    merge_size = files.config.get("downsample_factor", 2)
    needed = {"size": {"height": side, "width": side}, "crop_to_patches": True}
    files.check_image({**needed, "patch_size": side // patch_size // merge_size})
    told = files.tokenizer()
    with files.understood():
        start = _text_of(told.get("boi_token")) or "<|START_OF_IMG|>"
        end = _text_of(told.get("eoi_token")) or "<|END_OF_IMG|>"
        after = _text_of(told.get("img_line_break_token")) or "<|IMG_LINE_BREAK|>"
        words = TileWords("", "", "", "", end, start, _text_of(told.get("image_token")), after)
        pixels = normalized(files.image, side**2, side**2)
        return ProcessorSettings(
            patch_size=patch_size,
            merge_size=merge_size,
            image=pixels,
            video=pixels,
            image_token_id=files.config.get("image_token_id", 255_036),
            fixed_side=side,
            tiles=_tiles_of(files.image),
            tiles_fit=True,
            tile_words=words,
        )


def read_lfm2_vl(files: ProcessorFiles) -> ProcessorSettings:
    """Pictures alone, of any size; large ones are cut into tiles, whose places are told in words."""
    image = files.image
    patch_size, merge_size = files.tower.get("patch_size", 16), files.config.get("downsample_factor", 2)
    files.check_image(
        {
            "downsample_factor": merge_size,
            "encoder_patch_size": patch_size,
            "max_pixels_tolerance": 2.0,
            "resample": BILINEAR,
            "use_thumbnail": True,
            "do_image_splitting": True,
        }
    )
    with files.understood():
        square = (patch_size * merge_size) ** 2
        least, most = (int(image.get(f"{of}_image_tokens") or usual) for of, usual in (("min", 64), ("max", 256)))
        pixels = normalized(image, least * square, most * square, HALF, HALF)
        return ProcessorSettings(
            patch_size=patch_size,
            merge_size=merge_size,
            image=pixels,
            video=pixels,
            image_token_id=files.config.get("image_token_id", 396),
            tiles=(int(image.get("min_tiles") or 2), int(image.get("max_tiles") or 10)),
            tile_side=int(image.get("tile_size") or 512),
            tile_words=_LFM2_VL_WORDS,
            resample=BILINEAR,
        )


def _tiles_of(image: dict[str, Any]) -> tuple[int, int]:
    """The least and the most tiles of a picture."""
    return int(image.get("min_patches") or 1), int(image.get("max_patches") or 12)


def _side(told: Any) -> Any:
    """A number of pixels, which may be told for both sides."""
    return told[0] if isinstance(told, list) and len(told) == 2 and told[0] == told[1] else told


def _text_of(token: Any) -> str | None:
    """A special token's text, which may be told with its properties; None if nothing is told."""
    told = token.get("content") if isinstance(token, dict) else token
    return str(told) if told else None
