"""Pictures and videos in every protocol reach the engine as the same patches, at the placeholders of the prompt."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from smg_grpc_proto import sglang_scheduler_pb2 as sglang_pb
from smg_grpc_proto import sglang_scheduler_pb2_grpc as sglang_grpc
from vision_front_end import VisionFrontEnd, image_part, serving, video_part, vision_folder

from jaxsgl.config.features import MediaConfig
from jaxsgl.frontend.proto import jaxsgl_pb2 as pb
from jaxsgl.frontend.proto import jaxsgl_pb2_grpc as pb_grpc
from jaxsgl.requests.media import hash_ids, patches_of, sglang_pad_id
from jaxsgl.requests.request import Request
from tests.preprocess.pictures import animation, data_url, file_of, movie, picture

CAT, DOG = picture(40, 24), picture(16, 16, seed=1)
CAT_TOKENS, DOG_TOKENS = 15, 4  # of 8 x 8 pixels


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return vision_folder(tmp_path_factory.mktemp("vision"))


def run(
    folder: str, scenario: Callable[[VisionFrontEnd], Awaitable[None]], config: MediaConfig = MediaConfig()
) -> None:
    async def whole() -> None:
        async with serving(folder, config=config) as front_end, asyncio.timeout(120):
            await scenario(front_end)

    asyncio.run(whole())


def digests(request: Request) -> list[bytes]:
    return [item.digest for item in request.media]


def test_a_chat_has_a_placeholder_for_each_token_of_its_pictures(folder: str) -> None:
    async def scenario(served: VisionFrontEnd) -> None:
        answer = await served.chat("See ", image_part(data_url(CAT)), image_part(data_url(DOG)), " and say.")
        assert answer.status_code == 200, answer.text
        (request,) = served.requests
        pads = [f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>" for count in (CAT_TOKENS, DOG_TOKENS)]
        assert served.text_of(request).startswith(f"<|start|>user\nSee {''.join(pads)} and say.<|end|>")
        cat, dog = request.media
        assert (cat.grid, dog.grid) == ((1, 6, 10), (1, 4, 4))
        assert {request.prompt_ids[i] for i in range(cat.offset, cat.stop)} == {served.image}
        assert answer.json()["usage"]["prompt_tokens"] == len(request.prompt_ids)
        np.testing.assert_array_equal(patches_of(cat)[0][:4], np.asarray(CAT)[0, :4, 0])

    run(folder, scenario)


def test_every_protocol_gives_the_engine_the_same_patches(folder: str) -> None:
    async def scenario(served: VisionFrontEnd) -> None:
        text = "a<|vision_start|><|image_pad|><|vision_end|>b"
        ids = served.tokenizer.encode(text)
        encoded = base64.b64encode(file_of(CAT)).decode()
        sampling = {"max_new_tokens": 1}
        for body in (
            {"text": text, "image_data": data_url(CAT)}, {"text": text, "image_data": encoded},
            {"text": text, "image_data": f"data:;base64,{encoded}"},
            {"text": text, "image_data": f"data:application/octet-stream;base64,{encoded}"},
            {"text": text, "image_data": [encoded]}, {"input_ids": ids, "image_data": [encoded]},
            {"text": [text], "image_data": [[encoded]]},
        ):  # fmt: skip
            answer = await served.http.post("/generate", json={**body, "sampling_params": sampling})
            assert answer.status_code == 200, answer.text
        stub = pb_grpc.JaxsglStub(served.channel)
        media = pb.Media(data=file_of(CAT))
        for asked in (
            pb.GenerateRequest(text=text, media=[media]),
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), media=[pb.Media(url=data_url(CAT))]),
        ):
            asked.sampling.max_tokens = 1
            assert [reply async for reply in stub.Generate(asked)]
        assert len(served.requests) == 9
        assert {tuple(request.prompt_ids) for request in served.requests} == {tuple(served.requests[0].prompt_ids)}
        assert {request.media for request in served.requests} == {served.requests[0].media}
        parts = [pb.ContentPart(text="a"), pb.ContentPart(media=media), pb.ContentPart(text="b")]
        chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", parts=parts)])
        assert [reply async for reply in stub.Generate(pb.GenerateRequest(chat=chat))]
        assert (await served.chat("a", image_part(data_url(CAT)), "b")).status_code == 200
        parts_of_input = [
            {"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": data_url(CAT)},
            {"type": "input_text", "text": "b"},
        ]  # fmt: skip
        body = {"input": [{"role": "user", "content": parts_of_input}], "max_output_tokens": 1, "store": False}
        answer = await served.http.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        of_chats = served.requests[-3:]
        assert all(chat.prompt_ids == of_chats[0].prompt_ids and chat.media == of_chats[0].media for chat in of_chats)

    run(folder, scenario)


def test_ollamas_pictures_are_those_of_chat(folder: str) -> None:
    """They are files in base64 that don't say what they are, and come before the text."""

    async def scenario(served: VisionFrontEnd) -> None:
        await served.chat(image_part(data_url(CAT)), image_part(data_url(DOG)), "Which?")
        images = [base64.b64encode(file_of(each)).decode() for each in (CAT, DOG)]
        message = {"role": "user", "content": "Which?", "images": images}
        for path, body in (("chat", {"messages": [message]}), ("generate", {"prompt": "Which?", "images": images})):
            answer = await served.http.post(f"/api/{path}", json=body)
            assert answer.status_code == 200, answer.text
        of_chat, *others = served.requests
        assert [other.prompt_ids for other in others] == [of_chat.prompt_ids] * 2
        assert [digests(other) for other in others] == [digests(of_chat)] * 2
        shown = await served.http.post("/api/show", json={})
        assert "vision" in shown.json()["capabilities"]

    run(folder, scenario)


def multimodal(request: Request) -> sglang_pb.MultimodalInputs:
    """What a gateway makes of the pictures of `request`: normalized values, grids and places."""
    values = np.concatenate([patches_of(item) for item in request.media]).astype(np.float32) / 255
    grids = np.array([item.grid for item in request.media], np.int64)
    return sglang_pb.MultimodalInputs(
        pixel_values=tensor((values - 0.5) / 0.5, "float32"),
        model_specific_tensors={"image_grid_thw": tensor(grids, "int64")},
        mm_placeholders=[sglang_pb.PlaceholderRange(offset=item.offset, length=item.length) for item in request.media],
    )


def tensor(values: np.ndarray, dtype: str) -> sglang_pb.TensorData:
    return sglang_pb.TensorData(data=values.astype(dtype).tobytes(), shape=values.shape, dtype=dtype)


def test_what_a_gateway_has_preprocessed_is_what_the_server_would_have_made(folder: str) -> None:
    async def scenario(served: VisionFrontEnd) -> None:
        await served.chat(image_part(data_url(CAT)), image_part(data_url(DOG)))
        (direct,) = served.requests
        asked = sglang_pb.GenerateRequest(
            tokenized=sglang_pb.TokenizedInput(input_ids=direct.prompt_ids), mm_inputs=multimodal(direct)
        )
        asked.sampling_params.max_new_tokens = 1
        assert [reply async for reply in sglang_grpc.SglangSchedulerStub(served.channel).Generate(asked)]
        assert served.requests[1].prompt_ids == direct.prompt_ids and served.requests[1].media == direct.media

    run(folder, scenario)


def test_a_video_is_its_temporal_patches_behind_their_times(folder: str) -> None:
    frames = [picture(16, 16, seed=i) for i in range(4)]

    async def scenario(served: VisionFrontEnd) -> None:
        answer = await served.chat("Watch:", video_part(data_url(animation(frames, 500, "PNG"), "image/apng")))
        assert answer.status_code == 200, answer.text
        pads = "<|vision_start|>" + "<|video_pad|>" * 4 + "<|vision_end|>"
        expected = f"Watch:<0.2 seconds>{pads}<1.2 seconds>{pads}<|end|>"
        assert expected in served.text_of(served.requests[0])
        urls = [data_url(frame) for frame in frames]
        listed = ",".join(base64.b64encode(file_of(frame)).decode() for frame in frames)
        for part in (
            {"type": "video", "video": urls, "fps": 2}, video_part(f"data:video/jpeg;base64,{listed}", fps=2.0)
        ):  # fmt: skip
            assert (await served.chat("Watch:", part)).status_code == 200
        assert {tuple(request.prompt_ids) for request in served.requests} == {tuple(served.requests[0].prompt_ids)}
        assert len({tuple(digests(request)) for request in served.requests}) == 1
        assert {served.requests[0].prompt_ids[item.offset] for item in served.requests[0].media} == {served.video}

    run(folder, scenario)


def test_a_file_of_video_is_taken_in_video_url(folder: str) -> None:
    pytest.importorskip("av", reason="PyAV, the extra `video`, is not installed")

    async def scenario(served: VisionFrontEnd) -> None:
        answer = await served.chat("Watch:", video_part(data_url(movie(num_frames=4, fps=2), "video/mp4")))
        assert answer.status_code == 200, answer.text
        (request,) = served.requests
        assert re.search(r"Watch:<0\.2 seconds>.*<1\.2 seconds>", served.text_of(request))
        assert len(request.media) == 2

    run(folder, scenario)


def test_sglangs_formula_is_used_if_a_flag_says_so(folder: str) -> None:
    async def scenario(served: VisionFrontEnd) -> None:
        await served.chat(image_part(data_url(CAT)))
        (request,) = served.requests
        (item,) = request.media
        assert set(hash_ids(request.prompt_ids, request.media)[item.offset : item.stop]) == {sglang_pad_id(item.digest)}

    run(folder, scenario, MediaConfig(mm_hash_ids="sglang"))


def test_texts_alone_go_on_as_before(folder: str) -> None:
    async def scenario(served: VisionFrontEnd) -> None:
        assert (await served.chat("hello", "you")).status_code == 200
        assert "hello\nyou" in served.text_of(served.requests[0]) and served.requests[0].media == ()

    run(folder, scenario)


def test_tokenize_counts_the_tokens_of_pictures(folder: str) -> None:
    async def scenario(served: VisionFrontEnd) -> None:
        content = [{"type": "text", "text": "a"}, image_part(data_url(CAT))]
        body = {"messages": [{"role": "user", "content": content}]}
        answer = await served.http.post("/tokenize", json=body)
        assert answer.json()["tokens"].count(served.image) == CAT_TOKENS

    run(folder, scenario)
