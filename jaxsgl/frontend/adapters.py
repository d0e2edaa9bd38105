"""LoRA adapters as the front end sees them: their orders, and which one a request names. The same for all protocols.

The engines own the adapters; their load has the names that requests may use. Knows no protocol: the endpoints of
http/sglang/adapters.py and the rpcs of grpc/sglang/ call it.
"""

from __future__ import annotations

import msgspec

from jaxsgl.config.server import ANY_MODEL, ServerConfig
from jaxsgl.errors import EngineUnavailable, InvalidRequest, NotFound
from jaxsgl.frontend.access import adapter_folder
from jaxsgl.frontend.engines.link import ANSWER_LIMIT_S, UPDATE_LIMIT_S
from jaxsgl.frontend.engines.replicas import Replicas
from jaxsgl.frontend.generation import FrontEnd
from jaxsgl.messages.orders import Answer, ListAdapters, LoadAdapter, LoadedAdapter, UnloadAdapter


async def load(
    engine: Replicas,
    config: ServerConfig,
    name: str,
    folder: str,
    *,
    pinned: bool,
    replace: bool = False,
    alias: str = "",
) -> Answer:
    """Has all replicas load an adapter; see `LoadAdapter`.

    Raises `InvalidRequest` for a name that models have, and as `adapter_folder`.
    """
    folder = adapter_folder(config, folder)
    taken = (ANY_MODEL, config.model_name, config.engine.model)
    for given in (name, alias):
        if given in taken:
            raise InvalidRequest(f"the name of the adapter is {given}, which is the model's: choose another")
    return await engine.ask(lambda number: LoadAdapter(number, name, folder, pinned, replace, alias), UPDATE_LIMIT_S)


async def unload(engine: Replicas, name: str) -> Answer:
    """Has all replicas forget an adapter, once the requests that have it have ended."""
    return await engine.ask(lambda number: UnloadAdapter(number, name), UPDATE_LIMIT_S)


async def loaded(engine: Replicas) -> list[LoadedAdapter]:
    """The adapters that requests may name, as a replica lists them. Raises `EngineUnavailable`."""
    if not engine.load.adapters:
        return []
    answers = await engine.ask_each(lambda _, number: ListAdapters(number), ANSWER_LIMIT_S)
    text = next((answer.text for answer in answers.values() if answer.ok), None)
    if text is None:
        raise EngineUnavailable(engine.together(answers).text)
    names = set(engine.load.adapters)
    return [adapter for adapter in msgspec.json.decode(text, type=list[LoadedAdapter]) if adapter.name in names]


def adapter_of(front_end: FrontEnd, model: str | None, lora_path: str | None = None) -> str:
    """Returns the name of the adapter that a body names as its model or in `lora_path`, "" for none.

    Raises `NotFound` unless `model` is served; naming no model is fine. Raises `InvalidRequest` for a `lora_path` that
    is not loaded or contradicts `model`.
    """
    loaded = front_end.engine.load.adapters
    adapter = _adapter_named(front_end.engine, front_end.config, model)
    if adapter is None:
        served = ", ".join((front_end.config.model_name, *loaded))
        error = NotFound(f"the model {model} does not exist: here {'is' if not loaded else 'are'} {served:.500}")
        error.param, error.code = "model", "model_not_found"
        raise error
    if not lora_path:
        return adapter
    if lora_path not in loaded:
        raise InvalidRequest(
            f"lora_path {lora_path:.256} is not loaded: loaded are {', '.join(loaded) or 'no adapters':.500}"
        )
    if adapter not in ("", lora_path):
        raise InvalidRequest(f"model names the adapter {adapter}, but lora_path {lora_path}: send one of them")
    return lora_path


def adapters_of(
    front_end: FrontEnd, model: str | None, lora_path: str | list[str | None] | None, num_prompts: int
) -> list[str]:
    """Returns the adapter of each prompt, as `adapter_of`, where `lora_path` may have an entry for each.

    Raises `InvalidRequest` for another number of entries, and as `adapter_of`.
    """
    each = lora_path if isinstance(lora_path, list) else [lora_path] * num_prompts
    if len(each) != num_prompts:
        raise InvalidRequest(f"lora_path has {len(each)} entries for {num_prompts} prompts: send one per prompt")
    return [adapter_of(front_end, model, name) for name in each]


def _adapter_named(engine: Replicas, config: ServerConfig, model: str | None) -> str | None:
    """The adapter that stands for a model, "" for the model itself, or None if there is nothing of that name.

    As in SGLang, `model:adapter` is another name of an adapter.
    """
    if model in (None, "", ANY_MODEL, config.model_name, config.engine.model):
        return ""
    assert model is not None
    for name in (model, model.removeprefix(f"{config.model_name}:")):
        if name in engine.load.adapters:
            return name
    return None
