"""The engine: loads the model, compiles every bucket, sizes the KV cache, tries every program, then runs steps.

The only code of a running server that touches the device. Owns the parameters and the `DeviceState`. Knows nothing of
requests, page owners or text: the scheduler says what to compute in `StepInputs`, and gets token ids back. The serving
loop calls it from one thread.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from flax import nnx

from jaxsgl.batch.buckets import BucketSet, Capacity, buckets_of
from jaxsgl.batch.engine_api import EngineOp, PageLayout, PlaceAdapter
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.cache.pages import tokens_in
from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine import profiler
from jaxsgl.engine.adapters import EngineAdapters, plan_adapters
from jaxsgl.engine.drafting.draft import Drafting
from jaxsgl.engine.drafting.drafters import load_drafting, with_drafting
from jaxsgl.engine.kernels.choice import kernel_flags
from jaxsgl.engine.kernels.tester import KernelTester
from jaxsgl.engine.launcher import DeviceHandle, InLoop, LaunchedHandle, Launcher
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
from jaxsgl.engine.start.opening import Opened, in_words, open_model
from jaxsgl.engine.start.sizing import (
    NO_ADAPTERS,
    STEP_SHARE,
    PoolSize,
    choose_num_rows,
    choose_states,
    few_sizes,
    plan_capacity,
    slow_images,
)
from jaxsgl.engine.start.warmup import CompileCounter
from jaxsgl.engine.state import abstract_state, allocate, allocate_kv, allocate_running
from jaxsgl.engine.step_programs import ProgramSpec, StepPrograms, all_programs, largest_programs, step_bytes
from jaxsgl.engine.step_runner import StepRunner
from jaxsgl.engine.weight_store import EngineWeightStore, abstract_params, read_params
from jaxsgl.errors import ConfigError
from jaxsgl.hosts.group import Alone, Hosts
from jaxsgl.logs import StartParts
from jaxsgl.models import Decoder, Params, abstract_model
from jaxsgl.models.tensor_parallel import TENSOR_AXIS
from jaxsgl.weights import KvScales
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
        (mesh,) = opened.meshes
        self.arch, self.files = opened.arch, opened.files
        parts.end("devices and kernels")
        self.compiled = opened.program_set(progress, hosts.num_threads)
        loaded = _load(config, opened, self.compiled)
        states, self.adapters = loaded.states, loaded.adapters
        parts.end("weights")
        memory = _shared_memory(config, opened, hosts)
        with step_failure("the programs can't be compiled", memory.account):
            beside_bytes = reserved_bytes(states.page_bytes) if moves_pages else 0
            self.capacity, self.programs = _compile(config, opened, loaded, memory, self.compiled, beside_bytes)
        parts.end("programs")
        self.buckets = self.programs.buckets
        same_programs(self.compiled, self.capacity, hosts)
        with step_failure("the KV pool can't be allocated", memory.account):
            state = jax.block_until_ready(allocate(states, self.capacity, mesh, opened.images))
        self._layer_states, self._mesh = states, mesh
        moves_rows = self.capacity.tower is not None and self.capacity.tower.host_bytes > 0
        with step_failure("the programs that copy pages and rows can't run", memory.account):
            spec = self.programs.spec.state
            self._page_io = PageIo(self.compiled, spec, states, mesh, pages=moves_pages, rows=moves_rows)
            state = self._page_io.run_all(state)
            self._walls = keep_small_places(list(mesh.local_devices)) if opened.platform == "gpu" else []
        self._compiles = CompileCounter()
        self.weight_store = EngineWeightStore(
            config,
            self.arch,
            opened.precision.weights,
            mesh,
            loaded.kv_scales,
            loaded.params,
            opened.folder,
            self._compiles,
            self._set_pool,
        )
        self._params = self.weight_store.leaves
        self._draft_leaves: list[jax.Array] = jax.tree.leaves(loaded.drafting.params)
        self._runner = StepRunner(self.programs, self.arch, self._params, state, self.adapters, self._draft_leaves)
        if opened.platform == "cpu":
            use_large_pages(jax.tree.leaves((self._params, self._draft_leaves, state)))
        self._launcher: InLoop | Launcher = InLoop()  # until all programs have run once
        one_has_all_logits = hosts.size == config.num_ranks == 1
        self._run_each_once(config, opened, memory.account, checks_tokens=one_has_all_logits)
        if mesh.size > 1:
            self._launcher = Launcher()
        parts.end("running each once")
        logger.debug("the engine's start: %s", parts)
        kv_bytes = states.page_bytes * self.capacity.num_pages * mesh.size
        self.info = opened.info(config, self.capacity, kv_bytes, num_bytes(self._params), time.monotonic() - start_s)
        logger.info("%s", in_words(self.info, config.model, f"{mesh.size} x {opened.device.device_kind}"))
        logger.info(
            "%d programs compiled and run, %.1f s of loading and compiling; a step takes up to %.0f MiB next to "
            "the weights and the KV pool",
            len(self.compiled), self.info.warmup_s, self.programs.step_bytes / 2**20,
        )  # fmt: skip
        if (warning := slow_images(config, self.capacity.tower)) is not None:
            logger.warning(warning)

    def _run_each_once(self, config: EngineConfig, opened: Opened, account: str, *, checks_tokens: bool) -> None:
        """Runs every program before a request needs it. Raises `StartupError`, with the `account` of the memory."""
        drafts, num_ranks = self.programs.spec.drafting.num_drafts > 0, config.num_ranks
        run_all(self.submit, self.buckets.all(), self.capacity, account, drafts=drafts, num_ranks=num_ranks)
        if opened.tests_kernels and checks_tokens:
            self._check_tokens(account, min(opened.precision.weights.itemsize, opened.precision.activations.itemsize))
        run_masks(self.programs, account)
        run_tower(self._runner.encode, self.buckets, self.capacity, account)

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
        self._launcher.close()
        for array in jax.tree.leaves((self._runner.state, self._params, self._draft_leaves, self._walls)):
            if not array.is_deleted():
                array.delete()
        if self.adapters is not None:
            self.adapters.close()


@dataclass(frozen=True)
class _Loaded:
    """What an engine reads before it compiles.

    Attributes:
      graphdef, params: the model's structure and its parameters.
      kv_scales: of a float8 KV cache; None: the checkpoint has none, or the cache is of another dtype.
      states: what layers keep, with those that draft.
      drafting: weights that draft.
      adapters: LoRA adapters; None: no flag asks for any.
      adapter_size: that of their pool.
    """

    graphdef: nnx.GraphDef[Decoder]
    params: Params
    kv_scales: KvScales | None
    states: LayerStates
    drafting: Drafting
    adapters: EngineAdapters | None
    adapter_size: PoolSize

    def spec(self, config: EngineConfig, opened: Opened, capacity: Capacity) -> ProgramSpec:
        """What the programs share."""
        (mesh,) = opened.meshes
        return ProgramSpec(
            self.graphdef,
            abstract_params(self.params),
            abstract_state(self.states, capacity, mesh, opened.images),
            opened.kernels,
            mesh,
            self.kv_scales,
            None if self.adapters is None else self.adapters.abstract,
            capacity.tower,
            config.grammar_backend != "none",
            self.drafting,
            product_of_token(opened.arch, opened.precision.activations),
        )


def _load(config: EngineConfig, opened: Opened, compiled: ProgramSet) -> _Loaded:
    """Reads all weights onto the devices. Raises `StartupError`."""
    arch, precision, (mesh,) = opened.arch, opened.precision, opened.meshes
    graphdef, shapes = abstract_model(arch, precision.weights, precision.activations)
    check_weights_fit(opened.device, opened.jax_share, bytes_on_each_device(shapes, mesh), mesh.size)
    plan = plan_adapters(config.lora, arch)
    with loading_weights(opened.device, opened.jax_share):
        states = choose_states(config, arch, opened.platform, precision.kv, mesh.shape[TENSOR_AXIS])
        # First, since it is small: one that doesn't fit the model is refused before minutes of reading.
        drafting = load_drafting(config, opened.folder, arch, precision, states, mesh)
        states = with_drafting(states, drafting, choose_num_rows(config, opened.platform))
        params = read_params(config, opened.folder, arch, precision.weights, mesh)
        kv_scales = opened.kv_scales(config, arch)
        jax.block_until_ready(params)  # so that memory in use is what will stay in use
        adapters = None if plan is None else EngineAdapters(plan, arch, precision.activations, mesh, compiled)
    adapter_size = NO_ADAPTERS if plan is None else plan.size
    return _Loaded(graphdef, params, kv_scales, states, drafting, adapters, adapter_size)


def _shared_memory(config: EngineConfig, opened: Opened, hosts: Hosts) -> Memory:
    """What the fullest device of any host has left."""
    (mesh,) = opened.meshes
    memory = least_free_memory(list(mesh.local_devices), config.mem_fraction_static, opened.jax_share)
    static_bytes, all_bytes = hosts.least("the memory", (memory.static_bytes, memory.all_bytes))
    return replace(memory, static_bytes=static_bytes, all_bytes=all_bytes)


def _compile(
    config: EngineConfig, opened: Opened, loaded: _Loaded, memory: Memory, compiled: ProgramSet, beside_bytes: int
) -> tuple[Capacity, StepPrograms]:
    """Plans the capacity and compiles the programs of steps for it, the largest first: they show what a step takes.

    Where steps and pool don't fit together, the pool gives way. Programs are compiled for one number of pages, so the
    largest are then compiled again. `beside_bytes` of memory must be left besides.
    """

    def planned(taken_bytes: int) -> Capacity:
        return plan_capacity(config, opened.arch, loaded.states, memory, taken_bytes, loaded.adapter_size)

    # Programs are compiled for one number of pages: a little too few cost less than compiling twice.
    capacity = planned(0 if config.max_total_tokens else round(STEP_SHARE * memory.all_bytes))
    while True:
        spec = loaded.spec(config, opened, capacity)
        buckets = buckets_of(config, capacity, few_sizes(memory.platform, num_bytes(spec.params)))
        _check_backends(spec, buckets, kernel_flags(config))
        largest = list(largest_programs(spec, buckets))
        compiled.add(largest)
        fitting = planned(step_bytes(compiled, spec, buckets.largest()) + beside_bytes)
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
