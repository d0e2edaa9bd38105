"""The native kernels touch nothing but their buffers, and leave every thread's floating-point environment as it was.

`guarded.cc` calls the compiled library as XLA does. Sanitizers look at the same cases by night.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import jax
import pytest

from pallas_kernels.native import library
from pallas_kernels.target import processor_flags
from tests.grids import NIGHTLY, count

pytestmark = pytest.mark.usefixtures("native_runs_here")

DRIVER = Path(__file__).with_name("guarded.cc")
WAYS = {"as compiled here": (), "without avx512": ("-mno-avx512f",)}
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


def compile_library(*options: str) -> Path:
    """The kernels, compiled with more `options` than usually."""
    compiler = library.compiler()
    assert compiler is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_OPTIONS", (*library._OPTIONS, *options))
        return library._compiled(compiler, processor_flags())


def run(
    program: Path, kernels: Path, num_cases: int, *, seed: int = 0, widened: bool = True, fault: str = ""
) -> subprocess.CompletedProcess[str]:
    command = [str(program), str(kernels), str(num_cases), str(seed), str(int(widened)), *([fault] if fault else [])]
    # The threads of the driver live to its end, and a fault is to end it as it would end any process.
    options = {"ASAN_OPTIONS": "detect_leaks=0:handle_segv=0"}
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | options, check=False)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("guarded"))


def check(driver: Path, kernels: Path, way: str, num_cases: int) -> None:
    for widened in (True, False) if library.has_pairs() and way == "as compiled here" else (True,):
        done = run(driver, kernels, num_cases, widened=widened)
        assert done.returncode == 0, f"status {done.returncode}, widened {widened}: {done.stderr[-4000:]}"
        assert f"{num_cases} cases of each kernel" in done.stdout


@pytest.mark.parametrize("way", WAYS)
def test_kernels_touch_only_their_buffers_and_leave_the_floating_point_environment(driver: Path, way: str) -> None:
    check(driver, compile_library(*WAYS[way]), way, count(60, 3000))


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
    done = run(driver, compile_library(), 3, fault=fault)
    assert (done.returncode, words in done.stderr) == (status, True), done.stderr


@pytest.mark.skipif(not NIGHTLY, reason="compiles everything twice more; the same cases run by day without sanitizers")
@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.parametrize("way", WAYS)
def test_sanitizers_find_nothing(tmp_path: Path, way: str, sanitizer: str) -> None:
    options = ("-g", "-fno-omit-frame-pointer", *SANITIZERS[sanitizer])
    check(build(tmp_path, *options), compile_library(*WAYS[way], *options), way, count(0, 300))
