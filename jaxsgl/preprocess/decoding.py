"""`Decoder`: loads the pictures, videos and sounds of a request in a child process, within limits of memory and time.

Pillow and FFmpeg read what strangers send, in C. What they may take is known before (`jpegs.py`, `boxes.py`,
`pictures.py`), as far as anybody has thought of it; here the kernel holds them to it, and what goes wrong in them
meets neither keys nor other prompts. A child has half of `--media-max-decode-bytes`, so that two decode at the same
time. If a picture takes more by its header, its request is loaded again, alone, with all of it. Never knows prompts;
frontend/media/loader.py calls it, in threads.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

import msgspec
import numpy as np

from jaxsgl.config.features import MediaConfig
from jaxsgl.errors import EngineUnavailable, InvalidRequest
from jaxsgl.preprocess.decode_room import DecodeRoom
from jaxsgl.preprocess.placeholders import Visual
from jaxsgl.preprocess.settings import PixelSettings, ProcessorSettings
from jaxsgl.preprocess.sources import Content, File, ImageFile, SoundFile, VideoFile
from jaxsgl.requests.media import MediaLimits
from jaxsgl.sandbox import Limits, Sandbox, SandboxCrash, SandboxKilled, SandboxLimit

MAX_DECODING = 2  # requests whose pictures are decoded at a time
SPARE_BYTES = 64 << 20  # of a child: FFmpeg's tables, the allocator, a thread's stack
_COPIES = 3  # of files and of patches, on their way
_TIME_PER_CPU = 10  # seconds by the clock for each of processor time, on a machine that has other work
_LEAST_TIME_S = 60.0

logger = logging.getLogger(__name__)


class CpuBudget:
    """Processor time that decoding for a call may still take, in seconds."""

    def __init__(self, seconds: float) -> None:
        self.left_s = seconds


class Decoder:
    """Loads files for a model. Safe to call from several threads.

    Args:
      settings, limits: of the model.
      config: flags.
      sandbox: None: one of its own.
    """

    def __init__(
        self, settings: ProcessorSettings, limits: MediaLimits, config: MediaConfig, sandbox: Sandbox | None = None
    ) -> None:
        self._settings = settings
        self._limits = limits
        self._config = config
        self._sandbox = sandbox or media_sandbox()
        self._room = DecodeRoom(config.media_max_decode_bytes)
        self._is_closed = False
        self._patch_bytes = limits.max_request_patches * limits.patch_bytes

    def start(self) -> None:
        """Starts the helper process, which takes a second. Raises `SandboxCrash` if it doesn't get ready."""
        self._sandbox.start()

    def close(self) -> None:
        """Ends the helper process."""
        self._is_closed = True
        self._sandbox.close()

    def load(self, files: Sequence[File], cpu: CpuBudget | None = None) -> list[Visual]:
        """Returns what `files`, none of them decoded, hold, in their order.

        `cpu` counts the processor time of a call that loads several times; None: it loads once.

        Raises:
          InvalidRequest: they can't be decoded, or not within the limits.
          EngineUnavailable: the process that decodes was killed, and again when it was asked once more.
        """
        most_bytes, cpu = self._config.media_max_decode_bytes, cpu or CpuBudget(self._config.media_max_cpu_s)
        reply = self._call(files, most_bytes // MAX_DECODING, cpu)
        if reply.visuals is None:  # it takes more than a half
            reply = self._call(files, most_bytes, cpu)
        assert reply.visuals is not None
        return reply.visuals

    def _call(self, files: Sequence[File], share_bytes: int, cpu: CpuBudget) -> _Reply:
        config, limits = self._config, self._limits
        call = _Call(
            *_packed(files), self._settings, limits.max_patches, limits.max_request_patches,
            limits.max_picture_patches, config.media_max_pixels, config.media_max_decode_bytes, share_bytes,
        )  # fmt: skip
        request = msgspec.msgpack.encode(call)
        memory_bytes = share_bytes + _COPIES * (len(request) + self._patch_bytes) + SPARE_BYTES
        time_s = max(_LEAST_TIME_S, _TIME_PER_CPU * cpu.left_s)
        with self._room.taken(share_bytes, "the request"):
            try:
                answer = self._answer(request, Limits(memory_bytes, max(cpu.left_s, 1e-3), time_s))
            except SandboxLimit as limit:
                raise self._refusal(limit, time_s) from None
        reply = msgspec.msgpack.decode(answer, type=_Reply)
        cpu.left_s -= reply.cpu_s
        return reply

    def _answer(self, request: bytes, limits: Limits) -> bytearray:
        """Asks a child; once more if it was killed by something else. Raises `SandboxLimit`."""
        for _ in range(2):
            if self._is_closed:
                break
            try:
                self._sandbox.start()
            except SandboxCrash as crash:
                logger.error("the process that decodes pictures does not start: %s", crash)
                break
            try:
                return self._sandbox.call(request, limits)
            except SandboxKilled as crash:
                logger.error("media of a request were not decoded: %s", crash)
            except SandboxCrash as crash:
                logger.error("media of a request could not be decoded: %s", crash)
                raise InvalidRequest(
                    "the media of the request can't be decoded, for their decoder ended: are they "
                    "damaged? The server's log says more"
                ) from None
        raise EngineUnavailable(
            "the media of the request could not be decoded, for the process that does it was killed or "
            "does not start, perhaps for lack of memory: try again later"
        )

    def _refusal(self, limit: SandboxLimit, time_s: float) -> InvalidRequest:
        config = self._config
        most = {
            "processor time": f"{config.media_max_cpu_s:g} s of processor time to decode and scale (--media-max-cpu-s)",
            "memory": f"{config.media_max_decode_bytes} bytes of memory to decode (--media-max-decode-bytes)",
            "time": f"{time_s:g} s to decode and scale",
        }[limit.kind]
        return InvalidRequest(f"the media of the request take more than {most}: send fewer, shorter or smaller ones")


def media_sandbox() -> Sandbox:
    """Returns a helper process that decodes, not started yet."""
    return Sandbox("jaxsgl.preprocess.decoding:make", name="media")


class _File(msgspec.Struct, array_like=True):
    """A picture, a file of video or sound, or the frames of a video; `contents` are numbers of `_Call.contents`."""

    kind: Literal["image", "video", "sound"]
    is_list: bool
    contents: list[int]
    fps: float | None = None


_KINDS: dict[type, Literal["image", "video", "sound"]] = {
    ImageFile: "image", VideoFile: "video", SoundFile: "sound",
}  # fmt: skip


class _Call(msgspec.Struct, array_like=True):
    """What a child is asked."""

    contents: list[bytes]
    files: list[_File]
    settings: ProcessorSettings
    max_patches: int
    max_request_patches: int
    max_picture_patches: int
    max_pixels: int
    most_bytes: int
    share_bytes: int


class _Reply(msgspec.Struct, array_like=True):
    """What a child answers; without `visuals`, that a file takes more memory, and the time that was taken for it."""

    visuals: list[Visual] | None
    cpu_s: float


def _packed(files: Sequence[File]) -> tuple[list[bytes], list[_File]]:
    """What `_Call` holds of `files`: one that is named many times, which is one object, costs its bytes once."""
    numbers: dict[int, int] = {}  # by the identity of contents
    contents: list[bytes] = []

    def number_of(content: Content) -> int:
        assert isinstance(content, bytes), "decoded pictures come from `LLM` alone, which decodes by itself"
        if id(content) not in numbers:
            numbers[id(content)] = len(contents)
            contents.append(content)
        return numbers[id(content)]

    packed: list[_File] = []
    for file in files:
        kind = _KINDS[type(file)]
        is_list = isinstance(file.content, tuple)
        given = file.content if isinstance(file.content, tuple) else (file.content,)
        fps = file.fps if isinstance(file, VideoFile) else None
        packed.append(_File(kind, is_list, [number_of(content) for content in given], fps))
    return contents, packed


# ---- the child's side ----


def make(_: bytes) -> Callable[[bytes], bytes]:
    """What the helper does once: imports what decodes."""
    from PIL import Image

    from jaxsgl.preprocess.loading import Bounds, load
    from jaxsgl.preprocess.mel import WINDOW, LogMel
    from jaxsgl.preprocess.pictures import FORMATS

    with suppress(ImportError):
        import av  # noqa: F401  # for movies.py, which says what to install without it

    def run(request: bytes) -> bytes:
        call = msgspec.msgpack.decode(request, type=_Call)
        room = _Share(call.most_bytes, call.share_bytes)
        bounds = Bounds(call.max_patches, call.max_request_patches, call.max_pixels, room, call.max_picture_patches)
        try:
            visuals = load([_unpacked(file, call.contents) for file in call.files], call.settings, bounds)
        except _TooMuch:
            return msgspec.msgpack.encode(_Reply(None, time.process_time()))
        return msgspec.msgpack.encode(_Reply(visuals, time.process_time()))

    pixels = PixelSettings(1, 1 << 20, (0.5,) * 3, (0.5,) * 3)
    settings = ProcessorSettings(16, 2, pixels, pixels, image_token_id=0, temporal_patch_size=2)
    one = [_File("image", False, [0])]
    for kind in FORMATS:  # what libraries do at their first use is done before all children
        with io.BytesIO() as file:
            Image.new("RGB", (32, 32)).save(file, kind)
            contents = [file.getvalue()]
        run(msgspec.msgpack.encode(_Call(contents, one, settings, 64, 64, 64, 1 << 20, 1 << 24, 1 << 24)))
    LogMel(1, 2).add(np.zeros(WINDOW + 1, np.float32))
    return run


def _unpacked(file: _File, contents: Sequence[bytes]) -> File:
    given = tuple(contents[number] for number in file.contents)
    if file.kind == "image":
        return ImageFile(given[0])
    if file.kind == "sound":
        return SoundFile(given[0])
    return VideoFile(given if file.is_list else given[0], file.fps)


class _TooMuch(Exception):
    """A file takes more memory than this child's share, but no more than one may."""


class _Share(DecodeRoom):
    """The memory of a child."""

    def __init__(self, most_bytes: int, share_bytes: int) -> None:
        super().__init__(most_bytes)
        self._share_bytes = share_bytes

    @contextmanager
    def taken(self, num_bytes: int, name: str) -> Iterator[None]:
        with super().taken(num_bytes, name):
            if num_bytes > self._share_bytes:
                raise _TooMuch
            yield
