"""Models shared by several devices answer as on one, and the devices exchange no more than they must."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from jaxsgl.wiring import RETRACT_VARIABLE
from tests.checkpoints import make_checkpoint
from tests.compiling import as_users
from tests.end_to_end.mesh_answers import ALLOWED, FLAGS, REQUESTS
from tests.end_to_end.servers import check_log, running_server
from tests.grids import NIGHTLY, count

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    RETRACT_VARIABLE: "7",
    **(as_users() if NIGHTLY else {}),
}
SIZES = {"num_attention_heads": 8, "vocab_size": 200, "intermediate_size": 112}
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 16, "vocab_size": 201},
    "mixtral": {"num_local_experts": 8, "intermediate_size": 48},
    "olmoe": {"num_experts": 16, "vocab_size": 201},
    "gemma4_moe": {"num_experts": 16},
    "mimo_v2_flash": {"n_routed_experts": 16},
    "laguna": {
        "num_attention_heads_per_layer": [8, 16, 8],
        "num_experts": 16,
        "shared_expert_intermediate_size": 56,
    },
}
NUM_LAYERS = count(2, 3)
OTHER_NUM_LAYERS = {
    **dict.fromkeys(("gemma3n", "gemma4", "gemma4_small", "gemma4_moe"), 5),
    "deepseek_v4": 2,
    "mimo_v2_flash": 4,
}
# Kinds of checkpoints. Most have 2 kv heads, of which 4 and 8 devices have copies; 201 tokens are padded on devices.
KINDS: dict[str, dict[str, Any]] = {
    "llama_untied_llama3_rope": {**SIZES, "num_key_value_heads": 4},
    "qwen3": {**SIZES, "vocab_size": 201},
    "gemma3": {},
    "deepseek_v3": {},
    "olmo2": {},
    "gemma3n": {},
    "gemma4": {},
    "gemma4_small": {},
    "cohere2": {"vocab_size": 201},
    "phi": {"vocab_size": 201},
    "opt": {},
    "deepseek_v32": {},
    "falcon_40b": {},
    **EXPERTS,
}
# Further kinds in ranks: with groups of experts, and with sinks, windows and biases.
IN_RANKS: dict[str, dict[str, Any]] = {
    "glm4_moe": {"n_routed_experts": 16, "vocab_size": 201},
    "gpt_oss": {"num_local_experts": 8},
}
# Likewise without drafts, which it refuses.
GROUPED: dict[str, dict[str, Any]] = {
    "deepseek_v4": {
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "moe_intermediate_size": 28,
    },
}


@dataclass(frozen=True)
class Case:
    """A model on `tp` devices, in `ranks` with attention of their own."""

    kind: str
    tp: int
    ep: bool = False
    flags: tuple[tuple[str, Any], ...] = ()
    updated: bool = False  # whether memory is released and weights are exchanged, too
    masked: bool = False  # whether tokens of some requests are held to masks
    ranks: int = 1

    @property
    def sums(self) -> int:
        """How many sums over devices a step has: of the embedding, of each attention and each MLP; of OLMo's norm.

        XLA adds up both embeddings of a token at once, and an MLP's results with those of experts or attention next to
        it.
        """
        in_layer = 3 if self.kind in ("olmo2", "olmoe") else 1 if self.kind in ("cohere2", "phi", "falcon_40b") else 2
        return 1 + in_layer * self.num_layers

    @property
    def num_layers(self) -> int:
        return OTHER_NUM_LAYERS.get(self.kind, NUM_LAYERS)

    @property
    def exchange(self) -> dict[str, int]:
        """The exchanges of a step. Ranks gather tokens and scatter sums once a layer, and gather who is padding.

        Of experts next to an MLP twice, since each of both is normalized by itself.
        """
        sparse = 3 if self.kind == "gemma3n" else 0  # MLPs that gather sums of their gates
        shared = {"all-reduce": self.sums, "all-gather": 1 + sparse} if self.tp > self.ranks else {}
        if self.ranks == 1:
            return shared
        count = self.num_layers * (2 if self.kind == "gemma4_moe" else 1)
        gathers = shared.get("all-gather", 0) + count + 1 + (self.kind in GROUPED)  # whose experts follow from ids
        return {**shared, "all-gather": gathers, "reduce-scatter": count}

    @property
    def choice(self) -> dict[str, int]:
        """The exchanges of a program that samples: none where each device has the whole vocabulary."""
        return {"all-to-all": 1, "all-gather": 1} if self.tp > self.ranks else {}


# A mixture whose norms of queries and keys are sums over devices.
DAILY = [Case("olmoe", 2, ep=True, updated=True, masked=True), Case("olmoe", 4, ranks=2, masked=True)]
# With activations as they are: rounded ones follow the inputs that a device has, which may turn a nearly equal token.
INT8: tuple[tuple[str, Any], ...] = (("quantization", "int8"), ("weight_only", True))
PAIRS = ((2, 4), (4, 8), (2, 8))
DENSE = tuple(kind for kind in KINDS if kind not in EXPERTS)
NIGHTLY_CASES = [
    *(Case(kind, tp, masked=True) for number, kind in enumerate(DENSE) for tp in PAIRS[number % 3]),
    *(Case(kind, 4, masked=True) for kind in EXPERTS),
    *(Case(kind, tp, ep=True, masked=True) for kind in EXPERTS for tp in (2, 8)),
    Case("olmo2", 4, updated=True, masked=True),
    Case("qwen3", 4, flags=INT8, updated=True),
    Case("qwen3_moe", 2, ep=True, flags=INT8),
    Case("qwen3", 2, flags=(("quantization", "fp8"), ("kv_cache_dtype", "fp8_e4m3"))),
    *(
        Case(kind, 8, ep, masked=True, ranks=ranks)
        for number, kind in enumerate(("qwen3_moe", *IN_RANKS))
        for ranks, ep in ((2, number % 2 == 0), (4, number % 2 == 1), (8, number % 2 == 0))
    ),
    *(Case(kind, 8, masked=True, ranks=ranks) for kind, ranks in (("mixtral", 2), ("olmoe", 4))),
    *(Case("deepseek_v3", 8, masked=True, ranks=ranks) for ranks in (2, 4, 8)),
    *(Case(kind, 8, masked=True, ranks=ranks) for kind, ranks in (("gemma4_small", 4), ("gemma4_moe", 2))),
    Case("qwen3", 8, flags=INT8, ranks=4, updated=True),
    Case("deepseek_v4", 2, updated=True),
    Case("deepseek_v4", 4, ranks=2),
]


def answers_of(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.end_to_end.mesh_answers"],
        input=json.dumps(cases), capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


OF_KINDS = [[case for case in NIGHTLY_CASES if case.kind == kind] for kind in (*KINDS, *IN_RANKS, *GROUPED)]


@pytest.mark.timeout(1800 if NIGHTLY else 900)
@pytest.mark.parametrize("cases", OF_KINDS if NIGHTLY else [DAILY], ids=lambda cases: cases[0].kind)
def test_devices_that_share_a_model_give_the_answers_of_one(cases: list[Case], tmp_path: Path) -> None:
    """With overlap, mixed steps, chunks and retraction: greedy, sampled and edited tokens, and scores."""
    folder = {
        (kind, seed): str(make_checkpoint(kind, tmp_path / f"{kind} {seed}", seed=seed, **sizes_of(kind)))
        for kind in dict.fromkeys(each.kind for each in cases)
        for seed in (0, 1)
    }

    def job(case: Case, flags: dict[str, Any]) -> dict[str, Any]:
        other = folder[case.kind, 1] if case.updated else None
        given = {**dict(case.flags), **flags}
        return {"folder": folder[case.kind, 0], "flags": given, "other": other, "masked": case.masked}

    of_one = {(case.kind, case.flags): job(case, {}) for case in sorted(cases, key=lambda case: case.updated)}
    of_many = [job(case, flags_of(case)) for case in cases]
    found = answers_of([*of_one.values(), *of_many])
    expected = dict(zip(of_one, found, strict=False))
    for case, answer in zip(cases, found[len(of_one) :], strict=True):
        check_equal(answer, expected[case.kind, case.flags], case)
        assert answer["recompiles"] == answer["kv_copies"] == 0, case
        exchanged = answer["collectives"]
        assert exchanged["forward decode"] == exchanged["forward extend"] == case.exchange, case
        assert exchanged["sampled"] == exchanged["filtered"] == case.choice, case
        assert exchanged["set_row"] == exchanged["set_pages"] == {}, case


def sizes_of(kind: str) -> dict[str, Any]:
    return {"num_hidden_layers": OTHER_NUM_LAYERS.get(kind, NUM_LAYERS), **(KINDS | IN_RANKS | GROUPED)[kind]}


def flags_of(case: Case) -> dict[str, Any]:
    if case.ranks == 1:
        return {"tp": case.tp, "ep": case.ep}
    of_all = {"max_running_requests": 2 * case.ranks, "max_total_tokens": 200 * case.ranks}  # a rank has its part
    return {"tp": case.tp, "ep": case.ep, "dp_size": case.ranks, "enable_dp_attention": True, **of_all}


@pytest.mark.skipif(not NIGHTLY, reason="two servers for each; by night")
@pytest.mark.parametrize(
    "case", [*(Case(kind, 4, ep=kind in EXPERTS) for kind in list(KINDS)[::4]), Case("qwen3_moe", 4, ranks=2)], ids=str
)
def test_a_server_on_several_devices_gives_the_tokens_of_one(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With overlap, mixed steps, chunks and retraction, several requests at once."""
    monkeypatch.setenv(RETRACT_VARIABLE, "7")
    folder = make_checkpoint(case.kind, tmp_path / "model", **sizes_of(case.kind))
    alone = tokens_served(folder, tmp_path / "one", [])
    in_ranks = ["--dp-size", str(case.ranks), "--enable-dp-attention"] * (case.ranks > 1)
    shared = tokens_served(folder, tmp_path / "several", ["--tp", str(case.tp), *["--ep"] * case.ep, *in_ranks])
    assert shared == alone


def tokens_served(model: Path, folder: Path, flags: list[str]) -> list[list[int]]:
    folder.mkdir()
    for name, value in FLAGS.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        flags = [*flags, f"--{name.replace('_', '-')}", text]
    sampling = {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True}
    prompts = [prompt for prompt, _ in REQUESTS] * 2
    with running_server(folder, ["--model", str(model), "--enable-mixed-chunk", *flags]) as server:
        url = f"http://{server.http_address}/generate"

        def ask(prompt: list[int]) -> list[int]:
            answer = httpx.post(url, json={"input_ids": prompt, "sampling_params": sampling}, timeout=120)
            return list(answer.raise_for_status().json()["output_ids"])

        with ThreadPoolExecutor(len(prompts)) as threads:
            tokens = list(threads.map(ask, prompts))
        check_log(server)
    return tokens


def check_equal(answer: dict[str, Any], expected: dict[str, Any], case: Case) -> None:
    # Rows are rounded for int8 products in blocks of inputs, and a float8 cache rounds what sums differ in.
    atol = 3e-3 if case.flags else 1e-4
    held = [token for each in answer["completions"][len(REQUESTS) :] for token in each["token_ids"]]
    assert set(held) <= set(ALLOWED) and len(held) == (16 if case.masked else 0), case
    if case.masked and case.ranks == 1:
        drafted = answer["speculated"]
        assert drafted["token_ids"] == [each["token_ids"] for each in answer["completions"]], case
        assert drafted["accepted"] > 10, case
    for mine, other in zip(answer["completions"], expected["completions"], strict=True):
        assert mine["token_ids"] == other["token_ids"], case
        np.testing.assert_allclose(mine["logprobs"], other["logprobs"], atol=atol, err_msg=str(case))
    if case.updated:
        greedy = [each["token_ids"] for each in expected["completions"][:3]]
        assert answer["resumed"] == expected["resumed"] == greedy, case
        assert answer["updated"] == expected["updated"] != greedy, case
