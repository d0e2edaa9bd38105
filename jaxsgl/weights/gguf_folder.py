"""Makes a model's folder of a GGUF file: config.json and tokenizer of its metadata, and a table of its tensors.

The folder lies in the user's cache and points to the file. Everything that reads models' folders then reads this one;
only the tensors are read otherwise (`gguf_tensors.py`). It is made once for a file as it is: reading a vocabulary takes
seconds. Called by `loading.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jaxsgl.errors import CheckpointError
from jaxsgl.models.pooling import MODULES_FILE
from jaxsgl.weights.gguf_config import config_of, pooling_of
from jaxsgl.weights.gguf_file import GgufFiles, files_of, gguf_package
from jaxsgl.weights.gguf_tokenizer import end_tokens, save_tokenizer
from pallas_kernels.own_folder import own_folder

TABLE = "gguf_tensors"  # JSON; not named so, since files of that name are configuration
VERSION = 3  # of what is written; raise it with each change
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "chat_template.jinja", "vocab.json")
_TOWER = "mmproj"  # a vision tower's file, which is left out

logger = logging.getLogger(__name__)


def gguf_of(folder: Path) -> Path | None:
    """The GGUF file that is the model of `folder`; None if it has other weights, or none.

    Raises `CheckpointError` if it has several.
    """
    if (folder / TABLE).is_file() or any(folder.glob("*.safetensors")):
        return None
    found = sorted(path for path in folder.glob("*.gguf") if not path.name.startswith(_TOWER))
    models = [path for path in found if path == files_of(path)[0]]
    if len(models) > 1:
        names = ", ".join(path.name for path in models[:3])
        raise CheckpointError(f"{folder} has {len(models)} models as GGUF files ({names}): name the one to serve")
    return models[0] if models else None


def folder_of_gguf(path: Path, beside: Path | None = None) -> Path:
    """A folder for the GGUF file `path`, or for all files of which it is the first.

    `beside` is a folder whose tokenizer's files, if it has any, take the place of the one in the file.

    Raises:
      CheckpointError: the file is not a GGUF file, its model is not served, or the folder can't be made.
    """
    paths = [each.resolve() for each in files_of(path)]
    own = [each for each in map((beside or path).joinpath, _TOKENIZER) if beside is not None and each.is_file()]
    folder = _cache() / _digest([*paths, *own]) / paths[0].stem
    if (folder / TABLE).is_file():
        return folder
    try:
        own_folder(folder.parent.parent)
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent.parent) as beside_it:
            made = Path(beside_it, "made")
            made.mkdir()
            _write(paths, own, made)
            _put(made, folder)
    except OSError as error:
        raise CheckpointError(
            f"{path}: what it says of the model can't be kept in {folder} ({error}): name a cache with XDG_CACHE_HOME"
        ) from error
    logger.info("%s: config.json and tokenizer of its metadata are in %s", path, folder)
    return folder


def _put(made: Path, folder: Path) -> None:
    """Moves the folder `made` to its place, unless another process has put its own there meanwhile.

    What is there without a table was left by a start that was killed, and goes with what is beside `made`.
    """
    if not (folder / TABLE).is_file():
        with contextlib.suppress(FileNotFoundError):
            folder.rename(made.with_name("remains"))
    try:
        made.rename(folder)
    except OSError:
        if not (folder / TABLE).is_file():
            raise


def _write(paths: list[Path], tokenizer: list[Path], folder: Path) -> None:
    files = GgufFiles(paths)
    where = str(paths[0])

    def factors(name: str) -> list[float]:
        tensor = files.tensors[name]
        stored = gguf_package().GGUFReader(paths[tensor.file])
        found: list[float] = next(each.data for each in stored.tensors if each.name == name).reshape(-1).tolist()
        return found

    config = config_of(files.metadata, files.tensors, factors, where)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": end_tokens(files.metadata)})
    _write_pooling(pooling_of(files.metadata, where), folder)
    if tokenizer:
        for path in tokenizer:
            shutil.copyfile(path, folder / path.name)
    else:
        save_tokenizer(files.metadata, folder, where)
    names = [f"model-{index}.gguf" for index in range(len(paths))]
    for name, path in zip(names, paths, strict=True):
        (folder / name).symlink_to(path)
    table = {"architecture": files.metadata["general.architecture"], "files": names, "tensors": files.tensors}
    _write_json(folder / TABLE, table)


def _write_pooling(kind: str | None, folder: Path) -> None:
    """Says as sentence-transformers' folders do how embeddings are pooled, unless the model wasn't made for them."""
    if kind is None:
        return
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": ""}
    (folder / paths["Pooling"]).mkdir()
    _write_json(folder / paths["Pooling"] / "config.json", {"pooling_mode": kind})
    _write_json(folder / MODULES_FILE, [{"type": name, "path": path} for name, path in paths.items()])


def _write_json(path: Path, values: dict[str, Any] | list[Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _cache() -> Path:
    """A folder in the user's cache folder, which XDG_CACHE_HOME may move."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxsgl" / "gguf"


def _digest(paths: list[Path]) -> str:
    """Of files as they are (names, sizes and times of change), and of what reads them."""
    parts = [str(VERSION), version("transformers")]
    for path in paths:
        status = path.stat()
        parts.append(f"{path} {status.st_size} {status.st_mtime_ns}")
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=10).hexdigest()
