"""Programs kept between starts under a name of what they were made from, so that a later start traces none of them.

    name       what a program is made from: its function and shapes (`naming`), sources, versions, settings, processor
    file       <cache>/programs/<all programs' part of the name>/<the program's own part>: a digest, then the program

JAX's own cache finds a program by its text, so a start has to trace and lower each one to look for it, which takes
longer than loading it. On the CPU of one host this one stands in its place; accelerators, whose kernels register what
they call as they are traced, and several hosts keep JAX's (`warmup`). Files are code: they are read from a folder to
which only this user can write. A file that is damaged, or can't be loaded, is replaced. Called by `programs`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import logging
import os
import pickle
import platform
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.serialize_executable import deserialize_and_load, serialize

import pallas_kernels
from jaxsgl.engine.start.naming import Namer, Unnamed
from jaxsgl.hosts.group import processors
from pallas_kernels.native import library as native
from pallas_kernels.own_folder import own_folder
from pallas_kernels.target import CPUINFO

FOLDER = "programs"  # in that of JAX's cache
UNUSED_S = 14 * 24 * 3600.0  # then the programs of other versions go
_DIGEST_BYTES = 32
_VERSIONED = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")
_VARIABLES = ("XLA_", "JAX_", "JAXSGL_")  # their beginnings
_OF_PROCESSOR = (
    *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features"),
)  # on x86-64, and on arm64
_OF_CACHES = ("compilation_cache", "persistent_cache", "cache_dir")  # settings that change no program
JAX_CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"

logger = logging.getLogger(__name__)


class Made(Protocol):
    """What a program is made from, as `programs.Program` has it."""

    @property
    def made_from(self) -> tuple[Any, ...]:
        """All that decides what it computes, and where."""
        ...

    @property
    def devices(self) -> Sequence[jax.Device]:
        """Those that run it. Raises `Unnamed` if that isn't known."""
        ...


class NothingKept:
    """Keeps no programs: JAX's cache is used, if there is one."""

    def name(self, program: Made, *more: object) -> str | None:
        """The program's name; None: it isn't kept."""
        return None

    def load(self, name: str, program: Made) -> jax.stages.Compiled | None:
        """What was kept under `name`; None: nothing that can be used."""
        return None

    def save(self, name: str, compiled: jax.stages.Compiled) -> None:
        """Keeps a program that was just compiled."""

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Inside, programs are compiled that `save` gets."""
        yield


class KeptPrograms(NothingKept):
    """Keeps programs in `folder`, which is this user's alone and stands for all that they have in common."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._namer = Namer()

    def name(self, program: Made, *more: object) -> str | None:
        """See `NothingKept`; `more` is what is said of the program besides."""
        try:
            return self._namer.digest((program.made_from, more)).hex()
        except Unnamed as error:
            logger.debug("a program is not kept: %s", error)
            return None

    def load(self, name: str, program: Made) -> jax.stages.Compiled | None:
        """See `NothingKept`. May be called by several threads."""
        file = self._folder / name
        try:
            whole = file.read_bytes()
        except OSError:
            return None
        digest, packed = whole[:_DIGEST_BYTES], whole[_DIGEST_BYTES:]
        if hashlib.blake2b(packed, digest_size=_DIGEST_BYTES).digest() != digest:
            logger.warning("%s is damaged: its program is compiled anew", file)
            return None
        try:
            libraries, payload, in_tree, out_tree = pickle.loads(zlib.decompress(packed))
            if libraries != native.loaded(libraries):
                return None
            devices = list(program.devices)
            return deserialize_and_load(payload, in_tree, out_tree, devices[0].client, execution_devices=devices)
        except Exception as error:  # whatever XLA and pickle raise
            logger.warning("%s can't be loaded (%s): its program is compiled anew", file, error)
            return None

    def save(self, name: str, compiled: jax.stages.Compiled) -> None:
        """See `NothingKept`. May be called by several threads; what can't be kept is logged."""
        try:
            packed = zlib.compress(pickle.dumps((native.loaded(), *serialize(compiled))), 1)
            handle, unfinished = tempfile.mkstemp(dir=self._folder, suffix=".unfinished")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(hashlib.blake2b(packed, digest_size=_DIGEST_BYTES).digest() + packed)
                Path(unfinished).replace(self._folder / name)
            finally:
                Path(unfinished).unlink(missing_ok=True)
        except Exception as error:  # a full disk, or a program that XLA can't write down
            logger.debug("a program is not kept: %s", error)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """See `NothingKept`. JAX's cache is off meanwhile: what it has loaded and sorts can't be written down again."""
        _use_jax_cache(False)
        try:
            yield
        finally:
            _use_jax_cache(True)


def _use_jax_cache(on: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", on)
    compilation_cache.reset_cache()  # JAX asks once


def kept_programs(cache: Path | None) -> NothingKept:
    """What keeps programs of this process's CPU in a folder of `cache`.

    Nothing does if that is None or unsafe, nor where the environment turns JAX's cache off, or names one: that one
    still finds programs whose text an edit of the sources leaves as it was.
    """
    off = not jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    if cache is None or off or os.environ.get(JAX_CACHE_VARIABLE):
        return NothingKept()
    try:
        folder = own_folder(cache / FOLDER) / _surroundings()
        if not folder.exists():
            _clear_unused(folder.parent)
        os.utime(own_folder(folder))
    except OSError as error:
        logger.warning("programs are not kept between starts: %s", error)
        return NothingKept()
    return KeptPrograms(folder)


def _clear_unused(parent: Path) -> None:
    """Removes folders that no start has used for long."""
    for folder in parent.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another start does the same
            if time.time() - folder.stat().st_mtime > UNUSED_S:
                shutil.rmtree(folder, ignore_errors=True)


def _surroundings() -> str:
    """Digests what all programs of this process depend on: versions, sources, settings, and the processor."""
    settings = {
        name: repr(getattr(jax.config, name, value))
        for name, value in sorted(jax.config.values.items())
        if not any(word in name for word in _OF_CACHES)
    }
    variables = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_VARIABLES) and not name.endswith("_API_KEY")
        if not any(word in name.lower() for word in _OF_CACHES)
    }
    facts = (
        sys.version,
        [importlib.metadata.version(name) for name in _VERSIONED],
        _sources(),
        settings,
        variables,
        jax.devices()[0].client.platform_version,
        platform.machine(),
        _processor(),
        processors(),
        os.cpu_count(),
        native.load() or native.product_way(),
    )
    return hashlib.blake2b(repr(facts).encode(), digest_size=20).hexdigest()


def _sources() -> str:
    """Digests all code of ours."""
    found = hashlib.blake2b(digest_size=20)
    for home in (Path(__file__).parents[2], Path(pallas_kernels.__file__).parent):
        for path in sorted(path for path in home.rglob("*") if path.suffix in (".py", ".cc", ".h")):
            text = path.read_bytes()
            found.update(f"{path.relative_to(home)} {len(text)} ".encode() + text)
    return found.hexdigest()


def _processor() -> list[str]:
    """What Linux says of a processor's kind and instructions; elsewhere its name, if that is known."""
    with contextlib.suppress(OSError):
        lines = CPUINFO.read_text().partition("\n\n")[0].splitlines()
        return [line for line in lines if line.partition(":")[0].strip() in _OF_PROCESSOR]
    return [platform.processor()]
