"""Servers that compute prefill and decode apart: their flags, which engine.py composes, and what they tell of load."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from jaxsgl.config.flags import check_choices, flag, flag_name, require
from jaxsgl.errors import ConfigError

ALL_IN_ONE = "null"  # SGLang's word for a worker that computes both prefill and decode
MODES = (ALL_IN_ONE, "prefill", "decode")
DEFAULT_PORT = 8998  # SGLang's
BACKENDS = ("tcp", "nixl", "jax")
_NOT_BUILT = {
    "nixl": "it needs the pool's staging memory registered with NIXL's agent",
    "jax": "jax.experimental.transfer hangs when its other side dies before a pull, so it can't end a request in time",
}
MIB = 1 << 20


@dataclass(frozen=True)
class DisaggregationConfig:
    """Which leg of each request this server computes, and what may wait on its way (docs/scale-out.md)."""

    disaggregation_mode: str = flag(
        ALL_IN_ONE,
        "prefill: compute prompts and send their KV pages to decode servers; decode: get them and generate; behind a "
        "gateway that sends each request to one of each (docs/scale-out.md)",
        choices=MODES,
    )
    disaggregation_transfer_backend: str = flag("tcp", "how KV pages travel; tcp needs nothing", choices=BACKENDS)
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
        why = _NOT_BUILT.get(self.disaggregation_transfer_backend)
        if why is not None:
            raise ConfigError(
                f"--disaggregation-transfer-backend {self.disaggregation_transfer_backend} isn't built yet ({why}): "
                "take tcp"
            )


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
