"""What a head drafts through steps, pages and batches is what it drafts after the whole text at once: EAGLE-3's, and a
checkpoint's own layer after the last one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from msgspec.structs import replace as changed

from jaxsgl.batch.build import Work
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.features import HostKvConfig, SpeculationConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.errors import CheckpointError, StartupError
from jaxsgl.frontend.legs import leg_sampling
from jaxsgl.models import ModelArch, StepContext, abstract_model, arch_from_folder
from jaxsgl.models.heads import EagleArch
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.speculation.drafter import drafts_nothing
from jaxsgl.scheduler.speculation.pace import StepCosts
from jaxsgl.scheduler.speculation.speculation import Speculating
from jaxsgl.testing.engine import ScriptedMailbox
from jaxsgl.wiring import build_scheduler
from tests.end_to_end.offline import outputs, serve
from tests.engine.conftest import ConfigMaker
from tests.engine.driving import Driver, few_programs
from tests.engine.eagle_heads import PlainHead, random_head, write_specforge, write_speculators
from tests.engine.next_layers import PlainNextLayer, write_next_layer
from tests.grids import NIGHTLY
from tests.plain_model import causal_attend
from tests.scheduler.drafters import Judge
from tests.scheduler.memory_wire import Network
from tests.scheduler.sides import PREFILL, Worker, at, run

pytestmark = pytest.mark.timeout(1200)
PROMPTS = {0: list(range(3, 20)), 1: [7, 8], 2: [9, 8, 7, 6, 5, 4, 3, 30], 3: list(range(90, 70, -1))}
NUM_DRAFTS = 3
HEADS = ("specforge", "glm4_moe", "speculators", "deepseek_v3")
FOUR_DEVICES = "--xla_force_host_platform_device_count=4"
# Devices: one for each of two kv heads, since made-up weights of copies differ; two for each, and two for a latent.
SHARED = {"specforge": 2, "glm4_moe": 4, "deepseek_v3": 2}
IS_SHARED = FOUR_DEVICES in os.environ.get("XLA_FLAGS", "")


class HeadDriver(Driver):
    """Drives an engine with a random head, and knows what that drafts."""

    def __init__(self, config: EngineConfig, head: PlainHead | PlainNextLayer, engine: Engine) -> None:
        super().__init__(engine)
        self.config, self.head = config, head

    def expected(self, ids: Sequence[int]) -> list[int]:
        return self.head.drafts(ids, NUM_DRAFTS)

    def drafted(self, inputs: StepInputs) -> tuple[list[int], list[list[int]]]:
        handle = self.engine.submit(replace(inputs, drafts=True))
        return handle.tokens().tolist(), handle.drafts().tolist()


def streams_of(engine: Engine, taps: Sequence[int]) -> Any:
    """A function that computes `[T, 3 D]` of a text without pages."""
    arch, params = engine.arch, engine.weight_store.params
    graphdef, _ = abstract_model(arch, jnp.dtype("float32"))

    @jax.jit
    def run(ids: jax.Array) -> jax.Array:
        found: dict[int, Any] = dict.fromkeys(taps)
        model = nnx.merge(graphdef, params)
        model(ids, jnp.arange(arch.max_context), StepContext(causal_attend(arch), streams=found))
        return jnp.concatenate([found[tap] for tap in taps], axis=-1)

    def of_text(ids: Sequence[int]) -> np.ndarray:
        padded = [*ids, *[0] * (arch.max_context - len(ids))]
        return np.asarray(run(np.array(padded, np.int32)))[: len(ids)]

    return of_text


@pytest.fixture(scope="module", params=SHARED if IS_SHARED else HEADS if NIGHTLY else HEADS[:2])
def driver(
    request: pytest.FixtureRequest, tiny_config: ConfigMaker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HeadDriver]:
    folder = tmp_path_factory.mktemp("head")
    host = HostKvConfig(host_kv_gib=0.001, host_kv_write_policy="write_through")
    num_devices = SHARED[request.param] if IS_SHARED else 1
    flags: dict[str, Any] = {"grammar_backend": "none", "tp": num_devices, "host_kv": host}
    with pytest.MonkeyPatch.context() as monkeypatch:
        few_programs(monkeypatch)
        make = with_eagle if request.param.startswith("spec") else with_next_layer
        driver = make(request.param, folder, lambda **changes: tiny_config(**flags, **changes))
    yield driver
    driver.engine.close()


def with_eagle(kind: str, folder: Path, config_of: ConfigMaker) -> HeadDriver:
    if kind == "specforge":
        weights, taps = random_head(1, 40), (1, 2, 0)
        write_specforge(folder, weights, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, -1]})
    else:
        weights, taps = random_head(2, 101), (0, 2, 1)
        write_speculators(folder, weights, taps, norm_before_residual=True)
    config = config_of(speculation=SpeculationConfig("EAGLE3", NUM_DRAFTS, speculative_draft_model_path=str(folder)))
    engine = Engine(config, progress=False, moves_pages=True)
    embedding = np.asarray(jax.tree.leaves(engine.weight_store.params["embedding"])[0])
    return HeadDriver(config, PlainHead(weights, embedding, streams_of(engine, taps), kind == "speculators"), engine)


def with_next_layer(kind: str, folder: Path, config_of: ConfigMaker) -> HeadDriver:
    head = write_next_layer(kind, folder)
    flags = SpeculationConfig("NEXTN", NUM_DRAFTS)
    config = config_of(speculation=flags, model=str(head.folder), load_format="auto", context_length=64)
    return HeadDriver(config, head, Engine(config, progress=False, moves_pages=True))


@pytest.mark.parametrize("chunk", [16, 7, 4])
def test_drafts_after_a_prompt_do_not_depend_on_its_chunks(driver: HeadDriver, chunk: int) -> None:
    prompt = PROMPTS[3]
    for start in range(0, len(prompt), chunk):
        tokens, drafts = driver.drafted(driver.extend((3, prompt[start : start + chunk], start)))
    assert drafts == [driver.expected([*prompt, *tokens])]


def test_drafts_follow_each_sequence_of_a_decode_batch(driver: HeadDriver) -> None:
    texts = {
        row: [*prompt, *tokens]
        for (row, prompt), tokens in zip(PROMPTS.items(), driver.generate(PROMPTS, 1).values(), strict=True)
    }
    for _ in range(4):
        positions = {row: len(ids) - 1 for row, ids in texts.items()}
        tokens, drafts = driver.drafted(driver.decode(positions))
        for ids, token in zip(texts.values(), tokens, strict=True):
            ids.append(token)
        assert drafts == [driver.expected(ids) for ids in texts.values()]


@pytest.mark.parametrize("num_right", range(NUM_DRAFTS + 1))
def test_drafts_follow_what_a_verify_step_keeps(driver: HeadDriver, num_right: int) -> None:
    """And what it doesn't keep leaves no trace: the steps after it draft as if it had never been."""
    texts = {
        row: [*prompt, *tokens]
        for (row, prompt), tokens in zip(PROMPTS.items(), driver.generate(PROMPTS, 1).values(), strict=True)
    }
    answers = driver.generate(PROMPTS, 8)
    works = []
    for row, ids in texts.items():
        right = answers[row][1 : 1 + num_right]
        wrong = [(token + 1) % 101 for token in answers[row][1 + num_right : 1 + NUM_DRAFTS]]
        works.append(Work(row, np.array([ids[-1], *right, *wrong], np.int32), len(ids) - 1, sample=True))
    _, drafts = driver.drafted(driver.builder.verify(works))
    for row, ids in texts.items():
        ids += answers[row][1 : 2 + num_right]
    assert drafts == [driver.expected(ids) for ids in texts.values()]
    tokens, drafts = driver.drafted(driver.decode({row: len(ids) - 1 for row, ids in texts.items()}))
    assert drafts == [driver.expected([*ids, token]) for ids, token in zip(texts.values(), tokens, strict=True)]


def test_a_head_that_reads_a_token_too_early_drafts_otherwise(driver: HeadDriver) -> None:
    """A test of these tests: an oracle whose states are one token off doesn't agree."""
    prompt = PROMPTS[0]
    tokens, drafts = driver.drafted(driver.extend((0, prompt[:16], 0)))
    ids = [*prompt[:16], *tokens]
    assert drafts == [driver.expected(ids)] != [driver.head.shifted().drafts(ids, NUM_DRAFTS)]


@pytest.mark.parametrize("retract_every", [None, 4])
def test_drafts_are_those_of_the_text_after_cached_prefixes_and_retraction(
    driver: HeadDriver, retract_every: int | None
) -> None:
    """And answers are those without."""
    prompts = [PROMPTS[3], [*PROMPTS[3][:13], 40, 41], [*PROMPTS[3], 50], PROMPTS[2]]
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    asked = [Request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    judges = [Judge(driver.expected) for _ in asked]
    script: list[list[Request]] = [asked[:1], *[[]] * 15, asked[1:]]
    found = serve(
        driver.engine, script, retract_every=retract_every, drafter_of=lambda asked: judges[int(asked.request_id)]
    )
    assert outputs(found, asked) == outputs(serve(driver.engine, [asked]), asked)
    assert sum(reply.cached_tokens for reply in found.replies) >= 8
    assert min(judge.judged for judge in judges) > 3


def test_drafts_are_those_of_the_text_after_a_load_from_host_memory(driver: HeadDriver) -> None:
    engine, scheduler = driver.engine, build_scheduler(driver.config, driver.engine)
    judges: dict[str, Judge] = {}
    speculation = scheduler.ranks[0].state.speculation
    assert isinstance(speculation, Speculating)
    speculation._drafter_of = lambda request: judges.setdefault(request.request_id, Judge(driver.expected))
    speculation._costs = StepCosts()  # any number of drafts pays, however busy the machine is
    chats = [[3 + (7 * i + 11 * n) % 90 for i in range(37)] for n in range(8)]  # more than the pool holds
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    for turn in range(2):
        for i, chat in enumerate(chats):
            mailbox = ScriptedMailbox([[Request(f"{turn} {i}", chat.copy(), params)]])
            run_loop(scheduler, engine, mailbox, depth=1)
            chat += [*mailbox.output_ids(f"{turn} {i}"), 5, 6]
    assert scheduler.load(0).host.loaded_tokens > 80
    assert len(judges) == 16 and min(judge.judged for judge in judges.values()) > 0


@pytest.mark.skipif(not NIGHTLY or IS_SHARED, reason="by night: another engine")
def test_drafts_are_those_of_the_text_after_another_server_computed_the_prompt(driver: HeadDriver) -> None:
    """The pages that travel have the head's layers: the state of the prompt's last token, too."""
    engines = Engine(driver.config, progress=False, moves_pages=True), driver.engine
    network, judges = Network(), dict[str, Judge]()
    prefill, decode = (
        Worker(network, address, engine.capacity, engine=engine, overlap=False, drafter_of=drafter_of)
        for address, engine, drafter_of in (
            (PREFILL, engines[0], drafts_nothing),
            (None, engines[1], lambda request: judges.setdefault(request.request_id, Judge(driver.expected))),
        )
    )
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    asked = [Request(str(row), prompt, params) for row, prompt in PROMPTS.items()]
    for number, request in enumerate(asked):
        prefill.receive(changed(at(request, number), sampling=leg_sampling(params, "prefill")))
        decode.receive(at(request, number))
    run(network, prefill, decode)
    own = serve(driver.engine, [asked])
    assert [decode.outputs[request.request_id, 0] for request in asked] == outputs(own, asked)
    assert len(judges) == len(asked) and min(judge.judged for judge in judges.values()) > 2
    for worker in (prefill, decode):
        worker.check_empty()
    engines[0].close()


@pytest.mark.skipif(not NIGHTLY or IS_SHARED, reason="by night; the tests above in a process with four devices")
def test_drafts_are_the_same_on_several_devices_also_where_they_have_copies_of_kv_heads() -> None:
    env = {**os.environ, "XLA_FLAGS": FOUR_DEVICES, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", __file__, "-k", "drafts_follow or chunks"]
    subprocess.run(command, env=env, check=True)


@pytest.fixture(scope="module")
def target(tiny_config: ConfigMaker) -> ModelArch:
    return arch_from_folder(Path(tiny_config().model))


def test_the_streams_that_formats_name_are_inputs_or_outputs_of_layers(tmp_path: Path, target: ModelArch) -> None:
    weights = random_head(0, 101)
    target = replace(target, layers=target.layers * 8)
    folders = {
        "default": write_specforge(tmp_path / "a", weights),
        "outputs": write_specforge(
            tmp_path / "b", weights, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 7, 12]}
        ),
        "inputs": write_speculators(tmp_path / "c", weights, (2, 8, 13)),
    }
    assert {EagleArch.from_folder(folder, target).taps for folder in folders.values()} == {(2, 8, 13)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "but a head of EAGLE-3 is"),
        ({"vocab_size": 99}, "vocab_size is 99, but Qwen3ForCausalLM's is 101"),
        ({"target_hidden_size": 64}, "states of 64 numbers, but Qwen3ForCausalLM has 32"),
        ({"num_hidden_layers": 2}, "has one layer without biases"),
        ({"norm_before_fc": True}, "heads with norms before fc"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}, "at the inputs of .1, 2, 3."),
    ],
)
def test_configurations_that_no_head_of_the_model_has_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path, target: ModelArch
) -> None:
    folder = write_specforge(tmp_path, random_head(0, 101), **changes)
    with pytest.raises(CheckpointError, match=message):
        EagleArch.from_folder(folder, target)


def test_heads_are_refused_where_the_stream_has_no_mean(tmp_path: Path, target: ModelArch) -> None:
    folder = write_specforge(tmp_path, random_head(0, 101))
    with pytest.raises(CheckpointError, match="with its mean, and that of Qwen3ForCausalLM is kept without"):
        EagleArch.from_folder(folder, replace(target, centred=True))


@pytest.mark.parametrize(
    ("layer", "tensors", "message"),
    [
        ({}, {"norm.weight": None}, "tensor norm.weight is missing"),
        ({}, {"more.weight": np.zeros(1)}, "not part of a head: more.weight"),
        ({}, {"lm_head.weight": np.zeros((40, 32), np.float32), "d2t": None}, "tensor d2t is missing"),
        ({"num_key_value_heads": 4}, {}, "4 kv heads of 16, but Qwen3ForCausalLM 2 of 16"),
    ],
)
def test_heads_that_do_not_fit_end_the_start_before_the_model_is_read(
    layer: dict[str, Any], tensors: dict[str, Any], message: str, tmp_path: Path, tiny_config: ConfigMaker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("jaxsgl.engine.engine.read_params", lambda *_: pytest.fail("the model is read first"))
    weights = random_head(0, 101) | tensors
    weights = {name: value for name, value in weights.items() if value is not None}
    taps = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}}
    folder = write_specforge(tmp_path, weights, **(layer | taps))
    flags = SpeculationConfig("EAGLE3", speculative_draft_model_path=str(folder))
    with pytest.raises(StartupError, match=message):
        Engine(tiny_config(speculation=flags), progress=False)
