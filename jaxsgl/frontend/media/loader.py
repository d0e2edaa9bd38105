"""From the pictures and videos of a prompt to what the engine gets: fetches on the event loop, decodes in threads.

Owns the threads that decode, and how many there are: a place in them ends with its work, not with the call that wanted
it, so that clients who leave make room for no more work than those who wait. Never knows a protocol or the engine:
generation.py calls it for prompts with media, if the model has a vision tower.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from jaxsgl.config.features import MediaConfig
from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.media.fetch import Fetcher
from jaxsgl.preprocess.decoding import MAX_DECODING, Decoder
from jaxsgl.preprocess.placeholders import Visual, expand, expand_placeholders, tokens_of, write_placeholders
from jaxsgl.preprocess.settings import ProcessorSettings
from jaxsgl.preprocess.sources import IMAGE_KINDS, VIDEO_KINDS, Budget, Source, VideoSource, files_of, is_remote
from jaxsgl.requests.media import MediaItem, MediaLimits
from jaxsgl.sandbox import Sandbox
from jaxsgl.text.prompts import IdsPrompt, Prompt
from jaxsgl.text.tokenizer import Tokenizer

MAX_CALL_REQUESTS = 4  # the prompts of a call may have so many requests' patches together

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

        `tokenize` gives the ids of prompts with a placeholder for each picture. Raises `InvalidRequest`.
        """
        prepared: list[tuple[list[int], tuple[MediaItem, ...]]] = []
        num_patches, most = 0, MAX_CALL_REQUESTS * self.limits.max_request_patches
        for prompt in prompts:
            prepared.append(await self._prepare(prompt, tokenize))
            num_patches += sum(item.num_patches for item in prepared[-1][1])
            if num_patches > most:
                raise InvalidRequest(
                    f"the images of all prompts have more than {most} patches: send fewer prompts in a call"
                )
        return prepared

    async def _prepare(self, prompt: Prompt, tokenize: Tokenize) -> tuple[list[int], tuple[MediaItem, ...]]:
        visuals = await self._visuals(prompt.media)
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

    async def _visuals(self, sources: Sequence[Source]) -> list[Visual]:
        if len(sources) > self.limits.max_items:
            raise InvalidRequest(
                f"the request has {len(sources)} images and videos, but may have {self.limits.max_items}: send fewer"
            )
        budget = Budget(self._config.media_max_bytes)
        fetched = await self._fetch(sources, budget)

        def decode() -> list[Visual]:
            return self._decoder.load(files_of(sources, fetched, budget))

        return await asyncio.get_running_loop().run_in_executor(self._decoding, decode)

    async def _fetch(self, sources: Sequence[Source], budget: Budget) -> dict[str, bytes]:
        """Returns the contents of all remote URLs. The first that fails ends the others."""
        kinds: dict[str, tuple[str, ...]] = {}
        for source in sources:
            is_file = isinstance(source, VideoSource) and not isinstance(source.named, tuple)
            named = source.named if isinstance(source.named, tuple) else (source.named,)
            for url in named:
                if isinstance(url, str) and is_remote(url):
                    kinds[url] = VIDEO_KINDS if is_file else IMAGE_KINDS
        if len(kinds) > self.limits.max_items:
            raise InvalidRequest(f"the request has {len(kinds)} URLs, but may have {self.limits.max_items}: send fewer")
        tasks: dict[str, asyncio.Task[bytes]] = {}
        try:
            async with asyncio.TaskGroup() as group:
                for number, (url, kind) in enumerate(kinds.items()):
                    fetching = self._fetcher.fetch(url, kind, budget, f"URL {number} of the request")
                    tasks[url] = group.create_task(fetching)
        except* InvalidRequest as refusals:
            raise refusals.exceptions[0] from None
        return {url: task.result() for url, task in tasks.items()}
