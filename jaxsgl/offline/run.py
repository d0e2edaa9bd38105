"""What all kinds of offline use share: engine and scheduler in one process, a list of requests as mailbox.

llm.py and offline/pooling.py make requests, orders and answers; this file runs the loop, and has the scheduler's
control carry out orders.
"""

from __future__ import annotations

import logging
import operator
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from numbers import Real
from typing import Any, TypeAlias, TypeVar, cast

from tqdm import tqdm

from jaxsgl.config.command_line import own_arguments, words_of
from jaxsgl.config.engine import BUNDLED_MODEL, EngineConfig
from jaxsgl.config.flags import fields_of
from jaxsgl.errors import ConfigError, EngineUnavailable, InvalidRequest, RequestFailed
from jaxsgl.interrupts import Interrupts
from jaxsgl.messages.orders import Abort, Answer, Command, News, Shutdown, ToEngine
from jaxsgl.messages.replies import RefusalKind, Replies
from jaxsgl.offline.media import OfflineMedia, read_prompt
from jaxsgl.requests.media import MediaItem
from jaxsgl.requests.outputs import Pooled
from jaxsgl.requests.request import Request, check_request
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.orders.control import Control
from jaxsgl.scheduler.orders.inspection import LeakCheck
from jaxsgl.text.prompts import TextPrompt, encode_text
from jaxsgl.text.sample import Piece, Sample, detokenizer_of
from jaxsgl.text.stop_regex import check_patterns
from jaxsgl.text.tokenizer import Tokenizer, Truncation, is_gguf, load_tokenizer
from jaxsgl.wiring import build, build_scheduler

UseTqdm: TypeAlias = bool | Callable[..., Any]  # or what makes a bar in place of the class tqdm
Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
Encoded: TypeAlias = tuple[list[int], tuple[MediaItem, ...]]
T = TypeVar("T")

logger = logging.getLogger(__name__)


class Offline:
    """An engine, its scheduler and its tokenizer. The arguments are those of `LLM`."""

    def __init__(self, model: str = BUNDLED_MODEL, **flags: Any) -> None:
        given = flags if model == BUNDLED_MODEL else {"model": os.fspath(model), **flags}
        own, without_effect = own_arguments(EngineConfig, given)
        for line in words_of(without_effect):
            logger.info(line)
        self.config = EngineConfig(**fields_of(EngineConfig, own))
        self._lock = threading.Lock()  # held while the engine serves a call or carries out an order
        self._is_closed = False
        self.engine, self._scheduler = build(self.config, limited=False)
        named, made = self.config.model, self.engine.info.model_path
        self.tokenizer = load_tokenizer(made if is_gguf(named) else named, self.config.revision)

    def _encode(self, prompt: Prompt, truncation: Truncation | None = None) -> Encoded:
        limits = self.engine.capacity.limits
        try:
            if isinstance(prompt, Mapping):
                given = read_prompt(prompt)
                if given.files and truncation is not None:
                    raise InvalidRequest("truncate_prompt_tokens could cut pictures or sounds: leave it out")
                if given.files or (limits.media is not None and truncation is None):
                    return self._media.prepare(given, add_special_tokens=True)
                prompt = given.prompt
            if isinstance(prompt, bytes | bytearray):  # which would be ids
                raise TypeError("it is bytes: decode them")
            if isinstance(prompt, str):
                prompt.encode()  # a lone surrogate is no text
                if truncation is None:
                    return self.tokenizer.encode(prompt), ()
                return encode_text(TextPrompt(prompt, truncation=truncation), self.tokenizer, limits.context_length), ()
            ids = [operator.index(token_id) for token_id in prompt]
            return ids if truncation is None else truncation.of(ids), ()
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest(f"a prompt must be a text or a list of token ids: {error}") from None

    @property
    def lora_adapters(self) -> tuple[str, ...]:
        """The names of the LoRA adapters that prompts may have."""
        table = self._scheduler.ranks[0].state.adapters
        return () if table is None else table.names

    def _adapters(self, given: str | Sequence[str], num_prompts: int) -> list[str]:
        """The adapter of each prompt, if one or a sequence is given. Raises `InvalidRequest`."""
        names = per_prompt("adapters", given, str, num_prompts)
        for name in set(names) - {"", *self.lora_adapters}:
            raise InvalidRequest(f"no adapter named {name} is loaded: loaded are {self.lora_adapters}")
        return names

    @property
    def _media(self) -> OfflineMedia:
        return OfflineMedia(self.engine.info.model_path, self.engine.capacity.limits.media, self.tokenizer)

    def _serve(self, requests: list[Request], use_tqdm: UseTqdm) -> OfflineMailbox:
        """Runs the loop until `requests` have ended, after calls of other threads. Raises as `LLM.generate`."""
        with self._lock:
            return self._serve_alone(requests, use_tqdm)

    def _serve_alone(self, requests: list[Request], use_tqdm: UseTqdm) -> OfflineMailbox:
        self._check_open()
        released = self.engine.weight_store.released
        if released:
            names = ", ".join(sorted(tag.value for tag in released))
            raise EngineUnavailable(f"the memory of {names} is released: call resume_memory_occupation first")
        for number, request in enumerate(requests):
            with naming(number, len(requests)):
                if request.sampling.stop or request.sampling.stop_regex:
                    self.tokenizer.check_text_comes_back()
                    check_patterns(request.sampling.stop_regex)
                check_request(request, self.engine.capacity.limits)
        total, make_bar = sum(request.sampling.n for request in requests), use_tqdm if callable(use_tqdm) else tqdm
        with make_bar(total=total, desc="requests", disable=not use_tqdm) as bar, Interrupts() as interrupts:
            mailbox = OfflineMailbox(requests, self.tokenizer, bar, interrupts)
            try:
                check = self.config.check_every_step
                run_loop(self._scheduler, self.engine, mailbox, self.config.unread_steps, check)
            except BaseException:  # Ctrl-C too: unfinished requests are dropped, and the next call begins without them
                self._scheduler = build_scheduler(self.config, self.engine, limited=False, former=self._scheduler)
                raise
        return mailbox

    def _order(self, order: Command, read: object = None) -> None:
        """Carries out `order` as servers do. No request runs, so that nothing has to be waited for.

        `read` are weights to read in place of the folder that the order names, since no message holds a tree of arrays.
        Raises what reading raises, or `ConfigError` if something else is in the way.
        """
        with self._lock, Interrupts() as interrupts:
            loader = CallersThread(interrupts, read)
            self._check_open()
            control = Control(
                self._scheduler,
                self.engine,
                LeakCheck(self._scheduler),
                loader=loader,
            )
            control.handle(order)
            while control.is_active:
                for news in control.after_turn(collected=False):
                    assert isinstance(news, Answer), f"{news} came, but one answer is due"
                    if not news.ok:
                        raise loader.error or ConfigError(news.text)

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineUnavailable("the LLM is closed, and its memory given back: make another")


class CallersThread(Executor):
    """Reads weights and adapters at once, in the thread of the caller. Ctrl-C ends reading, as an error does.

    Attributes:
      error: why they can't be read, or None if they can.
    """

    def __init__(self, interrupts: Interrupts, read: object = None) -> None:
        self._interrupts = interrupts
        self._read = read
        self.error: BaseException | None = None

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """See `Executor`."""
        future: Future[T] = Future()
        try:
            with self._interrupts.let_through():
                result = fn(*args, **kwargs) if self._read is None else fn(self._read)
        except BaseException as error:
            self.error = error
            future.set_exception(error if isinstance(error, Exception) else InterruptedError("reading was interrupted"))
        else:
            future.set_result(result)
        return future


class OfflineMailbox:
    """Delivers all requests at the first call, and `Shutdown` once the loop has no work left.

    A sample that a stop string ends is aborted.

    Attributes:
      pieces: of every sample, in the order of requests and samples.
      pooled: by request id, what requests for pooling yield.
    """

    def __init__(self, requests: list[Request], tokenizer: Tokenizer, bar: Any, interrupts: Interrupts) -> None:
        self._messages: list[ToEngine] = list(requests)
        self._bar = bar
        self._interrupts = interrupts
        self._samples = {
            (request.request_id, index): Sample(request, index, detokenizer_of(tokenizer, request.sampling))
            for request in requests
            for index in range(request.sampling.n)
        }
        self.pieces: dict[tuple[str, int], list[Piece]] = {key: [] for key in self._samples}
        self.pooled: dict[str, Pooled] = {}

    def receive(self, wait_s: float) -> list[ToEngine]:
        """Returns all requests, later aborts, and `Shutdown` when the loop would wait. Ctrl-C comes through here."""
        self._interrupts.check()
        messages, self._messages = self._messages, []
        return messages or ([Shutdown()] if wait_s else [])

    def send(self, news: News) -> None:
        """Keeps the pieces of samples that have not ended."""
        assert isinstance(news, Replies), f"{news} came, but no command was given"
        for reply in news.replies:
            if reply.refusal is not None:
                refused = InvalidRequest if reply.refusal.kind is RefusalKind.INVALID else RequestFailed
                raise refused(f"prompt {reply.request_id}: {reply.refusal.text}")
            key = (reply.request_id, reply.index)
            sample = self._samples[key]
            if sample.ended:
                continue
            self.pieces[key].append(sample.take([reply]))
            if reply.pooled is not None:
                self.pooled[reply.request_id] = reply.pooled
            if sample.ended:
                self._bar.update()
                if reply.finish_reason is None:
                    self._messages.append(Abort(*key))


def per_prompt(what: str, given: Any, kind: type, num_prompts: int) -> list[Any]:
    """Returns a value for each prompt, if one of type `kind` or a sequence of them is given."""
    values = list(given) if isinstance(given, Iterable) and not isinstance(given, kind | Mapping) else None
    if any(isinstance(value, Mapping) for value in values or [given]) or not isinstance(given, kind | Iterable):
        words = f"must be of type {kind.__name__}, one for all prompts or one for each"
        raise InvalidRequest(f"{what} {words}: {given!r:.200}")
    values = [given] * num_prompts if values is None else values
    if len(values) != num_prompts:
        raise InvalidRequest(f"{len(values)} {what} for {num_prompts} prompts: give one for all, or one for each")
    return values


@contextmanager
def naming(number: int, count: int) -> Iterator[None]:
    """Refusals inside say which of `count` prompts they are about."""
    try:
        yield
    except InvalidRequest as error:
        if count == 1:
            raise
        raise InvalidRequest(f"prompt {number}: {error}") from error


def encode_each(encode: Callable[[T], Encoded], prompts: Sequence[T]) -> list[Encoded]:
    """Returns what `encode` makes of each. Raises `InvalidRequest`, which names the prompt."""
    encoded: list[Encoded] = []
    for number, prompt in enumerate(prompts):
        with naming(number, len(prompts)):
            encoded.append(encode(prompt))
    return encoded


def as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Returns one text or one list of ids as a list of one. Raises `InvalidRequest`."""
    if isinstance(prompts, str | Mapping | bytes | bytearray):
        return [cast(Prompt, prompts)]
    if not (hasattr(prompts, "__len__") and hasattr(prompts, "__iter__")):
        raise InvalidRequest(f"prompts are a {type(prompts).__name__}, but must be a text, a list of token ids, or a "
                             "list of these")  # fmt: skip
    several = list(prompts)  # what is indexed by other keys has an order, too
    return cast(Sequence[Prompt], [several] if several and isinstance(several[0], Real) else several)


def text_of(prompt: Prompt) -> str | None:
    """Returns the text of a prompt that is given as one, alone or with pictures."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None
