"""Log-probabilities in OpenAI's answers: those of chats, of completions, and vLLM's of prompts; how tokens are named.

Knows pieces and tokenizers, but not what a request body means. chat.py, completions.py and responses.py use it;
SGLang's replies and /tokenize share the names of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from jaxsgl.messages.replies import TokenLogprob
from jaxsgl.requests.request import Request
from jaxsgl.text.detokenizer import Detokenizer
from jaxsgl.text.sample import detokenizer_of, follow
from jaxsgl.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # JSON has no minus infinity
_SPACES = re.compile(r"\s*")


class Top(msgspec.Struct):
    """One of the most likely tokens."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(msgspec.Struct):
    """A token of a chat's answer, and the most likely tokens in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Top]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities in chat's form."""

    content: list[ChatToken]


class Logprobs(msgspec.Struct):
    """Log-probabilities in the form of completions; the first token of an echoed prompt has none.

    `text_offset` counts characters of the choice's text before each token.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct):
    """A token of the prompt, or one that is likely in its place, in vLLM's form.

    `rank` counts from 1; of a token that is none of the most likely ones it isn't known.
    """

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]  # by token id; None for the first token


def name_of(tokenizer: Tokenizer, token_id: int, as_id: bool = False) -> str:
    """Returns the text of a token; bytes that are no whole character are written as `\\xe2`, as OpenAI does.

    So different tokens have different names. Without a tokenizer, or `as_id`, a name is `token_id:7`.
    """
    if as_id or not tokenizer.exists:
        return f"token_id:{token_id}"
    return tokenizer.token_bytes(token_id).decode(errors="backslashreplace")


def _others(of_token: TokenLogprob, named: Sequence[int]) -> Sequence[tuple[int, float]]:
    """Returns the tokens `named` by the request in the place of one, or the most likely ones if it names none."""
    return list(zip(named, of_token.named, strict=True)) if of_token.named else of_token.top


def chat_logprobs(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    logprobs: Sequence[TokenLogprob],
    as_ids: bool = False,
    named: Sequence[int] = (),
) -> ChatLogprobs:
    """Returns the log-probabilities of the tokens `ids` in chat's form.

    `as_ids`: by the ids of tokens. `named`: the request's `logprob_token_ids`, which stand behind the token itself in
    place of the most likely ones, as in vLLM.
    """

    def top(token_id: int, logprob: float) -> Top:
        return Top(
            name_of(tokenizer, token_id, as_ids), max(logprob, MIN_LOGPROB), list(tokenizer.token_bytes(token_id))
        )

    content = []
    for token_id, of_token in zip(ids, logprobs, strict=True):
        own = top(token_id, of_token.logprob)
        others = [top(other, logprob) for other, logprob in _others(of_token, named) if not named or other != token_id]
        content.append(ChatToken(own.token, own.logprob, own.bytes, [own, *others] if named else others))
    return ChatLogprobs(content)


class Echo(msgspec.Struct, frozen=True):
    """An echoed prompt.

    Attributes:
      text: of it.
      written: the places of the prompt's tokens that stand in the text, special tokens included; None: the text was
        made of all tokens, and special ones have none.
    """

    text: str
    written: range | None = None


class _Place:
    """Counts the characters of a text before each of its tokens.

    `text` is the whole text if it is known. It need not be what the tokens decode to: tokenizers put spaces into texts,
    and drop some next to special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, detokenizer: Detokenizer, text: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._text = text
        self.num_chars = 0

    def take(self, token_id: int) -> int:
        """Returns where the next token begins; the parts of a character begin where it does."""
        begin, piece = self.num_chars, self._detokenizer.feed([token_id])
        self.num_chars = begin + len(piece) if self._text is None else _end_of(piece, self._text, begin)
        own = self._tokenizer.token_bytes(token_id).decode(errors="replace")
        is_whole = own and piece.endswith(own)  # text that was held back may come with it
        return max(begin, self.num_chars - len(own)) if is_whole else begin


def _end_of(piece: str, text: str, begin: int) -> int:
    """Returns where `piece`, which stands in `text` at `begin`, ends there, but for spaces."""
    if text.startswith(piece, begin):
        return begin + len(piece)
    bare = piece.lstrip()
    if not bare:
        return begin
    found = _SPACES.match(text, begin)
    start = begin if found is None else found.end()
    return min((start if text.startswith(bare, start) else begin) + len(bare), len(text))


class LogprobsWriter:
    """Writes one choice's log-probabilities in the form of completions, piece by piece; tracks the text's length.

    `request` is the one that the choice answers. `as_ids`: tokens are named by their ids.
    """

    def __init__(self, tokenizer: Tokenizer, request: Request, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._named = request.sampling.logprob_token_ids
        self._place = _Place(tokenizer, follow(detokenizer_of(tokenizer, request.sampling), request))

    def prompt(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], echo: Echo) -> Logprobs:
        """Returns those of the echoed prompt; its first token has no log-probability."""
        if echo.written is None:
            place = _Place(self._tokenizer, self._tokenizer.detokenizer())
            offsets = [place.take(token_id) for token_id in ids]
        else:
            place = _Place(self._tokenizer, self._tokenizer.detokenizer(self._tokenizer.special_ids), echo.text)
            offsets = [
                place.take(token_id) if number in echo.written else place.num_chars
                for number, token_id in enumerate(ids)
            ]
        self._place.num_chars = len(echo.text)
        return self._written(ids, [None, *logprobs], offsets)

    def output(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Logprobs:
        """Returns those of the next tokens."""
        return self._written(ids, logprobs, [self._place.take(token_id) for token_id in ids])

    def _written(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], offsets: list[int]) -> Logprobs:
        scored = Logprobs([], [], [], offsets)
        for token_id, of_token in zip(ids, logprobs, strict=True):
            name = self._name(token_id)
            scored.tokens.append(name)
            scored.token_logprobs.append(None if of_token is None else max(of_token.logprob, MIN_LOGPROB))
            scored.top_logprobs.append(None if of_token is None else self._top(name, of_token))
        return scored

    def _top(self, name: str, of_token: TokenLogprob) -> dict[str, float]:
        """Returns the most likely tokens, or those that the request names, and the token itself."""
        top = {self._name(other): max(logprob, MIN_LOGPROB) for other, logprob in _others(of_token, self._named)}
        return {name: max(of_token.logprob, MIN_LOGPROB)} | top

    def _name(self, token_id: int) -> str:
        return name_of(self._tokenizer, token_id, self._as_ids)


def joined(first: Logprobs, second: Logprobs) -> Logprobs:
    """Returns `first` followed by `second`."""
    return Logprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def prompt_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None, num_top: int
) -> PromptLogprobs | None:
    """Returns those of a prompt, each with `num_top` likely tokens; None if it was aborted before it had any.

    The prompt's own token is the first of each place, where vLLM's clients look for it, also if it is a likely one.
    """
    if logprobs is None:
        return None
    answer: PromptLogprobs = [None]
    for token_id, of_token in zip(ids[1:], logprobs, strict=True):
        ranked: list[tuple[int, float, int | None]] = [(token_id, of_token.logprob, None)]
        ranked += [(other, logprob, rank) for rank, (other, logprob) in enumerate(of_token.top[:num_top], 1)]
        answer.append(
            {
                other: PromptLogprob(max(logprob, MIN_LOGPROB), rank, name_of(tokenizer, other))
                for other, logprob, rank in ranked
            }
        )
    return answer


def with_top(logprobs: Sequence[TokenLogprob], num_top: int) -> Sequence[TokenLogprob]:
    """Returns `logprobs` with at most `num_top` likely tokens each."""
    if not logprobs or len(logprobs[0].top) <= num_top:
        return logprobs
    return [TokenLogprob(each.logprob, each.top[:num_top]) for each in logprobs]
