"""The worker's description of itself: the model that it serves, how it was started, and the tokenizer's files.

Answers GetModelInfo, GetServerInfo and GetTokenizer. Reads the model folder's JSON files for what the engine needn't
know. Nothing secret may come in here: only flags of `config.public_flags` are shown. service.py calls it.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp
from smg_grpc_proto import sglang_scheduler_pb2 as pb
from smg_grpc_proto.generated import common_pb2

import jaxsgl
from jaxsgl.config.flags import public_flags
from jaxsgl.config.server import ServerConfig
from jaxsgl.errors import NotFound
from jaxsgl.frontend.generation import ServedModel
from jaxsgl.messages.replies import EngineInfo

CHUNK_BYTES = 64 << 10
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_TOKENIZER_FILES = (
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "config.json", "generation_config.json",
    "merges.txt", "preprocessor_config.json", "processor_config.json", "special_tokens_map.json", "spiece.model",
    "tekken.json", "tiktoken.model",
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "video_preprocessor_config.json", "vocab.json",
    "vocab.txt",
)  # fmt: skip
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first date that a zip knows


def model_info(model: ServedModel, config: ServerConfig, weight_version: str) -> pb.GetModelInfoResponse:
    """Returns what is served."""
    info, limits = model.info, model.info.limits
    folder = Path(info.model_path)
    of_model = _read_json(folder / "config.json")
    defaults = _read_json(folder / "generation_config.json")
    told = {name: defaults[name] for name in _SAMPLING_DEFAULTS if defaults.get(name) is not None}
    labels = () if limits.pooling is None else limits.pooling.labels
    return pb.GetModelInfoResponse(
        model_path=info.model_path,
        tokenizer_path=info.model_path if model.tokenizer.exists else "",
        is_generation=limits.generates,
        weight_version=weight_version,
        served_model_name=config.model_name,
        max_context_length=limits.context_length,
        max_req_input_len=_max_prompt_len(info),
        vocab_size=limits.vocab_size,
        supports_vision=limits.media is not None,
        model_type=of_model.get("model_type") or "",
        architectures=of_model.get("architectures") or [info.architecture],
        eos_token_ids=info.eos_token_ids,
        pad_token_id=_first_id(of_model.get("pad_token_id")),
        bos_token_id=_first_id(of_model.get("bos_token_id")),
        id2label_json=json.dumps(dict(enumerate(labels))) if labels else "",
        num_labels=len(labels),
        default_sampling_params_json=json.dumps(told) if told else "",
    )


def server_info(
    model: ServedModel, config: ServerConfig, start_s: float, num_open: int, heard_s: float, paused: bool = False
) -> pb.GetServerInfoResponse:
    """Returns how the server was started and how long it has run; times are seconds since 1970."""
    info = model.info
    response = pb.GetServerInfoResponse(
        server_args=_struct(_server_args(info, config)),
        scheduler_info=_struct(
            {
                "max_total_num_tokens": info.limits.pool_tokens,
                "max_req_input_len": _max_prompt_len(info),
                "is_generation": info.limits.generates,
                "platform": info.platform,
                "weight_bytes": info.weight_bytes,
                "kv_bytes": info.kv_bytes,
                "warmup_s": info.warmup_s,
            }
        ),
        active_requests=num_open,
        is_paused=paused,
        last_receive_timestamp=heard_s,
        uptime_seconds=time.time() - start_s,
        sglang_version=f"jaxsgl-{jaxsgl.__version__}",
        server_type="grpc",
        max_total_num_tokens=info.limits.pool_tokens,
        start_time=Timestamp(seconds=int(start_s)),
    )
    return response


def zip_tokenizer(folder: Path) -> bytes:
    """Returns a zip of the folder's tokenizer files: gateways that can't read the folder build their tokenizer from it.

    The same files give the same bytes, so that gateways can tell by the hash whether two workers have the same
    tokenizer. Raises `NotFound` if the folder holds no tokenizer file.
    """
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as files:
        for name in _TOKENIZER_FILES:
            if (folder / name).is_file():
                entry = zipfile.ZipInfo(name, _EPOCH)
                entry.compress_type = zipfile.ZIP_DEFLATED
                files.writestr(entry, (folder / name).read_bytes())
        if not files.namelist():
            raise NotFound(f"the model folder {folder} has no tokenizer files: give the gateway a tokenizer path")
    return archive.getvalue()


def chunks(archive: bytes) -> Iterator[common_pb2.GetTokenizerChunk]:
    """Yields `archive` in messages; the last one holds the SHA-256 of all of it, in hexadecimal digits."""
    for start in range(0, len(archive), CHUNK_BYTES):
        is_last = start + CHUNK_BYTES >= len(archive)
        yield common_pb2.GetTokenizerChunk(
            data=archive[start : start + CHUNK_BYTES], sha256=hashlib.sha256(archive).hexdigest() if is_last else ""
        )


def _server_args(info: EngineInfo, config: ServerConfig) -> dict[str, Any]:
    """Returns the engine's flags under their names, and what gateways look for under SGLang's names."""
    flags = public_flags(config.engine)
    del flags["model"]
    disaggregation = flags.pop("disaggregation")
    return flags | {
        "model_path": info.model_path,
        "tokenizer_path": info.model_path,
        "served_model_name": config.model_name,
        "tp_size": config.engine.tp,
        "dp_size": config.engine.dp_size,
        "pp_size": config.engine.pp_size,
        "context_length": info.limits.context_length,
        "max_total_tokens": info.limits.pool_tokens,
        "max_running_requests": info.max_running_requests,
        "page_size": info.page_size,
        "dtype": info.dtype,
        "kv_cache_dtype": info.kv_cache_dtype,
        "attention_backend": info.attention_backend,
        **disaggregation,
    }


def _struct(values: dict[str, Any]) -> Struct:
    struct = Struct()
    struct.update({name: list(value) if isinstance(value, tuple) else value for name, value in values.items()})
    return struct


def _max_prompt_len(info: EngineInfo) -> int:
    """Returns the longest prompt that leaves room for one new token."""
    return min(info.limits.context_length, info.limits.pool_tokens) - 1


def _first_id(value: Any) -> int:
    """Returns the first of a model's ids. Some models name several, some none, for which the protocol has only 0."""
    if isinstance(value, list):
        value = value[0] if value else None
    return value if isinstance(value, int) else 0


def _read_json(path: Path) -> dict[str, Any]:
    """Returns {} for a missing file: dummy weights need only a configuration, and some models bring no defaults."""
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text())
    return content
