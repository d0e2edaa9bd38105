"""What hosts that share a model compare before they run a step: model, kernels, sizes, and what programs exchange.

A program that waits for others in another order than theirs hangs, and nothing says why. So each host tells the others
a digest of all that leads to such an order, at each point where it is known. Called by `engine`, at start only. On one
host nothing is compared.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path

from jaxsgl.batch.buckets import Capacity
from jaxsgl.engine.programs import ProgramSet
from jaxsgl.errors import ConfigError
from jaxsgl.hosts.group import Hosts
from jaxsgl.models import ModelArch
from pallas_kernels.choice import KernelChoice

COLLECTIVE = re.compile(
    r"= (\S+) (all-reduce|all-gather|all-to-all|ragged-all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)


def check_hosts(folder: Path, arch: ModelArch, kernels: KernelChoice, hosts: Hosts) -> None:
    """Compares the model of `folder`, and kernels.

    Raises:
      StartupError: they differ, or the model can't be shared by hosts.
    """
    if hosts.size == 1:
        return
    if arch.tower is not None:
        raise ConfigError(
            f"{arch.name} takes images, which several hosts (--nnodes) can't encode for now: give --language-only"
        )
    digest = _digest((folder / "config.json").read_text())
    hosts.same("the models", f"{arch.name} of config.json {digest}", "give all hosts the same model")
    hosts.same("the kernels", str(kernels), "see the tests of kernels in both logs, or name --kernels")


def same_programs(compiled: ProgramSet, capacity: Capacity, hosts: Hosts) -> None:
    """Compares sizes and what the programs exchange, in which order; then all hosts go on at the same time.

    That comes before anything is exchanged: gloo gives a host up that comes 30 s later than others.

    Raises:
      StartupError: they differ.
    """
    if hosts.size == 1:
        return
    hosts.same("the sizes", str(capacity), "give all hosts the same flags")
    exchanged = sorted(
        (str(key), COLLECTIVE.findall(done.compiled.as_text() or "")) for key, done in compiled.compilations.items()
    )
    told = f"{len(exchanged)} with {sum(len(each) for _, each in exchanged)} exchanges {_digest(repr(exchanged))}"
    hosts.same("the programs", told, "clear --compilation-cache-dir on all hosts, and install the same versions")


def _digest(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
