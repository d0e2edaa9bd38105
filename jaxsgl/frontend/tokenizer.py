"""Text and chat messages to token ids, by the model's own tokenizer; and a detokenizer per stream back.

Owns the tokenizer of transformers; never knows about requests or limits. Used by the front ends. Safe to call from
several threads: with neither padding nor truncation, encoding changes nothing in the tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from jaxsgl.errors import CheckpointError, InvalidRequest
from jaxsgl.frontend.detokenizer import ByteDetokenizer, Detokenizer, NoText, TokenBytes, WindowDetokenizer

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json")
_MIN_MAX_TOKEN_BYTES = 64
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation; `role` is whatever the model's template knows (user, assistant, system)."""

    role: str
    content: str


class Tokenizer:
    """Wraps a tokenizer of transformers, or None for a model folder that holds none (ids only).

    Attributes:
      max_token_bytes: text of more than n times as many bytes (UTF-8) surely has more than n tokens. Generous for
        small vocabularies, since a normalizer may shorten text before it becomes tokens.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._token_bytes: TokenBytes | None = None
        self._text_ids: frozenset[int] = frozenset()
        self._byte_ids: frozenset[int] = frozenset()
        self.max_token_bytes = _MIN_MAX_TOKEN_BYTES
        if tokenizer is None:
            return
        special_ids = _special_ids(tokenizer)
        self.max_token_bytes = max(_MIN_MAX_TOKEN_BYTES, _longest_token_bytes(tokenizer))
        if tokenizer.is_fast and _is_byte_level(tokenizer.backend_tokenizer):
            self._token_bytes = TokenBytes(tokenizer.backend_tokenizer.id_to_token, special_ids)
        else:
            vocabulary = tokenizer.get_vocab()
            self._text_ids = frozenset(vocabulary.values()) - special_ids
            self._byte_ids = frozenset(id for token, id in vocabulary.items() if _BYTE_TOKEN.fullmatch(token))

    @property
    def exists(self) -> bool:
        """False for a model without a tokenizer: only token ids are understood, and no text comes back."""
        return self._tokenizer is not None

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` works."""
        return self._tokenizer is not None and self._tokenizer.chat_template is not None

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, with the model's start token where it wants one. Raises `InvalidRequest`."""
        if not text:
            raise InvalidRequest("the prompt's text is empty: send at least one character")
        ids: list[int] = self._or_refuse().encode(text)
        return ids

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Returns the ids of `messages` in the chat template, ready for the assistant's turn.

        Raises `InvalidRequest` if the model has no template or its template refuses the messages.
        """
        import jinja2

        tokenizer = self._or_refuse()
        if not self.has_chat_template:
            raise InvalidRequest("the model has no chat template: send text or token_ids instead of chat messages")
        if not messages:
            raise InvalidRequest("the chat has 0 messages: send at least one")
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            ids: list[int] = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        except (jinja2.TemplateError, ValueError) as error:
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}") from None
        return ids

    def detokenizer(self) -> Detokenizer:
        """Returns a new detokenizer, for one stream."""
        if self._tokenizer is None:
            return NoText()
        if self._token_bytes is not None:
            return ByteDetokenizer(self._token_bytes)
        return WindowDetokenizer(self.decode, self._text_ids, self._byte_ids)

    def decode(self, ids: list[int]) -> str:
        """Returns the text of a whole sequence of ids, special tokens left out and spaces left as they are."""
        text: str = self._or_refuse().decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def check_text_comes_back(self, what: str) -> None:
        """Raises `InvalidRequest` for `what`, if the model has no tokenizer."""
        if self._tokenizer is None:
            raise InvalidRequest(
                f"{what} are looked for in text, but the model folder has no tokenizer: leave them out"
            )

    def _or_refuse(self) -> Any:
        if self._tokenizer is None:
            raise InvalidRequest("the model folder has no tokenizer: send token_ids instead of text")
        return self._tokenizer


def load_tokenizer(model: str) -> Tokenizer:
    """Loads the tokenizer of a local folder or hub id.

    Raises `CheckpointError` if the folder is missing or its tokenizer is broken. A folder without any tokenizer file
    gives a `Tokenizer` that understands no text. Takes a few seconds: it imports transformers.
    """
    folder = Path(model)
    if folder.is_dir() and not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return Tokenizer(None)
    if not folder.exists() and (folder.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1):
        raise CheckpointError(f"the model folder {model} does not exist")
    from transformers import AutoTokenizer

    try:
        return Tokenizer(AutoTokenizer.from_pretrained(model, trust_remote_code=False))
    except Exception as error:  # transformers and tokenizers raise all kinds here, bare Exception included
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"the tokenizer of {model} can't be loaded: {type(error).__name__}: {reason}") from error


def _is_byte_level(backend: Any) -> bool:
    if backend.decoder is None:
        return False
    decoder = json.loads(backend.decoder.__getstate__())
    while decoder["type"] == "Sequence" and len(decoder["decoders"]) == 1:
        (decoder,) = decoder["decoders"]
    return bool(decoder["type"] == "ByteLevel")


def _longest_token_bytes(tokenizer: Any) -> int:
    """Bytes of text that the longest token stands for, or more: byte-level ones write a byte as one character."""
    added = tokenizer.get_added_vocab()
    byte_level = tokenizer.is_fast and _is_byte_level(tokenizer.backend_tokenizer)
    return max(
        (len(token) if byte_level and token not in added else len(token.encode()) for token in tokenizer.get_vocab()),
        default=1,
    )


def _special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that decoding skips: by the added tokens' flag, plus those that slow tokenizers call special."""
    flagged = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(flagged if tokenizer.is_fast else flagged | set(tokenizer.all_special_ids))
