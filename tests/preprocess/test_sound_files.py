"""Files of sound become the frames that transformers' processors take, within bounds."""

from __future__ import annotations

import builtins
import io
import struct
import tracemalloc
import wave
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import transformers

from jaxsgl.errors import InvalidRequest
from jaxsgl.preprocess import sounds
from jaxsgl.preprocess.mel import RATE, LogMel, Samples
from jaxsgl.preprocess.placeholders import Part
from jaxsgl.preprocess.sounds import parts_of
from jaxsgl.preprocess.waves import Wave
from jaxsgl.requests.media import SoundShape

pytestmark = pytest.mark.device
# As the models have them, but that these hear 1 s in the place of 30.
ONE = SoundShape(num_patches=50, bins=128, merge=2, hears_all=False)
ALL = SoundShape(num_patches=50, bins=80, merge=5, hears_all=True)


def noise(num_samples: int, channels: int = 1) -> npt.NDArray[np.int16]:
    """`[n, channels]` loud noise, quiet noise and silence."""
    rng = np.random.default_rng(num_samples)
    made = rng.normal(0, 3000, (num_samples, channels))
    made[num_samples // 3 :] /= 1000
    made[num_samples // 2 : num_samples // 2 + 2000] = 0
    return made.astype(np.int16)


def wav(samples: npt.NDArray[np.int16], rate: int = RATE) -> bytes:
    with io.BytesIO() as file:
        with wave.open(file, "wb") as out:
            out.setnchannels(samples.shape[1])
            out.setsampwidth(2)
            out.setframerate(rate)
            out.writeframes(samples.tobytes())
        return file.getvalue()


def riff(tag: int, bits: int, channels: int, data: bytes, rate: int = RATE, size: int | None = None) -> bytes:
    """A WAV file of any format, with a chunk that says nothing before its samples."""
    frame = channels * bits // 8
    form = struct.pack("<HHIIHH", tag, channels, rate, rate * frame, frame, bits)
    if tag == 0xFFFE:
        form += struct.pack("<HHIH", 22, bits, 0, 1) + b"\0" * 14
    chunks = b"LIST" + struct.pack("<I", 3) + b"abc\0" + b"fmt " + struct.pack("<I", len(form)) + form
    chunks += b"data" + struct.pack("<I", len(data) if size is None else size) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def encoded(samples: Samples, kind: str, codec: str, rate: int) -> bytes:
    """A file of FFmpeg's format `kind`, of one channel or two that are alike."""
    av = pytest.importorskip("av", reason="PyAV, the extra `video`, is not installed")
    with io.BytesIO() as file:
        with av.open(file, "w", format=kind) as out:
            stream = out.add_stream(codec, rate=rate, layout="stereo")
            both = np.ascontiguousarray(np.stack([samples, samples]).astype(np.float32))
            frame = av.AudioFrame.from_ndarray(both, format="fltp", layout="stereo")
            frame.sample_rate = rate
            for each in av.AudioResampler(stream.format.name, "stereo", rate, frame_size=1024).resample(frame):
                out.mux(stream.encode(each))
            out.mux(stream.encode(None))
        return file.getvalue()


def frames_of(parts: tuple[Part, ...], bins: int) -> npt.NDArray[np.float32]:
    """`[frames, bins]` of all chunks."""
    return np.concatenate([np.frombuffer(part.pixels, "<f4").reshape(-1, bins) for part in parts])


@pytest.mark.parametrize("num_samples", [641, 9_999, 15_999, 16_000])
def test_frames_and_their_number_are_those_of_qwen2_audios_processor(num_samples: int) -> None:
    samples = noise(num_samples)
    extractor = transformers.WhisperFeatureExtractor(feature_size=128, chunk_length=1)
    expected = extractor(
        samples[:, 0].astype(np.float32) / 32768, sampling_rate=RATE, return_attention_mask=True, padding="max_length"
    )
    num_frames = int(expected["attention_mask"].sum())
    parts = parts_of(wav(samples), ONE, 1000, "sound 0")
    np.testing.assert_allclose(frames_of(parts, 128), expected["input_features"][0].T, atol=2e-5)
    assert [(part.grid, part.filled) for part in parts] == [((1, 50, 1), (num_frames - 1) // 2 + 1)]
    tokens = ((num_frames - 1) // 2 + 1 - 2) // 2 + 1
    assert ONE.num_tokens(parts[0].filled) == tokens


@pytest.mark.parametrize("num_samples", [100, 16_000, 16_001, 40_321])
def test_a_long_sound_is_heard_in_chunks_with_the_silence_after_its_end_as_voxtrals_processor_has_them(
    num_samples: int,
) -> None:
    samples = noise(num_samples)
    extractor = transformers.WhisperFeatureExtractor(feature_size=80, chunk_length=1)
    expected = extractor(
        samples[:, 0].astype(np.float32) / 32768,
        sampling_rate=RATE, padding=True, truncation=False, pad_to_multiple_of=RATE,
    )["input_features"][0].T  # fmt: skip
    parts = parts_of(wav(samples), ALL, 150, "sound 0")
    np.testing.assert_allclose(frames_of(parts, 80), expected, atol=2e-5)
    *whole, last = [part.filled for part in parts]
    assert set(whole) <= {50} and 50 * len(whole) + last == -(-num_samples // 320)
    assert len({part.digest for part in parts}) == len(parts) and ALL.num_tokens(last) == 10


def test_every_form_of_wav_has_the_same_samples() -> None:
    samples = noise(5000, 2) // 256 * 256
    expected = frames_of(parts_of(wav(samples), ONE, 1000, "a"), 128)
    exact = samples.astype(np.float64) / 32768
    in_24 = (samples.astype("<i4") << 16).reshape(-1, 1).view(np.uint8)[:, 1:].tobytes()
    for content in (
        riff(1, 16, 2, samples.tobytes()),
        riff(1, 16, 2, samples.tobytes() + b"x", size=0xFFFFFFFF),  # of a pipe, cut within a sample
        riff(0xFFFE, 16, 2, samples.tobytes()),
        riff(1, 8, 2, (samples // 256 + 128).astype(np.uint8).tobytes()),
        riff(1, 24, 2, in_24),
        riff(1, 32, 2, (samples.astype("<i4") << 16).tobytes()),
        riff(3, 32, 2, exact.astype("<f4").tobytes()),
        riff(3, 64, 2, exact.astype("<f8").tobytes()),
    ):
        np.testing.assert_array_equal(frames_of(parts_of(content, ONE, 1000, "a"), 128), expected)


@pytest.mark.parametrize(("law", "codec"), [(6, "pcm_alaw"), (7, "pcm_mulaw")])
def test_samples_of_telephones_are_what_ffmpeg_makes_of_them(law: int, codec: str) -> None:
    av = pytest.importorskip("av", reason="PyAV, the extra `video`, is not installed")
    every = np.arange(256, dtype=np.uint8).tobytes()
    decoder = av.CodecContext.create(codec, "r")
    decoder.sample_rate, decoder.layout = 8000, "mono"
    (frame,) = decoder.decode(av.Packet(every))
    found = np.concatenate(list(Wave(riff(law, 8, 1, every, rate=8000), "a").blocks()))
    np.testing.assert_array_equal(found[:, 0] * 32768, frame.to_ndarray()[0])


def test_samples_whose_size_a_pipe_did_not_know_are_read_to_the_end_and_none_where_the_file_is_whole() -> None:
    samples = noise(9000)
    expected = parts_of(wav(samples), ONE, 1000, "a")
    for size in (0, 0xFFFFFFFF):
        piped = riff(1, 16, 1, samples.tobytes(), size=size)
        assert parts_of(piped[:4] + struct.pack("<I", size) + piped[8:], ONE, 1000, "a") == expected
    chunks = wav(noise(0))[8:] + b"LIST" + struct.pack("<I", 4000) + b"x" * 4000
    with pytest.raises(InvalidRequest, match=r"has 0\.000 s of sound"):
        parts_of(b"RIFF" + struct.pack("<I", len(chunks)) + chunks, ONE, 1000, "a")


def test_the_loudest_samples_make_finite_frames_at_any_rate() -> None:
    loud = np.random.default_rng(0).choice([-sounds.LOUDEST, sounds.LOUDEST], 8000).astype("<f4")
    for rate in (8000, 44_100):
        assert np.isfinite(frames_of(parts_of(riff(3, 32, 1, loud.tobytes(), rate), ONE, 1000, "a"), 128)).all()


@pytest.mark.parametrize("rate", [11_025, 18_825, 191_900, 192_000])
def test_a_sound_takes_no_more_memory_than_is_kept_for_it(rate: int) -> None:
    """18,825 Hz needs more weights than any other rate that is taken."""
    content = riff(1, 8, 8, np.random.default_rng(0).integers(0, 256, 8 * rate, np.uint8).tobytes(), rate)
    tracemalloc.start()
    try:
        parts_of(content, ONE, 1000, "a")
        assert tracemalloc.get_traced_memory()[1] < sounds.WORKING_BYTES
    finally:
        tracemalloc.stop()


def tone(rate: int) -> Samples:
    at = np.arange(rate * 3 // 4) / rate
    return (0.3 * np.sin(2 * np.pi * 440 * at) + 0.2 * np.sin(2 * np.pi * 2900 * at)).astype(np.float32)


@pytest.mark.parametrize("rate", [8000, 11_025, 44_100, 48_000])
def test_sounds_of_other_rates_are_heard_as_at_whispers_own(rate: int) -> None:
    """What is loud: bands without a tone have what the ends of the sounds make there."""
    made, expected = (
        frames_of(parts_of(riff(3, 32, 1, tone(each).tobytes(), each), ONE, 1000, "a"), 128) for each in (rate, RATE)
    )
    inner = slice(3, 70)
    loud = expected[inner] > expected.max() - 0.5
    assert loud.sum() > 500
    np.testing.assert_allclose(made[inner][loud], expected[inner][loud], atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "codec", "rate"),
    [("flac", "flac", 44_100), ("mp3", "libmp3lame", 44_100), ("ogg", "libopus", 48_000),
     ("mp4", "aac", 44_100), ("matroska", "libopus", 48_000), ("adts", "aac", 16_000)],
)  # fmt: skip
def test_other_files_are_heard_as_wav(kind: str, codec: str, rate: int) -> None:
    """Within what the codec loses, and after the moment by which it delays the sound."""
    made = frames_of(parts_of(encoded(tone(rate), kind, codec, rate), ONE, 1000, "a"), 128)
    expected = frames_of(parts_of(riff(3, 32, 1, tone(rate).tobytes(), rate), ONE, 1000, "a"), 128)
    inner = slice(20, 60)
    loud = expected[inner] > expected.max() - 0.25
    np.testing.assert_allclose(made[inner][loud], expected[inner][loud], atol=0.1)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is no sound that can be read: send WAV, MP3, FLAC"),
        (b"\x89PNG\r\n\x1a\n" + b"x" * 100, "is no sound that can be read"),
        (b"RIFF\0\0\0\0WAVE", "without a format or samples: is the file complete"),
        (riff(2, 4, 1, b"x" * 800), "format 2 with 4 bits, but must have integers"),
        (riff(1, 16, 0, b"x" * 800), "0 channels of 16 bits with 0 bytes for all, which disagree"),
        (riff(1, 16, 9, b"x" * 1800), "has 9 channels, but may have 8"),
        (riff(1, 16, 1, b"xx" * 800, rate=44_099), "has 44099 samples a second, but must have 4000 to 192000"),
        (riff(1, 16, 1, b"xx" * 800, rate=0), "has 0 samples a second"),
        (riff(1, 16, 1, b"xx" * 800, rate=191_975), "in a ratio of small numbers to 16000"),
        (riff(3, 32, 1, np.full(800, np.inf, "<f4").tobytes()), "no finite numbers"),
        (riff(3, 32, 2, np.full(800, np.nan, "<f4").tobytes()), "no finite numbers"),
        (riff(3, 64, 1, np.full(800, 1e300).tobytes()), "no finite numbers or beyond 65536"),
        (riff(3, 32, 1, np.full(16_000, 3e38, "<f4").tobytes(), rate=8000), "no finite numbers or beyond 65536"),
        (wav(noise(300)), r"has 0\.019 s of sound, but needs 0\.04 s"),
        (wav(noise(0)), r"has 0\.000 s of sound"),
        (wav(noise(16_001)), "is longer than 1 s, which is all that the model hears"),
        (b"fLaC" + b"x" * 200, "can't be decoded"),
        (b"\0\0\0\x14ftypM4A \0\0\0\0M4A ", "can't be decoded"),
    ],
)
def test_what_is_no_sound_or_too_long_is_refused(content: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        parts_of(content, ONE, 1000, "sound 0")


def test_no_more_is_decoded_than_a_request_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour of silence, which FLAC makes small, is not read to its end."""
    content = encoded(np.zeros(RATE * 3600, np.float32), "flac", "flac", RATE)
    assert len(content) < 1 << 20
    fed: list[int] = []

    class Counting(LogMel):
        def add(self, samples: Samples) -> None:
            fed.append(len(samples))
            super().add(samples)

    monkeypatch.setattr(sounds, "LogMel", Counting)
    with pytest.raises(InvalidRequest, match="have 40 tokens or more, but may have 30 together"):
        parts_of(content, ALL, 150, "sound 0")
    assert sum(fed) <= 3 * RATE


def test_without_pyav_only_wav_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without_av(name: str, *args: Any) -> Any:
        if name == "av":
            raise ImportError(name)
        return imported(name, *args)

    monkeypatch.setattr(builtins, "__import__", without_av)
    assert parts_of(wav(noise(5000)), ONE, 1000, "sound 0")
    with pytest.raises(InvalidRequest, match=r"without PyAV: install jaxsgl\[video\], or send it as WAV"):
        parts_of(b"fLaC" + b"x" * 200, ONE, 1000, "sound 0")
