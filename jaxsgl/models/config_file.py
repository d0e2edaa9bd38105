"""A JSON file of a model's folder, read so that nothing in it goes unnoticed.

Owns which values were asked for, and which need not be: a key that changes results and that no reader asks for is an
error with the key's name. Never knows what a key means: `arch_file` and `layer_config` do, which read through it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxsgl.errors import CheckpointError
from jaxsgl.json_file import read_object

# Keys that never change what a causal decoder computes: for training, for other software, or for generate().
HARMLESS = frozenset((
    "_name_or_path", "architectures", "auto_map", "model_type", "transformers_version", "torch_dtype", "dtype",
    "use_cache", "custom_pipelines", "initializer_range", "attention_dropout", "attn_pdrop", "embd_pdrop",
    "resid_pdrop", "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout",
    "layerdrop", "pretraining_tp", "tokenizer_class", "is_llama_config", "bos_token_id", "eos_token_id",
    "pad_token_id", "unk_token_id", "sep_token_id", "mask_token_id", "decoder_start_token_id", "attn_implementation",
    "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal", "_flash_attn_2_enabled",
    "use_flash_attention", "use_flash_attn", "flash_attention", "cache_implementation", "max_window_layers",
    "unsloth_version", "unsloth_fixed", "fuse_cross_entropy", "fuse_norm", "fuse_swiglu", "neftune_alpha",
    "z_loss_coef", "router_aux_loss_coef", "router_z_loss_coef", "output_router_logits", "transformers.js_config",
    "quantization_config", "return_dict", "use_return_dict", "output_attentions", "output_hidden_states",
    "output_scores", "return_dict_in_generate", "torchscript", "chunk_size_feed_forward", "gradient_checkpointing",
    "id2label", "label2id", "num_labels", "problem_type", "task_specific_params", "finetuning_task", "prefix",
    "max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_return_sequences", "bad_words_ids", "suppress_tokens",
    "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "finetuned",
    "exponential_decay_length_penalty", "tf_legacy_loss", "use_bfloat16", "language", "loss_type",
    "model_max_length", "max_sequence_length", "max_seq_length", "max_seq_len", "name_or_path", "_commit_hash",
    "keys_to_ignore_at_inference", "model_name", "internal_version", "ignore_index", "is_composition",
))  # fmt: skip


class ConfigFile:
    """The values of a JSON file, or of an object inside it, with errors that name the file."""

    def __init__(self, path: Path, values: Mapping[str, Any] | None = None, within: str = "") -> None:
        """Reads the file, unless `values` are given: those of the object at `within`, as in "rope_scaling."."""
        self.path = path
        self.defaults: Mapping[str, Any] = {}
        self.keys: Mapping[str, str] = {}  # what the file calls keys that it doesn't call as readers do
        self.values: Mapping[str, Any] = read_object(path) if values is None else values
        self._within = within
        self._asked: set[str] = set()
        self._sections: list[ConfigFile] = []

    def get(self, key: str, default: Any = None) -> Any:
        """The value; `default` where it is null; the family's default, else `default`, where it is missing."""
        own = self.told_as(key)
        self._asked.add(own)
        if own in self.values and self.values.get(key) == self.values[own]:
            self._asked.add(key)  # it says the same in two words
        key = own
        value = self.values.get(key) if key in self.values else self.defaults.get(key)
        return default if value is None else value

    def told_as(self, key: str) -> str:
        """What the file calls the key: what the family does, unless the file has it by its plain name alone."""
        own = self.keys.get(key, key)

        def is_there(word: str) -> bool:
            return word in self.values or word in self.defaults

        return key if is_there(key) and not is_there(own) else own

    def skip(self, *keys: str) -> None:
        """Takes keys for asked: next to the other values they mean nothing, to the family's own code either."""
        self._asked.update(keys)

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer, or a list of equal ones; an error where it is missing without a default."""
        value = self.of_all_layers(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(
                f"{self.path}: {self._within}{self.told_as(key)} is {value}, but must be an integer of 1 and more"
            )
        return value

    def of_all_layers(self, key: str, default: Any = None) -> Any:
        """The value, or the one that is listed for each layer or side; an error unless all of a list are equal."""
        values = self.get(key, default)
        if not isinstance(values, list):
            return values
        if not values or any(value != values[0] for value in values):
            raise CheckpointError(
                f"{self.path}: {self._within}{self.told_as(key)} is {_short(values)}, but only models are served "
                "where all of these are the same"
            )
        return values[0]

    def number(self, key: str, default: float | None = None) -> float:
        """A number; an error where it is missing without a default."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{self.path}: {self._within}{self.told_as(key)} is {value}, but must be a number")
        return float(value)

    def section(self, key: str) -> ConfigFile | None:
        """The object at `key`; the family's default, else None, where it is missing, null or empty.

        Raises `CheckpointError` for anything else.
        """
        values = self.get(key) or self.defaults.get(key)
        if not values:
            return None
        if not isinstance(values, dict):
            raise CheckpointError(f"{self.path}: {self._within}{key} is {_short(values)}, but must be an object")
        self._sections.append(ConfigFile(self.path, values, f"{self._within}{key}."))
        return self._sections[-1]

    def refuse_unread(self, architecture: str, ignored: frozenset[str]) -> None:
        """Raises `CheckpointError` for a key that may change results and that was not asked for.

        What is off (null, false, 0, empty) changes nothing, and `ignored` are keys that the family's own code ignores.
        """
        for key, value in self.values.items():
            if key not in self._asked and not (key in HARMLESS or key in ignored or _is_neutral(key, value)):
                raise CheckpointError(
                    f"{self.path}: {self._within}{key} is {_short(value)}, which may change results, and is not "
                    f"supported for {architecture}; if it changes none, remove the key from the file"
                )
        for section in self._sections:
            section.refuse_unread(architecture, ignored)


def _is_neutral(key: str, value: Any) -> bool:
    if key == "layer_types" and value is not None:
        return isinstance(value, list) and set(value) <= {"full_attention"}
    if key in ("partial_rotary_factor", "factor", "is_causal", "moe_layer_freq") and value is not None:
        return bool(value == 1)
    return not value


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
