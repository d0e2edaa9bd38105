"""Builds scheduler and wire of a server that computes one leg of each request. wiring.py imports it if flags ask."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxsgl.batch.engine_ops import PageLayout
from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.errors import ConfigError
from jaxsgl.models import Params
from jaxsgl.scheduler.disagg.decode_scheduler import DecodeScheduler
from jaxsgl.scheduler.disagg.legs import LegScheduler
from jaxsgl.scheduler.disagg.prefill_scheduler import PrefillScheduler
from jaxsgl.scheduler.disagg.rooms import RoomLimits
from jaxsgl.transfer.frames import Geometry
from jaxsgl.transfer.tcp import TcpWire

logger = logging.getLogger(__name__)


def make_leg_scheduler(config: EngineConfig, engine: Engine) -> Callable[..., LegScheduler]:
    """Opens the wire; returns what makes the scheduler from the arguments of `Scheduler`.

    Raises:
      ConfigError: decode without a prefix cache, which is where pages arrive; the file of the secret can't be used.
      StartupError: the port can't be bound, or the transfer backend isn't installed.
    """
    flags = config.disaggregation
    if flags.disaggregation_mode == "decode" and config.disable_radix_cache:
        raise ConfigError(
            "--disaggregation-mode decode takes prompts into the prefix cache, which --disable-radix-cache switches "
            "off: leave that out"
        )
    layout = engine.page_layout
    kind: type[LegScheduler] = DecodeScheduler
    listen: tuple[str, int] | None = None
    if flags.disaggregation_mode == "prefill":
        kind = PrefillScheduler
        listen = flags.disaggregation_host or "127.0.0.1", flags.disaggregation_bootstrap_port
    wire = TcpWire(
        flags.disaggregation_mode,
        geometry_of(layout, engine, flags.disaggregation_transfer_backend),
        listen,
        flags.disaggregation_peer_timeout_s,
        flags.read_secret(),
    )
    if listen is not None:
        logger.info("decode servers reach this prefill server at %s:%d", listen[0], wire.port)
    limits = RoomLimits(
        layout.page_bytes, flags.staging_bytes, config.max_queued_requests, flags.disaggregation_bootstrap_timeout_s
    )

    def weight_version() -> str:
        return engine.residents.weight_version

    def make(*args: Any, **kwargs: Any) -> LegScheduler:
        scheduler = kind(*args, engine=engine, wire=wire, limits=limits, weight_version=weight_version, **kwargs)
        scheduler.wake_fd = wire.fileno()
        return scheduler

    return make


def geometry_of(layout: PageLayout, engine: Engine, backend: str) -> Geometry:
    """What another server must have in common with this one: pages, architecture, and the norms of the weights."""
    digest = norms_digest(engine.residents.params)
    return Geometry(
        layout.page_size,
        layout.dtype,
        layout.page_shape,
        layout.page_bytes,
        f"{engine.arch.name} with norms {digest:08x}",
        0 if engine.capacity.tower is None else engine.capacity.tower.row_bytes,
        backend,
    )


def norms_digest(params: Params) -> int:
    """A digest of the decoder's norms.

    They are whole on each device and are never quantized, so it is the same under any mesh. Those of a vision tower are
    left out, which a decode server has not.
    """
    digest = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        if "norm" in name and not name.startswith("['visual']"):
            digest = zlib.crc32(np.asarray(leaf, dtype=np.float32).tobytes(), digest)
    return digest
