"""A request's tokens and log-probabilities are the same to the bit in any company, on a CPU with the C++ kernels."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import pytest

from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.messages.replies import TokenLogprob
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.testing.engine import ScriptedMailbox
from pallas_kernels import sums
from pallas_kernels.native import library
from tests.compiling import as_users_compile
from tests.end_to_end.offline import serve
from tests.grids import NIGHTLY, daily

pytestmark = [pytest.mark.device, as_users_compile]

BUNDLED: dict[str, Any] = {}
MIXTURE: dict[str, Any] = {  # 12 experts: a router's outputs fill no register
    "architectures": ["Qwen2MoeForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "head_dim": 64,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 64,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 1024,
    "dtype": "bfloat16",
    "eos_token_id": 1,
}
OF_QWEN = ("shared_expert_intermediate_size", "num_experts")
SIGMOIDS: dict[str, Any] = {  # their router is float32
    **{key: value for key, value in MIXTURE.items() if key not in OF_QWEN},
    "architectures": ["Glm4MoeForCausalLM"],
    "n_routed_experts": 12,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
    "rms_norm_eps": 1e-5,
}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # config.json of random weights, and flags
    "bfloat16": (BUNDLED, {}),
    "mixture": (MIXTURE, {}),
    "sigmoids": (SIGMOIDS, {}),
    "int8": (BUNDLED, {"quantization": "int8"}),
    "int8 with activations as they are": (BUNDLED, {"quantization": "int8", "weight_only": True}),
    "mixture of int8": (MIXTURE, {"quantization": "int8"}),
    "int4": (BUNDLED, {"quantization": "int4"}),
    "mixture of int4": (MIXTURE, {"quantization": "int4"}),
    "mixture of fp8": (MIXTURE, {"quantization": "fp8"}),
    "fp8": (BUNDLED, {"quantization": "fp8"}),
    "float8 cache": (BUNDLED, {"kv_cache_dtype": "fp8_e4m3"}),
}
NUM_PROMPTS = 20
VOCAB_SIZE = 512
FLAGS: dict[str, Any] = {
    "page_size": 16,
    "chunked_prefill_size": 64,
    "context_length": 512,
    "max_running_requests": 8,
    "max_total_tokens": 4096,
    "decode_buckets": (1, 8),
    "extend_buckets": (64,),
    "decode_steps": 4,
}

Answer: TypeAlias = tuple[list[int], list[TokenLogprob | None]]


@pytest.fixture(scope="module", autouse=True)
def native_runs_here() -> None:
    """Skips where the machine has no C++ kernels: XLA promises nothing of this."""
    if (reason := library.load()) is not None:
        pytest.skip(reason)


def new_engine(folder: Path, kind: str, **flags: Any) -> Engine:
    config, of_kind = KINDS[kind]
    if config:
        (folder / "config.json").write_text(json.dumps(config))
        of_kind = {"model": str(folder), "load_format": "dummy", **of_kind}
    return Engine(EngineConfig(**{**FLAGS, **of_kind, **flags}), progress=False)


@pytest.fixture(scope="module", params=daily(list(KINDS), every=2 * len(KINDS)))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = new_engine(tmp_path_factory.mktemp("model"), request.param)
    yield engine
    engine.close()


def requests_of(logprobs: int | None) -> list[Request]:
    """Greedy, seeded, top-p and filtered requests; every third prompt begins as others do."""
    rng = random.Random(0)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(96)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 0.8, "top_p": 0.95},
        {"temperature": 1.0, "top_k": 20, "min_p": 0.02},
    ]  # fmt: skip
    requests = []
    for i in range(NUM_PROMPTS):
        prompt = shared * (i % 3 == 0) + [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 200))]
        params = SamplingParams(max_tokens=10, seed=i, ignore_eos=True, logprobs=logprobs, **kinds[i % len(kinds)])
        requests.append(Request(f"r{i}", prompt, params))
    return requests


def answers_in(mailbox: ScriptedMailbox, requests: list[Request]) -> dict[str, Answer]:
    scores: dict[str, list[TokenLogprob | None]] = {each.request_id: [] for each in requests}
    for reply in mailbox.replies:
        scores[reply.request_id] += [reply.logprob] if reply.token_ids else []
    return {name: (mailbox.output_ids(name), scores[name]) for name in scores}


def alone(engine: Engine, requests: list[Request]) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    for request in requests:
        answers |= answers_in(serve(engine, [[request]], radix=False, decode_steps=1), [request])
    return answers


def together(engine: Engine, requests: list[Request]) -> dict[str, Answer]:
    """With prefixes of each other cached, and retracted again and again."""
    mailbox = serve(engine, [requests], retract_every=5)
    assert mailbox.loads[-1].totals.retractions > 0
    assert any(reply.cached_tokens for reply in mailbox.replies)
    return answers_in(mailbox, requests)


def differing(some: dict[str, Answer], others: dict[str, Answer]) -> list[str]:
    return [name for name in some if some[name] != others[name]]


def test_tokens_and_scores_are_those_of_a_request_alone(engine: Engine) -> None:
    requests = requests_of(logprobs=3)
    expected = alone(engine, requests)
    assert all(len(tokens) == len(scores) == 10 and None not in scores for tokens, scores in expected.values())
    assert differing(together(engine, requests), expected) == []
    backwards = answers_in(serve(engine, [requests[::-1]], overlap=False), requests)
    assert differing(backwards, expected) == []
    without_scores = requests_of(logprobs=None)  # several of their steps are one program
    tokens = {name: answer[0] for name, answer in answers_in(serve(engine, [without_scores]), without_scores).items()}
    assert tokens == {name: answer[0] for name, answer in expected.items()}


def test_scores_of_a_prompt_are_those_of_the_prompt_alone(engine: Engine) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2)
    requests = [Request(each.request_id, each.prompt_ids, params) for each in requests_of(None)[:8]]

    def scores(mailbox: ScriptedMailbox) -> dict[str, Any]:
        return {reply.request_id: reply.prompt_logprobs for reply in mailbox.replies}

    expected: dict[str, Any] = {}
    for request in requests:
        expected |= scores(serve(engine, [[request]], radix=False))
    assert None not in expected.values()
    assert scores(serve(engine, [requests])) == expected


@pytest.mark.skipif(not NIGHTLY, reason="an engine for each point of the grid")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["bfloat16", "mixture", "int8", "mixture of int4", "float8 cache"])
def test_chunks_rows_pools_and_pages_leave_no_trace(kind: str, tmp_path: Path) -> None:
    requests = requests_of(logprobs=3)
    expected: dict[str, Answer] = {}
    first, *others = ((64, 8, 4096, 16), (128, 16, 4096, 64), (256, 16, 1024, 16), (256, 8, 4096, 1))
    for chunk, rows, pool, page in (first, *(others if kind == "bfloat16" else [others[list(KINDS).index(kind) % 3]])):
        sizes = {"decode_buckets": (1, rows), "extend_buckets": (16, chunk), "max_running_requests": rows}
        engine = new_engine(tmp_path, kind, chunked_prefill_size=chunk, max_total_tokens=pool, page_size=page, **sizes)
        expected = expected or alone(engine, requests)
        assert differing(together(engine, requests), expected) == []
        engine.close()


@pytest.mark.skipif(not NIGHTLY, reason="compiles an engine's programs again")
@pytest.mark.parametrize("restored", ["squares", "logs"])
def test_either_sum_of_xlas_would_be_found(
    restored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Of squares for norms, or of exponentials for log-probabilities."""
    ours = sums._NATIVE

    def squares(x: jax.Array, what: sums.What) -> jax.Array:
        return jnp.sum(x * x, axis=-1) if what == "squares" else ours.sums(x, what)

    def logs(x: jax.Array) -> jax.Array:
        return jnp.log(jnp.sum(x, axis=-1))

    request.addfinalizer(jax.clear_caches)  # the way is chosen while tracing
    mixed = {"sums": squares} if restored == "squares" else {"logs": logs}
    monkeypatch.setattr(sums, "_NATIVE", ours._replace(**mixed))
    jax.clear_caches()
    engine = new_engine(tmp_path, "bfloat16")
    requests = requests_of(logprobs=3)
    assert differing(together(engine, requests), alone(engine, requests)) != []
    engine.close()
