"""The tokens that end a generation, as a model's folder tells them.

generation_config.json or config.json name ids. tokenizer_config.json names the token that ends a turn of the chat
template, which fine-tunes without a generation_config.json tell nowhere else; vLLM and SGLang stop at it, too.
`arch_file` reads them here, so that all who ask for the model's EOS ids get the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxsgl.errors import CheckpointError
from jaxsgl.json_file import read_object, read_value
from jaxsgl.models.config_file import ConfigFile

TOKENIZER_CONFIG = "tokenizer_config.json"


def read_end_tokens(*configs: ConfigFile | None) -> tuple[int, ...]:
    """The ids (a number or a list) that the first of them names, generation_config.json before config.json; or none.

    Raises `CheckpointError` for anything but ids.
    """
    named = (config for config in configs if config is not None and config.get("eos_token_id") is not None)
    config = next(named, None)
    if config is None:
        return ()
    told = config.get("eos_token_id")
    ids = told if isinstance(told, list) else [told]
    if not all(type(each) is int for each in ids):
        raise CheckpointError(f"{config.path}: eos_token_id is {told!r}, but must be a token's id, or a list of ids")
    return tuple(ids)


def token_of_tokenizer(key: str, folder: Path, vocab_size: int, default: str | None = None) -> int | None:
    """The id of a token of tokenizer_config.json, or of the text `default` if the file doesn't name it.

    None: there is no such file, token or id below `vocab_size`.
    """
    path = folder / TOKENIZER_CONFIG
    if not path.is_file():
        return None
    config = read_object(path)
    token = _text_of(config.get(key, default))
    if token is None:
        return None
    found = _id_of(token, config, folder / "tokenizer.json")
    return found if found is not None and 0 <= found < vocab_size else None


def _text_of(token: Any) -> str | None:
    """A token is told as its text, or as an object with it."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _id_of(token: str, config: Mapping[str, Any], tokenizer_path: Path) -> int | None:
    """The id of `token`. The vocabulary, of megabytes, is read last: most folders list the token among the added."""
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, Mapping):
        found = next((id for id, each in decoder.items() if _text_of(each) == token), None)
        if found is not None and found.isdecimal():
            return int(found)
    if not tokenizer_path.is_file():
        return None
    added = read_value(tokenizer_path, "added_tokens")
    for each in added if isinstance(added, list) else ():
        if isinstance(each, Mapping) and each.get("content") == token:
            return _as_id(each.get("id"))
    model = read_object(tokenizer_path).get("model")
    return _id_in(model.get("vocab"), token) if isinstance(model, Mapping) else None


def _id_in(vocabulary: Any, token: str) -> int | None:
    """Ids by text, or (Unigram) a list of texts and scores in the order of ids."""
    if isinstance(vocabulary, Mapping):
        return _as_id(vocabulary.get(token))
    listed: Iterable[Any] = vocabulary if isinstance(vocabulary, list) else ()
    return next((i for i, each in enumerate(listed) if isinstance(each, list) and each[:1] == [token]), None)


def _as_id(value: Any) -> int | None:
    return value if type(value) is int else None
