"""All protocols of one server with the bundled model agree: streamed with whole, with each other, with transformers."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain
from typing import Any, TypeAlias

import grpc
import httpx
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from jaxsgl.config.engine import BUNDLED_MODEL
from jaxsgl.requests.request import SamplingParams
from tests import numpy_sampling
from tests.end_to_end.apis import PATIENCE_S, Answer, Api, OwnGrpc, Prompt, Sample, events_of, ids_of
from tests.end_to_end.openai_apis import OpenAIChat, OpenAICompletions
from tests.end_to_end.servers import RunningServer
from tests.end_to_end.sglang_apis import SglangGrpc, SglangHttp
from tests.grids import count

EOS = frozenset({1023, 1021})
TOLERANCE = 1e-3
CLIENTS = 24
CONTEXT = 2048

Reference: TypeAlias = Callable[[Sequence[int]], np.ndarray]


@pytest.fixture(scope="module")
def http(shared_server: RunningServer) -> Iterator[httpx.Client]:
    limits = httpx.Limits(max_connections=64)
    with httpx.Client(base_url=f"http://{shared_server.http_address}", timeout=PATIENCE_S, limits=limits) as client:
        yield client


@pytest.fixture(scope="module")
def apis(shared_server: RunningServer, http: httpx.Client) -> Iterator[dict[str, Api]]:
    with grpc.insecure_channel(shared_server.address) as channel:
        yield {
            "completions": OpenAICompletions(http),
            "chat": OpenAIChat(http),
            "generate": SglangHttp(http),
            "own": OwnGrpc(channel),
            "sglang": SglangGrpc(channel),
        }


@pytest.fixture(scope="module")
def reference() -> Reference:
    """transformers' logits `[T, V]` in float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32).eval()

    @cache
    def run(ids: tuple[int, ...]) -> np.ndarray:
        with torch.no_grad():
            logits: np.ndarray = model(torch.tensor([ids])).logits[0].float().numpy()
            return logits

    return lambda ids: run(tuple(ids))


TEXTS = ("Once upon a time", "Count from 1 to 30", "3 + 4 =", "The quick brown fox " * 9, "Zürich 🎉 日本", " ", "a")
KINDS = ("completions", "chat", "generate", "own", "sglang")


def random_params(rng: random.Random, kind: str) -> SamplingParams:
    """Any mixture of features, always reproducible."""
    features: dict[str, Any] = {
        "stop": tuple(rng.sample(["e", "th", " a", "1", "\n", ", ", "er th", "é"], 2)),
        "include_stop_str_in_output": True,
        "stop_token_ids": tuple(rng.sample(range(1021), 20)),
        "n": rng.randint(2, 3),
        "logprobs": rng.randint(0, 3),
        "frequency_penalty": rng.choice([-0.5, 0.5, 1.5]),
        "presence_penalty": 0.75,
        "repetition_penalty": rng.choice([0.75, 1.25]),
        "logit_bias": {rng.randrange(1024): 5.0 for _ in range(3)},
        "min_tokens": 4,
        "ignore_eos": True,
    }
    chosen = dict(rng.sample(sorted(features.items()), rng.randint(0, 5)))
    if "logprobs" in chosen and kind != "chat" and rng.random() < 0.5:
        chosen["prompt_logprobs"] = chosen["logprobs"]
    if kind != "sglang" and rng.random() < 0.6:  # SGLang's gRPC has no seeds
        chosen |= {"temperature": rng.choice([0.5, 1.0, 1.5, 50.0]), "seed": rng.randrange(2**31)}
        chosen |= {"top_k": rng.choice([-1, 20]), "top_p": rng.choice([1.0, 0.875]), "min_p": rng.choice([0.0, 0.0625])}
    else:
        chosen["temperature"] = 0.0
    return SamplingParams(max_tokens=rng.choice([4, 8, 24] if "min_tokens" in chosen else [1, 8, 24]), **chosen)


def random_prompt(rng: random.Random, kind: str, http: httpx.Client) -> Prompt:
    text = rng.choice(TEXTS)
    if kind == "chat" or (kind == "own" and rng.random() < 0.3):
        return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}][rng.randrange(2) :]
    return text if kind != "sglang" and rng.random() < 0.6 else ids_of(http, text)


def at_once(ask: Callable[..., Answer], requests: Sequence[tuple[Api, Prompt, SamplingParams, bool]]) -> list[Answer]:
    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(ask, *zip(*requests, strict=True)))


def ask(api: Api, prompt: Prompt, params: SamplingParams, stream: bool) -> Answer:
    return api.ask(prompt, params, stream)


def assert_same(one: Answer, other: Answer) -> None:
    """A field that a protocol lacks counts as the same. Scores are rounded differently in batches of other shapes."""
    assert (one.prompt_tokens, one.output_tokens) == (other.prompt_tokens, other.output_tokens)
    for ours, theirs in zip(one.samples, other.samples, strict=True):
        for name in ("text", "ids", "reason", "matched"):
            first, second = getattr(ours, name), getattr(theirs, name)
            assert first == second or None in (first, second), name
        assert ours.offsets == theirs.offsets or [] in (ours.offsets, theirs.offsets)
        for name in ("logprobs", "prompt_logprobs"):
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name), abs=TOLERANCE), name
        for name in ("top", "prompt_top"):
            first, second = getattr(ours, name), getattr(theirs, name)
            assert list(map(len, first)) == list(map(len, second)), name
            assert [*chain(*first)] == pytest.approx([*chain(*second)], abs=TOLERANCE), name


def test_streamed_and_whole_answers_of_random_requests_are_the_same(apis: dict[str, Api], http: httpx.Client) -> None:
    rng = random.Random(1)
    requests = []
    for number in range(count(50, 100)):
        kind = KINDS[number % len(KINDS)]
        requests.append((apis[kind], random_prompt(rng, kind, http), random_params(rng, kind)))
    both = [(*request, stream) for request in requests for stream in (False, True)]
    rng.shuffle(both)
    answers = at_once(ask, both)
    for request in requests:
        whole, streamed = (answers[both.index((*request, stream))] for stream in (False, True))
        _, _, params = request
        assert_same(streamed, whole)
        for sample in streamed.samples:
            check_form(sample, params, whole.prompt_tokens)


def check_form(sample: Sample, params: SamplingParams, prompt_len: int) -> None:
    """Checks that every end has a reason, and that every token has scores if and only if they were asked for."""
    assert sample.deltas >= 1
    assert sample.reason in ("stop", "length")
    assert (sample.matched is not None) == (sample.reason == "stop")
    if sample.ids is None:
        assert not sample.logprobs
        return
    assert 1 <= len(sample.ids) <= (params.max_tokens or 0)
    assert sample.reason == "stop" or len(sample.ids) == params.max_tokens
    assert len(sample.logprobs) == len(sample.top) == (0 if params.logprobs is None else len(sample.ids))
    assert all(len(top) == params.logprobs for top in sample.top)
    assert len(sample.prompt_logprobs) in (0, prompt_len - 1)
    assert all(len(top) == params.prompt_logprobs for top in sample.prompt_top)


@pytest.mark.parametrize("stream", [False, True])
def test_all_protocols_answer_the_same_request_alike(apis: dict[str, Api], http: httpx.Client, stream: bool) -> None:
    rng = random.Random(2)
    for text in TEXTS:
        chat = [{"role": "user", "content": text}]
        # What SGLang's protocol can't say, or says in single precision, would differ.
        params = random_params(rng, "sglang")
        ids = ids_of(http, text)
        of_text = [
            (apis[kind], prompt, params, stream)
            for kind in ("completions", "generate", "own")
            for prompt in (text, ids)
        ]
        answers = at_once(ask, [*of_text, (apis["sglang"], ids, params, stream)])
        for answer in answers[1:]:
            assert_same(answer, answers[0])
        params = replace(params, prompt_logprobs=None)
        ids = ids_of(http, chat)
        of_ids = [(apis[kind], ids, params, stream) for kind in ("completions", "generate", "own", "sglang")]
        answers = at_once(ask, [*of_ids, (apis["own"], chat, params, stream), (apis["chat"], chat, params, stream)])
        for answer in answers[1:]:
            assert_same(answer, answers[0])


def test_log_probabilities_are_those_of_transformers(
    apis: dict[str, Api], http: httpx.Client, reference: Reference
) -> None:
    """Those of outputs, prompts and the most likely tokens, over every protocol, whole and streamed."""
    params = SamplingParams(temperature=0.0, max_tokens=20, logprobs=5, presence_penalty=1.5, logit_bias={7: 6.0})
    texts = ("Once upon a time", "Zürich 🎉 日本", "The quick brown fox " * 40)
    prompts: list[tuple[str, Prompt, list[int]]] = []
    for text in texts:
        chat = [{"role": "user", "content": text}]
        prompts.append(("chat", chat, ids_of(http, chat)))
        prompts += [(kind, ids_of(http, text), ids_of(http, text)) for kind in KINDS if kind != "chat"]
    requests, wanted = [], []
    for kind, prompt, ids in prompts:
        for stream in (False, True):
            scored = None if kind == "chat" else 5  # OpenAI's chat has no field for it
            requests.append((apis[kind], prompt, replace(params, prompt_logprobs=scored), stream))
            wanted.append(ids)
    for answer, (_, _, asked, _), ids in zip(at_once(ask, requests), requests, wanted, strict=True):
        (sample,) = answer.samples
        assert sample.ids is not None
        expected = numpy_sampling.logprobs(reference([*ids, *sample.ids]))
        check_scores(sample.logprobs, sample.top, expected[len(ids) - 1 : -1], sample.ids)
        if asked.prompt_logprobs is not None:
            check_scores(sample.prompt_logprobs, sample.prompt_top, expected[: len(ids) - 1], ids[1:])


def check_scores(own: list[float], top: list[list[float]], expected: np.ndarray, ids: list[int]) -> None:
    """`expected[i]` are the scores of all tokens in the place of `ids[i]`."""
    assert len(own) == len(top) == len(ids)
    assert np.abs(np.array(own) - expected[np.arange(len(ids)), ids]).max() < TOLERANCE
    assert np.abs(np.array(top) - np.sort(expected)[:, : -len(top[0]) - 1 : -1]).max() < TOLERANCE


def test_samples_seeds_and_penalties_are_those_of_numpy(
    apis: dict[str, Api], http: httpx.Client, reference: Reference
) -> None:
    """Every token of every sample, chosen again from transformers' logits."""
    rng = random.Random(3)
    requests, prompt_ids = [], []
    for number in range(40):
        kind = ("completions", "chat", "generate", "own", "sglang")[number % 5]
        text = rng.choice(TEXTS)
        chat = [{"role": "user", "content": text}]
        ids = ids_of(http, chat if kind == "chat" else text)
        params = replace(random_params(rng, kind), stop=(), logprobs=0, prompt_logprobs=None)
        requests.append((apis[kind], chat if kind == "chat" else ids, params, bool(number % 2)))
        prompt_ids.append(ids)
    assert sum(params.n > 1 for _, _, params, _ in requests) > 5
    assert sum(params.seed is not None for _, _, params, _ in requests) > 10
    assert sum(params.edits_logits for _, _, params, _ in requests) > 20
    for answer, (_, _, params, _), ids in zip(at_once(ask, requests), requests, prompt_ids, strict=True):
        for index, sample in enumerate(answer.samples):
            assert sample.ids == numpy_sampling.replay(reference, ids, sample.ids or (), params, EOS, index), params


def test_a_seed_makes_an_answer_repeatable_and_no_seed_does_not(apis: dict[str, Api], http: httpx.Client) -> None:
    chat = [{"role": "user", "content": "Tell me a story"}]
    params = SamplingParams(temperature=50.0, max_tokens=12, seed=5, n=2, ignore_eos=True, top_k=100)
    for kind in ("completions", "chat", "generate", "own"):
        prompt: Prompt = chat if kind == "chat" else ids_of(http, chat)
        texts = [
            tuple(sample.text for sample in ask(apis[kind], prompt, replace(params, seed=seed), True).samples)
            for seed in (5, 5, 6, None, None)
        ]
        assert texts[0] == texts[1]
        assert texts[0][1] == texts[2][0], "sample i draws with seed + i"
        assert len({*texts}) == 4


def test_a_prompt_at_the_limit_gets_its_one_token_and_a_longer_one_is_refused(
    apis: dict[str, Api], http: httpx.Client
) -> None:
    ids = [5] * (CONTEXT - 1)
    params = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
    requests = [(apis[kind], ids, params, stream) for kind in KINDS if kind != "chat" for stream in (False, True)]
    for answer in at_once(ask, requests):
        assert (answer.samples[0].reason, answer.prompt_tokens, answer.output_tokens) == ("length", CONTEXT - 1, 1)
    for kind in ("own", "sglang"):
        with pytest.raises(grpc.RpcError, match=f"maximum context length is {CONTEXT}"):
            ask(apis[kind], [*ids, 5], params, True)
    for path, body in (("/v1/completions", {"prompt": [*ids, 5]}), ("/generate", {"input_ids": [*ids, 5]})):
        for stream in (False, True):
            refused = http.post(path, json=body | {"stream": stream})
            assert (refused.status_code, f"maximum context length is {CONTEXT}" in refused.text) == (400, True)


def test_several_prompts_in_one_body_are_answered_as_if_each_came_alone(
    apis: dict[str, Api], http: httpx.Client
) -> None:
    """This includes n, echoed prompts and log-probabilities; choices are numbered prompt by prompt."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=9, n=2, stop=("e",))
    alone = [ask(apis["completions"], text, params, False).samples for text in TEXTS]
    texts = [sample.text or "" for samples in alone for sample in samples]
    reasons = [sample.reason for samples in alone for sample in samples]
    shared = {"temperature": 1.0, "n": 2, "stop": "e"}

    body = shared | {"prompt": TEXTS, "seed": 3, "max_tokens": 9}
    for echo, logprobs in ((False, None), (True, None), (True, 1)):
        echoed = [text for text in TEXTS for _ in range(2)] if echo else [""] * len(texts)
        given = body | {"echo": echo, "logprobs": logprobs}
        whole = http.post("/v1/completions", json=given).json()
        assert [choice["text"] for choice in whole["choices"]] == [a + b for a, b in zip(echoed, texts, strict=True)]
        assert [choice["finish_reason"] for choice in whole["choices"]] == reasons
        with http.stream("POST", "/v1/completions", json=given | {"stream": True}) as response:
            joined = [""] * len(texts)
            for event in events_of(response):
                (choice,) = event["choices"]
                joined[choice["index"]] += choice["text"]
        assert joined == [choice["text"] for choice in whole["choices"]]

    sampling = shared | {"max_new_tokens": 9, "sampling_seed": 3}
    of_sglang = {"text": TEXTS, "sampling_params": sampling, "rid": "several"}
    assert [choice["text"] for choice in http.post("/generate", json=of_sglang).json()] == texts
    with http.stream("POST", "/generate", json=of_sglang | {"stream": True}) as response:
        last = {event["index"]: event["text"] for event in events_of(response)}
    assert [last[index] for index in range(len(texts))] == texts


@pytest.mark.parametrize("stream", [False, True])
def test_aborted_requests_end_with_what_they_have(apis: dict[str, Api], http: httpx.Client, stream: bool) -> None:
    """Each sample of a running or queued request has an end, a usage, and scores of the tokens that came."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=1, max_tokens=1500, n=3)
    prompts: dict[str, Prompt] = {**{kind: [5, 6, 7] for kind in KINDS}, "chat": [{"role": "user", "content": "Hi"}]}
    requests = [(apis[kind], prompts[kind], changed, stream) for kind in KINDS for changed in variants(params, kind)]
    ended = threading.Event()

    def abort_until_ended() -> None:
        while not ended.wait(0.5):
            http.post("/abort_request", json={"abort_all": True})

    with ThreadPoolExecutor(1) as pool:
        aborts = pool.submit(abort_until_ended)
        try:
            answers = at_once(ask, requests)
        finally:
            ended.set()
        aborts.result()
    assert len(requests) * params.n > 16, "some wait while others run"
    for answer, (_, _, asked, _) in zip(answers, requests, strict=True):
        assert {sample.reason for sample in answer.samples} <= {"abort", "length"}
        assert answer.output_tokens == sum(len(sample.ids or ()) for sample in answer.samples)
        for sample in answer.samples:
            assert len(sample.logprobs) == len(sample.ids or ())
            assert len(sample.prompt_logprobs) in (0, 2 if asked.prompt_logprobs is not None else 0)
    assert sum(sample.reason == "abort" for answer in answers for sample in answer.samples) > 5


def variants(params: SamplingParams, kind: str) -> list[SamplingParams]:
    """The same with log-probabilities of the prompt, too, where the protocol has a field for them."""
    return [params, *([] if kind == "chat" else [replace(params, prompt_logprobs=1)])]


def test_sixty_four_streams_at_once_get_every_token_once_and_in_order(apis: dict[str, Api], http: httpx.Client) -> None:
    """Each stream equals the whole answer to its request alone, over all protocols that name tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0)
    requests = []
    for number in range(64):
        kind = ("completions", "generate", "own", "sglang")[number % 4]
        requests.append((apis[kind], ids_of(http, f"{number} + {number * 7} ="), params, True))
    with ThreadPoolExecutor(64) as pool:
        streamed = list(pool.map(ask, *zip(*requests, strict=True)))
    assert sum(answer.samples[0].deltas for answer in streamed) > 64 * 3  # tokens that come fast are merged
    whole = at_once(ask, [(apis["own"], prompt, params, False) for _, prompt, params, _ in requests])
    for answer, expected in zip(streamed, whole, strict=True):
        (sample,) = answer.samples
        assert len(sample.ids or ()) == len(sample.logprobs) == 40
        assert_same(answer, expected)
