"""GetModelInfo and GetServerInfo: what is served, and how the server was started.

Reads the model folder's JSON files for what the engine doesn't need to know. Nothing secret may come in here: of the
server's own flags only those named below are told. service.py calls it.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp
from smg_grpc_proto import sglang_scheduler_pb2 as pb

import jaxsgl
from jaxsgl.config import ServerConfig
from jaxsgl.frontend.generation import ServedModel
from jaxsgl.messages import EngineInfo

_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def model_info(model: ServedModel, config: ServerConfig) -> pb.GetModelInfoResponse:
    """What is served."""
    info, limits = model.info, model.info.limits
    folder = Path(info.model_path)
    of_model = _read_json(folder / "config.json")
    defaults = _read_json(folder / "generation_config.json")
    told = {name: defaults[name] for name in _SAMPLING_DEFAULTS if defaults.get(name) is not None}
    return pb.GetModelInfoResponse(
        model_path=info.model_path,
        tokenizer_path=info.model_path if model.tokenizer.exists else "",
        is_generation=True,
        served_model_name=config.model_name,
        max_context_length=limits.context_length,
        max_req_input_len=_max_prompt_len(info),
        vocab_size=limits.vocab_size,
        model_type=of_model.get("model_type") or "",
        architectures=of_model.get("architectures") or [info.architecture],
        eos_token_ids=info.eos_token_ids,
        pad_token_id=_first_id(of_model.get("pad_token_id")),
        bos_token_id=_first_id(of_model.get("bos_token_id")),
        default_sampling_params_json=json.dumps(told) if told else "",
    )


def server_info(
    model: ServedModel, config: ServerConfig, start_s: float, num_open: int, heard_s: float, paused: bool = False
) -> pb.GetServerInfoResponse:
    """How the server was started and how long it runs; times in seconds since 1970."""
    info = model.info
    response = pb.GetServerInfoResponse(
        server_args=_struct(_server_args(info, config)),
        scheduler_info=_struct(
            {
                "max_total_num_tokens": info.limits.pool_tokens,
                "max_req_input_len": _max_prompt_len(info),
                "is_generation": True,
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


def _server_args(info: EngineInfo, config: ServerConfig) -> dict[str, Any]:
    """All of the engine's flags under their names, and under SGLang's what gateways look for."""
    flags = dataclasses.asdict(config.engine)
    del flags["model"]
    return flags | {
        "model_path": info.model_path,
        "tokenizer_path": info.model_path,
        "served_model_name": config.model_name,
        "tp_size": 1,
        "dp_size": 1,
        "pp_size": 1,
        "context_length": info.limits.context_length,
        "max_total_tokens": info.limits.pool_tokens,
        "max_running_requests": info.max_running_requests,
        "page_size": info.page_size,
        "dtype": info.dtype,
        "attention_backend": info.attention_backend,
        "disaggregation_mode": "null",
    }


def _struct(values: dict[str, Any]) -> Struct:
    struct = Struct()
    struct.update({name: list(value) if isinstance(value, tuple) else value for name, value in values.items()})
    return struct


def _max_prompt_len(info: EngineInfo) -> int:
    """One new token must have room too."""
    return min(info.limits.context_length, info.limits.pool_tokens) - 1


def _first_id(value: Any) -> int:
    """Some models name several ids, some none, for which the protocol has only 0."""
    if isinstance(value, list):
        value = value[0] if value else None
    return value if isinstance(value, int) else 0


def _read_json(path: Path) -> dict[str, Any]:
    """{} for a file that isn't there: dummy weights need only a configuration, and some models bring no defaults."""
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text())
    return content
