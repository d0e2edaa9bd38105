"""Token ids to text, incrementally: the pieces of a stream, joined, are exactly the text of all its ids.

A detokenizer owns the bytes of characters that are not complete yet, and serves one stream; `Tokenizer.detokenizer`
makes it, `Sample` feeds it. Never knows requests. A character split over several tokens comes out with its last token,
so U+FFFD appears only where the whole text has it. Special tokens give no text.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_CHARACTER_IDS = 4  # a character has 4 bytes at most, and each id of one stands for a byte at least
MAX_HELD_IDS = 8  # after so many the window is cut, so that each token costs the same
MAX_PROMPT_IDS = 256  # at a prompt's end that are looked at


class Detokenizer(Protocol):
    """Turns one stream of token ids into text."""

    def follow(self, prompt_ids: Sequence[int]) -> None:
        """Begins the text where that of `prompt_ids` ends. May be called once, before anything is fed."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Returns the text that these ids complete."""

    def finish(self) -> str:
        """Returns what was held back, at the end of the stream."""


class NoText:
    """Gives no text at all: the detokenizer of a model without a tokenizer."""

    def follow(self, prompt_ids: Sequence[int]) -> None:
        """Changes nothing."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Returns nothing."""
        return ""

    def finish(self) -> str:
        """Returns nothing."""
        return ""


class TokenBytes:
    """The bytes of every token of a byte-level BPE vocabulary, looked up on first use; shared by all streams.

    Such a vocabulary writes each byte as one printable character (GPT-2, Radford et al. 2019). Added tokens may
    hold other characters: then they stand for their own UTF-8 bytes.
    """

    def __init__(self, id_to_token: Callable[[int], str | None], special_ids: Collection[int]) -> None:
        self._id_to_token = id_to_token
        self._byte_of_char = _byte_of_char()
        self._known: dict[int, bytes] = dict.fromkeys(special_ids, b"")

    def __getitem__(self, token_id: int) -> bytes:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._look_up(token_id)
        return found

    def _look_up(self, token_id: int) -> bytes:
        token = self._id_to_token(token_id) or ""  # models may have more ids than their tokenizers, as padding
        try:
            return bytes(self._byte_of_char[char] for char in token)
        except KeyError:
            return token.encode()


class ByteDetokenizer:
    """Serves byte-level BPE: text is the UTF-8 decoding of the tokens' bytes, with U+FFFD for invalid bytes."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def follow(self, prompt_ids: Sequence[int]) -> None:
        """Changes nothing: a token's bytes don't depend on the tokens before it."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Returns the text that these ids complete."""
        return self._decoder.decode(b"".join([self._token_bytes[token_id] for token_id in token_ids]))

    def finish(self) -> str:
        """Returns what was held back: U+FFFD for an incomplete character."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Serves all other tokenizers (SentencePiece): decodes a short window of ids, and emits what its new ids added.

    The window starts with the ids emitted last, because a token's text depends on the token before it: a space is
    stripped at the start of a text. Ids of single bytes are held back until a token of another kind follows, since a
    run of bytes is known to be valid only at its end. Ids outside `text_ids` (special or unknown) are dropped, as
    decoding does. A text that goes on ending in U+FFFD holds back no more than a character. `names` are the special
    tokens among `text_ids`.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        text_ids: Collection[int],
        byte_ids: Collection[int],
        names: Collection[int] = frozenset(),
    ) -> None:
        self._decode = decode
        self._text_ids = text_ids
        self._byte_ids = byte_ids
        self._names = names
        self._emitted_ids: list[int] = []
        self._new_ids: list[int] = []

    def follow(self, prompt_ids: Sequence[int]) -> None:
        """Begins the window with the prompt's last token that is no single byte, so that a first space is kept.

        Behind a special token a new text begins, as without a prompt. What the prompt has of a character that it
        doesn't end is not completed.
        """
        last = prompt_ids[-MAX_PROMPT_IDS:]
        if not last or not self._is_plain(last[-1]):
            return
        found = (token_id for token_id in reversed(last) if self._is_plain(token_id) and token_id not in self._byte_ids)
        before = next(found, None)
        if before is not None and not self._decode([before]).endswith(REPLACEMENT):
            self._emitted_ids = [before]

    def _is_plain(self, token_id: int) -> bool:
        return token_id in self._text_ids and token_id not in self._names

    def feed(self, token_ids: Sequence[int]) -> str:
        """Returns the text that these ids complete."""
        self._new_ids += [token_id for token_id in token_ids if token_id in self._text_ids]
        if not self._new_ids or self._new_ids[-1] in self._byte_ids:
            return ""
        return self._emit(final=False)

    def finish(self) -> str:
        """Returns what was held back."""
        return self._emit(final=True) if self._new_ids else ""

    def _emit(self, final: bool) -> str:
        emitted = self._decode(self._emitted_ids) if self._emitted_ids else ""
        text = self._decode(self._emitted_ids + self._new_ids)
        cut = len(self._new_ids)
        if not final and (len(text) <= len(emitted) or text.endswith(REPLACEMENT)):
            # Nothing visible yet, or a character that the next token may complete.
            if cut < MAX_HELD_IDS:
                return ""
            cut, text = self._cut(text)
        self._emitted_ids, self._new_ids = self._new_ids[:cut], self._new_ids[cut:]
        return text[len(emitted) :]

    def _cut(self, text: str) -> tuple[int, str]:
        """Where to cut the ids that are held back, and the text (which begins `text`) before the cut.

        No character reaches as far back as the cut. It is not inside of one either: its bytes would read differently
        without the rest.
        """
        ids = self._new_ids
        last = len(ids) - MAX_CHARACTER_IDS
        for cut in range(last, max(last - MAX_HELD_IDS, 0), -1):
            before = self._decode(self._emitted_ids + ids[:cut])
            if text.startswith(before) and not (ids[cut - 1] in self._byte_ids and ids[cut] in self._byte_ids):
                return cut, before
        return len(ids), text  # only bytes stand there, whose run has ended


def _byte_of_char() -> dict[str, int]:
    """Returns GPT-2's alphabet: printable Latin-1 bytes are written as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
