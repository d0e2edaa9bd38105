"""Embeddings, ranks and classes of tiny checkpoints beside transformers and sentence-transformers."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from sentence_transformers import SentenceTransformer
from tokenizers import processors
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, Qwen3Config

import jaxsgl
from jaxsgl.config.features import LoraConfig
from jaxsgl.errors import CheckpointError, InvalidRequest
from jaxsgl.models import arch_from_folder
from jaxsgl.offline.llm import LLM
from jaxsgl.text.ranking import INSTRUCTION, ranking_of
from jaxsgl.wiring import whole
from tests.checkpoints import load_reference, make_checkpoint
from tests.grids import NIGHTLY
from tests.text.small_tokenizers import byte_level, save
from tests.weights.peft_adapters import adapted_logits, make_adapter

pytestmark = pytest.mark.device

FLAGS: dict[str, Any] = {
    "max_running_requests": 4, "decode_buckets": (4,), "extend_buckets": (64,), "chunked_prefill_size": 64,
    "max_total_tokens": 2048, "context_length": 256, "check_every_step": True,
}  # fmt: skip
TEXTS = ["hello", "The quick brown fox jumps over the lazy dog.", "Hello world, how are you today? " * 9]
ADAPTERS = LoraConfig(enable_lora=True, max_loras_per_batch=2, max_lora_rank=4)
EOD = "<|endoftext|>"
MODULES = ("Transformer", "Pooling", "Normalize")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 that generates, whose tokenizer appends a token to texts, as Qwen3-Embedding's does."""
    folder = make_checkpoint("qwen3", tmp_path_factory.mktemp("decoder"), vocab_size=416)
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", EOD])
    tokenizer.add_tokens(["yes", "no"])
    eod = tokenizer.token_to_id(EOD)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOD}", pair=f"$A $B {EOD}", special_tokens=[(EOD, eod)]
    )
    save(tokenizer, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "pad_token": EOD}))
    return folder


def sentence_folder(decoder: Path, folder: Path, pooling: dict[str, Any], modules: tuple[str, ...] = MODULES) -> Path:
    """The decoder without its head, as sentence-transformers saves it."""
    AutoModel.from_pretrained(decoder, dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(decoder / name, folder)
    paths = ["" if name == "Transformer" else f"{i}_{name}" for i, name in enumerate(modules)]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(zip(modules, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    for path in paths[1:]:
        (folder / path).mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **pooling}))
    return folder


@pytest.fixture(scope="module")
def last_token(decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentence_folder(decoder, tmp_path_factory.mktemp("last"), {"pooling_mode_lasttoken": True})


@pytest.fixture(scope="module")
def embedder(last_token: Path) -> Iterator[LLM]:
    llm = LLM(str(last_token), matryoshka=True, lora=ADAPTERS, **FLAGS)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def both(decoder: Path) -> Iterator[LLM]:
    llm = LLM(str(decoder), enable_embeddings=True, **FLAGS | {"context_length": 512})
    yield llm
    llm.close()


def hidden_states(folder: Path, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        model = load_reference(folder)
        states: np.ndarray = model.model(torch.tensor([ids])).last_hidden_state[0].numpy()
    return states


def test_chunked_whole_and_cached_embeddings_are_transformers_hidden_states(embedder: LLM, decoder: Path) -> None:
    rng = np.random.default_rng(0)
    long = rng.integers(3, 400, 256).tolist()  # the whole context, in chunks
    prompts = [rng.integers(3, 400, 7).tolist(), long, [*long[:150], 5]]
    before = embedder.engine.recompiles
    answers = [embedder.encode(prompts, use_tqdm=False) for _ in range(2)]
    for prompt, *pair in zip(prompts, *answers, strict=True):
        for answer in pair:
            np.testing.assert_allclose(answer.embedding, hidden_states(decoder, prompt)[-1], rtol=0, atol=1e-3)
            assert answer.prompt_tokens == len(prompt)
    assert [answer.cached_tokens for answer in answers[1]] == [0, 240, 144], "whole pages, but for the last token"
    assert embedder.engine.recompiles == before


def test_embeddings_with_adapters_are_pefts_beside_embeddings_without(
    embedder: LLM, decoder: Path, last_token: Path, tmp_path: Path
) -> None:
    """Adapters of the decoder without a head, as sentence-transformers trains them."""
    prompt, adapted = list(range(40, 60)), {}
    for seed, name in enumerate(("first", "second")):
        torch.manual_seed(seed)
        config = PeftConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # of peft: what it asks of transformers
            model = get_peft_model(AutoModel.from_pretrained(last_token, dtype=torch.float32), config)
            model.save_pretrained(str(tmp_path / name))
            adapted[name] = model.eval()(torch.tensor([prompt])).last_hidden_state[0, -1].numpy()
        embedder.load_lora_adapter(name, tmp_path / name)
    names = ["first", "", "second", "first"]
    adapted[""] = hidden_states(decoder, prompt)[-1]
    answers = embedder.encode([prompt] * 4, adapter=names, use_tqdm=False)
    for name, answer in zip(names, answers, strict=True):
        np.testing.assert_allclose(answer.embedding, adapted[name], rtol=0, atol=1e-3, err_msg=name)
    assert np.abs(adapted["first"] - adapted["second"]).max() > 0.05
    assert [answer.cached_tokens for answer in answers] == [0, 0, 0, 16], "prefixes are those of one adapter"
    assert embedder.engine.recompiles == 0
    with pytest.raises(InvalidRequest, match="no adapter named third"):
        embedder.embed(prompt, adapter="third")


def test_sentence_transformers_gives_the_same_vectors(embedder: LLM, last_token: Path) -> None:
    expected = SentenceTransformer(str(last_token), device="cpu").encode(TEXTS)
    given = np.stack([answer.embedding for answer in embedder.embed(TEXTS, use_tqdm=False)])
    np.testing.assert_allclose(given, expected, rtol=0, atol=1e-3)
    cut = SentenceTransformer(str(last_token), device="cpu", truncate_dim=16).encode(TEXTS, normalize_embeddings=True)
    shorter = np.stack([answer.embedding for answer in embedder.embed(TEXTS, dimensions=16, use_tqdm=False)])
    np.testing.assert_allclose(shorter, cut, rtol=0, atol=1e-3)
    np.testing.assert_allclose(np.linalg.norm(shorter, axis=1), 1.0, rtol=1e-6)


def test_the_mean_of_hidden_states_is_sentence_transformers_too(decoder: Path, tmp_path: Path) -> None:
    folder = sentence_folder(decoder, tmp_path, {"pooling_mode": "mean"}, MODULES[:2])
    llm = LLM(str(folder), **FLAGS)
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    answers = [llm.embed(TEXTS, use_tqdm=False) for _ in range(2)]  # the second time, all prefixes are cached
    for given in answers:
        np.testing.assert_allclose(np.stack([one.embedding for one in given]), expected, rtol=0, atol=1e-3)
    assert abs(np.linalg.norm(answers[0][0].embedding) - 1.0) > 1e-3, "the folder has no Normalize"
    with pytest.raises(InvalidRequest, match="can't be cut"):
        llm.embed(TEXTS, dimensions=16)
    llm.close()


def test_texts_end_with_what_the_tokenizer_appends_once_and_ids_stay_as_they_are(embedder: LLM, decoder: Path) -> None:
    ids = embedder.tokenizer.encode("hello")
    assert ids[-1] == AutoTokenizer.from_pretrained(decoder).convert_tokens_to_ids(EOD) not in ids[:-1]
    prompts: list[str | list[int]] = ["hello", ids, ids[:-1]]
    text, whole, bare = embedder.encode(prompts, use_tqdm=False)
    assert [answer.prompt_tokens for answer in (text, whole, bare)] == [len(ids), len(ids), len(ids) - 1]
    np.testing.assert_allclose(text.embedding, whole.embedding, rtol=0, atol=1e-5)
    assert np.abs(text.embedding - bare.embedding).max() > 0.1


def test_texts_are_cut_to_their_first_tokens_and_what_the_tokenizer_appends(embedder: LLM) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 50
    ids = embedder.tokenizer.encode(text)
    prompts: list[Any] = [text, {"prompt": text}, [*ids[:6], ids[-1], 5]]
    answers = embedder.encode(prompts, truncate_prompt_tokens=7, use_tqdm=False)
    for answer in answers:
        assert answer.prompt_tokens == 7
        np.testing.assert_allclose(answer.embedding, answers[2].embedding, rtol=0, atol=1e-5)


def test_an_embedding_model_neither_generates_nor_scores_tokens(embedder: LLM) -> None:
    kinds = sorted(key.kind for key in whole(embedder.engine).compiled.compilations)
    assert kinds == ["forward", "forward", "place_adapter", "set_pages", "set_row"], "without and with adapters"
    with pytest.raises(InvalidRequest, match="generates no tokens"):
        embedder.generate("hello")
    same, other = embedder.score("hello", ["hello", "The quick brown fox"], use_tqdm=False)
    assert same == pytest.approx(1.0) and other < 0.999


def test_documents_are_ranked_by_transformers_logits_of_yes_and_no(both: LLM, decoder: Path) -> None:
    """The prompt is that of Qwen3-Reranker's model card; "yes" comes first in the softmax, "no" last."""
    query, documents = "What jumps?", [*TEXTS[:2], "你好，世界。", "def f(x):", "no", "yes"]
    tokenizer, model = AutoTokenizer.from_pretrained(decoder), load_reference(decoder)
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    yes, no = (tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))
    expected = []
    for document in documents:
        body = f"<Instruct>: {INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        ids = [i for text in (prefix, body, suffix) for i in tokenizer.encode(text, add_special_tokens=False)]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        expected.append(float(torch.softmax(logits[[no, yes]], 0)[1]))
    scores = both.score(query, documents, use_tqdm=False)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-3)
    assert np.argsort(scores).tolist() == np.argsort(expected).tolist() and np.ptp(expected) > 0.01
    told = both.score(query, documents[:1], instruction="Find animals", use_tqdm=False)
    assert told[0] != pytest.approx(scores[0], abs=1e-4)


def test_one_engine_generates_and_embeds(both: LLM, decoder: Path) -> None:
    params = jaxsgl.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    prompt = both.tokenizer.encode(TEXTS[2])[:100]
    first = both.generate(prompt, params, use_tqdm=False)[0]
    (answer,) = both.encode([prompt], use_tqdm=False)
    assert answer.cached_tokens == 96, "the prefix that generation has computed"
    np.testing.assert_allclose(answer.embedding, hidden_states(decoder, prompt)[-1], rtol=0, atol=1e-3)
    assert both.generate(prompt, params, use_tqdm=False)[0].token_ids == first.token_ids
    assert both.engine.recompiles == 0


@pytest.mark.skipif(not NIGHTLY, reason="compiles an engine that generates and pools, with adapters; by night")
def test_one_engine_generates_embeds_and_ranks_with_adapters(decoder: Path, tmp_path: Path) -> None:
    folder = make_adapter(decoder, tmp_path, r=4)
    llm = LLM(str(decoder), enable_embeddings=True, lora=LoraConfig(lora_paths=(f"it={folder}",)), **FLAGS)
    params = jaxsgl.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    prompt, spec = llm.tokenizer.encode(TEXTS[1]), llm.engine.capacity.pooling
    assert spec is not None
    for name, adapter in (("", None), ("it", folder)):
        (completion,) = llm.generate([prompt], params, adapter=name, use_tqdm=False)
        ids = prompt + completion.token_ids
        logits = adapted_logits(decoder, adapter, ids)
        assert completion.token_ids == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        (answer,) = llm.encode([prompt], adapter=name, use_tqdm=False)
        assert answer.cached_tokens == (len(prompt) - 1) // 16 * 16, "the prefix that generation has computed"
        head = load_reference(decoder).lm_head.weight.detach().numpy()
        np.testing.assert_allclose(head @ answer.embedding, logits[len(prompt) - 1], rtol=0, atol=1e-3)
        ranking = ranking_of(llm.tokenizer, spec, [("a", "b")], None)
        last = adapted_logits(decoder, adapter, list(ranking.prompts[0]))[-1]
        yes, no = (llm.tokenizer.encode(word)[0] for word in ("yes", "no"))
        expected = float(torch.softmax(last[[no, yes]], 0)[1])
        assert llm.score("a", "b", adapter=name, use_tqdm=False) == [pytest.approx(expected, abs=1e-3)]
    assert llm.engine.recompiles == 0
    llm.close()


def test_a_classification_head_scores_its_labels(decoder: Path, tmp_path: Path) -> None:
    config = Qwen3Config.from_pretrained(decoder, id2label={"0": "bad", "1": "so so", "2": "good"}, pad_token_id=0)
    torch.manual_seed(1)
    reference = AutoModelForSequenceClassification.from_pretrained(decoder, config=config, dtype=torch.float32).eval()
    reference.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(decoder / name, tmp_path)
    llm = LLM(str(tmp_path), **FLAGS)
    ids = [llm.tokenizer.encode(text) for text in TEXTS]
    with torch.no_grad():
        expected = [torch.softmax(reference(torch.tensor([one])).logits[0], 0).numpy() for one in ids]
    np.testing.assert_allclose(llm.classify(TEXTS, use_tqdm=False), np.stack(expected), rtol=0, atol=1e-3)
    assert llm.engine.info.limits.pooling is not None
    assert llm.engine.info.limits.pooling.labels == ("bad", "so so", "good"), "in the order of the head's rows"
    with pytest.raises(InvalidRequest, match="3 classes, which don't rank"):
        llm.score("a", "b")
    llm.close()


def test_a_cross_encoder_names_what_its_scores_go_through(decoder: Path, tmp_path: Path) -> None:
    """As rerankers that sentence-transformers made have it, in newer and older words."""
    shutil.copytree(decoder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {
        "architectures": ["Qwen3ForSequenceClassification"],
        "id2label": {"0": "A"},
    }

    def activation(**told: Any) -> str:
        path.write_text(json.dumps({**config, **told}))
        return arch_from_folder(tmp_path).folder_pooling.activation

    newer = {"activation_fn": "torch.nn.modules.linear.Identity", "version": "5.1.0"}
    assert activation() == "sigmoid" and activation(sentence_transformers=newer) == "none"
    assert activation(sbert_ce_default_activation_function="torch.nn.modules.activation.Sigmoid") == "sigmoid"
    with pytest.raises(CheckpointError, match=r"scores go through torch\.nn\.modules\.activation\.Tanh, which is not"):
        activation(sbert_ce_default_activation_function="torch.nn.modules.activation.Tanh")
    newest = tmp_path / "config_sentence_transformers.json"
    newest.write_text(json.dumps({"activation_fn": "torch.nn.modules.linear.Identity"}))
    assert activation() == "none"
    newest.write_text(json.dumps({"activation_fn": "torch.nn.modules.activation.Tanh"}))
    with pytest.raises(CheckpointError, match=r"config_sentence_transformers.json: scores go through .*Tanh"):
        activation(sentence_transformers=newer)


def test_a_folder_says_whether_the_prompt_of_a_pair_begins_an_answer(last_token: Path, tmp_path: Path) -> None:
    shutil.copytree(last_token, tmp_path, dirs_exist_ok=True)
    assert not arch_from_folder(tmp_path).folder_pooling.begins_answer
    template = {"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(template))
    assert arch_from_folder(tmp_path).folder_pooling.begins_answer


def test_a_folder_says_to_what_length_its_embeddings_are_cut(
    last_token: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert arch_from_folder(last_token).folder_pooling.default_dimensions is None and not caplog.text
    shutil.copytree(last_token, tmp_path, dirs_exist_ok=True)
    settings = {"truncate_dim": 16, "prompts": {"query": "Find: "}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    expected = SentenceTransformer(str(tmp_path), device="cpu").encode([TEXTS[0]], prompt_name="query")
    spec = arch_from_folder(tmp_path).folder_pooling
    assert spec.matryoshka and spec.default_dimensions == expected.shape[1] == 16
    assert "puts the prompt 'Find: ' before each text by default, which is not done here" in caplog.text


@pytest.mark.parametrize(
    ("pooling", "modules", "words"),
    [
        ({"pooling_mode_cls_token": True}, MODULES, "pooling cls is not supported for a causal decoder"),
        ({"pooling_mode": ["mean", "max"]}, MODULES, "pooling mean and max is not supported"),
        ({"pooling_mode": "mean", "include_prompt": False}, MODULES, "include_prompt is false"),
        ({"pooling_mode": "mean"}, (*MODULES, "CNN"), "a module CNN, which is not supported"),
        ({"pooling_mode": "mean"}, (*MODULES, "Dense"), "Dense modules after the mean of a decoder's states"),
    ],
)
def test_pooling_that_a_decoder_cannot_do_is_refused_by_name(
    decoder: Path, tmp_path: Path, pooling: dict[str, Any], modules: tuple[str, ...], words: str
) -> None:
    folder = sentence_folder(decoder, tmp_path, pooling, modules)
    for path in folder.glob("*_Dense"):
        (path / "config.json").write_text(json.dumps({"in_features": 64, "out_features": 8}))
    with pytest.raises(CheckpointError, match=words):
        arch_from_folder(folder)
