"""Bodies of OpenAI's requests, with what vLLM and SGLang add to them. The OpenAPI description is made of them.

Holds types and limits: pydantic refuses what breaks them before a handler runs. Lists of objects are bounded, because
each object takes microseconds during which all streams stand still. Unknown fields are ignored, null is the same as
absent. `sampling_of` turns the fields that completions and chat share into `SamplingParams`. The other fields are read
by chat.py, completions.py and routes.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.http.bodies import (
    MAX_INT,
    MAX_TEXTS,
    AllowedTokenIds,
    BadWords,
    Body,
    CacheSalt,
    Count,
    IdLists,
    LogitBias,
    LogprobTokenIds,
    LoraPath,
    Priority,
    RequestId,
    Speculative,
    Stop,
    StopRegex,
    StopTokenIds,
    TextList,
    TokenIds,
    TopLogprobs,
    Truncated,
    one_error,
    refuse_others,
    sampling_params,
    within,
)
from jaxsgl.frontend.http.grammars import Constrained, grammar_of
from jaxsgl.preprocess.sources import MAX_FRAMES
from jaxsgl.requests.request import BOUNDS, MAX_SEED, SamplingParams

MAX_TOOLS = 512
MAX_MESSAGES = 8192
MAX_PARTS = 1024
MAX_TOOL_CALLS = 128
MAX_TEMPLATE_CHARS = 1 << 16
_CHAT_ALONE = frozenset({"prediction"})

Prompts = Annotated[
    str | TextList | TokenIds | IdLists,
    one_error(
        "must be a text, a list of texts, a list of token ids, or a list of lists of token ids; "
        f"{MAX_TEXTS} texts or lists at most"
    ),
]
Texts = Annotated[str | TextList, one_error(f"must be a text, or a list of 1 to {MAX_TEXTS} texts")]


class AnswerOptions(Body):
    """What an answer is called, and what it holds of tokens besides texts."""

    rid: Annotated[RequestId, Field(description="SGLang's: the answer's id, also for /abort_request")] | None = None
    return_token_ids: Annotated[bool, Field(description="vLLM's: answers hold token ids next to texts")] | None = None
    return_tokens_as_token_ids: (
        Annotated[bool, Field(description="vLLM's: log-probabilities name tokens as token_id:7")] | None
    ) = None
    logprob_token_ids: (
        Annotated[
            LogprobTokenIds, Field(description="vLLM's: log-probabilities of these tokens, in place of the likeliest")
        ]
        | None
    ) = None
    prompt_logprobs: (
        Annotated[int, within(BOUNDS["prompt_logprobs"], "vLLM's: likely tokens at each place of the prompt")] | None
    ) = None
    return_hidden_states: (
        Annotated[bool, Field(description="of the last token; of servers with --enable-return-hidden-states")] | None
    ) = None
    return_routed_experts: (
        Annotated[bool, Field(description="of all tokens; of servers with --enable-return-routed-experts")] | None
    ) = None


class StreamOptions(Body):
    """When a stream says how many tokens it has used."""

    include_usage: Annotated[bool, Field(description="the stream ends with a chunk that holds the usage")] | None = None
    continuous_usage_stats: (
        Annotated[bool, Field(description="each chunk holds the usage of its choice so far")] | None
    ) = None


class Sampled(Constrained, Truncated):
    """What completions and chat have in common: the model, how tokens are chosen, and when to stop."""

    model: str | None = None
    n: Annotated[int, within(BOUNDS["n"])] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, within(BOUNDS["temperature"])] | None = None
    top_p: Annotated[float, within(BOUNDS["top_p"])] | None = None
    top_k: Annotated[int, within(BOUNDS["top_k"])] | None = None
    min_p: Annotated[float, within(BOUNDS["min_p"])] | None = None
    frequency_penalty: Annotated[float, within(BOUNDS["frequency_penalty"])] | None = None
    presence_penalty: Annotated[float, within(BOUNDS["presence_penalty"])] | None = None
    repetition_penalty: Annotated[float, within(BOUNDS["repetition_penalty"])] | None = None
    logit_bias: Annotated[LogitBias, Field(description="token id, as text, to what is added to its logit")] | None = (
        None
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63, description="of its bits the lower 32 count")] | None = None
    stop: Stop | None = None
    stop_regex: StopRegex | None = None
    stop_token_ids: StopTokenIds | None = None
    allowed_token_ids: Annotated[AllowedTokenIds, Field(description="no other token is generated")] | None = None
    bad_words: Annotated[BadWords, Field(description="texts that the output does not get to hold")] | None = None
    min_tokens: Annotated[int, within(BOUNDS["min_tokens"])] | None = None
    ignore_eos: bool | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    extra_key: Annotated[CacheSalt, Field(description="SGLang's word for cache_salt")] | None = None
    lora_path: LoraPath | None = None
    speculative: Speculative | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: Annotated[bool, Field(description="SGLang's word for include_stop_str_in_output")] | None = None
    skip_special_tokens: Annotated[bool, Field(description="false: their names are in the text")] | None = None


def sampling_of(
    body: Sampled,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    defaults: Mapping[str, float] = MappingProxyType({}),
) -> SamplingParams:
    """Returns what `body` asks for, with its endpoint's readings of max_tokens and logprobs. Raises `InvalidRequest`.

    `defaults` hold for fields that it leaves out.

    Fields are refused if ignoring them would give a wrong answer.
    """
    refuse_others(body, _CHAT_ALONE)
    if body.stream and getattr(body, "prompt_logprobs", None) is not None:
        raise InvalidRequest("prompt_logprobs come with whole answers: leave stream out, or prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options are given, but stream is not true: leave them out, or set stream to true")
    return sampling_params(
        body,
        **{name: value for name, value in defaults.items() if getattr(body, name) is None},
        seed=None if body.seed is None else body.seed & MAX_SEED,
        max_tokens=max_tokens,
        include_stop_str_in_output=bool(body.include_stop_str_in_output or body.no_stop_trim),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar_of(body),
    )


class CompletionRequest(Sampled, AnswerOptions):
    """Body of /v1/completions."""

    prompt: Prompts
    max_tokens: (
        Annotated[Count, Field(description="0 only with echo or prompt_logprobs: nothing is generated")] | None
    ) = 16
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    best_of: (
        Annotated[int, within(BOUNDS["n"], "so many samples are generated, of which the n likeliest are returned")]
        | None
    ) = None
    suffix: (
        Annotated[str, Field(description="text behind the completion; of models with tokens to fill in the middle")]
        | None
    ) = None
    add_special_tokens: bool | None = None


class MediaUrl(Body):
    """Where a picture, video or sound is: a data: URL, or http(s) at a host that the server fetches from."""

    url: str
    detail: Annotated[str, Field(description="has no effect: the model's processor decides")] | None = None
    fps: Annotated[float, Field(ge=0.001, le=1000, description="frames a second, of a list or to take")] | None = None


class InputAudio(Body):
    """A sound in base64; `format` names its kind, which its content tells, too."""

    data: str
    format: str | None = None


Frames = Annotated[list[str], Field(min_length=1, max_length=MAX_FRAMES, fail_fast=True)]


class ContentPart(Body):
    """One part of a message's content: a text, a picture, a video or a sound (docs/multimodal.md)."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Annotated[MediaUrl | str, one_error('must be {"url": ...} or a URL')] | None = None
    image: Annotated[str, Field(description="as image_url, under Qwen's name")] | None = None
    video_url: Annotated[MediaUrl | str, one_error('must be {"url": ...} or a URL')] | None = None
    video: (
        Annotated[
            str | Frames,
            one_error(f"must be a URL, or a list of up to {MAX_FRAMES} URLs of frames"),
            Field(description="as video_url, under Qwen's name; or the URLs of its frames"),
        ]
        | None
    ) = None
    fps: Annotated[float, Field(ge=0.001, le=1000, description="as in video_url")] | None = None
    input_audio: Annotated[InputAudio, one_error('must be {"data": base64, "format": ...}')] | None = None
    audio_url: Annotated[MediaUrl | str, one_error('must be {"url": ...} or a URL')] | None = None
    audio: Annotated[str, Field(description="as audio_url, under Qwen's name")] | None = None


Content = Annotated[
    str | Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True)],
    one_error(
        f'must be a text, or a list of parts {{"type": "text", "text": ...}} or {{"type": "image_url", "image_url": '
        f'{{"url": ...}}}}, {MAX_PARTS} at most'
    ),
]


class FunctionCall(Body):
    """A call that the assistant made; `arguments` is a JSON object, as text or not."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Body):
    """A tool call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class MessageBody(Body):
    """One turn of the conversation."""

    role: Annotated[
        str,
        Field(
            min_length=1,
            max_length=64,
            description=f"{', '.join(ROLES)}; or another one that the chat template names",
        ),
    ]
    content: Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: Annotated[Any, Field(description="a text: as reasoning_content, under the name of other servers")] = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    function_call: Annotated[FunctionCall, Field(description="OpenAI's older word for one of tool_calls")] | None = None


class PredictedContent(Body):
    """What the answer is expected to be."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        """All of it. Raises `InvalidRequest` for parts that are no text."""
        if isinstance(self.content, str):
            return self.content
        for part in self.content:
            if part.type != "text" or part.text is None:
                raise InvalidRequest(
                    f"prediction.content has a part of type {part.type[:100]}, but answers are text: send text"
                )
        return "".join(part.text or "" for part in self.content)


ChatTemplate = Annotated[
    str, Field(max_length=MAX_TEMPLATE_CHARS, description="Jinja; of servers with --trust-request-chat-template")
]


class Function(Body):
    """What a tool is called and what it takes."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
    description: str | None = None
    parameters: Annotated[dict[str, Any], Field(description="a JSON schema; none: it takes nothing")] | None = None
    strict: Annotated[bool, Field(description="arguments hold to the schema whenever the tool is called")] | None = None


class Tool(Body):
    """A tool that the chat template describes to the model."""

    type: Literal["function"]
    function: Function


ToolChoice = Annotated[
    str | dict[str, Any],
    one_error("must be a text or an object"),
    Field(description="auto, none, required, a function by name, or OpenAI's allowed_tools"),
]


def _in_newer_words(messages: list[MessageBody]) -> list[MessageBody]:
    """Makes calls of `functions`, and what these returned, those of tools: chat templates know no others."""
    call_id = None
    for index, message in enumerate(messages):
        if message.function_call is not None and not message.tool_calls:
            call_id = f"call{index:05}"  # the same each time, or no prefix is cached; Mistral's have nine characters
            message.tool_calls = [ToolCall(id=call_id, function=message.function_call)]
        elif message.role == "function":
            message.role, message.tool_call_id = "tool", message.tool_call_id or call_id
    return messages


Messages = Annotated[
    list[MessageBody],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    AfterValidator(_in_newer_words),
]


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]
Functions = Annotated[list[Function], Field(max_length=MAX_TOOLS)]
ThinkingBudget = Annotated[int, Field(ge=-1, le=MAX_INT, description="tokens of reasoning at most; -1: any number")]
Documents = Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)]


class ChatReasoning(Body):
    """How a model is to reason, in one object, as SGLang and OpenRouter have it."""

    enabled: Annotated[bool, Field(description="as enable_thinking")] | None = None
    effort: Annotated[str, Field(description="as reasoning_effort")] | None = None
    reasoning_effort: Annotated[str, Field(description="SGLang's other word for effort")] | None = None


class ChatRequest(Sampled, AnswerOptions):
    """Body of /v1/chat/completions."""

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Annotated[bool, Field(description="false: one call at most")] | None = None
    functions: Annotated[Functions, Field(description="OpenAI's older word for tools")] | None = None
    function_call: Annotated[ToolChoice, Field(description="OpenAI's older word for tool_choice")] | None = None
    separate_reasoning: Annotated[bool, Field(description="false: reasoning stays in the text")] | None = None
    stream_reasoning: Annotated[bool, Field(description="false: reasoning comes in one chunk")] | None = None
    include_reasoning: Annotated[bool, Field(description="false: reasoning is dropped")] | None = None
    enable_thinking: Annotated[bool, Field(description="the template's variable of this name")] | None = None
    reasoning_effort: Annotated[str, Field(description="the template's; none: enable_thinking is false")] | None = None
    reasoning: (
        Annotated[
            ChatReasoning,
            one_error('must be {"enabled": true or false, "effort": ...}'),
            Field(description="in place of enable_thinking and reasoning_effort"),
        ]
        | None
    ) = None
    thinking_token_budget: ThinkingBudget | None = None
    thinking_budget: Annotated[ThinkingBudget, Field(description="as thinking_token_budget")] | None = None
    documents: Annotated[Documents, Field(description="for templates that know documents")] | None = None
    add_special_tokens: (
        Annotated[bool, Field(description="vLLM's: true: the tokenizer's start token, too, before the template's text")]
        | None
    ) = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: Annotated[bool, Field(description="vLLM's: a last message of the assistant begins the answer")] | None = None
    chat_template: ChatTemplate | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prediction: (
        Annotated[
            PredictedContent, Field(description="makes the answer faster where it is right (docs/speculation.md)")
        ]
        | None
    ) = None


class TokenizeRequest(Body):
    """Body of /tokenize: a text, several texts, or messages with what chat has for the template."""

    model: str | None = None
    prompt: Texts | None = None
    add_special_tokens: bool | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    tool_choice: Annotated[ToolChoice, Field(description="none: the template gets no tools")] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: ChatTemplate | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """Body of /detokenize."""

    model: str | None = None
    tokens: Annotated[
        TokenIds | IdLists, one_error(f"must be a list of token ids, or a list of 1 to {MAX_TEXTS} such lists")
    ]
    skip_special_tokens: (
        Annotated[
            bool, Field(description="default: SGLang's `text` has no special tokens, vLLM's `prompt` has their names")
        ]
        | None
    ) = None
