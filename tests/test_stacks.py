"""Stacks of threads, whatever those threads and the garbage collector do at that moment."""

from __future__ import annotations

import subprocess
import sys

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
