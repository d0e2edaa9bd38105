"""A link to an engine whose part the test plays, and a front end on it."""

from __future__ import annotations

from concurrent.futures import Executor

from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.features import ALL_IN_ONE, DisaggregationConfig
from jaxsgl.config.server import ServerConfig
from jaxsgl.frontend.access import Access
from jaxsgl.frontend.engines.link import MAX_UNREAD, EngineLink
from jaxsgl.frontend.engines.replicas import Replicas
from jaxsgl.frontend.generation import FrontEnd, Generator, ServedModel
from jaxsgl.frontend.metrics.measurements import Metrics
from jaxsgl.frontend.profiles import Profiles
from jaxsgl.messages.orders import ToMailbox


class PlayedLink(EngineLink):
    """Has no process: `sent` holds the messages to the engine, and the test calls `receive` with the engine's."""

    def __init__(self, max_unread: int = MAX_UNREAD) -> None:
        super().__init__(max_unread=max_unread)
        self.sent: list[ToMailbox] = []

    def send(self, message: ToMailbox) -> None:
        self.sent.append(message)


def front_end_of(link: EngineLink, threads: Executor, model: ServedModel, mode: str = ALL_IN_ONE) -> FrontEnd:
    """A front end that serves `model`, with --disaggregation-mode `mode`."""
    config = ServerConfig(EngineConfig(disaggregation=DisaggregationConfig(mode)), port=0, grpc_port=0)
    engine = Replicas([link])
    metrics = Metrics(lambda: link.load)
    generator = Generator(engine, threads, metrics, timeout_s=600.0, mode=mode)
    generator.serve(model)
    return FrontEnd(config, Access(config), engine, generator, metrics, Profiles(config, engine))
