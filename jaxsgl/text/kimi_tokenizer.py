"""Kimi's tokenizer, made of tiktoken.model: the tokens that the program in its folder would give, which is never run.

tokenizer_config.json names the added tokens. The words that a text is cut into are told in that program alone.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

CLASS = "TikTokenTokenizer"  # as tokenizer_config.json calls it
_NO_HAN = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_UPPER, _LOWER = rf"[\p{{Lu}}\p{{Lt}}{_NO_HAN}", rf"[\p{{Ll}}{_NO_HAN}"
_BEFORE, _AFTER = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
WORDS = "|".join(
    (
        r"[\p{Han}]+",
        f"{_BEFORE}{_UPPER}*{_LOWER}+{_AFTER}",
        f"{_BEFORE}{_UPPER}+{_LOWER}*{_AFTER}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


class KimiTokenizer(PreTrainedTokenizerFast):
    """Gives tools to the chat template with sorted keys, as Kimi's own program does."""

    @functools.wraps(PreTrainedTokenizerFast.apply_chat_template)  # clients' variables are checked by its parameters
    def apply_chat_template(self, conversation: Any, tools: Any = None, **arguments: Any) -> Any:
        """As transformers does it."""
        return super().apply_chat_template(conversation, tools=_sorted(tools), **arguments)


def kimi_tokenizer(path: Path, config: Mapping[str, Any], chat_template: str | None) -> KimiTokenizer:
    """Returns the tokenizer of a tiktoken.model, with the added tokens of tokenizer_config.json.

    Raises `ValueError` if a line of the file is no token and its rank, `KeyError` if an added token has no content.
    """
    ranks = dict(_ranks(path))
    backend = _byte_pairs(ranks)
    added = {int(token_id): token for token_id, token in config.get("added_tokens_decoder", {}).items()}
    backend.add_tokens(
        [  # those without a name too, since ids are given in order
            AddedToken(token["content"], special=bool(token.get("special")), normalized=False)
            for token_id in range(len(ranks), max(added, default=0) + 1)
            for token in [added.get(token_id, {"content": f"<|reserved_token_{token_id}|>", "special": True})]
        ]
    )
    return KimiTokenizer(
        tokenizer_object=backend,
        name_or_path=str(path.parent),
        chat_template=chat_template or config.get("chat_template"),
        **{name: config[name] for name in _NAMED if isinstance(config.get(name), str)},
    )


def _ranks(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yields each token with its rank, which is its id: a lower one is merged earlier."""
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            yield base64.b64decode(token), int(rank)
        except ValueError:
            raise ValueError(
                f"line {number} of {path.name} is no token in base64 and its rank: {line[:80]!r}"
            ) from None


def _byte_pairs(ranks: Mapping[bytes, int]) -> Tokenizer:
    """Returns what merges bytes as tiktoken does: of all pairs in a word that are a token, the one of lowest rank."""
    letters = bytes_to_unicode()
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = [
        (spelled[left], spelled[right])
        for token in sorted(ranks, key=ranks.__getitem__)
        for left, right in sorted(
            (halves for halves in _halves(token) if halves[0] in ranks and halves[1] in ranks),
            key=lambda pair: (ranks[pair[0]], ranks[pair[1]]),
        )
    ]
    vocabulary = {spelled[token]: rank for token, rank in ranks.items()}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _halves(token: bytes) -> Iterator[tuple[bytes, bytes]]:
    return ((token[:cut], token[cut:]) for cut in range(1, len(token)))


def _sorted(told: Any) -> Any:
    if isinstance(told, dict):
        return {name: _sorted(told[name]) for name in sorted(told)}
    return [_sorted(each) for each in told] if isinstance(told, list) else told
