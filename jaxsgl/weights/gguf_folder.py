"""Makes a model's folder of a GGUF file: config.json and tokenizer of its metadata, and a table of its tensors.

The folder lies in the user's cache and points to the file. Everything that reads models' folders then reads this one;
only the tensors are read otherwise (`gguf_tensors.py`). It is made once for a file as it is: reading a vocabulary takes
seconds. Called by `loading.py`.

transformers builds the tokenizer, in code of its own that knows llama.cpp's words. What that leaves out is added here:
the token that begins a text, and that Llama 3 takes words of its vocabulary whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxsgl.errors import CheckpointError
from jaxsgl.weights.gguf_config import config_of, end_tokens
from jaxsgl.weights.gguf_file import GgufFiles, files_of, gguf_package
from pallas_kernels.own_folder import own_folder

TABLE = "gguf_tensors"  # JSON; not named so, since files of that name are configuration
VERSION = 2  # of what is written; raise it with each change
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "chat_template.jinja", "vocab.json")
_TOWER = "mmproj"  # a vision tower's file, which is left out
_PREFIX = "tokenizer.ggml."
# llama.cpp's keys, with transformers' names for them.
_KEYS = {
    "model": "tokenizer_type", "pre": "pre_tokenizer_type", "tokens": "tokens", "scores": "scores",
    "token_type": "token_type", "merges": "merges", "bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id",
    "unknown_token_id": "unk_token_id", "padding_token_id": "pad_token_id", "add_space_prefix": "add_prefix_space",
}  # fmt: skip
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon3")  # how their texts are cut into words
_PLAIN = ("default", "gpt-2")  # as GPT-2's, which transformers does unless it is told otherwise
_CONTROL, _ADDED = 3, 4  # llama.cpp's types of special tokens, and of others that texts are searched for
OWN_FILES = "put the model's own tokenizer.json and tokenizer_config.json next to the file, and name their folder"

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


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _cache() -> Path:
    """A folder in the user's cache folder, which XDG_CACHE_HOME may move."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxsgl" / "gguf"


def _digest(paths: list[Path]) -> str:
    """Of files as they are: names, sizes and times of change."""
    parts = [str(VERSION)]
    for path in paths:
        status = path.stat()
        parts.append(f"{path} {status.st_size} {status.st_mtime_ns}")
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=10).hexdigest()


def save_tokenizer(metadata: Mapping[str, Any], folder: Path, where: str) -> None:
    """Writes the files into `folder`; none if the GGUF file has no tokenizer, so that requests must be of ids.

    Raises `CheckpointError` for a tokenizer that transformers can't build, or would build otherwise than the model's.
    """
    told = {ours: metadata[_PREFIX + key] for key, ours in _KEYS.items() if _PREFIX + key in metadata}
    kind = told.get("tokenizer_type", "no_vocab")
    if kind in ("no_vocab", "none") or "tokens" not in told:
        return
    from transformers import PreTrainedTokenizerFast  # seconds to import

    try:
        from transformers.integrations.gguf import convert_gguf_tokenizer
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError as error:
        raise CheckpointError(
            f"tokenizers of GGUF files need a newer transformers: pip install 'jaxsgl[gguf]' ({error})"
        ) from error
    words = told.get("pre_tokenizer_type", _PLAIN[0])
    if kind == "gpt2" and words not in _PLAIN and words not in GGUF_PRE_TOKENIZER_SPLITS:
        raise CheckpointError(f"{where}: its tokenizer cuts texts into words as {words}, not known here: {OWN_FILES}")
    try:
        backend, _ = convert_gguf_tokenizer(str(metadata["general.architecture"]), told)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{where}: no tokenizer can be made of its metadata ({error!r}): {OWN_FILES}") from error
    backend = _as_told(backend, told)
    if words in _LLAMA3:
        backend.model.ignore_merges = True
    special = {
        name: told["tokens"][metadata[f"{_PREFIX}{word}_token_id"]]
        for name, word in _SPECIAL.items()
        if f"{_PREFIX}{word}_token_id" in metadata
    }
    backend.post_processor = _begins_and_ends(metadata, kind, words, special)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)
    wrapped.chat_template = metadata.get("tokenizer.chat_template")
    wrapped.save_pretrained(folder)


def _begins_and_ends(metadata: Mapping[str, Any], kind: str, words: str, special: Mapping[str, str]) -> Any:
    """Puts the tokens that begin and end a text around it, if the file says so or llama.cpp does so without a word."""
    from tokenizers.processors import TemplateProcessing

    begins = metadata.get(f"{_PREFIX}add_bos_token", kind == "llama" or words in _LLAMA3) and "bos_token" in special
    ends = metadata.get(f"{_PREFIX}add_eos_token", False) and "eos_token" in special
    parts = [*([special["bos_token"]] if begins else []), "$A", *([special["eos_token"]] if ends else [])]
    named = ((special.get(f"{word}_token"), metadata.get(f"{_PREFIX}{word}_token_id")) for word in ("bos", "eos"))
    ids = {token: token_id for token, token_id in named if token is not None}
    return TemplateProcessing(single=parts, pair=[*parts, "$B"], special_tokens=list(ids.items()))


def _as_told(backend: Any, told: Mapping[str, Any]) -> Any:
    """The tokenizer with the added tokens of the file and no others.

    transformers adds defaults of its classes beyond the vocabulary. In one of bytes it leaves out those with letters
    that no byte stands for, as DeepSeek's special ones.
    """
    from tokenizers import Tokenizer

    model = json.loads(backend.to_str())
    spelled = {token_id: token for token, token_id in model["model"]["vocab"].items()}
    model["added_tokens"] = [each for each in model["added_tokens"] if each["id"] < len(told["tokens"])]
    known = {each["id"] for each in model["added_tokens"]}
    kinds = told.get("token_type") or () if told["tokenizer_type"] == "gpt2" else ()
    for token_id, (token, kind) in enumerate(zip(told["tokens"], kinds, strict=False)):
        if kind in (_CONTROL, _ADDED) and token_id not in known:
            model["model"]["vocab"][token] = model["model"]["vocab"].pop(spelled[token_id])
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            model["added_tokens"].append({"id": token_id, "content": token, "special": kind == _CONTROL, **flags})
    model["added_tokens"].sort(key=lambda each: each["id"])
    return Tokenizer.from_str(json.dumps(model))
