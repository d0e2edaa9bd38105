"""Every family of `models/families/` answers as transformers does: ragged prompts at once, in chunks, from the cache.

One forward pass of transformers over prompts and answers judges them: an answer is greedy if each of its tokens is the
most likely one after those before it. The passes hold many prompts, padded on the right, which changes nothing before.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from jaxsgl.config.engine import EngineConfig, SchedulingConfig
from jaxsgl.engine import weight_store
from jaxsgl.engine.engine import Engine
from jaxsgl.errors import CheckpointError
from jaxsgl.models import ModelArch, arch_from_folder
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.weights import load_params
from tests.checkpoint_kinds import FAMILY_KINDS, HYBRID_KINDS
from tests.checkpoint_kinds.sizes import OF_FAMILIES, ORIGINAL_CONTEXT, WINDOW
from tests.checkpoints import load_reference, make_checkpoint, reference_logits
from tests.end_to_end.offline import first_logits, outputs, serve
from tests.grids import NIGHTLY
from tests.plain_model import mesh_of, plain_logits

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("greedy_steps_by_day")]

# The logits of all are compared in tests/models/test_parity.py.
KINDS = (
    "phi3", "mistral", "olmo2", "olmo3", "glm4", "smollm3", "gemma2", "gemma3", "glm4_moe", "qwen3_moe", "mixtral",
    "gpt_oss", "qwen2_moe", "minimax_m2", "exaone4", "ernie4_5_moe", "granite", "hunyuan", "olmoe", "gemma", "seed_oss",
    "deepseek_v3", "deepseek_v2", "glm4_moe_lite", "gemma3n", "gemma4", "gemma4_small", "gemma4_moe", "gemma4_unified",
    "glm",
    "ernie4_5", "granite_moe", "granite_moe_shared", "granite_hybrid_dense", "arcee",
    "helium", "flex_olmo", "afmoe",
    "cohere", "cohere2", "starcoder2", "stable_lm", "phi", "gpt_neox", "gpt2", "gpt_bigcode", "gptj", "opt",
    "cwm", "ministral", "ministral3", "mistral4", "youtu", "mellum", "dots1", "solar_open", "exaone_moe",
    "llama4", "hunyuan_moe", "deepseek_v32", "deepseek_v4", "glm_moe_dsa",
    "apertus", "cohere2_moe", "granite_swa", "granite_moe_swa", "hyperclovax", "kolibri1",
    "hy_v3", "laguna", "mimo_v2_flash", "jais2", "minicpm3", "nemotron", "vault_gemma",
    "olmo", "nanochat", "falcon", "falcon_40b", "falcon_11b", "phimoe", "axk1",
    "longcat_flash",
)  # fmt: skip
assert {*KINDS, *HYBRID_KINDS} == set(FAMILY_KINDS)  # the latter are in test_hybrids.py
NEW_TOKENS = 8
CONTEXT = 144
UNLIMITED = -1
ATOL = 2e-3
AT_WINDOW = (WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW)
AT_CONTEXT = (ORIGINAL_CONTEXT - 1, ORIGINAL_CONTEXT, ORIGINAL_CONTEXT + 1)
LENGTHS = (1, 2, 7, 8, 9, *AT_WINDOW, 17, 24, 50, *AT_CONTEXT, 120)


def prompts() -> list[list[int]]:
    """Two texts, cut at the same places: each shares its beginning with the longer ones of its text."""
    rng = random.Random(5)
    texts = [[rng.randrange(3, OF_FAMILIES["vocab_size"]) for _ in range(max(LENGTHS))] for _ in range(2)]
    return [text[:length] for length in LENGTHS for text in texts]


def logits_of(folder: Path, sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """transformers' logits `[sequence, T, V]` in float32; those behind a sequence's end mean nothing."""
    longest = max(map(len, sequences))
    padded = [[*sequence, *[0] * (longest - len(sequence))] for sequence in sequences]
    with torch.no_grad():
        logits: np.ndarray = load_reference(folder)(torch.tensor(padded)).logits.float().numpy()
    return logits


# Page sizes and chunks in turn; by day windows, and latents with groups of experts.
TURNS = ((8, 32), (1, 64), (16, UNLIMITED))
DAILY = [("gemma3", 8, 32), ("deepseek_v3", 8, 32)]
OWN_TURN = {"deepseek_v4": TURNS[0]}  # whose pages hold whole groups of tokens
POINTS = [(kind, *OWN_TURN.get(kind, TURNS[number % 3])) for number, kind in enumerate(KINDS)] if NIGHTLY else DAILY


@pytest.mark.parametrize(("kind", "page_size", "chunk"), POINTS)
def test_greedy_tokens_and_logits_equal_those_of_transformers(
    kind: str, page_size: int, chunk: int, tmp_path: Path
) -> None:
    folder = make_checkpoint(kind, tmp_path, seed=3)
    engine = Engine(
        EngineConfig(
            model=str(folder),
            page_size=page_size,
            chunked_prefill_size=chunk,
            scheduling=SchedulingConfig(max_prefill_tokens=CONTEXT),
            context_length=CONTEXT,
            max_running_requests=32,
            max_total_tokens=5000,
            decode_buckets=(32,),
            extend_buckets=(CONTEXT if chunk == UNLIMITED else chunk,),
            compilation_cache_dir="",
        ),
        progress=False,
    )
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    requests = [Request(str(i), prompt, params) for i, prompt in enumerate(prompts())]
    assert len(requests) == 32
    mailbox = serve(engine, [requests])
    answers = outputs(mailbox, requests)
    again = serve(engine, [[requests[-1]], *[[]] * 20, requests])
    assert outputs(again, requests[:-1]) == answers[:-1]
    assert sum(reply.cached_tokens for reply in again.replies) > 100
    if NIGHTLY:
        assert outputs(serve(engine, [requests], retract_every=5), requests) == answers
    logits = logits_of(
        folder, [[*request.prompt_ids, *answer] for request, answer in zip(requests, answers, strict=True)]
    )
    for request, answer, of_one in zip(requests, answers, logits, strict=True):
        first = len(request.prompt_ids) - 1
        assert of_one[first : first + NEW_TOKENS].argmax(axis=-1).tolist() == answer, first + 1
    assert len(set(map(tuple, answers))) > 20  # else any model would agree
    for i, request in enumerate(requests[::2]):
        length = len(request.prompt_ids)
        if length in (*AT_WINDOW, *AT_CONTEXT[1:], max(LENGTHS)):
            np.testing.assert_allclose(first_logits(engine, request.prompt_ids), logits[2 * i][length - 1], atol=ATOL)
    assert engine.recompiles == 0
    engine.close()


def test_a_folder_without_a_configuration_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        arch_from_folder(tmp_path)


def test_the_servers_context_limit_reaches_the_ropes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ModelArch] = []

    def load(folder: Path, arch: ModelArch, *arguments: object, **options: object) -> None:
        seen.append(arch)
        raise CheckpointError("enough")

    monkeypatch.setattr(weight_store, "load_params", load)
    folder = make_checkpoint("phi3", tmp_path)
    for limit in (ORIGINAL_CONTEXT, ORIGINAL_CONTEXT + 1, None):
        with pytest.raises(CheckpointError, match="enough"):
            Engine(EngineConfig(model=str(folder), context_length=limit), progress=False)
    assert [arch.ropes[0].is_long for arch in seen] == [False, True, True]


def test_longropes_factors_follow_from_the_servers_context_limit(tmp_path: Path) -> None:
    """Up to the original context the short ones, for every prompt; beyond it the long ones, for short prompts too."""
    folder = make_checkpoint("phi3", tmp_path, seed=3)
    arch = arch_from_folder(folder)
    params = load_params(folder, arch, np.dtype("float32"), mesh_of())
    prompt = prompts()[-1][:ORIGINAL_CONTEXT]
    short = reference_logits(folder, prompt).numpy()
    np.testing.assert_allclose(plain_logits(arch.for_context(ORIGINAL_CONTEXT), params, prompt), short, atol=ATOL)
    assert arch == arch.for_context(ORIGINAL_CONTEXT + 1)
    long = plain_logits(arch, params, prompt)
    assert np.abs(long - short).max() > 0.1
