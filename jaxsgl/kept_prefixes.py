"""The prefixes of the host tier between two starts: where they are kept, and under which name.

The name stands for the weights, their formats and the layout of pages: what another model or format has computed is
never found. wiring.py takes them at the start; engine_process.py and the offline `LLM` keep them at the end.
"""

from __future__ import annotations

import hashlib
import logging
import time
from pathlib import Path

from jaxsgl.cache import kv_file
from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.errors import ConfigError
from jaxsgl.scheduler.scheduler import Scheduler
from pallas_kernels.own_folder import own_folder

logger = logging.getLogger(__name__)


def path_of(config: EngineConfig, engine: Engine) -> Path | None:
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


def take(config: EngineConfig, engine: Engine, scheduler: Scheduler) -> None:
    """Fills the host tier with what the last start has kept."""
    path, tier = path_of(config, engine), scheduler.cache.tier
    if path is not None and tier is not None:
        kv_file.clear_unfinished(path.parent)
        start_s = time.monotonic()
        count = kv_file.load(tier.host, path, engine.capacity.page_size)
        logger.info("%d pages of prefixes found in %s, read in %.1f s", count, path, time.monotonic() - start_s)


def keep(config: EngineConfig, engine: Engine, scheduler: Scheduler) -> None:
    """Writes all that is cached to the file, as far as host memory holds it. A failure is logged."""
    path, tier = path_of(config, engine), scheduler.cache.tier
    if path is None or tier is None:
        return
    if not scheduler.cache.is_original or engine.residents.released:
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
    """Hashes what KV depends on. Files of weights count by name, size and time of change."""
    folder = Path(engine.info.model_path)
    parts = [engine.page_layout.name, engine.info.dtype, str(config.quantization), config.load_format]
    parts.append(str(config.random_seed) if config.load_format == "dummy" else "")
    parts.append((folder / "config.json").read_text())
    for file in sorted(folder.glob("*.safetensors")):
        status = file.stat()
        parts.append(f"{file.name} {status.st_size} {status.st_mtime_ns}")
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()
