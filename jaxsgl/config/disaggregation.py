"""Servers that compute prefill and decode apart: their flags, which engine.py composes, and what they tell of load."""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from jaxsgl.config.flags import check_choices, flag, flag_name, require
from jaxsgl.errors import ConfigError

ALL_IN_ONE = "null"  # SGLang's word for a worker that computes both prefill and decode
MODES = (ALL_IN_ONE, "prefill", "decode")
DEFAULT_PORT = 8998  # SGLang's
BACKENDS = ("tcp", "nixl")
MIN_SECRET_BYTES, MAX_SECRET_BYTES = 32, 4096
MIB = 1 << 20
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class DisaggregationConfig:
    """Which leg of each request this server computes, and what may wait on its way (docs/scale-out.md)."""

    disaggregation_mode: str = flag(
        ALL_IN_ONE,
        "prefill: compute prompts and send their KV pages to decode servers; decode: get them and generate; behind a "
        "gateway that sends each request to one of each (docs/scale-out.md)",
        choices=MODES,
    )
    disaggregation_transfer_backend: str = flag(
        "tcp",
        "how KV pages travel, the same on all prefill and decode servers: tcp, which needs nothing installed, or nixl, "
        "over RDMA or shared memory, after pip install --no-deps nixl-cu12 (docs/scale-out.md)",
        choices=BACKENDS,
    )
    disaggregation_bootstrap_port: int = flag(
        DEFAULT_PORT, "where a prefill server listens for decode servers, at --host; 0 takes a free one"
    )
    disaggregation_host: str | None = flag(
        None, "address at which a prefill server listens for decode servers; keep it private (default: --host)"
    )
    disaggregation_prefill_hosts: tuple[str, ...] = flag(
        (),
        "addresses, networks and names of the prefill servers to which requests may send a decode server, as "
        "10.0.0.0/24,prefill-0; *: any (default: this machine's loopback addresses)",
    )
    disaggregation_secret_file: str | None = flag(
        None,
        f"file of {MIN_SECRET_BYTES} bytes and more, the same on all prefill and decode servers, by which they know "
        "each other; other users may not read it. Needed once they are on several machines",
    )
    disaggregation_staging_mib: int = flag(
        4096,
        "MiB of host memory for KV pages on their way; requests wait for it, and of a prompt that is larger decode "
        "computes the rest",
    )
    disaggregation_bootstrap_timeout_s: float = flag(
        30.0, "seconds that a request waits for a sign of its other leg; then it is refused"
    )
    disaggregation_peer_timeout_s: float = flag(
        5.0, "seconds of silence after which a prefill or decode server counts as dead; it says every second it lives"
    )

    @property
    def is_on(self) -> bool:
        """Whether this server computes one leg of requests only."""
        return self.disaggregation_mode != ALL_IN_ONE

    @property
    def staging_bytes(self) -> int:
        """Host memory for KV pages on their way."""
        return self.disaggregation_staging_mib * MIB

    def __post_init__(self) -> None:
        check_choices(self)
        port = self.disaggregation_bootstrap_port
        require(0 <= port <= 65535, flag_name("disaggregation_bootstrap_port"), port, "0 to 65535")
        for name in ("disaggregation_staging_mib", "disaggregation_peer_timeout_s"):
            require(getattr(self, name) >= 1, flag_name(name), getattr(self, name), "1 and more")
        timeout_s = self.disaggregation_bootstrap_timeout_s
        require(timeout_s > 0, flag_name("disaggregation_bootstrap_timeout_s"), timeout_s, "more than 0")
        networks_and_names(self.disaggregation_prefill_hosts)

    def check_secret(self, host: str) -> None:
        """Checks what a server whose `--host` is `host` needs of a secret.

        Raises:
          ConfigError: the file can't be used, or there is none and other machines may take part.
        """
        self.read_secret()
        if self.disaggregation_secret_file is not None or not self.is_on:
            return
        if self.disaggregation_mode == "prefill":
            at = self.disaggregation_host or host
            opened, way_out = f"decode servers may connect to {at}", "--disaggregation-host 127.0.0.1"
            is_open = not _is_local(at)
        else:
            hosts = self.disaggregation_prefill_hosts
            opened, way_out = f"--disaggregation-prefill-hosts is {','.join(hosts)}", "loopback addresses alone"
            is_open = bool(hosts) and not _is_loopback(hosts)
        if is_open:
            raise ConfigError(
                f"{opened}, but there is no secret by which prefill and decode servers know each other: give all the "
                f"same --disaggregation-secret-file (openssl rand -hex 32 makes one), or {way_out}"
            )

    def read_secret(self) -> bytes:
        """Returns what --disaggregation-secret-file holds, without white space at the end; b"" if it isn't given.

        Raises:
          ConfigError: it can't be read, others may use it, or its size is wrong.
        """
        path = self.disaggregation_secret_file
        if path is None:
            return b""
        name = f"--disaggregation-secret-file {path}"
        try:
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                secret = file.read(MAX_SECRET_BYTES + 1).rstrip() if stat.S_ISREG(mode) else b""
        except OSError as error:
            raise ConfigError(f"{name} can't be read: {error.strerror}") from None
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{name} is not a regular file")
        if mode & stat.S_IRWXO:
            raise ConfigError(f"{name} has mode {stat.S_IMODE(mode):04o}, so other users may use it: chmod 600 {path}")
        if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
            raise ConfigError(
                f"{name} holds {len(secret)} bytes, but must hold {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}: "
                "openssl rand -hex 32 makes a secret"
            )
        return secret


def networks_and_names(hosts: Sequence[str]) -> tuple[list[Network], set[str]]:
    """Returns the networks among `hosts`, addresses included, and the names in lower case, "*" among them.

    Raises:
      ConfigError: one is neither.
    """
    networks, names = list[Network](), set[str]()
    for host in hosts:
        try:
            networks.append(ipaddress.ip_network(host, strict=False))
        except ValueError:
            is_name = re.fullmatch(r"\*|[\w.-]*[A-Za-z][\w.-]*", host) is not None
            wanted = "addresses, networks as 10.0.0.0/24, names without ports, or *"
            require(is_name, flag_name("disaggregation_prefill_hosts"), host, wanted)
            names.add(host.lower())
    return networks, names


def _is_local(host: str) -> bool:
    """Whether a port at `host` is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _is_loopback(hosts: Sequence[str]) -> bool:
    networks, names = networks_and_names(hosts)
    return names <= {"localhost"} and all(network.is_loopback for network in networks)


class TransferLoad(msgspec.Struct, frozen=True, array_like=True):
    """Requests and memory on the way between prefill and decode.

    Attributes:
      mode: "prefill" or "decode".
      num_bootstrapping: requests that wait for their other leg, or for staging memory.
      num_moving: requests whose pages are sent or received.
      staged_bytes: staging memory that is taken or promised.
      moved_bytes: sent or received since the start.
      hidden_bytes: of those, sent before the prompt was computed, so that no one waited for them. Prefill only.
    """

    mode: str
    num_bootstrapping: int
    num_moving: int
    staged_bytes: int
    moved_bytes: int
    hidden_bytes: int = 0
