"""Prefill and decode in servers of their own, behind the real gateway: the same answers as from one server for both."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from bench.processes import free_ports

from tests.end_to_end.gateway import PATIENCE_S, Gateway, Worker, client_of, running_gateway, wait_for
from tests.end_to_end.servers import COMMON_FLAGS, START_TIMEOUT_S, RunningServer, running_server
from tests.end_to_end.texts import filler
from tests.grids import NIGHTLY

pytestmark = [pytest.mark.foreign, pytest.mark.usefixtures("fully_optimized")]

MODEL = "tiny"
FLAGS = (*COMMON_FLAGS, "--served-model-name", MODEL)
POOL_TOKENS, PAGE_SIZE = 8192, 16
OF_FLEET = ("--max-total-tokens", str(POOL_TOKENS), "--host-kv-gib", "0.25", "--host-kv-write-policy", "write_through")
ENDS_WITHIN_S = 60.0  # servers give each other 5 s of silence, 10 s to greet, a leg 30 s; the rest is for other load


class Fleet:
    """A gateway over a prefill server and a decode server, between which pages travel by `backend`."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack, backend: str) -> None:
        self._folder, self._stack = folder, stack
        self._backend = ("--disaggregation-transfer-backend", backend)
        self._num_starts = 0
        self.prefill: Worker
        self.decode: Worker
        self.port, *ports = free_ports(5)
        self._ports = {"prefill": ports[:2], "decode": ports[2:]}
        self.restart("prefill")
        self.restart("decode")
        flags = (
            "--pd-disaggregation", "--prefill", f"grpc://{self.prefill.address}", str(self.port),
            "--decode", f"grpc://{self.decode.address}", "--health-check-interval-secs", "1",
            "--health-success-threshold", "1", "--disable-retries",
        )  # fmt: skip
        self.gateway: Gateway = stack.enter_context(running_gateway(folder, (), flags))

    def restart(self, who: str) -> None:
        """Starts the server of that mode, at the ports that it always has."""
        ports = ("--grpc-port", str(self._ports[who][0]), "--port", str(self._ports[who][1]))
        bootstrap = ("--disaggregation-bootstrap-port", str(self.port)) if who == "prefill" else ()
        worker = Worker(self._start(who, ("--disaggregation-mode", who, *self._backend, *bootstrap, *ports)))
        if who == "prefill":
            self.prefill = worker
        else:
            self.decode = worker

    def _start(self, name: str, flags: tuple[str, ...]) -> RunningServer:
        self._num_starts += 1
        folder = self._folder / f"{name}{self._num_starts}"
        folder.mkdir()
        return self._stack.enter_context(running_server(folder, (*FLAGS, *OF_FLEET, *flags)))

    def client(self, url: str) -> openai.OpenAI:
        return client_of(url, self._stack)

    @property
    def through(self) -> openai.OpenAI:
        return self.client(self.gateway.url)

    @property
    def direct(self) -> openai.OpenAI:
        """The prefill server as one for both, which it is for requests without a room."""
        return self.client(f"http://{self.prefill.http}")

    def wait_until_ready(self) -> None:
        wait_for(lambda: len(self.gateway.healthy()) == 2, "healthy servers", START_TIMEOUT_S)

    def transfer(self, worker: Worker) -> dict[str, Any]:
        state: dict[str, Any] = httpx.get(f"http://{worker.http}/get_server_info", timeout=PATIENCE_S).json()
        return dict(state["internal_states"][0]["transfer"])

    def holds_nothing(self, worker: Worker) -> bool:
        return self.transfer(worker)["staged_bytes"] == 0 and worker.running == 0

    def check_that_nothing_is_left(self, *workers: Worker) -> None:
        for worker in workers:
            wait_for(partial(self.holds_nothing, worker), "end of rooms")
            state = httpx.get(f"http://{worker.http}/internal_state?check=true", timeout=PATIENCE_S).json()
            assert state["leaks"] == [], state


@pytest.fixture(scope="module")
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, fully_optimized: None
) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        fleet = Fleet(tmp_path_factory.mktemp("fleet"), stack, request.param)
        fleet.wait_until_ready()
        yield fleet


over_tcp = pytest.mark.parametrize("fleet", ["tcp"], indirect=True, scope="module")
# By day tests/transfer/ moves pages over NIXL, without servers.
over_both = pytest.mark.parametrize("fleet", ["tcp", "nixl"] if NIGHTLY else ["tcp"], indirect=True, scope="module")


def completion(prompt: list[int] | str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 8, **more}


def prompts() -> list[str]:
    lengths = range(1, 49) if NIGHTLY else (1, 2, 9, 30, 47)
    return [filler(seed=number, num_sentences=number) for number in lengths]


@over_both
def test_tokens_equal_those_of_one_server(fleet: Fleet) -> None:
    before = fleet.decode.output_tokens
    with ThreadPoolExecutor(4) as threads:
        ours = list(threads.map(lambda text: fleet.through.completions.create(**completion(text)), prompts()))
        own = list(threads.map(lambda text: fleet.direct.completions.create(**completion(text)), prompts()))
    for mine, through in zip(own, ours, strict=True):
        assert through.choices[0].text == mine.choices[0].text
        assert through.choices[0].finish_reason == mine.choices[0].finish_reason
        assert through.usage is not None and mine.usage is not None
        assert through.usage.prompt_tokens == mine.usage.prompt_tokens
    assert fleet.decode.output_tokens > before
    assert fleet.transfer(fleet.decode)["moved_bytes"] == fleet.transfer(fleet.prefill)["moved_bytes"] > 0
    fleet.check_that_nothing_is_left(fleet.prefill, fleet.decode)


@over_tcp
def test_streams_samples_and_chats_equal_those_of_one_server(fleet: Fleet) -> None:
    for extra in ({"n": 3}, {"logprobs": 2}, {"stop": ["a"]}, {"presence_penalty": 1.0}):
        asked = completion(filler(seed=77, num_sentences=12), **extra)
        own, through = fleet.direct.completions.create(**asked), fleet.through.completions.create(**asked)
        assert [choice.text for choice in through.choices] == [choice.text for choice in own.choices], extra
        streamed = ["" for _ in own.choices]
        for chunk in fleet.through.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
        assert streamed == [choice.text for choice in own.choices], extra
    chat: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi?"}], "temperature": 0}
    chat |= {"max_tokens": 8, "logprobs": True}
    mine, through_chat = fleet.direct.chat.completions.create(**chat), fleet.through.chat.completions.create(**chat)
    assert through_chat.choices[0].message.content == mine.choices[0].message.content
    assert through_chat.choices[0].logprobs is not None and mine.choices[0].logprobs is not None
    of_own = [entry.logprob for entry in mine.choices[0].logprobs.content or ()]
    assert [entry.logprob for entry in through_chat.choices[0].logprobs.content or ()] == pytest.approx(
        of_own, abs=1e-4
    )
    fleet.check_that_nothing_is_left(fleet.prefill, fleet.decode)


@over_tcp
def test_a_prompt_that_has_left_both_pools_is_loaded_from_host_memory_and_not_sent_again(fleet: Fleet) -> None:
    asked = completion(filler(seed=900, num_sentences=40))
    first = fleet.through.completions.create(**asked)
    num_pushed = 0
    for seed in range(901, 920):
        if num_pushed > POOL_TOKENS:
            break
        usage = fleet.through.completions.create(**completion(filler(seed=seed, num_sentences=170), max_tokens=1)).usage
        assert usage is not None
        num_pushed += usage.prompt_tokens - PAGE_SIZE
    workers = (fleet.prefill, fleet.decode)
    moved, loaded = fleet.transfer(fleet.decode)["moved_bytes"], [worker.loaded_tokens for worker in workers]
    again = fleet.through.completions.create(**asked)
    assert again.choices[0].text == first.choices[0].text
    assert fleet.transfer(fleet.decode)["moved_bytes"] == moved
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    expected = again.usage.prompt_tokens - PAGE_SIZE
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) >= expected
    for worker, before in zip(workers, loaded, strict=True):
        assert worker.loaded_tokens - before >= expected, worker.server.log.name
    fleet.check_that_nothing_is_left(fleet.prefill, fleet.decode)


@over_tcp
def test_prompt_log_probabilities_come_from_the_prefill_server(fleet: Fleet) -> None:
    text = filler(seed=5, num_sentences=9)
    body = {
        "text": text, "sampling_params": {"max_new_tokens": 4, "temperature": 0.0},
        "return_logprob": True, "logprob_start_len": 0, "model": MODEL,
    }  # fmt: skip
    own = httpx.post(f"http://{fleet.prefill.http}/generate", json=body, timeout=PATIENCE_S).json()
    got = httpx.post(f"{fleet.gateway.url}/generate", json=body, timeout=PATIENCE_S).json()
    got = got[0] if isinstance(got, list) else got
    scores = [entry[0] for entry in own["meta_info"]["input_token_logprobs"]]
    through = [entry[0] for entry in got["meta_info"]["input_token_logprobs"]]
    assert through[1:] == pytest.approx(scores[1:], abs=1e-4)


@over_tcp
def test_a_gateway_that_speaks_http_to_the_servers_gets_the_same_answers(fleet: Fleet, tmp_path: Path) -> None:
    flags = (
        "--pd-disaggregation", "--prefill", f"http://{fleet.prefill.http}", str(fleet.port),
        "--decode", f"http://{fleet.decode.http}", "--health-check-interval-secs", "1",
        "--health-success-threshold", "1", "--disable-retries",
    )  # fmt: skip
    moved = fleet.transfer(fleet.decode)["moved_bytes"]
    with running_gateway(tmp_path, (), flags) as gateway:
        wait_for(lambda: len(gateway.healthy()) == 2, "healthy servers", START_TIMEOUT_S)
        for number, extra in enumerate(({}, {"n": 3}, {"logprobs": 1})):
            asked = completion(filler(seed=300 + number, num_sentences=20), **extra)
            through = fleet.client(gateway.url).completions.create(**asked)
            own = fleet.direct.completions.create(**asked)
            assert [choice.text for choice in through.choices] == [choice.text for choice in own.choices], extra
        body = {
            "text": filler(seed=310, num_sentences=9), "sampling_params": {"max_new_tokens": 4, "temperature": 0.0},
            "return_logprob": True, "logprob_start_len": 0, "model": MODEL,
        }  # fmt: skip
        answers = [
            httpx.post(f"{url}/generate", json=body, timeout=PATIENCE_S).json()
            for url in (gateway.url, f"http://{fleet.prefill.http}")
        ]
        scores = [[entry[0] for entry in answer["meta_info"]["input_token_logprobs"]] for answer in answers]
        assert scores[0][1:] == pytest.approx(scores[1][1:], abs=1e-4)
    assert fleet.transfer(fleet.decode)["moved_bytes"] > moved
    fleet.check_that_nothing_is_left(fleet.prefill, fleet.decode)


@over_tcp
@pytest.mark.skipif(not NIGHTLY, reason="servers start anew")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("num_each", "of_prefill"), [(2, ()), (1, ("--tp", "2"))], ids=["two of each", "two devices to one"]
)
def test_larger_fleets_give_the_tokens_of_one_server(
    fleet: Fleet, tmp_path: Path, num_each: int, of_prefill: tuple[str, ...]
) -> None:
    with contextlib.ExitStack() as stack:
        workers: list[Worker] = []
        urls: list[str] = []
        ports = free_ports(5 * num_each)
        for mode in ("prefill", "decode"):
            for number in range(num_each):
                folder = tmp_path / f"{mode}{number}"
                folder.mkdir()
                flags = (
                    "--disaggregation-mode", mode, "--grpc-port", str(ports.pop()), "--port", str(ports.pop()),
                    *(of_prefill if mode == "prefill" else ()),
                )  # fmt: skip
                bootstrap = [str(ports.pop())] if mode == "prefill" else []
                flags += tuple(part for port in bootstrap for part in ("--disaggregation-bootstrap-port", port))
                workers.append(Worker(stack.enter_context(running_server(folder, (*FLAGS, *flags)))))
                urls += [f"--{mode}", f"grpc://{workers[-1].address}", *bootstrap]
        flags = (
            "--pd-disaggregation", *urls, "--policy", "round_robin", "--health-check-interval-secs", "1",
            "--health-success-threshold", "1", "--disable-retries",
        )  # fmt: skip
        gateway = stack.enter_context(running_gateway(tmp_path, (), flags))
        wait_for(lambda: len(gateway.healthy()) == 2 * num_each, "healthy servers", START_TIMEOUT_S)
        through = fleet.client(gateway.url)
        with ThreadPoolExecutor(4) as threads:
            got = list(threads.map(lambda text: through.completions.create(**completion(text)), prompts()))
            own = list(threads.map(lambda text: fleet.direct.completions.create(**completion(text)), prompts()))
        assert [answer.choices[0].text for answer in got] == [answer.choices[0].text for answer in own]
        asked = completion(filler(seed=78, num_sentences=20), n=3, logprobs=1)
        samples, own_samples = through.completions.create(**asked), fleet.direct.completions.create(**asked)
        assert [choice.text for choice in samples.choices] == [choice.text for choice in own_samples.choices]
        moved = [fleet.transfer(worker)["moved_bytes"] for worker in workers]
        assert all(moved) and sum(moved[:num_each]) == sum(moved[num_each:])
        fleet.check_that_nothing_is_left(*workers)


def outcome(fleet: Fleet, seed: int, stream: bool) -> str:
    """How a call with a long prompt of its own ended."""
    asked = completion(filler(seed=seed, num_sentences=170), stream=stream)
    try:
        answer = fleet.through.completions.create(**asked)
        return "done" if not stream or all(True for _ in answer) else "empty"
    except openai.APITimeoutError:
        return "hung"
    except openai.APIError as error:
        return str(error)


@over_both
@pytest.mark.skipif(not NIGHTLY, reason="servers start anew")
@pytest.mark.parametrize(
    ("who", "how"),
    [("decode", signal.SIGSTOP), ("prefill", signal.SIGSTOP), ("decode", signal.SIGKILL), ("prefill", signal.SIGKILL)],
)
def test_calls_end_in_time_if_a_server_stops_or_dies_while_pages_move(
    fleet: Fleet, who: str, how: signal.Signals
) -> None:
    """The other server serves on and holds nothing; the one that stopped or died serves again.

    The gateway reads decode's answer after prefill's. So while a prefill server stands still, decode has refused the
    request in time, but the client hears of it when prefill goes on or dies.
    """
    victim: Worker = getattr(fleet, who)
    other = fleet.prefill if who == "decode" else fleet.decode
    pids = [victim.server.process.pid, victim.server.engine_pid]
    first_seed = 5000 + (["decode", "prefill"].index(who) * 2 + (how is signal.SIGKILL)) * 1000
    calls: list[Future[str]] = []
    with ThreadPoolExecutor(3) as threads:

        def pages_move() -> bool:
            while sum(not call.done() for call in calls) < 3:  # those that ended had moved theirs between two looks
                seed = first_seed + len(calls)
                calls.append(threads.submit(outcome, fleet, seed, seed % 2 == 0))
            return bool(fleet.transfer(fleet.decode)["num_moving"] > 0)

        wait_for(pages_move, "pages on their way")
        try:
            for pid in pids:
                os.kill(pid, how)
            if (who, how) == ("prefill", signal.SIGSTOP):
                wait_for(partial(fleet.holds_nothing, fleet.decode), "refusal of decode", ENDS_WITHIN_S)
                leg = {"bootstrap_host": "127.0.0.1", "bootstrap_port": fleet.port, "bootstrap_room": 77}
                body = {"input_ids": list(range(5, 90)), "sampling_params": {"max_new_tokens": 2}, **leg}
                answer = httpx.post(f"http://{fleet.decode.http}/generate", json=body, timeout=ENDS_WITHIN_S)
                assert answer.status_code == 503, "decode's own answer comes in time while prefill stands still"
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
            ended = [call.result(timeout=ENDS_WITHIN_S) for call in calls]
        finally:
            if how is signal.SIGSTOP:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
    assert "hung" not in ended and any(how_it_ended != "done" for how_it_ended in ended), ended
    fleet.check_that_nothing_is_left(other)
    if how is signal.SIGKILL:
        victim.server.process.wait(PATIENCE_S)
        fleet.restart(who)
    fleet.wait_until_ready()
    text = filler(seed=4000 + first_seed, num_sentences=20)
    wait_for(lambda: answers(fleet, text), "an answer after the trouble")
    own = fleet.direct.completions.create(**completion(text))
    assert fleet.through.completions.create(**completion(text)).choices[0].text == own.choices[0].text
    fleet.check_that_nothing_is_left(fleet.prefill, fleet.decode)


def answers(fleet: Fleet, text: str) -> bool:
    """Whether calls succeed; the gateway may need a moment to find a server that is back."""
    with contextlib.suppress(openai.APIError):
        return bool(fleet.through.completions.create(**completion(text)).choices)
    return False
