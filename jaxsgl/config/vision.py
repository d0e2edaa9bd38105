"""Flags of models that see images: how much of them is held and encoded at once, and where. Part of `EngineConfig`."""

from __future__ import annotations

from dataclasses import dataclass

from jaxsgl.config.flags import flag, require


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower, and the embeddings that it makes."""

    language_only: bool = flag(
        False,
        "leave the vision tower of a model out, and refuse requests with images",
    )
    mm_enable_dp_encoder: bool = flag(
        False, "the devices of --tp share the images of a step, each encodes whole ones; else each encodes all"
    )
    mm_pool_tokens: int | None = flag(
        None,
        "tokens of images whose embeddings stay on the device, so that an image is encoded once "
        "(default: 4096 on a CPU, else 16384)",
    )
    mm_host_mib: int | None = flag(
        None,
        "MiB of host memory for embeddings of images that the device has let go, so that they come back instead of "
        "being encoded again; 0: none (default: 1024 on a CPU, else 4096)",
    )
    mm_max_patches: int | None = flag(
        None, "patches of one image at most, 4 of which are a token (default: 4096 on a CPU, else 16384)"
    )

    def __post_init__(self) -> None:
        for name, value in (("--mm-pool-tokens", self.mm_pool_tokens), ("--mm-max-patches", self.mm_max_patches)):
            require(value is None or value >= 16, name, value, "16 and more")
        require(self.mm_host_mib is None or self.mm_host_mib >= 0, "--mm-host-mib", self.mm_host_mib, "0 and more")
