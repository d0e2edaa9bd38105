"""Files of video, as MP4 and WebM, to the frames that the model sees, by PyAV (the extra `video`).

What a file may cost is bounded: by what it declares (`boxes.py`), by its kind and codec, by pixels and memory from its
header, which FFmpeg holds every frame to, and by packets; `decoding.py` bounds time and memory. Frames are decoded in
order, on one thread, and those that the model doesn't see are dropped at once. Nothing but the file's own bytes is
read. Never knows prompts or processors; `loading.py` scales the frames.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from PIL import Image

from jaxsgl.errors import InvalidRequest
from jaxsgl.preprocess.boxes import MAX_SAMPLES, check_boxes

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

KIND_NAMES = "MP4, MOV, MKV or WebM"
CODECS = ("av1", "h264", "hevc", "mpeg4", "vp8", "vp9")
MAX_PACKETS = MAX_SAMPLES
MAX_PROBED_BYTES = 1 << 20
DEFAULT_FPS = 24.0  # of a file that doesn't say, as in transformers
_NEAR = 0.05  # by such a part the rate that a file declares may differ from that of its frames
_HELD_FRAMES = 18  # that a decoder keeps at most: 16 that others refer to, and some on their way
_ALIGNMENT = 256  # a decoder's frames have so many more lines and columns than are seen, at most
_RGB_BYTES = 12  # of a pixel: a frame in RGB, its copy that is upright, and the frame before
_DECODERS = {"libdav1d": "av1", "libaom-av1": "av1", "libvpx": "vp8", "libvpx-vp9": "vp9"}  # PyAV's names for codecs
_TURNS = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}


def is_movie(content: bytes) -> bool:
    """Whether a file is an MP4 or Matroska file by its first bytes."""
    return _demuxer(content) is not None


class Movie:
    """A file of video, read by one thread from beginning to end.

    Attributes:
      num_frames: that the file has packets for.
      fps: frames a second, on average.
      width, height: by the header, before frames are turned upright.
      num_bytes: memory that decoding takes at most.
    """

    def __init__(self, content: bytes, max_pixels: int, name: str) -> None:
        """`max_pixels` are those of a frame. Raises `InvalidRequest`."""
        self._content, self._name = content, name
        if _demuxer(content) == "mp4":
            check_boxes(content, name)
        with self._opened(2 * max_pixels + (1 << 16)) as (container, stream):
            context = stream.codec_context
            self.width, self.height = context.width, context.height
            _check(context.name, self.width, self.height, max_pixels, name)
            self._bits = context.format.padded_bits_per_pixel if context.format is not None else 24
            self.num_frames, span_s = self._count(container, stream)
            self.fps = _frame_rate(float(stream.average_rate or 0), self.num_frames, span_s)
        self.num_bytes = math.ceil(
            (self.width + _ALIGNMENT) * (self.height + _ALIGNMENT) * (_HELD_FRAMES * self._bits / 8 + _RGB_BYTES)
        )

    def frames(self, wanted: Sequence[int]) -> Iterator[Image.Image]:
        """Yields frames with these ascending numbers as RGB, upright; the last one again for those that the file lacks.

        Raises `InvalidRequest` for a file that can't be decoded.
        """
        done, last = 0, None
        most_pixels = (self.width + _ALIGNMENT) * (self.height + _ALIGNMENT)
        with self._opened(most_pixels) as (container, stream):
            stream.thread_type = "NONE"
            stream.codec_context.options = _options(most_pixels)
            for number, frame in enumerate(container.decode(stream)):
                if frame.format.padded_bits_per_pixel > self._bits:
                    raise InvalidRequest(f"frame {number} of {self._name} has other pixels than the header says")
                while done < len(wanted) and wanted[done] == number:
                    last = _upright(Image.fromarray(frame.to_ndarray(format="rgb24")), frame.rotation)
                    yield last
                    done += 1
                if done == len(wanted):
                    return
        if last is None:
            raise InvalidRequest(f"{self._name} has no frame that can be decoded: is the file complete?")
        yield from [last] * (len(wanted) - done)

    @contextmanager
    def _opened(self, most_pixels: int) -> Iterator[tuple[InputContainer, VideoStream]]:
        """The container and its first video stream, with the decoder's errors as `InvalidRequest`."""
        av = av_library(self._name, "video", "send its frames as a list of pictures")
        try:
            with av.open(
                io.BytesIO(self._content), format=_demuxer(self._content), options=_options(most_pixels),
                container_options={"probesize": str(MAX_PROBED_BYTES), "analyzeduration": "0"},
            ) as container:  # fmt: skip
                if not container.streams.video:
                    raise InvalidRequest(f"{self._name} has no video: send a file with pictures")
                yield container, container.streams.video[0]
        except InvalidRequest:
            raise
        except (av.FFmpegError, ValueError, MemoryError, UnicodeError) as error:
            reason = str(error)[:200] or type(error).__name__
            raise InvalidRequest(f"{self._name} can't be decoded ({reason}): is the file complete?") from None

    def _count(self, container: InputContainer, stream: VideoStream) -> tuple[int, float]:
        """Frames, and the seconds from the first one's time to the last one's."""
        count, times = 0, list[int]()
        for packet in container.demux(stream):
            count += bool(packet.size)
            if packet.pts is not None:
                times.append(packet.pts)
            if count > MAX_PACKETS:
                raise InvalidRequest(f"{self._name} has more than {MAX_PACKETS} frames: send a shorter video")
        if count == 0:
            raise InvalidRequest(f"{self._name} has no frames: is the file complete?")
        ticks = max(times, default=0) - min(times, default=0)
        return count, float(ticks * (stream.time_base or 0))


def _frame_rate(declared: float, num_frames: int, span_s: float) -> float:
    """Frames a second: as the file declares, or by their times where they come at another rate.

    Browsers' recordings declare the rate of their fastest part, or none.
    """
    measured = (num_frames - 1) / span_s if span_s > 0 else declared
    if abs(measured - declared) <= _NEAR * declared:
        measured = declared
    return measured if 0.01 <= measured <= 1000 else DEFAULT_FPS


def _upright(frame: Image.Image, degrees: int) -> Image.Image:
    """The frame as its file wants it seen: turned by so many degrees against the clock."""
    turn = _TURNS.get(round(degrees / 90) * 90 % 360)
    return frame if turn is None else frame.transpose(turn)


def av_options() -> dict[str, str]:
    """No file or URL that this one names is opened."""
    return {"protocol_whitelist": "none", "threads": "1"}


def _options(most_pixels: int) -> dict[str, str]:
    """Nor any; a frame with more pixels ends decoding before it has memory."""
    return {**av_options(), "max_pixels": str(most_pixels)}


def _demuxer(content: bytes) -> str | None:
    """FFmpeg's name for the kind of file; others are never tried."""
    if content[4:8] == b"ftyp":
        return "mp4"
    return "matroska" if content[:4] == b"\x1a\x45\xdf\xa3" else None


def av_library(name: str, what: str, way_out: str) -> Any:
    """Returns PyAV. Raises `InvalidRequest`, which says what the file `name` is and what else can be sent."""
    try:
        import av
    except ImportError:
        raise InvalidRequest(
            f"{name} is a file of {what}, which the server can't decode without PyAV: install jaxsgl[video], or "
            f"{way_out}"
        ) from None
    av.logging.set_level(None)  # FFmpeg would write to standard error what clients send
    return av


def _check(codec: str, width: int, height: int, max_pixels: int, name: str) -> None:
    if _DECODERS.get(codec, codec) not in CODECS:
        raise InvalidRequest(f"{name} is coded as {codec}, but must be one of {', '.join(CODECS)}: convert it")
    if not 1 <= width * height <= max_pixels:  # FFmpeg says 0 x 0 if it was told to refuse the size
        raise InvalidRequest(
            f"{name} has frames of {width} x {height} pixels by its header, but must have 1 to {max_pixels} "
            "(--media-max-pixels): send a smaller one"
        )
