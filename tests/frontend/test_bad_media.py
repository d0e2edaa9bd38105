"""Pictures that can't be taken: refused with the limit, nothing fetched, little memory, and other requests go on."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import bad_media
import grpc
import pytest
from smg_grpc_proto import sglang_scheduler_pb2 as pb
from smg_grpc_proto import sglang_scheduler_pb2_grpc as pb_grpc
from vision_front_end import SANDBOX, VisionFrontEnd, image_part, serving, vision_folder

from jaxsgl.config.features import MediaConfig
from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.media import loader
from jaxsgl.frontend.media.fetch import Streams, Target
from jaxsgl.preprocess.sources import ImageSource
from jaxsgl.sandbox import Limits
from tests.preprocess.pictures import data_url, file_of, picture

PUBLIC = "93.184.216.34"
PICTURE = file_of(picture(16, 16))
CONFIG = MediaConfig(
    allowed_media_domains=("allowed.example", "*.cdn.example:8080", "rebound.example"), media_max_bytes=100_000,
    media_max_pixels=1_000_000, media_timeout_s=0.3,
)  # fmt: skip
MOST_BYTES = 200 << 20
PROMPT = "a<|vision_start|><|image_pad|><|vision_end|>"


class Network:
    """A server for all hosts, which notes what was looked up and dialled, and how much of it was open at a time."""

    def __init__(self) -> None:
        self.looked_up: list[str] = []
        self.dialled: list[tuple[str, str]] = []
        self.most_open = 0
        self._num_open = 0
        self._port = 0

    async def resolve(self, host: str, port: int) -> list[str]:
        self.looked_up.append(host)
        return [PUBLIC, "10.0.0.1"] if host == "rebound.example" else [PUBLIC]

    async def connect(self, address: str, target: Target) -> Streams:
        self.dialled.append((address, target.host))
        return await asyncio.open_connection("127.0.0.1", self._port)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        yield
        server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_open += 1
        self.most_open = max(self.most_open, self._num_open)
        try:
            path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
            if path.startswith("/slow"):
                await reader.read()
            for part in answer_to(path):
                writer.write(part)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._num_open -= 1
            writer.close()


def answer_to(path: str) -> Iterator[bytes]:
    """The parts of the answer to a path of `bad_media.ANSWERS`, or a picture."""
    redirects = {
        "/to-private": "http://169.254.169.254/", "/to-user": "http://a@allowed.example/", "/to-file": "file:///etc/passwd",
        "/to-rebound": "//rebound.example/a", "/to-nowhere": "http://[::1", "/loop": "/loop",
        "/once": "/a.png", "/twice": "http://x.cdn.example:8080/once",
    }  # fmt: skip
    ok = b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\n"
    if path in redirects:
        yield f"HTTP/1.1 302 Found\r\nlocation: {redirects[path]}\r\ncontent-length: 0\r\n\r\n".encode()
    elif path == "/big":
        yield ok + b"content-length: 99999999\r\n\r\nabc"
    elif path == "/endless":
        yield ok + b"transfer-encoding: chunked\r\n\r\n"
        for _ in range(10_000):
            yield b"1000\r\n" + bytes(4096) + b"\r\n"
    elif path == "/html":
        yield b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 3\r\n\r\n<p>"
    elif path == "/missing":
        yield b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
    elif path == "/truncated":
        yield ok + b"content-length: 500\r\n\r\nabc"
    elif path == "/gzip":
        yield ok + b"content-encoding: gzip\r\ncontent-length: 3\r\n\r\nabc"
    elif path == "/garbage":
        yield b"SSH-2.0-OpenSSH_9.6\r\n\r\n"
    elif path == "/headers":
        yield b"HTTP/1.1 200 OK\r\n"
        for number in range(2000):
            yield f"x-{number}: {'a' * 100}\r\n".encode()
    elif path == "/endless-hints":
        for _ in range(1000):
            yield b"HTTP/1.1 103 Early Hints\r\nlink: </a.css>; rel=preload\r\n\r\n"
    elif path == "/upgrade":
        yield b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n"
    elif path == "/empty":
        yield ok + b"content-length: 0\r\n\r\n"
    elif path == "/text.png":
        yield ok + b"content-length: 5\r\n\r\nhello"
    elif path != "/closed":
        yield {"/hints": b"HTTP/1.1 103 Early Hints\r\ncontent-length: 7\r\n\r\n"}.get(path, b"")
        yield ok + {"/identity": b"content-encoding: Identity\r\n", "/plain": b"content-encoding:\r\n"}.get(path, b"")
        content = PICTURE + bytes(60_000 if path.startswith("/large") else 0)
        yield f"content-length: {len(content)}\r\n\r\n".encode() + content


class Served:
    """A front end and its network, in an event loop that stands still between two calls."""

    def __init__(self, folder: str, config: MediaConfig, resolves: bool) -> None:
        self.network = Network()
        self.stack = AsyncExitStack()
        self.runner = asyncio.Runner()
        self._setting = (folder, config, resolves)
        self.front_end = self.runner.run(self._start())

    async def _start(self) -> VisionFrontEnd:
        folder, config, resolves = self._setting
        await self.stack.enter_async_context(self.network.serving())
        resolve = self.network.resolve if resolves else None
        started = serving(folder, config=config, resolve=resolve, connect=self.network.connect)
        return await self.stack.enter_async_context(started)

    def chat(self, *parts: dict[str, object] | str) -> tuple[int, str]:
        """Status and body of the answer."""
        answer = self.runner.run(self.front_end.chat(*parts))
        return answer.status_code, answer.text

    def generate(self, num_prompts: int, image_data: object) -> tuple[int, str]:
        """Asks for so many prompts with a picture each."""
        body = {"text": [PROMPT] * num_prompts, "image_data": image_data, "sampling_params": {"max_new_tokens": 1}}
        answer = self.runner.run(self.front_end.http.post("/generate", json=body))
        return answer.status_code, answer.text

    def close(self) -> None:
        self.runner.run(self.stack.aclose())
        self.runner.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return vision_folder(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def served(folder: str) -> Iterator[Served]:
    served = Served(folder, CONFIG, resolves=True)
    assert served.chat(image_part(data_url(PICTURE)))[0] == 200
    before_kb = reset_peak_kb()
    yield served
    assert (peak_kb() - before_kb) << 10 < MOST_BYTES, "the peak of all bad requests together"
    assert served.chat(image_part(data_url(PICTURE)))[0] == 200, "others are served on"
    served.close()


@pytest.fixture(scope="module")
def anywhere(folder: str) -> Iterator[Served]:
    """Fetches from every host, with the system's resolver."""
    served = Served(folder, MediaConfig(allowed_media_domains=("*",)), resolves=False)
    yield served
    served.close()


def reset_peak_kb() -> int:
    """Begins to look for the peak of this process's memory; returns what it has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_kb()


def peak_kb() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def check(answer: tuple[int, str], words: str) -> None:
    status, text = answer
    assert status == 400, text
    assert re.search(words, text.replace('\\"', '"')), text


@pytest.mark.parametrize("url", bad_media.URLS)
def test_a_url_that_is_not_allowed_is_not_even_looked_up(served: Served, url: str) -> None:
    served.network.looked_up.clear()
    check(served.chat(image_part(url)), bad_media.URLS[url])
    assert served.network.looked_up == []


@pytest.mark.parametrize("host", bad_media.ADDRESSES)
def test_an_address_that_is_not_public_is_not_dialled_however_it_is_written(anywhere: Served, host: str) -> None:
    check(anywhere.chat(image_part(f"http://{host}/a.png")), f"{bad_media.NOT_PUBLIC}|has no address")
    assert anywhere.network.dialled == []


@pytest.mark.parametrize("path", bad_media.ANSWERS)
def test_a_server_that_answers_wrongly_costs_the_request_alone(served: Served, path: str) -> None:
    served.network.dialled.clear()
    check(served.chat(image_part(f"http://allowed.example{path}")), bad_media.ANSWERS[path])
    assert all(dialled == (PUBLIC, "allowed.example") for dialled in served.network.dialled)
    assert len(served.network.dialled) == (4 if path == "/loop" else 1)


def test_allowed_urls_are_fetched_once_at_the_address_that_was_checked(served: Served) -> None:
    served.network.dialled.clear()
    part = image_part("http://allowed.example/twice")
    status, text = served.chat(part, part)
    assert status == 200, text
    hosts = ["allowed.example", "x.cdn.example", "x.cdn.example"]
    assert served.network.dialled == [(PUBLIC, host) for host in hosts]
    fetched = served.front_end.requests[-1].media
    assert served.chat(image_part(data_url(PICTURE)))[0] == 200
    assert {item.digest for item in fetched} == {served.front_end.requests[-1].media[0].digest}


@pytest.mark.parametrize("path", ["/hints", "/identity", "/plain"])
def test_answers_before_the_final_one_and_codings_that_are_none_change_nothing(served: Served, path: str) -> None:
    status, text = served.chat(image_part(f"http://allowed.example{path}"))
    assert status == 200, text


def test_a_request_fetches_few_of_its_urls_at_a_time(served: Served) -> None:
    served.network.most_open = 0
    parts = [image_part(f"http://allowed.example/slow?{number}") for number in range(8)]
    check(served.chat(*parts), "took longer than 0.3 s")
    assert served.network.most_open == loader.MAX_AT_ONCE


@pytest.mark.parametrize(("turn_s", "status"), [(60.0, 200), (0.1, 429)])
def test_slow_urls_of_others_make_a_request_wait_and_are_not_blamed_on_it(
    served: Served, monkeypatch: pytest.MonkeyPatch, turn_s: float, status: int
) -> None:
    monkeypatch.setattr(loader, "TURN_S", turn_s)

    async def scenario() -> None:
        slow = [
            asyncio.create_task(served.front_end.chat(image_part(f"http://allowed.example/slow?{number}")))
            for number in range(2 * loader.MAX_FETCHING)
        ]
        await asyncio.sleep(0.05)
        answer = await served.front_end.chat(image_part("http://allowed.example/a.png"))
        assert answer.status_code == status, answer.text
        if status == 429:
            assert "16 others fetch" in answer.text and "retry-after" in answer.headers
        await asyncio.wait(slow)

    served.runner.run(scenario())


def test_what_is_fetched_is_bounded_and_goes_with_the_clients_who_wait_for_it(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.network.dialled.clear()
    release = threading.Event()

    def stuck(request: bytes, limits: Limits) -> bytearray:
        assert release.wait(30)
        raise InvalidRequest("too late")

    monkeypatch.setattr(SANDBOX, "call", stuck)

    async def scenario() -> None:
        calls = [
            asyncio.create_task(served.front_end.chat(image_part(f"http://allowed.example/{number}.png")))
            for number in range(loader.MAX_FETCHING + 8)
        ]
        while len(served.network.dialled) < loader.MAX_FETCHING:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert len(served.network.dialled) == loader.MAX_FETCHING
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)

    try:
        served.runner.run(scenario())
        gc.collect()
        assert not any(type(one) is ImageSource for one in gc.get_objects())
    finally:
        release.set()


def test_one_picture_of_many_prompts_is_fetched_and_decoded_once(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.network.dialled.clear()
    limits = noted_limits(monkeypatch)
    status, text = served.generate(5, "http://allowed.example/large.png")
    assert status == 200, text
    assert len(served.network.dialled) == len(limits) == 1
    assert len({request.media for request in served.front_end.requests[-5:]}) == 1


def test_limits_hold_for_all_prompts_of_a_call(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = noted_limits(monkeypatch)
    urls = [f"http://allowed.example/large{number}.png" for number in range(2)]
    check(served.generate(2, urls), "more than 100000 bytes of pictures, videos and sounds")
    assert served.generate(2, [urls[0], data_url(PICTURE)])[0] == 200
    assert limits[2].cpu_s < limits[1].cpu_s == CONFIG.media_max_cpu_s


def noted_limits(monkeypatch: pytest.MonkeyPatch) -> list[Limits]:
    """Notes what each call of a decoder may use."""
    call, noted = SANDBOX.call, list[Limits]()

    def note(request: bytes, limits: Limits) -> bytearray:
        noted.append(limits)
        return call(request, limits)

    monkeypatch.setattr(SANDBOX, "call", note)
    return noted


@pytest.mark.parametrize("name", bad_media.FILES)
def test_a_file_that_is_no_picture_is_refused(served: Served, name: str) -> None:
    parts, words = bad_media.FILES[name]
    check(served.chat("Look:", *parts), words)


@pytest.mark.parametrize("name", bad_media.LIES)
def test_a_gateways_tensors_must_agree_with_each_other(served: Served, name: str) -> None:
    inputs, words = bad_media.LIES[name]
    pads = 1 if inputs.image_urls or inputs.image_data else 4
    ids = [5, *[served.front_end.image] * pads, 6]
    request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=ids), mm_inputs=inputs)

    async def send() -> None:
        async for _ in pb_grpc.SglangSchedulerStub(served.front_end.channel).Generate(request):
            pass

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        served.runner.run(send())
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, refused.value
    assert re.search(words, str(refused.value.details())), refused.value.details()


def test_a_model_without_a_tower_fetches_nothing(folder: str) -> None:
    network = Network()

    async def scenario() -> None:
        started = serving(folder, config=CONFIG, resolve=network.resolve, connect=network.connect, has_tower=False)
        async with started as front_end:
            answer = await front_end.chat(image_part("http://allowed.example/a.png"))
            assert answer.status_code == 400 and "the model takes text alone" in answer.text
            body = {"text": "a<|image_pad|>", "image_data": data_url(PICTURE)}
            answer = await front_end.http.post("/generate", json=body)
            assert answer.status_code == 400 and "the model takes text alone" in answer.text
            request = pb.GenerateRequest(mm_inputs=bad_media.inputs())
            with pytest.raises(grpc.aio.AioRpcError, match="the model takes text alone"):
                async for _ in pb_grpc.SglangSchedulerStub(front_end.channel).Generate(request):
                    pass

    asyncio.run(scenario())
    assert network.looked_up == []
