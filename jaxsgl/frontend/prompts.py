"""From a prompt as a client sent it to token ids, refusing first what could never fit into the context.

Tokenizing takes time and memory in proportion to the prompt, and can't be interrupted: so its size is bounded before.
Knows nothing of requests; generation.py calls it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.tokenizer import ChatMessage, Tokenizer

INLINE_CHARS = 1000  # longer prompts are tokenized in a thread: about a millisecond on the event loop


class Message(Protocol):
    """A chat message, in any protocol's form."""

    @property
    def role(self) -> str:
        """Who speaks."""

    @property
    def content(self) -> str:
        """What is said."""


@dataclass(frozen=True)
class TextPrompt:
    """Text that is tokenized as it is."""

    text: str


@dataclass(frozen=True)
class IdsPrompt:
    """Token ids; copied only when their number is known to fit."""

    ids: Sequence[int]


@dataclass(frozen=True)
class ChatPrompt:
    """Messages for the chat template; converted only when their number is known to fit."""

    messages: Sequence[Message]


Prompt: TypeAlias = TextPrompt | IdsPrompt | ChatPrompt


async def tokenize(prompt: Prompt, tokenizer: Tokenizer, context_length: int, threads: Executor) -> list[int]:
    """Returns the ids of `prompt`, made in `threads` if it is long. Raises `InvalidRequest`."""
    if isinstance(prompt, IdsPrompt):
        if len(prompt.ids) >= context_length:
            raise InvalidRequest(
                f"the prompt has {len(prompt.ids)} tokens, but the context holds {context_length} with room for at "
                f"least one new token: shorten the prompt to {context_length - 1} tokens"
            )
        return list(prompt.ids)
    if isinstance(prompt, ChatPrompt) and len(prompt.messages) > context_length:
        raise InvalidRequest(
            f"the chat has {len(prompt.messages)} messages, but the context holds {context_length} tokens: "
            f"send at most {context_length} messages"
        )
    if _is_long(prompt):
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads, _encode, prompt, tokenizer, context_length)
    return _encode(prompt, tokenizer, context_length)


def _is_long(prompt: TextPrompt | ChatPrompt) -> bool:
    if isinstance(prompt, TextPrompt):
        return len(prompt.text) > INLINE_CHARS
    if len(prompt.messages) > INLINE_CHARS:
        return True
    return sum(len(message.role) + len(message.content) + 1 for message in prompt.messages) > INLINE_CHARS


def _encode(prompt: TextPrompt | ChatPrompt, tokenizer: Tokenizer, context_length: int) -> list[int]:
    max_bytes = context_length * tokenizer.max_token_bytes
    if isinstance(prompt, TextPrompt):
        _check_bytes("prompt's text", len(prompt.text.encode()), max_bytes, context_length)
        return tokenizer.encode(prompt.text)
    messages = [ChatMessage(message.role, message.content) for message in prompt.messages]
    num_bytes = sum(len(message.role.encode()) + len(message.content.encode()) for message in messages)
    _check_bytes("chat", num_bytes, max_bytes, context_length)
    return tokenizer.encode_chat(messages)


def _check_bytes(what: str, num_bytes: int, max_bytes: int, context_length: int) -> None:
    if num_bytes > max_bytes:
        raise InvalidRequest(
            f"the {what} has {num_bytes} bytes, but the {context_length} tokens that the context holds stand for at "
            f"most {max_bytes}: shorten the prompt to {context_length - 1} tokens"
        )
