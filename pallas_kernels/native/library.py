"""Compiles the C++ sources of this folder for this machine's processor, keeps and loads the libraries.

Each `Part` is a library, compiled when one of its functions is first asked for: most models need one. Owns the
compiler's command line and the folder of compiled libraries. Never knows shapes. Called by the modules of its
functions.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import jax

from pallas_kernels.own_folder import own_folder
from pallas_kernels.target import processor_flags, processor_maker

PAGED_ATTENTION, ROWS_PRODUCT = "jaxsgl_paged_attention", "jaxsgl_rows_product"
GROUPED_PRODUCT = "jaxsgl_grouped_product"
INT8_PRODUCT, GROUPED_INT8_PRODUCT = "jaxsgl_int8_product", "jaxsgl_grouped_int8_product"
GROUPED_PACKED_PRODUCT, GROUPED_KEPT_PRODUCT = "jaxsgl_grouped_packed_product", "jaxsgl_grouped_kept_product"
ROW_SUMS = "jaxsgl_row_sums"
MOVE_STATES, CONVOLVE_TOKENS = "jaxsgl_move_states", "jaxsgl_convolve_tokens"
AMX_VARIABLE = "JAXSGL_AMX"  # in the environment: 0 keeps the kernels from using AMX

_FOLDER = Path(__file__).parent
_COMPILERS = ("c++", "g++", "clang++")
COMPILER_OPTIONS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-w")
_BFLOAT16 = "avx512_bf16"  # as Linux lists it among the processor's flags
_TILES = ("amx_tile", "amx_bf16", "amx_int8")
_LEAST = ("avx2", "fma")
_LONGEST_S = 300  # on a busy machine


class Part(NamedTuple):
    """A library: the names of its sources, and of the functions that XLA gets."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]


COMMON = Part(("kernels.cc", "rows.cc"), (PAGED_ATTENTION, ROWS_PRODUCT, ROW_SUMS))
GROUPED = Part(("grouped.cc",), (GROUPED_PRODUCT, GROUPED_KEPT_PRODUCT))
INTEGERS = Part(("product_int8.cc",), (INT8_PRODUCT, GROUPED_INT8_PRODUCT, GROUPED_PACKED_PRODUCT))
STATES = Part(("states.cc",), (MOVE_STATES, CONVOLVE_TOKENS))

logger = logging.getLogger(__name__)


def load(*parts: Part) -> str | None:
    """Register the functions of `COMMON` and of `parts` with XLA, once per process; returns why they can't be, or None.

    The first call on a machine compiles for some seconds, all parts at the same time. Libraries are kept in
    `$XDG_CACHE_HOME/jaxsgl/native` (default ~/.cache) under names made from all that they depend on. Only this user may
    be able to write there.
    """
    wanted = dict.fromkeys((COMMON, *parts))
    with ThreadPoolExecutor(len(wanted)) as pool:
        return next((kernels for kernels in pool.map(_kernels, wanted) if isinstance(kernels, str)), None)


@functools.cache
def _kernels(part: Part) -> ctypes.CDLL | str:
    """Compiles and registers the library of `part`; returns it, or the reason that this machine can't have it."""
    flags = processor_flags()
    lacks = [flag for flag in _LEAST if flag not in flags]
    if lacks:
        return f"the processor has no {' and no '.join(lacks)}"
    command = compiler()
    if command is None:
        return f"there is no C++ compiler (looked for $CXX, {', '.join(_COMPILERS)})"
    try:
        library = _library(command, flags, part)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        return f"{command} made no library: {reason.strip()[:500]}"
    if part is COMMON and has_pairs() and not library.has_pairs():
        return f"{command} knows no {_BFLOAT16}, which the processor has"
    if part not in (COMMON, STATES) and refuse_tiles() is None and (reason := tile_refusal(library)):
        return reason  # each library asks for tiles on its own
    _register(library, part)
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
    """Whether the kernels multiply packed integers with rows rounded to 8 bits (AVX512-VNNI, AVX-VNNI)."""
    if load(INTEGERS) is not None:
        return False
    kernels = _kernels(INTEGERS)
    return not isinstance(kernels, str) and bool(kernels.multiplies_bytes())


def product_way() -> str:
    """How kernels multiply bfloat16 here, of products and of attention: "tiles", "widened" or "paired"."""
    return "tiles" if refuse_tiles() is None else "widened" if widens() else "paired"


@functools.cache
def refuse_tiles() -> str | None:
    """Why kernels can't use the processor's tiles (AMX), or None.

    The first call asks the system for them on behalf of this process, and tries whether it keeps what is in them.
    """
    lacks = [flag for flag in _TILES if flag not in processor_flags()]
    if lacks:
        return f"the processor has no {' and no '.join(lacks)}"
    if os.environ.get(AMX_VARIABLE) == "0":
        return f"{AMX_VARIABLE} is 0"
    kernels = _kernels(COMMON)
    reason = kernels if isinstance(kernels, str) else tile_refusal(kernels)
    if reason is None:
        logger.info("the native kernels use AMX")
    else:
        logger.warning("the native kernels use AVX-512 instead of AMX, which the processor has: %s", reason)
    return reason


def tile_refusal(kernels: ctypes.CDLL) -> str | None:
    """Ask a compiled library whether this process may use tiles: why not, or None (`tiles.h`)."""
    kernels.refuse_tiles.restype = ctypes.c_char_p
    reason: bytes | None = kernels.refuse_tiles()
    return None if reason is None else reason.decode()


def _register(library: ctypes.CDLL, part: Part, suffix: str = "") -> None:
    """Give XLA the library's functions, under their names and a suffix."""
    for target in part.targets:
        function = jax.ffi.pycapsule(getattr(library, target.removeprefix("jaxsgl_")))
        jax.ffi.register_ffi_target(f"{target}{suffix}", function, platform="cpu")


def _library(compiler: str, flags: frozenset[str], part: Part) -> ctypes.CDLL:
    """Load the library that is kept; if other users could have written it, one compiled for this process alone."""
    try:
        return ctypes.CDLL(str(_compiled(compiler, flags, part)))
    except PermissionError as error:
        logger.warning("the native kernels are compiled anew and not kept: %s", error)
        with tempfile.TemporaryDirectory(prefix="jaxsgl-native-") as folder:
            return ctypes.CDLL(str(_compiled(compiler, flags, part, Path(folder))))


def _compiled(compiler: str, flags: frozenset[str], part: Part, folder: Path | None = None) -> Path:
    """Return the library's path, in the folder for libraries by default; compile it first unless it exists.

    Raises:
        PermissionError: other users can write to the folder, or this one can't.
        OSError: the compiler can't be run, or the folder isn't writable.
        RuntimeError: there is no home folder.
        subprocess.SubprocessError: the compiler fails (its messages are in `stderr`) or takes too long.
    """
    version = _run(compiler, "--version")
    texts = [path.read_text() for path in sorted((*_FOLDER.glob("*.cc"), *_FOLDER.glob("*.h")))]
    depends_on = (
        *part.sources,
        *texts,
        version,
        *COMPILER_OPTIONS,
        metadata.version("jaxlib"),
        *sorted(flags),
    )
    key = hashlib.sha256("\0".join(depends_on).encode()).hexdigest()[:24]
    if folder is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = own_folder(cache / "jaxsgl" / "native")
    path = folder / f"kernels-{key}.so"
    if not path.exists():
        with _alone(path.with_suffix(".lock")):
            if not path.exists():  # else another process has compiled it meanwhile
                _compile(compiler, part, path)
    return path


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Lets one thread of all processes in at a time, where the file system has locks; ending lets the next one in."""
    with lock.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _compile(compiler: str, part: Part, path: Path) -> None:
    """Compile to another file, renamed once it is whole."""
    handle, unfinished = tempfile.mkstemp(dir=path.parent, suffix=".unfinished")
    os.close(handle)
    try:
        start_s = time.monotonic()
        _build(compiler, part, unfinished)
        logger.debug("%s compiled %s in %.1f s", compiler, ", ".join(part.sources), time.monotonic() - start_s)
        Path(unfinished).replace(path)
    finally:
        Path(unfinished).unlink(missing_ok=True)


def _build(compiler: str, part: Part, output: str) -> None:
    """Compile the part's sources, all at once, and link them into `output`; raises as `_compiled` does."""
    options = (*COMPILER_OPTIONS, f"-isystem{jax.ffi.include_dir()}", "-c")
    with tempfile.TemporaryDirectory(prefix="jaxsgl-native-") as folder, ThreadPoolExecutor(len(part.sources)) as pool:
        objects = [str(Path(folder) / Path(source).with_suffix(".o").name) for source in part.sources]
        made = [
            pool.submit(_run, compiler, *options, str(_FOLDER / source), "-o", each)
            for source, each in zip(part.sources, objects, strict=True)
        ]
        for each in made:
            each.result()
        _run(compiler, "-shared", *objects, "-o", output)


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_LONGEST_S)
    return result.stdout
