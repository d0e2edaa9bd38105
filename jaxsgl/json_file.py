"""Reads the JSON objects in a model's folder, with errors that name the file. Every part may import this module."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from jaxsgl.errors import CheckpointError

MAX_BYTES = 256 << 20  # an index of tensors has some megabytes, a tokenizer some ten


def read_object(path: Path) -> dict[str, Any]:
    """Returns the object that `path` holds, a regular file of at most `MAX_BYTES`. Raises `CheckpointError`."""
    try:
        values = json.loads(_read(path))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a JSON {type(values).__name__}, but must hold an object")
    return values


def read_value(path: Path, key: str) -> Any:
    """Returns the value after the first `key` in an object that `path` holds; None without one.

    What follows the value is not parsed, as a vocabulary of megabytes. Raises `CheckpointError` as `read_object`.
    """
    try:
        text = _read(path).decode()
        found = re.search(rf'"{key}"\s*:\s*', text)
        return None if found is None else json.JSONDecoder().raw_decode(text, found.end())[0]
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read as JSON: {error}") from error


def _read(path: Path) -> bytes:
    """Raises `OSError` or `ValueError`; never waits for a pipe, nor reads a device without end."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a regular file")
        if found.st_size > MAX_BYTES:
            raise ValueError(f"it has {found.st_size} bytes, but {MAX_BYTES} are the most")
        return file.read(MAX_BYTES)
