"""Sounds in chats, in prompts and in forms reach the engine as the same frames; what can't be heard is a clear 400."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import openai
import pytest
from openai.types.audio import TranscriptionTextDeltaEvent, TranscriptionTextDoneEvent
from tokenizers import AddedToken
from vision_front_end import AnsweringLink, VisionFrontEnd, image_part, serving, vision_folder

from jaxsgl.config.features import MediaConfig
from jaxsgl.frontend.http.errors import ClientGone
from jaxsgl.messages.orders import Abort, ToMailbox
from jaxsgl.preprocess.processors import load_settings
from jaxsgl.preprocess.sounds import parts_of
from jaxsgl.requests.media import MediaLimits, SoundShape
from jaxsgl.requests.request import Request
from tests.preprocess.pictures import data_url, picture
from tests.preprocess.test_sound_files import noise, wav
from tests.text.small_tokenizers import byte_level, save

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if 'audio' in part or 'audio_url' in part %}<|audio_bos|><|AUDIO|><|audio_eos|>\n"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SHAPE = SoundShape(num_patches=50, bins=16, merge=2, hears_all=False)
VOXTRALS = ("<s>", "</s>", "[INST]", "[/INST]", "[AUDIO]", "[BEGIN_AUDIO]", "[TRANSCRIBE]")
SOUND = wav(noise(9000))  # of 29 patches
ENCODED = base64.b64encode(SOUND).decode()
PADS = "<|AUDIO|>" * 14


def hearing_folder(folder: Path, kind: str = "qwen2_audio") -> str:
    """What the front end needs of a model that hears 1 s."""
    tokenizer = byte_level()
    names = VOXTRALS if kind == "voxtral" else ("<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    save(tokenizer, folder, TEMPLATE)
    tower = {"max_source_positions": 50, "num_mel_bins": 16}
    ids = {"audio_token_index": tokenizer.token_to_id("<|AUDIO|>"), "audio_token_id": tokenizer.token_to_id("[AUDIO]")}
    if kind == "voxtral":
        tower |= {"hidden_size": 8, "intermediate_size": 16}
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **ids, "audio_config": tower}))
    extractor = {"feature_size": 16, "nb_max_frames": 100, "feature_extractor_type": "WhisperFeatureExtractor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(extractor))
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return hearing_folder(tmp_path_factory.mktemp("hearing"))


def run(folder: str, scenario: Callable[[VisionFrontEnd], Awaitable[None]]) -> None:
    async def whole() -> None:
        settings = load_settings(folder)
        assert settings is not None
        limits = MediaLimits(
            settings.image_token_id, -1, sound=settings.sound, max_items=8, max_patches=50, max_request_patches=150
        )
        async with serving(folder, limits=limits, config=MediaConfig()) as front_end, asyncio.timeout(120):
            await scenario(front_end)

    asyncio.run(whole())


async def ask(served: VisionFrontEnd, path: str = "transcriptions", file: bytes = SOUND, **form: Any) -> httpx.Response:
    url = f"/v1/audio/{path}"
    return await served.http.post(url, data={"max_completion_tokens": "1", **form}, files={"file": ("a.wav", file)})


def test_every_way_to_send_a_sound_gives_the_engine_the_same_frames(folder: str) -> None:
    async def scenario(served: VisionFrontEnd) -> None:
        for part in (
            {"type": "input_audio", "input_audio": {"data": ENCODED, "format": "wav"}},
            {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{ENCODED}"}},
            {"type": "audio", "audio": f"data:audio/x-wav;base64,{ENCODED}"},
        ):
            answer = await served.chat("Hear ", part, "and say.")
            assert answer.status_code == 200, answer.text
        heard = {"type": "input_audio", "input_audio": {"data": ENCODED, "format": "wav"}}
        said = [{"type": "input_text", "text": text} for text in ("Hear ", "and say.")]
        asked = {"input": [{"role": "user", "content": [said[0], heard, said[1]]}], "max_output_tokens": 1}
        assert (await served.http.post("/v1/responses", json=asked)).status_code == 200
        sent = f"<|start|>user\nHear <|audio_bos|>{PADS}<|audio_eos|>\nand say.<|end|>\n<|start|>assistant\n"
        assert [served.text_of(request) for request in served.requests] == [sent] * 4
        body = {"text": "a<|AUDIO|>b", "audio_data": ENCODED, "sampling_params": {"max_new_tokens": 1}}
        assert (await served.http.post("/generate", json=body)).status_code == 200
        assert (await ask(served)).status_code == 200
        assert (await ask(served, "translations")).status_code == 200
        (expected,) = parts_of(SOUND, SHAPE, 50, "a")
        items = [item for request in served.requests for item in request.media]
        assert len(items) == 7
        for item in items:
            np.testing.assert_array_equal(np.frombuffer(item.pixels, "<f4"), np.frombuffer(expected.pixels, "<f4"))
            assert (item.digest, item.filled, item.length) == (expected.digest, 29, 14)

    run(folder, scenario)


def test_a_transcript_comes_in_openais_forms(folder: str) -> None:
    async def scenario(served: VisionFrontEnd) -> None:
        answer = (await ask(served, language="de")).json()
        assert answer["text"] == "A" or answer["text"], answer
        num_read = len(served.requests[0].prompt_ids)
        assert answer["usage"] == {
            "type": "tokens", "input_tokens": num_read, "output_tokens": 1, "total_tokens": num_read + 1,
            "input_token_details": {"audio_tokens": 14, "text_tokens": num_read - 14},
        }  # fmt: skip
        text = answer["text"]
        asked = f"{PADS}<|audio_eos|>\nThe audio is in German. Write down what is said in the audio,"
        assert asked in served.text_of(served.requests[0])
        plain = await ask(served, response_format="text", language="en", prompt="Names of birds alone.")
        assert plain.text == f"{text}\n" and plain.headers["content-type"].startswith("text/plain")
        assert "The audio is in English. Names of birds alone.<|end|>" in served.text_of(served.requests[1])
        verbose = (await ask(served, "translations", response_format="verbose_json")).json()
        told = {key: verbose[key] for key in ("task", "language", "duration", "text")}
        assert told == {"task": "translate", "language": "english", "duration": 0.58, "text": text}
        stream = (await ask(served, stream="true")).text
        events = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line]
        assert [each["type"] for each in events] == ["transcript.text.delta", "transcript.text.done"]
        assert events[0]["delta"] == events[1]["text"] == text

    run(folder, scenario)


def test_a_long_sound_of_voxtrals_is_asked_for_in_its_own_words(tmp_path: Path) -> None:
    async def scenario(served: VisionFrontEnd) -> None:
        answer = await ask(served, file=wav(noise(40_000)), language="en")
        assert answer.status_code == 200, answer.text
        (request,) = served.requests
        assert served.text_of(request) == f"[INST][BEGIN_AUDIO]{'[AUDIO]' * 75}[/INST]lang:en[TRANSCRIBE]"
        assert [(item.length, item.filled) for item in request.media] == [(25, 50), (25, 50), (25, 25)]
        refused = await ask(served, prompt="birds")
        assert refused.status_code == 400 and "the model transcribes without one" in refused.text
        too_long = await ask(served, file=wav(noise(48_001)))
        assert too_long.status_code == 400 and "have 100 tokens or more, but may have 75 together" in too_long.text

    run(hearing_folder(tmp_path, "voxtral"), scenario)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"file": b""}, "the file is empty"),
        ({"file": b"no sound"}, "sound 0 is no sound that can be read: send WAV"),
        ({"file": wav(noise(16_001))}, "sound 0 is longer than 1 s, which is all that the model hears"),
        ({"response_format": "srt"}, "response_format of the form is 'srt'"),
        ({"temperature": "9"}, "temperature of the form is '9'"),
        ({"language": "german, please"}, "language is 'german, please', but must be letters of ISO 639-1, as en, or"),
        ({"language": "xx"}, "language is 'xx'"),
        ({"top_p": "7"}, "top_p is 7.0, but must be"),
        ({"prompt": "x" * 70_000}, "the field prompt of the form has 70000 bytes, but may have 65536"),
        ({"include[]": "logprobs"}, "transcripts come without log-probabilities"),
        ({f"field{number}": "x" for number in range(40)}, "the form has 32 fields or more"),
        ({"timestamp_granularities[]": "word"}, "no times are known"),
        ({"to_language": "fr"}, "to_language is fr, but transcripts are in the language of the sound"),
        ({"prompt": "<|AUDIO|>"}, "2 placeholders (id 404), but 1 sounds come with it"),
        ({"stream": "true", "response_format": "text"}, "stream is true, but response_format is text"),
    ],
)
def test_a_form_that_asks_for_what_is_not_made_is_refused(folder: str, form: dict[str, Any], words: str) -> None:
    async def scenario(served: VisionFrontEnd) -> None:
        answer = await ask(served, **form)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
        assert not served.requests

    run(folder, scenario)


def test_the_schema_of_the_server_tells_the_form(folder: str) -> None:
    async def scenario(served: VisionFrontEnd) -> None:
        paths = (await served.http.get("/openapi.json")).json()["paths"]
        for path in ("transcriptions", "translations"):
            form = paths[f"/v1/audio/{path}"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
            assert form["required"] == ["file"] and form["properties"]["file"]["format"] == "binary"
            assert form["properties"]["response_format"]["enum"] == ["json", "text", "verbose_json"]

    run(folder, scenario)


@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_client_that_leaves_ends_its_transcript(folder: str, monkeypatch: pytest.MonkeyPatch, stream: str) -> None:
    sent: list[ToMailbox] = []
    begun = asyncio.Event()

    def record(link: AnsweringLink, message: ToMailbox) -> None:
        sent.append(message)
        begun.set()

    monkeypatch.setattr(AnsweringLink, "send", record)

    async def scenario(served: VisionFrontEnd) -> None:
        transport = served.http._transport
        assert isinstance(transport, httpx.ASGITransport)
        url = "http://localhost/v1/audio/transcriptions"
        asked = httpx.Request("POST", url, data={"stream": stream}, files={"file": ("a.wav", SOUND)})
        messages = [{"type": "http.request", "body": asked.read(), "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await begun.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            assert message["type"] != "http.response.body" or not message["body"]

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": asked.url.path, "raw_path": asked.url.raw_path, "root_path": "", "query_string": b"",
            "headers": [(name.lower(), value) for name, value in asked.headers.raw],
            "client": None, "server": None,
        }  # fmt: skip
        async with asyncio.timeout(20):
            with contextlib.suppress(ClientGone):
                await transport.app(scope, receive, send)
        request, abort = sent
        assert isinstance(request, Request) and isinstance(abort, Abort)

    run(folder, scenario)


def test_what_is_no_form_is_refused_and_an_unknown_model_is_not_found(folder: str) -> None:
    async def scenario(served: VisionFrontEnd) -> None:
        answer = await served.http.post("/v1/audio/transcriptions", json={"file": "a"})
        assert answer.status_code == 400 and "the body is no form" in answer.text
        answer = await served.http.post("/v1/audio/transcriptions", data={"model": "a"}, files={"other": b"a"})
        assert answer.status_code == 400 and "no field file" in answer.text
        assert (await ask(served, model="another")).status_code == 404

    run(folder, scenario)


def test_the_package_openai_is_answered_in_every_form(folder: str) -> None:
    async def scenario(served: VisionFrontEnd) -> None:
        client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=cast(Any, served.http))
        create, file = client.audio.transcriptions.create, ("../talks/a talk.wav", SOUND)
        whole = await create(model="default", file=file, chunking_strategy="auto", temperature=0.5, prompt="Birds.")
        assert whole.usage is not None and whole.usage.type == "tokens"
        assert await create(model="default", file=file, response_format="text") == f"{whole.text}\n"
        verbose = await create(model="default", file=file, response_format="verbose_json", language="de")
        assert (verbose.text, verbose.duration, verbose.language) == (whole.text, 0.58, "de")
        translated = await client.audio.translations.create(model="default", file=file)
        assert translated.text == whole.text
        events = [each async for each in await create(model="default", file=file, stream=True)]
        assert isinstance(events[0], TranscriptionTextDeltaEvent) and events[0].delta == whole.text
        assert isinstance(events[1], TranscriptionTextDoneEvent) and events[1].usage is not None
        assert events[1].text == whole.text and len(events) == 2
        with pytest.raises(openai.BadRequestError, match="'json', 'text' or 'verbose_json'"):
            await create(model="default", file=file, response_format="srt")

    run(folder, scenario)


def test_a_language_is_told_by_letters_with_a_region_or_not_or_by_name(folder: str) -> None:
    async def scenario(served: VisionFrontEnd) -> None:
        for told in ("de", "DE", "de-AT", "German"):
            assert (await ask(served, language=told)).status_code == 200
            assert "\nThe audio is in German. Write" in served.text_of(served.requests[-1])

    run(folder, scenario)


def test_a_form_has_one_file_at_any_place_and_sampling_parameters(folder: str) -> None:
    async def scenario(served: VisionFrontEnd) -> None:
        url = "/v1/audio/transcriptions"
        files: list[Any] = [("file", ("a.wav", SOUND)), ("file", ("b.wav", SOUND))]
        answer = await served.http.post(url, files=files)
        assert answer.status_code == 400 and "several fields file" in answer.text
        values = {"max_completion_tokens": "1", "temperature": "0.5", "top_p": "0.9", "top_k": "4", "seed": "3"}
        fields = [(name, (None, value)) for name, value in values.items()]
        for order in ([files[0], *fields], [*fields, files[0]]):
            assert (await served.http.post(url, files=order)).status_code == 200
            sampling = served.requests[-1].sampling
            assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 4, 3)

    run(folder, scenario)


def test_sounds_in_any_message_are_heard_in_their_order_and_one_sent_twice_is_the_same(folder: str) -> None:
    async def scenario(served: VisionFrontEnd) -> None:
        first = {"type": "input_audio", "input_audio": {"data": ENCODED, "format": "mp3"}}  # the file says what it is
        other = base64.b64encode(wav(noise(7000))).decode()
        second = {"type": "input_audio", "input_audio": {"data": other, "format": "wav"}}
        turn = {"role": "assistant", "content": "Yes."}
        messages = [{"role": "user", "content": [first, {"type": "text", "text": "a"}, second]}, turn]
        messages.append({"role": "user", "content": [first]})
        body = {"messages": messages, "max_tokens": 1}
        answer = await served.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        (request,) = served.requests
        digests = [item.digest for item in request.media]
        assert digests[0] == digests[2] != digests[1] and [item.filled for item in request.media] == [29, 22, 29]

    run(folder, scenario)


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1/a.wav", "file:///etc/passwd", "/etc/passwd", f"data:image/png;base64,{ENCODED}",
     f"data:video/jpeg;base64,{ENCODED}", "data:audio/wav,abc", ""],
)  # fmt: skip
def test_a_sounds_url_may_be_what_a_pictures_may(folder: str, url: str) -> None:
    async def scenario(served: VisionFrontEnd) -> None:
        for part in (
            {"type": "audio_url", "audio_url": {"url": url}},
            {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
        ):
            answer = await served.chat(part)
            assert answer.status_code == 400, answer.text
        assert not served.requests

    run(folder, scenario)


def test_models_take_what_they_see_or_hear_alone(folder: str, tmp_path: Path) -> None:
    part = {"type": "input_audio", "input_audio": {"data": ENCODED, "format": "wav"}}

    async def hearing(served: VisionFrontEnd) -> None:
        answer = await served.chat(image_part(data_url(picture(16, 16))))
        assert answer.status_code == 400 and "is a picture or video, but the model takes sound alone" in answer.text
        answer = await served.chat({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}})
        assert answer.status_code == 400 and "content[0] holds no sound" in answer.text
        body: dict[str, Any] = {"prompt": "<|AUDIO|>", "max_tokens": 1}
        answer = await served.http.post("/v1/completions", json=body)
        assert answer.status_code == 400 and "1 placeholder tokens, but its sounds have 0" in answer.text
        body = {"messages": [{"role": "user", "content": [part]}], "truncate_prompt_tokens": 5}
        answer = await served.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400 and "could cut pictures or sounds" in answer.text

    async def seeing(served: VisionFrontEnd) -> None:
        answer = await served.chat(part)
        assert answer.status_code == 400 and "is a sound, but the model takes pictures and videos" in answer.text
        answer = await ask(served)
        assert answer.status_code == 400 and "hears nothing: ask a server whose model takes sound" in answer.text

    async def neither() -> None:
        async with serving(folder, has_tower=False) as served:
            assert "the model takes text alone" in (await served.chat(part)).text
            assert "hears nothing" in (await ask(served)).text

    async def in_turn() -> None:
        async with serving(vision_folder(tmp_path)) as served:
            await seeing(served)
        await neither()

    run(folder, hearing)
    asyncio.run(in_turn())
