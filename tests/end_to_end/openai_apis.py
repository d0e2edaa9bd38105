"""OpenAI's two protocols, each an `Api`."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from jaxsgl.config.engine import BUNDLED_MODEL
from jaxsgl.requests.request import SamplingParams
from jaxsgl.text.tokenizer import load_tokenizer
from tests.end_to_end.apis import Answer, OverHttp, Prompt, Sample, given, is_chat, same_names

OPENAI_NAMES = same_names(
    "temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "n", "stop", "ignore_eos", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "min_tokens", "include_stop_str_in_output", "stop_token_ids",
)  # fmt: skip


@functools.cache
def ids_of_names() -> dict[str, int]:
    """Token ids by the names that OpenAI's answers give them; bytes that are no character are written as \\xe2."""
    tokenizer = load_tokenizer(BUNDLED_MODEL)
    names = [tokenizer.token_bytes(token_id).decode(errors="backslashreplace") for token_id in range(1024)]
    return {name: token_id for token_id, name in enumerate(names)}


def openai_body(params: SamplingParams) -> dict[str, Any]:
    body = given(params, OPENAI_NAMES)
    if params.logit_bias:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
    return body


def check_chunks(chunks: list[dict[str, Any]], n: int) -> dict[str, Any]:
    """Checks what holds for all of OpenAI's streams; returns the usage."""
    *news, last = chunks
    assert last["choices"] == []
    assert len({(chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert all(chunk["usage"] is None for chunk in news)
    ended: set[int] = set()
    for chunk in news:
        (choice,) = chunk["choices"]
        assert choice["index"] not in ended, "a chunk behind the end of its choice"
        if choice["finish_reason"] is not None:
            ended.add(choice["index"])
    assert ended == set(range(n))
    return dict(last["usage"])


def answer_of(samples: list[Sample], usage: dict[str, Any]) -> Answer:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return Answer(samples, usage["prompt_tokens"], usage["completion_tokens"])


class OpenAICompletions(OverHttp):
    """/v1/completions; `echo` where log-probabilities of the prompt are asked for."""

    def ask(self, prompt: Prompt, params: SamplingParams, stream: bool) -> Answer:
        body = {"prompt": prompt} | openai_body(params)
        asked = params.logprobs is not None
        if asked:
            body["logprobs"] = params.logprobs
        echo = params.prompt_logprobs is not None
        if echo:
            assert params.prompt_logprobs == params.logprobs
            body["echo"] = True
        samples = [Sample(text="", ids=[] if asked else None) for _ in range(params.n)]
        starts = [echo] * params.n  # the next token is the prompt's first one
        if stream:
            chunks = self.stream("/v1/completions", body | {"stream_options": {"include_usage": True}})
            usage = check_chunks(chunks, params.n)
        else:
            whole = self.post("/v1/completions", body)
            assert [choice["index"] for choice in whole["choices"]] == list(range(params.n))
            usage, chunks = whole["usage"], [{"choices": [choice]} for choice in whole["choices"]]
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            sample = samples[choice["index"]]
            says_nothing = not choice["text"] and choice["logprobs"] is None and choice["finish_reason"] is None
            assert not says_nothing, "an empty chunk"
            assert (choice["logprobs"] is not None) == asked
            if asked:
                self._score(sample, choice["logprobs"], params, starts[choice["index"]])
                starts[choice["index"]] = False
            assert sample.text is not None
            sample.text += choice["text"]
            sample.reason, sample.matched = choice["finish_reason"], choice.get("matched_stop")
            sample.deltas += 1
        for sample in samples if echo else ():
            self._split(sample, prompt, usage["prompt_tokens"])
        assert all(None not in sample.logprobs for sample in samples)
        return answer_of(samples, usage)

    @staticmethod
    def _score(sample: Sample, scores: dict[str, Any], params: SamplingParams, with_first: bool) -> None:
        assert sample.ids is not None
        sample.offsets += scores["text_offset"]
        for number, (token, logprob, top, _) in enumerate(zip(*scores.values(), strict=True)):
            sample.ids.append(ids_of_names()[token])
            if with_first and number == 0:
                assert logprob is top is None
                continue
            sample.logprobs.append(logprob)
            if logprob is None:  # `_split` tells whether it may be
                assert top is None
                continue
            assert top[token] == pytest.approx(logprob)
            sample.top.append(sorted(top.values(), reverse=True)[: params.logprobs])

    @staticmethod
    def _split(sample: Sample, prompt: Prompt, prompt_len: int) -> None:
        """Takes the echoed prompt off the output; it has no scores if the request was aborted before its prefill."""
        assert sample.ids is not None
        assert sample.text is not None
        sample.prompt_logprobs, sample.logprobs = sample.logprobs[: prompt_len - 1], sample.logprobs[prompt_len - 1 :]
        if None in sample.prompt_logprobs:
            assert set(sample.prompt_logprobs) == {None}
            assert sample.reason == "abort" and len(sample.ids) == prompt_len
            sample.prompt_logprobs = []
        num_scored = len(sample.prompt_logprobs)
        sample.prompt_top, sample.top = sample.top[:num_scored], sample.top[num_scored:]
        sample.ids = sample.ids[prompt_len:]
        text = prompt if isinstance(prompt, str) else load_tokenizer(BUNDLED_MODEL).decode(prompt)  # type: ignore[arg-type]
        assert sample.text.startswith(text)
        assert all(offset <= len(text) for offset in sample.offsets[:prompt_len])
        sample.text = sample.text[len(text) :]


class OpenAIChat(OverHttp):
    """/v1/chat/completions."""

    def ask(self, prompt: Prompt, params: SamplingParams, stream: bool) -> Answer:
        assert is_chat(prompt)
        body = {"messages": prompt} | openai_body(params)
        asked = params.logprobs is not None
        if asked:
            body |= {"logprobs": True, "top_logprobs": params.logprobs}
        samples = [Sample(text="", ids=[] if asked else None) for _ in range(params.n)]
        if stream:
            chunks = self.stream("/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
            usage = check_chunks(chunks, params.n)
            said = [choice for chunk in chunks for choice in chunk["choices"]]
            self._check_roles(said, params.n)
        else:
            whole = self.post("/v1/chat/completions", body)
            usage, said = whole["usage"], whole["choices"]
            assert all(choice["message"]["role"] == "assistant" for choice in said)
            assert [choice["index"] for choice in said] == list(range(params.n))
        for choice in said:
            sample = samples[choice["index"]]
            assert sample.text is not None
            sample.text += (choice["delta"] if stream else choice["message"]).get("content") or ""
            sample.reason, sample.matched = choice["finish_reason"], choice.get("matched_stop")
            sample.deltas += 1
            for entry in (choice.get("logprobs") or {"content": []})["content"]:
                assert sample.ids is not None
                sample.ids.append(ids_of_names()[entry["token"]])
                assert bytes(entry["bytes"]).decode(errors="backslashreplace") == entry["token"]
                sample.logprobs.append(entry["logprob"])
                sample.top.append([top["logprob"] for top in entry["top_logprobs"]])
        return answer_of(samples, usage)

    @staticmethod
    def _check_roles(said: list[dict[str, Any]], n: int) -> None:
        """Checks that the role comes first, once per choice, and that all other chunks say something."""
        seen: set[int] = set()
        for choice in said:
            delta = choice["delta"]
            assert ("role" in delta) == (choice["index"] not in seen)
            says = delta.get("content") or choice.get("logprobs") or choice["finish_reason"]
            assert says or choice["index"] not in seen, "an empty chunk"
            seen.add(choice["index"])
        assert seen == set(range(n))
