"""A client's HTTP connection: uvicorn's protocol, and what that one leaves unbounded. server.py hands it to uvicorn."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class Connection(HttpToolsProtocol):
    """Lets an answer break the connection, as `scope["jaxsgl.abort"]`: closing it would wait for a reader for ever."""

    def on_message_begin(self) -> None:
        """A request starts."""
        super().on_message_begin()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope["jaxsgl.abort"] = self.transport.abort
