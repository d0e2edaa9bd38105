"""Answers /v1/chat/completions: messages in the model's chat template, and the assistant's next turn.

Turns messages and their parts, media among them, into what chat templates know, collects what is to be loaded, and
refuses in clear words what they can't express. A `MessageWriter` makes the assistant's message of what a parser takes
apart: it never knows how a model writes. routes.py calls `answer_chat`; /tokenize shares `chat_prompt`.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.responses import Response

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.generation import FrontEnd, Prompted
from jaxsgl.frontend.http.bodies import (
    cut_object,
    in_rooms,
    options_of,
    refuse_prompt_scores_in_rooms,
    truncation_of,
)
from jaxsgl.frontend.http.calls import DONE, EventStream, event, start_all, whole
from jaxsgl.frontend.http.openai.logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs, prompt_logprobs
from jaxsgl.frontend.http.openai.replies import (
    AnswerHead,
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatDelta,
    Delta,
    DeltaCall,
    MessageCall,
    StatesCollector,
    UsageCounter,
    json_response,
    new_head,
    new_usage,
)
from jaxsgl.frontend.http.openai.schemas import (
    ROLES,
    AnswerOptions,
    ChatRequest,
    ContentPart,
    MediaUrl,
    MessageBody,
    TokenizeRequest,
    ToolCall,
    sampling_of,
)
from jaxsgl.frontend.http.openai.tools import (
    AnswerForm,
    answer_form,
    constrained,
    reasoning_budget,
    shown_tool,
    template_variables,
    tool_use,
)
from jaxsgl.frontend.legs import with_grammar
from jaxsgl.preprocess.sources import ImageSource, SoundSource, Source, VideoSource
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.text.answer import PlainParser
from jaxsgl.text.call_stream import Part
from jaxsgl.text.json_text import BROKEN, decoded
from jaxsgl.text.prompts import ChatPrompt
from jaxsgl.text.sample import Piece
from jaxsgl.text.tokenizer import TemplateOptions, Tokenizer, Truncation, Turn, names_role

_NOTHING = Delta()
_IMAGES = {"image_url": "image_url", "input_image": "image_url", "image": "image"}  # type -> field that names the file
_VIDEOS = {"video_url": "video_url", "input_video": "video_url", "video": "video"}
_SOUNDS = {"audio_url": "audio_url", "audio": "audio"}
_TEXTS = ("text", "input_text")


async def answer_chat(front_end: FrontEnd, body: ChatRequest, adapter: str = "") -> Response:
    """Returns the whole answer or its stream, of the model with `adapter`.

    Raises `InvalidRequest`, and as `Generator.start`.
    """
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    head = new_head("chatcmpl", kind, adapter or front_end.config.model_name, body.rid)
    request, form = await prepare_chat(front_end, body, head.id, adapter)
    predicted = body.prediction is not None
    if body.stream:
        usage = UsageCounter(body.stream_options, [len(request.prompt_ids)], request.sampling.n, predicted)
        return EventStream(_stream(front_end, request, head, usage, form, body))
    return json_response(await _whole(front_end, request, head, form, predicted, body))


async def prepare_chat(
    front_end: FrontEnd, body: ChatRequest, request_id: str, adapter: str = ""
) -> tuple[Request, AnswerForm]:
    """Returns the request for the assistant's next turn, of the model with `adapter`, and how to read its answer.

    Raises `InvalidRequest`, and as `Generator.prepare`.
    """
    generator = front_end.generator
    sampling = _sampling(body, generator.model.sampling_defaults)
    use = tool_use(body)
    truncation = truncation_of(body, generator.model.info.limits, sampling.max_tokens or 1)
    trusts = front_end.config.trust_request_chat_template
    prompt = chat_prompt(body, generator.model.tokenizer, use.shown, truncation, trusts)
    (options,) = in_rooms(options_of(body, [adapter]), body)
    refuse_prompt_scores_in_rooms([options], sampling)
    request = await generator.prepare(Prompted(prompt, sampling, request_id, options))
    config = front_end.config
    free_calls = config.free_tool_calls or config.engine.grammar_backend == "none"
    with generator.telling_other_legs([request]):
        form = answer_form(body, generator.model, use, request.prompt_ids)
        budget = reasoning_budget(body, generator.model, config)
        form, grammar = constrained(form, sampling.grammar, free_calls, budget)
    if grammar != sampling.grammar:
        request = with_grammar(request, grammar, config.engine.disaggregation.disaggregation_mode)
    return request, form


def chat_prompt(
    body: ChatRequest | TokenizeRequest,
    tokenizer: Tokenizer,
    tools: Sequence[dict[str, Any]] | None = None,
    truncation: Truncation | None = None,
    trusts_template: bool = False,
) -> ChatPrompt:
    """Returns the prompt that the messages of `body` make in the chat template. Raises `InvalidRequest`.

    The template gets `tools`, or those of `body` if None. What it makes is cut by `truncation`.
    `trusts_template`: `body` may bring a template of its own.
    """
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt are both true, but an answer either continues the last "
            "message or begins a new one: set one of them"
        )
    if body.chat_template and not trusts_template:
        raise InvalidRequest(
            "the request brings a chat_template, but the server takes none: leave it out, or start the server with "
            "--trust-request-chat-template"
        )
    options = TemplateOptions(
        tools=[shown_tool(tool) for tool in body.tools or ()] if tools is None else tools,
        add_generation_prompt=not body.continue_final_message and body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        variables=template_variables(body) if isinstance(body, ChatRequest) else body.chat_template_kwargs or {},
        template=body.chat_template or "",
    )

    @functools.cache
    def knows(role: str) -> bool:
        return names_role(options.template, role) if options.template else tokenizer.knows_role(role)

    media: list[Source] = []
    turns = [_turn(i, message, knows, media) for i, message in enumerate(body.messages or ())]
    with_special = bool(body.add_special_tokens)
    return ChatPrompt(turns, options, tuple(media), truncation=truncation, add_special_tokens=with_special)


def _turn(index: int, message: MessageBody, knows: Callable[[str], bool], media: list[Source]) -> Turn:
    role = message.role
    if role == "developer" and not knows(role):
        role = "system"
    elif role not in ROLES and not knows(role):
        raise InvalidRequest(
            f"messages[{index}].role is {role!r}, which the chat template doesn't name: send one of {', '.join(ROLES)}"
        )
    turn: dict[str, Any] = {"role": role, "content": content_of(index, message.content, media)}
    for name in ("name", "reasoning_content", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    if isinstance(message.reasoning, str):
        turn.setdefault("reasoning_content", message.reasoning)
    if message.tool_calls and not turn["content"] and "reasoning_content" in turn:
        turn["thinking"] = turn["reasoning_content"]  # gpt-oss's word, for reasoning before a call alone
    if message.tool_calls:
        turn["tool_calls"] = [_tool_call(index, call) for call in message.tool_calls]
    return turn


def _tool_call(index: int, call: ToolCall) -> dict[str, Any]:
    """Returns a call with its arguments as an object, which is what templates expect.

    Answers that were cut are sent back as they came, so arguments need not be whole.
    """
    arguments = call.function.arguments
    if isinstance(arguments, str):
        arguments = cut_object(arguments.strip())
        if arguments is None:
            raise InvalidRequest(
                f"messages[{index}]: the arguments of the call of {call.function.name} are no JSON object: send one, "
                "as text"
            )
    call_id = {} if call.id is None else {"id": call.id}
    return {**call_id, "type": "function", "function": {"name": call.function.name, "arguments": arguments or {}}}


def _sampling(body: ChatRequest, defaults: Mapping[str, float]) -> SamplingParams:
    """Raises `InvalidRequest`, also for what would need a grammar."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs are given, but logprobs is not true: set it to true")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return sampling_of(body, max_tokens, logprobs, body.prompt_logprobs, defaults)


def _echoed(body: ChatRequest) -> str:
    """Returns what the answer begins with: the last message, if that is the assistant's and the client wants it."""
    last = body.messages[-1]
    if not body.echo or last.role != "assistant":
        return ""
    content = content_of(len(body.messages) - 1, last.content, [])
    return content if isinstance(content, str) else ""


async def _whole(
    front_end: FrontEnd, request: Request, head: AnswerHead, form: AnswerForm, predicted: bool, asked: ChatRequest
) -> bytes:
    echoed = _echoed(asked)
    tokenizer = front_end.generator.model.tokenizer
    async with start_all(front_end.generator, [request], visible=form.visible) as generations:
        samples = await whole(generations)

    states = StatesCollector([request], front_end.generator.model.info.limits.states)

    def write() -> bytes:
        usage = new_usage(predicted)
        choices: list[ChatChoice] = []
        for index, sample in enumerate(samples):
            assert sample.end is not None
            end = sample.end
            usage.add(end, index)
            writer = MessageWriter(form)
            scores, message = _scores(request, tokenizer, sample, asked), writer.whole(sample.text)
            if echoed:
                message.content = echoed + (message.content or "")
            reason = finish_reason(end.reason.value, writer, form.use.legacy)
            states.add(index, sample)
            stops = (end.matched_stop, end.stop_reason(request.sampling))
            choice = ChatChoice(index, message, scores, reason, *stops, states.hidden(index))
            choice.token_ids = sample.token_ids if asked.return_token_ids else UNSET
            choices.append(choice)
        ids = request.prompt_ids if asked.return_token_ids else UNSET
        of_prompt: PromptLogprobs | UnsetType | None = UNSET
        if asked.prompt_logprobs is not None:
            of_prompt = prompt_logprobs(
                tokenizer, request.prompt_ids, samples[0].prompt_logprobs, asked.prompt_logprobs
            )
        return head.answer(choices, usage, samples[-1].weight_version, states.extension(), ids, of_prompt)

    return await front_end.generator.off_loop(sum(sample.num_scores for sample in samples), write)


async def _stream(
    front_end: FrontEnd, request: Request, head: AnswerHead, usage: UsageCounter, form: AnswerForm, asked: ChatRequest
) -> AsyncGenerator[bytes, None]:
    tokenizer = front_end.generator.model.tokenizer
    started = [False] * request.sampling.n
    scored = request.sampling.logprobs is not None
    writers = [MessageWriter(form) for _ in started]
    states = StatesCollector([request], front_end.generator.model.info.limits.states)

    def last_events() -> bytes:
        last = [ChatDelta(index, Delta(hidden_states=hidden)) for index, hidden in states.all_hidden()]
        chunks = [event(head.answer([delta], usage.in_chunk(delta.index))) for delta in last]
        return b"".join(chunks) + event(head.answer([], usage.in_chunk(0), sglext=states.extension()))

    async with start_all(front_end.generator, [request], visible=form.visible) as generations:
        async for piece in generations[0]:
            index = piece.index
            states.add(index, piece)
            role = b""
            if not started[index]:
                started[index] = True
                first = [ChatDelta(index, Delta("assistant", _echoed(asked)))]
                prompt_ids = request.prompt_ids if asked.return_token_ids else UNSET
                role = event(head.answer(first, usage.in_chunk(index), prompt_token_ids=prompt_ids))
            usage.add(index, piece)
            write = partial(_delta, request, tokenizer, index, piece, writers[index], form.use.legacy, asked)
            delta = await front_end.generator.off_loop(piece.num_scores, write) if scored else write()
            if delta is not None:
                version = None if piece.end is None else piece.weight_version
                *ahead, last = _reasoning_first(delta)
                told = b"".join(event(head.answer([each], usage.in_chunk(index))) for each in ahead)
                yield role + told + event(head.answer([last], usage.in_chunk(index), version))
            elif role:
                yield role
    if request.sampling.wants_states:
        yield await front_end.generator.off_loop(states.num_numbers, last_events)
    yield usage.last_chunk(head) + DONE


def _delta(
    request: Request,
    tokenizer: Tokenizer,
    index: int,
    piece: Piece,
    writer: MessageWriter,
    legacy: bool,
    asked: AnswerOptions,
) -> ChatDelta | None:
    """Returns None for a piece that adds nothing, such as a part of a character or of a call that is held back."""
    scores = _scores(request, tokenizer, piece, asked)
    delta = writer.delta(piece.text, final=piece.end is not None)
    token_ids = piece.token_ids if asked.return_token_ids else UNSET
    if piece.end is not None:
        reason = finish_reason(piece.end.reason.value, writer, legacy)
        stops = (piece.end.matched_stop, piece.end.stop_reason(request.sampling))
        return ChatDelta(index, delta, scores, reason, *stops, token_ids)
    if (asked.return_token_ids or scores is not None) and delta == _NOTHING:
        delta.content = ""
    return None if delta == _NOTHING else ChatDelta(index, delta, scores, token_ids=token_ids)


def _reasoning_first(delta: ChatDelta) -> list[ChatDelta]:
    """Returns `delta`, behind one of its reasoning if it also holds what follows: Cline and others read text first."""
    part = delta.delta
    if part.reasoning_content is None or part == Delta(reasoning_content=part.reasoning_content):
        return [delta]
    ahead = ChatDelta(delta.index, Delta(reasoning_content=part.reasoning_content))
    part.reasoning_content = None
    return [ahead, delta]


def _scores(request: Request, tokenizer: Tokenizer, piece: Piece, asked: AnswerOptions) -> ChatLogprobs | None:
    if request.sampling.logprobs is None:
        return None
    as_ids, named = bool(asked.return_tokens_as_token_ids), request.sampling.logprob_token_ids
    return chat_logprobs(tokenizer, piece.token_ids, piece.logprobs, as_ids, named)


def content_of(index: int, content: str | list[ContentPart] | None, media: list[Source]) -> str | list[dict[str, Any]]:
    """Returns the content of messages[index] for the template, and adds its pictures, videos and sounds to `media`.

    The texts of several parts are joined by line breaks, as in vLLM, unless there are pictures among them: then the
    template gets the parts. Raises `InvalidRequest` for a part of another kind.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts = [_part(f"messages[{index}].content[{number}]", part, media) for number, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(name: str, part: ContentPart, media: list[Source]) -> dict[str, Any]:
    if part.type in _TEXTS:
        if part.text is None:
            raise InvalidRequest(f'{name} is of type {part.type} without a text: send {{"type": "text", "text": ...}}')
        return {"type": "text", "text": part.text}
    if part.type == "refusal":  # of an assistant's earlier message
        return {"type": "text", "text": part.refusal or ""}
    if part.type in _IMAGES:
        media.append(ImageSource(_url(name, getattr(part, _IMAGES[part.type]), _IMAGES[part.type])))
        return {"type": "image"}
    if part.type in _VIDEOS:
        media.append(_video(name, part))
        return {"type": "video"}
    if part.type == "input_audio" or part.type in _SOUNDS:
        media.append(_sound(name, part))
        return {"type": "audio", "audio": ""}  # templates look for either
    raise InvalidRequest(
        f"{name} is of type {part.type[:100]}, but must be text, image_url, video_url, input_audio or audio_url: send "
        '{"type": "text", '
        '"text": ...} or {"type": "image_url", "image_url": {"url": ...}}'
    )


def _sound(name: str, part: ContentPart) -> SoundSource:
    if part.type != "input_audio":
        return SoundSource(_url(name, getattr(part, _SOUNDS[part.type]), _SOUNDS[part.type]))
    if part.input_audio is None or not part.input_audio.data:
        raise InvalidRequest(f'{name} holds no sound: send "input_audio": {{"data": base64, "format": ...}}')
    return SoundSource(f"data:;base64,{part.input_audio.data}")


def _video(name: str, part: ContentPart) -> VideoSource:
    field = _VIDEOS[part.type]
    given = getattr(part, field)
    fps = given.fps if isinstance(given, MediaUrl) and given.fps is not None else part.fps
    if isinstance(given, list):
        return VideoSource(tuple(given), fps)
    return VideoSource(_url(name, given, field), fps)


def _url(name: str, given: MediaUrl | str | None, field: str) -> str:
    url = given.url if isinstance(given, MediaUrl) else given
    if not url:
        raise InvalidRequest(f'{name} names no file: send "{field}": {{"url": "data:...;base64,..."}}')
    return url


class MessageWriter:
    """Turns the text of one sample into a message of reasoning, text and calls, whole or as deltas.

    Owns the ids of calls and what a stream has sent.
    """

    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        self._parser = form.parser()
        self._held_reasoning: list[str] = []
        self._arguments: list[str] | None = None  # of the last call

    def has_calls(self) -> bool:
        """Whether the message calls tools, and no stop string has cut the last call."""
        return self._arguments is not None and decoded("".join(self._arguments)) is not BROKEN

    def whole(self, text: str) -> AssistantMessage:
        """Returns the message that the sample's whole text makes."""
        reasoning, content = "", ""
        calls: list[MessageCall] = []
        for part in self._parts(text, final=True):
            match part.kind:
                case "reasoning":
                    reasoning += part.text
                case "content":
                    content += part.text
                case "call":
                    calls.append(MessageCall(self._form.new_call_id(), "function", CalledFunction("", part.text)))
                case "arguments":
                    calls[-1].function.arguments += part.text
        legacy = self._form.use.legacy
        return AssistantMessage(
            "assistant",
            None if not content and (calls or reasoning) else content,
            reasoning or UNSET,
            calls if calls and not legacy else UNSET,
            calls[0].function if calls and legacy else UNSET,
        )

    def delta(self, text: str, final: bool) -> Delta:
        """Returns what `text` adds to the message; `final`: nothing else follows."""
        if isinstance(self._parser, PlainParser):  # most answers, for each token
            return Delta(content=text or None)
        delta = Delta()
        calls: list[DeltaCall] = []
        for part in self._parts(text, final):
            match part.kind:
                case "reasoning":
                    delta.reasoning_content = (delta.reasoning_content or "") + part.text
                case "content":
                    delta.content = (delta.content or "") + part.text
                case "call":
                    calls.append(
                        DeltaCall(part.number, CalledFunction("", part.text), self._form.new_call_id(), "function")
                    )
                case "arguments":
                    if not calls or calls[-1].index != part.number:
                        calls.append(DeltaCall(part.number, CalledFunction("")))
                    calls[-1].function.arguments += part.text
        if calls and self._form.use.legacy:
            delta.function_call = calls[0].function
        elif calls:
            delta.tool_calls = calls
        return delta

    def _parts(self, text: str, final: bool) -> list[Part]:
        parts = self._parser.feed(text)
        if final:
            parts += self._parser.finish()
        for part in parts:
            if part.kind == "call":
                self._arguments = []
            elif part.kind == "arguments" and self._arguments is not None:
                self._arguments.append(part.text)
        if not self._form.include:
            return [part for part in parts if part.kind != "reasoning"]
        return self._in_one(parts, final) if self._form.in_one else parts

    def _in_one(self, parts: list[Part], final: bool) -> list[Part]:
        """Holds reasoning back until something else comes."""
        self._held_reasoning += [part.text for part in parts if part.kind == "reasoning"]
        others = [part for part in parts if part.kind != "reasoning"]
        if self._held_reasoning and (others or final):
            others.insert(0, Part("reasoning", "".join(self._held_reasoning)))
            self._held_reasoning.clear()
        return others


def finish_reason(reason: str, writer: MessageWriter, legacy: bool) -> str:
    """Returns OpenAI's reason: a sample that ended by itself with calls has ended to call."""
    if reason == "stop" and writer.has_calls():
        return "function_call" if legacy else "tool_calls"
    return reason
