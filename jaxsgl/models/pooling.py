"""How a model folder says that hidden states are pooled: sentence-transformers' files, and what config.json adds.

    modules.json                        which modules follow the transformer: Pooling, Normalize, LogitScore
    1_Pooling/config.json               last token or mean (the folder's name is in modules.json)
    config_sentence_transformers.json   what scores go through; to what length embeddings are cut
    sentence_bert_config.json           whether the template of a pair begins an answer
    config.json                         labels of a classification head; whether embeddings may be cut

A folder without these files is pooled at its last token and normalized, as vLLM and SGLang do. Owns these files' keys;
never knows requests. `arch` calls it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from jaxsgl.errors import CheckpointError
from jaxsgl.models.config_file import ConfigFile
from jaxsgl.requests.outputs import Activation, PoolingKind, PoolingSpec

MODULES_FILE = "modules.json"
SETTINGS_FILE, TRANSFORMER_FILE = "config_sentence_transformers.json", "sentence_bert_config.json"
_DEFAULT_FOLDER = "1_Pooling"
_KINDS: dict[str, PoolingKind] = {"lasttoken": "last", "mean": "mean"}
_OLD_KEYS = {  # of pooling configurations before sentence-transformers 5
    "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}  # fmt: skip
_ACTIVATIONS: dict[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "none", "Softmax": "softmax"}  # PyTorch's
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize", "LogitScore")

logger = logging.getLogger(__name__)


def read_pooling(folder: Path, config: ConfigFile, hidden_size: int, labels: tuple[str, ...]) -> PoolingSpec:
    """How the model of `folder` pools. `labels` are those of its classification head, () without one.

    Raises `CheckpointError` for pooling that a causal decoder can't do, and for modules that aren't known.
    """
    modules = _modules(folder)
    scores = modules.get("LogitScore")
    pools = modules.get("Pooling") or (folder / _DEFAULT_FOLDER if (folder / _DEFAULT_FOLDER).is_dir() else None)
    sizes = tuple(config.get("matryoshka_dimensions") or ())
    settings = _settings(folder)
    cut_to = min(settings.count("truncate_dim", hidden_size), hidden_size)
    return PoolingSpec(
        kind="last" if pools is None else _kind(ConfigFile(pools / "config.json")),
        dimension=hidden_size,
        normalize=not modules or "Normalize" in modules,
        begins_answer=_begins_answer(modules.get("Transformer", folder)),
        default_dimensions=None if cut_to == hidden_size else cut_to,
        matryoshka=bool(config.get("is_matryoshka")) or bool(sizes) or cut_to != hidden_size,
        dimensions=sizes,
        labels=labels,
        activation=_activation(config, settings, len(labels)),
        made_for_it=pools is not None or scores is not None or bool(labels),
        answer_ids=() if scores is None else _answer_ids(ConfigFile(scores / "config.json")),
    )


def read_labels(config: ConfigFile) -> tuple[str, ...]:
    """The names of the classes of a classification head, in the order of its rows."""
    names: dict[str, str] = config.get("id2label") or {}
    count = len(names) or int(config.get("num_labels") or 2)
    return tuple(str(names.get(str(row), f"LABEL_{row}")) for row in range(count))


def _modules(folder: Path) -> dict[str, Path]:
    """The folders of sentence-transformers' modules by their kind; {} for any other model."""
    path = folder / MODULES_FILE
    if not path.is_file():
        return {}
    try:
        listed: list[dict[str, Any]] = msgspec.json.decode(path.read_bytes())
        found = {str(module["type"]).rsplit(".", 1)[-1]: folder / str(module.get("path", "")) for module in listed}
    except (OSError, msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} can't be read as a list of modules: {error!r}") from error
    unknown = [name for name in found if name not in _KNOWN_MODULES]
    if unknown:
        raise CheckpointError(
            f"{path} has a module {unknown[0]}, which is not supported: supported are {', '.join(_KNOWN_MODULES)}"
        )
    return found


def _settings(folder: Path) -> ConfigFile:
    """What sentence-transformers' models say besides their modules; empty for any other model."""
    path = folder / SETTINGS_FILE
    settings = ConfigFile(path, None if path.is_file() else {})
    name, prompts = settings.get("default_prompt_name"), settings.get("prompts")
    prompt = prompts.get(name) if isinstance(prompts, dict) else None
    if prompt:
        logger.warning(
            "%s puts the prompt %r before each text by default, which is not done here: put it before the texts that "
            "you send",
            path,
            prompt,
        )
    return settings


def _begins_answer(folder: Path) -> bool:
    path = folder / TRANSFORMER_FILE
    told = ConfigFile(path, None if path.is_file() else {}).get("processing_kwargs")
    of_template = told.get("chat_template") if isinstance(told, dict) else None
    return isinstance(of_template, dict) and bool(of_template.get("add_generation_prompt"))


def _kind(config: ConfigFile) -> PoolingKind:
    given = config.get("pooling_mode")
    modes = [given] if isinstance(given, str) else list(given or ())
    modes += [mode for key, mode in _OLD_KEYS.items() if config.get(key)]
    if len(modes) != 1 or modes[0] not in _KINDS:
        raise CheckpointError(
            f"{config.path}: pooling {' and '.join(modes) or 'of no kind'} is not supported for a causal decoder; "
            f"supported are {' and '.join(_KINDS)}"
        )
    if config.get("include_prompt") is False:
        raise CheckpointError(f"{config.path}: include_prompt is false, but prompts can't be left out of a pooling")
    return _KINDS[modes[0]]


def _answer_ids(config: ConfigFile) -> tuple[int, ...]:
    """The tokens of a reranker's answers, "yes" first."""
    no = config.get("false_token_id")
    if no is None:
        raise CheckpointError(f"{config.path}: false_token_id is missing, and scores of one token are not supported")
    return int(config.get("true_token_id")), int(no)


def _activation(config: ConfigFile, settings: ConfigFile, num_labels: int) -> Activation:
    """What a cross-encoder of sentence-transformers names: in its settings, in older folders within config.json, in an
    object or next to it; else what transformers' pipelines choose.
    """
    told = config.get("sentence_transformers")
    older = told.get("activation_fn") if isinstance(told, dict) else None
    older = older or config.get("sbert_ce_default_activation_function")
    name = settings.get("activation_fn") or older
    if name is not None:
        kind = str(name).rpartition(".")[2]
        if kind not in _ACTIVATIONS:
            path = settings.path if settings.get("activation_fn") else config.path
            raise CheckpointError(
                f"{path}: scores go through {name}, which is not supported: supported are {', '.join(_ACTIVATIONS)}"
            )
        return _ACTIVATIONS[kind]
    problem_type = config.get("problem_type")
    if problem_type == "regression":
        return "none"
    return "sigmoid" if problem_type == "multi_label_classification" or num_labels == 1 else "softmax"
