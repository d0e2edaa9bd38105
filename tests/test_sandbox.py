from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxsgl.errors import InvalidRequest
from jaxsgl.sandbox import Limits, Sandbox, SandboxCrash, SandboxLimit

pytestmark = pytest.mark.server

ROOT = Path(__file__).parent.parent
MAKE = "tests.sandboxed:make"
AMPLE = Limits(256 << 20, 30.0, 60.0)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    os.environ["JAXSGL_API_KEY"] = "secret"
    one = Sandbox(MAKE, b"made: ")
    one.start()
    del os.environ["JAXSGL_API_KEY"]
    yield one
    one.close()


def test_a_call_gets_the_functions_reply(sandbox: Sandbox) -> None:
    assert sandbox.call(b"echo hello", AMPLE) == b"made: hello"


def test_requests_and_replies_of_many_megabytes_arrive_whole(sandbox: Sandbox) -> None:
    payload = os.urandom(1 << 20) * 48
    assert sandbox.call(b"echo " + payload, AMPLE) == b"made: " + payload


def test_nothing_of_one_call_is_left_for_the_next(sandbox: Sandbox) -> None:
    assert [sandbox.call(b"keep x", AMPLE) for _ in range(3)] == [b"1"] * 3


@pytest.mark.parametrize(
    ("request_", "limits", "kind"),
    [
        (b"spin", AMPLE._replace(cpu_s=0.2), "processor time"),
        (b"in_c", AMPLE._replace(cpu_s=0.2), "processor time"),
        (b"sleep 60", AMPLE._replace(time_s=0.2), "time"),
        (b"allocate 1000000000", AMPLE, "memory"),
        (b"abort", AMPLE, "memory"),
    ],
)
def test_a_call_beyond_its_limits_is_ended_and_named(
    sandbox: Sandbox, request_: bytes, limits: Limits, kind: str
) -> None:
    with pytest.raises(SandboxLimit) as caught:
        sandbox.call(request_, limits)
    assert caught.value.kind == kind
    assert sandbox.call(b"echo still here", AMPLE) == b"made: still here"


def test_memory_below_the_limit_is_given(sandbox: Sandbox) -> None:
    assert sandbox.call(b"allocate 200000000", AMPLE) == b"200000000"


def test_a_refusal_is_the_clients_and_a_fault_is_ours(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidRequest, match=r"^17 is too much$"):
        sandbox.call(b"invalid 17 is too much", AMPLE)
    with pytest.raises(SandboxCrash, match="RuntimeError: oh"):
        sandbox.call(b"raise oh", AMPLE)
    with pytest.raises(SandboxCrash, match="exit status 7"):
        sandbox.call(b"leave", AMPLE)


def test_calls_run_at_the_same_time(sandbox: Sandbox) -> None:
    replies: list[bytes] = []
    slow = threading.Thread(target=lambda: replies.append(bytes(sandbox.call(b"sleep 2", AMPLE))))
    slow.start()
    for number in range(5):
        assert sandbox.call(b"echo %d" % number, AMPLE) == b"made: %d" % number
    assert not replies, "five echoes waited for a call that sleeps"
    slow.join()
    assert replies == [b"slept"]


def test_a_helper_that_was_killed_is_started_again(sandbox: Sandbox) -> None:
    before = sandbox.pid
    with pytest.raises(SandboxCrash, match="helper process ended"):
        sandbox.call(b"kill_helper", AMPLE)
    assert sandbox.call(b"echo again", AMPLE) == b"made: again"
    assert sandbox.pid != before


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_calls_that_are_under_way_end_with_the_helper() -> None:
    one, told = Sandbox(MAKE), list[Exception]()

    def call() -> None:
        try:
            one.call(b"sleep 50", AMPLE)
        except SandboxCrash as crash:
            told.append(crash)

    threads = [threading.Thread(target=call) for _ in range(2)]
    one.start()
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    one.close()
    for thread in threads:
        thread.join(10)
    assert len(told) == 2, "the calls go on without their helper"


def test_a_child_writes_no_file_of_any_size(sandbox: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(SandboxCrash, match="OSError"):
        sandbox.call(b"write " + bytes(tmp_path / "file"), AMPLE)


def test_the_helper_has_neither_jax_nor_keys(sandbox: Sandbox) -> None:
    assert "jax" not in sandbox.call(b"modules", AMPLE).decode().split()
    assert "JAXSGL_API_KEY" not in sandbox.call(b"variables", AMPLE).decode().split()


def test_a_function_that_cannot_be_made_says_why() -> None:
    with pytest.raises(InvalidRequest, match="no such thing"):
        Sandbox(MAKE, b"invalid").start()
    with pytest.raises(SandboxCrash, match="a fault of ours"):
        Sandbox(MAKE, b"broken").start()


def test_the_helper_ends_with_its_last_reference() -> None:
    one = Sandbox(MAKE)
    one.start()
    pid = one.pid
    del one
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()


def test_the_helper_ends_with_a_killed_owner() -> None:
    program = f"""
import os, time
from jaxsgl.sandbox import Sandbox
sandbox = Sandbox({MAKE!r}); sandbox.start(); print(sandbox.pid, flush=True); time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        owner.kill()
    deadline_s = time.monotonic() + 30
    while _runs(pid) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not _runs(pid), "30 s after its owner was killed, the helper runs on"


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
