"""Frames become temporal patches with times, as transformers' video processor takes and cuts them."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor
from transformers.models.glm4v.video_processing_glm4v import smart_resize as resize_of_glm
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as older_resize
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize

from jaxsgl.errors import InvalidRequest
from jaxsgl.preprocess.loading import Bounds, load, sampled_frames
from jaxsgl.preprocess.patches import frame_size
from jaxsgl.preprocess.placeholders import times_in_words
from jaxsgl.preprocess.sources import VideoFile
from tests.preprocess.pictures import (
    FILLED,
    IN_LINES,
    OLDER,
    SETTINGS,
    SMALL,
    STEPPED,
    TILED,
    animation,
    file_of,
    picture,
)

pytestmark = pytest.mark.device  # imports torch

BOUNDS = Bounds(max_patches=65536, max_request_patches=1 << 20)


def test_frames_have_the_sizes_of_the_video_processor() -> None:
    for frames, height, width in [(2, 240, 320), (4, 7, 90), (5, 480, 640), (9, 100, 31), (64, 1080, 1920), (3, 1, 1)]:
        limits = SETTINGS.video
        expected = smart_resize(frames, height, width, 2, 32, limits.min_pixels, limits.max_pixels)
        assert frame_size(frames, height, width, SETTINGS, 1 << 24) == expected
        shared = max(min(768 * 32 * 32, limits.max_pixels // frames), int(limits.min_pixels * 1.05)) * frames
        expected = smart_resize(frames, height, width, 2, 32, limits.min_pixels, shared)
        assert frame_size(frames, height, width, replace(SETTINGS, caps_frames=True), 1 << 24) == expected


@pytest.mark.parametrize(("total", "fps"), [(100, 25.0), (3, 1.0), (5000, 30.0), (7, 60.0), (48, 24.0)])
def test_frames_are_sampled_as_the_video_processor_does(total: int, fps: float) -> None:
    metadata = SimpleNamespace(total_num_frames=total, fps=fps)
    processor = Qwen3VLVideoProcessor.__new__(Qwen3VLVideoProcessor)
    processor.min_frames, processor.max_frames, processor.fps = 4, 768, 2
    assert sampled_frames(total, fps, SETTINGS) == processor.sample_frames(metadata).tolist()


def processor_of(model: str, name: str) -> Any:
    """transformers' class, whose module asks for torchvision, of which sampling needs nothing; not initialized."""
    names = ("torchvision", *(f"torchvision.transforms{part}" for part in ("", ".v2", ".v2.functional")))
    modules = {name: ModuleType(name) for name in names}
    modules["torchvision.transforms.v2"].functional = modules[names[-1]]  # type: ignore[attr-defined]
    with patch.dict(sys.modules, modules):
        module = importlib.import_module(f"transformers.models.{model}.video_processing_{model}")
    of_class = getattr(module, name)
    return of_class.__new__(of_class)


def clips() -> list[tuple[int, float]]:
    """Frames and frames a second of videos, 30, 300 and 2,400 s long among others."""
    told = [(1, 25.0), (2, 60.0), (3, 1.0), (900, 30.0), (901, 30.0), (7500, 25.0), (7501, 25.0), (60_001, 25.0)]
    rng = np.random.default_rng(3)
    drawn = [(int(10 ** rng.uniform(0, 4)), float(rate)) for rate in rng.uniform(0.3, 70, 40)]
    return [*told, *drawn, *((count, 23.976) for count in rng.integers(1, 3000, 20).tolist())]


@pytest.mark.parametrize("asked_fps", [None, 0.3, 1.0, 7.5, 100.0])
def test_frames_of_glm_4v_are_those_of_its_video_processor(asked_fps: float | None) -> None:
    processor = Glm4vVideoProcessor.__new__(Glm4vVideoProcessor)
    processor.fps, processor.max_duration = 2, 300
    settings = STEPPED if asked_fps is None else replace(STEPPED, video_fps=asked_fps)
    for total, fps in clips():
        metadata = SimpleNamespace(total_num_frames=total, fps=fps, duration=total / fps)
        expected = processor.sample_frames(metadata, fps=asked_fps).tolist()
        assert sampled_frames(total, fps, settings) == expected, (total, fps)


def test_frames_of_glm_46v_follow_from_a_videos_length_as_in_transformers() -> None:
    """But where it would take none: of a sixth of a second or less the first one is taken."""
    processor = processor_of("glm46v", "Glm46VVideoProcessor")
    processor.temporal_patch_size = 2
    settings, lengths = replace(STEPPED, sampling="by length"), set()
    for total, fps in clips():
        metadata = SimpleNamespace(total_num_frames=total, fps=fps, duration=total / fps)
        expected = processor.sample_frames(metadata).tolist()
        assert sampled_frames(total, fps, settings) == (expected or [0, 0]), (total, fps)
        lengths.add(len(expected))
    assert {0, 640} < lengths
    with pytest.raises(InvalidRequest, match="video 0 is a file with fps 2, but the model takes as many frames"):
        load([VideoFile(animation([picture(40, 24, seed=i) for i in range(3)], 200), 2.0)], settings, BOUNDS)


def test_frames_of_internvl_are_those_of_its_video_processor() -> None:
    """Those in the middle of 8 equal parts; of a shorter video, which it refuses, all."""
    processor = processor_of("internvl", "InternVLVideoProcessor")
    processor.initial_shift = True
    for total, fps in clips():
        metadata = SimpleNamespace(total_num_frames=total, fps=fps)
        expected = processor.sample_frames(metadata, num_frames=8).tolist() if total >= 8 else [*range(total)]
        assert sampled_frames(total, fps, TILED) == expected, (total, fps)


def test_frames_of_internvl_are_single_tiles_by_their_numbers() -> None:
    (video,) = load([VideoFile(tuple(file_of(picture(60, 20, seed=i)) for i in range(3)))], TILED, BOUNDS)
    assert [part.grid for part in video.parts] == [(1, 32, 32)] * 3 and video.has_words
    words = [before for before, after in times_in_words(video, "numbers")]
    assert words == ["Frame1: ", "\nFrame2: ", "\nFrame3: "]


def test_frames_of_glm_4v_have_the_sizes_of_its_video_processor() -> None:
    for frames, height, width in [(2, 240, 320), (4, 7, 90), (5, 480, 640), (9, 100, 31), (640, 1080, 1920), (3, 1, 1)]:
        limits = STEPPED.video
        expected = resize_of_glm(frames, height, width, 2, 28, limits.min_pixels, limits.max_pixels)
        assert frame_size(frames, height, width, STEPPED, 1 << 24) == expected


def test_a_temporal_patch_of_glm_4v_has_the_time_of_its_first_frame() -> None:
    frames = [picture(60, 60, seed=i) for i in range(12)]
    (video,) = load([VideoFile(animation(frames, 250, "PNG"))], STEPPED, BOUNDS)  # 3 s, of which 6 frames are taken
    assert [part.time_s for part in video.parts] == [0.0, 1.0, 2.0]
    (listed,) = load([VideoFile(tuple(map(file_of, frames[:3])), fps=4.0)], STEPPED, BOUNDS)
    assert [part.time_s for part in listed.parts] == [0.0, 0.5]


def test_frames_of_qwen2_vl_have_the_sizes_of_its_video_processor() -> None:
    """Limits are those of a frame, and of its share of all tokens."""
    for frames, height, width in [(2, 240, 320), (4, 7, 90), (9, 100, 31), (64, 1080, 1920), (768, 1080, 1920)]:
        limits, cap = OLDER.video, int(128_000 * 28 * 28 * 0.9) * 2 // frames
        most = max(min(limits.max_pixels, cap), int(limits.min_pixels * 1.05))
        expected = older_resize(height, width, 28, limits.min_pixels, most)
        assert frame_size(frames, height, width, OLDER, 1 << 24) == expected
        expected = older_resize(height, width, 28, limits.min_pixels, limits.max_pixels)
        assert frame_size(frames, height, width, replace(OLDER, caps_frames=False), 1 << 24) == expected


@pytest.mark.parametrize(
    ("total", "fps", "count"), [(100, 25.0, 8), (3, 1.0, 2), (5000, 30.0, 332), (7, 60.0, 4), (1, 1.0, 1)]
)
def test_frames_of_qwen2_vl_are_taken_in_whole_temporal_patches(total: int, fps: float, count: int) -> None:
    """As Qwen's own tools take them: an even number, spread evenly."""
    taken = sampled_frames(total, fps, OLDER)
    assert len(taken) == count and taken[0] == 0 and (taken[-1] == total - 1 or count == 1)


@pytest.mark.parametrize("kind", ["frames", "animation"])
def test_temporal_patches_of_qwen2_5_vl_stand_at_positions_of_their_times(kind: str) -> None:
    settings = replace(SMALL, by_frame=True, positions_per_s=3.0, max_frames=8)
    frames = [picture(40, 24, seed=i) for i in range(24)]
    if kind == "frames":
        (video,) = load([VideoFile(tuple(map(file_of, frames[:7])), fps=4.0)], settings, BOUNDS)
        apart = 3.0 * 2 / 4.0
    else:  # 24 frames of 1/5 s, of which 8 are taken
        (video,) = load([VideoFile(animation(frames, 200))], settings, BOUNDS)
        apart = 3.0 * 2 / (8 / 4.8)
    later = [int(np.float32(i) * np.float32(apart)) for i in range(4)]
    assert [part.later for part in video.parts] == [None, *later[1:]]
    assert not video.has_words and len({later[1], later[2] - later[1], later[3] - later[2]}) == 2


def test_temporal_patches_of_qwen2_vl_are_one_position_apart() -> None:
    frames = tuple(file_of(picture(40, 24, seed=i)) for i in range(6))
    (video,) = load([VideoFile(frames, fps=4.0)], replace(SMALL, by_frame=True), BOUNDS)
    assert [part.later for part in video.parts] == [None, 1, 2]


def test_the_same_frames_at_other_times_have_other_digests() -> None:
    """Their tokens' keys are others, and prefixes are found by digests."""
    frames = tuple(file_of(picture(40, 24, seed=i)) for i in range(4))
    settings = replace(SMALL, by_frame=True, positions_per_s=4.0)
    fast, slow = load([VideoFile(frames, fps=4.0), VideoFile(frames, fps=1.0)], settings, BOUNDS)
    assert fast.parts[0].digest == slow.parts[0].digest and fast.parts[1].digest != slow.parts[1].digest


def test_frames_that_are_too_far_apart_are_refused() -> None:
    frame = file_of(picture(40, 24))
    settings = replace(SMALL, by_frame=True, positions_per_s=4.0)
    for fps in (1e-9, 1e-300):
        with pytest.raises(InvalidRequest, match=r"positions of time, but may take 16777216"):
            load([VideoFile((frame,) * 3, fps=fps)], settings, BOUNDS)


def test_a_model_of_pictures_alone_refuses_videos() -> None:
    with pytest.raises(InvalidRequest, match="the request has video 0, but the model takes pictures alone"):
        load([VideoFile((file_of(picture(40, 24)),))], IN_LINES, BOUNDS)


def times_of(indices: list[int], fps: float) -> list[float]:
    times: list[float] = Qwen3VLProcessor._calculate_timestamps(None, list(indices), fps, 2)
    return times


def test_a_list_of_frames_becomes_temporal_patches_in_the_processors_order() -> None:
    frames = [picture(40, 24, seed=i) for i in range(5)]
    (video,) = load([VideoFile(tuple(map(file_of, frames)), fps=4.0)], SMALL, BOUNDS)
    assert video.is_video and [part.grid for part in video.parts] == [(1, 6, 10)] * 3
    assert [part.time_s for part in video.parts] == times_of([0, 1, 2, 3, 4], 4.0)
    tensor = torch.tensor(np.stack([np.asarray(frame).transpose(2, 0, 1) for frame in frames]))[None]
    expected, t, h, w = Qwen3VLVideoProcessor.patchify(None, tensor, 4, 2, 2)
    assert (t, h, w) == (3, 6, 10)
    assert b"".join(part.pixels for part in video.parts) == expected.numpy().tobytes()


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_sampled_by_its_own_times(kind: str) -> None:
    """24 frames of 1/5 s are 4.8 s, of which two frames a second are taken."""
    frames = [picture(40, 24, seed=i) for i in range(24)]
    (video,) = load([VideoFile(animation(frames, 200, kind))], SMALL, BOUNDS)
    taken = sampled_frames(24, 5.0, SMALL)
    assert len(taken) == 9
    assert [part.time_s for part in video.parts] == pytest.approx(times_of(taken, 5.0))
    if kind == "PNG":
        chosen = tuple(file_of(frames[number]) for number in taken)
        (expected,) = load([VideoFile(chosen)], SMALL, BOUNDS)
        assert [part.digest for part in video.parts] == [part.digest for part in expected.parts]


def test_of_a_file_as_many_frames_a_second_are_taken_as_are_asked_for() -> None:
    content = animation([picture(40, 24, seed=i) for i in range(24)], 200, "PNG")
    for fps, count in ((None, 9), (2.0, 9), (5.0, 24), (1.0, 4)):
        (video,) = load([VideoFile(content, fps)], SMALL, BOUNDS)
        assert len(video.parts) == (count + 1) // 2
    with pytest.raises(InvalidRequest, match="video 0 is a file with fps 2, but the model takes 32 frames of each"):
        load([VideoFile(content, 2.0)], FILLED, BOUNDS)


def test_the_same_frames_in_two_videos_have_equal_digests() -> None:
    frames = [file_of(picture(40, 24, seed=i)) for i in range(4)]
    a, b = load([VideoFile(tuple(frames)), VideoFile((*frames[2:], *frames[:2]))], SMALL, BOUNDS)
    assert [part.digest for part in a.parts] == [part.digest for part in reversed(b.parts)]


def test_a_still_picture_is_a_video_of_one_frame() -> None:
    (video,) = load([VideoFile(file_of(picture(40, 24)))], SMALL, BOUNDS)
    assert [part.time_s for part in video.parts] == [0.0]


def test_too_many_frames_patches_or_pixels_are_refused() -> None:
    frame = file_of(picture(40, 24))
    with pytest.raises(InvalidRequest, match="video 0 has 769 frames, but must have 1 to 768"):
        load([VideoFile((frame,) * 769)], SMALL, BOUNDS)
    with pytest.raises(InvalidRequest, match="must have 1 to 768"):
        load([VideoFile(())], SMALL, BOUNDS)
    with pytest.raises(InvalidRequest, match=r"have 30 tokens or more, but may have 25 together .*--media-max-tokens"):
        load([VideoFile((frame,) * 4)], SMALL, Bounds(65536, 100))
    wide = file_of(Image.new("1", (5000, 5000)))
    with pytest.raises(InvalidRequest, match=r"with video 0 the request has more than \d+ pixels to decode"):
        load([VideoFile((wide,) * 40)], SMALL, BOUNDS)
    many = animation([Image.new("1", (1, 1), i % 2) for i in range(4100)], 20)
    with pytest.raises(InvalidRequest, match="has 4100 frames, but may have 4096"):
        load([VideoFile(many)], SMALL, BOUNDS)
