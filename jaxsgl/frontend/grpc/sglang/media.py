"""Pictures in SGLang's worker protocol: a gateway has preprocessed them, and says where their placeholders are.

What it sends must agree with itself, or the request is refused before anything is computed: rows with grids, grids with
placeholders. Values are turned back into the pixels that they were normalized from. service.py calls `media_of`.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from smg_grpc_proto import sglang_scheduler_pb2 as pb

from jaxsgl.errors import InvalidRequest
from jaxsgl.preprocess.settings import ProcessorSettings
from jaxsgl.preprocess.sources import ImageSource, Source
from jaxsgl.requests.media import MediaItem, MediaLimits, digest_of, sglang_pad_id

GRIDS = "image_grid_thw"
MAX_SIDE = 1 << 16  # of a grid
_TYPES = {"float32": "<f4", "int64": "<i8", "uint32": "<u4", "int32": "<i4"}
_NOT_BUILT = ("video_urls", "audio_urls", "video_data", "audio_data")


def sources_of(inputs: pb.MultimodalInputs) -> tuple[Source, ...]:
    """Returns the pictures that are still to be preprocessed: those of a client that sends no `pixel_values`."""
    for name in _NOT_BUILT:
        if getattr(inputs, name):
            raise InvalidRequest(f"mm_inputs.{name} is not supported: send pixel_values, image_data or image_urls")
    if inputs.HasField("pixel_values"):
        return ()
    return (*map(ImageSource, inputs.image_urls), *map(ImageSource, inputs.image_data))


def media_of(
    inputs: pb.MultimodalInputs, settings: ProcessorSettings, limits: MediaLimits, sglang_ids: bool
) -> tuple[MediaItem, ...]:
    """Returns the pictures in `inputs.pixel_values`. Raises `InvalidRequest` for what doesn't fit together."""
    if not inputs.HasField("pixel_values"):
        return ()
    if not settings.takes_pixels:
        raise InvalidRequest("mm_inputs.pixel_values is not supported for this model: send image_data or image_urls")
    grids = _grids(inputs, limits)
    rows_of = [h * w for _, h, w in grids]
    if sum(rows_of) > limits.max_request_patches:
        raise InvalidRequest(
            f"{GRIDS} has {sum(rows_of)} patches, but a request may have {limits.max_request_patches}: send fewer"
        )
    columns = limits.patch_bytes
    values = _tensor("pixel_values", inputs.pixel_values, (sum(rows_of), columns), ("float32",))
    pixels = _pixels(values, settings)
    items: list[MediaItem] = []
    first = 0
    for grid, rows, place in zip(grids, rows_of, inputs.mm_placeholders, strict=True):
        of_image = pixels[first : first + rows].tobytes()
        digest = digest_of(of_image, grid, settings.name_of(settings.image))
        pad_id = sglang_pad_id(digest) if sglang_ids else None
        items.append(MediaItem(digest, place.offset, place.length, grid, of_image, pad_id))
        first += rows
    return tuple(sorted(items, key=lambda item: item.offset))


def _grids(inputs: pb.MultimodalInputs, limits: MediaLimits) -> list[tuple[int, int, int]]:
    count = len(inputs.mm_placeholders)
    if not 1 <= count <= limits.max_items:
        raise InvalidRequest(f"mm_placeholders has {count} entries, but must have 1 to {limits.max_items}")
    if GRIDS not in inputs.model_specific_tensors:
        raise InvalidRequest(f"pixel_values come without model_specific_tensors[{GRIDS!r}]: send both")
    given = _tensor(GRIDS, inputs.model_specific_tensors[GRIDS], (count, 3), ("int64", "int32", "uint32"))
    grids = [(int(t), int(h), int(w)) for t, h, w in given]
    for grid in grids:
        if grid[0] != 1 or not all(1 <= side <= MAX_SIDE for side in grid):
            raise InvalidRequest(f"{GRIDS} has {grid}, but must have (1, h, w) with sides of 1 to {MAX_SIDE}")
    return grids


def _tensor(name: str, given: pb.TensorData, shape: tuple[int, ...], types: tuple[str, ...]) -> npt.NDArray[np.generic]:
    """Returns a tensor of just this `shape`, one of `types`, without a copy."""
    if given.dtype not in types:
        raise InvalidRequest(f"{name} is of type {given.dtype[:50]!r}, but must be {' or '.join(types)}")
    if tuple(given.shape) != shape:
        raise InvalidRequest(f"{name} has the shape {list(given.shape)[:8]}, but must have {list(shape)}")
    dtype = np.dtype(_TYPES[given.dtype])
    num_bytes = math.prod(shape) * dtype.itemsize
    if len(given.data) != num_bytes:
        raise InvalidRequest(f"{name} has {len(given.data)} bytes, but its shape {list(shape)} needs {num_bytes}")
    return np.frombuffer(given.data, dtype).reshape(shape)


def _pixels(values: npt.NDArray[np.generic], settings: ProcessorSettings) -> npt.NDArray[np.uint8]:
    """Returns `[rows, columns]` what was normalized by the model's mean and deviation, which it must have been."""
    by_channel = values.astype(np.float32).reshape(len(values), len(settings.image.mean), -1)
    mean, std = (np.array(x, np.float32)[:, None] for x in (settings.image.mean, settings.image.std))
    by_channel = (by_channel * std + mean) * np.float32(255)
    if not (by_channel.min(initial=0) >= -1 and by_channel.max(initial=0) <= 256):  # true for NaN, too
        raise InvalidRequest(
            f"pixel_values are not normalized by the model's mean {settings.image.mean} and deviation "
            f"{settings.image.std}: they stand for pixels beyond 0 to 255"
        )
    return np.clip(np.rint(by_channel), 0, 255).astype(np.uint8).reshape(values.shape)
