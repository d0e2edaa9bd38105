"""Puts engine and scheduler together. Used by the engine process and by the offline `LLM`; knows no front end."""

from __future__ import annotations

from jaxsgl.config import EngineConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.scheduler.scheduler import Scheduler


def build(config: EngineConfig, max_queued_requests: int | None) -> tuple[Engine, Scheduler]:
    """Loads the model and compiles every bucket (seconds to minutes). Raises `StartupError`.

    Args:
      config: flags.
      max_queued_requests: the config's for a server; None where whoever asks waits for all answers anyway.
    """
    engine = Engine(config)
    return engine, build_scheduler(config, engine, max_queued_requests)


def build_scheduler(config: EngineConfig, engine: Engine, max_queued_requests: int | None) -> Scheduler:
    """A scheduler with an empty cache for `engine`; the arguments are those of `build`."""
    return Scheduler(
        engine.capacity,
        engine.buckets,
        engine.arch.eos_token_ids,
        config.scheduling,
        radix_cache=not config.disable_radix_cache,
        random_seed=config.random_seed,
        max_queued_requests=max_queued_requests,
    )
