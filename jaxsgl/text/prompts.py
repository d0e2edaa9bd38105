"""What clients send as texts, and their token ids: prompts, and the bad words of sampling parameters.

Tokenizing takes time and memory in proportion to the prompt and can't be interrupted, so a prompt that could never fit
into the context is refused before any work goes into it, or loses most of what is to be cut of it. Never knows
requests or protocols; generation.py calls it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, cast

import msgspec
from msgspec.structs import replace

from jaxsgl.errors import InvalidRequest
from jaxsgl.preprocess.sources import Source
from jaxsgl.requests.media import MediaItem
from jaxsgl.requests.request import MAX_ALLOWED_TOKEN_IDS, SamplingParams, check_prompt_len, too_long
from jaxsgl.text.infill import infill_ids
from jaxsgl.text.tokenizer import TemplateOptions, Tokenizer, Truncation, Turn, num_bytes_of

INLINE_CHARS = 1000  # about a millisecond on the event loop; longer prompts are tokenized in a thread
CUT_MARGIN = 1024  # bytes that are tokenized beside those that are kept, which tokens at a cut depend on
SLICE = 32  # prompts of a batch that a thread takes at a time

MAX_CALL_IDS = 4 * MAX_ALLOWED_TOKEN_IDS  # of all requests of a call, each of which carries its own

Rewrite: TypeAlias = Callable[[str], str]


class PromptMessage(Protocol):
    """A chat message, in any protocol's form."""

    @property
    def role(self) -> str:
        """The speaker, as the chat template names it."""

    @property
    def content(self) -> str:
        """The text."""


@dataclass(frozen=True)
class TextPrompt:
    """Text, tokenized as it is. `add_special_tokens` puts the model's start token before it, if the model has one.

    `media` are its pictures and videos, each with a placeholder in the text; `rewrite` changes the text before it is
    tokenized. Prompts with `truncation` have no media. With a `suffix`, which excludes media, the model is asked
    for what stands between the text, which may be empty then, and the suffix.
    """

    text: str
    add_special_tokens: bool = True
    media: tuple[Source, ...] = ()
    rewrite: Rewrite | None = None
    truncation: Truncation | None = None
    suffix: str = ""


@dataclass(frozen=True)
class IdsPrompt:
    """Token ids. They are copied only when their number is known to fit.

    `media` are pictures and videos, each with one placeholder among the ids; `items` are pictures that are patches
    already, with a placeholder for each token.
    """

    ids: Sequence[int]
    media: tuple[Source, ...] = ()
    items: tuple[MediaItem, ...] = ()
    truncation: Truncation | None = None


@dataclass(frozen=True)
class ChatPrompt:
    """Messages for the chat template, in any protocol's form. They are converted only when their number may fit.

    `media` are the pictures and videos of their contents, in order; `rewrite` changes the text that the template makes.
    What the tokenizer adds to texts is left to the template, unless `add_special_tokens`.
    """

    messages: Sequence[PromptMessage | Turn]
    options: TemplateOptions = field(default_factory=TemplateOptions)
    media: tuple[Source, ...] = ()
    rewrite: Rewrite | None = None
    truncation: Truncation | None = None
    add_special_tokens: bool = False


Prompt: TypeAlias = TextPrompt | IdsPrompt | ChatPrompt


async def tokenize(
    prompt: Prompt, tokenizer: Tokenizer, context_length: int, threads: Executor, least_output: int = 1
) -> list[int]:
    """Returns the ids of `prompt`, made in `threads` if it is long. Raises `InvalidRequest`.

    The context must have room for `least_output` (0 or 1) tokens more.
    """
    if isinstance(prompt, IdsPrompt):
        return _copy_ids(prompt, context_length, least_output)
    if isinstance(prompt, TextPrompt):
        is_long = len(prompt.text) + len(prompt.suffix) > INLINE_CHARS
        return await _run(threads if is_long else None, encode_text, prompt, tokenizer, context_length)
    if len(prompt.messages) > context_length:
        raise too_long(
            f"the chat has {len(prompt.messages)} messages, but this model's maximum context length is "
            f"{context_length} tokens: send at most {context_length} messages"
        )
    turns = [_turn(message) for message in prompt.messages]
    options = prompt.options
    num_bytes = len(msgspec.json.encode((turns, options.tools, options.variables)))
    is_long = num_bytes > INLINE_CHARS or bool(options.template)
    run_in = threads if is_long else None
    return await _run(run_in, _encode_chat, turns, prompt, num_bytes, tokenizer, context_length)


async def tokenize_all(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, context_length: int, threads: Executor, least_output: int = 1
) -> list[list[int]]:
    """Returns the ids of each of `prompts`. A batch goes through `threads` in slices. Raises `InvalidRequest`."""
    if len(prompts) == 1 or any(isinstance(prompt, ChatPrompt) for prompt in prompts):
        return [await tokenize(prompt, tokenizer, context_length, threads, least_output) for prompt in prompts]

    def encode(part: Sequence[Prompt]) -> list[list[int]]:
        return [
            encode_text(prompt, tokenizer, context_length)
            if isinstance(prompt, TextPrompt)
            else _copy_ids(cast(IdsPrompt, prompt), context_length, least_output)
            for prompt in part
        ]

    ids: list[list[int]] = []
    for first in range(0, len(prompts), SLICE):
        part = prompts[first : first + SLICE]
        ids += await asyncio.get_running_loop().run_in_executor(threads, encode, part)
    return ids


def _copy_ids(prompt: IdsPrompt, context_length: int, least_output: int) -> list[int]:
    if prompt.truncation is not None:
        return prompt.truncation.of(prompt.ids)
    check_prompt_len(len(prompt.ids), context_length, least_output)
    return list(prompt.ids)


async def _run(threads: Executor | None, encode: Callable[..., list[int]], *args: object) -> list[int]:
    if threads is None:
        return encode(*args)
    return await asyncio.get_running_loop().run_in_executor(threads, encode, *args)


def _turn(message: PromptMessage | Turn) -> Turn:
    return message if isinstance(message, Mapping) else {"role": message.role, "content": message.content}


def encode_text(prompt: TextPrompt, tokenizer: Tokenizer, context_length: int) -> list[int]:
    """Returns the ids of a text. Raises `InvalidRequest` at once if it can't fit."""
    text = prompt.text
    if prompt.truncation is not None and not prompt.suffix:
        text = cut_text(text, tokenizer, context_length, prompt.truncation)
    else:
        num_bytes = num_bytes_of(text) + num_bytes_of(prompt.suffix)
        check_bytes("prompt's text", num_bytes, tokenizer, context_length)
    if prompt.suffix:
        return infill_ids(tokenizer, text, prompt.suffix, prompt.add_special_tokens, prompt.truncation)
    text = text if prompt.rewrite is None else prompt.rewrite(text)
    return tokenizer.encode(text, prompt.add_special_tokens, prompt.truncation)


def cut_text(text: str, tokenizer: Tokenizer, context_length: int, truncation: Truncation) -> str:
    """Returns a part of a long text that holds all that `truncation` keeps. Raises `InvalidRequest` for bad Unicode."""
    most = context_length * tokenizer.max_token_bytes + CUT_MARGIN
    if num_bytes_of(text) <= most:
        return text
    whole = text.encode()
    part = whole[:most] if truncation.first else whole[-most:]
    return part.decode(errors="ignore")  # without half a character at the cut


def encode_prediction(text: str, tokenizer: Tokenizer, context_length: int) -> list[int]:
    """Returns the ids of a text that is expected as an output. Raises `InvalidRequest` at once if it can't fit."""
    num_bytes, max_bytes = num_bytes_of(text), context_length * tokenizer.max_token_bytes
    if num_bytes > max_bytes:
        raise InvalidRequest(
            f"the prediction has {num_bytes} bytes, but the {context_length} tokens of the context stand for at most "
            f"{max_bytes}: shorten it"
        )
    return tokenizer.encode(text, add_special_tokens=False)


def _encode_chat(
    turns: list[Turn], prompt: ChatPrompt, num_bytes: int, tokenizer: Tokenizer, context_length: int
) -> list[int]:
    """Bounds what goes into the chat template, and what comes out of it."""
    check_bytes("chat", num_bytes, tokenizer, context_length)
    text = tokenizer.render_chat(turns, prompt.options)
    if prompt.rewrite is not None:
        text = prompt.rewrite(text)
    check_bytes("chat", num_bytes_of(text), tokenizer, context_length)
    return tokenizer.encode_rendered(text, prompt.add_special_tokens, prompt.truncation)


def check_bytes(what: str, num_bytes: int, tokenizer: Tokenizer, context_length: int) -> None:
    """Raises `InvalidRequest` for a text of more bytes than the tokens of a context can stand for."""
    max_bytes = context_length * tokenizer.max_token_bytes
    if num_bytes > max_bytes:
        raise too_long(
            f"the {what} has {num_bytes} bytes, but this model's maximum context length is {context_length} tokens, "
            f"which stand for at most {max_bytes}: shorten the prompt to {context_length - 1} tokens"
        )


def with_bad_word_ids(samplings: Sequence[SamplingParams], tokenizer: Tokenizer) -> list[SamplingParams]:
    """Returns `samplings` with their bad words as sequences of tokens, of which the last may never follow the others.

    This is vLLM's rule: a word is tokenized as an output begins with it and as it follows a space; other spellings in
    tokens are not found. Raises `InvalidRequest`.

    Equal ones in a row, as the prompts of a call have them, are tokenized once.
    """
    made: list[SamplingParams] = []
    for number, sampling in enumerate(samplings):
        same = number > 0 and sampling is samplings[number - 1]
        made.append(made[-1] if same else _with_ids(sampling, tokenizer))
    num_ids = sum(len(one.allowed_token_ids) + sum(map(len, one.bad_word_ids)) for one in made)
    if num_ids > MAX_CALL_IDS:
        raise InvalidRequest(
            f"allowed_token_ids and bad_words of all prompts have {num_ids} tokens, but {MAX_CALL_IDS} are the most: "
            "send fewer prompts in a call"
        )
    return made


def num_bad_chars(samplings: Sequence[SamplingParams]) -> int:
    """Characters that are to be tokenized at most."""
    return sum(len(word) for sampling in samplings for word in sampling.bad_words)


def _with_ids(sampling: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    if not sampling.bad_words:
        return sampling
    ids = dict.fromkeys(sampling.bad_word_ids)
    for word in sampling.bad_words:
        bare = word.lstrip() or word
        for text in (bare, f" {bare}"):
            ids[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    return replace(sampling, bad_words=(), bad_word_ids=tuple(ids))
