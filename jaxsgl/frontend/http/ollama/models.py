"""What Ollama's API says of models: /api/tags, /api/show, /api/ps and /api/version; which one a body names.

Models are chosen when the server starts, so that orders to pull, make and delete some are refused. routes.py adds the
endpoints.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Self

from pydantic import model_validator

from jaxsgl.errors import InvalidRequest, NotFound, Unsupported
from jaxsgl.frontend.adapters import adapter_of
from jaxsgl.frontend.generation import FrontEnd, ServedModel
from jaxsgl.frontend.http.bodies import Body
from jaxsgl.text.infill import spelling_of
from jaxsgl.text.tokenizer import is_gguf

API_VERSION = "0.12.11"  # the release of Ollama whose fields are known here: clients compare it, not jaxsgl's
LATEST = ":latest"  # the tag of names without one
NEVER = "2300-01-01T00:00:00Z"  # when the model is unloaded; Ollama's programs say "forever"
_PARAMETERS = {"repetition_penalty": "repeat_penalty"}


def _infills(model: ServedModel) -> bool:
    with contextlib.suppress(InvalidRequest):
        return model.tokenizer.exists and bool(spelling_of(model.tokenizer))
    return False


_ABILITIES: Mapping[str, Callable[[ServedModel], bool]] = {
    "completion": lambda model: model.info.limits.generates,
    "tools": lambda model: model.dialect.has_calls or model.dialect.template is not None,
    "thinking": lambda model: (
        model.dialect.reasoning is not None or model.dialect.is_harmony or model.dialect.template is not None
    ),
    "vision": lambda model: model.media is not None,
    "insert": _infills,
    "embedding": lambda model: model.info.limits.pooling is not None,
}


class ShowRequest(Body):
    """Body of /api/show; `name` is an older word for `model`."""

    model: str | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _in_newer_words(self) -> Self:
        self.model = self.model or self.name
        return self


def named(front_end: FrontEnd, model: str | None, lora_path: str | None = None) -> str:
    """Returns the adapter that a body names, as `adapter_of` does; a name with and without `:latest` is the same."""
    try:
        return adapter_of(front_end, model, lora_path)
    except NotFound:
        assert model is not None
        other = model.removesuffix(LATEST) if model.endswith(LATEST) else model + LATEST
        with contextlib.suppress(NotFound):
            return adapter_of(front_end, other, lora_path)
        raise


def check_can(front_end: FrontEnd, **wanted: bool) -> None:
    """Raises `InvalidRequest` for an ability that is wanted and that the model lacks, in words that clients know."""
    for ability, is_wanted in wanted.items():
        if is_wanted and not _ABILITIES[ability](front_end.generator.model):
            raise InvalidRequest(
                f"{front_end.config.model_name} does not support {ability}: ask without it, or another model"
            )


def tags(front_end: FrontEnd, started_at: str) -> dict[str, Any]:
    """Returns the model and its adapters. Raises `EngineUnavailable` until the engine is ready."""
    model = front_end.generator.model
    names = (front_end.config.model_name, *front_end.engine.load.adapters)
    sizes = {"modified_at": started_at, "size": model.info.weight_bytes}
    return {"models": [_card(front_end, name) | sizes for name in names]}


def running(front_end: FrontEnd) -> dict[str, Any]:
    """Returns the model, which is always loaded, with the memory that it takes. Otherwise as `tags`."""
    info = front_end.generator.model.info
    num_bytes = info.weight_bytes + info.kv_bytes
    loaded = {
        "expires_at": NEVER,
        "size": num_bytes,
        "size_vram": 0 if info.platform == "cpu" else num_bytes,
        "context_length": info.limits.context_length,
    }
    return {"models": [_card(front_end, front_end.config.model_name) | loaded]}


def shown(front_end: FrontEnd, body: ShowRequest, started_at: str) -> dict[str, Any]:
    """Returns what clients must know of a model before they use it. Raises `NotFound`, and as `tags`."""
    adapter = named(front_end, body.model)
    model = front_end.generator.model
    info = model.info
    parameters = {_PARAMETERS.get(name, name): value for name, value in model.sampling_defaults.items()}
    parameters["num_ctx"] = info.limits.context_length
    return {
        "modelfile": f"FROM {front_end.config.engine.model}\n",
        "parameters": "\n".join(f"{name} {value}" for name, value in parameters.items()),
        "template": model.tokenizer.chat_template or "",
        "details": _details(front_end, adapter),
        "model_info": {
            "general.architecture": info.architecture,
            f"{info.architecture}.context_length": info.limits.context_length,
            f"{info.architecture}.vocab_size": info.limits.vocab_size,
        },
        "capabilities": [ability for ability, has in _ABILITIES.items() if has(model)],
        "modified_at": started_at,
    }


def refuse_order(path: str) -> None:
    """Raises `Unsupported`."""
    raise Unsupported(
        f"{path} is not served: a server has the model that it was started with (--model, and --lora-paths for "
        "adapters); GET /api/tags lists what may be named"
    )


def _card(front_end: FrontEnd, name: str) -> dict[str, Any]:
    adapter = "" if name == front_end.config.model_name else name
    return {
        "name": name,
        "model": name,
        "digest": _digest(front_end, name),
        "details": _details(front_end, adapter),
    }


def _digest(front_end: FrontEnd, name: str) -> str:
    """Returns what changes with the model, its path and the version of its weights; `ollama list` needs one."""
    told = (name, front_end.config.engine.model, front_end.engine.load.weight_version)
    return hashlib.sha256("\0".join(told).encode()).hexdigest()


@functools.cache
def _format_of(model: str) -> str:
    return "gguf" if is_gguf(model) else "safetensors"


def _details(front_end: FrontEnd, adapter: str) -> dict[str, Any]:
    family = front_end.generator.model.info.architecture
    return {
        "parent_model": front_end.config.model_name if adapter else "",
        "format": _format_of(front_end.config.engine.model),
        "family": family,
        "families": [family],
        "parameter_size": "",  # which the front end doesn't know, and neither how weights are quantized
        "quantization_level": "",
    }
