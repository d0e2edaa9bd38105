"""The processors of models that hear: sounds alone, as Whisper hears them."""

from __future__ import annotations

from typing import NamedTuple

from jaxsgl.errors import CheckpointError
from jaxsgl.preprocess.mel import HOP, RATE, WINDOW
from jaxsgl.preprocess.processors.files import HALF, IMAGE_FILE, ProcessorFiles
from jaxsgl.preprocess.settings import PixelSettings, ProcessorSettings
from jaxsgl.requests.media import FRAMES_OF_PATCH, SoundShape


class _Hearing(NamedTuple):
    """What holds of a model that hears.

    Attributes:
      token_key, token_id: the key of the placeholder, and which one it is without it.
      averages: two positions become one token; else as many as make as many numbers as an MLP has.
      hears_all: see `SoundShape`.
    """

    token_key: str
    token_id: int
    averages: bool
    hears_all: bool


# By `model_type` of config.json.
MODELS = {
    "qwen2_audio": _Hearing("audio_token_index", 151_646, averages=True, hears_all=False),
    "voxtral": _Hearing("audio_token_id", 24, averages=False, hears_all=True),
}


def read_sounds(files: ProcessorFiles) -> ProcessorSettings:
    """Chunks of 30 s, as frames of a log-mel spectrogram."""
    hearing, tower = MODELS[files.model_type], files.tower
    with files.understood():
        merge = 2 if hearing.averages else tower.get("intermediate_size", 5120) // tower.get("hidden_size", 1280)
        shape = SoundShape(
            int(tower.get("max_source_positions", 1500)), int(tower.get("num_mel_bins", 128)), merge, hearing.hears_all
        )
    told = files.image or files.both.get("feature_extractor") or {}
    needed = {
        "feature_size": shape.bins, "sampling_rate": RATE, "hop_length": HOP, "n_fft": WINDOW, "padding_value": 0.0,
        "dither": 0.0, "do_normalize": False, "nb_max_frames": FRAMES_OF_PATCH * shape.num_patches,
    }  # fmt: skip
    for name, need in needed.items():
        if told.get(name, need) not in (need, None):
            raise CheckpointError(f"{files.folder / IMAGE_FILE}: {name} is {told[name]}, but only {need} is supported")
    nothing = PixelSettings(1, 1, HALF, HALF)
    token_id = files.config.get(hearing.token_key, hearing.token_id)
    return ProcessorSettings(
        patch_size=1, merge_size=1, image=nothing, video=nothing, image_token_id=token_id, sound=shape
    )
