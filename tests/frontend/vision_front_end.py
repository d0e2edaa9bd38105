"""A front end in this process whose model takes pictures: a played engine answers each request with one token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import httpx
from played_link import PlayedLink, front_end_of
from tokenizers import AddedToken

from jaxsgl.config.engine import Limits
from jaxsgl.config.features import MediaConfig
from jaxsgl.frontend.generation import ServedModel
from jaxsgl.frontend.grpc.server import GrpcServer
from jaxsgl.frontend.http.app import build_app
from jaxsgl.frontend.media.fetch import Connect, Fetcher, Resolve
from jaxsgl.frontend.media.loader import MediaLoader
from jaxsgl.messages.orders import ToMailbox
from jaxsgl.messages.replies import EngineInfo, Load, Replies, Reply
from jaxsgl.preprocess.decoding import media_sandbox
from jaxsgl.preprocess.processors import load_settings
from jaxsgl.requests.media import MediaLimits
from jaxsgl.requests.request import FinishReason, Request
from jaxsgl.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.small_tokenizers import byte_level, save

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
LETTER_A = 69  # a token
SANDBOX = media_sandbox()  # of all front ends of these tests: it takes a second to start


def vision_folder(folder: Path) -> str:
    """What the front end needs of a model with a tower: patches of 4 x 4 pixels, pictures of 64 to 64 x 64 pixels."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in VISION_TOKENS])
    save(tokenizer, folder, TEMPLATE)
    start, end, image, video = map(tokenizer.token_to_id, VISION_TOKENS)
    config = {
        "model_type": "qwen3_vl", "image_token_id": image, "video_token_id": video,
        "vision_start_token_id": start, "vision_end_token_id": end,
        "vision_config": {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2},
    }  # fmt: skip
    size = {"shortest_edge": 64, "longest_edge": 64 * 64}
    processor = {"size": size, "patch_size": 4, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    video_size = {"shortest_edge": 64, "longest_edge": 64 * 64 * 8}
    for name, values in (
        ("config", config), ("preprocessor_config", processor),
        ("video_preprocessor_config", processor | {"size": video_size}),
    ):  # fmt: skip
        (folder / f"{name}.json").write_text(json.dumps(values))
    return str(folder)


@dataclass
class VisionFrontEnd:
    """Attributes:
    http, channel: to the two ports.
    requests: what the engine got, in order, with their media.
    tokenizer, image, video: the model's tokenizer and placeholders.
    """

    http: httpx.AsyncClient
    channel: grpc.aio.Channel
    requests: list[Request]
    tokenizer: Tokenizer
    image: int
    video: int

    async def chat(self, *parts: dict[str, Any] | str, **fields: Any) -> httpx.Response:
        """Sends one message of these parts; a text stands for itself."""
        content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    def text_of(self, request: Request) -> str:
        """The prompt with its special tokens, placeholders included."""
        return b"".join(map(self.tokenizer.token_bytes, request.prompt_ids)).decode()


class AnsweringLink(PlayedLink):
    """Answers every request at once."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []

    def send(self, message: ToMailbox) -> None:
        if isinstance(message, Request):
            self.requests.append(replace_media(message))
            reply = Reply(message.request_id, (LETTER_A,), FinishReason.LENGTH)
            asyncio.get_running_loop().call_soon(self.receive, Replies([reply], Load()))


def replace_media(request: Request) -> Request:
    """A copy: the front end drops the media of its own."""
    return Request(
        request.request_id, request.prompt_ids, request.sampling, request.priority, request.cache_salt, request.room,
        media=request.media,
    )  # fmt: skip


@asynccontextmanager
async def serving(
    folder: str,
    *flags: Any,
    config: MediaConfig = MediaConfig(),
    limits: MediaLimits | None = None,
    resolve: Resolve | None = None,
    connect: Connect | None = None,
    has_tower: bool = True,
) -> AsyncIterator[VisionFrontEnd]:
    """A front end for the model in `folder`. `resolve` and `connect` stand for the network of the fetcher."""
    tokenizer, settings = load_tokenizer(folder), load_settings(folder)
    assert settings is not None
    media = limits or MediaLimits(
        settings.image_token_id, settings.video_token_id, patch_size=4, max_items=8, max_patches=256,
        max_request_patches=1024,
    )  # fmt: skip
    info = EngineInfo(
        model_path=folder, architecture="Fake", dtype="float32",
        limits=Limits(1000, 2000, 4000, media if has_tower else None), eos_token_ids=(1,), page_size=4,
        max_running_requests=16, attention_backend="reference", platform="cpu", kv_bytes=1, weight_bytes=1,
        warmup_s=0.0,
    )  # fmt: skip
    link = AnsweringLink()
    with ThreadPoolExecutor(2) as threads:
        fetcher = Fetcher(config, resolve, connect)
        loader = MediaLoader(config, media, settings, tokenizer, threads, fetcher, SANDBOX)
        model = ServedModel(info, tokenizer, media=loader if has_tower else None)
        front_end = front_end_of(link, threads, model)
        front_end = replace(front_end, config=replace(front_end.config, media=config))
        server = GrpcServer(front_end, None)
        try:
            address = await server.start()
            transport = httpx.ASGITransport(build_app(front_end))
            async with (
                httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60.0) as http,
                grpc.aio.insecure_channel(address) as channel,
            ):
                yield VisionFrontEnd(
                    http, channel, link.requests, tokenizer, settings.image_token_id, settings.video_token_id
                )
        finally:
            await server.stop()


def image_part(url: str) -> dict[str, Any]:
    """A part of a chat message."""
    return {"type": "image_url", "image_url": {"url": url}}


def video_part(url: str, **fields: Any) -> dict[str, Any]:
    """A part of a chat message."""
    return {"type": "video_url", "video_url": {"url": url, **fields}}
