"""Flags of one model over several hosts, and what launchers say of them in the environment. Names are SGLang's.

Every host runs the same command; launchers (LeaderWorkerSet, Slurm, a TPU slice) say in the environment which host it
is. `fill_in` reads that where flags are left out, and only if --nnodes asks for several hosts: a server that was
started alone in a cluster stays alone.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jaxsgl.config.flags import flag, require
from jaxsgl.errors import ConfigError
from jaxsgl.shared_secret import is_this_machine, read_secret

AUTO = "auto"
DIST_PORT = 20000  # of host 0, where its launcher names none
MAX_HOSTS = 256
PULSE_S = 1.0  # between two signs of life of a host
SILENCE_S = 8.0  # after which a host counts as dead
_LAUNCHERS = "LeaderWorkerSet (LWS_*), Slurm (SLURM_*) and TPU slices (TPU_WORKER_*)"


class Placement(NamedTuple):
    """What a launcher says: of how many hosts, which one this is, and the name or address of host 0."""

    nnodes: int
    node_rank: int
    leader: str


@dataclass(frozen=True)
class HostsConfig:
    """Hosts that share one model (docs/scale-out.md)."""

    nnodes: int | Literal["auto"] = flag(
        1,
        "hosts that share the model, each with an equal part of the --tp devices, or of the stages of --pp-size, and "
        "each running this command; auto: as LeaderWorkerSet, Slurm or a TPU slice say in the environment "
        "(docs/scale-out.md)",
    )
    node_rank: int | None = flag(
        None, "which of them this one is, from 0 on; host 0 serves requests (default: from the environment)"
    )
    dist_init_addr: str | None = flag(
        None,
        "host:port of host 0 for the other hosts; it needs the next port as well, for JAX or for what stages pass on; "
        f"keep both private (default: from the environment, port {DIST_PORT})",
    )
    dist_secret_file: str | None = flag(
        None,
        "file of 32 bytes and more, the same on all hosts, by which they know each other; other users may not read it. "
        "Needed once they are on several machines",
    )
    dist_timeout: float = flag(
        600.0, "seconds that hosts wait for each other to appear; loading and compiling may take any time"
    )

    @property
    def are_several(self) -> bool:
        """Whether other hosts share the model."""
        return self.nnodes != 1

    @property
    def num_hosts(self) -> int:
        """Hosts, this one included."""
        assert isinstance(self.nnodes, int)
        return self.nnodes

    @property
    def rank(self) -> int:
        """Which host this is."""
        return self.node_rank or 0

    @property
    def address(self) -> tuple[str, int]:
        """Where host 0 waits for the others."""
        assert self.dist_init_addr is not None
        host, _, port = self.dist_init_addr.rpartition(":")
        return host.strip("[]"), int(port)

    def read_secret(self) -> bytes:
        """Returns what --dist-secret-file holds; b"" if it isn't given. Raises `ConfigError` if it can't be used."""
        return b"" if self.dist_secret_file is None else read_secret(self.dist_secret_file, "--dist-secret-file")

    def __post_init__(self) -> None:
        number = self.nnodes
        fits = isinstance(number, int) and 1 <= number <= MAX_HOSTS
        require(fits, "--nnodes", number, f"1 to {MAX_HOSTS}; a command line may say auto")
        require(self.dist_timeout > 0, "--dist-timeout", self.dist_timeout, "more than 0")
        if not self.are_several:
            require(not self.rank, "--node-rank", self.node_rank, "0 without --nnodes")
            return
        rank = self.node_rank
        if rank is None:
            raise ConfigError(f"--nnodes is {number}, but --node-rank doesn't say which host this is: give 0 on one")
        require(0 <= rank < self.num_hosts, "--node-rank", rank, f"0 to {self.num_hosts - 1} with --nnodes {number}")
        if self.dist_init_addr is None:
            raise ConfigError(f"--nnodes is {number}, but --dist-init-addr doesn't say where host 0 is: give host:port")
        fits = re.fullmatch(r"([\w.-]+|\[[0-9a-fA-F:.]+\]):\d{1,5}", self.dist_init_addr) is not None
        last = 65536 - self.num_hosts
        port_fits = fits and 1 <= self.address[1] <= last
        require(port_fits, "--dist-init-addr", self.dist_init_addr, f"host:port of host 0, with a port of 1 to {last}")
        if self.dist_secret_file is None and not is_this_machine(self.address[0]):
            raise ConfigError(
                f"--dist-init-addr is {self.dist_init_addr}, which other machines reach, but there is no secret by "
                "which hosts know each other: give all the same --dist-secret-file (openssl rand -hex 32 makes one)"
            )
        self.read_secret()


def fill_in(args: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Sets flags of hosts that were left out, if --nnodes asks for several or for what the environment says.

    Raises:
      ConfigError: --nnodes is auto, but no launcher says anything.
    """
    if args.nnodes == 1:
        return
    found = placement(environ)
    if args.nnodes == AUTO:
        if found is None:
            raise ConfigError(f"--nnodes is auto, but the environment has nothing of {_LAUNCHERS}: give a number")
        args.nnodes = found.nnodes
    if found is None or args.nnodes == 1:
        return
    if args.node_rank is None:
        args.node_rank = found.node_rank
    if args.dist_init_addr is None:
        args.dist_init_addr = f"{found.leader}:{DIST_PORT}"


def placement(environ: Mapping[str, str]) -> Placement | None:
    """What the launcher of this process says; None if no launcher that is known here started it.

    Raises:
      ConfigError: what it says makes no sense.
    """
    if "LWS_GROUP_SIZE" in environ:
        names = ("LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS")
        size, index, leader = (_of(environ, name) for name in names)
        return Placement(_number(names[0], size), _number(names[1], index), leader)
    if "TPU_WORKER_HOSTNAMES" in environ:
        hosts = environ["TPU_WORKER_HOSTNAMES"].split(",")
        return Placement(len(hosts), _number("TPU_WORKER_ID", _of(environ, "TPU_WORKER_ID")), hosts[0].strip())
    if "SLURM_NODEID" in environ:
        size = environ.get("SLURM_STEP_NUM_NODES") or _of(environ, "SLURM_NNODES")
        hosts_of_step = environ.get("SLURM_STEP_NODELIST") or _of(environ, "SLURM_JOB_NODELIST")
        rank = _number("SLURM_NODEID", environ["SLURM_NODEID"])
        return Placement(_number("SLURM_NNODES", size), rank, first_of(hosts_of_step))
    return None


def first_of(nodes: str) -> str:
    """The first host of a list as Slurm writes it: r[1-2]n[03-07,09],cpu1 begins with r1n03."""
    first = re.match(r"([^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None, "any text matches"
    return re.sub(r"\[([^-,\]]*)[^\]]*\]", r"\1", first[0])


def _of(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise ConfigError(f"the launcher sets no {name}: give --nnodes, --node-rank and --dist-init-addr")
    return environ[name]


def _number(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ConfigError(f"{name} is {text!r}, but must be a number: give --nnodes, --node-rank and --dist-init-addr")
    return int(text)
