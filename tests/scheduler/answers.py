"""What requests are told, and what they should be told: each sample what it would yield alone.

The oracle is the hash chain that the fake engine computes of each request's own tokens. The random histories of
test_state_machine.py hand every reply to it and ask for a verdict at their end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxsgl.config.engine import Limits, SchedulingConfig
from jaxsgl.messages.replies import RefusalKind, Reply, TokenLogprob
from jaxsgl.requests.outputs import Pooled
from jaxsgl.requests.request import FinishReason, Request, max_new_tokens
from jaxsgl.scheduler.req import Key
from jaxsgl.testing.engine import generate
from jaxsgl.testing.outputs import hidden_state, label_logit, logprob
from tests.scheduler.grammars import constrained_output

VOCAB = 40
EOS = frozenset({0, 1})


class Answers:
    """Requests by id and the replies to each of their samples, checked as they come."""

    def __init__(self, config: SchedulingConfig) -> None:
        self.config = config
        self.requests: dict[str, Request] = {}
        self.outputs: dict[Key, list[int]] = {}
        self.logprobs: dict[Key, list[TokenLogprob]] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprob]] = {}
        self.ended: dict[Key, FinishReason | RefusalKind] = {}
        self.pooled: dict[str, Pooled] = {}
        self._arrived_s: dict[str, float] = {}

    def expect(self, request: Request, now_s: float) -> None:
        """Notes a request that is about to be sent."""
        self.requests[request.request_id] = request
        self._arrived_s[request.request_id] = now_s

    def samples(self, request_id: str) -> list[Key]:
        return [(request_id, index) for index in range(self.requests[request_id].sampling.n)]

    def unended(self) -> list[Key]:
        """The samples that are still to be answered."""
        return [key for request_id in self.requests for key in self.samples(request_id) if key not in self.ended]

    def take(self, reply: Reply, now_s: float) -> None:
        """Adds a reply, which must not follow the end of its sample."""
        if reply.refusal is not None:
            self._refuse(reply.request_id, reply.refusal.kind, now_s - self._arrived_s[reply.request_id])
            return
        key = (reply.request_id, reply.index)
        assert key in self.samples(reply.request_id)
        assert key not in self.ended, "a sample must end exactly once, and say nothing after"
        self.outputs.setdefault(key, []).extend(reply.token_ids)
        if reply.logprob is not None:
            self.logprobs.setdefault(key, []).append(reply.logprob)
        if reply.prompt_logprobs is not None:
            assert reply.index == 0 and reply.request_id not in self.prompt_logprobs
            self.prompt_logprobs[reply.request_id] = list(reply.prompt_logprobs)
        if reply.pooled is not None:
            assert self.requests[reply.request_id].pooling is not None and reply.finish_reason is FinishReason.LENGTH
            self.pooled[reply.request_id] = reply.pooled
        if reply.finish_reason is not None:
            self.ended[key] = reply.finish_reason

    def check(self, limits: Limits) -> None:
        """Checks that every sample has ended with the tokens and scores that it would have alone."""
        assert not self.unended(), "a sample never ended"
        for key, reason in self.ended.items():
            request, output = self.requests[key[0]], self.outputs.get(key, [])
            if request.pooling is not None:
                _check_pooled(request, reason, self.pooled.get(key[0]), limits)
                assert not output, "pooling yields no tokens"
                continue
            _check_output(request, reason, output, limits)
            self._check_logprobs(request, key, output)

    def _refuse(self, request_id: str, kind: RefusalKind, since_s: float) -> None:
        """Checks that all samples that are left end with this refusal."""
        left = [key for key in self.samples(request_id) if key not in self.ended]
        assert left, "what has ended can't be refused"
        self.ended.update(dict.fromkeys(left, kind))
        if kind is RefusalKind.WAITED:
            assert self.config.queue_timeout_s is not None and since_s > self.config.queue_timeout_s
            assert not any(self.outputs.get(key) for key in self.samples(request_id)), "it never ran"
        if kind is RefusalKind.RAN:
            assert self.config.running_timeout_s is not None and since_s > self.config.running_timeout_s

    def _check_logprobs(self, request: Request, key: Key, output: list[int]) -> None:
        """Checks the scores of every output token, and those of the prompt, which come with the first output token."""
        asked, given = request.sampling.logprobs, self.logprobs.get(key, [])
        ends = range(len(request.prompt_ids), len(request.prompt_ids) + len(output))
        sequence = [*request.prompt_ids, *output]
        if asked is None:
            assert not given
        else:
            named = request.sampling.logprob_token_ids
            assert given == [_token_logprob(sequence, end, asked, named) for end in ends]
        asked = request.sampling.prompt_logprobs
        if asked is None:
            assert request.request_id not in self.prompt_logprobs
        elif self.outputs.get((request.request_id, 0)):
            expected = [_token_logprob(request.prompt_ids, end, asked) for end in range(1, len(request.prompt_ids))]
            assert self.prompt_logprobs[request.request_id] == expected


def _check_output(request: Request, reason: FinishReason | RefusalKind, output: list[int], limits: Limits) -> None:
    room = limits.context_length - len(request.prompt_ids)  # by which max_tokens is capped
    if reason is RefusalKind.INVALID and _is_too_long(
        request, max(min(request.sampling.max_tokens or 1, room), 1), limits
    ):
        assert not output
        return
    expected, ends = _expected(request, max_new_tokens(request, limits))
    if reason is RefusalKind.INVALID:  # of a sample that its grammar ended; others may be ahead, which end with it
        assert ends is reason
    if reason is FinishReason.ABORT or isinstance(reason, RefusalKind):
        assert output == expected[: len(output)]
    else:
        assert output == expected
        assert reason is ends


def _is_too_long(request: Request, num_new: int, limits: Limits) -> bool:
    needed = len(request.prompt_ids) + num_new
    return not request.prompt_ids or needed > min(limits.pool_tokens, limits.context_length)


def output_of(request: Request, limits: Limits) -> list[int]:
    """What each sample of a request that is taken yields alone; [] of one that generates nothing."""
    return [] if request.pooling is not None else _expected(request, max_new_tokens(request, limits))[0]


def _expected(request: Request, max_new: int) -> tuple[list[int], FinishReason | RefusalKind]:
    """What each sample yields alone, and why it ends."""
    if request.sampling.masked:
        return constrained_output(request, max_new, VOCAB, EOS)
    stop_ids = frozenset() if request.sampling.ignore_eos else EOS
    output = generate(request.prompt_ids, max_new, stop_ids, VOCAB, request.sampling.min_tokens)
    return output, FinishReason.STOP if output[-1] in stop_ids else FinishReason.LENGTH


def _check_pooled(request: Request, reason: FinishReason | RefusalKind, pooled: Pooled | None, limits: Limits) -> None:
    assert request.pooling is not None and limits.pooling is not None
    if reason is not FinishReason.LENGTH:
        assert pooled is None
        assert reason is not RefusalKind.INVALID or _is_too_long(request, 0, limits)
        return
    assert pooled is not None
    prompt, label_ids = request.prompt_ids, request.pooling.label_ids
    if label_ids:
        assert pooled.logits == tuple(label_logit(prompt, label_id) for label_id in label_ids)
        return
    ends = range(len(prompt), len(prompt) + 1) if limits.pooling.kind == "last" else range(1, len(prompt) + 1)
    states = [hidden_state(prompt[:end]) for end in ends]
    assert np.frombuffer(pooled.hidden, np.float32).tolist() == [float(np.float32(sum(states) / len(states)))]


def _token_logprob(sequence: list[int], place: int, num_top: int, named: Sequence[int] = ()) -> TokenLogprob:
    """What the fake engine says of the token at `place`."""
    token, value = sequence[place], logprob(sequence[:place], sequence[place])
    of_named = tuple(logprob(sequence[:place], other) for other in named)
    return TokenLogprob(value, tuple((token + i, value - i) for i in range(num_top)), of_named)
