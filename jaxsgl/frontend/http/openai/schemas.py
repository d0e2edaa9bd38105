"""Bodies of OpenAI's requests, with what vLLM and SGLang add to them. The OpenAPI description is made of them.

Types and limits only: pydantic refuses what breaks them before a handler runs. Lists of objects are bounded, since it
takes microseconds for each, in which all streams stand still. Unknown fields are ignored, null is the same as absent.
What the values mean is the business of sampling.py, messages.py and the handlers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from jaxsgl.request import (
    MAX_LOGIT_BIAS,
    MAX_PRIORITY,
    MAX_SAMPLES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    MIN_PRIORITY,
)

MAX_INT = 2**31 - 1
MAX_TOOLS = 512
MAX_TEXTS = 1024  # and prompts of other kinds
MAX_MESSAGES = 8192
MAX_PARTS = 1024
MAX_TOOL_CALLS = 128


def _one_error(words: str) -> WrapValidator:
    """A union that fails says `words`, instead of an error for each of its members."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("union", "{words}", {"words": words}) from None

    return WrapValidator(validate)


TokenIds = Annotated[list[int], Field(fail_fast=True)]
Prompts = Annotated[
    str
    | Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]
    | TokenIds
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)],
    _one_error(
        "must be a text, a list of texts, a list of token ids, or a list of lists of token ids; "
        f"{MAX_TEXTS} texts or lists at most"
    ),
]
Texts = Annotated[
    str | Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)],
    _one_error(f"must be a text, or a list of 1 to {MAX_TEXTS} texts"),
]
Stop = Annotated[
    str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)],
    _one_error(f"must be a text, or a list of up to {MAX_STOP_STRINGS} texts"),
]
Count = Annotated[int, Field(ge=0, le=MAX_INT)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Priority = Annotated[
    int,
    Field(ge=MIN_PRIORITY, le=MAX_PRIORITY, description="ignored unless the server schedules by priority"),
]
TokenIdText = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]


class Body(BaseModel):
    """What holds for all objects in bodies. Unknown fields are kept aside, so that some can be refused."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Body):
    """When a stream says how many tokens it has used."""

    include_usage: Annotated[bool, Field(description="the stream ends with a chunk that holds the usage")] | None = None
    continuous_usage_stats: (
        Annotated[bool, Field(description="each chunk holds the usage of its choice so far")] | None
    ) = None


class Sampled(Body):
    """What completions and chat have in common: the model, how tokens are chosen, and when to stop."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0.0, le=1e4)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=2.0)] | None = None
    logit_bias: (
        Annotated[
            dict[TokenIdText, Annotated[float, Field(ge=-100.0, le=100.0)]],
            Field(max_length=MAX_LOGIT_BIAS, description="token id, as text, to what is added to its logit"),
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63, description="of its bits the lower 32 count")] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    priority: Priority | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: Annotated[bool, Field(description="SGLang's word for include_stop_str_in_output")] | None = None
    skip_special_tokens: Annotated[bool, Field(description="only true is supported")] | None = None


class CompletionRequest(Sampled):
    """Body of /v1/completions."""

    prompt: Prompts
    max_tokens: Annotated[Count, Field(description="0 only with echo: nothing is generated")] | None = 16
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Annotated[Count, Field(description="only the value of n is supported")] | None = None
    suffix: Annotated[str, Field(description="not supported")] | None = None
    add_special_tokens: bool | None = None


class ContentPart(Body):
    """One part of a message's content; only texts are supported."""

    type: str
    text: str | None = None


Content = Annotated[
    str | Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True)],
    _one_error(f'must be a text, or a list of parts {{"type": "text", "text": ...}}, {MAX_PARTS} at most'),
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


class MessageBody(Body):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None


class Function(Body):
    """What a tool is called and what it takes."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """A tool that the chat template tells the model of."""

    type: Literal["function"]
    function: Function


ToolChoice = Annotated[
    str | dict[str, Any],
    _one_error("must be a text or an object"),
    Field(description="only auto and none are supported"),
]


class ResponseFormat(Body):
    """Only the type `text` is supported."""

    type: str


Messages = Annotated[list[MessageBody], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]


class ChatRequest(Sampled):
    """Body of /v1/chat/completions."""

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    response_format: ResponseFormat | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(Body):
    """Body of /tokenize: a text, several texts, or messages with what chat has for the template."""

    model: str | None = None
    prompt: Texts | None = None
    add_special_tokens: bool | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """Body of /detokenize."""

    model: str | None = None
    tokens: TokenIds
