"""A tiny engine with random weights, and the plain model that judges it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.engine import Engine
from tests.engine.driving import Plain

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 101,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "dtype": "float32",
    "eos_token_id": 1,
}
ConfigMaker = Callable[..., EngineConfig]


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> ConfigMaker:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL))

    def make(**changes: Any) -> EngineConfig:
        settings: dict[str, Any] = {
            "model": str(folder),
            "load_format": "dummy",
            "page_size": 4,
            "max_running_requests": 4,
            "max_total_tokens": 256,
            "chunked_prefill_size": 16,
            "decode_buckets": (4,),
            "extend_buckets": (16,),
            "compilation_cache_dir": "",
        }
        return EngineConfig(**{**settings, **changes})

    return make


@pytest.fixture(scope="session")
def engine(tiny_config: ConfigMaker) -> Iterator[Engine]:
    """An engine that tests share: each test writes the pages that it reads."""
    engine = Engine(tiny_config(), progress=False)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def plain(tiny_config: ConfigMaker) -> Plain:
    config = tiny_config()
    return Plain(Path(config.model), config.made_up_seed)
