"""The native kernels touch nothing but their buffers, and leave every thread's floating-point environment as it was.

`guarded.cc` calls the compiled library as XLA does. Sanitizers look at the same cases by night.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import jax
import pytest

from pallas_kernels.native import library
from tests.grids import NIGHTLY, count
from tests.pallas_kernels.native_builds import PARTS, compile_library, imitation

pytestmark = pytest.mark.usefixtures("native_runs_here")

DRIVER = Path(__file__).with_name("guarded.cc")
BUILDS = {
    "as compiled here": (),
    "without avx512": ("-mno-avx512f",),
    "without avx512_bf16": ("-mno-avx512bf16",),  # bytes in registers of 256 bits
    "imitated tiles": imitation(),
}
WAYS = {
    "as compiled here": ("widened", "paired"),
    "without avx512": ("widened",),
    "without avx512_bf16": ("widened",),
    "imitated tiles": ("tiles",),
}
SLOWER = {"imitated tiles": 5}  # than other builds, so many times: fewer cases
SANITIZERS = {
    "address": ("-fsanitize=address,undefined", "-fno-sanitize=alignment", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}


def build(folder: Path, *options: str) -> Path:
    """The driver, compiled with `options`."""
    compiler, program = library.compiler(), folder / "guarded"
    assert compiler is not None
    include = f"-isystem{jax.ffi.include_dir()}"
    command = [compiler, "-std=c++17", "-O1", "-w", "-pthread", include, *options, str(DRIVER), "-o", str(program)]
    subprocess.run([*command, "-ldl"], check=True, capture_output=True, text=True)
    return program


def run(
    program: Path, kernels: Sequence[Path], num_cases: int, *, seed: int = 0, way: str = "widened", fault: str = ""
) -> subprocess.CompletedProcess[str]:
    command = [str(program), ":".join(map(str, kernels)), str(num_cases), str(seed), way, *([fault] if fault else [])]
    # The threads of the driver live to its end, and a fault is to end it as it would end any process.
    options = {"ASAN_OPTIONS": "detect_leaks=0:handle_segv=0"}
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | options, check=False)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("guarded"))


def libraries(*options: str) -> list[Path]:
    """The kernels with more `options` for the compiler; without, those that are in use here."""
    return [compile_library(*options)] if options else [compile_library(part=part) for part in PARTS]


def check(driver: Path, kernels: Sequence[Path], build: str, num_cases: int) -> None:
    num_cases //= SLOWER.get(build, 1)
    for way in WAYS[build]:
        if way == "paired" and not library.has_pairs():
            continue
        done = run(driver, kernels, num_cases, way=way)
        assert done.returncode == 0, f"status {done.returncode}, {way}: {done.stderr[-4000:]}"
        assert f"{num_cases} cases of each" in done.stdout


@pytest.fixture(params=BUILDS)
def options(request: pytest.FixtureRequest) -> tuple[str, tuple[str, ...]]:
    """A build's name and the compiler's options for it."""
    if request.param == "without avx512_bf16" and not NIGHTLY:
        pytest.skip("another compilation; the same cases run by day in registers of 512 bits")
    if request.param == "imitated tiles" and not library.has_pairs():
        pytest.skip("kernels with tiles need avx512_bf16 beside them")
    return request.param, BUILDS[request.param]


def test_kernels_touch_only_their_buffers_and_leave_the_floating_point_environment(
    driver: Path, options: tuple[str, tuple[str, ...]]
) -> None:
    name, given = options
    check(driver, libraries(*given), name, count(60, 3000))


def test_kernels_with_the_processors_tiles_touch_only_their_buffers(driver: Path) -> None:
    if reason := library.refuse_tiles():
        pytest.skip(reason)
    done = run(driver, libraries(), count(60, 3000), way="tiles")
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr[-4000:]}"


def test_tiles_that_are_left_configured_are_found(driver: Path, imitated_kernels: Path) -> None:
    done = run(driver, [imitated_kernels], 3, way="tiles", fault="tiles")
    assert (done.returncode, "left another floating-point environment" in done.stderr) == (1, True), done.stderr


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ("write after", -signal.SIGSEGV, ""),  # in the first run of a case, whose buffers end with their pages
        ("write before", 1, "memory beside a buffer"),
        ("write to an input", -signal.SIGSEGV, ""),
        ("random bits", 1, "depends on memory or on the threads"),
        ("flush", 1, "left another floating-point environment"),
        ("round", 1, "left another floating-point environment"),
        ("x87", 1, "left another floating-point environment"),
    ],
)
def test_a_fault_is_found(driver: Path, fault: str, status: int, words: str) -> None:
    done = run(driver, libraries(), 3, fault=fault)
    assert (done.returncode, words in done.stderr) == (status, True), done.stderr


@pytest.mark.skipif(not NIGHTLY, reason="compiles everything twice more; the same cases run by day without sanitizers")
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_sanitizers_find_nothing(tmp_path: Path, options: tuple[str, tuple[str, ...]], sanitizer: str) -> None:
    name, given = options
    sanitized = ("-g", "-fno-omit-frame-pointer", *SANITIZERS[sanitizer])
    check(build(tmp_path, *sanitized), libraries(*given, *sanitized), name, count(0, 300))
