"""The device that the program being traced is for: the process's own, or one that isn't there.

Owns the reading of JAX's abstract mesh and of /proc/cpuinfo: what kernels need to know of a chip. Never knows
kernels. Called by `dispatch`, `tuning` and kernels that need a minimum of hardware.
"""

import dataclasses
from pathlib import Path

import jax
from jax.sharding import get_abstract_mesh

CPUINFO = Path("/proc/cpuinfo")
# Of GPUs that aren't there, of which JAX says the kind alone, by words of it.
_COMPUTE_CAPABILITIES = {"A100": 8.0, "RTX 4090": 8.9, "H200": 9.0, "B200": 10.0, "RTX PRO 6000": 12.0}


@dataclasses.dataclass(frozen=True)
class TargetDevice:
    """Platform "cpu", "gpu" or "tpu", and the kind as the driver names it, e.g. "NVIDIA H200" or "TPU v5 lite"."""

    platform: str
    kind: str
    num_cores: int
    """Streaming multiprocessors, or TensorCores."""
    compute_capability: float | None = None
    """Such as 8.0 for an A100; None where the device isn't an NVIDIA GPU, or isn't there and isn't known."""
    is_here: bool = True
    """Whether it is the process's own, so that what is compiled will run."""

    @property
    def is_before_ampere(self) -> bool:
        """Whether it lacks the asynchronous copies and bfloat16 products that came with compute capability 8.0."""
        return self.compute_capability is not None and self.compute_capability < 8.0

    @property
    def converts_float8(self) -> bool:
        """Whether it has instructions for float8, as Ada and what came after."""
        return self.is_hopper or (self.compute_capability or 0) >= 8.9

    @property
    def is_hopper(self) -> bool:
        """Whether it has TMA and wgmma (compute capability 9.0)."""
        return self.platform == "gpu" and is_hopper(self.kind)


def is_hopper(kind: str) -> bool:
    """Whether the driver's name of a GPU is one of the Hopper generation's."""
    return any(name in kind for name in ("H100", "H200", "H800", "H20", "GH200"))


def target_device() -> TargetDevice:
    """Return the device that the program being traced is for.

    The abstract mesh's device, when one is set, wins over the process's own devices: this is how JAX compiles
    for hardware that isn't there (`jax.sharding.use_abstract_mesh`). Under `jax.shard_map` it is one of the mesh's
    devices, which may be our own.
    """
    abstract = get_abstract_mesh().abstract_device
    if abstract is None or abstract.device_kind == jax.devices()[0].device_kind:
        device = jax.devices()[0]
        cores = getattr(device, "core_count", None) or getattr(device, "num_cores", None) or 1
        return TargetDevice(_family(device.platform), device.device_kind, cores, _compute_capability(device))
    platform = getattr(abstract, "platform", None)
    if platform is None:  # JAX 0.11 has no such field
        platform = "tpu" if "TPU" in abstract.device_kind else "gpu"
    kind = abstract.device_kind
    known = next((number for words, number in _COMPUTE_CAPABILITIES.items() if words in kind), None)
    return TargetDevice(_family(platform), kind, abstract.num_cores or 1, known, is_here=False)


def processor_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """The flags of this machine's processor as Linux names them ("avx2", "avx512_bf16", ...); empty elsewhere."""
    return frozenset(_of_processor("flags", cpuinfo).split())


def processor_maker(cpuinfo: Path = CPUINFO) -> str:
    """The maker of this machine's processor as Linux names it ("GenuineIntel", "AuthenticAMD"); empty elsewhere."""
    return _of_processor("vendor_id", cpuinfo)


def _of_processor(what: str, cpuinfo: Path) -> str:
    try:
        pairs = [line.partition(":") for line in cpuinfo.read_text().splitlines()]
    except OSError:
        return ""
    return next((value.strip() for name, _, value in pairs if name.strip() == what), "")


def _compute_capability(device: jax.Device) -> float | None:
    text = str(getattr(device, "compute_capability", ""))
    return float(text) if text[:1].isdigit() else None  # GPUs of other makers have a name here


def _family(platform: str) -> str:
    return "gpu" if platform in ("cuda", "rocm") else platform
