"""How bodies are read: strictly. What is no JSON text by RFC 8259 is refused, before a schema looks at it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response


class _StrictRequest(Request):
    """Reads its JSON with pydantic's parser: no NaN, no lone surrogates, at most 200 levels, numbers of 4300 digits.

    Python's own takes the first two, which then fail where a text is encoded or an answer written.
    """

    async def json(self) -> Any:
        """The body. Raises `ValueError`."""
        return from_json(await self.body(), allow_inf_nan=False)


class StrictJson(APIRoute):
    """A route whose body is read so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As FastAPI's, on a stricter request."""
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly
