"""Makes a tokenizer's files of a GGUF file's metadata: vocabulary, merges, special tokens and chat template.

transformers builds the tokenizer, in code of its own that knows llama.cpp's words. What that leaves out is added here:
the token that begins a text, and that Llama 3 takes words of its vocabulary whole. Called by `gguf_folder.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxsgl.errors import CheckpointError

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
