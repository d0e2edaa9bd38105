"""Adapters through scheduler and engine: their answers are peft's, and coming and going leaves no trace."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxsgl import SamplingParams
from jaxsgl.config.features import LoraConfig
from jaxsgl.errors import CheckpointError, ConfigError, InvalidRequest
from jaxsgl.models import arch_from_folder
from jaxsgl.offline.llm import LLM
from jaxsgl.weights.adapters import AdapterFolder
from jaxsgl.wiring import whole
from tests.checkpoint_kinds.sizes import VOCAB_SIZE
from tests.checkpoints import make_checkpoint
from tests.weights.peft_adapters import ATTENTION, MLP, adapted_logits, make_adapter

pytestmark = pytest.mark.device

ADAPTERS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "all": (ATTENTION + MLP, {"r": 4}),
    "qv": (["q_proj", "v_proj"], {"r": 8, "use_rslora": True}),
    "mlp": (MLP, {"r": 2}),
    "wide": (["o_proj", "up_proj"], {"r": 17}),
}
PROMPTS = np.random.default_rng(5).integers(3, VOCAB_SIZE, (5, 24)).tolist()
NAMES = ["", *ADAPTERS]
SCORED = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=20, prompt_logprobs=20)
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model's folder under "", and those of adapters."""
    root = tmp_path_factory.mktemp("lora")
    made = {"": make_checkpoint("qwen3", root / "model")}
    for seed, (name, (modules, settings)) in enumerate(ADAPTERS.items()):
        made[name] = make_adapter(made[""], root / name, modules=modules, seed=seed, **settings)
    return made


@pytest.fixture(scope="module")
def llm(folders: dict[str, Path]) -> Iterator[LLM]:
    paths = tuple(f"{name}={folder}" for name, folder in folders.items() if name)
    llm = LLM(
        str(folders[""]),
        lora=LoraConfig(lora_paths=paths, max_loras_per_batch=4),
        dtype="float32",
        page_size=4,
        context_length=64,
        max_running_requests=8,
        max_total_tokens=512,
        chunked_prefill_size=128,
        decode_buckets=(8,),
        extend_buckets=(128,),
        check_every_step=True,
        compilation_cache_dir="",
    )
    yield llm
    llm.close()


def test_a_batch_of_four_adapters_and_none_has_the_logits_of_peft(llm: LLM, folders: dict[str, Path]) -> None:
    """Log-probabilities of the 20 likeliest tokens everywhere: logits without what a softmax ignores."""
    completions = llm.generate(PROMPTS, SCORED, adapter=NAMES, use_tqdm=False)
    for name, prompt, completion in zip(NAMES, PROMPTS, completions, strict=True):
        ids = prompt + completion.token_ids
        logits = adapted_logits(folders[""], folders[name] if name else None, ids).log_softmax(-1).numpy()
        assert completion.prompt_logprobs is not None
        found = [*completion.prompt_logprobs, *completion.logprobs]
        for position, told in enumerate(found):
            best, theirs = zip(*told.top, strict=True)
            np.testing.assert_allclose(theirs, logits[position][list(best)], atol=1e-3, err_msg=f"{name} {position}")
        assert completion.token_ids == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_an_answer_does_not_depend_on_the_adapters_beside_it(llm: LLM) -> None:
    together = llm.generate(PROMPTS, GREEDY, adapter=NAMES, use_tqdm=False)
    for name, prompt, completion in zip(NAMES, PROMPTS, together, strict=True):
        llm.flush_cache()
        (alone,) = llm.generate(prompt, GREEDY, adapter=name, use_tqdm=False)
        assert alone.token_ids == completion.token_ids, name


def test_loading_and_unloading_finds_kv_of_equal_adapters_compiles_nothing_and_keeps_no_memory(
    llm: LLM, folders: dict[str, Path]
) -> None:
    def sizes() -> tuple[int, int]:
        gc.collect()
        return len(jax.live_arrays()), sum(array.nbytes for array in jax.live_arrays())

    prompt, answers = PROMPTS[0], {}
    for name in ("all", "wide"):
        answers[name] = llm.generate(prompt, GREEDY, adapter=name, use_tqdm=False)[0].token_ids
    before = sizes()
    for turn in range(6):
        name = ("all", "wide")[turn % 2]
        llm.load_lora_adapter("it", folders[name])
        first, again = (llm.generate(prompt, GREEDY, adapter="it", use_tqdm=False)[0] for _ in range(2))
        assert first.token_ids == again.token_ids == answers[name]
        assert (first.cached_tokens, again.cached_tokens) == (20, 20), "what the equal adapter has computed"
        llm.unload_lora_adapter("it")
        with pytest.raises(InvalidRequest, match="no adapter named it"):
            llm.generate(prompt, GREEDY, adapter="it", use_tqdm=False)
    assert sizes() == before
    assert llm.engine.recompiles == 0


def test_programs_of_batches_without_adapters_are_those_of_an_engine_that_has_none(llm: LLM) -> None:
    spec, buckets = whole(llm.engine).programs.spec, llm.engine.buckets.all()
    without = replace(spec, adapters=None)
    base = [bucket for bucket in buckets if not bucket.adapter_columns]
    assert {replace(bucket, adapter_columns=0) for bucket in buckets} == set(base)
    for bucket in base[-1:]:
        texts = {each.forward(bucket).trace().lower().as_text() for each in (spec, without)}
        assert len(texts) == 1


def test_the_digest_tells_adapters_apart_and_not_their_folders(folders: dict[str, Path], tmp_path: Path) -> None:
    """Prefill and decode servers compare it."""
    arch = arch_from_folder(folders[""])
    digests = {name: AdapterFolder(folder, arch).digest() for name, folder in folders.items() if name}
    assert len(set(digests.values())) == len(digests)
    for alpha, is_same in ((8, True), (9, False)):
        shutil.copytree(folders["all"], tmp_path / str(alpha))
        file = tmp_path / str(alpha) / "adapter_config.json"
        config = {**json.loads(file.read_text()), "lora_alpha": alpha, "base_model_name_or_path": "elsewhere"}
        file.write_text(json.dumps(config))
        assert (AdapterFolder(file.parent, arch).digest() == digests["all"]) is is_same


def test_what_cannot_be_served_is_refused_by_name_and_changes_nothing(
    llm: LLM, folders: dict[str, Path], tmp_path: Path
) -> None:
    model, loaded = folders[""], llm.lora_adapters
    dora = make_adapter(model, tmp_path / "dora", use_dora=True)
    head = make_adapter(model, tmp_path / "head", modules=["q_proj", "lm_head"])
    saved = make_adapter(model, tmp_path / "saved", modules=["q_proj"], modules_to_save=["norm"])
    high = make_adapter(model, tmp_path / "high", modules=["q_proj"], r=18)
    for folder, words in ((dora, "DoRA"), (head, "output head"), (saved, "modules_to_save"), (model, "adapter_config")):
        with pytest.raises(CheckpointError, match=words):
            llm.load_lora_adapter("new", folder)
    with pytest.raises(ConfigError, match="--max-lora-rank 18"):
        llm.load_lora_adapter("new", high)
    with pytest.raises(ConfigError, match="loaded already"):
        llm.load_lora_adapter("all", folders["all"])
    assert llm.lora_adapters == loaded
