"""Whose memory it is: JAX's share of a GPU, the static fraction of the whole, and errors that say where it went."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxsgl.engine.layer_state import LayerStates, attention_state
from jaxsgl.engine.start import memory
from jaxsgl.engine.start.dry_run import step_failure
from jaxsgl.engine.start.memory import (
    GPU_SHARE,
    HEADROOM,
    JAX_SHARE,
    SHARE_VARIABLES,
    check_weights_fit,
    free_memory,
    keep_small_places,
    loading_weights,
    start_jax,
)
from jaxsgl.engine.start.sizing import choose_num_pages
from jaxsgl.errors import ConfigError, StartupError
from tests.engine.test_sizing import GIB, Accelerator

PAGE = LayerStates((attention_state(8, 16, 128, jnp.dtype("bfloat16")),) * 4, page_size=16)
POOL: dict[str, Any] = {"useful_tokens": 10**12, "rows_bytes": 0, "reserved_bytes": 0, "step_bytes": 0}


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """None of JAX's variables is set, and JAX has not started yet."""
    for name in SHARE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(memory, "is_running", lambda: False)
    start_jax.cache_clear()
    yield monkeypatch
    start_jax.cache_clear()


def test_places_for_small_arrays_are_free_and_what_is_between_them_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[jax.Array] = []
    put = jax.device_put

    def remember(*arguments: Any) -> jax.Array:
        made.append(put(*arguments))
        return made[-1]

    monkeypatch.setattr(jax, "device_put", remember)
    walls = keep_small_places(jax.devices()[:1])
    assert made[1::2] == walls and not any(wall.is_deleted() for wall in walls)
    assert all(place.is_deleted() for place in made[::2]) and len(walls) == memory.SMALL_PLACES


def test_jax_starts_with_most_of_a_gpu_and_the_variable_is_gone_afterwards(variables: pytest.MonkeyPatch) -> None:
    seen = []
    variables.setattr(jax, "devices", lambda: seen.append({name: os.environ.get(name) for name in SHARE_VARIABLES}))
    assert start_jax() == GPU_SHARE
    assert seen == [{"XLA_CLIENT_MEM_FRACTION": None, "XLA_PYTHON_CLIENT_MEM_FRACTION": str(GPU_SHARE)}]
    assert not set(SHARE_VARIABLES) & set(os.environ)


@pytest.mark.parametrize("name", SHARE_VARIABLES)
def test_a_share_that_the_user_set_is_kept(variables: pytest.MonkeyPatch, name: str) -> None:
    variables.setenv(name, "0.4")
    variables.setattr(jax, "devices", lambda: pytest.fail("JAX starts when it is needed"))
    assert start_jax() == 0.4
    assert [os.environ.get(other) for other in SHARE_VARIABLES if other != name] == [None]


@pytest.mark.parametrize("text", ["half", "0", "-0.5"])
def test_a_share_that_is_none_is_an_error(variables: pytest.MonkeyPatch, text: str) -> None:
    variables.setenv(SHARE_VARIABLES[1], text)
    with pytest.raises(ConfigError, match=f"{SHARE_VARIABLES[1]} is '{text}', but must be"):
        start_jax()


def test_where_jax_runs_already_it_has_the_share_that_it_began_with() -> None:
    code = "import jax, os; from jaxsgl.engine.start.memory import *; d = jax.devices(); print(start_jax())"
    environment = {name: value for name, value in os.environ.items() if name not in SHARE_VARIABLES}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert float(done.stdout) == JAX_SHARE


def test_a_second_engine_in_the_process_knows_the_share_that_jax_began_with() -> None:
    code = "from jaxsgl.engine.start.memory import *; print(start_jax(), start_jax())"
    environment = {name: value for name, value in os.environ.items() if name not in SHARE_VARIABLES}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert [float(text) for text in done.stdout.split()] == [GPU_SHARE, GPU_SHARE]


@pytest.mark.parametrize("share", [GPU_SHARE, JAX_SHARE])
def test_the_static_fraction_is_one_of_the_whole_gpu_whatever_jax_may_use(share: float) -> None:
    device: Any = Accelerator(limit=int(share * 80 * GIB), used=10 * GIB)
    left = free_memory(device, 0.6, share)
    assert left.static_bytes == pytest.approx(0.6 * 80 * GIB - 10 * GIB, rel=1e-6)
    assert left.all_bytes == int(device.limit * (1 - HEADROOM)) - 10 * GIB


def test_the_static_fraction_ends_where_jax_may_use_no_more() -> None:
    device: Any = Accelerator(limit=40 * GIB, used=10 * GIB)
    left = free_memory(device, 0.85, 0.5)
    assert left.static_bytes == left.all_bytes == int(40 * GIB * (1 - HEADROOM)) - 10 * GIB


def test_the_share_is_one_of_gpus_only() -> None:
    tpu: Any = Accelerator(limit=16 * GIB, used=0, platform="tpu")
    assert free_memory(tpu, 0.5, GPU_SHARE).static_bytes == 8 * GIB


CUDA = """
#include <stddef.h>
static int pushed;
int cuInit(unsigned flags) { return flags; }
int cuDeviceGet(int *device, int ordinal) { *device = 10 + ordinal; return ordinal > 1; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(size_t)device; return 0; }
int cuCtxPushCurrent_v2(void *context) { pushed = (int)(size_t)context; return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *total) {
    *free = (size_t)(pushed == 11 ? 60 : 20) << 30;
    *total = (size_t)80 << 30;
    return pushed == 0;
}
int cuCtxPopCurrent_v2(void **context) { *context = (void *)(size_t)pushed; pushed = 0; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return device; }
"""


class Untold(Accelerator):
    """A GPU whose allocator keeps no account; `used` is its number."""

    @property
    def local_hardware_id(self) -> int:
        return self.used

    def memory_stats(self) -> Any:
        return None


@pytest.mark.skipif(shutil.which("gcc") is None, reason="this machine has no C compiler for the driver's stand-in")
def test_the_driver_tells_the_memory_that_jax_does_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cuda.c").write_text(CUDA)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "libcuda.so.1", "cuda.c"], cwd=tmp_path, check=True)
    monkeypatch.setattr("jaxsgl.engine.start.cuda_memory.LIBRARY", str(tmp_path / "libcuda.so.1"))
    second: Any = Untold(limit=0, used=1)
    left = free_memory(second, 0.5, 0.95)
    assert left.static_bytes == 20 * GIB
    assert left.all_bytes == int(80 * GIB * (1 - HEADROOM)) - 20 * GIB
    with pytest.raises(ConfigError, match=r"90.00 GiB on each of 1 devices, but JAX may use 80.00 GiB"):
        check_weights_fit(second, 0.95, 90 * GIB, 1)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_an_accelerator_whose_memory_nobody_tells_is_refused(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxsgl.engine.start.cuda_memory.LIBRARY", "no-such-library")
    untold: Any = Untold(limit=0, used=0, platform=platform)
    with pytest.raises(StartupError, match="no KV pool can be sized: unset XLA_PYTHON_CLIENT_ALLOCATOR"):
        free_memory(untold, 0.85)


def test_too_little_for_a_pool_is_an_error_that_accounts_for_the_memory() -> None:
    device: Any = Accelerator(limit=76 * GIB, used=70 * GIB)
    left = free_memory(device, 0.85, 0.95)
    account = (
        r"JAX may use 76.00 GiB of the device's 80.00 GiB, the weights take 70.00 GiB, and --mem-fraction-static 0.85 "
        "allows 68.00 GiB for weights and pool"
    )
    with pytest.raises(ConfigError, match=rf"^0 MiB are free .*\({account}\): raise --mem-fraction-static"):
        choose_num_pages(PAGE, left, max_total_tokens=None, **POOL)
    with pytest.raises(ConfigError, match=rf"--max-total-tokens 9999 needs .*\({account}\): lower it"):
        choose_num_pages(PAGE, left, max_total_tokens=9999, **POOL)


def test_a_step_that_runs_out_of_memory_at_start_accounts_for_it_too() -> None:
    device: Any = Accelerator(limit=76 * GIB, used=10 * GIB)
    account = free_memory(device, 0.85, 0.95).account
    message = (
        r"can't run: RESOURCE_EXHAUSTED: .* of the device's 80.00 GiB, .* 0.85 allows 68.00 GiB .*: lower --chunked"
    )
    with pytest.raises(StartupError, match=message), step_failure("it can't run", account):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes")


def test_weights_that_do_not_fit_are_an_error_that_says_what_to_take_instead() -> None:
    device: Any = Accelerator(limit=19 * GIB, used=18 * GIB)
    message = (
        r"weights do not fit .* may use 19.00 GiB of the device's 20.00 GiB, 18.00 GiB were taken .* smaller model or "
        r"--dtype bfloat16, or raise XLA_PYTHON_CLIENT_MEM_FRACTION \(JAX's share of a GPU, now 0.95\)"
    )
    with pytest.raises(StartupError, match=message), loading_weights(device, 0.95):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), loading_weights(device, 0.95):
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")


def test_free_host_memory_is_read_from_the_system(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    100 kB\n")
    assert memory.free_host_bytes(meminfo) == 100 * 1024
    assert memory.free_host_bytes(tmp_path / "nothing") > 2**20
    assert free_memory(jax.devices("cpu")[0], 0.5).static_bytes == pytest.approx(memory.free_host_bytes(), rel=0.3)


@pytest.mark.parametrize(
    ("stat", "cached_kib"),
    [
        ("anon 7\nfile 99999\ninactive_file 2048\nactive_file 1024\n", 3),
        ("inactive_file 5\nactive_file 5\ntotal_inactive_file 2048\ntotal_active_file 1024\n", 3),  # version 1
        (None, 0),
    ],
)
def test_what_a_control_group_has_of_files_counts_as_free(
    stat: str | None, cached_kib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of weights that were read, for one."""
    for name, text in (("limit", "10240"), ("used", "8192"), ("memory.stat", stat)):
        if text is not None:
            (tmp_path / name).write_text(text)
    (tmp_path / "meminfo").write_text("MemAvailable:    100 kB\n")
    monkeypatch.setattr(memory, "CGROUP_FILES", ((str(tmp_path / "limit"), str(tmp_path / "used")),))
    assert memory.free_host_bytes(tmp_path / "meminfo") == (2 + cached_kib) * 1024
