"""Finds a model's folder: a local one, or the hub's snapshot of an id. The engine calls it first; knows no weights."""

from __future__ import annotations

import re
from pathlib import Path

from jaxsgl.errors import CheckpointError

# Configuration, weights, tokenizer, chat template; no other weight formats, no code.
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
HUB_ID = re.compile(r"(?:[\w-][\w.-]*/)?[\w-][\w.-]*")


def resolve_model_folder(name_or_path: str, revision: str | None = None) -> Path:
    """The local folder of that name, else the hub's snapshot of that id, downloaded or from the hub's cache.

    `revision` is a branch, tag or commit of a hub id (None: its main branch). With `HF_HUB_OFFLINE` set, only the cache
    is looked into. Raises `CheckpointError`, which says why neither was found.
    """
    folder = Path(name_or_path).expanduser()
    if name_or_path and folder.is_dir():
        if revision is not None:
            raise CheckpointError(
                f"--revision is {revision}, but {name_or_path} is a local folder: leave it out, or name a hub id"
            )
        return folder
    tried = f"model {name_or_path}: {folder.absolute()} is not a folder"
    if HUB_ID.fullmatch(name_or_path) is None:
        raise CheckpointError(f"{tried}, and it is not a hub id (owner/name) either")

    from huggingface_hub import snapshot_download  # seconds to import, and a local folder doesn't need it
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(name_or_path, revision=revision, allow_patterns=list(HUB_FILES)))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        what = name_or_path if revision is None else f"{name_or_path} at revision {revision}"
        raise CheckpointError(f"{tried}, and fetching hub id {what} failed: {reason}") from error
