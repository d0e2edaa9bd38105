"""Encoders, whose tokens see their whole prompt: embeddings, classes and scores of pairs, next to transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForPreTraining,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    DistilBertModel,
    ElectraConfig,
    ElectraForSequenceClassification,
    ElectraModel,
    EuroBertConfig,
    EuroBertModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    GteConfig,
    GteModel,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    ModernBertModel,
    MPNetConfig,
    MPNetForSequenceClassification,
    MPNetModel,
    NomicBertConfig,
    NomicBertModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

import jaxsgl
from jaxsgl.config.features import LoraConfig
from jaxsgl.errors import ConfigError, InvalidRequest
from tests.checkpoints import fill
from tests.grids import NIGHTLY
from tests.gte import class_logits, saved_gte, states_of

pytestmark = pytest.mark.device

VOCABULARY, CONTEXT = 200, 128
FLAGS: dict[str, Any] = {
    "dtype": "float32", "max_running_requests": 4, "extend_buckets": (128,), "chunked_prefill_size": 64,
    "max_total_tokens": 1024, "check_every_step": True,
}  # fmt: skip
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 112}
HEADS: dict[str, Any] = {**SIZES, "num_attention_heads": 4}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DISTIL = {
    "vocab_size": VOCABULARY, "dim": 64, "n_layers": 3, "hidden_dim": 112, "n_heads": 4,
    "max_position_embeddings": CONTEXT,
}  # fmt: skip
ELECTRA = {**HEADS, "embedding_size": 64, "max_position_embeddings": CONTEXT}
MPNET = {**HEADS, "max_position_embeddings": CONTEXT + 2}
XLMR = {**HEADS, "max_position_embeddings": CONTEXT + 2, "type_vocab_size": 1}
MODERN: dict[str, Any] = {
    **HEADS, **ENDS, "max_position_embeddings": CONTEXT, "local_attention": 16, "cls_token_id": 1, "sep_token_id": 2
}  # fmt: skip
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "bert": lambda: BertModel(BertConfig(**HEADS, max_position_embeddings=CONTEXT)),
    "bert with heads": lambda: BertForPreTraining(BertConfig(**HEADS, max_position_embeddings=CONTEXT)),
    "electra": lambda: ElectraModel(ElectraConfig(**ELECTRA)),
    "mpnet": lambda: MPNetModel(MPNetConfig(**MPNET)),
    "xlm-roberta": lambda: XLMRobertaModel(XLMRobertaConfig(**XLMR)),
    "modernbert": lambda: ModernBertModel(ModernBertConfig(**MODERN)),
    "distilbert": lambda: DistilBertModel(DistilBertConfig(**DISTIL)),
    "nomic": lambda: NomicBertModel(NomicBertConfig(**HEADS, max_position_embeddings=CONTEXT)),
    "gte": lambda: GteModel(GteConfig(**HEADS, max_position_embeddings=CONTEXT)),
    "eurobert": lambda: EuroBertModel(
        EuroBertConfig(**HEADS, **ENDS, num_key_value_heads=2, max_position_embeddings=CONTEXT, mask_token_id=3)
    ),
}
CLASSIFIERS: dict[str, Callable[[], PreTrainedModel]] = {
    "electra": lambda: ElectraForSequenceClassification(ElectraConfig(**ELECTRA, num_labels=3)),
    "mpnet": lambda: MPNetForSequenceClassification(MPNetConfig(**MPNET, num_labels=3)),
    "xlm-roberta": lambda: XLMRobertaForSequenceClassification(XLMRobertaConfig(**XLMR, num_labels=3)),
    "modernbert": lambda: ModernBertForSequenceClassification(
        ModernBertConfig(**MODERN, num_labels=3, classifier_pooling="mean")
    ),
    "distilbert": lambda: DistilBertForSequenceClassification(DistilBertConfig(**DISTIL, num_labels=3)),
}
# All in one step; the last one is longer than --chunked-prefill-size.
PROMPTS = [np.random.default_rng(n).integers(3, VOCABULARY, n).tolist() for n in (5, 1, 30, 77)]
by_night = partial(pytest.param, marks=pytest.mark.skipif(not NIGHTLY, reason="by night, as most families"))


def saved(make: Callable[[], PreTrainedModel], folder: Path) -> PreTrainedModel:
    """A random model, saved in `folder`."""
    torch.manual_seed(0)
    model = make()
    fill(model)
    model.eval().save_pretrained(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """Words of numbers, with BERT's tokens around one text or two, and types that tell them apart."""
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *(f"w{i}" for i in range(VOCABULARY - 4))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]",
        model_max_length=CONTEXT, model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)  # fmt: skip


def texts(*lengths: int) -> list[str]:
    """Texts of so many words."""
    return [" ".join(f"w{i}" for i in np.random.default_rng(n).integers(0, VOCABULARY - 4, n)) for n in lengths]


def says_pooling(folder: Path, mode: str) -> None:
    """Writes how sentence-transformers pools."""
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("bert", "cls_token"),
        ("modernbert", "mean_tokens"),
        ("mpnet", "mean_tokens"),
        *(
            by_night(kind, "cls_token")
            for kind in ("bert with heads", "electra", "xlm-roberta", "distilbert", "nomic", "gte")
        ),
        by_night("eurobert", "mean_tokens"),
    ],
)
def test_embeddings_are_transformers_states_of_prompts_that_see_all_of_themselves(
    kind: str, mode: str, tmp_path: Path
) -> None:
    model = saved(MODELS[kind], tmp_path)
    says_pooling(tmp_path, mode)
    with jaxsgl.LLM(str(tmp_path), **FLAGS) as llm:
        found = llm.encode(PROMPTS)
        again = llm.encode([PROMPTS[-1]])
    for ids, embedding in zip([*PROMPTS, PROMPTS[-1]], [*found, *again], strict=True):
        with torch.no_grad():
            hidden = model.base_model(torch.tensor([ids])).last_hidden_state[0]
        expected = hidden[0] if mode == "cls_token" else hidden.mean(0)
        np.testing.assert_allclose(embedding.embedding, expected.numpy(), atol=2e-5)
        assert embedding.cached_tokens == 0


@pytest.mark.parametrize("kind", ["modernbert", *map(by_night, ("electra", "mpnet", "xlm-roberta", "distilbert"))])
def test_classes_are_transformers(kind: str, tmp_path: Path) -> None:
    model = saved(CLASSIFIERS[kind], tmp_path)
    with jaxsgl.LLM(str(tmp_path), **FLAGS) as llm:
        found = llm.classify(PROMPTS)
    for ids, scores in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0].softmax(-1)
        np.testing.assert_allclose(scores, expected.numpy(), atol=2e-5)


@pytest.mark.parametrize(("num_types", "num_labels"), [(0, 0), by_night(2, 3)])
def test_gte_is_as_its_own_code_has_it(num_types: int, num_labels: int, tmp_path: Path) -> None:
    tensors = saved_gte(tmp_path, num_types, num_labels)
    with jaxsgl.LLM(str(tmp_path), **FLAGS) as llm:
        found = llm.classify(PROMPTS) if num_labels else [each.embedding for each in llm.encode(PROMPTS)]
    for ids, each in zip(PROMPTS, found, strict=True):
        expected = class_logits(ids, tensors).softmax(-1) if num_labels else states_of(ids, tensors)[0]
        np.testing.assert_allclose(each, expected.numpy(), atol=2e-5)


def test_pairs_are_scored_as_by_a_cross_encoder_that_tells_their_texts_apart(tmp_path: Path) -> None:
    saved(
        lambda: BertForSequenceClassification(BertConfig(**HEADS, max_position_embeddings=CONTEXT, num_labels=1)),
        tmp_path,
    )
    save_tokenizer(tmp_path)
    queries, documents = texts(3, 1, 20, 4), texts(40, 5, 2, 300)  # the last one is cut, by both
    expected = CrossEncoder(str(tmp_path), device="cpu").predict(list(zip(queries, documents, strict=True)))
    with jaxsgl.LLM(str(tmp_path), **FLAGS) as llm:
        np.testing.assert_allclose(llm.score(queries, documents, truncate_prompt_tokens=-1), expected, atol=2e-5)
        with pytest.raises(InvalidRequest, match="the prompt has 307 tokens"):
            llm.score(queries[3], documents[3])
        with pytest.raises(InvalidRequest, match="truncate_prompt_tokens is 129, but must be -1, or 1 to 128"):
            llm.score(queries, documents, truncate_prompt_tokens=129)
        with pytest.raises(InvalidRequest, match="generates no tokens"):
            llm.generate([[5, 6]])


def test_gemma_that_sees_both_ways_is_sentence_transformers_with_its_matrices(tmp_path: Path) -> None:
    """EmbeddingGemma's form: windows on both sides of a token, a mean, two matrices."""
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        **HEADS, **ENDS, num_key_value_heads=2, head_dim=16, max_position_embeddings=CONTEXT, sliding_window=16,
        layer_types=types, use_bidirectional_attention=True, query_pre_attn_scalar=16,
    )  # fmt: skip
    saved(lambda: Gemma3TextModel(config), tmp_path / "base")
    save_tokenizer(tmp_path / "base")
    torch.manual_seed(1)
    judge = SentenceTransformer(
        modules=[
            Transformer(str(tmp_path / "base")),
            Pooling(64, pooling_mode="mean"),
            Dense(64, 96, bias=False, activation_function=torch.nn.Identity()),
            Dense(96, 48, activation_function=torch.nn.Tanh()),
            Normalize(),
        ],
        device="cpu",
    )
    judge.save(str(tmp_path / "whole"))
    some = texts(3, 60, 1)
    with jaxsgl.LLM(str(tmp_path / "whole"), **FLAGS) as llm:
        found = [each.embedding for each in llm.embed(some)]
    np.testing.assert_allclose(found, judge.encode(some), atol=1e-5)


def test_what_an_encoder_has_no_use_for_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    saved(MODELS["bert"], tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="does not go with BertModel, whose tokens see the whole prompt"):
        jaxsgl.LLM(str(tmp_path), load_format="dummy", lora=LoraConfig(enable_lora=True), **FLAGS)
