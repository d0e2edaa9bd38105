"""The offline API on the bundled model."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest
from tqdm import tqdm

import jaxsgl
from jaxsgl.errors import EngineUnavailable, InvalidRequest
from jaxsgl.offline.llm import LLM
from jaxsgl.requests.grammar import Grammar
from jaxsgl.text.tokenizer import ChatMessage

pytestmark = pytest.mark.device


@pytest.fixture(scope="module")
def llm(bundled: LLM) -> Iterator[LLM]:
    before = bundled.engine.recompiles
    yield bundled
    assert bundled.engine.recompiles == before


GREEDY = jaxsgl.SamplingParams(temperature=0.0, max_tokens=32)


def test_prompts_may_be_texts_or_token_ids_one_or_many(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    ids = llm.tokenizer.encode("3 + 4 =")
    array: Any = np.array(ids)
    both: list[str | list[int]] = ["3 + 4 =", ids]
    completions = llm.generate(both, GREEDY)
    assert "requests: 100%" in capfd.readouterr().err
    assert completions[0].token_ids == completions[1].token_ids
    assert llm.generate(ids, GREEDY, use_tqdm=False)[0].token_ids == completions[0].token_ids
    assert capfd.readouterr().err == ""
    assert llm.generate(array, GREEDY, use_tqdm=False)[0].token_ids == completions[0].token_ids
    assert completions[0].prompt_tokens == len(ids)


def test_vllms_first_example_runs_unchanged(llm: LLM) -> None:
    prompts = ["3 + 4 =", "3 6 9 12"]
    outputs = llm.generate(prompts, jaxsgl.SamplingParams(temperature=0.8, top_p=0.95, max_tokens=4), use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt == prompt
        assert output.prompt_token_ids == tokenizer.encode(prompt)
        assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)
    messages = [{"role": "user", "content": "3 + 4"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    (answer,), (same,) = llm.chat(messages, GREEDY, use_tqdm=False), llm.generate(rendered, GREEDY, use_tqdm=False)
    assert answer.outputs[0].text == same.outputs[0].text != ""
    assert (answer.prompt, answer.prompt_token_ids) == (None, same.prompt_token_ids)


def test_a_chat_takes_what_its_template_takes(llm: LLM) -> None:
    turns = [{"role": "user", "content": "3 + 4"}, {"role": "assistant", "content": "3 + 4 ="}]
    tokenizer = llm.get_tokenizer()
    go_on: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    for options in (go_on, {"add_generation_prompt": False}):
        (answer,) = llm.chat(turns, GREEDY, use_tqdm=False, **options)
        assert answer.prompt_token_ids == tokenizer.apply_chat_template(turns, tokenize=True, **options)["input_ids"]
    template = "{{ word }}{% for tool in tools %}{{ tool.name }}{% endfor %}{{ messages[0].content }}"
    given: Any = {"chat_template": template, "tools": [{"name": "f"}], "chat_template_kwargs": {"word": "say "}}
    (answer,) = llm.chat(turns[:1], GREEDY, use_tqdm=False, **given)
    assert answer.prompt_token_ids == llm.tokenizer.encode("say f3 + 4")
    with pytest.raises(InvalidRequest, match="continue_final_message is true, and so is add_generation_prompt"):
        llm.chat(turns, GREEDY, continue_final_message=True)


def test_a_prompt_that_was_served_before_is_cached_in_whole_pages(llm: LLM) -> None:
    prompt = list(range(40, 90))
    first, second = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, 48)
    assert first.token_ids == second.token_ids


def test_prompts_share_prefixes_within_their_salt_alone(llm: LLM) -> None:
    prompt = list(range(60, 110))
    cached = [llm.generate(prompt, GREEDY, cache_salt=salt, use_tqdm=False)[0].cached_tokens for salt in "aaba"]
    assert cached == [0, 48, 0, 48]
    salted = llm.generate([prompt, prompt], GREEDY, cache_salt=["b", ""], use_tqdm=False)
    assert [completion.cached_tokens for completion in salted] == [48, 0]
    with pytest.raises(InvalidRequest, match="1 salts for 2 prompts"):
        llm.generate([prompt, prompt], GREEDY, cache_salt=["a"])


def test_flushing_drops_cached_prefixes_and_changes_no_output(llm: LLM) -> None:
    prompt = list(range(100, 150))
    first, cached = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    llm.flush_cache()
    flushed = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
    assert (cached.cached_tokens, flushed.cached_tokens) == (48, 0)
    assert first.token_ids == cached.token_ids == flushed.token_ids


def test_a_call_may_bring_more_prompts_than_a_server_would_queue(llm: LLM) -> None:
    params = jaxsgl.SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    completions = llm.generate([[5 + i] for i in range(20)], params, use_tqdm=False)
    assert [len(completion.token_ids) for completion in completions] == [2] * 20


@pytest.mark.parametrize("prompt", [[5.7, 6.2], [[5, "6"]], ["\ud800"], [None], b"abc", [b"abc"]])
def test_values_that_are_no_prompt_are_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match="a prompt must be a text or a list of token ids"):
        llm.generate(prompt, GREEDY)


def test_values_that_are_no_arguments_are_refused_by_name(llm: LLM) -> None:
    wrong: Any
    for wrong in (None, 5):
        with pytest.raises(InvalidRequest, match=r"prompts are a (NoneType|int), but must be a text"):
            llm.generate(wrong, GREEDY)
    for wrong in ({"max_new_tokens": 5}, [{"max_new_tokens": 5}], 5):
        with pytest.raises(InvalidRequest, match=r"sampling_params must be of type SamplingParams, .*5"):
            llm.generate(["a"], wrong)
    for wrong in ("Hi", ["Hi"], None, [None], {"role": "user", "content": "Hi"}, iter([])):
        with pytest.raises(InvalidRequest, match="a conversation is a list of turns"):
            llm.chat(wrong, GREEDY)


def test_a_refusal_names_the_prompt_among_several(llm: LLM) -> None:
    turns = [{"role": "user", "content": "Hi"}]
    mixed: list[Any] = ["a", [5] * 10000]
    wrong: Any = ["a", "b", b"c"]
    conversations: Any = [turns, ["Hi"]]
    with pytest.raises(InvalidRequest, match=r"^prompt 1: the prompt has 10000 tokens"):
        llm.generate(mixed, GREEDY)
    with pytest.raises(InvalidRequest, match=r"^prompt 2: a prompt must be a text"):
        llm.generate(wrong, GREEDY)
    with pytest.raises(InvalidRequest, match=r"^prompt 1: a turn is a str"):
        llm.chat(conversations, GREEDY)
    with pytest.raises(InvalidRequest, match=r"^the prompt has 10000 tokens"):
        llm.generate([[5] * 10000], GREEDY)


def test_prompts_may_be_any_collection(llm: LLM) -> None:
    completions = llm.generate({"a": 1, "b": 2}.keys(), GREEDY, use_tqdm=False)  # type: ignore[arg-type]
    assert [completion.prompt for completion in completions] == ["a", "b"]


def test_prompts_in_vllms_form_need_no_pictures(llm: LLM) -> None:
    ids = llm.tokenizer.encode("3 + 4 =")
    texts: list[dict[str, Any]] = [{"prompt": "3 + 4 ="}, {"prompt_token_ids": ids}]
    first, second = llm.generate(texts, GREEDY, use_tqdm=False)
    assert first.token_ids == second.token_ids == llm.generate(ids, GREEDY, use_tqdm=False)[0].token_ids
    with pytest.raises(InvalidRequest, match="a model with a tower for them"):
        llm.generate({"prompt": "a", "multi_modal_data": {"image": b"x"}}, GREEDY)


def test_a_model_that_is_closed_says_so(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(llm.engine, "close", lambda: closed.append(True))
    monkeypatch.setattr(llm, "_is_closed", False)
    with llm as same:
        assert same is llm
    llm.close()
    assert closed == [True], "once"
    with pytest.raises(EngineUnavailable, match="the LLM is closed"):
        llm.generate("a", GREEDY)
    with pytest.raises(EngineUnavailable, match="the LLM is closed"):
        llm.flush_cache()


def test_calls_of_several_threads_run_one_after_the_other(llm: LLM) -> None:
    params = jaxsgl.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompts = [[40 + i, 5, 6] for i in range(8)]
    alone = [llm.generate(prompt, params, use_tqdm=False)[0].token_ids for prompt in prompts]
    with ThreadPoolExecutor(8) as threads:
        together = threads.map(lambda prompt: llm.generate(prompt, params, use_tqdm=False)[0].token_ids, prompts)
        assert list(together) == alone


def test_a_model_of_text_alone_reads_contents_of_several_texts(llm: LLM) -> None:
    parts = [{"type": "text", "text": "3 +"}, {"type": "text", "text": "4"}]
    for content in (parts, "3 +\n4"):
        (answer,) = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
        expected = llm.tokenizer.encode_chat([ChatMessage("user", "3 +\n4")])
        assert answer.prompt_token_ids == expected
    with pytest.raises(InvalidRequest, match="the model takes text alone"):
        llm.chat([{"role": "user", "content": [*parts, {"type": "image", "image": b"x"}]}], GREEDY)


def test_a_turn_without_content_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="needs role and content"):
        llm.chat([{"role": "user"}], GREEDY)


def test_parameters_may_differ_by_prompt(llm: LLM) -> None:
    lengths = [1, 3, 5]
    params = [jaxsgl.SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    completions = llm.generate(["Count from 1 to 30"] * 3, params, use_tqdm=False)
    assert [len(completion.token_ids) for completion in completions] == lengths
    assert [completion.finish_reason for completion in completions] == ["length"] * 3
    with pytest.raises(InvalidRequest, match="2 sampling_params for 1 prompts"):
        llm.generate(["x"], params[:2])


def test_priorities_may_differ_by_prompt(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    receive = llm._scheduler.receive

    def spy(messages: Sequence[Any]) -> None:
        seen.extend(message.priority for message in messages)
        receive(messages)

    monkeypatch.setattr(llm._scheduler, "receive", spy)
    params = jaxsgl.SamplingParams(temperature=0.0, max_tokens=1)
    llm.generate(["a", "b"], params, priority=[-3, 2**31 - 1], use_tqdm=False)
    llm.generate(["a", "b"], params, priority=7, use_tqdm=False)
    llm.chat([{"role": "user", "content": "a"}], params, priority=2, use_tqdm=False)
    assert seen == [-3, 2**31 - 1, 7, 7, 2]
    with pytest.raises(InvalidRequest, match="1 priorities for 2 prompts"):
        llm.generate(["a", "b"], params, priority=[1])
    for priority in (2**31, 1.5):
        with pytest.raises(InvalidRequest, match="priority is"):
            llm.generate(["a"], params, priority=[priority])  # type: ignore[list-item]


def test_a_prompt_that_cannot_be_served_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="maximum context length"):
        prompts: list[str | list[int]] = ["fine", [5] * 5000]
        llm.generate(prompts, GREEDY)
    assert llm.generate("fine", GREEDY, use_tqdm=False)[0].token_ids


def test_an_interrupted_call_leaves_a_usable_model(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate("Count from 1 to 30", GREEDY, use_tqdm=False)[0].token_ids
    collect, calls = type(llm._scheduler).collect, 0

    def interrupted(self: Any, *collected: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        collect(self, *collected)

    monkeypatch.setattr(type(llm._scheduler), "collect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["Count from 1 to 30"] * 3, GREEDY, use_tqdm=False)
    monkeypatch.undo()
    assert llm.generate("Count from 1 to 30", GREEDY, use_tqdm=False)[0].token_ids == expected


def test_ctrl_c_while_a_program_is_called_waits_until_its_result_is_kept(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.default_int_handler)  # whatever runs the tests has
    expected = llm.generate("Count from 1 to 30", GREEDY, use_tqdm=False)[0].token_ids
    call, calls = jax.stages.Compiled.__call__, 0

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        result = call(self, *args, **kwargs)
        if calls == 5:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(jax.stages.Compiled, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["Count from 1 to 30"] * 3, GREEDY, use_tqdm=False)
    assert calls < 20, "the call went on"
    assert llm.generate("Count from 1 to 30", GREEDY, use_tqdm=False)[0].token_ids == expected


def test_a_call_after_one_that_failed_draws_other_samples(llm: LLM) -> None:
    params = jaxsgl.SamplingParams(temperature=5.0, max_tokens=20, ignore_eos=True)
    seen = []
    for _ in range(3):
        seen.append(tuple(llm.generate("Once upon a time", params, use_tqdm=False)[0].token_ids))
        with pytest.raises(InvalidRequest):
            llm.generate("x", jaxsgl.SamplingParams(grammar=Grammar.regex("(")), use_tqdm=False)
    assert len(set(seen)) == 3


def test_sampling_is_reproducible_by_seed(llm: LLM) -> None:
    params = jaxsgl.SamplingParams(temperature=5.0, seed=7, max_tokens=20, ignore_eos=True)
    one, two = (llm.generate("Once upon a time", params, use_tqdm=False)[0].token_ids for _ in range(2))
    crowd = llm.generate(["hello", "Once upon a time", "3 + 4 ="], params, use_tqdm=False)
    assert one == two == crowd[1].token_ids
    other = llm.generate(
        "Once upon a time", jaxsgl.SamplingParams(temperature=5.0, seed=8, max_tokens=20), use_tqdm=False
    )
    assert other[0].token_ids != one


def test_a_stop_string_ends_the_answer_where_it_appears(llm: LLM) -> None:
    whole = llm.generate("Count from 1 to 30", GREEDY, use_tqdm=False)[0]
    stop = whole.text[len(whole.text) // 3 :][:4]
    cut_off = whole.text.index(stop)
    for keep in (False, True):
        params = jaxsgl.SamplingParams(temperature=0.0, max_tokens=32, stop=(stop,), include_stop_str_in_output=keep)
        cut = llm.generate("Count from 1 to 30", params, use_tqdm=False)[0]
        assert cut.text == whole.text[: cut_off + len(stop) * keep]
        assert (cut.finish_reason, cut.matched_stop, cut.stop_reason) == ("stop", stop, stop)
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
        assert len(cut.token_ids) < len(whole.token_ids)
        assert stop in llm.tokenizer.decode(cut.token_ids)


def test_samples_follow_their_prompt_and_carry_log_probabilities(llm: LLM) -> None:
    params = jaxsgl.SamplingParams(temperature=5.0, seed=4, n=3, max_tokens=6, ignore_eos=True, logprobs=2)
    one, *others = llm.generate(["Once upon a time", "3 + 4 ="], params, use_tqdm=False)
    answers = [one, *others]
    assert [answer.index for answer in answers] == [0, 1, 2] * 2
    assert len({tuple(answer.token_ids) for answer in answers[:3]}) == 3
    for i, answer in enumerate(answers[:3]):
        alone = jaxsgl.SamplingParams(temperature=5.0, seed=4 + i, max_tokens=6, ignore_eos=True)
        (expected,) = llm.generate("Once upon a time", alone, use_tqdm=False)
        assert (answer.text, answer.token_ids) == (expected.text, expected.token_ids)
        assert (len(answer.logprobs), len(expected.logprobs)) == (6, 0)
        assert all(len(entry.top) == 2 and entry.logprob <= entry.top[0][1] for entry in answer.logprobs)
        assert answer.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in answer.logprobs))
        assert expected.cumulative_logprob is None


def test_log_probabilities_of_a_prompt_are_those_of_the_outputs_that_it_repeats(llm: LLM) -> None:
    """A text is generated token by token, then scored as one prompt."""
    prompt = llm.tokenizer.encode("Count from 1 to 30")
    params = jaxsgl.SamplingParams(temperature=0.0, max_tokens=20, logprobs=1, ignore_eos=True)
    (answer,) = llm.generate(prompt, params, use_tqdm=False)
    scoring = jaxsgl.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    (scored,) = llm.generate([*prompt, *answer.token_ids], scoring, use_tqdm=False)
    assert scored.prompt_logprobs is not None
    of_answer = scored.prompt_logprobs[len(prompt) - 1 :]
    np.testing.assert_allclose(
        [entry.logprob for entry in of_answer], [entry.logprob for entry in answer.logprobs], atol=1e-3
    )
    assert [entry.top[0][0] for entry in of_answer] == answer.token_ids


def test_a_bar_of_the_callers_own_counts_the_answers(llm: LLM) -> None:
    bars = list[Any]()

    class Bar(tqdm):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            bars.append(self)

    llm.generate(["3 + 4 =", "3 6 9 12"], jaxsgl.SamplingParams(max_tokens=4, n=2), use_tqdm=Bar)
    (bar,) = bars
    assert (bar.total, bar.n) == (4, 4)
