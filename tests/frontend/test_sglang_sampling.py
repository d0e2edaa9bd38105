"""What SGLang's sampling fields mean here: proto3's zeros, and fields that can't be served."""

from __future__ import annotations

from typing import Any

import pytest
from sglang_calls import ask
from smg_grpc_proto import sglang_scheduler_pb2 as pb

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.grpc.sglang.convert import options_of
from jaxsgl.requests.request import SamplingParams

pytestmark = pytest.mark.unit


def test_missing_fields_mean_sglangs_defaults() -> None:
    options = options_of(pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[1])))
    greedy_without_end = SamplingParams(temperature=0.0)
    assert options.sampling == greedy_without_end
    assert (options.stream, options.chunk_tokens, options.logprob_start, options.prefill_only) == (
        False,
        1,
        None,
        False,
    )


def test_every_field_sets_its_own_option() -> None:
    request = ask(
        1, 2, 3,
        temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, frequency_penalty=0.5, presence_penalty=-0.5,
        repetition_penalty=1.5, max_new_tokens=9, stop=["a", "b"], stop_token_ids=[4, 5], n=3, min_new_tokens=2,
        ignore_eos=True, no_stop_trim=True, stream_interval=4, logit_bias={"42": 1.5, "7": -100.0},
        skip_special_tokens=True, spaces_between_special_tokens=True,
        of_request={"return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 5},
    )  # fmt: skip
    options = options_of(request)
    assert options.sampling == SamplingParams(
        temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, frequency_penalty=0.5, presence_penalty=-0.5,
        repetition_penalty=1.5, max_tokens=9, stop=("a", "b"), stop_token_ids=(4, 5), n=3, min_tokens=2,
        ignore_eos=True, include_stop_str_in_output=True, logit_bias={42: 1.5, 7: -100.0},
        logprobs=5, prompt_logprobs=5,
    )  # fmt: skip
    assert (options.stream, options.chunk_tokens, options.logprob_start) == (True, 4, 1)


@pytest.mark.parametrize(
    ("return_logprob", "start", "scores_prompt"),
    [(True, 0, True), (True, 2, True), (True, 3, False), (True, -1, False), (False, 0, False), (False, 99, False)],
)
def test_the_prompt_is_scored_only_from_a_position_inside_it(
    return_logprob: bool, start: int, scores_prompt: bool
) -> None:
    of_request = {"return_logprob": return_logprob, "logprob_start_len": start}
    options = options_of(ask(1, 2, 3, of_request=of_request))
    assert (options.sampling.prompt_logprobs is not None) == (options.logprob_start is not None) == scores_prompt
    assert (options.sampling.logprobs is not None) == return_logprob


def test_max_new_tokens_0_is_prefill_only() -> None:
    options = options_of(ask(1, max_new_tokens=0))
    assert options.prefill_only
    assert options.sampling.max_tokens == 1


@pytest.mark.parametrize(
    ("sampling", "word"),
    [
        ({"regex": ""}, "regex"),
        ({"custom_params": {"a": 1}}, "custom_params"),
        ({"stream_interval": 0}, "stream_interval"),
        ({"stream_interval": -1}, "stream_interval"),
        ({"logit_bias": {"hello": 1.0}}, "'hello'"),
        ({"logit_bias": {"": 1.0}}, "logit_bias"),
        ({"logit_bias": {"--5": 1.0}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1.0}}, "logit_bias"),
        ({"logit_bias": {"²": 1.0}}, "logit_bias"),
        ({"logit_bias": {"1": 1000.0}}, "logit_bias"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 1_000_000}, "n is"),
        ({"min_new_tokens": 2, "max_new_tokens": 0}, "min_new_tokens"),
        ({"min_new_tokens": 2, "max_new_tokens": 1}, "min_new_tokens is 2, but max_new_tokens is 1"),
        ({"stop": [""]}, "stop string"),
    ],
)
def test_a_refusal_of_a_sampling_field_names_it(sampling: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidRequest, match=word):
        options_of(ask(1, **sampling))


@pytest.mark.parametrize(
    "of_request",
    [
        {"disaggregated_params": pb.DisaggregatedParams(bootstrap_host="", bootstrap_port=1, bootstrap_room=1)},
        {"disaggregated_params": pb.DisaggregatedParams(bootstrap_host="a", bootstrap_port=-1, bootstrap_room=1)},
        {"disaggregated_params": pb.DisaggregatedParams(bootstrap_host="a", bootstrap_port=1, bootstrap_room=-1)},
        {"custom_logit_processor": "gASV"},
        {"input_embeds": [0.5]},
        {"return_logprob": True, "logprob_start_len": -2},
        {"return_logprob": True, "logprob_start_len": 2},
        {"return_logprob": True, "top_logprobs_num": -1},
        {"return_logprob": True, "top_logprobs_num": 1000},
    ],
    ids=lambda of_request: list(of_request)[-1],
)
def test_a_refusal_of_a_request_field_names_it(of_request: dict[str, object]) -> None:
    name = list(of_request)[-1].removeprefix("top_").removesuffix("_num").replace("disaggregated_params", "bootstrap")
    with pytest.raises(InvalidRequest, match=name):
        options_of(ask(1, of_request=of_request))


def test_fields_that_change_nothing_are_accepted() -> None:
    of_request = {
        "mm_inputs": pb.MultimodalInputs(),
        "disaggregated_params": pb.DisaggregatedParams(),
        "data_parallel_rank": 0,
        "log_metrics": True,
        "require_reasoning": True,
    }
    assert options_of(ask(1, of_request=of_request)).sampling == options_of(ask(1)).sampling
