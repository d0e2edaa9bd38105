"""The accelerators to compile for, and how JAX is told of one that this machine lacks.

The `.txtpb` files beside this one hold a GPU's facts as XLA's compiler wants them (cores, shared memory, bandwidth).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

JAX_VERSION = "0.11.2"  # one whose plug-in wheels for all targets exist


@dataclass(frozen=True)
class Target:
    """A chip.

    Attributes:
      name: as on the command line.
      platform: for lowering, "cuda" or "tpu".
      extra: of the package `jax`, whose plug-in compiles for it.
      num_cores: streaming multiprocessors, or TensorCores.
      backends: of the kernels, those worth compiling for it.
    """

    name: str
    platform: str
    extra: str
    num_cores: int
    backends: tuple[str, ...]

    def devices(self) -> list[jax.Device]:
        """Descriptions of devices that compile and never run; needs the target's plug-in."""
        from jax.experimental import topologies  # the parent process has no JAX

        if self.platform == "cuda":
            config = (Path(__file__).parent / f"{self.name}.txtpb").read_text()
            described = topologies.get_topology_desc(self.name, "cuda", topology="1x1x1", target_config=config)
        else:
            described = topologies.get_topology_desc(f"{self.name}:2x2", "tpu")
        return list(described.devices)

    @contextmanager
    def traced_for(self, device: jax.Device) -> Iterator[None]:
        """What is traced inside is for the device: kernels choose their backend and block sizes by it."""
        from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

        fields = {"device_kind": device.device_kind, "num_cores": self.num_cores, "platform": self.platform}
        known = inspect.signature(AbstractDevice).parameters  # `platform` isn't there in every version
        abstract = AbstractDevice(**{name: value for name, value in fields.items() if name in known})
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract)):
            yield


TARGETS = {
    target.name: target
    for target in (
        Target("h200", "cuda", "cuda13", 132, ("triton", "mosaic_gpu")),
        Target("a100", "cuda", "cuda13", 108, ("triton",)),
        Target("v5e", "tpu", "tpu", 1, ("mosaic_tpu",)),
        Target("v6e", "tpu", "tpu", 1, ("mosaic_tpu",)),
    )
}


def prepare_environment(dump_folder: Path) -> None:
    """Settings that JAX and the compilers read when they start: no device is looked for, all code is dumped."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # several compile side by side
    os.environ["XLA_FLAGS"] = (
        f"--xla_dump_to={dump_folder} --xla_dump_hlo_as_text --xla_gpu_dump_llvmir --xla_dump_emitter_re=ptx"
    )
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(dump_folder)
