"""HTTP endpoints that load and unload LoRA adapters, SGLang's and under /v1 vLLM's; app.py includes the router.

Answers are SGLang's: `success`, `error_message` and the adapters that are loaded now, with status 400 if it was not
done. The engine does the work (scheduler/orders/adapters.py).
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from jaxsgl.frontend import adapters
from jaxsgl.frontend.generation import FrontEnd
from jaxsgl.frontend.http.bodies import StrictJson
from jaxsgl.frontend.http.calls import until_gone
from jaxsgl.frontend.http.sglang.schemas import LoadAdapterBody, UnloadAdapterBody
from jaxsgl.messages.orders import Answer


def router(front_end: FrontEnd) -> APIRouter:
    """Returns the endpoints, for `front_end`."""
    router = APIRouter(route_class=StrictJson, tags=["sglang"])
    engine, config = front_end.engine, front_end.config

    @router.post("/load_lora_adapter")
    @router.post("/v1/load_lora_adapter")
    async def load_lora_adapter(body: LoadAdapterBody, http: HttpRequest) -> Response:
        """Loads an adapter from a folder that the server can read; requests may name it once this is answered."""
        asked = adapters.load(
            engine,
            config,
            body.lora_name,
            body.lora_path,
            pinned=bool(body.pinned),
            replace=bool(body.load_inplace),
        )
        return await _told(front_end, await until_gone(http, asked))

    @router.post("/unload_lora_adapter")
    @router.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(body: UnloadAdapterBody, http: HttpRequest) -> Response:
        """Forgets an adapter, once the requests that have it have ended; further ones are refused at once."""
        return await _told(front_end, await until_gone(http, adapters.unload(engine, body.lora_name)))

    return router


async def _told(front_end: FrontEnd, answer: Answer) -> Response:
    loaded = {adapter.name: adapter.folder for adapter in await adapters.loaded(front_end.engine)}
    text = "" if answer.ok else answer.text
    told = {"success": answer.ok, "error_message": text, "loaded_adapters": loaded}
    return JSONResponse(told, 200 if answer.ok else 400)
