"""What adds up over the GPUs of a host: NCCL, or kernels of XLA's that read the other GPUs' memory over NVLink.

A layer whose matrices are split over devices needs two sums over them. NCCL takes some 20 us for one however small it
is, kernels that read what the others have half of that (docs/scale-out.md: sources). XLA has such kernels for up to
4 MB, on powers of two of Hopper's and newer GPUs of one host, linked by NVLink, and uses them if a flag says so. Before
JAX starts, a trial adds up both ways in processes of their own, since an exchange that fails may never return; kernels
are taken if their sums are right and take less time. Owns that decision and the flag. `sums_trial` is the process.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Callable

from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.kernels import kept_verdicts
from jaxsgl.engine.kernels.tester import KernelTester, child_variables, watch
from jaxsgl.engine.start.devices import add_xla_flag, with_xla_flag
from jaxsgl.models import ModelArch
from pallas_kernels.jax_internals import is_running
from pallas_kernels.selftest.report import Request, Verdict

logger = logging.getLogger(__name__)

# Of three releases of XLA, the name that all of them know; it asks for sums of two passes too.
FLAG = "--xla_gpu_unsupported_use_all_reduce_one_shot_kernel"
NEWER_FLAG = "--xla_gpu_experimental_use_collective_kernels"
NCCL, KERNELS = "NCCL", "XLA's kernels"
SUMS = "sums over GPUs"  # as the operation of a verdict
ROWS = (1, 32, 256)  # of a step
FLAGS = {NCCL: f"{FLAG}=false", KERNELS: f"{FLAG}=true"}


@dataclasses.dataclass(frozen=True)
class SumsTrial:
    """How sums are tried on this machine; attributes as those of `KernelTester`."""

    platform: str | None
    limit_s: float
    machine: Callable[[], str]
    command: tuple[str, ...] = (sys.executable, "-P", "-m", "jaxsgl.engine.kernels.sums_trial")

    @classmethod
    def next_to(cls, tester: KernelTester) -> SumsTrial:
        """The trial on the machine of the test of kernels."""
        return cls(tester.platform, tester.limit_s, tester.machine)

    def set_flag(self, config: EngineConfig, arch: ModelArch) -> None:
        """Before JAX starts in this process: has XLA use its kernels, if they do better than NCCL."""
        if self.may_help(config) and kernels_win(self._verdicts(config, arch)):
            add_xla_flag(FLAGS[KERNELS])

    def may_help(self, config: EngineConfig) -> bool:
        """Whether XLA may have kernels for these sums, and it is not decided already what adds them up.

        In a fixed order nothing is added up over devices but by the model itself.
        """
        number = config.tp // config.num_ranks
        is_decided = any(flag in os.environ.get("XLA_FLAGS", "") for flag in (FLAG, NEWER_FLAG))
        return (
            self.platform == "gpu"
            and number > 1
            and number & (number - 1) == 0
            and not config.hosts.are_several
            and not config.enable_deterministic_inference
            and not config.skip_kernel_test
            and not is_decided
            and not is_running()
        )

    def _verdicts(self, config: EngineConfig, arch: ModelArch) -> tuple[Verdict, ...]:
        """Those of an earlier start, or of a trial; logs them."""
        assert self.platform is not None
        sizes = {"num_devices": config.tp, "num_ranks": config.num_ranks, "hidden_size": arch.hidden_size}
        request = Request(self.platform, {**sizes, "rows": ROWS, "flags": FLAGS}, {})
        file = kept_verdicts.file_of(config, request, self.machine())
        verdicts = None if file is None else kept_verdicts.read(file)
        if verdicts is None:
            logger.info("trying sums over %d GPUs in processes of their own; verdicts are kept for later", config.tp)
            verdicts, problem = self._tried(config, request)
            if problem:
                logger.warning("sums over GPUs could not be tried, and %s adds up: %s", NCCL, problem)
            elif file is not None:
                kept_verdicts.write(file, verdicts)
        _log(verdicts)
        return verdicts

    def _tried(self, config: EngineConfig, request: Request) -> tuple[tuple[Verdict, ...], str]:
        """The verdict on each way, and why one could not be had, empty if both were."""
        verdicts: tuple[Verdict, ...] = ()
        for backend, flag in FLAGS.items():
            env = {**child_variables(config, config.tp), "XLA_FLAGS": with_xla_flag(flag)}
            of_backend = dataclasses.replace(request, choice={SUMS: backend})
            found = watch(self.command, env, of_backend, self.limit_s)
            verdicts += found.verdicts
            if found.problem or not found.verdicts:
                return verdicts, found.problem or "its process said nothing"
        return verdicts, ""


def kernels_win(verdicts: tuple[Verdict, ...]) -> bool:
    """Whether XLA's kernels passed the trial, and took less time for all sizes together than NCCL, if that did."""
    us = {each.backend: sum(each.us) for each in verdicts if not each.failed}
    return KERNELS in us and us[KERNELS] < us.get(NCCL, float("inf"))


def _log(verdicts: tuple[Verdict, ...]) -> None:
    for each in verdicts:
        if each.failed:
            logger.warning("sums over GPUs by %s failed their trial (%s: %s)", each.backend, each.verdict, each.note)
    passed = {each.backend: each.us for each in verdicts if not each.failed}
    if len(passed) > 1:
        took = "; ".join(f"{backend} {', '.join(f'{each:.1f}' for each in us)} us" for backend, us in passed.items())
        winner = KERNELS if kernels_win(verdicts) else NCCL
        logger.info("%s adds up over GPUs: for %s rows of a step took %s", winner, ", ".join(map(str, ROWS)), took)
