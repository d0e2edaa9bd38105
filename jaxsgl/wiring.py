"""Builds an engine and a scheduler for it, and where flags ask for one, the prefill or decode side in front of that.

The engine process and the offline `LLM` call it; it knows no front end. Prefixes of the host tier are kept between two
starts in a file whose name stands for the weights, their formats and the layout of pages: what another model or format
has computed is never found.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import jax
import numpy as np

from jaxsgl.cache import kv_file
from jaxsgl.cache.host_pages import HostPages, allocate_arena, pages_per_turn
from jaxsgl.cache.tiers import HostTier
from jaxsgl.config.engine import EngineConfig, SchedulingConfig
from jaxsgl.constraints.trial import Trial
from jaxsgl.engine.adapters import EngineAdapters
from jaxsgl.engine.engine import Engine
from jaxsgl.engine.stages.engine import StagedEngine
from jaxsgl.engine.start.memory import free_host_bytes
from jaxsgl.engine.weight_store import EngineWeightStore
from jaxsgl.errors import ConfigError, InvalidRequest
from jaxsgl.hosts.group import Alone, Hosts
from jaxsgl.hosts.passing import meet_neighbours
from jaxsgl.mask_mark import NoMark
from jaxsgl.messages.orders import LoadAdapter
from jaxsgl.models import Params
from jaxsgl.requests.grammar import Grammar
from jaxsgl.requests.grammar_work import Mark
from jaxsgl.scheduler.grammars.queue import GrammarQueue, Grammars, NoGrammars, grammars_of_ranks
from jaxsgl.scheduler.orders.adapters import load
from jaxsgl.scheduler.ranks import RankedScheduler
from jaxsgl.scheduler.request_table import AllAtOnce, InTurns
from jaxsgl.scheduler.resources.host_tier import LoadRule
from jaxsgl.scheduler.scheduler import Scheduler
from jaxsgl.scheduler.served_engine import FixedWeights, StepsOnly
from jaxsgl.scheduler.serving import AnyScheduler, Serving
from jaxsgl.scheduler.speculation.pace import MeasuredCosts, StepCosts
from jaxsgl.scheduler.speculation.proposing import Drafters
from jaxsgl.scheduler.state import RetractAlso
from jaxsgl.weights import resolve_model_folder, weight_files
from pallas_kernels.own_folder import own_folder

if TYPE_CHECKING:
    from jaxsgl.constraints.compiler import Compiler, LlMatcher

logger = logging.getLogger(__name__)

# That a device multiplies while it reads the weights once: a first guess, until steps are measured.
FREE_TOKENS, FREE_TOKENS_CPU = 128, 16
RETRACT_VARIABLE = "JAXSGL_TEST_RETRACT"  # for tests


def build(
    config: EngineConfig, limited: bool = True, mark: Mark = NoMark(), hosts: Hosts = Alone()
) -> tuple[AnyEngine, AnyScheduler]:
    """Loads the model and compiles every bucket (seconds to minutes). Raises `StartupError`.

    Args:
      config: flags.
      limited: whether the flags that limit the queue and the time of requests hold, as in a server. Offline use, whose
        caller waits for all answers, sets them aside.
      mark: notes whose grammar is worked on.
      hosts: those that share the model.
    """
    retract_every()  # fails now, not after minutes
    if config.disaggregation.is_on and not limited:
        raise ConfigError("--disaggregation-mode needs servers behind a gateway, see docs/scale-out.md")
    if config.dp_size > config.num_ranks and not limited:
        raise ConfigError(
            f"--dp-size {config.dp_size} replicas need a server, see docs/scale-out.md: LLM runs one; for ranks of one "
            "engine add --enable-dp-attention"
        )
    if config.hosts.are_several and not limited:
        raise ConfigError("--nnodes needs servers, see docs/scale-out.md: LLM runs on one host")
    engine = build_engine(config, hosts)
    return engine, build_scheduler(config, engine, limited, mark=mark)


class ServedStages(StepsOnly):
    """A `StagedEngine` with the parts that the loop uses; its weights stay as they were loaded.

    Attributes:
      arch, capacity, buckets, info: as those of `Engine`.
    """

    def __init__(self, stages: StagedEngine, weight_version: str) -> None:
        super().__init__(stages, FixedWeights("while stages share a model (--pp-size): start anew", weight_version))
        self.arch, self.capacity, self.buckets, self.info = stages.arch, stages.capacity, stages.buckets, stages.info
        self.close = stages.close


AnyEngine: TypeAlias = Engine | ServedStages


def whole(engine: AnyEngine) -> Engine:
    """`engine` for what needs all layers in one place. Raises `ConfigError` if it has stages."""
    if not isinstance(engine, Engine):
        raise ConfigError("this does not work with pipeline stages (--pp-size): leave them out")
    return engine


def build_engine(config: EngineConfig, hosts: Hosts = Alone()) -> AnyEngine:
    """Loads the model and compiles every bucket. Raises `StartupError`, on all `hosts` if weights differ."""
    if config.has_stages:
        return ServedStages(_stages(config, hosts), config.weight_version)
    engine = Engine(config, moves_pages=config.disaggregation.is_on or config.host_kv.is_on, hosts=hosts)
    if hosts.size > 1:
        digest = f"those of norms {norms_digest(engine.weight_store.params):08x}"
        hosts.same("the weights", digest, "give all hosts the same checkpoint")
    return engine


def _stages(config: EngineConfig, hosts: Hosts) -> StagedEngine:
    """The stages of this host, and the way to those of other `hosts`."""
    neighbours = meet_neighbours(config.hosts, hosts)
    if hosts.size > 1 and config.load_format != "dummy":
        files = files_digest(resolve_model_folder(config.model, config.revision))
        hosts.same("the weights", files, "give all hosts the same checkpoint")
    return StagedEngine(config, hosts=hosts, neighbours=neighbours)


def build_scheduler(
    config: EngineConfig,
    engine: AnyEngine,
    limited: bool = True,
    former: AnyScheduler | None = None,
    mark: Mark = NoMark(),
) -> AnyScheduler:
    """A scheduler with an empty cache for `engine`; the first arguments are those of `build`.

    If it comes in the place of `former` it takes over its adapters, the memory of its host tier, and its seeds.
    """
    scheduling = replace(config.scheduling, enable_mixed_chunk=config.mixes_steps)
    if not limited:
        scheduling = replace(scheduling, queue_timeout_s=None, running_timeout_s=None)
    while engine.poll(wait=True):
        pass  # what a scheduler before this one has gathered
    tier, loads = _host_tier(config, engine, former)
    grammars = _grammars(config, scheduling, engine, eagerly=limited)
    num_ranks, seed = config.num_ranks, seed_of_requests(config, is_server=limited)

    def of_rank(rank: int, grammars: Grammars) -> Scheduler:
        return Scheduler(
            engine.capacity,
            engine.buckets,
            engine.arch.eos_token_ids,
            scheduling,
            radix_cache=not config.disable_radix_cache and engine.arch.encoder is None,
            random_seed=seed + rank,
            max_queued_requests=-(-config.max_queued_requests // num_ranks) if limited else None,
            max_queued_tokens=-(-config.max_queued_tokens // num_ranks) if limited else None,
            retract_also=_retract_also(),
            tier=tier,
            loads=loads,
            max_loaded_loras=config.lora.max_loaded_loras,
            grammars=grammars,
            mark=mark,
            drafter_of=Drafters(config.speculation, engine.capacity.media),
            step_costs=_step_costs(engine),
            turns=InTurns(config.unread_steps + 1) if config.has_stages else AllAtOnce(),
        )

    scheduler: AnyScheduler
    if num_ranks > 1:
        each = enumerate(grammars_of_ranks(grammars, num_ranks))
        scheduler = RankedScheduler([of_rank(rank, own) for rank, own in each], grammars)
    else:
        scheduler = of_rank(0, grammars)
        _load_adapters(config, engine, scheduler, former)
    if former is not None:
        for own, of_former in zip(scheduler.ranks, former.ranks, strict=True):
            own.go_on_from(of_former)
    elif num_ranks == 1:
        _take_prefixes(config, engine, scheduler.ranks[0])
    return scheduler


def seed_of_requests(config: EngineConfig, is_server: bool) -> int:
    """The seed for requests that bring none: what the flag says, or of each process of a server another one.

    Else replicas, and servers behind a gateway, would give their first samples of a prompt alike.
    """
    drawn = secrets.randbits(31) if is_server else 0
    return drawn if config.random_seed is None else config.random_seed


def serving_of(config: EngineConfig, engine: AnyEngine, scheduler: AnyScheduler) -> Serving:
    """What stands at the mailbox: `scheduler`, or the side that flags ask for, whose wire is opened.

    Raises:
      ConfigError: the file of the secret can't be used.
      StartupError: the port can't be bound, or the transfer backend isn't installed.
    """
    flags = config.disaggregation
    if not flags.is_on:
        return scheduler
    engine = whole(engine)
    (scheduler,) = scheduler.ranks  # flags refuse more
    from jaxsgl.scheduler.disagg.decode_side import DecodeSide  # other servers know nothing of it
    from jaxsgl.scheduler.disagg.prefill_side import PrefillSide
    from jaxsgl.scheduler.disagg.rooms import RoomLimits
    from jaxsgl.transfer.frames import Geometry
    from jaxsgl.transfer.tcp import TcpWire

    layout, tower = engine.page_layout, engine.capacity.tower
    geometry = Geometry(
        layout.page_size,
        layout.dtype,
        layout.page_shape,
        layout.page_bytes,
        _model_name(config, engine),
        0 if tower is None else tower.row_bytes,
        flags.disaggregation_transfer_backend,
    )
    is_prefill = flags.disaggregation_mode == "prefill"
    listen = (flags.disaggregation_host or "127.0.0.1", flags.disaggregation_bootstrap_port) if is_prefill else None
    peer_timeout_s = flags.disaggregation_peer_timeout_s
    wire = TcpWire(flags.disaggregation_mode, geometry, listen, peer_timeout_s, flags.read_secret())
    if listen is not None:
        logger.info("decode servers reach this prefill server at %s:%d", listen[0], wire.port)
    limits = RoomLimits(
        layout.page_bytes,
        flags.staging_bytes,
        config.max_queued_requests,
        flags.disaggregation_bootstrap_timeout_s,
        config.max_queued_tokens,
        config.scheduling.queue_timeout_s,
    )
    kind = PrefillSide if is_prefill else DecodeSide
    return kind(scheduler, wire, layout, limits, version_of(engine.weight_store))


def version_of(store: EngineWeightStore) -> Callable[[], str]:
    """Gives the version of the weights of now, as prefill and decode servers compare it, with a digest of them.

    Without a name of its own a version is a count of updates, which two servers may have made of other weights.
    """

    @lru_cache(maxsize=1)
    def norms(num_updates: int) -> int:
        return norms_digest(store.params)

    norms(store.num_updates)  # now: weights may be released when a request comes
    return lambda: f"{store.weight_version} of norms {norms(store.num_updates):08x}"


def _model_name(config: EngineConfig, engine: Engine) -> str:
    """With what drafts for it: its part of a page is of use to the same weights alone, which are never updated."""
    name = f"{engine.arch.name}{_ropes(engine)}"
    if not config.speculation.is_from_weights:
        return name
    drafting = engine.programs.spec.drafting
    return f"{name} and {config.speculation.speculative_algorithm} with norms {norms_digest(drafting.params):08x}"


def _ropes(engine: AnyEngine) -> str:
    """What keys depend on besides weights: whether their ropes are for long contexts; "" if no rope has two forms."""
    long = ["long" if rope.is_long else "short" for rope in engine.arch.ropes if rope.long_factors]
    return f" and ropes for {', '.join(long)} contexts" if long else ""


def norms_digest(params: Params) -> int:
    """A digest of the decoder's norms, by which prefill and decode servers compare their weights.

    They are whole on each device and are never quantized, so it is the same under any mesh. Those of a vision tower are
    left out, which a decode server has not.
    """
    digest = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        if "norm" in name and not name.startswith("['visual']"):
            digest = zlib.crc32(np.asarray(leaf, dtype=np.float32).tobytes(), digest)
    return digest


def files_digest(folder: Path) -> str:
    """In words, what hosts with stages compare of weights: no two of them read the same tensors."""
    sizes = [f"{file.relative_to(folder)} {file.stat().st_size}" for file in weight_files(folder)]
    return f"{len(sizes)} files of names and sizes {zlib.crc32(' '.join(sizes).encode()):08x}"


def _load_adapters(config: EngineConfig, engine: AnyEngine, scheduler: Scheduler, former: AnyScheduler | None) -> None:
    """Loads the adapters that flags name, or those of the scheduler before this one. Raises `StartupError`."""
    table, store = scheduler.state.adapters, engine.adapters
    if store is None:
        return
    assert isinstance(store, EngineAdapters)
    if former is None:
        found = [(LoadAdapter(0, name, folder), store.stage(folder)) for name, folder in config.lora.adapters.items()]
    else:
        known = former.ranks[0].state.adapters.by_name.values()
        found = [(LoadAdapter(0, each.name, each.folder, each.pinned), store.kept(each.number)) for each in known]
        store.drop_all()
    for order, staged in found:
        load(table, store, order, staged)


def _grammars(
    config: EngineConfig, scheduling: SchedulingConfig, engine: AnyEngine, eagerly: bool
) -> GrammarQueue | NoGrammars:
    """Compiles grammars for the model that `engine` serves, each after a trial in a helper process.

    `eagerly` starts the helper and reads the vocabulary now, which holds Python's lock; otherwise with the first
    grammar. Without the package llguidance, all but grammars can be served.
    """
    if config.grammar_backend == "none":
        return NoGrammars()
    vocabulary = Path(engine.info.model_path), engine.arch.vocab_size, engine.arch.eos_token_ids
    trial = Trial(*vocabulary, scheduling.grammar_timeout)

    @cache
    def compiler() -> Compiler | InvalidRequest:
        try:
            from jaxsgl.constraints.compiler import Compiler

            return Compiler(*vocabulary)
        except InvalidRequest as error:
            return error
        except ModuleNotFoundError as error:
            return InvalidRequest(f"grammars can't be used: {error}")

    def prepare() -> None:
        if not isinstance(compiler(), InvalidRequest):
            trial.start()

    def compile(grammar: Grammar) -> LlMatcher:
        made = compiler()
        if isinstance(made, InvalidRequest):
            raise made
        return made.compile(grammar, trial.run(grammar))

    if eagerly:
        prepare()
    return GrammarQueue(compile, scheduling.grammar_timeout, prepare)


def _step_costs(engine: AnyEngine) -> StepCosts:
    """What says how many drafts pay on the device of `engine`."""
    buckets = engine.buckets
    if not buckets.verify_sizes:
        return StepCosts()
    free_tokens = FREE_TOKENS_CPU if engine.info.platform == "cpu" else FREE_TOKENS
    return MeasuredCosts(buckets.decode_sizes, buckets.verify_sizes, free_tokens)


def _host_tier(
    config: EngineConfig, engine: AnyEngine, former: AnyScheduler | None
) -> tuple[HostTier | None, LoadRule | None]:
    """The host tier that flags ask for, in the arena of the `former` scheduler's, if there was one.

    Raises `ConfigError` if the host has no memory for the arena.
    """
    host = config.host_kv
    if not host.is_on:
        return None, None
    engine = whole(engine)
    layout = engine.page_layout
    before = None if former is None else former.ranks[0].tier
    if before is not None:
        arena = before.host.arena
    else:
        arena = allocate_arena(layout.shape(1), layout.host_dtype, host, engine.capacity.num_pages, free_host_bytes())
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


def file_of_prefixes(config: EngineConfig, engine: Engine) -> Path | None:
    """The file of `--kv-file`, whether it is there or not; None without the flag.

    Raises `ConfigError` if the folder can't be made, or other users can write to it.
    """
    if config.host_kv.kv_file is None:
        return None
    try:
        folder = own_folder(Path(config.host_kv.kv_file).expanduser(), tighten=False)
    except OSError as error:
        raise ConfigError(f"--kv-file {config.host_kv.kv_file}: {error}; name a folder of your own") from None
    return folder / f"{engine.info.architecture}-{_fingerprint(config, engine)}.kv"


def _take_prefixes(config: EngineConfig, engine: AnyEngine, scheduler: Scheduler) -> None:
    """Fills the host tier with what the last start has kept."""
    tier = scheduler.tier
    path = None if tier is None else file_of_prefixes(config, whole(engine))
    if path is not None and tier is not None:
        kv_file.clear_unfinished(path.parent)
        start_s = time.monotonic()
        count = kv_file.load(tier.host, path, engine.capacity.page_size)
        logger.info("%d pages of prefixes found in %s, read in %.1f s", count, path, time.monotonic() - start_s)


def keep_prefixes(config: EngineConfig, engine: AnyEngine, scheduler: AnyScheduler) -> None:
    """Writes all that is cached to the file, as far as host memory holds it. A failure is logged."""
    tier = scheduler.ranks[0].tier  # of several ranks none has one
    path = None if tier is None else file_of_prefixes(config, whole(engine))
    if path is None or tier is None:
        return
    if not scheduler.ranks[0].cache.is_original or engine.weight_store.released:
        logger.warning("prefixes are not kept: the weights were exchanged or released since the start")
        return
    start_s = time.monotonic()
    try:
        scheduler.before_exit(engine)
        count = kv_file.save(tier.host, path, engine.capacity.page_size)
    except OSError as error:
        logger.error("prefixes are not kept: %s", error)
        return
    logger.info("%d pages of prefixes kept in %s, in %.1f s", count, path, time.monotonic() - start_s)


def _fingerprint(config: EngineConfig, engine: Engine) -> str:
    """Hashes what KV depends on. Files count as they were before the engine read them: others may lie there by now."""
    parts = [engine.page_layout.name, engine.info.dtype, str(config.quantization), config.load_format]
    parts.append("weight only" if config.weight_only else "")
    if config.disaggregation.disaggregation_mode == "decode":
        parts.append("of prefill servers")  # which may compute in other formats
    parts.append(str(config.made_up_seed) if config.load_format == "dummy" else "")
    parts.append(_ropes(engine))
    parts.append(engine.files)
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()
