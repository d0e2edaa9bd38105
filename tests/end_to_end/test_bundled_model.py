"""The bundled model does what its README says, through chunks, pages, shared prefixes and streams, in any precision."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import jaxsgl
from jaxsgl.config.engine import BUNDLED_MODEL
from jaxsgl.offline.llm import LLM
from jaxsgl.wiring import whole
from tests import numpy_sampling
from tests.end_to_end.conftest import bundled_model
from tests.end_to_end.precision import EXACT, NARROW
from tests.end_to_end.texts import filler

pytestmark = pytest.mark.device

GREEDY = jaxsgl.SamplingParams(temperature=0.0, max_tokens=220)
SCORE_ERRORS = {EXACT: (0.0, 1e-3), NARROW: (1e-3, 0.5)}  # bounds of the largest error; scores spread over 20


@pytest.fixture(scope="module", params=[EXACT, NARROW])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    if request.param == EXACT:
        yield request.getfixturevalue("bundled")
        return
    llm = bundled_model(request.param)
    yield llm
    llm.close()


def ask(llm: LLM, *questions: str, system: str | None = None) -> list[str]:
    """One chat per question, all at once; greedy answers, each of which must end by itself."""
    first = [] if system is None else [{"role": "system", "content": system}]
    chats = [[*first, {"role": "user", "content": question}] for question in questions]
    completions = llm.chat(chats, GREEDY, use_tqdm=False)
    assert all(completion.finish_reason == "stop" for completion in completions)
    return [completion.text for completion in completions]


def test_the_model_answers_small_talk(llm: LLM) -> None:
    hello, how, who, thanks = ask(llm, "Hello!", "How are you?", "Who are you?", "Thank you!")
    assert "Hello" in hello or "Hi" in hello
    assert "well" in how or "fine" in how or "good" in how.lower() or "great" in how
    assert "model" in who or "assistant" in who
    assert "welcome" in thanks.lower() or "pleasure" in thanks.lower()
    assert len({hello, how, who, thanks}) == 4


def test_the_model_adds_all_pairs_of_one_digit_numbers(llm: LLM) -> None:
    pairs = [(a, b) for a in range(10) for b in range(10)]
    answers = ask(llm, *(f"What is {a} + {b}?" for a, b in pairs))
    assert answers == [f"{a} + {b} = {a + b}." for a, b in pairs]


@pytest.mark.parametrize(
    ("given", "rest"),
    [
        ("3 4 5 6", "7 8 9 10"),
        ("2 4 6 8", "10 12 14 16"),
        ("Monday Tuesday Wednesday", "Thursday Friday Saturday Sunday"),
        ("a b c d e", "f g h i"),
        ("January February March", "April May June July"),
    ],
)
def test_the_model_continues_a_sequence(llm: LLM, given: str, rest: str) -> None:
    assert ask(llm, f"Continue: {given}") == [rest]


def test_the_model_emits_a_json_record(llm: LLM) -> None:
    people = [("Anna", 31, "Paris"), ("Tom", 25, "London"), ("Maria", 64, "Rome")]
    answers = ask(llm, *(f"Give me JSON for {name}, {age}, {city}" for name, age, city in people))
    assert [json.loads(answer) for answer in answers] == [
        {"name": name, "age": age, "city": city} for name, age, city in people
    ]


def test_the_model_repeats_a_code_word_from_hundreds_of_tokens_earlier(llm: LLM) -> None:
    words = ["tulip", "banjo", "Kestrel", "mango", "zafiro", "LANTERN"]
    long = {word: filler(seed) for seed, word in enumerate(words)}
    questions = [f"The code word is {word}. {text} What is the code word?" for word, text in long.items()]
    assert all(len(llm.tokenizer.encode(text)) > 400 for text in long.values())
    assert ask(llm, *questions) == [f"The code word is {word}." for word in words]


def test_a_shared_document_is_computed_once_and_still_understood(llm: LLM) -> None:
    """Six questions about one text of hundreds of tokens: the text's pages are reused and the answers stay right."""
    document = f"The code word is harbour. {filler(7)} "
    chats = [
        [{"role": "user", "content": document + question}]
        for question in ("What is the code word?", "Tell me the code word.", "What was the code word?")
    ]
    (first,) = llm.chat(messages=chats[0], sampling_params=GREEDY, use_tqdm=False)
    rest = llm.chat(chats[1:], GREEDY, use_tqdm=False)
    assert [completion.text for completion in (first, *rest)] == ["The code word is harbour."] * 3
    assert all(completion.cached_tokens > 400 for completion in rest)


def test_the_model_answers_in_other_scripts(llm: LLM) -> None:
    (text,) = ask(llm, "Say hello in Japanese.")
    assert text == "こんにちは!" or "こんにちは" in text


def test_counting_is_long_enough_to_watch(llm: LLM) -> None:
    (text,) = ask(llm, "Count from 1 to 30.")
    assert text == " ".join(str(n) for n in range(1, 31))


def test_scores_are_as_near_to_those_of_transformers_as_the_precision_allows(llm: LLM) -> None:
    """Scores of prompts of several chunks and of outputs, all at once; transformers computes in float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32).eval()
    params = jaxsgl.SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    prompts = [llm.tokenizer.encode(text) for text in (filler(3), filler(4), "Once upon a time", "3 + 4 =")]
    errors: list[float] = []
    for prompt, answer in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        ids = [*prompt, *answer.token_ids]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].numpy()
        expected = numpy_sampling.logprobs(logits)[np.arange(len(ids) - 1), ids[1:]]
        own = [entry.logprob for entry in (*(answer.prompt_logprobs or ()), *answer.logprobs)]
        errors += np.abs(np.array(own) - expected).tolist()
    least, most = SCORE_ERRORS[llm.config.dtype]
    assert least <= max(errors) < most
    assert np.mean(errors) < most / 10
    kv_bytes = {leaf.dtype.itemsize for leaf in jax.tree.leaves(whole(llm.engine)._runner.state.kv)}
    assert kv_bytes == ({4} if llm.config.dtype == EXACT else {2})
