"""Finds a model's folder: a local one, or a snapshot from the Hugging Face hub. Knows nothing of what is inside."""

from __future__ import annotations

import re
from pathlib import Path

from jaxsgl.errors import CheckpointError

# Configuration, weights, tokenizer, chat template; no other weight formats, no code.
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
HUB_ID = re.compile(r"(?:[\w-][\w.-]*/)?[\w-][\w.-]*")


def resolve_model_folder(name_or_path: str) -> Path:
    """The local folder of that name, else the hub's snapshot of that id, downloaded or from the hub's cache.

    Raises `CheckpointError`, saying both what was looked for and why each failed.
    """
    folder = Path(name_or_path).expanduser()
    if name_or_path and folder.is_dir():
        return folder
    tried = f"model {name_or_path}: {folder.absolute()} is not a folder"
    if HUB_ID.fullmatch(name_or_path) is None:
        raise CheckpointError(f"{tried}, and it is not a hub id (owner/name) either")

    from huggingface_hub import snapshot_download  # seconds to import, and a local folder doesn't need it
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(name_or_path, allow_patterns=list(HUB_FILES)))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{tried}, and fetching hub id {name_or_path} failed: {reason}") from error
