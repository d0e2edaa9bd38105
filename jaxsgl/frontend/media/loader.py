"""From the media of a prompt to what the engine gets: fetches on the event loop, decodes in threads.

Owns the threads that decode, and how many there are: a place in them ends with its work, not with the call that wanted
it, so that clients who leave make room for no more work than those who wait. Requests with URLs take turns, which last
until their files are decoded: that bounds the memory of all. Never knows a protocol or the engine: generation.py calls
it for prompts with media, if the model has a tower.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from jaxsgl.config.features import MediaConfig
from jaxsgl.errors import InvalidRequest, Overloaded
from jaxsgl.frontend.media.fetch import Fetcher
from jaxsgl.preprocess.decoding import MAX_DECODING, CpuBudget, Decoder
from jaxsgl.preprocess.placeholders import Visual, expand, expand_placeholders, tokens_of, write_placeholders
from jaxsgl.preprocess.settings import ProcessorSettings
from jaxsgl.preprocess.sources import (
    IMAGE_KINDS,
    SOUND_KINDS,
    VIDEO_KINDS,
    Budget,
    SoundSource,
    Source,
    VideoSource,
    check_taken,
    files_of,
    is_remote,
)
from jaxsgl.requests.media import MediaItem, MediaLimits
from jaxsgl.sandbox import Sandbox
from jaxsgl.text.prompts import IdsPrompt, Prompt
from jaxsgl.text.tokenizer import Tokenizer

MAX_CALL_REQUESTS = 4  # the prompts of a call may have so many requests' patches together
MAX_FETCHING = 16  # requests that fetch, or wait with what they have fetched
MAX_AT_ONCE = 4  # URLs of a request that are fetched at a time
TURN_S = 60.0  # that a request waits at most until it may fetch

Tokenize: TypeAlias = Callable[[Sequence[Prompt]], Awaitable[list[list[int]]]]


class MediaLoader:
    """Prepares prompts with media.

    Args:
      config: flags.
      limits, settings: of the model.
      tokenizer: of the model; gives the text of placeholders.
      threads: for what takes milliseconds; pictures are decoded, and names of hosts looked up, in threads of their own.
      fetcher: fetches files; if None, one that fetches what `config` allows.
      sandbox: where pictures are decoded; in a process of its own if None.
    """

    def __init__(
        self,
        config: MediaConfig,
        limits: MediaLimits,
        settings: ProcessorSettings,
        tokenizer: Tokenizer,
        threads: Executor,
        fetcher: Fetcher | None = None,
        sandbox: Sandbox | None = None,
    ) -> None:
        self.limits = limits
        self.settings = settings
        self._config = config
        self._tokenizer = tokenizer
        self._threads = threads
        self._fetcher = fetcher or Fetcher(config)
        self._turns = asyncio.Semaphore(MAX_FETCHING)
        self._decoding = ThreadPoolExecutor(MAX_DECODING, "media")
        self._decoder = Decoder(settings, limits, config, sandbox)

    async def start(self) -> None:
        """Waits until pictures can be decoded. Raises `SandboxCrash` if they can't."""
        await asyncio.get_running_loop().run_in_executor(self._decoding, self._decoder.start)

    def close(self) -> None:
        """Drops what waits for its turn, and ends what is being decoded."""
        self._decoding.shutdown(wait=False, cancel_futures=True)
        self._fetcher.close()
        self._decoder.close()

    async def prepare_all(
        self, prompts: Sequence[Prompt], tokenize: Tokenize
    ) -> list[tuple[list[int], tuple[MediaItem, ...]]]:
        """Returns each prompt's ids, with a placeholder for each token of its media, and the media.

        `tokenize` gives the ids of prompts with a placeholder for each picture. The flags' limits hold for all prompts
        together; media that several of them share, as the same objects, are loaded once.

        Raises:
          InvalidRequest: for what can't be taken.
          Overloaded: too many others fetch.
          EngineUnavailable: the process that decodes was killed.
        """
        prepared: list[tuple[list[int], tuple[MediaItem, ...]]] = []
        num_patches, most = 0, MAX_CALL_REQUESTS * self.limits.max_request_patches
        budget, cpu = Budget(self._config.media_max_bytes), CpuBudget(self._config.media_max_cpu_s)
        loaded: dict[tuple[int, ...], list[Visual]] = {}  # by the identity of sources, whose hashes would take long
        for prompt in prompts:
            key = tuple(map(id, prompt.media))
            if key not in loaded:
                loaded[key] = await self._visuals(prompt.media, budget, cpu)
            prepared.append(await self._prepare(prompt, loaded[key], tokenize))
            num_patches += sum(item.num_patches for item in prepared[-1][1])
            if num_patches > most:
                raise InvalidRequest(
                    f"the media of all prompts have more than {most} patches: send fewer prompts in a call"
                )
        return prepared

    async def _prepare(
        self, prompt: Prompt, visuals: Sequence[Visual], tokenize: Tokenize
    ) -> tuple[list[int], tuple[MediaItem, ...]]:
        is_ids = isinstance(prompt, IdsPrompt)
        if not isinstance(prompt, IdsPrompt):
            tokens = tokens_of(self.settings, self._tokenizer.token_bytes)
            prompt = replace(prompt, rewrite=partial(write_placeholders, visuals=visuals, tokens=tokens))
        (ids,) = await tokenize([prompt])
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._expand, ids, visuals, is_ids)

    def _expand(
        self, ids: list[int], visuals: Sequence[Visual], is_ids: bool
    ) -> tuple[list[int], tuple[MediaItem, ...]]:
        """Milliseconds for long prompts. `is_ids`: the prompt came as ids, whose videos are still to be written out."""
        if is_ids:
            ids = expand_placeholders(ids, visuals, self.settings, self._encode)
        return expand(ids, visuals, self.settings, sglang_ids=self._config.mm_hash_ids == "sglang")

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    async def _visuals(self, sources: Sequence[Source], budget: Budget, cpu: CpuBudget) -> list[Visual]:
        check_taken(sources, self.settings.sound is not None, self.settings.what)
        if len(sources) > self.limits.max_items:
            raise InvalidRequest(
                f"the request has {len(sources)} media, but may have {self.limits.max_items}: send fewer"
            )
        urls = self._urls(sources)
        async with self._turn(bool(urls)):
            # A call that is cancelled leaves its place in the threads' queue, but nothing in it.
            waiting = [(sources, await self._fetch(urls, budget))]

            def decode() -> list[Visual]:
                return self._decoder.load(files_of(*waiting.pop(), budget), cpu)

            try:
                return await asyncio.get_running_loop().run_in_executor(self._decoding, decode)
            finally:
                waiting.clear()

    @asynccontextmanager
    async def _turn(self, fetches: bool) -> AsyncIterator[None]:
        """A place among the requests that fetch. One that doesn't needs none: what it holds came with its body."""
        if not fetches:
            yield
            return
        try:
            async with asyncio.timeout(TURN_S):
                await self._turns.acquire()
        except TimeoutError:
            raise Overloaded(
                f"the request waited {TURN_S:g} s to fetch its media, since {MAX_FETCHING} others fetch "
                "or wait to be decoded: try again later, or send data: URLs"
            ) from None
        try:
            yield
        finally:
            self._turns.release()

    def _urls(self, sources: Sequence[Source]) -> dict[str, tuple[str, ...]]:
        """Returns all remote URLs, and the kinds of files that each may lead to. Raises `InvalidRequest`."""
        kinds: dict[str, tuple[str, ...]] = {}
        for source in sources:
            is_file = isinstance(source, VideoSource) and not isinstance(source.named, tuple)
            named = source.named if isinstance(source.named, tuple) else (source.named,)
            of_source = VIDEO_KINDS if is_file else SOUND_KINDS if isinstance(source, SoundSource) else IMAGE_KINDS
            for url in named:
                if isinstance(url, str) and is_remote(url):
                    kinds[url] = of_source
        if len(kinds) > self.limits.max_items:
            raise InvalidRequest(f"the request has {len(kinds)} URLs, but may have {self.limits.max_items}: send fewer")
        for number, url in enumerate(kinds):
            self._fetcher.check(url, _name_of(number))
        return kinds

    async def _fetch(self, urls: Mapping[str, tuple[str, ...]], budget: Budget) -> dict[str, bytes]:
        """Returns the contents of all URLs. The first that fails ends the others."""
        at_once = asyncio.Semaphore(MAX_AT_ONCE)

        async def fetch(number: int, url: str, kinds: tuple[str, ...]) -> bytes:
            async with at_once:
                return await self._fetcher.fetch(url, kinds, budget, _name_of(number))

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(fetch(number, url, kinds)) for number, (url, kinds) in enumerate(urls.items())
                ]
        except* InvalidRequest as refusals:
            raise refusals.exceptions[0] from None
        return {url: task.result() for url, task in zip(urls, tasks, strict=True)}


def _name_of(number: int) -> str:
    return f"URL {number} of the request"
