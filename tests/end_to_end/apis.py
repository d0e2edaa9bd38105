"""The same request over each protocol, and the protocols' answers in one common form.

The readers of streams are strict: whatever an API promises of a stream's shape is asserted here, so every test that
streams checks it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import grpc
import httpx

from jaxsgl.frontend.proto import jaxsgl_pb2 as pb
from jaxsgl.frontend.proto import jaxsgl_pb2_grpc as pb_grpc
from jaxsgl.requests.request import SamplingParams

PATIENCE_S = 200.0
DEFAULTS = SamplingParams()

Chat: TypeAlias = list[dict[str, str]]
Prompt: TypeAlias = str | list[int] | Chat


@dataclass
class Sample:
    """One sample. What its protocol doesn't say is None; log-probabilities that weren't asked for are empty.

    Attributes:
      ids: output tokens; OpenAI's protocols give them only if log-probabilities name them.
      matched: stop string or stop token.
      logprobs, top: of each output token, and of the most likely ones, best first.
      prompt_logprobs, prompt_top: of prompt tokens 1, 2, ...
      offsets: where in the text each token begins, the echoed prompt's included, if the protocol tells.
      deltas: the number of pieces in which the output came.
    """

    text: str | None = None
    ids: list[int] | None = None
    reason: str | None = None
    matched: int | str | None = None
    logprobs: list[float] = field(default_factory=list)
    top: list[list[float]] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top: list[list[float]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    deltas: int = 0


@dataclass
class Answer:
    """All samples in their order, and the token counts of the prompt and of all outputs together."""

    samples: list[Sample]
    prompt_tokens: int
    output_tokens: int


class Api(Protocol):
    """A protocol."""

    def ask(self, prompt: Prompt, params: SamplingParams, stream: bool) -> Answer:
        """The answer."""


def is_chat(prompt: Prompt) -> bool:
    return isinstance(prompt, list) and isinstance(prompt[0], dict)


def given(params: SamplingParams, names: dict[str, str]) -> dict[str, Any]:
    """Parameters that differ from the defaults, by the protocol's names: `names` maps ours to theirs."""
    values = {theirs: getattr(params, ours) for ours, theirs in names.items()}
    return {theirs: values[theirs] for ours, theirs in names.items() if values[theirs] != getattr(DEFAULTS, ours)}


def same_names(*names: str, **others: str) -> dict[str, str]:
    return {name: name for name in names} | others


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, which must end with [DONE] and nothing behind it."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    *data, done = [line.removeprefix("data: ") for line in lines]
    assert done == "[DONE]"
    events = [json.loads(event) for event in data]
    assert not any("error" in event for event in events), events[-1]
    return events


class OverHttp:
    """What the three HTTP protocols have in common."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def post(self, path: str, body: dict[str, Any]) -> Any:
        response = self._http.post(path, json=body)
        assert response.status_code == 200, (response.text, body)
        return response.json()

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        with self._http.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.status_code == 200, (response.read(), body)
            return events_of(response)


REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length", pb.FINISH_REASON_ABORT: "abort"}


class OwnGrpc:
    """jaxsgl.v1."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = pb_grpc.JaxsglStub(channel)

    def ask(self, prompt: Prompt, params: SamplingParams, stream: bool) -> Answer:
        names = same_names(*(name for name in DEFAULTS.__struct_fields__ if name != "logit_bias"))
        sampling = pb.SamplingParams(**given(params, names), logit_bias=params.logit_bias)
        request = pb.GenerateRequest(sampling=sampling, stream=stream, **_own_input(prompt))
        samples = [Sample("", []) for _ in range(params.n)]
        usages: dict[int, pb.Usage] = {}
        replies = list(self._stub.Generate(request, timeout=PATIENCE_S))
        assert stream or [reply.index for reply in replies] == list(range(params.n))
        for reply in replies:
            sample = samples[reply.index]
            assert reply.index not in usages, "a reply behind the end of its sample"
            assert sample.text is not None
            assert sample.ids is not None
            sample.text += reply.text
            sample.ids += reply.token_ids
            sample.deltas += 1
            sample.logprobs += [entry.logprob for entry in reply.logprobs]
            sample.top += [[top.logprob for top in entry.top] for entry in reply.logprobs]
            sample.prompt_logprobs += [entry.logprob for entry in reply.prompt_logprobs]
            sample.prompt_top += [[top.logprob for top in entry.top] for entry in reply.prompt_logprobs]
            assert reply.finish_reason or reply.token_ids, "a reply without news"
            if reply.finish_reason:
                usages[reply.index] = reply.usage
                sample.reason = REASONS[reply.finish_reason]
                if reply.HasField("matched_stop_string"):
                    sample.matched = reply.matched_stop_string
                elif reply.HasField("matched_stop_token"):
                    sample.matched = reply.matched_stop_token
        (prompt_tokens,) = {usage.prompt_tokens for usage in usages.values()}
        return Answer(samples, prompt_tokens, sum(usage.completion_tokens for usage in usages.values()))


def _own_input(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text": prompt}
    if is_chat(prompt):
        return {"chat": pb.ChatMessages(messages=[pb.ChatMessage(**turn) for turn in prompt])}  # type: ignore[arg-type]
    return {"token_ids": pb.TokenIds(ids=prompt)}  # type: ignore[arg-type]


def ids_of(http: httpx.Client, prompt: str | Chat) -> list[int]:
    """The tokens of a prompt, so that protocols without text can be sent it."""
    body = {"messages": prompt} if is_chat(prompt) else {"prompt": prompt}
    tokens: Sequence[int] = http.post("/tokenize", json=body).json()["tokens"]
    return list(tokens)
