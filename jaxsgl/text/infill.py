"""Fill in the middle: the token ids of a prompt of which the model writes what stands between two texts.

Models that are trained for it know three tokens, behind which the text before the gap, the text behind it and what
fills it stand, in this order. Families spell them differently: `SPELLINGS` is all there is to know about them. Never
knows requests or protocols; prompts.py makes ids of it, and /v1/completions asks which tokens end the middle.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxsgl.errors import InvalidRequest
from jaxsgl.text.tokenizer import Tokenizer, Truncation

_MARK = "☺"  # a text of its own before a suffix, where a tokenizer puts a space before texts


@dataclass(frozen=True)
class Spelling:
    """The names of one family's tokens.

    Attributes:
      prefix: stands before the text before the gap; `suffix` before the text behind it; `middle` at the end.
      ends: tokens after the middle that need not be EOS tokens of the model.
      spaced: the tokenizer puts a space before each text, which doesn't belong before the suffix.
    """

    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...] = ()
    spaced: bool = False


SPELLINGS = (
    Spelling(  # Qwen2.5, Qwen3; CodeGemma
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    Spelling(  # StarCoder, Granite
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ("<|endoftext|>", "<fim_pad>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>"),
    ),
    Spelling("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<|endoftext|>", "<fim-pad>")),  # SantaCoder
    Spelling("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ("<｜end▁of▁sentence｜>",)),  # DeepSeek
    Spelling("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", ("<|endoftext|>",)),  # GLM-4.5
    Spelling("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",), spaced=True),  # CodeLlama
)


def spelling_of(tokenizer: Tokenizer) -> Spelling:
    """Returns the names that are all in the vocabulary. Raises `InvalidRequest` if there are none."""
    for spelling in SPELLINGS:
        if None not in (tokenizer.id_of(name) for name in (spelling.prefix, spelling.suffix, spelling.middle)):
            return spelling
    raise InvalidRequest(
        "suffix is given, but the model's tokenizer has no tokens to fill in the middle (such as <|fim_prefix|>, "
        "<|fim_suffix|> and <|fim_middle|>): leave it out, or ask a model that was trained for it"
    )


def end_ids(tokenizer: Tokenizer) -> list[int]:
    """Returns the ids of the tokens that end the middle. Raises `InvalidRequest` as `spelling_of`."""
    ids = (tokenizer.id_of(name) for name in spelling_of(tokenizer).ends)
    return [token_id for token_id in ids if token_id is not None]


def infill_ids(
    tokenizer: Tokenizer, before: str, behind: str, add_special_tokens: bool, truncation: Truncation | None
) -> list[int]:
    """Returns the ids of a prompt that asks for what stands between two texts, the first of which may be empty.

    `add_special_tokens` puts the model's start token first, if it has one. `truncation` cuts the text before the gap.
    Raises `InvalidRequest`.
    """
    spelling = spelling_of(tokenizer)
    prefix, suffix, middle = (
        [token_id]
        for name in (spelling.prefix, spelling.suffix, spelling.middle)
        if (token_id := tokenizer.id_of(name)) is not None
    )
    head = [*(tokenizer.ids_before_texts() if add_special_tokens else ()), *prefix]
    own = tokenizer.encode(before, False) if before else []
    tail = [*suffix, *_suffix_ids(tokenizer, behind, spelling.spaced), *middle]
    ids = [*head, *own, *tail]
    return ids if truncation is None else truncation.of(ids, len(head), len(tail))


def _suffix_ids(tokenizer: Tokenizer, text: str, spaced: bool) -> list[int]:
    if spaced:
        mark, marked = tokenizer.encode(_MARK, False), tokenizer.encode(_MARK + text, False)
        if marked[: len(mark)] == mark:
            return marked[len(mark) :]
    return tokenizer.encode(text, False)
