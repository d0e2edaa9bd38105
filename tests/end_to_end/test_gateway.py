"""Several workers behind the gateway: the real `smg` routes real requests to two servers of the bundled model.

The gateway is up before its workers are, as after a power cut. A test that observes a worker asks the worker
itself, past the gateway.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from bench.processes import free_ports

from tests.end_to_end import serve_poisoned
from tests.end_to_end.gateway import PATIENCE_S, Gateway, Worker, client_of, running_gateway, wait_for
from tests.end_to_end.servers import COMMON_FLAGS, START_TIMEOUT_S, running_server
from tests.end_to_end.texts import filler

pytestmark = pytest.mark.foreign

PAGE_SIZE = 16
NUM_WORKERS = 2
MODEL = "tiny"
WORKER_FLAGS = (*COMMON_FLAGS, "--served-model-name", MODEL, "--page-size", str(PAGE_SIZE), "--drain-s", "100")
GATEWAY_FLAGS = (
    "--policy", "cache_aware", "--block-size", str(PAGE_SIZE),
    "--health-check-interval-secs", "1", "--health-success-threshold", "1",
    # By default a worker is left out 2 s after its last sign of life, but all retries are over after 0.7 s.
    "--retry-initial-backoff-ms", "250",
    # By default a worker with four requests and no token for 3 s counts as stuck: a busy machine may take as long.
    "--worker-wedge-secs", "30",
    # By default a worker with eight requests that wait gets no new ones while another has fewer, even a dead one.
    "--disable-worker-overload-protection",
    # By default some requests go to workers that know few prefixes, wherever the request's prefix is.
    "--worker-warmup-secs", "0", "--worker-warmup-divert-every", "0",
)  # fmt: skip
STORY = "Tell me a story about a fox."
LONG = 1900  # tokens, nearly as many as the context has: a request whose client left should not end by itself
SHORT = 200


class Fleet:
    """A gateway and its workers, whose ports stay the same when they are started again."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._num_starts = 0
        ports = free_ports(2 * NUM_WORKERS)
        self._ports = [ports[2 * index : 2 * index + 2] for index in range(NUM_WORKERS)]
        addresses = [f"127.0.0.1:{grpc_port}" for grpc_port, _ in self._ports]
        self.gateway: Gateway = stack.enter_context(running_gateway(folder, addresses, GATEWAY_FLAGS))
        self.workers = [self.start_worker(index) for index in range(NUM_WORKERS)]

    def start_worker(self, index: int) -> Worker:
        self._num_starts += 1
        folder = self._folder / f"worker{self._num_starts}"
        folder.mkdir()
        grpc_port, http_port = self._ports[index]
        flags = (*WORKER_FLAGS, "--grpc-port", str(grpc_port), "--port", str(http_port))
        return Worker(self._stack.enter_context(running_server(folder, flags, (serve_poisoned.__file__,))))

    def wait_until_all_are_healthy(self) -> None:
        addresses = sorted(worker.address for worker in self.workers)
        wait_for(lambda: self.gateway.healthy() == addresses, "healthy workers", START_TIMEOUT_S)

    @property
    def client(self) -> openai.OpenAI:
        return client_of(self.gateway.url, self._stack)

    def client_of(self, worker: Worker) -> openai.OpenAI:
        return client_of(f"http://{worker.http}", self._stack)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        fleet = Fleet(tmp_path_factory.mktemp("fleet"), stack)
        fleet.wait_until_all_are_healthy()
        yield fleet


def user(text: str) -> dict[str, Any]:
    """A chat request of one turn, greedy."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0}


def endless(text: str) -> dict[str, Any]:
    return {**user(text), "max_tokens": LONG, "extra_body": {"ignore_eos": True}}


def text_of(stream: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_workers_that_were_still_loading_are_registered_with_their_model(fleet: Fleet) -> None:
    for worker in fleet.workers:
        known = fleet.gateway.workers()[worker.address]
        assert (known["status"], known["runtime_type"], known["model_id"]) == ("ready", "sglang", MODEL)
        assert known["labels"]["page_size"] == str(PAGE_SIZE)
    assert [model.id for model in fleet.client.models.list()] == [MODEL]


@pytest.mark.parametrize("question", ["What is 3 + 4?", "Say hello in Japanese.", "Count from 1 to 30"])
def test_answers_equal_the_workers_own_whole_and_streamed(fleet: Fleet, question: str) -> None:
    own = fleet.client_of(fleet.workers[0]).chat.completions.create(**user(question))
    whole = fleet.client.chat.completions.create(**user(question))
    assert whole.choices[0].message.content == own.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert own.usage is not None
    assert whole.usage.prompt_tokens == own.usage.prompt_tokens
    assert whole.usage.completion_tokens == own.usage.completion_tokens
    stream = fleet.client.chat.completions.create(**user(question), stream=True)
    assert text_of(stream) == whole.choices[0].message.content


def test_a_text_is_continued(fleet: Fleet) -> None:
    request: dict[str, Any] = {"model": MODEL, "prompt": "3 4 5 6", "temperature": 0, "max_tokens": 8}
    whole = fleet.client.completions.create(**request).choices[0]
    assert (whole.text, whole.finish_reason) == (" 7 8 9 1", "length")
    stream = fleet.client.completions.create(**request, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == whole.text


def test_log_probabilities_equal_the_workers_own(fleet: Fleet) -> None:
    request = {**user("What is 3 + 4?"), "logprobs": True, "top_logprobs": 3}
    own = fleet.client_of(fleet.workers[0]).chat.completions.create(**request).choices[0].logprobs
    through = fleet.client.chat.completions.create(**request).choices[0].logprobs
    assert own is not None
    assert through is not None
    assert through.content
    for ours, theirs in zip(own.content or [], through.content, strict=False):  # ours may include the end token
        assert (ours.token, ours.logprob) == (theirs.token, pytest.approx(theirs.logprob, abs=1e-4))
        assert [top.token for top in ours.top_logprobs] == [top.token for top in theirs.top_logprobs]


def test_several_answers_have_an_index_each(fleet: Fleet) -> None:
    answers = fleet.client.chat.completions.create(**user("Who are you?"), n=2).choices
    assert [answer.index for answer in answers] == [0, 1]
    assert answers[0].message.content == answers[1].message.content != ""
    texts = {0: "", 1: ""}
    for chunk in fleet.client.chat.completions.create(**user("Who are you?"), n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert set(texts.values()) == {answers[0].message.content}


def test_a_stop_string_cuts_the_answer(fleet: Fleet) -> None:
    (answer,) = fleet.client.chat.completions.create(**user("Count from 1 to 30"), stop=["7"]).choices
    assert (answer.message.content, answer.finish_reason) == ("1 2 3 4 5 6 ", "stop")


def test_a_request_that_can_never_be_served_is_a_400_that_says_why(fleet: Fleet) -> None:
    with pytest.raises(openai.BadRequestError, match="2048"):
        fleet.client.chat.completions.create(**user("word " * 3000))


def test_an_answer_holds_to_a_schema(fleet: Fleet) -> None:
    schema = {"type": "object", "properties": {"sum": {"enum": [6, 7]}}, "required": ["sum"]}
    whole = {"name": "sum", "schema": {**schema, "additionalProperties": False}}
    asked = {**user("What is 3 + 4?"), "response_format": {"type": "json_schema", "json_schema": whole}}
    (answer,) = fleet.client.chat.completions.create(**asked).choices
    assert answer.finish_reason == "stop" and json.loads(answer.message.content or "") in ({"sum": 6}, {"sum": 7})


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_at_which_a_worker_fails_reaches_no_other_worker(fleet: Fleet, stream: bool) -> None:
    """The worker goes on; neither the gateway nor the client, which repeats what failed, sends the request again."""
    before = [worker.failed for worker in fleet.workers]
    poison = {**user("Hello!"), "frequency_penalty": serve_poisoned.POISON, "stream": stream}
    client = fleet.client.with_options(max_retries=2)
    with pytest.raises(openai.BadRequestError, match=r"the server failed at this request .OverflowError.*don't repeat"):
        client.chat.completions.create(**poison)
    assert sorted(worker.failed - count for worker, count in zip(fleet.workers, before, strict=True)) == [0, 1]
    for worker in fleet.workers:
        own = fleet.client_of(worker).chat.completions.create(**user("What is 3 + 4?"))
        assert own.choices[0].finish_reason == "stop"
    assert len(fleet.gateway.healthy()) == NUM_WORKERS


def only_running(fleet: Fleet) -> Worker:
    """The worker that runs the only request."""
    return wait_for(lambda: next((worker for worker in fleet.workers if worker.running), None), "running request")


def check_it_was_freed(worker: Worker, aborted: int, tokens: int) -> None:
    wait_for(lambda: worker.running == 0, "end of the request in the worker")
    assert worker.aborted == aborted + 1
    assert worker.output_tokens - tokens < LONG


def test_a_client_that_leaves_its_stream_frees_the_worker(fleet: Fleet) -> None:
    before = {worker.address: (worker.aborted, worker.output_tokens) for worker in fleet.workers}
    with fleet.client.chat.completions.create(**endless(STORY), stream=True) as stream:
        next(iter(stream))
        worker = only_running(fleet)
    check_it_was_freed(worker, *before[worker.address])


def test_a_client_that_leaves_before_its_whole_answer_frees_the_worker(fleet: Fleet) -> None:
    before = {worker.address: (worker.aborted, worker.output_tokens) for worker in fleet.workers}
    body = json.dumps({**user(STORY), "max_tokens": LONG, "ignore_eos": True}).encode()
    lines = ("POST /v1/chat/completions HTTP/1.1", "Host: gateway", "Content-Type: application/json")
    head = "".join(f"{line}\r\n" for line in (*lines, f"Content-Length: {len(body)}", ""))
    host, _, port = fleet.gateway.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        worker = only_running(fleet)
    check_it_was_freed(worker, *before[worker.address])


def teach(fleet: Fleet, worker: Worker, prefix: str) -> None:
    """Has a worker compute `prefix` past the gateway, which learns of it by the worker's cache events alone."""
    known = fleet.gateway.known_pages(worker)
    fleet.client_of(worker).chat.completions.create(**user(f"{prefix} One?"), max_tokens=1)
    wait_for(lambda: fleet.gateway.known_pages(worker) >= known + 5, "events of the worker's new pages")


def test_a_request_goes_to_the_worker_that_reported_its_prefix(fleet: Fleet) -> None:
    for turn in range(4):
        worker, other = fleet.workers[turn % 2], fleet.workers[1 - turn % 2]
        prefix = filler(seed=turn, num_sentences=20)
        teach(fleet, worker, prefix)
        ended = other.ended
        answer = fleet.client.chat.completions.create(**user(f"{prefix} And another?"), max_tokens=1)
        assert other.ended == ended
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens >= answer.usage.prompt_tokens // 2


def test_requests_with_a_common_prefix_share_a_worker(fleet: Fleet) -> None:
    prefix = filler(seed=100, num_sentences=20)
    before = [worker.ended for worker in fleet.workers]
    for number in range(6):
        fleet.client.chat.completions.create(**user(f"{prefix} Question {number}?"), max_tokens=1)
    counts = [worker.ended - count for worker, count in zip(fleet.workers, before, strict=True)]
    assert sorted(counts) == [0, 6]


def test_cache_events_arrive_without_gaps_and_after_their_parents(fleet: Fleet) -> None:
    assert sum(map(fleet.gateway.known_pages, fleet.workers)) > 0
    for name in ("gaps_total", "missed_batches_total", "parentless_stores_total"):
        assert fleet.gateway.count(f"smg_kv_event_{name}") == 0, name
    resyncs = "smg_kv_event_resyncs_total"
    assert fleet.gateway.count(resyncs) == fleet.gateway.count(resyncs, "snapshot") == NUM_WORKERS
    assert fleet.gateway.count("smg_kv_events_unavailable") == 0


def test_flushing_the_gateway_flushes_the_workers(fleet: Fleet) -> None:
    answer = httpx.post(f"{fleet.gateway.url}/flush_cache", timeout=PATIENCE_S).json()
    assert (answer["status"], answer["workers_flushed"]) == ("success", NUM_WORKERS)
    wait_for(lambda: sum(map(fleet.gateway.known_pages, fleet.workers)) == 0, "events of the flush")


def test_loads_of_all_workers_are_reported(fleet: Fleet) -> None:
    def loads() -> list[dict[str, Any]]:
        given: list[dict[str, Any]] = httpx.get(f"{fleet.gateway.url}/loads", timeout=PATIENCE_S).json()["loads"]
        return given if len(given) == NUM_WORKERS else []

    assert all(load["max_running_requests"] == 8 for load in wait_for(loads, "loads of all workers"))


def outcome_of(fleet: Fleet, number: int) -> str:
    """`done`, `broken stream`, or the error; it always returns. Requests with an odd number are streamed."""
    request = {**user(f"{number}. {STORY}"), "max_tokens": SHORT, "extra_body": {"ignore_eos": True}}
    try:
        if number % 2 == 0:
            answer = fleet.client.chat.completions.create(**request)
            return "done" if answer.usage and answer.usage.completion_tokens == SHORT else "short"
        chunks = [chunk for chunk in fleet.client.chat.completions.create(**request, stream=True) if chunk.choices]
        return "done" if chunks[-1].choices[0].finish_reason == "length" else "short"
    except openai.APITimeoutError:
        return "hung"
    except openai.APIError as error:
        return "broken stream" if type(error) is openai.APIError else repr(error)


def test_a_worker_that_is_killed_costs_no_more_than_its_open_streams(fleet: Fleet) -> None:
    """Under load nothing hangs, whole answers come from the other worker, new requests succeed; it may come back."""
    with (
        fleet.client.chat.completions.create(**endless(STORY), stream=True) as stream,
        ThreadPoolExecutor(24) as threads,
    ):
        chunks = iter(stream)
        next(chunks)
        victim = only_running(fleet)
        place = fleet.workers.index(victim)
        outcomes = [threads.submit(outcome_of, fleet, number) for number in range(24)]
        next(as_completed(outcomes))  # the others are under way
        victim.server.process.kill()
        assert {outcome.result() for outcome in outcomes[::2]} == {"done"}
        assert {outcome.result() for outcome in outcomes[1::2]} <= {"done", "broken stream"}
        with pytest.raises(openai.APIError):
            list(chunks)
    assert {outcome_of(fleet, number) for number in range(100, 102)} == {"done"}
    wait_for(lambda: fleet.gateway.healthy() == [fleet.workers[1 - place].address], "verdict on the dead worker")

    fleet.workers[place] = back = fleet.start_worker(place)
    fleet.wait_until_all_are_healthy()
    renewed = ("smg_kv_event_resyncs_total", back.address, "out_of_range")
    wait_for(lambda: fleet.gateway.count(*renewed) == 1, "end of the belief in the old cache")
    prefix = filler(seed=200, num_sentences=20)
    teach(fleet, back, prefix)
    fleet.client.chat.completions.create(**user(f"{prefix} And another?"), max_tokens=1)
    assert back.ended == 2


def test_a_worker_that_gets_sigterm_finishes_its_streams_and_gets_no_new_ones(fleet: Fleet) -> None:
    with fleet.client.chat.completions.create(**endless(STORY), stream=True) as stream:
        chunks = iter(stream)
        next(chunks)
        leaving = only_running(fleet)
        leaving.server.process.send_signal(signal.SIGTERM)
        assert {outcome_of(fleet, number) for number in range(200, 202)} == {"done"}
        reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == "length"
    assert leaving.server.process.wait(PATIENCE_S) == 0


def test_the_gateway_ends_at_sigterm(fleet: Fleet) -> None:
    assert fleet.gateway.stop() == 0
