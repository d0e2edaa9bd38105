"""Stacks of threads, whatever those threads and the garbage collector do at that moment."""

from __future__ import annotations

import io
import itertools
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

pytestmark = pytest.mark.server
LOOKS_WHILE_FINALIZERS_WAIT = """
import gc, os, threading, time
from jaxsgl import stacks

class Garbage:  # each collection frees one, lets another thread run, and makes the next
    def __init__(self): self.itself = self
    def __del__(self):
        time.sleep(0.0001)
        if looking: Garbage()

def wait(): time.sleep(0.001)
def waits():
    while True: wait()
def starts_threads():
    while True:
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()

looking = True
for run in [waits] * 20 + [starts_threads]:
    threading.Thread(target=run, daemon=True).start()
gc.set_threshold(1)
Garbage()
for _ in range(40):
    text = stacks.of_threads()
looking = False
print(text.count("in waits"), gc.isenabled(), flush=True)
os._exit(0)  # the threads would run on while the interpreter is taken down
"""


def test_a_look_at_all_threads_ends_though_finalizers_wait() -> None:
    """CPython's own look holds a lock that new threads want, and each frame may end while an object is made of it: the
    collector must not run others meanwhile.
    """
    command = [sys.executable, "-c", LOOKS_WHILE_FINALIZERS_WAIT]
    looked = subprocess.run(command, text=True, capture_output=True, timeout=60, check=True)
    assert looked.stdout == "20 True\n"


RUNS_ON = """
import json, logging, sys, threading, time
from jaxsgl import stacks

def recurse(depth): return depth and recurse(depth - 1)
def busy():
    while True:
        recurse(50)
        json.loads(json.dumps(list(range(50))))

stacks.dump_at_signals()
logging.basicConfig(format="%(message)s")
for _ in range(4):
    threading.Thread(target=busy, daemon=True).start()
print("ready", flush=True)
while True:
    time.sleep(0.001)
"""


def test_a_busy_process_outlives_the_signal_that_shows_its_stacks() -> None:
    """With the fault handler's own look at all threads, it crashed within a second or two."""
    with subprocess.Popen([sys.executable, "-c", RUNS_ON], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.readline()
        written = io.BytesIO()
        reader = threading.Thread(target=shutil.copyfileobj, args=(process.stderr, written))
        reader.start()
        until_s = time.monotonic() + 2.0
        while time.monotonic() < until_s and process.poll() is None:
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.0005)
        assert process.poll() is None
        process.kill()
        reader.join()
    assert written.getvalue().count(b"(most recent call first)") >= 10, "the main thread's, by the fault handler"
    assert b"in busy\n" in written.getvalue(), "the others', by Python"


HANGS = """
import ctypes, threading
from jaxsgl import stacks

stacks.dump_at_signals()
threading.Thread(target=threading.Event().wait, daemon=True).start()
lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
lock(mutex)
print("ready", flush=True)
lock(mutex)  # for good, and with Python's own lock
"""
HANGS_AT = f'  File "<string>", line {len(HANGS.splitlines())} in <module>\n'.encode()


@pytest.mark.parametrize(("number", "others"), [(signal.SIGUSR1, 0), (signal.SIGUSR2, 2)])
def test_a_process_that_hangs_in_native_code_shows_its_main_threads_stack_or_all(
    number: signal.Signals, others: int
) -> None:
    """The others are the one that waits for an event, and the one that would log all stacks."""
    with subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.readline()
        time.sleep(0.2)  # until it hangs
        process.send_signal(number)
        patience = threading.Timer(60.0, process.kill)
        patience.start()
        written = list(itertools.takewhile(lambda line: line != HANGS_AT, process.stderr))
        assert process.poll() is None
        patience.cancel()
        process.kill()
    assert sum(b"(most recent call first)" in line for line in written) == 1 + others
