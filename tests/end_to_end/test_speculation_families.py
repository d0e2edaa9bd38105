"""Drafts change no answer: of any family, to the bit where C++ computes, of adapters, images and two servers."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from bench.processes import free_ports

from jaxsgl import SamplingParams
from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.features import LoraConfig, SpeculationConfig, VisionConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.offline.llm import LLM
from jaxsgl.requests.request import Request
from jaxsgl.scheduler.speculation.drafter import drafts_nothing
from jaxsgl.scheduler.speculation.pace import StepCosts
from jaxsgl.scheduler.speculation.speculation import Speculating
from jaxsgl.testing.engine import ScriptedMailbox
from jaxsgl.testing.grammars import compile_fake
from pallas_kernels.native import library
from tests.checkpoint_kinds import CHECKPOINT_KINDS, FAMILY_KINDS, HYBRID_KINDS
from tests.checkpoint_kinds.sizes import VOCAB_SIZE
from tests.checkpoints import make_checkpoint
from tests.end_to_end.offline import outputs, serve
from tests.end_to_end.servers import COMMON_FLAGS, running_server
from tests.end_to_end.test_same_bits import KINDS as FORMATS
from tests.end_to_end.test_same_bits import answers_in, differing, new_engine, requests_of
from tests.end_to_end.test_speculation import FLAGS, compile, logprobs_of, requests
from tests.engine.next_layers import write_next_layer
from tests.grids import NIGHTLY
from tests.scheduler.drafters import Asking, knowing
from tests.vision_models import make_model, request
from tests.weights.peft_adapters import ATTENTION, MLP, make_adapter

pytestmark = [pytest.mark.device, pytest.mark.timeout(1200), pytest.mark.usefixtures("greedy_steps_by_day")]

SPECULATION = SpeculationConfig("NGRAM", 5)
UNSERVED = (*HYBRID_KINDS, "deepseek_v4")  # elsewhere, and without drafts
FAMILIES = [kind for kind in dict.fromkeys((*CHECKPOINT_KINDS, *FAMILY_KINDS)) if kind not in UNSERVED]


def with_drafts(engine: Engine, plain: ScriptedMailbox, asked: Sequence[Request], kind: str, **more: Any) -> Any:
    """`asked` served with drafts that know the answers in `plain`; checks that steps verified a run for each."""
    known = {request.request_id: plain.output_ids(request.request_id) for request in asked}
    drafter_of = knowing(lambda request: known[request.request_id], kind, engine.capacity.vocab_size)
    found = serve(engine, [asked], drafter_of=drafter_of, **more)
    assert found.loads[-1].speculation.runs >= len(asked)  # short answers are one run each if all drafts are right
    return found


@pytest.mark.skipif(not NIGHTLY, reason="by night; by day test_speculation.py has one family")
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_of_a_family_are_those_without_drafts(family: str, tmp_path: Path) -> None:
    engine = Engine(EngineConfig(model=str(make_checkpoint(family, tmp_path, seed=3)), **FLAGS), progress=False)
    vocab_size = engine.capacity.vocab_size
    asked = requests(vocab_size)
    of_tests: Any = {"compile": lambda grammar: compile_fake(grammar, vocab_size)}
    plain = serve(engine, [asked], **of_tests)
    for kind, more in (("half", {"retract_every": 7}), ("right", {"overlap": False})):
        assert outputs(with_drafts(engine, plain, asked, kind, **of_tests, **more), asked) == outputs(plain, asked)
    assert engine.recompiles == 0
    engine.close()


@pytest.mark.skipif(not NIGHTLY, reason="by night; by day the bundled head drafts on the device")
def test_answers_are_those_without_the_checkpoints_next_layer(tmp_path: Path) -> None:
    model = write_next_layer("glm4_moe", tmp_path, vocab_size=VOCAB_SIZE).folder
    flags = {**FLAGS, "speculation": SpeculationConfig("NEXTN", 3)}
    engine = Engine(EngineConfig(model=str(model), **flags), progress=False)
    asked = requests()
    plain = serve(engine, [asked], compile=compile, eos_token_ids=range(3))
    for overlap, retract_every in ((True, None), (False, None), (True, 5)):
        found = serve(
            engine,
            [asked],
            compile=compile,
            eos_token_ids=range(3),
            overlap=overlap,
            retract_every=retract_every,
            drafter_of=lambda request: Asking(),
        )
        assert outputs(found, asked) == outputs(plain, asked)
        assert found.loads[-1].speculation.runs > 20
        for each in asked:
            told, expected = (logprobs_of(served, each.request_id) for served in (found, plain))
            values = [[one.logprob for one in of_served if one is not None] for of_served in (told, expected)]
            np.testing.assert_allclose(values[0], values[1], atol=1e-4)
    engine.close()


@pytest.mark.skipif(not NIGHTLY, reason="by night; by day test_speculation.py compares in float32")
@pytest.mark.parametrize("format", FORMATS)
def test_tokens_and_scores_are_those_without_drafts_to_the_bit(format: str, tmp_path: Path) -> None:
    if (reason := library.load()) is not None:
        pytest.skip(reason)
    engine = new_engine(tmp_path, format, decode_steps=1, speculation=SPECULATION)
    asked = requests_of(logprobs=3)
    plain = serve(engine, [asked])
    expected = answers_in(plain, asked)
    for kind in ("half", "right"):
        assert differing(answers_in(with_drafts(engine, plain, asked, kind), asked), expected) == []
    engine.close()


def _told(known: dict[tuple[int, ...], list[int]], request: Request) -> list[int]:
    return known[tuple(map(int, request.prompt_ids))]


@pytest.mark.skipif(not NIGHTLY, reason="by night; by day the scheduler's tests have adapters and samples with drafts")
def test_answers_of_adapters_and_several_samples_are_those_without_drafts(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path / "model", seed=3)
    modules = {"all": ATTENTION + MLP, "v": ["v_proj"]}
    made = {name: make_adapter(folder, tmp_path / name, modules=each, r=4) for name, each in modules.items()}
    paths = tuple(f"{name}={path}" for name, path in made.items())
    llm = LLM(str(folder), lora=LoraConfig(lora_paths=paths), dtype="float32", check_every_step=True, **FLAGS)
    speculation = llm._scheduler.ranks[0].state.speculation
    assert isinstance(speculation, Speculating)
    speculation._costs = StepCosts()  # any number of drafts pays
    prompts = [list(range(3, 20)) * 2, list(range(40, 60)) * 2, [7, 8, 9] * 9]
    for sampling in ({"temperature": 0.0, "n": 3}, {"temperature": 0.8, "seed": 5}):
        params = SamplingParams(max_tokens=24, ignore_eos=True, **sampling)
        asked: Any = {"sampling_params": params, "adapter": ["all", "v", ""], "use_tqdm": False}
        speculation._drafter_of = drafts_nothing
        plain = llm.generate(prompts, **asked)
        count = len(plain) // len(prompts)  # samples of a prompt, which are all alike
        known = {tuple(prompt): plain[count * i].token_ids for i, prompt in enumerate(prompts)}
        truth = partial(_told, known)
        speculation._drafter_of = knowing(truth, "half", llm.engine.capacity.vocab_size)
        drafted = llm.generate(prompts, **asked)
        assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
        assert sum(each.speculated.draft_tokens for each in drafted) > 20
    llm.close()


@pytest.mark.skipif(not NIGHTLY, reason="by night; the scheduler's tests place runs after images")
def test_answers_to_images_are_those_without_drafts(tmp_path: Path) -> None:
    make_model(tmp_path)
    flags = {**FLAGS, "context_length": 256, "vision": VisionConfig(mm_max_patches=256, mm_pool_tokens=80)}
    engine = Engine(EngineConfig(model=str(tmp_path), **flags), progress=False)
    asked = [request(str(number), [(1, 4, 6), (1, 8, 4)][: number % 3], number) for number in range(8)]
    plain = serve(engine, [asked])
    for kind in ("half", "right", "wrong"):
        assert outputs(with_drafts(engine, plain, asked, kind, retract_every=9), asked) == outputs(plain, asked)
    engine.close()


@pytest.mark.skipif(not NIGHTLY, reason="by night; two servers")
def test_a_decode_server_that_speculates_answers_as_one_server(tmp_path: Path) -> None:
    (bootstrap,) = free_ports(1)
    of_mode = {
        "prefill": ("--disaggregation-bootstrap-port", str(bootstrap)),
        "decode": ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "5"),
    }
    with ExitStack() as stack:
        servers = {}
        for mode, flags in of_mode.items():
            (tmp_path / mode).mkdir()
            given = (*COMMON_FLAGS, "--disaggregation-mode", mode, *flags)
            servers[mode] = stack.enter_context(running_server(tmp_path / mode, given))
        threads = stack.enter_context(ThreadPoolExecutor(2))

        def ask(mode: str, body: dict[str, Any]) -> Any:
            return httpx.post(f"http://{servers[mode].http_address}/generate", json=body, timeout=300).json()

        for room, text in enumerate(("one two three one two three one two", "Say red green blue red green blue red")):
            body = {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}}
            alone = ask("prefill", body)
            legs = body | {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap, "bootstrap_room": room + 1}
            _, answer = threads.map(lambda mode, legs=legs: ask(mode, legs), ("prefill", "decode"))
            assert answer["output_ids"] == alone["output_ids"], answer
            assert answer["meta_info"]["spec_verify_ct"] > 0
