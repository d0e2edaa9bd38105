"""Reads what GGUF files say of a model: metadata, and where each tensor lies. Needs the `gguf` package, an extra.

Owns the files' headers. Never knows what a key means (`gguf_config.py`, `gguf_folder.py`) or what parameters are
made of (`gguf_tensors.py`). `gguf_folder.py` calls it, once for each model: a header with a vocabulary takes seconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from jaxsgl.errors import CheckpointError

MAGIC = b"GGUF"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class GgufTensor(NamedTuple):
    """Where a tensor lies: which of the files, the name of its format, its shape, and the bytes of the file."""

    file: int
    kind: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def gguf_package() -> ModuleType:
    """The `gguf` package. Raises `CheckpointError`, which names the extra, where it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(f"GGUF files need the gguf package: pip install 'jaxsgl[gguf]' ({error})") from error
    return gguf


def files_of(path: Path) -> list[Path]:
    """The files that are one model: `path` itself, or all parts of which it is one. Raises `CheckpointError`."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    parts = [path.with_name(f"{match[1]}-{number:05d}-of-{match[3]}.gguf") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise CheckpointError(f"{path} is one of {count} parts, of which {len(missing)} are missing: {missing[0]} ...")
    return parts


class GgufFiles:
    """The files of one model. Raises `CheckpointError` for one that is truncated or something else.

    Attributes:
      metadata: values by key; those of the first file.
      tensors: by the names of the files.
    """

    def __init__(self, paths: list[Path]) -> None:
        gguf = gguf_package()
        self.metadata: Mapping[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        for index, path in enumerate(paths):
            reader = _open(gguf, path)
            if index == 0:
                self.metadata = _values(reader, path)
            for tensor in reader.tensors:
                shape = tuple(int(length) for length in reversed(tensor.shape))
                kind, start, num_bytes = tensor.tensor_type.name, int(tensor.data_offset), int(tensor.n_bytes)
                self.tensors[tensor.name] = GgufTensor(index, kind, shape, start, num_bytes)
        count = self.metadata.get("split.count", 1)
        if count not in (0, len(paths)):
            raise CheckpointError(f"{paths[0]} says that it is one of {count} files, but its name names no parts")


def _values(reader: Any, path: Path) -> dict[str, Any]:
    """The metadata, without texts that only tell people something and can't be read.

    Raises `CheckpointError` for any other text that isn't in UTF-8.
    """
    values = {}
    for key, field in reader.fields.items():
        if key.startswith("GGUF."):
            continue
        try:
            values[key] = field.contents()
        except UnicodeDecodeError as error:
            if not key.startswith("general.") or key == "general.architecture":
                raise CheckpointError(
                    f"{path}: {key} is no text in UTF-8 ({error}): convert the model again"
                ) from error
    return values


def _open(gguf: ModuleType, path: Path) -> Any:
    try:
        with path.open("rb") as file:
            begin = file.read(len(MAGIC))
        if begin != MAGIC:
            raise CheckpointError(
                f"{path} is not a GGUF file: it begins with {begin!r} and not with {MAGIC!r}; fetch it again, since a "
                "page or a pointer of Git LFS may have been saved in its place"
            )
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError, KeyError, IndexError, OverflowError, TypeError) as error:
        raise CheckpointError(f"{path} is truncated or not a GGUF file ({error}): fetch it again") from error
    if reader.byte_order == "S":
        raise CheckpointError(
            f"{path} has its numbers in the other byte order than this machine (big-endian, mostly): fetch a file in "
            "this one, or convert the model again"
        )
    return reader
