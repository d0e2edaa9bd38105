"""Reads the JSON objects in a model's folder, with errors that name the file. Every part may import this module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxsgl.errors import CheckpointError


def read_object(path: Path) -> dict[str, Any]:
    """Returns the object that `path` holds. Raises `CheckpointError`."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a JSON {type(values).__name__}, but must hold an object")
    return values
