"""What the handlers of every protocol are given. A value that server.py puts together; it does nothing itself."""

from __future__ import annotations

from dataclasses import dataclass

from jaxsgl.config import ServerConfig
from jaxsgl.frontend.engine_client import EngineClient
from jaxsgl.frontend.generation import Generator


@dataclass(frozen=True)
class FrontEnd:
    """The parts of a front end.

    Attributes:
      config: flags.
      engine: open calls, commands and the load.
      generator: prompts to pieces of text; knows the model.
    """

    config: ServerConfig
    engine: EngineClient
    generator: Generator
