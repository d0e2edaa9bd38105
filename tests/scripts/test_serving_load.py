"""Requests are sent when they are due, and answers are read however servers send and networks cut them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import numpy as np
import pytest

from jaxsgl.bench.backend import Answer, Served, Turn
from jaxsgl.bench.http_backends import DIALECTS, HttpBackend, chat_body
from jaxsgl.bench.http_stream import HttpServer
from jaxsgl.bench.load import DatasetConfig, ServingConfig, backend_of, num_turns
from jaxsgl.bench.requests import OUTPUT, Ask, prompt_ids, prompt_pieces
from jaxsgl.bench.run import Outcome, Run


class EchoBackend:
    """A backend that answers with the request's number after some turns of the event loop, and notes arrival times."""

    def __init__(self, failing: Sequence[int] = ()) -> None:
        self.turns: list[Turn] = []
        self.num_open = self.max_open = 0
        self._failing = failing

    async def describe(self) -> Served:
        return Served("echo", 1000)

    async def generate(self, turn: Turn, answer: Answer) -> None:
        number = len(self.turns)
        self.turns.append(turn)
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        answer.sent_s = time.monotonic()
        for _ in range(5):
            await asyncio.sleep(0)
        answer.output_ids = [number]
        answer.count(1, turn.output_len, 0)
        answer.add(time.monotonic(), str(number), turn.output_len)
        answer.error = "refused" if number in self._failing else ""
        answer.finish(complete=True)
        self.num_open -= 1

    async def flush_cache(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


def send(asks: list[Ask], backend: EchoBackend, max_concurrency: int | None = None) -> Outcome:
    async def whole() -> Outcome:
        return await Run(backend, 1000, 1, max_concurrency).send(asks, lambda _: None)

    return asyncio.run(whole())


def test_arrivals_are_poisson() -> None:
    asks = DatasetConfig(num_prompts=4000, request_rate=50.0).asks()
    gaps_s = np.diff([ask.at_s for ask in asks])
    assert gaps_s.mean() == pytest.approx(1 / 50, rel=0.05) and gaps_s.std() == pytest.approx(1 / 50, rel=0.1)
    assert {ask.at_s for ask in DatasetConfig(num_prompts=10).asks()} == {0.0}, "all at once by default"


def test_a_request_is_sent_when_its_time_has_come_and_the_first_at_once() -> None:
    asks = [Ask(at_s, (number,), (5,), 3) for number, at_s in enumerate((7.0, 7.05, 7.2))]
    start_s = time.monotonic()
    outcome = send(asks, EchoBackend())
    after_s = [answer.sent_s - start_s for answer in outcome.answers]
    assert after_s[1] > 0.045 and after_s[2] > 0.195 and outcome.duration_s < 7


@pytest.mark.parametrize("most", [1, 3])
def test_no_more_than_the_allowed_requests_are_open(most: int) -> None:
    backend = EchoBackend()
    outcome = send([Ask(0.0, (number,), (5,), 3) for number in range(20)], backend, most)
    assert backend.max_open == most and len(outcome.answers) == 20


def conversation() -> Ask:
    second = Ask(0.0, (1, OUTPUT, 2), (5, 3, 4), 3)
    return Ask(0.0, (1,), (5,), 3, then=second)


def test_a_turn_follows_its_answer_and_holds_it() -> None:
    backend = EchoBackend()
    send([conversation()], backend)
    first, second = backend.turns
    assert second.prompt_ids() == [*first.prompt_ids(), 0, *second.prompt_ids()[-4:]]
    roles = [(message["role"], len(message["content"].split())) for message in chat_body(second, "m", True)["messages"]]
    assert roles == [("user", 5), ("assistant", 1), ("user", 4)]


def test_a_conversation_may_have_any_number_of_turns() -> None:
    config = DatasetConfig(
        dataset_name="multi-turn", num_prompts=4000, turns=3000, turn_input_len=1, turn_output_len=1, turn_system_len=1
    )
    turns = [num_turns(ask) for ask in config.asks()]
    assert sum(turns) == 4000 and max(turns) > 1000


def test_a_failed_turn_ends_its_conversation_alone() -> None:
    backend = EchoBackend(failing=[0])
    outcome = send([conversation(), conversation()], backend)
    assert [answer.error for answer in outcome.answers] == ["refused", "", ""]


def test_prompts_have_the_simulators_prefixes_and_differ_by_seed() -> None:
    ask = Ask(0.0, (1, OUTPUT, 2), (50, 3, 40), 3)
    (first, answer, last), other = prompt_pieces(ask, 900, 0), prompt_pieces(ask, 900, 5)
    assert first is not None and last is not None
    assert answer is None and [*first, 0, 0, 0, *last] == prompt_ids(ask, 900)
    assert other[0] != first and other[0] == prompt_pieces(Ask(0.0, (1,), (50,), 3), 900, 5)[0]


def chunked(*parts: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [*parts, b""])


USAGE = b'"usage": {"prompt_tokens": 4, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}'
HELLO = b'data: {"choices": [{"text": "h\\u00e9"}], "usage": null}\n\n'
END = b'data: {"choices": [], ' + USAGE + b"}\n\n"
DONE = b"data: [DONE]\n\n"


def answered(wire: bytes, size: int = 1 << 20, dialect: str = "openai") -> Answer:
    """What a backend makes of a server that sends `wire` in pieces of `size` and closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        for start in range(0, len(wire), size):
            writer.write(wire[start : start + size])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async def ask() -> Answer:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            backend = HttpBackend(HttpServer(f"http://127.0.0.1:{port}/v1/", "key"), DIALECTS[dialect], "m", True)
            answer = Answer()
            await backend.generate(Turn([[1, 2]], [], 3), answer)
            return answer

    return asyncio.run(ask())


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
@pytest.mark.parametrize("line", [b"\n", b"\r\n"])
def test_events_are_read_however_the_network_cuts_them(size: int, line: bytes) -> None:
    wire = chunked(*(part.replace(b"\n", line) for part in (b": ping\n\n", HELLO, HELLO + END, DONE)))
    answer = answered(wire, size)
    assert (answer.error, answer.text, len(answer.chunks)) == ("", "héhé", 2)
    assert (answer.input_len, answer.cached_len, answer.output_len) == (4, 2, 3)


def test_chats_read_thoughts_and_contents() -> None:
    deltas = (b'{"role": "assistant", "content": ""}', b'{"reasoning_content": "hm"}', b'{"content": "yes"}')
    events = [b'data: {"choices": [{"delta": ' + delta + b"}]}\n\n" for delta in deltas]
    answer = answered(chunked(*events, END, DONE), dialect="openai-chat")
    assert (answer.error, answer.texts) == ("", ["hm", "yes"])


def test_a_usage_in_each_chunk_says_how_many_tokens_it_brought() -> None:
    event = b'data: {"choices": [{"text": "%s"}], "usage": {"prompt_tokens": 4, "completion_tokens": %d}}\n\n'
    answer = answered(chunked(event % (b"a", 1), event % (b"", 2), event % (b"b", 3), END, DONE))
    assert (answer.error, answer.text, answer.output_len) == ("", "ab", 3)
    assert [count for _, count in answer.chunks] == [1, 3]
    assert len(answer.itls_s) == 2


def test_sglangs_events_hold_all_text_and_counts_so_far() -> None:
    event = b'data: {"text": "%s", "output_ids": %s, "meta_info": {"prompt_tokens": 4, "completion_tokens": %d}}\n\n'
    last = b'data: {"text": "abc", "output_ids": [5, 6, 7], "meta_info": {"prompt_tokens": 4, "completion_tokens": 3, '
    last += b'"cached_tokens": 1, "finish_reason": {"type": "length", "length": 3}}}\n\n'
    answer = answered(chunked(event % (b"", b"[5]", 1), event % (b"ab", b"[5, 6]", 2), last, DONE), dialect="sglang")
    assert (answer.error, answer.text, answer.output_ids) == ("", "abc", [5, 6, 7])
    assert [count for _, count in answer.chunks] == [2, 3]


REFUSED = b'HTTP/1.1 429 Too Many\r\nContent-Length: 9\r\n\r\n{"error"}'
ERROR = b'data: {"error": {"message": "out of luck"}}\n\n'


@pytest.mark.parametrize(
    ("wire", "told"),
    [
        (REFUSED, '429: {"error"}'),
        (chunked(HELLO, ERROR, DONE), "out of luck"),
        (chunked(HELLO, END), "broke off"),
        (chunked(HELLO, END, DONE)[:150], "broke off"),
        (chunked(HELLO, DONE), "no usage"),
        (chunked(b"data: {oh\n\n", DONE), "(byte 1): {oh"),
        (b"SSH-2.0-OpenSSH\r\n", "HttpParser"),
        (b"", "closed without an answer"),
    ],
    ids=["refused", "error", "no end", "cut", "no usage", "no JSON", "no HTTP", "nothing"],
)
def test_a_broken_answer_is_an_error_that_says_why(wire: bytes, told: str) -> None:
    assert told in answered(wire).error


def test_an_address_of_version_6_is_one_with_and_without_its_brackets() -> None:
    for host in ("::1", "[::1]"):
        backend = backend_of(ServingConfig(host=host, port=7))
        assert isinstance(backend, HttpBackend)
        assert (backend._server._host, backend._server._port) == ("::1", 7)


def test_an_address_without_a_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="http://HOST:PORT"):
        HttpServer("127.0.0.1:30000", None)
