"""How a model folder says that hidden states are pooled: sentence-transformers' files, and what config.json adds.

    modules.json                        which modules follow the transformer: Pooling, Dense, Normalize, LogitScore
    2_Dense/config.json                 sizes and activation of a matrix, which is in model.safetensors next to it
    1_Pooling/config.json               last token or mean (the folder's name is in modules.json)
    config_sentence_transformers.json   what scores go through; to what length embeddings are cut
    sentence_bert_config.json           tokens of a text; whether the template of a pair begins an answer
    tokenizer_config.json               tokens of a text, of an encoder
    config.json                         labels of a classification head; whether embeddings may be cut

A folder without these files is pooled at its last token and normalized, as vLLM and SGLang do. Owns these files' keys;
never knows requests. `arch_file` calls it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from jaxsgl.errors import CheckpointError
from jaxsgl.models.config_file import ConfigFile
from jaxsgl.models.end_tokens import TOKENIZER_CONFIG
from jaxsgl.requests.outputs import Activation, DenseModule, PoolingKind, PoolingSpec

MODULES_FILE = "modules.json"
SETTINGS_FILE, TRANSFORMER_FILE = "config_sentence_transformers.json", "sentence_bert_config.json"
_DEFAULT_FOLDER = "1_Pooling"
_KINDS: dict[str, PoolingKind] = {"lasttoken": "last", "mean": "mean"}
_OF_ENCODERS: dict[str, PoolingKind] = {**_KINDS, "cls": "first"}  # whose first token has seen all others
_OLD_KEYS = {  # of pooling configurations before sentence-transformers 5
    "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}  # fmt: skip
_ACTIVATIONS: dict[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "none", "Softmax": "softmax"}  # PyTorch's
_DENSE = "Dense"
_KNOWN_MODULES = ("Transformer", "Pooling", _DENSE, "Normalize", "LogitScore")
MAX_DENSE = 4
_UNLIMITED = 2**31  # tokenizers without a limit say 10**30
_OF_DENSE: dict[str, Literal["none", "tanh"]] = {"Identity": "none", "Tanh": "tanh"}  # PyTorch's classes

logger = logging.getLogger(__name__)


def read_pooling(
    folder: Path,
    config: ConfigFile,
    hidden_size: int,
    labels: tuple[str, ...],
    of_encoder: PoolingKind | None = None,
) -> PoolingSpec:
    """How the model of `folder` pools. `labels` are those of its classification head, () without one.

    `of_encoder` is how an encoder pools whose folder doesn't say it; None: the model is a decoder. Raises
    `CheckpointError` for pooling that the model can't do, and for modules that aren't known.
    """
    modules = dict(_modules(folder))
    scores = modules.get("LogitScore")
    pools = modules.get("Pooling") or (folder / _DEFAULT_FOLDER if (folder / _DEFAULT_FOLDER).is_dir() else None)
    sizes = tuple(config.get("matryoshka_dimensions") or ())
    settings = _settings(folder)
    kind = _kind_of(pools, of_encoder, is_classifier=bool(labels))
    dense = _read_dense(folder, hidden_size)
    if dense and kind == "mean" and of_encoder is None:
        raise CheckpointError(f"{folder}: Dense modules after the mean of a decoder's states are not supported")
    dimension = dense[-1].num_outputs if dense else hidden_size
    cut_to = min(settings.count("truncate_dim", dimension), dimension)
    transformer = _of_transformer(modules.get("Transformer", folder))
    return PoolingSpec(
        kind=kind,
        sees_whole=of_encoder is not None,
        dimension=dimension,
        dense=dense,
        normalize=not modules or "Normalize" in modules,
        begins_answer=_begins_answer(transformer),
        default_dimensions=None if cut_to == dimension else cut_to,
        matryoshka=bool(config.get("is_matryoshka")) or bool(sizes) or cut_to != dimension,
        dimensions=sizes,
        labels=labels,
        activation=_activation(config, settings, len(labels)),
        made_for_it=pools is not None or scores is not None or bool(labels),
        answer_ids=() if scores is None else _answer_ids(ConfigFile(scores / "config.json")),
        max_tokens=_max_tokens(transformer, folder, is_encoder=of_encoder is not None),
    )


def read_labels(config: ConfigFile) -> tuple[str, ...]:
    """The names of the classes of a classification head, in the order of its rows."""
    names: dict[str, str] = config.get("id2label") or {}
    count = len(names) or int(config.get("num_labels") or 2)
    return tuple(str(names.get(str(row), f"LABEL_{row}")) for row in range(count))


def dense_folders(folder: Path) -> tuple[Path, ...]:
    """The folders of sentence-transformers' Dense modules, in order; () for any other model."""
    return tuple(path for kind, path in _modules(folder) if kind == _DENSE)


def module_folders(folder: Path) -> tuple[Path, ...]:
    """The folders within `folder` that say in JSON files how it pools; () for a model that says it nowhere."""
    told = dict.fromkeys([*(path for _, path in _modules(folder)), folder / _DEFAULT_FOLDER])
    return tuple(path for path in told if path.is_dir() and path.parent == folder and path.name != "..")


def _read_dense(folder: Path, hidden_size: int) -> tuple[DenseModule, ...]:
    modules: list[DenseModule] = []
    for path in dense_folders(folder):
        config = ConfigFile(path / "config.json")
        name = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
        sizes = config.count("in_features"), config.count("out_features")
        before = modules[-1].num_outputs if modules else hidden_size
        if name not in _OF_DENSE or config.get("use_residual") or sizes[0] != before or len(modules) == MAX_DENSE:
            raise CheckpointError(
                f"{config.path}: a matrix of {sizes[0]} inputs after {before} numbers, with {name} after it, is not "
                f"supported: supported are up to {MAX_DENSE} that read all numbers before them, without use_residual, "
                f"with {' or '.join(_OF_DENSE)}"
            )
        modules.append(DenseModule(*sizes, bool(config.get("bias", True)), _OF_DENSE[name]))
    return tuple(modules)


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """sentence-transformers' modules, each by its kind and folder; [] for any other model."""
    path = folder / MODULES_FILE
    if not path.is_file():
        return []
    try:
        listed: list[dict[str, Any]] = msgspec.json.decode(path.read_bytes())
        found = [(str(module["type"]).rsplit(".", 1)[-1], folder / str(module.get("path", ""))) for module in listed]
    except (OSError, msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} can't be read as a list of modules: {error!r}") from error
    unknown = [name for name, _ in found if name not in _KNOWN_MODULES]
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


def _of_transformer(folder: Path) -> ConfigFile:
    """What the transformer's own module says; empty for any other model."""
    path = folder / TRANSFORMER_FILE
    return ConfigFile(path, None if path.is_file() else {})


def _max_tokens(transformer: ConfigFile, folder: Path, *, is_encoder: bool) -> int | None:
    """What sentence-transformers cuts texts to: since its release 6 its folders say it of the tokenizer."""
    path = folder / TOKENIZER_CONFIG
    told = transformer.get("max_seq_length")
    if told is None and is_encoder and path.is_file():
        told = ConfigFile(path).get("model_max_length")
    return told if isinstance(told, int) and 0 < told < _UNLIMITED else None


def _begins_answer(transformer: ConfigFile) -> bool:
    told = transformer.get("processing_kwargs")
    of_template = told.get("chat_template") if isinstance(told, dict) else None
    return isinstance(of_template, dict) and bool(of_template.get("add_generation_prompt"))


def _kind_of(pools: Path | None, of_encoder: PoolingKind | None, *, is_classifier: bool) -> PoolingKind:
    """What the folder `pools` says, or the default; the head of an encoder reads what its family says."""
    default = "last" if of_encoder is None else of_encoder
    if pools is None or (is_classifier and of_encoder is not None):
        return default
    return _kind(ConfigFile(pools / "config.json"), _KINDS if of_encoder is None else _OF_ENCODERS)


def _kind(config: ConfigFile, kinds: Mapping[str, PoolingKind]) -> PoolingKind:
    given = config.get("pooling_mode")
    modes = [given] if isinstance(given, str) else list(given or ())
    modes += [mode for key, mode in _OLD_KEYS.items() if config.get(key)]
    if len(modes) != 1 or modes[0] not in kinds:
        what = "a causal decoder" if kinds is _KINDS else "an encoder"
        raise CheckpointError(
            f"{config.path}: pooling {' and '.join(modes) or 'of no kind'} is not supported for {what}; "
            f"supported are {' and '.join(kinds)}"
        )
    if config.get("include_prompt") is False:
        raise CheckpointError(f"{config.path}: include_prompt is false, but prompts can't be left out of a pooling")
    return kinds[modes[0]]


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
