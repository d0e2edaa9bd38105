"""Log-probabilities in OpenAI's two forms, with tokens by their texts."""

from __future__ import annotations

from collections.abc import Sequence

from jaxsgl.frontend.http.openai.replies import ChatLogprobs, ChatToken, Logprobs, Top
from jaxsgl.messages import TokenLogprob
from jaxsgl.text.tokenizer import Tokenizer

LEAST = -9999.0  # JSON has no minus infinity


def name_of(tokenizer: Tokenizer, token_id: int) -> str:
    """The text of a token; bytes that are no whole character are written as `\\xe2`, as OpenAI does.

    So different tokens have different names. Without a tokenizer a name is `token_id:7`.
    """
    if not tokenizer.exists:
        return f"token_id:{token_id}"
    return tokenizer.token_bytes(token_id).decode(errors="backslashreplace")


def chat_logprobs(tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> ChatLogprobs:
    """Of the tokens `ids`, in chat's form."""

    def top(token_id: int, logprob: float) -> Top:
        return Top(name_of(tokenizer, token_id), max(logprob, LEAST), list(tokenizer.token_bytes(token_id)))

    content = []
    for token_id, of_token in zip(ids, logprobs, strict=True):
        own = top(token_id, of_token.logprob)
        others = [top(other, logprob) for other, logprob in of_token.top]
        content.append(ChatToken(own.token, own.logprob, own.bytes, others))
    return ChatLogprobs(content)


class LogprobsWriter:
    """Log-probabilities of one choice in the form of completions, piece by piece: it knows the text's length so far."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._num_chars = 0

    def prompt(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], num_chars: int) -> Logprobs:
        """Of an echoed prompt of `num_chars` characters; its first token has no log-probability."""
        scored = self.output(ids, [None, *logprobs])
        self._detokenizer = self._tokenizer.detokenizer()
        self._num_chars = num_chars
        return scored

    def output(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> Logprobs:
        """Of the next tokens."""
        scored = Logprobs([], [], [], [])
        for token_id, of_token in zip(ids, logprobs, strict=True):
            name = name_of(self._tokenizer, token_id)
            scored.tokens.append(name)
            scored.token_logprobs.append(None if of_token is None else max(of_token.logprob, LEAST))
            scored.top_logprobs.append(None if of_token is None else self._top(name, of_token))
            scored.text_offset.append(self._num_chars)
            self._num_chars += len(self._detokenizer.feed([token_id]))
        return scored

    def _top(self, name: str, of_token: TokenLogprob) -> dict[str, float]:
        """The token itself is always among them."""
        top = {name_of(self._tokenizer, other): max(logprob, LEAST) for other, logprob in of_token.top}
        return {name: max(of_token.logprob, LEAST)} | top


def joined(first: Logprobs, second: Logprobs) -> Logprobs:
    """Both, one behind the other."""
    return Logprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )
