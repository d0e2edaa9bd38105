"""A link to an engine whose part the test plays."""

from __future__ import annotations

from jaxsgl.config import EngineConfig
from jaxsgl.frontend.engine_link import EngineLink
from jaxsgl.frontend.reply_stream import MAX_UNREAD
from jaxsgl.logs import LogStyle
from jaxsgl.messages import ToEngine


class PlayedLink(EngineLink):
    """Has no process: `sent` holds the messages to the engine, and the test calls `receive` with the engine's."""

    def __init__(self, max_unread: int = MAX_UNREAD) -> None:
        super().__init__(EngineConfig(), LogStyle("info", "text"), max_unread=max_unread)
        self.sent: list[ToEngine] = []

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)
