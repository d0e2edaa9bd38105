"""The bundled model with quantized weights answers as it should, whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import jaxsgl
from jaxsgl.offline.llm import LLM
from tests.grids import daily

pytestmark = pytest.mark.device

SCORED = jaxsgl.SamplingParams(temperature=0.0, max_tokens=24, logprobs=0)
PAIRS = [(3, 4), (9, 8), (0, 5), (7, 7), (2, 6)]


@pytest.fixture(scope="module", params=daily(["int8", "int4", "fp8"], every=3))
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    buckets = {"decode_buckets": (8,), "extend_buckets": (128,), "chunked_prefill_size": 128}
    llm = jaxsgl.LLM(quantization=request.param, dtype="bfloat16", max_running_requests=8, **buckets)
    yield llm
    llm.close()


def test_the_weights_take_the_bytes_of_their_format(llm: LLM) -> None:
    arch = llm.engine.arch
    assert arch.weight_format is not None
    on_cpus = {"int8": 1, "int4": 0.62, "float8_e4m3fn": 2}[
        arch.weight_format.numbers
    ]  # FP8 with a scale per output becomes 16 bits
    assert 0.9 < llm.engine.info.weight_bytes / (on_cpus * 1_970_000) < 1.1


def test_sums_are_right_and_scores_do_not_depend_on_the_batch(llm: LLM) -> None:
    prompts = [f"{a} + {b} =" for a, b in PAIRS]
    together = llm.generate(prompts, SCORED, use_tqdm=False)
    for (a, b), completion in zip(PAIRS, together, strict=True):
        assert completion.text.strip() == str(a + b)
    for prompt, expected in zip(prompts, together, strict=True):
        (alone,) = llm.generate([prompt], SCORED, use_tqdm=False)
        assert alone.token_ids == expected.token_ids
        assert [score.logprob for score in alone.logprobs] == [score.logprob for score in expected.logprobs]
