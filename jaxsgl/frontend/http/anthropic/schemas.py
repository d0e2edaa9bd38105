"""Bodies of /v1/messages and /v1/messages/count_tokens: types and limits, as openai/schemas.py has OpenAI's.

Content is kept as it came: conversation.py reads its blocks. Fields that a server of one model has no use for
(metadata, service_tier, cache_control, betas) are taken and ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from jaxsgl.frontend.http.bodies import (
    MAX_INT,
    Body,
    CacheSalt,
    LoraPath,
    Priority,
    Speculative,
    one_error,
    within,
)
from jaxsgl.frontend.http.openai.schemas import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from jaxsgl.requests.request import BOUNDS, MAX_STOP_STRINGS

Blocks = Annotated[
    str | Annotated[list[dict[str, Any]], Field(max_length=MAX_PARTS, fail_fast=True)],
    one_error(f'must be a text, or a list of blocks as {{"type": "text", "text": ...}}, {MAX_PARTS} at most'),
]


class AnthropicMessage(Body):
    """One turn: text, pictures, calls of tools and their results, reasoning."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class AnthropicTool(Body):
    """A tool; of those with a `type` of their own, which Anthropic's servers run, the model is shown none."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class AnthropicToolChoice(Body):
    """Which tools are called: `auto`, `any`, `tool` with a name, or `none`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None


class OutputFormat(Body):
    """The form of the answer's text."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    """How the answer is written."""

    effort: Annotated[str, Field(description="the template's reasoning_effort")] | None = None
    format: OutputFormat | None = None


class Conversation(Body):
    """What messages and their count have in common: all that the prompt is made of."""

    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Blocks | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[OutputFormat, Field(description="as output_config.format")] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(description="as in /v1/chat/completions")] | None = None
    lora_path: LoraPath | None = None


class MessagesRequest(Conversation):
    """Body of /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT)]
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, within(BOUNDS["temperature"])] | None = None
    top_p: Annotated[float, within(BOUNDS["top_p"])] | None = None
    top_k: Annotated[int, within(BOUNDS["top_k"])] | None = None
    metadata: dict[str, Any] | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    speculative: Speculative | None = None


class CountTokensRequest(Conversation):
    """Body of /v1/messages/count_tokens."""
