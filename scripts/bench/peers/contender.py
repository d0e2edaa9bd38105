"""The protocol of a contender, its set-up, and the list of contenders.

Imports no engine: each contender runs in a process of its own.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from jaxsgl.bench.requests import Job

UNTOLD = -1  # a token that an endpoint counted without giving its id


class CannotRun(Exception):
    """The contender can't run on this machine or with these requests; the message says why."""


class Kind(msgspec.Struct, frozen=True):
    """The class of a contender and its options.

    Attributes:
      where: module:class, imported only in the contender's process.
      options: keyword arguments of that class.
      only_shared: runs only if prompts share prefixes.
      environment: where its packages are, if not next to the project's: a name in `environments.PACKAGES`.
    """

    where: str
    options: dict[str, str | int | bool] = {}
    only_shared: bool = False
    environment: str = ""


class Setup(msgspec.Struct, frozen=True):
    """What every contender knows before it loads the model.

    Attributes:
      model: a folder in Hugging Face's layout.
      device: "cpu" or "gpu".
      num_threads: threads to compute with on a CPU.
      num_jobs: requests of a round, all of which are there at the start.
      longest: tokens of the longest request, output included.
      total: tokens of all requests, outputs included.
      prefix_len: tokens that the prompts of a group share; 0 if there are no groups.
      scratch: an existing folder for files made of the model that several contenders read.
    """

    model: str
    device: str
    num_threads: int
    num_jobs: int
    longest: int
    total: int
    prefix_len: int
    scratch: str


class Contender(Protocol):
    """An engine. Its constructor takes the options of its `Kind`."""

    def start(self, setup: Setup) -> None:
        """Loads the model. Raises `CannotRun`, or `ImportError` where its package is missing."""

    def versions(self) -> dict[str, str]:
        """Versions of packages and settings that decide the speed."""

    def reset(self) -> None:
        """Drops everything that earlier runs computed. Not timed."""

    def run(self, jobs: list[Job]) -> list[list[int]]:
        """Serves all jobs, greedy and ignoring EOS; returns the output ids in the order of `jobs`."""

    def close(self) -> None:
        """Frees memory, and ends threads and processes that it started."""


def _kinds() -> dict[str, Kind]:
    kinds = {f"jaxsgl-{dtype}": Kind("bench.peers.ours:Ours", {"flags": f"--dtype {dtype}"}) for dtype in WHOLE}
    for weights in ("int8", "int4"):
        flags = f"--dtype bfloat16 --quantization {weights}"
        kinds[f"jaxsgl-{weights}"] = Kind("bench.peers.ours:Ours", {"flags": flags})
    for size in (8, 32):
        for dtype in WHOLE:
            options: dict[str, str | int | bool] = {"dtype": dtype, "batch_size": size}
            kinds[f"transformers-static{size}-{dtype}"] = Kind("bench.peers.transformers_peers:Static", options)
    for dtype in WHOLE:
        kinds[f"transformers-continuous-{dtype}"] = Kind("bench.peers.transformers_peers:Continuous", {"dtype": dtype})
    for dtype in ("float32", "float16", "bfloat16", "q8_0", "q4_0"):
        kinds[f"llama.cpp-{dtype}"] = Kind("bench.peers.llama:Llama", {"dtype": dtype})
        kinds[f"llama.cpp-{dtype}-shared-by-hand"] = Kind(
            "bench.peers.llama:Llama", {"dtype": dtype, "share": True}, True
        )
    for name, (weights, arithmetic, kv) in OPENVINO.items():
        for suffix, share in (("", False), ("-shared-by-hand", True)):
            options = {"weights": weights, "arithmetic": arithmetic, "kv": kv, "share": share}
            where = "bench.peers.openvino_peer:OpenVINO"
            kinds[f"openvino-{name}{suffix}"] = Kind(where, options, share, "openvino")
    return kinds


WHOLE = ("float32", "bfloat16")
# Weights, arithmetic and KV cache.
OPENVINO = {
    "float32": ("float16", "f32", "f32"),
    "bfloat16": ("float16", "bf16", "bf16"),
    "bfloat16-kv8": ("float16", "bf16", "u8"),
    "int8": ("int8", "bf16", "u8"),
    "int4": ("int4", "bf16", "u8"),
}
KINDS = _kinds()
