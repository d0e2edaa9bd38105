"""Bodies of OpenAI's answers and chunks, as msgspec structs: a chunk is encoded in about a microsecond.

Fields are in OpenAI's order. UNSET leaves a field out; None is written as null.
"""

from __future__ import annotations

import time
import uuid

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from jaxsgl.text.sample import End

encode = msgspec.json.Encoder().encode


class PromptDetails(msgspec.Struct):
    """`cached_tokens`: prompt tokens whose keys and values were there already."""

    cached_tokens: int = 0


class Usage(msgspec.Struct):
    """Tokens of a whole answer, over all choices; a prompt with several samples counts once. In chunks: of one."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptDetails = msgspec.field(default_factory=PromptDetails)

    def add(self, end: End, sample: int) -> None:
        """Counts a sample that has ended."""
        if sample == 0:
            self.prompt_tokens += end.prompt_tokens
            self.prompt_tokens_details.cached_tokens += end.cached_tokens
        self.completion_tokens += end.completion_tokens
        self.total_tokens = self.prompt_tokens + self.completion_tokens


class Top(msgspec.Struct):
    """One of the most likely tokens."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(msgspec.Struct):
    """A token of a chat's answer, and what else was likely in its place."""

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


class Message(msgspec.Struct):
    """What the assistant says."""

    role: str
    content: str


class Delta(msgspec.Struct, omit_defaults=True):
    """What is new of a message."""

    role: str | None = None
    content: str | None = None


class ChatChoice(msgspec.Struct):
    """One sample, whole."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    matched_stop: int | str | None


class ChatDelta(msgspec.Struct):
    """News of one sample."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: int | str | UnsetType | None = UNSET


class TextChoice(msgspec.Struct):
    """One sample of a completion, whole or its news."""

    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    matched_stop: int | str | UnsetType | None = UNSET


class Answer(msgspec.Struct):
    """A whole answer, or a chunk of a streamed one. Chunks hold `usage` if it is asked for, or null."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice] | list[ChatDelta] | list[TextChoice]
    usage: Usage | UnsetType | None = UNSET


class Head(msgspec.Struct, frozen=True):
    """What all chunks of an answer begin with."""

    id: str
    object: str
    created: int
    model: str

    def answer(
        self,
        choices: list[ChatChoice] | list[ChatDelta] | list[TextChoice],
        usage: Usage | UnsetType | None = UNSET,
    ) -> bytes:
        """The JSON text of an answer or chunk."""
        return encode(Answer(self.id, self.object, self.created, self.model, choices, usage))


def new_head(prefix: str, kind: str, model: str) -> Head:
    """A head with an id of its own, such as chatcmpl-0123."""
    return Head(f"{prefix}-{uuid.uuid4().hex}", kind, int(time.time()), model)


def json_response(body: bytes) -> Response:
    """The answer that holds `body`."""
    return Response(body, media_type="application/json")
