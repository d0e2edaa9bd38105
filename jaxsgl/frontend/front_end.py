"""What the handlers of every protocol are given. A value that server.py puts together; it does nothing itself."""

from __future__ import annotations

from dataclasses import dataclass

from jaxsgl.config import ServerConfig
from jaxsgl.frontend.engine_client import EngineClient
from jaxsgl.frontend.generation import Generator
from jaxsgl.frontend.metrics import Metrics
from jaxsgl.frontend.throughput import Throughput
from jaxsgl.frontend.watchdog import Watchdog


@dataclass(frozen=True)
class FrontEnd:
    """The parts of a front end.

    Attributes:
      config: flags.
      engine: open calls, commands and the load.
      generator: prompts to pieces of text; knows the model.
      metrics: what is counted and timed.
      throughput: how fast the engine works now.
      watchdog: whether requests make sense now; what health endpoints tell.
    """

    config: ServerConfig
    engine: EngineClient
    generator: Generator
    metrics: Metrics
    throughput: Throughput
    watchdog: Watchdog
