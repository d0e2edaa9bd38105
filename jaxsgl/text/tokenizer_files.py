"""The tokenizer that a model's files hold, as one of transformers, which alone doesn't find some or gets them wrong.

Programs in the model's folder are never run. Takes seconds: it imports transformers.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import transformers
from tokenizers.normalizers import Lowercase, Sequence
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import cached_file

from jaxsgl.errors import CheckpointError
from jaxsgl.json_file import read_object
from jaxsgl.text.deepseek import DEEPSEEKS, ENCODING_V4, deepseeks_template
from jaxsgl.text.kimi_tokenizer import CLASS, KimiTokenizer, kimi_tokenizer
from jaxsgl.text.voxtral import VOXTRAL_TEMPLATE, has_voxtrals_words

_SENTENCEPIECE = ("tokenizer.model", "spiece.model")


class TokenizerFiles:
    """Files of a local folder, or of a hub id at `revision`."""

    def __init__(self, model: str, revision: str | None) -> None:
        self._model = model
        self._revision = revision or "main"

    def tokenizer(self) -> Any:
        """Returns the tokenizer. Raises `CheckpointError`, and whatever transformers and tokenizers raise."""
        config = self._json("tokenizer_config.json")
        if config.get("tokenizer_class") == CLASS:
            found = self._kimi(config)
        elif self._path("tokenizer.json") is None and self._path("tekken.json") is not None:
            found = self._tekken()
        else:
            self._check_sentencepiece()
            found = AutoTokenizer.from_pretrained(self._model, revision=self._revision, trust_remote_code=False)
        template = self._json("chat_template.json").get("chat_template")
        if found.chat_template is None and isinstance(template, str):  # processors keep it there, tokenizers don't
            found.chat_template = template
        if found.chat_template is None:
            found.chat_template = self._deepseeks_template()
        if self._json("sentence_bert_config.json").get("do_lower_case"):
            _take_small_letters(found)
        return found

    def _deepseeks_template(self) -> str | None:
        model_type = self._json("config.json").get("model_type")
        if model_type not in DEEPSEEKS:
            return None
        program = self._path(ENCODING_V4)
        return deepseeks_template(model_type, "" if program is None else program.read_text("utf-8", "replace"))

    def _kimi(self, config: dict[str, Any]) -> Any:
        if self._path("tokenizer.json") is not None:
            return KimiTokenizer.from_pretrained(self._model, revision=self._revision)
        ranks, template = self._path("tiktoken.model"), self._path("chat_template.jinja")
        if ranks is None:
            raise CheckpointError(
                f"{self._model} has neither a tiktoken.model nor a tokenizer.json, which its {CLASS} "
                "needs: put one there"
            )
        return kimi_tokenizer(ranks, config, None if template is None else template.read_text("utf-8"))

    def _tekken(self) -> Any:
        try:
            importlib.import_module("transformers.integrations.mistral.tokenizer")
        except ImportError:  # older ones give other tokens, without a word
            raise CheckpointError(
                f"{self._model} has a tokenizer in tekken.json alone, which transformers {transformers.__version__} "
                "can't read: install 5.23 or a newer one, or put a tokenizer.json there"
            ) from None
        unsaid = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}  # as Mistral's own program has it
        found = PreTrainedTokenizerFast.from_pretrained(self._model, revision=self._revision, **unsaid)
        if found.chat_template is None and has_voxtrals_words(frozenset(found.get_added_vocab())):
            found.chat_template = VOXTRAL_TEMPLATE
        return found

    def _check_sentencepiece(self) -> None:
        """Raises `CheckpointError`; transformers would take the file for another format, and blame its first line."""
        if importlib.util.find_spec("sentencepiece") is not None or self._path("tokenizer.json") is not None:
            return
        for name in _SENTENCEPIECE:
            path = self._path(name)
            if path is not None and path.read_bytes()[:1] == b"\n":  # the others are text
                raise CheckpointError(
                    f"{self._model} has a tokenizer in {name} alone, for which the package sentencepiece is missing: "
                    "pip install sentencepiece, or put a tokenizer.json there"
                )

    def _json(self, name: str) -> dict[str, Any]:
        """Returns the object in the model's file `name`; an empty one if the model has no such file."""
        path = self._path(name)
        return {} if path is None else read_object(path)

    def _path(self, name: str) -> Path | None:
        try:
            found = cached_file(self._model, name, revision=self._revision)
        except OSError:  # for hub ids AutoTokenizer then says what is wrong
            return None
        return None if found is None else Path(found)


def _take_small_letters(tokenizer: Any) -> None:
    """Makes a tokenizer take all letters for small ones, as sentence-transformers does where a folder says so."""
    backend = tokenizer.backend_tokenizer
    own = backend.normalizer
    backend.normalizer = Lowercase() if own is None else Sequence([Lowercase(), own])
