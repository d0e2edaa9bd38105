"""The engine: loads the model, compiles every bucket, sizes the KV cache, tries every program, then runs steps.

The only code of a running server that touches the device. Owns the parameters and the `DeviceState`. Knows nothing of
requests, page owners or text: the scheduler says what to compute in `StepInputs`, and gets token ids back. The serving
loop calls it from one thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jaxsgl.batch.buckets import BucketSet, Capacity, buckets_of
from jaxsgl.batch.engine_api import EngineOp, PageLayout, PlaceAdapter
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.cache.pages import tokens_in
from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine import profiler
from jaxsgl.engine.adapters import EngineAdapters, plan_adapters
from jaxsgl.engine.drafting.drafters import load_drafting, with_drafting
from jaxsgl.engine.kernels.choice import kernel_flags
from jaxsgl.engine.kernels.tester import KernelTester
from jaxsgl.engine.launcher import DeviceHandle, LaunchedHandle, Launcher
from jaxsgl.engine.layer_state import LayerStates
from jaxsgl.engine.page_io import PageIo, reserved_bytes
from jaxsgl.engine.programs import ProgramSet
from jaxsgl.engine.running import product_of_token
from jaxsgl.engine.start import token_check
from jaxsgl.engine.start.dry_run import run_all, run_masks, run_tower, step_failure
from jaxsgl.engine.start.joining import same_programs
from jaxsgl.engine.start.large_pages import use_large_pages
from jaxsgl.engine.start.memory import (
    Memory,
    check_weights_fit,
    keep_small_places,
    least_free_memory,
    loading_weights,
)
from jaxsgl.engine.start.opening import in_words, open_model
from jaxsgl.engine.start.sizing import (
    NO_ADAPTERS,
    STEP_SHARE,
    PoolSize,
    choose_num_rows,
    choose_states,
    few_sizes,
    plan_capacity,
)
from jaxsgl.engine.start.warmup import CompileCounter
from jaxsgl.engine.state import abstract_state, allocate, allocate_kv, allocate_running
from jaxsgl.engine.step_programs import ProgramSpec, StepPrograms, all_programs, largest_programs, step_bytes
from jaxsgl.engine.step_runner import StepRunner
from jaxsgl.engine.weight_store import EngineWeightStore, abstract_params, read_params
from jaxsgl.errors import ConfigError
from jaxsgl.hosts.group import Alone, Hosts
from jaxsgl.logs import StartParts
from jaxsgl.messages.replies import EngineInfo
from jaxsgl.models import ModelArch, abstract_model, kv_cache_flag
from jaxsgl.models.quantization import FP8_E4M3
from jaxsgl.models.tensor_parallel import TENSOR_AXIS
from jaxsgl.weights import load_kv_scales
from jaxsgl.weights.sharding import bytes_on_each_device

logger = logging.getLogger(__name__)


class Engine:
    """Runs steps on a model, in the order of `submit`. Implements `StepEngine` and `PageEngine`.

    Attributes:
      arch: the model's shape.
      capacity: the sizes that the scheduler works with.
      buckets: the shapes that are compiled.
      compiled: all programs of the engine.
      programs: those of steps and of the vision tower among them.
      info: what the front end gets to know.
      files: a note of the files that the first weights were read from, as they were before; see `note_of_files`.
      weight_store: parameters and KV pool, to be exchanged or released between steps.
      adapters: LoRA adapters; None: no flag asks for any.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: bool = True,
        moves_pages: bool = False,
        kernel_tester: KernelTester | None = None,
        hosts: Hosts = Alone(),
    ) -> None:
        """Does everything that takes time: after it, the first step can run.

        Args:
          config: flags.
          progress: whether to draw a progress bar on stderr while compiling.
          moves_pages: whether `apply` will be called; if so, its programs are compiled too.
          kernel_tester: how kernels are tested; None: as this machine needs it.
          hosts: those that share the model, which come to the same sizes and programs.

        Raises:
          StartupError: flags that don't fit the model or the memory, or a model that can't be loaded.
        """
        start_s, parts = time.monotonic(), StartParts()
        opened = open_model(config, kernel_tester, hosts)
        folder, kernels, (mesh,), precision = opened.folder, opened.kernels, opened.meshes, opened.precision
        parts.end("devices and kernels")
        dtype, activations, kv_dtype = precision
        own_devices = list(mesh.local_devices)
        device, platform, jax_share = opened.device, opened.platform, opened.jax_share
        self.arch, self.files = opened.arch, opened.files
        graphdef, shapes = abstract_model(self.arch, dtype, activations)
        check_weights_fit(device, jax_share, bytes_on_each_device(shapes, mesh), mesh.size)
        kv_scales = None
        adapter_plan = plan_adapters(config.lora, self.arch)
        self.compiled = opened.program_set(progress, hosts.num_threads)
        pool_size = NO_ADAPTERS if adapter_plan is None else adapter_plan.size
        with loading_weights(device, jax_share):
            params = read_params(config, folder, self.arch, dtype, mesh)
            if config.load_format != "dummy" and kv_cache_flag(kv_dtype) == FP8_E4M3:
                kv_scales = load_kv_scales(folder, self.arch)
            states = choose_states(config, self.arch, platform, kv_dtype, mesh.shape[TENSOR_AXIS])
            drafting = load_drafting(config, folder, self.arch, precision, states, mesh)
            states = with_drafting(states, drafting, choose_num_rows(config, platform))
            self._draft_leaves: list[jax.Array] = jax.tree.leaves(drafting.params)
            jax.block_until_ready(params)  # so that memory in use is what will stay in use
            self.adapters: EngineAdapters | None = None
            if adapter_plan is not None:
                self.adapters = EngineAdapters(adapter_plan, self.arch, activations, mesh, self.compiled)
        parts.end("weights")

        abstract = abstract_params(params)
        images = None if self.arch.vision is None else (self.arch.vision.row_len, activations)
        product = product_of_token(self.arch, activations)

        def spec_of(capacity: Capacity) -> ProgramSpec:
            state = abstract_state(states, capacity, mesh, images)
            pool = None if self.adapters is None else self.adapters.abstract
            masks = config.grammar_backend != "none"
            return ProgramSpec(
                graphdef, abstract, state, kernels, mesh, kv_scales, pool, capacity.tower, masks, drafting, product
            )

        memory = least_free_memory(own_devices, config.mem_fraction_static, jax_share)
        static_bytes, all_bytes = hosts.least("the memory", (memory.static_bytes, memory.all_bytes))
        memory = replace(memory, static_bytes=static_bytes, all_bytes=all_bytes)
        with step_failure("the programs can't be compiled", memory.account):
            beside_bytes = reserved_bytes(states.page_bytes) if moves_pages else 0
            self.capacity, self.programs = _compile(
                config, self.arch, states, memory, self.compiled, spec_of, beside_bytes, pool_size
            )
        parts.end("programs")
        self.buckets = self.programs.buckets
        same_programs(self.compiled, self.capacity, hosts)
        with step_failure("the KV pool can't be allocated", memory.account):
            state = jax.block_until_ready(allocate(states, self.capacity, mesh, images))
        self._layer_states, self._mesh = states, mesh
        moves_rows = self.capacity.tower is not None and self.capacity.tower.host_bytes > 0
        with step_failure("the programs that copy pages and rows can't run", memory.account):
            spec = self.programs.spec.state
            self._page_io = PageIo(self.compiled, spec, states, mesh, pages=moves_pages, rows=moves_rows)
            state = self._page_io.run_all(state)
            self._walls = keep_small_places(own_devices) if platform == "gpu" else []
        self._compiles = CompileCounter()
        self.weight_store = EngineWeightStore(
            config, self.arch, dtype, mesh, kv_scales, params, folder, self._compiles, self._set_pool
        )
        self._params = self.weight_store.leaves
        self._runner = StepRunner(self.programs, self.arch, self._params, state, self.adapters, self._draft_leaves)
        self._launcher: Launcher | None = None
        if platform == "cpu":
            use_large_pages(jax.tree.leaves((self._params, self._draft_leaves, state)))
        run_all(
            self.submit,
            self.buckets.all(),
            self.capacity,
            memory.account,
            drafts=drafting.num_drafts > 0,
            num_ranks=config.num_ranks,
        )
        if opened.tests_kernels and hosts.size == config.num_ranks == 1:  # else no host or rank has all logits
            self._check_tokens(memory.account, min(dtype.itemsize, activations.itemsize))
        if mesh.size > 1:
            self._launcher = Launcher()
        run_masks(self.programs, memory.account)
        run_tower(self._runner.encode, self.buckets, self.capacity, memory.account)
        parts.end("running each once")
        logger.debug("the engine's start: %s", parts)
        self.info = EngineInfo(
            model_path=str(folder),
            architecture=self.arch.name,
            dtype=dtype.name,
            limits=self.capacity.limits,
            eos_token_ids=self.arch.eos_token_ids,
            page_size=self.capacity.page_size,
            max_running_requests=self.capacity.num_rows * config.num_ranks,
            attention_backend=config.attention_backend,
            platform=platform,
            kv_bytes=states.page_bytes * self.capacity.num_pages * mesh.size,
            weight_bytes=num_bytes(self._params),
            warmup_s=time.monotonic() - start_s,
            kv_cache_dtype=kv_cache_flag(kv_dtype),
            kernels=tuple((each.op, each.backend, each.verdict) for each in opened.verdicts),
            num_ranks=config.num_ranks,
        )
        logger.info("%s", in_words(self.info, config.model, f"{mesh.size} x {device.device_kind}"))
        logger.info(
            "%d programs compiled and run, %.1f s of loading and compiling; a step takes up to %.0f MiB next to "
            "the weights and the KV pool",
            len(self.compiled), self.info.warmup_s, self.programs.step_bytes / 2**20,
        )  # fmt: skip

    @property
    def recompiles(self) -> int:
        """Programs that XLA compiled in this process since warm-up; more than 0 is a bug."""
        return self._compiles.count

    def submit(self, inputs: StepInputs) -> DeviceHandle | LaunchedHandle:
        """Launches one step and returns; never waits for the device. On several devices a thread launches it.

        The host array goes to the device as it is, the only transfer of a step without sampling features or changes of
        the page table. Raises `JaxsglError` for a bucket that wasn't compiled, and what XLA raises, which a launching
        thread leaves to the handle; after that the engine can't go on.
        """
        if self._launcher is None:
            return self._runner.launch(inputs)
        return self._launcher.launch(partial(self._runner.launch, inputs))

    def _check_tokens(self, account: str, itemsize: int) -> None:
        """Warns if extend and decode steps don't agree on real tokens. The state is as before, but for free pages."""
        if not token_check.fits(self.buckets, self.capacity):
            return

        def run(inputs: StepInputs) -> jax.Array:
            logits: jax.Array = self._runner.forward(self.programs.of(inputs.bucket)[0], inputs).logits
            return logits

        with step_failure("steps on real tokens can't run", account):
            apart, of_extend, of_decode = token_check.difference(run, self.buckets, self.capacity)
        state = self._runner.state
        table, last = state.page_table, state.last_tokens
        zeros = (jax.device_put(np.zeros(each.shape, each.dtype), each.sharding) for each in (table, last))
        self._runner.state = state._replace(**dict(zip(("page_table", "last_tokens"), zeros, strict=True)))
        if not apart <= token_check.MOST_DIFFERENCE[itemsize]:
            logger.warning(
                "%d tokens by an extend step, and all but %d by an extend step and these by decode steps, give logits "
                "that differ by %.0f%% of their norm (likeliest tokens %d and %d): attention of extend or decode steps "
                "is wrong here; compare with --attention-backend xla",
                token_check.NUM_TOKENS, token_check.NUM_DECODED, 100 * apart, of_extend, of_decode,
            )  # fmt: skip

    @property
    def page_layout(self) -> PageLayout:
        """What a page is in its host form."""
        return self._page_io.layout

    @property
    def load_token_s(self) -> float:
        """Seconds that a token takes from host memory to the pool, as measured at the start."""
        return self._page_io.load_page_s / tokens_in(1, self.capacity.page_size)

    def apply(self, op: EngineOp, number: int) -> None:
        """Submits an operation; never waits for the device. Those on pages only if the engine `moves_pages`."""
        if self._launcher is not None:
            self._launcher.settle()
        if isinstance(op, PlaceAdapter):
            assert self.adapters is not None, "no flag asked for adapters"
            self.adapters.place(op)
            return
        self._runner.state = self._page_io.apply(self._runner.state, op, number)

    def poll(self, wait: bool = False) -> list[tuple[int, npt.NDArray[Any]]]:
        """See `PageEngine`."""
        return self._page_io.poll(wait)

    def _set_pool(self, present: bool) -> None:
        """Takes the memory of the KV pool and of states, or gives it back; between steps."""
        if present:
            kv = allocate_kv(self._layer_states, self.capacity.num_pages, self._mesh)
            running = allocate_running(self._layer_states, self.capacity, self._mesh)
            kv, running = jax.block_until_ready((kv, running))
            self._runner.state = self._runner.state._replace(kv=kv, running=running)
        else:
            for array in jax.tree.leaves((self._runner.state.kv, self._runner.state.running)):
                array.delete()

    def start_profile(self, folder: str) -> None:
        """Starts to record a trace of device and host; see `profiler.start`."""
        profiler.start(folder)

    def stop_profile(self) -> None:
        """Writes the trace; see `profiler.stop`."""
        profiler.stop()

    def close(self) -> None:
        """Stops counting compilations and frees the device's memory."""
        self._compiles.close()
        if self._launcher is not None:
            self._launcher.close()
        for array in jax.tree.leaves((self._runner.state, self._params, self._draft_leaves, self._walls)):
            if not array.is_deleted():
                array.delete()
        if self.adapters is not None:
            self.adapters.close()


def _compile(
    config: EngineConfig,
    arch: ModelArch,
    states: LayerStates,
    memory: Memory,
    compiled: ProgramSet,
    spec_of: Callable[[Capacity], ProgramSpec],
    beside_bytes: int = 0,
    adapters: PoolSize = NO_ADAPTERS,
) -> tuple[Capacity, StepPrograms]:
    """Plans the capacity and compiles the programs of steps for it, the largest first: they show what a step takes.

    Where steps and pool don't fit together, the pool gives way. Programs are compiled for one number of pages, so the
    largest are then compiled again. `beside_bytes` of memory must be left besides. `adapters` is their pool's size.
    """
    # Programs are compiled for one number of pages: a little too few cost less than compiling twice.
    guess = 0 if config.max_total_tokens else round(STEP_SHARE * memory.all_bytes)
    capacity = plan_capacity(config, arch, states, memory, guess, adapters)
    while True:
        spec = spec_of(capacity)
        buckets = buckets_of(config, capacity, few_sizes(memory.platform, num_bytes(spec.params)))
        _check_backends(spec, buckets, kernel_flags(config))
        largest = list(largest_programs(spec, buckets))
        compiled.add(largest)
        taken = step_bytes(compiled, spec, buckets.largest()) + beside_bytes
        fitting = plan_capacity(config, arch, states, memory, taken, adapters)
        if fitting.num_pages >= capacity.num_pages:
            compiled.add(all_programs(spec, buckets))
            return capacity, StepPrograms(compiled, spec, buckets)
        logger.info("%d pages do not fit next to a step: %d do", capacity.num_pages, fitting.num_pages)
        compiled.forget({program.key for program in largest})
        capacity = fitting


def num_bytes(tree: Any) -> int:
    """Bytes of all arrays of a tree, or of what stands for them, on all devices together."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _check_backends(spec: ProgramSpec, buckets: BucketSet, flags: str) -> None:
    """Raises `ConfigError` if kernels that `flags` name can't run here; "auto" chooses those that can."""
    if not flags:
        return
    try:
        for bucket in {bucket.kind: bucket for bucket in buckets.all() if bucket.kind != "score"}.values():
            spec.forward(bucket).trace()
    except ValueError as error:
        raise ConfigError(f"{flags}: {error}") from error
