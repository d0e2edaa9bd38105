"""A server of the bundled model that guesses by prompt lookup: same answers, and every place that counts agrees.

How many drafts are verified depends on how long steps take here, so the counts are compared with each other. A size of
step is tried some times in any case.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.servers import COMMON_FLAGS, running_server

CHAT = "/v1/chat/completions"
PLAIN = "jaxsgl:spec_plain_decodes_total"
SENTENCE = "grey clouds over seven green rivers and nine tall towers"


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    flags = (*COMMON_FLAGS, "--speculative-algorithm", "NGRAM", "--check-every-step")
    with (
        running_server(tmp_path_factory.mktemp("guessing"), flags) as server,
        httpx.Client(base_url=f"http://{server.http_address}", timeout=60) as http,
    ):
        yield http


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def repeated(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(30, 900) for _ in range(16)] * 3


def continued(http: httpx.Client, seed: int, speculative: bool, **sampling: Any) -> Any:
    given = {"max_new_tokens": 60, "ignore_eos": True, "temperature": 0} | sampling
    return post(http, "/generate", input_ids=repeated(seed), sampling_params=given, speculative=speculative)


def counts(http: httpx.Client) -> dict[str, float]:
    """The sum of each metric over its labels."""
    found: dict[str, float] = {}
    for line in http.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, value = line.partition("{")[0], float(line.rpartition(" ")[2])
            found[name] = found.get(name, 0.0) + value
    return found


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "sampling_seed": 7}, {"stop": ["the"]}, {"n": 3}])
def test_answers_are_the_same_with_and_without_guesses(http: httpx.Client, sampling: dict[str, Any]) -> None:
    with_, without = continued(http, 1, True, **sampling), continued(http, 1, False, **sampling)
    for one, other in zip(*([given] if isinstance(given, dict) else given for given in (with_, without)), strict=True):
        assert (one["text"], one["output_ids"]) == (other["text"], other["output_ids"])
        assert one["meta_info"]["finish_reason"] == other["meta_info"]["finish_reason"]
        assert other["meta_info"]["spec_verify_ct"] == 0


def test_what_an_answer_says_of_its_guesses_adds_up_and_agrees_with_the_metrics(http: httpx.Client) -> None:
    before = counts(http)
    meta = continued(http, 2, True)["meta_info"]
    after = counts(http)

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    steps, kept, tried = (meta[f"spec_{name}"] for name in ("verify_ct", "accept_token_num", "draft_token_num"))
    histogram = meta["spec_accept_histogram"]
    assert sum(histogram) == steps
    assert sum(place * count for place, count in enumerate(histogram)) == kept
    assert meta["spec_accept_length"] == pytest.approx(1 + kept / steps if steps else 0)
    assert meta["spec_accept_rate"] == pytest.approx(kept / tried if tried else 0)
    assert kept + steps + grown(PLAIN) == meta["completion_tokens"] - 1
    assert grown("vllm:spec_decode_num_drafts_total") == steps
    assert grown("vllm:spec_decode_num_draft_tokens_total") == tried
    assert grown("vllm:spec_decode_num_accepted_tokens_total") == kept
    assert grown("vllm:spec_decode_num_accepted_tokens_per_pos_total") == kept
    assert grown("vllm:generation_tokens_total") == 60
    assert after["vllm:spec_decode_num_accepted_tokens_total"] > 0


def test_a_prediction_changes_nothing_and_is_counted(http: httpx.Client) -> None:
    asked = {"messages": [{"role": "user", "content": f"Repeat after me: {SENTENCE}"}], "temperature": 0}
    plain = post(http, CHAT, **asked, speculative=False)
    text = plain["choices"][0]["message"]["content"]
    assert "completion_tokens_details" not in plain["usage"]
    predicted = post(http, CHAT, **asked, prediction={"type": "content", "content": text})
    assert predicted["choices"] == plain["choices"]
    details, tokens = predicted["usage"]["completion_tokens_details"], plain["usage"]["completion_tokens"]
    assert 0 <= details["accepted_prediction_tokens"] < tokens
    assert details["rejected_prediction_tokens"] <= 7
    wrong = post(http, CHAT, **asked, prediction={"type": "content", "content": "nothing of this " * 5})
    assert wrong["choices"] == plain["choices"]


def test_a_stream_of_guessed_tokens_has_the_same_text(http: httpx.Client) -> None:
    body = {"prompt": [repeated(3)], "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    whole = post(http, "/v1/completions", **body, speculative=False)["choices"][0]["text"]
    with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        events = [line for line in answer.iter_lines() if line.startswith("data: {")]
    texts = [httpx.Response(200, text=event[6:]).json()["choices"][0]["text"] for event in events]
    assert "".join(texts) == whole


def test_text_that_cannot_be_guessed_is_seldom_guessed(http: httpx.Client) -> None:
    asked = [{"role": "user", "content": "Count from 1 to 40"}]
    before = counts(http)
    answer = post(http, CHAT, messages=asked, temperature=0, max_tokens=120)
    after = counts(http)
    tried = after["vllm:spec_decode_num_draft_tokens_total"] - before["vllm:spec_decode_num_draft_tokens_total"]
    assert answer["usage"]["completion_tokens"] > 60
    assert tried <= 40


def test_flags_that_cannot_go_together_end_the_start(tmp_path: Path) -> None:
    flags = ("--speculative-algorithm", "NGRAM", "--decode-steps", "4")
    with pytest.raises(AssertionError, match="reads each step's: give one of them"), running_server(tmp_path, flags):
        pass
