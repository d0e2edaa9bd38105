"""How tests compile: by night as users do; by day fast, but for a few tests.

By day LLVM optimizes next to nothing, and XLA 0.10 emits loops by its older emitters, which compile in half the CPU
time. JAX reads most of that when it is imported, so test_as_users_compile.py runs files whose own process must compile
as users do in other processes (`AS_USERS`); `fully_optimized` is for servers and other processes that tests start. Used
by conftest.
"""

from __future__ import annotations

import os
from importlib import metadata

import pytest

NOT_OPTIMIZED = "JAX_DISABLE_MOST_OPTIMIZATIONS"
FLAGS = "XLA_FLAGS"
OLDER_EMITTERS = ("--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1")
AS_USERS = "JAXSGL_TEST_AS_USERS_COMPILE"

as_users_compile = pytest.mark.skipif(
    not (os.environ.get(AS_USERS) or os.environ.get("JAXSGL_TEST_NIGHTLY")),
    reason=f"by day test_as_users_compile.py runs it with {AS_USERS}=1",
)


def compile_fast() -> None:
    """Makes this process, before it imports JAX, and those that it starts compile fast."""
    os.environ.setdefault(NOT_OPTIMIZED, "1")
    if metadata.version("jaxlib").startswith("0.10."):  # later ones have no such flag and refuse to start
        os.environ[FLAGS] = " ".join((os.environ.get(FLAGS, ""), *OLDER_EMITTERS)).strip()


def as_users() -> dict[str, str]:
    """The variables with which a process compiles as users do."""
    flags = [flag for flag in os.environ.get(FLAGS, "").split() if flag not in OLDER_EMITTERS]
    return {NOT_OPTIMIZED: "0", FLAGS: " ".join(flags)}
