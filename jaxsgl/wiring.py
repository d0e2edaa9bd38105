"""Builds an engine and a scheduler for it. The engine process and the offline `LLM` call it; it knows no front end."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

from jaxsgl import kept_prefixes
from jaxsgl.cache.arena import allocate, pages_per_turn
from jaxsgl.cache.host_pages import HostPages
from jaxsgl.cache.tiers import HostTier
from jaxsgl.config.engine import EngineConfig, SchedulingConfig
from jaxsgl.constraints.compiler import Compiler, LlMatcher
from jaxsgl.constraints.trial import Trial
from jaxsgl.engine.engine import Engine
from jaxsgl.engine.memory import free_host_bytes
from jaxsgl.errors import ConfigError, InvalidRequest
from jaxsgl.mask_mark import NoMark
from jaxsgl.messages.orders import LoadAdapter
from jaxsgl.requests.grammar import Grammar
from jaxsgl.scheduler.apply import Mark
from jaxsgl.scheduler.grammar_queue import GrammarQueue, NoGrammars
from jaxsgl.scheduler.orders.adapters import load
from jaxsgl.scheduler.resources.host_tier import LoadRule
from jaxsgl.scheduler.scheduler import Scheduler
from jaxsgl.scheduler.state import RetractAlso

logger = logging.getLogger(__name__)

RETRACT_VARIABLE = "JAXSGL_TEST_RETRACT"  # for tests


def build(config: EngineConfig, limited: bool = True, mark: Mark = NoMark()) -> tuple[Engine, Scheduler]:
    """Loads the model and compiles every bucket (seconds to minutes). Raises `StartupError`.

    Args:
      config: flags.
      limited: whether the flags that limit the queue and the time of requests hold, as in a server. Offline use, whose
        caller waits for all answers, sets them aside.
      mark: notes whose mask is being made.
    """
    retract_every()  # fails now, not after minutes
    engine = Engine(config, moves_pages=config.disaggregation.is_on or config.host_kv.is_on)
    return engine, build_scheduler(config, engine, limited, mark=mark)


def build_scheduler(
    config: EngineConfig,
    engine: Engine,
    limited: bool = True,
    former: Scheduler | None = None,
    mark: Mark = NoMark(),
) -> Scheduler:
    """A scheduler with an empty cache for `engine`; the first arguments are those of `build`.

    It takes over the adapters of `former`, if it comes in the place of that one.
    """
    scheduling = config.scheduling
    if not limited:
        scheduling = replace(scheduling, queue_timeout_s=None, running_timeout_s=None)
    make: Callable[..., Scheduler] = Scheduler
    if config.disaggregation.is_on:
        if not limited:
            raise ConfigError("--disaggregation-mode needs servers behind a gateway, see docs/scale-out.md")
        from jaxsgl.leg_wiring import make_leg_scheduler  # other servers know nothing of it

        make = make_leg_scheduler(config, engine)
    while engine.poll(wait=True):
        pass  # what a scheduler before this one has gathered
    tier, loads = _host_tier(config, engine)
    grammars: GrammarQueue | NoGrammars = NoGrammars()
    if config.grammar_backend != "none":
        grammars = _grammars(scheduling, engine, eagerly=limited)
    scheduler = make(
        engine.capacity,
        engine.buckets,
        engine.arch.eos_token_ids,
        scheduling,
        radix_cache=not config.disable_radix_cache,
        random_seed=config.random_seed,
        max_queued_requests=config.max_queued_requests if limited else None,
        max_queued_tokens=config.max_queued_tokens if limited else None,
        retract_also=_retract_also(),
        tier=tier,
        loads=loads,
        max_loaded_loras=config.lora.max_loaded_loras,
        grammars=grammars,
        mark=mark,
    )
    _load_adapters(config, engine, scheduler, former)
    kept_prefixes.take(config, engine, scheduler)
    return scheduler


def _load_adapters(config: EngineConfig, engine: Engine, scheduler: Scheduler, former: Scheduler | None) -> None:
    """Loads the adapters that flags name, or those of the scheduler before this one. Raises `StartupError`."""
    table, store = scheduler.state.adapters, engine.adapters
    if store is None:
        return
    if former is None:
        found = [(LoadAdapter(0, name, folder), store.stage(folder)) for name, folder in config.lora.adapters.items()]
    else:
        known = former.state.adapters.by_name.values()
        found = [(LoadAdapter(0, each.name, each.folder, each.pinned), store.kept(each.number)) for each in known]
        store.drop_all()
    for order, staged in found:
        load(table, store, order, staged)


def _grammars(scheduling: SchedulingConfig, engine: Engine, eagerly: bool) -> GrammarQueue:
    """Compiles grammars for the model that `engine` serves, each after a trial in a helper process.

    `eagerly` starts the helper and reads the vocabulary now, which holds Python's lock; otherwise with the first
    grammar.
    """
    vocabulary = Path(engine.info.model_path), engine.arch.vocab_size, engine.arch.eos_token_ids
    trial = Trial(*vocabulary, scheduling.grammar_timeout)

    @cache
    def compiler() -> Compiler | InvalidRequest:
        try:
            return Compiler(*vocabulary)
        except InvalidRequest as error:
            return error

    def prepare() -> None:
        if isinstance(compiler(), Compiler):
            trial.start()

    def compile(grammar: Grammar) -> LlMatcher:
        made = compiler()
        if isinstance(made, InvalidRequest):
            raise made
        return made.compile(grammar, trial.run(grammar))

    if eagerly:
        prepare()
    return GrammarQueue(compile, scheduling.grammar_timeout, prepare)


def _host_tier(config: EngineConfig, engine: Engine) -> tuple[HostTier | None, LoadRule | None]:
    """The tier that flags ask for. Raises `ConfigError` if there is no memory for it."""
    host = config.host_kv
    if not host.is_on:
        return None, None
    layout = engine.page_layout
    arena = allocate(layout.shape(1), layout.host_dtype, host, engine.capacity.num_pages, free_host_bytes())
    logger.info(
        "host memory holds %d pages of KV, %.2f GiB, beside the %d of the pool",
        len(arena), arena.nbytes / 2**30, engine.capacity.num_pages - 1,
    )  # fmt: skip
    tier = HostTier(HostPages(arena), host.host_kv_write_policy, pages_per_turn(layout.page_bytes))
    return tier, LoadRule(engine.load_token_s, host.host_kv_load_timeout_s)


def retract_every() -> int | None:
    """Number of steps after which a test run retracts a request without need; None: never.

    Raises:
      ConfigError: the variable is set to something other than a number of steps.
    """
    text = os.environ.get(RETRACT_VARIABLE, "")
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise ConfigError(f"{RETRACT_VARIABLE} is {text!r}, but must be a number of steps, 1 and more; or unset it")
    return int(text)


def _retract_also() -> RetractAlso | None:
    steps = retract_every()
    if steps is None:
        return None
    from jaxsgl.testing.engine import RetractEvery

    return RetractEvery(steps)
