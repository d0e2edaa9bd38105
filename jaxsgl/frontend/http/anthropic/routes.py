"""The endpoints of Anthropic's API; app.py includes the router. Its errors have Anthropic's shape: errors.py."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from jaxsgl.frontend.adapters import adapter_of
from jaxsgl.frontend.generation import FrontEnd
from jaxsgl.frontend.http.anthropic.messages import answer_messages, count_tokens
from jaxsgl.frontend.http.anthropic.schemas import CountTokensRequest, MessagesRequest
from jaxsgl.frontend.http.bodies import StrictJson
from jaxsgl.frontend.http.calls import while_connected


def router(front_end: FrontEnd) -> APIRouter:
    """Returns the endpoints, for `front_end`."""
    router = APIRouter(route_class=StrictJson)

    @router.post("/v1/messages")
    @while_connected
    async def messages(body: MessagesRequest) -> Response:
        """The assistant's next turn, whole or streamed."""
        return await answer_messages(front_end, body, adapter_of(front_end, body.model, body.lora_path))

    @router.post("/v1/messages/count_tokens")
    @while_connected
    async def count(body: CountTokensRequest) -> Response:
        """How many tokens a conversation has."""
        adapter_of(front_end, body.model, body.lora_path)
        return await count_tokens(front_end, body)

    return router
