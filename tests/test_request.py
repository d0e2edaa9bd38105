from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from jaxsgl.errors import InvalidRequest
from jaxsgl.requests.request import Request, SamplingParams


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"stop": 5}, "stop is 5, but must be a list of texts"),
        ({"stop": (5,)}, "a stop string is 5, but must be a text"),
        ({"logit_bias": {"7": 1.0}}, "a token id of logit_bias is '7', but must be an integer"),
        ({"logit_bias": {7: float("nan")}}, "the logit_bias of token 7 is nan, but must be -100 to 100"),
        ({"n": 1.5}, "n is 1.5, but must be an integer"),
        ({"n": 129}, "n is 129, but must be 1 to 128"),
        ({"logprobs": True}, "logprobs is True, but must be an integer"),
        ({"logprob_token_ids": (7,)}, "logprob_token_ids are given, but logprobs is not: set it"),
        ({"logprobs": 0, "logprob_token_ids": (0.5,)}, "logprob_token_ids is (0.5,), but must be a list of token ids"),
        ({"logprobs": 0, "logprob_token_ids": [1] * 33}, "the number of logprob_token_ids is 33, but must be 0 to 32"),
        ({"repetition_penalty": 2.1}, "repetition_penalty is 2.1, but must be above 0, up to 2"),
        ({"min_tokens": 2**31}, "min_tokens is 2147483648, but must be 0 to 2147483647"),
        ({"min_tokens": 4, "max_tokens": 3}, "min_tokens is 4, but must be max_tokens=3 at most"),
        ({"ignore_eos": "false"}, "ignore_eos is 'false', but must be true or false"),
        ({"skip_special_tokens": None}, "skip_special_tokens is None, but must be true or false"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output is 1, but must be true or false"),
    ],
)
def test_values_out_of_range_are_refused_with_the_limit(params: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**params)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "params",
    [
        {"frequency_penalty": -2.0},
        {"presence_penalty": 2.0},
        {"repetition_penalty": 0.01},
        {"logit_bias": {0: 0.0}},
        {"min_tokens": 1},
    ],
)
def test_parameters_that_change_logits_are_recognized(params: dict[str, Any]) -> None:
    assert SamplingParams(**params).edits_logits


def test_a_text_may_be_the_only_stop_string_and_none_is_no_list_as_in_vllm() -> None:
    lists = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words", "logit_bias")
    given: dict[str, Any] = dict.fromkeys(lists)
    assert SamplingParams(**given) == SamplingParams()
    assert SamplingParams(**given | {"stop": "###"}) == SamplingParams(stop=("###",))


def test_numbers_of_numpy_are_taken_for_pythons() -> None:
    given: dict[str, Any] = {
        "temperature": np.float32(0.5), "top_k": np.int64(5), "seed": np.uint8(3), "max_tokens": np.int32(4),
        "n": np.int16(2), "logprobs": np.int64(0), "stop_token_ids": list(np.arange(3)),
        "allowed_token_ids": tuple(np.arange(9)), "logprob_token_ids": (np.int64(7),),
        "bad_word_ids": (list(np.arange(2)),), "logit_bias": {np.int64(7): np.float64(1)},
    }  # fmt: skip
    same = SamplingParams(
        temperature=0.5, top_k=5, seed=3, max_tokens=4, n=2, logprobs=0, stop_token_ids=(0, 1, 2),
        allowed_token_ids=tuple(range(9)), logprob_token_ids=(7,), bad_word_ids=((0, 1),), logit_bias={7: 1.0},
    )  # fmt: skip
    params = SamplingParams(**given)
    assert params == same
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == same
    no_integers: list[Any] = [np.True_, np.float64(1.5), np.array([1, 2]), "4"]
    for value in no_integers:
        with pytest.raises(InvalidRequest, match=r"max_tokens is .*, but must be an integer"):
            SamplingParams(max_tokens=value)


def test_default_parameters_are_not_sent() -> None:
    plain = Request("r", [1], SamplingParams())
    assert not plain.sampling.edits_logits
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plain))["sampling"] == {}


def test_a_request_is_unchanged_by_encoding_and_decoding() -> None:
    params = SamplingParams(logit_bias={7: -1.5}, stop=("a", "ü"), n=3, logprobs=0, prompt_logprobs=5, min_tokens=2)
    request = Request("r", [1], params)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request) == request
