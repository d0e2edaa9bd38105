"""Tests each kernel that an engine will use, before JAX starts in its process, and replaces those that fail.

Owns what follows from a verdict: the next backend and a warning, or a refusal to start where a flag names the kernel.
`watch` runs the tests in a process of their own, since a kernel may crash it or never return, and names the kernel at
which that happens. Called by `engine`, at start only. On a CPU it does nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import pallas_kernels
from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.kernels import kept_verdicts
from jaxsgl.engine.kernels.choice import kernel_flags, kernel_shapes, may_round_rows_of_experts
from jaxsgl.engine.start.devices import accelerator, accelerator_name, device_variables
from jaxsgl.engine.start.sizing import choose_pages
from jaxsgl.engine.weight_formats import as_kept
from jaxsgl.errors import ConfigError
from jaxsgl.models import ModelArch, cpu_multiplies_bfloat16, resolve_precision
from pallas_kernels import KernelChoice
from pallas_kernels.choice import AUTO, OPS, XLA
from pallas_kernels.jax_internals import is_running
from pallas_kernels.selftest.report import CRASHED, HUNG, UNTESTED, Begun, Ended, News, Request, Verdict, parse_news

logger = logging.getLogger(__name__)

LIMIT_S = 120.0  # for one case, which is compiled too, and for the start of the process


@dataclasses.dataclass(frozen=True)
class KernelTester:
    """How kernels are tested on this machine.

    Attributes:
      platform: of the accelerator, "gpu" or "tpu"; None: there is none, and nothing is tested.
      command: starts the testing process.
      limit_s: seconds that it may be silent.
      machine: names driver and devices, without starting JAX.
    """

    platform: str | None
    command: tuple[str, ...] = (sys.executable, "-P", "-m", "pallas_kernels.selftest")
    limit_s: float = LIMIT_S
    machine: Callable[[], str] = lambda: ""

    @classmethod
    def of_this_machine(cls) -> KernelTester:
        """The tester of the accelerator that JAX will start on, if it will on any."""
        platform = accelerator()
        return cls(platform, machine=lambda: accelerator_name(platform))

    def tested(
        self, config: EngineConfig, arch: ModelArch, asked: KernelChoice
    ) -> tuple[KernelChoice, tuple[Verdict, ...]]:
        """The choice without kernels that fail, and the verdicts. Raises `ConfigError` if a flag names one of them."""
        if self.platform is None or config.skip_kernel_test:
            return asked, ()
        if self.platform == "tpu" and is_running():
            logger.warning("kernels are not tested: JAX runs in this process already, and a TPU belongs to one process")
            return asked, ()
        verdicts: tuple[Verdict, ...] = ()
        for heads in arch.all_heads:  # each kind of layers calls kernels with its own shapes
            asked, found = self._tested(config, arch.with_heads(heads), asked)
            verdicts += tuple(each for each in found if each not in verdicts)
        return asked, verdicts

    def _tested(
        self, config: EngineConfig, arch: ModelArch, asked: KernelChoice
    ) -> tuple[KernelChoice, tuple[Verdict, ...]]:
        """`tested` with the model's heads, whatever layers have of their own."""
        request = self.request(config, arch, asked)
        file = kept_verdicts.file_of(config, request, self.machine())
        verdicts = None if file is None else kept_verdicts.read(file)
        if verdicts is not None:
            logger.info("kernels were tested at an earlier start (%s)", file)
            _warn(verdicts, asked, f"remove {file} to test it again")
        else:
            logger.info("testing kernels in a process of its own; its verdicts are kept for later starts")
            verdicts, problem = self._run(config, request)
            _warn(verdicts, asked, "")
            if problem:
                logger.warning("not all kernels could be tested, and those run untested: %s", problem)
            elif file is not None:
                kept_verdicts.write(file, verdicts)
        return settled(asked, verdicts, kernel_flags(config)), verdicts

    def request(self, config: EngineConfig, arch: ModelArch, asked: KernelChoice) -> Request:
        """What the testing process is asked for a model that is served with these flags."""
        assert self.platform is not None
        precision = resolve_precision(
            config.dtype,
            config.kv_cache_dtype,
            arch,
            self.platform,
            cpu_multiplies_bfloat16=cpu_multiplies_bfloat16,
        )
        kept = as_kept(
            arch,
            precision.weights,
            self.platform,
            config.tp,
            weight_only=config.weight_only,
            rounds_rows=may_round_rows_of_experts(asked),
        )
        page_size, heads = choose_pages(config, arch, self.platform, config.tp // config.num_ranks)
        shapes = kernel_shapes(
            kept,
            precision,
            page_size,
            heads,
            config.tp,
            config.num_ranks,
            in_fixed_order=config.enable_deterministic_inference,
        )
        return Request(self.platform, shapes.as_json(), dataclasses.asdict(asked))

    def _run(self, config: EngineConfig, request: Request) -> tuple[tuple[Verdict, ...], str]:
        """The verdicts of as many processes as it takes, up to a failure of a named kernel; and what kept from more."""
        known: tuple[Verdict, ...] = ()
        env = child_variables(config)
        while True:
            found = watch(self.command, env, dataclasses.replace(request, known=known), self.limit_s)
            known += found.verdicts
            failed = bool(found.verdicts) and found.verdicts[-1].failed
            if not failed or request.choice.get(known[-1].op, AUTO) != AUTO:
                unknown = (each.note for each in known if each.verdict == UNTESTED and each.backend != XLA)
                return known, found.problem or "; ".join(unknown)


def child_variables(config: EngineConfig, num_devices: int = 1) -> dict[str, str]:
    """The environment of a testing process: it takes memory as it needs it, and the same code as this one."""
    env = {**os.environ, **device_variables(config, num_devices), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    home = str(Path(pallas_kernels.__file__).parents[1])
    if home not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):  # it isn't installed
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
    return env


def settled(asked: KernelChoice, verdicts: Sequence[Verdict], flags: str) -> KernelChoice:
    """The choice in which an operation whose kernel failed has the backend that took its place.

    Raises `ConfigError` if `flags` name a kernel that failed.
    """
    failed = {each.op for each in verdicts if each.failed}
    for each in verdicts:
        if each.failed and each.op in OPS and asked.of(each.op) != AUTO:
            raise ConfigError(
                f"{flags}: {each.op} on {each.backend} failed its test at the start ({each.verdict}: {each.note}): "
                "give another backend, or auto"
            )
    last = {each.op: each.backend for each in verdicts if not each.failed}
    return asked.with_backends({op: last.get(op, XLA) for op in failed & set(OPS)})


def _warn(verdicts: Sequence[Verdict], asked: KernelChoice, way_out: str) -> None:
    last = {each.op: each.backend for each in verdicts if not each.failed}
    for each in verdicts:
        if each.failed and (each.op not in OPS or asked.of(each.op) == AUTO):
            logger.warning(
                "the kernel of %s on %s failed its test (%s: %s): %s takes its place%s",
                each.op, each.backend, each.verdict, each.note, last.get(each.op, XLA), way_out and f"; {way_out}",
            )  # fmt: skip


_KILL_S = 10.0  # for the system to end it
MAX_NOTE = 300  # characters of what the process wrote at last


class Watched(NamedTuple):
    """What one process has found.

    Attributes:
      verdicts: in order; one that failed is the last one.
      problem: why the rest wasn't tested, if that is no kernel's fault; empty if there is no rest or a kernel failed.
    """

    verdicts: tuple[Verdict, ...]
    problem: str


def watch(command: Sequence[str], env: Mapping[str, str], request: Request, limit_s: float) -> Watched:
    """Runs the process until it ends, or says nothing for `limit_s` seconds: then it is killed."""
    verdicts: list[Verdict] = []
    begun: Begun | None = None  # the last case
    with tempfile.TemporaryFile() as log, _started(command, env, log) as process:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(request.line().encode() + b"\n")
            process.stdin.flush()
        for each in _news(process, limit_s):
            if isinstance(each, Ended):
                return Watched(tuple(verdicts), each.problem)
            if isinstance(each, Begun):
                begun = each
            else:
                begun = None
                verdicts.append(each)
        how, note = _end_of(process, log, limit_s)
        was_killed = how == CRASHED and process.returncode == -signal.SIGKILL
    if begun is not None and was_killed:  # by the system, for lack of memory, or by hand: no kernel does that
        return Watched(tuple(verdicts), note)
    if begun is not None:
        verdicts.append(Verdict(begun.op, begun.backend, how, f"{begun.case}: {note}"))
    elif not (verdicts and verdicts[-1].failed):
        return Watched(tuple(verdicts), note)
    return Watched(tuple(verdicts), "")


@contextlib.contextmanager
def _started(command: Sequence[str], env: Mapping[str, str], log: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """The process, which ends with the block, and with this process: it watches its standard input."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, env=dict(env), start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it
            process.wait(_KILL_S)
        for end in (process.stdin, process.stdout):
            assert end is not None
            with contextlib.suppress(BrokenPipeError):
                end.close()


def _news(process: subprocess.Popen[bytes], limit_s: float) -> Iterator[News]:
    """What the process says, until it has closed its output or been silent for `limit_s`."""
    assert process.stdout is not None
    fd, rest = process.stdout.fileno(), b""
    deadline_s = time.monotonic() + limit_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        if not select.select([fd], [], [], left_s)[0]:
            return
        more = os.read(fd, 1 << 16)
        if not more:
            return
        *lines, rest = (rest + more).split(b"\n")
        for line in lines:
            deadline_s = time.monotonic() + limit_s
            with contextlib.suppress(ValueError):  # what a library wrote past Python
                yield parse_news(line.decode(errors="replace"))


def _end_of(process: subprocess.Popen[bytes], log: IO[bytes], limit_s: float) -> tuple[str, str]:
    """How a process ended that said nothing of it, as a verdict and in words."""
    try:
        status = process.wait(1.0)
    except subprocess.TimeoutExpired:
        return HUNG, f"no answer within {limit_s:g} s"
    log.seek(0)
    words = log.read().decode(errors="replace").split()
    ending = f"signal {-status}" if status < 0 else f"status {status}"
    return CRASHED, f"its process ended with {ending}: {' '.join(words)[-MAX_NOTE:]}"
