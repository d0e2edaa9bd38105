"""`HostKvConfig`: flags of the host tier, a part of `EngineConfig` (engine.py). Every part may import this module."""

from __future__ import annotations

from dataclasses import dataclass

from jaxsgl.config.flags import check_choices, flag, require
from jaxsgl.errors import ConfigError

WRITE_POLICIES = ("write_through", "write_through_selective")  # SGLang's names
HOST_POOLS = 2.0  # with --enable-hierarchical-cache alone, host memory holds so many pools, as in SGLang
KEEP_S = 600.0


@dataclass(frozen=True)
class HostKvConfig:
    """Prefixes that outlive the pool in host memory (docs/prefix-cache.md)."""

    enable_hierarchical_cache: bool = flag(
        False, f"keep prefixes in host memory: {HOST_POOLS:g} times the pool, unless --host-kv-gib says how much"
    )
    host_kv_gib: float = flag(
        0.0,
        "GiB of host memory for prefixes, which are loaded back when they have left the pool; 0: none",
        alias="--hicache-size",
    )
    host_kv_write_policy: str = flag(
        "write_through_selective",
        "which pages are copied to host memory: write_through: all, once computed; write_through_selective: those that "
        "are needed a second time, and what follows them first",
        choices=WRITE_POLICIES,
        alias="--hicache-write-policy",
    )
    host_kv_load_timeout_s: float = flag(
        5.0, "seconds that a request waits for its prefix from host memory; then it computes the rest"
    )

    kv_file: str | None = flag(
        None,
        "folder where the prefixes of host memory are kept between starts, by model and format; needs --host-kv-gib",
    )

    @property
    def keep_s(self) -> float:
        """Seconds that the engine may take at its end to write the file."""
        return 0.0 if self.kv_file is None else KEEP_S

    @property
    def is_on(self) -> bool:
        """Whether there is a host tier."""
        return self.enable_hierarchical_cache or self.host_kv_gib > 0

    def __post_init__(self) -> None:
        require(self.host_kv_gib >= 0, "--host-kv-gib", self.host_kv_gib, "0 and more")
        if self.kv_file is not None and not self.is_on:
            raise ConfigError("--kv-file keeps what is in host memory, but there is none for it: give --host-kv-gib")
        require(self.host_kv_load_timeout_s > 0, "--host-kv-load-timeout-s", self.host_kv_load_timeout_s, "more than 0")
        check_choices(self)
