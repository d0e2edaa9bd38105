"""Compiles the C++ sources of this folder for this machine's processor, keeps the library, and registers it with XLA.

Owns the compiler's command line and the folder of compiled libraries. Never knows shapes. Called by the
modules of its functions.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import jax

from pallas_kernels.own_folder import own_folder
from pallas_kernels.target import processor_flags, processor_maker

PAGED_ATTENTION, ROWS_PRODUCT = "jaxsgl_paged_attention", "jaxsgl_rows_product"
GROUPED_PRODUCT = "jaxsgl_grouped_product"
INT8_PRODUCT, GROUPED_INT8_PRODUCT = "jaxsgl_int8_product", "jaxsgl_grouped_int8_product"
ROW_SUMS = "jaxsgl_row_sums"
AMX_VARIABLE = "JAXSGL_AMX"  # in the environment: 0 keeps products from using AMX

_FOLDER = Path(__file__).parent
_SOURCES = tuple(_FOLDER / name for name in ("attention.cc", "product.cc", "product_int8.cc", "sums.cc"))
_COMPILERS = ("c++", "g++", "clang++")
_OPTIONS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-w")
_BFLOAT16 = "avx512_bf16"  # as Linux lists it among the processor's flags
_TILES = ("amx_tile", "amx_bf16")
_LEAST = ("avx2", "fma")
_LONGEST_S = 120

logger = logging.getLogger(__name__)


def load() -> str | None:
    """Register the functions with XLA, once per process; returns why that is impossible here, or None.

    The first call on a machine compiles for some seconds. The library is kept in `$XDG_CACHE_HOME/jaxsgl/native`
    (default ~/.cache) under a name made from all that it depends on. Only this user may be able to write there.
    """
    kernels = _kernels()
    return kernels if isinstance(kernels, str) else None


@functools.cache
def _kernels() -> ctypes.CDLL | str:
    """The library, registered, or why there is none."""
    flags = processor_flags()
    lacks = [flag for flag in _LEAST if flag not in flags]
    if lacks:
        return f"the processor has no {' and no '.join(lacks)}"
    command = compiler()
    if command is None:
        return f"there is no C++ compiler (looked for $CXX, {', '.join(_COMPILERS)})"
    try:
        library = _library(command, flags)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        return f"{command} made no library: {reason.strip()[:500]}"
    if has_pairs() and not library.has_pairs():
        return f"{command} knows no {_BFLOAT16}, which the processor has"
    _register(library)
    return library


def compiler() -> str | None:
    """The command of the C++ compiler to use, if there is one."""
    return os.environ.get("CXX") or next(filter(None, map(shutil.which, _COMPILERS)), None)


@functools.cache  # listing many processors takes the system a while
def widens() -> bool:
    """Whether bfloat16 becomes float32 in registers before it is multiplied, where tiles don't (blocks.h, both ways).

    True on processors without instructions for bfloat16, and on Intel's, whose float32 instruction does twice as many
    products a second as the one for bfloat16. On AMD's (Zen 4) it does half as many.
    """
    return not has_pairs() or processor_maker() == "GenuineIntel"


@functools.cache
def has_pairs() -> bool:
    """Whether the processor has the instruction that multiplies pairs of bfloat16 numbers."""
    return _BFLOAT16 in processor_flags()


def multiplies_bytes() -> bool:
    """Whether the kernels multiply int8 weights with rows rounded to 8 bits (AVX512-VNNI, AVX-VNNI)."""
    kernels = _kernels()
    return not isinstance(kernels, str) and bool(kernels.multiplies_bytes())


def product_way() -> str:
    """How products are multiplied here: "tiles", "widened" or "paired"."""
    return "tiles" if refuse_tiles() is None else "widened" if widens() else "paired"


@functools.cache
def refuse_tiles() -> str | None:
    """Why products can't use the processor's tiles (AMX), or None.

    The first call asks the system for them on behalf of this process, and tries whether it keeps what is in them.
    """
    lacks = [flag for flag in _TILES if flag not in processor_flags()]
    if lacks:
        return f"the processor has no {' and no '.join(lacks)}"
    if os.environ.get(AMX_VARIABLE) == "0":
        return f"{AMX_VARIABLE} is 0"
    kernels = _kernels()
    reason = kernels if isinstance(kernels, str) else tile_refusal(kernels)
    if reason is None:
        logger.info("products use AMX")
    else:
        logger.warning("products use AVX-512 instead of AMX, which the processor has: %s", reason)
    return reason


def tile_refusal(kernels: ctypes.CDLL) -> str | None:
    """Ask a compiled library whether this process may use tiles: why not, or None (`tiles.h`)."""
    kernels.refuse_tiles.restype = ctypes.c_char_p
    reason: bytes | None = kernels.refuse_tiles()
    return None if reason is None else reason.decode()


def _register(library: ctypes.CDLL, suffix: str = "") -> None:
    """Give XLA the library's functions, under their names and a suffix."""
    for target in (PAGED_ATTENTION, ROWS_PRODUCT, GROUPED_PRODUCT, INT8_PRODUCT, GROUPED_INT8_PRODUCT, ROW_SUMS):
        function = jax.ffi.pycapsule(getattr(library, target.removeprefix("jaxsgl_")))
        jax.ffi.register_ffi_target(f"{target}{suffix}", function, platform="cpu")


def _library(compiler: str, flags: frozenset[str]) -> ctypes.CDLL:
    """Load the library that is kept; if other users could have written it, one compiled for this process alone."""
    try:
        return ctypes.CDLL(str(_compiled(compiler, flags)))
    except PermissionError as error:
        logger.warning("the native kernels are compiled anew and not kept: %s", error)
        with tempfile.TemporaryDirectory(prefix="jaxsgl-native-") as folder:
            return ctypes.CDLL(str(_compiled(compiler, flags, Path(folder))))


def _compiled(compiler: str, flags: frozenset[str], folder: Path | None = None) -> Path:
    """Return the library's path, in the folder for libraries by default; compile it first unless it exists.

    Raises:
        PermissionError: other users can write to the folder, or this one can't.
        OSError: the compiler can't be run, or the folder isn't writable.
        RuntimeError: there is no home folder.
        subprocess.SubprocessError: the compiler fails (its messages are in `stderr`) or takes too long.
    """
    version = _run(compiler, "--version")
    texts = [path.read_text() for path in (*_SOURCES, *sorted(_FOLDER.glob("*.h")))]
    depends_on = (*texts, version, *_OPTIONS, metadata.version("jaxlib"), *sorted(flags))
    key = hashlib.sha256("\0".join(depends_on).encode()).hexdigest()[:24]
    if folder is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = own_folder(cache / "jaxsgl" / "native")
    path = folder / f"kernels-{key}.so"
    if not path.exists():
        # Several processes may compile at once: each writes a file of its own, renamed once it is whole.
        handle, unfinished = tempfile.mkstemp(dir=folder, suffix=".unfinished")
        os.close(handle)
        try:
            start_s = time.monotonic()
            _build(compiler, unfinished)
            logger.debug("%s compiled %d sources in %.1f s", compiler, len(_SOURCES), time.monotonic() - start_s)
            Path(unfinished).replace(path)
        finally:
            Path(unfinished).unlink(missing_ok=True)
    return path


def _build(compiler: str, output: str) -> None:
    """Compile all sources at once, and link them into `output`; raises as `_compiled` does."""
    options = (*_OPTIONS, f"-isystem{jax.ffi.include_dir()}", "-c")
    with tempfile.TemporaryDirectory(prefix="jaxsgl-native-") as folder, ThreadPoolExecutor(len(_SOURCES)) as pool:
        objects = [str(Path(folder) / f"{source.stem}.o") for source in _SOURCES]
        made = [
            pool.submit(_run, compiler, *options, str(source), "-o", each)
            for source, each in zip(_SOURCES, objects, strict=True)
        ]
        for each in made:
            each.result()
        _run(compiler, "-shared", *objects, "-o", output)


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_LONGEST_S)
    return result.stdout
