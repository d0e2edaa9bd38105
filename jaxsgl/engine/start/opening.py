"""`open_model`: all that comes before the weights are read: the model's shape, its kernels, the devices, the formats.

What can be refused without reading weights is refused here. Called by `engine` and `stages`, at start. JAX starts in
the middle of it: kernels are tested before, by another process, while the device's memory is free.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxsgl.batch.buckets import Capacity, suggested_sizes
from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.kernels.choice import asked_kernels, may_round_rows_of_experts
from jaxsgl.engine.kernels.sums import SumsTrial
from jaxsgl.engine.kernels.tester import KernelTester
from jaxsgl.engine.programs import ProgramSet
from jaxsgl.engine.start.devices import join_hosts, meshes_of, reveal_devices
from jaxsgl.engine.start.fixed_order import asks_for_fixed_order, check_kernels
from jaxsgl.engine.start.joining import check_hosts
from jaxsgl.engine.start.memory import start_jax
from jaxsgl.engine.start.model_flags import check_flags, check_folder
from jaxsgl.engine.start.warmup import use_compilation_cache
from jaxsgl.engine.weight_formats import as_kept
from jaxsgl.engine.weight_store import read_arch
from jaxsgl.hosts.group import Hosts
from jaxsgl.messages.replies import EngineInfo
from jaxsgl.models import ModelArch, Precision, cpu_multiplies_bfloat16, kv_cache_flag, resolve_precision
from jaxsgl.models.quantization import FP8_E4M3
from jaxsgl.weights import KvScales, load_kv_scales, note_of_files, resolve_model_folder
from pallas_kernels import KernelChoice, device_multiplies_float8
from pallas_kernels.gpu_compiler import choose_mosaic_ptxas, log_compilers, versions_key
from pallas_kernels.native import library as native
from pallas_kernels.selftest.report import Verdict


class Opened(NamedTuple):
    """What is known of an engine before it reads weights.

    Attributes:
      folder: of the model.
      files: a note of what the folder, and that of what drafts, holds now; see `note_of_files`.
      arch: its shape, with weights as they are kept.
      kernels, verdicts: what operations run on, and what the test of kernels has found.
      tests_kernels: whether this machine's kernels need a test.
      meshes: the devices of each pipeline stage.
      jax_share: of a GPU's memory.
      precision: dtypes of weights, activations and the KV cache.
      in_fixed_order: whether programs add in one order, whatever the number of rows.
    """

    folder: Path
    files: str
    arch: ModelArch
    kernels: KernelChoice
    verdicts: tuple[Verdict, ...]
    tests_kernels: bool
    meshes: tuple[Mesh, ...]
    jax_share: float
    precision: Precision
    in_fixed_order: bool

    @property
    def device(self) -> jax.Device:
        """One of this host's; all are alike."""
        device: jax.Device = self.meshes[0].local_devices[0]
        return device

    @property
    def platform(self) -> str:
        """ "cpu", "gpu" or "tpu"."""
        return str(self.device.platform)

    @property
    def images(self) -> tuple[int, jnp.dtype] | None:
        """Numbers of a row of the pool of images' embeddings, and their dtype; None: it has none."""
        return None if self.arch.tower is None else (self.arch.tower.row_len, self.precision.activations)

    def kv_scales(self, config: EngineConfig, arch: ModelArch) -> KvScales | None:
        """Those that the folder has for the layers of `arch`; None: there are none, or the cache needs none."""
        if config.load_format == "dummy" or kv_cache_flag(self.precision.kv) != FP8_E4M3:
            return None
        return load_kv_scales(self.folder, arch)

    def info(
        self, config: EngineConfig, capacity: Capacity, kv_bytes: int, weight_bytes: int, warmup_s: float
    ) -> EngineInfo:
        """What the front end gets to know; the bytes are those of all devices."""
        return EngineInfo(
            model_path=str(self.folder),
            architecture=self.arch.name,
            dtype=self.precision.weights.name,
            limits=capacity.limits,
            eos_token_ids=self.arch.eos_token_ids,
            page_size=capacity.page_size,
            max_running_requests=capacity.num_rows * config.num_ranks,
            attention_backend=config.attention_backend,
            platform=self.platform,
            kv_bytes=kv_bytes,
            weight_bytes=weight_bytes,
            warmup_s=warmup_s,
            kv_cache_dtype=kv_cache_flag(self.precision.kv),
            kernels=tuple((each.op, each.backend, each.verdict) for each in self.verdicts),
            num_ranks=config.num_ranks,
        )

    def program_set(self, progress: bool, threads: int | None) -> ProgramSet:
        """An empty one; arguments as those of `ProgramSet`."""
        return ProgramSet(progress=progress, in_fixed_order=self.in_fixed_order, threads=threads)


def open_model(config: EngineConfig, kernel_tester: KernelTester | None, hosts: Hosts) -> Opened:
    """Does all that; arguments as those of `Engine`. Raises `StartupError`."""
    folder = resolve_model_folder(config.model, config.revision)
    check_folder(config, folder)
    arch = read_arch(config, folder)
    check_flags(config, arch)
    if config.auto_buckets is not None:
        suggested_sizes(config.auto_buckets)
    files = note_of_files(folder, None if config.draft_model is None else resolve_model_folder(config.draft_model))
    kernels = asked_kernels(config, arch)
    reveal_devices(config)
    choose_mosaic_ptxas()
    tester = KernelTester.of_this_machine() if kernel_tester is None else kernel_tester
    kernels, verdicts = tester.tested(config, arch, kernels)  # while the device's memory is free
    SumsTrial.next_to(tester).set_flag(config, arch)
    check_hosts(folder, arch, kernels, hosts)
    join_hosts(config)
    jax_share = start_jax()
    meshes = meshes_of(config)
    own_devices = list(meshes[0].local_devices)
    device = own_devices[0]
    hosts.same("the devices", f"{len(own_devices)} x {device.device_kind}", "let hosts of one kind share a model")
    platform = device.platform
    use_compilation_cache(config.compilation_cache_dir, versions_key() if platform == "gpu" else "")
    if platform == "gpu":
        log_compilers(device.device_kind)
    precision = resolve_precision(
        config.dtype, config.kv_cache_dtype, arch, platform, cpu_multiplies_bfloat16=cpu_multiplies_bfloat16
    )
    in_fixed_order = asks_for_fixed_order(config, arch, platform, precision.weights)
    if in_fixed_order:
        check_kernels(verdicts)
    rounds_rows = may_round_rows_of_experts(kernels) and device_multiplies_float8(precision.activations)
    kept = as_kept(
        arch,
        precision.weights,
        platform,
        config.tp,  # those of a stage, each of which has whole layers
        weight_only=config.weight_only,
        rounds_rows=rounds_rows,
    )
    tests_kernels = tester.platform is not None
    return Opened(folder, files, kept, kernels, verdicts, tests_kernels, meshes, jax_share, precision, in_fixed_order)


def in_words(info: EngineInfo, model: str, devices: str) -> str:
    """Returns what is served, on what, and how much fits, in a line."""
    if info.num_ranks > 1:
        devices = f"{devices} in {info.num_ranks} ranks"
    limits = info.limits
    return (
        f"serving {model} ({info.architecture}) on {devices}: {info.dtype}, {info.weight_bytes / 2**30:.2f} GiB of "
        f"weights, kernels {_backends(info)}, KV pool of {info.pool_tokens} tokens in "
        f"{info.kv_bytes / 2**30:.2f} GiB ({info.kv_cache_dtype}), context of {limits.context_length} tokens, up to "
        f"{info.max_running_requests} requests at once"
    )


def _backends(info: EngineInfo) -> str:
    """Names what kernels run on: what was tested, what the flag says, or a CPU's best."""
    tested = sorted({backend for _, backend, _ in info.kernels})
    if tested or info.attention_backend != "auto" or info.platform != "cpu":
        return ", ".join(tested) or info.attention_backend
    return "native (C++)" if native.load() is None else "xla"
