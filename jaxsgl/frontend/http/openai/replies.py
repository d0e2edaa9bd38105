"""Bodies of OpenAI's answers and chunks, with the token counts and states of tokens in them.

Bodies are msgspec structs: a chunk is encoded in about a microsecond. Fields are in OpenAI's order; UNSET leaves a
field out, None is written as null. Knows pieces, but not what a request body means. chat.py, completions.py and
routes.py use it; SGLang's replies share how experts are written.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from jaxsgl.frontend.http.calls import event
from jaxsgl.frontend.http.openai.logprobs import ChatLogprobs, Logprobs, PromptLogprobs
from jaxsgl.frontend.http.openai.schemas import StreamOptions
from jaxsgl.requests.outputs import StatesSpec, TokenStates, hidden_states, routed_experts
from jaxsgl.requests.request import Request
from jaxsgl.text.sample import End, Piece

encode = msgspec.json.Encoder().encode


class PromptDetails(msgspec.Struct):
    """`cached_tokens` counts prompt tokens found in the prefix cache."""

    cached_tokens: int = 0


class CompletionDetails(msgspec.Struct):
    """Tokens of the request's `prediction` that steps verified, by whether they are in the output."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct):
    """Token counts of all choices of an answer (a prompt with several samples counts once), or of a chunk's choice.

    Answers to requests with a `prediction` have `completion_tokens_details`.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptDetails = msgspec.field(default_factory=PromptDetails)
    completion_tokens_details: CompletionDetails | UnsetType = UNSET

    def add(self, end: End, sample: int) -> None:
        """Counts a sample that has ended."""
        if sample == 0:
            self.prompt_tokens += end.prompt_tokens
            self.prompt_tokens_details.cached_tokens += end.cached_tokens
        self.completion_tokens += end.completion_tokens
        self.total_tokens = self.prompt_tokens + self.completion_tokens
        if self.completion_tokens_details is not UNSET:
            self.completion_tokens_details.accepted_prediction_tokens += end.speculated.accepted_prediction_tokens
            self.completion_tokens_details.rejected_prediction_tokens += end.speculated.rejected_prediction_tokens


def new_usage(predicted: bool) -> Usage:
    """Returns one of no tokens; `predicted`: the request has a prediction."""
    return Usage(completion_tokens_details=CompletionDetails() if predicted else UNSET)


class CalledFunction(msgspec.Struct):
    """The function of a call, or what a chunk adds to it."""

    arguments: str
    name: str | UnsetType = UNSET


class MessageCall(msgspec.Struct):
    """A tool call."""

    id: str
    type: str
    function: CalledFunction


class DeltaCall(msgspec.Struct):
    """The part of call number `index` that a chunk adds; the first has id, type and name."""

    index: int
    function: CalledFunction
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class AssistantMessage(msgspec.Struct):
    """What the assistant says; `content` is None if there are calls or reasoning alone."""

    role: str
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[MessageCall] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET


class Delta(msgspec.Struct, omit_defaults=True):
    """The part of a message that a chunk adds."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[DeltaCall] | None = None
    function_call: CalledFunction | None = None
    hidden_states: list[float] | None = None


class ChatChoice(msgspec.Struct):
    """One sample, whole."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    matched_stop: int | str | None
    stop_reason: int | str | None
    hidden_states: list[float] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    """The part of one sample that a chunk adds."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: int | str | UnsetType | None = UNSET
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class TextChoice(msgspec.Struct):
    """One sample of a completion, or the part of it that a chunk adds. The first chunk has the prompt's ids.

    A prompt's first sample has `prompt_logprobs`, if they are asked for.
    """

    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    matched_stop: int | str | UnsetType | None = UNSET
    stop_reason: int | str | UnsetType | None = UNSET
    hidden_states: list[float] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class AnswerBody(msgspec.Struct):
    """A whole answer, or a chunk of a streamed one. If usage is asked for, chunks without it hold null.

    `metadata` is SGLang's: a whole answer, and the chunk that ends a choice, name the version of the weights. So is
    `sglext`, which holds experts. `prompt_token_ids` and `prompt_logprobs` are those of a chat that asks for them.
    """

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice] | list[ChatDelta] | list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    metadata: dict[str, str] | UnsetType = UNSET
    sglext: dict[str, str] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class AnswerHead(msgspec.Struct, frozen=True):
    """The fields that begin an answer and each of its chunks."""

    id: str
    object: str
    created: int
    model: str

    def answer(
        self,
        choices: list[ChatChoice] | list[ChatDelta] | list[TextChoice],
        usage: Usage | UnsetType | None,
        weight_version: str | None = None,
        sglext: dict[str, str] | UnsetType = UNSET,
        prompt_token_ids: list[int] | UnsetType = UNSET,
        prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET,
    ) -> bytes:
        """Returns the JSON text of an answer or chunk, with the version of the weights that made it, if it is given."""
        metadata = UNSET if weight_version is None else {"weight_version": weight_version}
        head = (self.id, self.object, self.created, self.model)
        return encode(AnswerBody(*head, choices, usage, metadata, sglext, prompt_token_ids, prompt_logprobs))


def new_head(prefix: str, kind: str, model: str, given_id: str | None = None) -> AnswerHead:
    """Returns a head with the id that is given, or a new one, such as chatcmpl-0123."""
    return AnswerHead(given_id or f"{prefix}-{uuid.uuid4().hex}", kind, int(time.time()), model)


def json_response(body: bytes) -> Response:
    """Returns the answer that holds `body`."""
    return Response(body, media_type="application/json")


class UsageCounter:
    """Counts the tokens of one HTTP request's choices while their pieces arrive.

    Attributes:
      total: usage of the choices that have ended.
    """

    def __init__(
        self, options: StreamOptions | None, prompt_lens: Sequence[int], n: int, predicted: bool = False
    ) -> None:
        """Takes the number of tokens of each prompt; choice `number` is sample `number % n` of prompt `number // n`.

        `predicted`: the request has a prediction.
        """
        self.total = new_usage(predicted)
        self._at_end = options is not None and bool(options.include_usage)
        self._in_chunks = options is not None and bool(options.continuous_usage_stats)
        self._prompt_lens = prompt_lens
        self._n = n
        self._completion = [0] * (len(prompt_lens) * n)
        self._cached = [0] * (len(prompt_lens) * n)

    def add(self, number: int, piece: Piece) -> None:
        """Counts a piece of choice `number`."""
        self._completion[number] += len(piece.token_ids)
        self._cached[number] = piece.cached_tokens
        if piece.end is not None:
            self.total.add(piece.end, number % self._n)

    def add_dropped(self, num_tokens: int) -> None:
        """Counts tokens of samples that the answer doesn't have."""
        self.total.completion_tokens += num_tokens
        self.total.total_tokens += num_tokens

    def in_chunk(self, number: int) -> Usage | UnsetType | None:
        """Returns the usage in the next chunk of choice `number`: its tokens so far, as vLLM and SGLang count them."""
        if not self._in_chunks:
            return None if self._at_end else UNSET
        prompt, completion = self._prompt_lens[number // self._n], self._completion[number]
        return Usage(prompt, completion, prompt + completion, PromptDetails(self._cached[number]))

    def last_chunk(self, head: AnswerHead) -> bytes:
        """Returns the event with the total, or nothing if the client didn't ask for it."""
        return event(head.answer([], self.total)) if self._at_end else b""


class StatesCollector:
    """Hidden states and routed experts of all choices of a call while their pieces arrive.

    A choice holds the hidden state of its last token that has one, `sglext` of the answer the experts of the first
    choice; /generate returns all of them.

    Choice `number` is sample `number % n` of request `number // n`. `spec` says what the server returns.
    """

    def __init__(self, requests: Sequence[Request], spec: StatesSpec | None) -> None:
        sampling = requests[0].sampling
        self._spec = spec if sampling.wants_states else None
        self._sampling = sampling
        self._prompt_lens = [len(request.prompt_ids) for request in requests]
        self._parts: dict[int, list[TokenStates]] = {}

    def add(self, number: int, piece: Piece) -> None:
        """Takes a piece of choice `number`."""
        if self._spec is not None:
            self._parts.setdefault(number, []).extend(piece.states)

    @property
    def num_numbers(self) -> int:
        """Numbers to write, or to read before."""
        return sum(len(part.hidden) + len(part.experts) for parts in self._parts.values() for part in parts) // 4

    def hidden(self, number: int) -> list[float] | UnsetType:
        """Returns the state of the last token of choice `number` that has one; [] if no generated token does."""
        if self._spec is None or not self._sampling.return_hidden_states:
            return UNSET
        rows = hidden_states(self._parts.get(number, []), self._spec)
        generated: list[list[float]] = rows[self._prompt_lens[number // self._sampling.n] :][-1:].tolist()
        return generated[0] if generated else []

    def all_hidden(self) -> list[tuple[int, list[float]]]:
        """Returns the number and the last state of each choice that has pieces; nothing unless they are asked for."""
        numbered = ((number, self.hidden(number)) for number in sorted(self._parts))
        return [(number, state) for number, state in numbered if not isinstance(state, UnsetType)]

    def extension(self) -> dict[str, str] | UnsetType:
        """Returns `sglext`."""
        if self._spec is None or not self._sampling.return_routed_experts:
            return UNSET
        return {"routed_experts": experts_text(self._parts.get(0, []), self._spec)}


def experts_text(states: Sequence[TokenStates], spec: StatesSpec) -> str:
    """Returns base64 of int32 `[tokens, num_layers, top_k]`."""
    return base64.b64encode(routed_experts(states, spec).astype("<i4").tobytes()).decode()
