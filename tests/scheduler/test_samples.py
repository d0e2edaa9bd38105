"""Several samples of one prompt, and what features change in scheduling."""

from __future__ import annotations

from typing import Any

import pytest

from jaxsgl.errors import CheckpointError
from jaxsgl.messages.orders import Abort
from jaxsgl.requests.request import FinishReason, Request, SamplingParams
from jaxsgl.testing.engine import ScriptedMailbox, next_token
from tests.checked import sampling_of
from tests.scheduler.serving import VOCAB, Script, capacity, expected, new_scheduler, request, serve

PROMPT = list(range(100, 142))


def sampled(request_id: str = "r", prompt: list[int] = PROMPT, max_tokens: int = 4, **params: Any) -> Request:
    return Request(request_id, prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, **params))


def outputs(mailbox: ScriptedMailbox, request_id: str) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for reply in mailbox.replies:
        if reply.request_id == request_id:
            found.setdefault(reply.index, []).extend(reply.token_ids)
    return found


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("radix", [True, False])
def test_the_first_sample_computes_the_prompt_and_the_others_share_its_pages(radix: bool, overlap: bool) -> None:
    mailbox, scheduler = serve(capacity(max_extend_tokens=16), [[sampled(n=4)]], radix=radix, overlap=overlap)
    assert outputs(mailbox, "r") == dict.fromkeys(range(4), expected(PROMPT))
    computed = sum(inputs.num_tokens for inputs in scheduler.launched if inputs.bucket.kind == "extend")
    assert computed == (len(PROMPT) + 3 * 2 if radix else 4 * len(PROMPT))  # 40 of 42 tokens fill pages


def test_other_requests_pass_while_samples_wait_for_their_prompt_and_none_starves() -> None:
    sizes = capacity(rows=2, max_extend_tokens=16)
    mailbox, _ = serve(sizes, [[sampled(n=5), request("other", [1, 2, 3])]])
    assert outputs(mailbox, "r") == dict.fromkeys(range(5), expected(PROMPT))
    first_ends = [reply.request_id for reply in mailbox.replies if reply.finish_reason][:2]
    assert "other" in first_ends
    assert mailbox.output_ids("other") == expected([1, 2, 3])


def test_an_abort_ends_all_samples_wherever_they_are_or_one_of_them() -> None:
    sizes = capacity(rows=2)
    for turns in range(6):
        script: Script = [
            [sampled("all", n=4), sampled("one", n=2)],
            *[[] for _ in range(turns)],
            [Abort("all"), Abort("one", 1)],
        ]
        mailbox, _ = serve(sizes, script)
        ends = {
            (reply.request_id, reply.index): reply.finish_reason for reply in mailbox.replies if reply.finish_reason
        }
        assert ends[("one", 0)] is FinishReason.LENGTH
        assert len(ends) == 6
        assert FinishReason.ABORT in {ends["all", index] for index in range(4)}


def test_other_samples_go_on_when_sample_0_is_aborted_before_they_start() -> None:
    sizes = capacity(rows=1, max_extend_tokens=4)
    mailbox, _ = serve(sizes, [[sampled(n=3)], [], [Abort("r", 0)]])
    assert outputs(mailbox, "r") == {0: [], 1: expected(PROMPT), 2: expected(PROMPT)}


def test_seeds_of_samples_follow_one_another() -> None:
    scheduler = new_scheduler(capacity())
    scheduler.receive([Request("r", PROMPT, SamplingParams(seed=2**32 - 2, n=4))])
    seeds: list[int] = []
    while len(seeds) < 4:
        inputs = scheduler.launch()
        assert inputs is not None
        if inputs.bucket.kind == "extend":
            seeds += sampling_of(inputs).seeds[: inputs.num_seqs].astype("uint32").tolist()
        scheduler.collect([7] * inputs.num_seqs)
    assert seeds == [2**32 - 2, 2**32 - 1, 0, 1]


def test_a_prompt_whose_logits_are_wanted_takes_nothing_from_the_cache_but_gives_to_it() -> None:
    script: Script = [
        [request("before", PROMPT)],
        [],
        [],
        [],
        [],
        [sampled(prompt_logprobs=1, n=2)],
        [],
        [request("after", PROMPT)],
    ]
    mailbox, _ = serve(capacity(), script)
    cached = {(reply.request_id, reply.index): reply.cached_tokens for reply in mailbox.replies}
    assert cached == {("before", 0): 0, ("r", 0): 0, ("r", 1): 40, ("after", 0): 40}
    first = next(reply for reply in mailbox.replies if reply.request_id == "r")
    assert first.prompt_logprobs is not None
    assert [entry.top[0][0] for entry in first.prompt_logprobs] == PROMPT[1:]
    assert sum(reply.prompt_logprobs is not None for reply in mailbox.replies) == 1


def test_stop_tokens_wait_for_min_tokens() -> None:
    stop = next_token(PROMPT, VOCAB)
    mailbox, _ = serve(capacity(), [[sampled(stop_token_ids=(stop,), min_tokens=3, max_tokens=3)]])
    assert mailbox.output_ids("r")[0] == (stop + 1) % VOCAB
    assert len(mailbox.output_ids("r")) == 3


def test_only_batches_with_features_bring_more_than_one_array() -> None:
    features: dict[str, dict[str, Any]] = {
        "penalty": {"presence_penalty": 0.5},
        "logprobs": {"logprobs": 0},
        "bias": {"logit_bias": {3: 1.0}},
        "named": {"logprobs": 0, "logprob_token_ids": (3, 5)},
    }
    for name, params in [("greedy", {}), ("drawn", {"temperature": 1.0, "seed": 1}), *features.items()]:
        kind = SamplingParams(**{"temperature": 0.0, "max_tokens": 5, **params})
        _, scheduler = serve(capacity(), [[Request("r", PROMPT, kind)]])
        for inputs in scheduler.launched:
            assert inputs.bucket.featured == (inputs.features is not None) == (name in features)
        setups = [len(inputs.features.row_setups) for inputs in scheduler.launched if inputs.features is not None]
        assert sum(setups) == (name in ("penalty", "bias", "named")), "a row is set once, or not at all"


def test_a_chunk_that_yields_no_token_makes_no_featured_batch() -> None:
    _, scheduler = serve(capacity(max_extend_tokens=16), [[sampled(presence_penalty=1.0)]])
    extends = [inputs for inputs in scheduler.launched if inputs.bucket.kind == "extend"]
    assert [inputs.bucket.featured for inputs in extends] == [False, False, True]


def test_more_eos_tokens_than_the_step_can_hold_back_are_refused() -> None:
    with pytest.raises(CheckpointError, match="21 EOS tokens, but 20 are the most"):
        new_scheduler(capacity(), eos=tuple(range(21)))
