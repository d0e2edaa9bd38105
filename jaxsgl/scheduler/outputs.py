"""What a client gets of a request besides tokens: its `OutputCollector`s, a tuple that is mostly empty.

    ask(work)                 what a chunk's step is to compute for it
    take(outputs, part)       what a step has computed, unless the request was retracted since its launch, or ended
    add_to(reply)             hands over what has come, with the request's next tokens, or as its only answer
    restart()                 the request was retracted: it computes its known tokens again

A new output is a collector here, in `collectors_of` (arrivals.py), and a row of the table in `batch/outputs.py`.
Collectors never know steps or plans. apply.py calls them; `Req` answers for them what plans need to know.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace as replace_struct

from jaxsgl.batch.build import Work
from jaxsgl.batch.outputs import HostOutputs
from jaxsgl.cache.pages import IntArray
from jaxsgl.messages.replies import Reply, TokenLogprob
from jaxsgl.requests.outputs import Pooled, Pooling, PoolingSpec, TokenStates
from jaxsgl.requests.request import SamplingParams


class StepPart(NamedTuple):
    """What a step computed of one request.

    Attributes:
      place: of its sequence in the step.
      first, num_tokens: tokens first .. first + num_tokens - 1 of the step are the request's.
      start: position of the first of them.
      is_last: whether the last of them is the last known token, after which the step chooses the next one.
    """

    place: int
    first: int
    num_tokens: int
    start: int
    is_last: bool


class OutputCollector:
    """Collects one output of one request. This one wants nothing; others say what they want.

    Attributes:
      ends_request: the request ends with its prompt and samples no token; the collector makes its only reply.
      single_steps: decode steps compute it, but programs of several steps don't.
    """

    ends_request = False
    single_steps = False

    @property
    def computes_prompt(self) -> bool:
        """Whether all tokens of the prompt must be computed, and none may come from the prefix cache."""
        return False

    @property
    def scores_prompt(self) -> bool:
        """Whether chunks run a program that scores prompts, in which nothing decodes."""
        return False

    @property
    def in_few_sizes(self) -> bool:
        """Whether chunks run programs of which there are only those of `BucketSet.score_sizes`."""
        return self.scores_prompt

    def ask(self, work: Work, is_last: bool) -> Work:
        """`work`, a chunk, with what its step is to compute; `is_last`: of the known tokens."""
        return work

    def take(self, outputs: HostOutputs, part: StepPart) -> None:
        """Takes what a step has computed of `part`. Called for each step of the request, in order."""

    def add_to(self, reply: Reply) -> Reply:
        """The reply with what has come since the last one."""
        return reply

    def restart(self) -> None:
        """Starts over with the first token: what steps in flight compute never comes."""


class PromptLogprobs(OutputCollector):
    """The log-probabilities of a prompt, each with its `num_top` most likely tokens; they come with the first token."""

    def __init__(self, num_top: int, prompt_ids: IntArray) -> None:
        self._num_top = num_top
        self._targets = np.append(prompt_ids[1:], np.int32(0))  # after the last token stands none yet
        self._found: list[TokenLogprob] = []
        self._handed_over = False

    @property
    def computes_prompt(self) -> bool:
        """Until they are handed over."""
        return not self._handed_over

    @property
    def scores_prompt(self) -> bool:
        """Likewise."""
        return not self._handed_over

    def ask(self, work: Work, is_last: bool) -> Work:
        """The prompt token after each of the chunk's tokens is a target."""
        if self._handed_over:
            return work
        return replace(work, targets=self._targets[work.start : work.start + len(work.token_ids)])

    def take(self, outputs: HostOutputs, part: StepPart) -> None:
        """The score after the prompt's last token is not used."""
        if self._handed_over:
            return
        arrays = outputs.prompt_logprobs, outputs.prompt_top_ids, outputs.prompt_top_logprobs
        count = min(part.num_tokens, len(self._targets) - 1 - part.start)
        self._found += token_logprobs(arrays, part.first, count, self._num_top)

    def add_to(self, reply: Reply) -> Reply:
        """Those of the whole prompt, once."""
        if self._handed_over:
            return reply
        self._handed_over = True
        found, self._found = self._found, []
        return replace_struct(reply, prompt_logprobs=tuple(found))

    def restart(self) -> None:
        """Forgets those of the chunks so far."""
        self._found = []


class SampledLogprobs(OutputCollector):
    """The log-probability of each new token, with those of `num_top` likely and of `num_named` tokens in its place."""

    single_steps = True

    def __init__(self, num_top: int, num_named: int = 0) -> None:
        self._num_top, self._num_named = num_top, num_named
        self._newest: TokenLogprob | None = None

    def take(self, outputs: HostOutputs, part: StepPart) -> None:
        """Takes that of the token that the step has chosen, if it has chosen one."""
        if part.is_last:
            arrays = outputs.logprobs, outputs.top_ids, outputs.top_logprobs
            (self._newest,) = token_logprobs(arrays, part.place, 1, self._num_top)
            if self._num_named:
                assert outputs.named_logprobs is not None, "the step has no such scores"
                named = outputs.named_logprobs[part.place, : self._num_named].tolist()
                self._newest = replace_struct(self._newest, named=tuple(named))

    def add_to(self, reply: Reply) -> Reply:
        """That of the reply's token."""
        return replace_struct(reply, logprob=self._newest)


class PooledPrompt(OutputCollector):
    """What is pooled of a prompt, as `spec` says, while its chunks are computed.

    The device pools each chunk: it yields the hidden state of the chunk's last token, or the sum over its tokens. Sums
    are added up in float64, so that a mean does not depend on how the prompt was cut. Of a prompt that is never cut, it
    yields the mean.
    """

    ends_request = True

    def __init__(self, pooling: Pooling, spec: PoolingSpec, prompt_len: int) -> None:
        self._pooling = pooling
        self._takes_mean = spec.kind == "mean"
        self._seen = np.full(prompt_len, prompt_len, np.int32) if spec.sees_whole else None
        self._has_classes = bool(spec.labels)
        self._divisor = prompt_len if self._takes_mean and not spec.sees_whole else 1
        self._hidden: npt.NDArray[Any] | float = 0.0
        self._logits: tuple[float, ...] = ()
        self._log_total: float | None = None

    @property
    def computes_prompt(self) -> bool:
        """A mean needs all tokens, and where all see all, none is the same after another beginning."""
        return self._takes_mean or self._seen is not None

    @property
    def in_few_sizes(self) -> bool:
        """See `BucketSet.pool`."""
        return True

    def ask(self, work: Work, is_last: bool) -> Work:
        """A mean needs every chunk, else the last chunk is pooled."""
        return replace(work, pooling=self._pooling, seen=self._seen) if is_last or self._takes_mean else work

    def take(self, outputs: HostOutputs, part: StepPart) -> None:
        """Of a prompt of which one chunk is pooled, takes something once."""
        if not (part.is_last or self._takes_mean):
            return
        place, num_labels = part.place, len(self._pooling.label_ids)
        assert outputs.pooled is not None and outputs.label_logits is not None, "the step has pooled nothing"
        if num_labels:
            self._logits = tuple(outputs.label_logits[place, :num_labels].tolist())
            self._log_total = None if outputs.log_total is None else float(outputs.log_total[place])
            return
        self._hidden = self._hidden + outputs.pooled[place].astype(np.float64)
        if self._has_classes:
            self._logits = tuple(outputs.label_logits[place].tolist())

    def add_to(self, reply: Reply) -> Reply:
        """All chunks were taken."""
        if self._pooling.label_ids:
            return replace_struct(reply, pooled=Pooled(b"", self._logits, self._log_total))
        hidden = (np.asarray(self._hidden) / self._divisor).astype(np.float32)
        return replace_struct(reply, pooled=Pooled(hidden.tobytes(), self._logits))

    def restart(self) -> None:
        """Forgets the chunks so far."""
        self._hidden, self._logits, self._log_total = 0.0, (), None


class HiddenStates(OutputCollector):
    """Hidden states and experts of a request's tokens, as `sampling` asks for them, in the order of positions.

    A retracted request computes its first tokens again; their states are handed over once.
    """

    single_steps = True

    def __init__(self, sampling: SamplingParams) -> None:
        self._wants_hidden, self._wants_experts = sampling.return_hidden_states, sampling.return_routed_experts
        self._next = 0  # the first position that has not come yet
        self._hidden: list[bytes] = []
        self._experts: list[bytes] = []

    @property
    def computes_prompt(self) -> bool:
        """The prefix cache has no states."""
        return True

    def ask(self, work: Work, is_last: bool) -> Work:
        """Those of all tokens."""
        return replace(work, states=True)

    def take(self, outputs: HostOutputs, part: StepPart) -> None:
        """Takes those of positions that have not come before."""
        known = max(self._next - part.start, 0)
        if known >= part.num_tokens:
            return
        assert part.start + known == self._next, "states of tokens in between are missing"
        assert outputs.hidden is not None, "the step has no states"
        self._next = part.start + part.num_tokens
        rows = slice(part.first + known, part.first + part.num_tokens)
        if self._wants_hidden:
            self._hidden.append(outputs.hidden[rows].tobytes())
        if self._wants_experts and outputs.experts is not None:
            self._experts.append(outputs.experts[rows].tobytes())

    def add_to(self, reply: Reply) -> Reply:
        """Those up to the token before the reply's last one."""
        states = TokenStates(b"".join(self._hidden), b"".join(self._experts))
        self._hidden, self._experts = [], []
        return replace_struct(reply, states=states)


def with_outputs(reply: Reply, collectors: Iterable[OutputCollector]) -> Reply:
    """The reply with what all `collectors` of its request hand over."""
    for collector in collectors:
        reply = collector.add_to(reply)
    return reply


def token_logprobs(
    arrays: Sequence[npt.NDArray[Any] | None], first: int, count: int, num_top: int
) -> list[TokenLogprob]:
    """Entries first .. first + count - 1, each with its `num_top` most likely tokens.

    `arrays` are log-probabilities `[n]`, and ids and log-probabilities of the most likely tokens `[n, K]`.
    """
    logprobs, top_ids, top_logprobs = arrays
    assert logprobs is not None and top_ids is not None and top_logprobs is not None, "the step has no such scores"
    rows = slice(first, first + count)
    pairs = zip(top_ids[rows, :num_top].tolist(), top_logprobs[rows, :num_top].tolist(), strict=True)
    tops = (tuple(zip(*pair, strict=True)) for pair in pairs)
    return [TokenLogprob(*pair) for pair in zip(logprobs[rows].tolist(), tops, strict=True)]
