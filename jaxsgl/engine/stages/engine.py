"""`StagedEngine`: the engine as pipeline stages. Each has some of the layers, on devices of its own (`--pp-size`).

    step n      stage 0  -- stream [T, D] -->  stage 1  -- stream -->  the last stage -> tokens, read by the host
    step n + 1            stage 0  ------------------>  stage 1 ...

A program per stage: each step runs in its own bucket on every stage, so that one stage extends a prompt while another
one decodes. Activations go forward only, from device to device, and tokens come back through the host, which knows them
when it plans a request's next step (`InTurns`). Nothing goes backward on the devices, so that no stage waits
for a later one. All stages get the same packed buffer and the same changes of their page tables, and have pools of
equally many pages: page ids mean the same everywhere, and one cache decides. The last stage samples; it alone has the
tables of logit edits.

A thread for each stage launches its programs in order (`parts.py`), as CPU devices run programs of one thread one after
another. Stages may be on several hosts (`hosts/passing.py`): each makes its own, and all come to one capacity. Knows no
requests.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxsgl.batch.buckets import BucketSet, Capacity, buckets_of
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine import profiler
from jaxsgl.engine.launcher import LaunchedHandle
from jaxsgl.engine.layer_state import LayerStates
from jaxsgl.engine.programs import ProgramSet
from jaxsgl.engine.stages.parts import FromHost, Part, Stage, ToHost
from jaxsgl.engine.stages.programs import PassingRunner, StageSpec
from jaxsgl.engine.start.dry_run import run_all, run_masks, run_passing, step_failure
from jaxsgl.engine.start.memory import Memory, check_weights_fit, keep_small_places, least_free_memory, loading_weights
from jaxsgl.engine.start.opening import Opened, in_words, open_model
from jaxsgl.engine.start.sizing import STEP_SHARE, choose_states, plan_capacity
from jaxsgl.engine.start.warmup import CompileCounter
from jaxsgl.engine.state import abstract_state, allocate
from jaxsgl.engine.step_programs import StepPrograms, all_programs, largest_programs
from jaxsgl.engine.step_runner import StepRunner
from jaxsgl.engine.weight_store import abstract_params, read_params
from jaxsgl.hosts.group import Alone, Hosts, Neighbours
from jaxsgl.models import ModelArch, Params, abstract_model
from jaxsgl.weights import KvScales
from jaxsgl.weights.sharding import bytes_on_each_device

logger = logging.getLogger(__name__)


def cut_layers(layer_bytes: Sequence[int], head_bytes: int, num_stages: int) -> list[tuple[int, int]]:
    """The first layer of each stage and the one after its last, such that the largest stage has the fewest bytes.

    The head, of `head_bytes`, is on the last stage: a decode step reads it, but only rows of the embedding.
    """
    num_layers = len(layer_bytes)
    sums = [0, *np.cumsum(layer_bytes).tolist()]
    # By first layer, of the stages from there on: the bytes of the largest one, and where each ends.
    least: dict[int, tuple[int, tuple[int, ...]]] = {num_layers: (0, ())}
    for stage in range(num_stages):
        extra, rest = head_bytes if stage == 0 else 0, least
        least = {}
        for first in range(num_layers):
            options = [
                (max(sums[stop] - sums[first] + extra, most), (stop, *stops))
                for stop, (most, stops) in rest.items()
                if stop > first
            ]
            if options:
                least[first] = min(options)
    return list(pairwise((0, *least[0][1])))


@dataclass
class _Stage:
    """A stage that is being made: its weights are read.

    Attributes:
      arch: of its layers.
      params: its parameters; graphdef: their structure.
      states: what its layers keep.
      programs: those compiled so far.
      memory: what a device of it has left, once all stages are loaded.
    """

    arch: ModelArch
    mesh: Mesh
    graphdef: nnx.GraphDef[Any]
    params: Params
    states: LayerStates
    kv_scales: KvScales | None
    programs: ProgramSet
    memory: Memory

    def own(self, capacity: Capacity) -> Capacity:
        """What it allocates: no edit tables, unless it samples."""
        return capacity if self.arch.stage.is_last else replace(capacity, vocab_size=0)

    def spec(self, config: EngineConfig, opened: Opened, capacity: Capacity) -> StageSpec:
        """What its programs share."""
        return StageSpec(
            self.graphdef,
            abstract_params(self.params),
            abstract_state(self.states, self.own(capacity), self.mesh),
            opened.kernels,
            self.mesh,
            self.kv_scales,
            masks=self.arch.stage.is_last and config.grammar_backend != "none",
            stage=self.arch.stage,
            hidden_size=self.arch.hidden_size,
            activations=opened.precision.activations,
        )


def layers_of_stages(arch: ModelArch, dtype: jnp.dtype, num_stages: int) -> list[tuple[int, int]]:
    """The layers of each stage, by the bytes of their weights; see `cut_layers`."""
    _, params = abstract_model(arch, dtype)
    layer_bytes, head_bytes = [0] * arch.num_layers, 0
    head = "embedding" if arch.tie_embeddings else "lm_head"
    for path, param in nnx.to_flat_state(params):
        num_bytes = math.prod(param.shape) * param.dtype.itemsize
        if path[0] == "layers":
            layer_bytes[int(str(path[1]))] += num_bytes
        elif str(path[0]).startswith(head):  # with its scales, if it is quantized
            head_bytes += num_bytes
    return cut_layers(layer_bytes, head_bytes, num_stages)


def _load(config: EngineConfig, opened: Opened, first: int, stop: int, mesh: Mesh, progress: bool) -> _Stage:
    """Reads the weights of the layers first .. stop - 1 onto `mesh`, and no others."""
    arch, dtype, kv_dtype = opened.arch.of_layers(first, stop), opened.precision.weights, opened.precision.kv
    graphdef, shapes = abstract_model(arch, dtype, opened.precision.activations)
    check_weights_fit(opened.device, opened.jax_share, bytes_on_each_device(shapes, mesh), mesh.size)
    with loading_weights(opened.device, opened.jax_share):
        params = jax.block_until_ready(read_params(config, opened.folder, arch, dtype, mesh))
        kv_scales = opened.kv_scales(config, arch)
    states = choose_states(config, arch, opened.platform, kv_dtype, mesh.size)
    unknown = Memory(opened.platform, 0, 0)
    return _Stage(arch, mesh, graphdef, params, states, kv_scales, opened.program_set(progress, None), unknown)


def _memories(config: EngineConfig, opened: Opened) -> list[Memory]:
    """What a device of each stage has left. The virtual devices of a CPU share the host's memory."""
    each = [least_free_memory(list(mesh.local_devices), config.mem_fraction_static, opened.jax_share)
            for mesh in opened.meshes]  # fmt: skip
    if opened.platform != "cpu":
        return each
    parts = len(each)
    return [replace(one, static_bytes=one.static_bytes // parts, all_bytes=one.all_bytes // parts) for one in each]


def _compile(
    config: EngineConfig, opened: Opened, stages: Sequence[_Stage], hosts: Hosts
) -> tuple[Capacity, BucketSet, StageSpec]:
    """Plans the capacity, and compiles all programs for it, as `engine` does for one stage.

    The stage with room for the fewest pages decides, that of any host. Where its steps and pool don't fit together, the
    pool gives way. Returns what the programs of the last stage here share, too.
    """

    def planned(step_bytes: Sequence[int]) -> Capacity:
        plans = [
            plan_capacity(config, stage.arch, stage.states, stage.memory, taken)
            for stage, taken in zip(stages, step_bytes, strict=True)
        ]
        least = min(plans, key=lambda plan: plan.num_pages)
        (num_pages,) = hosts.least("the pages", (least.num_pages,))
        return replace(least, num_pages=num_pages)

    guess = 0.0 if config.max_total_tokens else STEP_SHARE
    capacity = planned([round(guess * stage.memory.all_bytes) for stage in stages])
    while True:
        buckets, taken = buckets_of(config, capacity), []
        specs = [stage.spec(config, opened, capacity) for stage in stages]
        for stage, spec in zip(stages, specs, strict=True):
            stage.programs.add(largest_programs(spec, buckets))
            taken.append(spec.bytes_of_step(stage.programs, buckets.largest()))
        fitting = planned(taken)
        if fitting.num_pages >= capacity.num_pages:
            for stage, spec in zip(stages, specs, strict=True):
                stage.programs.add(all_programs(spec, buckets))
            return capacity, buckets, specs[-1]
        logger.info("%d pages do not fit next to a step: %d do", capacity.num_pages, fitting.num_pages)
        for stage in stages:
            stage.programs.forget(list(stage.programs.compilations))
        capacity = fitting


class StagedEngine:
    """Runs steps on a model in stages, in the order of `submit`. Implements `StepEngine`.

    Attributes:
      arch: the whole model's shape.
      capacity, buckets, info: as those of `Engine`, of the stages of all hosts.
      compiled: the programs of each stage of this host, first to last.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: bool = True,
        hosts: Hosts = Alone(),
        neighbours: Neighbours = Neighbours(),
    ) -> None:
        """Does everything that takes time; arguments and errors as those of `Engine`.

        `neighbours` are the hosts with the stages before and after those of this one.
        """
        start_s = time.monotonic()
        opened = open_model(config, None, hosts)
        self.arch = opened.arch
        cuts = layers_of_stages(opened.arch, opened.precision.weights, config.pp_size)
        own = config.own_stages
        making = [
            _load(config, opened, first, stop, mesh, progress)
            for (first, stop), mesh in zip(cuts[own.start : own.stop], opened.meshes, strict=True)
        ]
        for stage, memory in zip(making, _memories(config, opened), strict=True):
            stage.memory = memory
        account = making[0].memory.account
        with step_failure("the programs can't be compiled", account):
            self.capacity, self.buckets, last_spec = _compile(config, opened, making, hosts)
        hosts.same("the sizes", str(self.capacity), "give all hosts the same flags")
        with step_failure("the KV pools can't be allocated", account):
            choosing = [
                StepPrograms(stage.programs, last_spec, self.buckets) for stage in making if stage.arch.stage.is_last
            ]  # where the last stage is
            self._stages = [self._running(stage, choosing) for stage in making]
        self._parts: list[Part] = [
            *(FromHost(host, self.arch.hidden_size, opened.precision.activations) for host in neighbours.before),
            *self._stages,
            *(ToHost(host) for host in neighbours.after),
        ]
        devices = [device for mesh in opened.meshes for device in mesh.local_devices]
        self._walls = keep_small_places(devices) if opened.platform == "gpu" else []
        self.compiled = [stage.programs for stage in making]
        self._compiles = CompileCounter()
        run = run_all if choosing else run_passing
        run(self.submit, self.buckets.all(), self.capacity, account)
        for programs in choosing:
            run_masks(programs, account)
        kv_bytes = sum(stage.states.page_bytes for stage in making) * self.capacity.num_pages * config.tp
        weight_bytes = sum(array.nbytes for stage in self._stages for array in stage.params)
        self.info = opened.info(
            config,
            self.capacity,
            kv_bytes=sum(map(int, hosts.all_of("the bytes of KV pools", str(kv_bytes)))),
            weight_bytes=sum(map(int, hosts.all_of("the bytes of weights", str(weight_bytes)))),
            warmup_s=time.monotonic() - start_s,
        )
        self._log_start(config, opened, hosts, cuts)

    def _log_start(self, config: EngineConfig, opened: Opened, hosts: Hosts, cuts: Sequence[tuple[int, int]]) -> None:
        """Says what is served and where its layers are; `cuts` are those of `layers_of_stages`."""
        layers = " + ".join(str(stop - first) for first, stop in cuts)
        in_all = f"{config.pp_size} stages ({layers} layers) of {config.tp} x {opened.device.device_kind}"
        if hosts.size > 1:
            in_all += f" on {hosts.size} hosts"
            own = config.own_stages
            logger.info("host %d has the layers %d to %d", hosts.rank, cuts[own.start][0], cuts[own.stop - 1][1] - 1)
        logger.info("%s", in_words(self.info, config.model, in_all))
        logger.info(
            "%d programs compiled and run, %.1f s of loading and compiling",
            sum(map(len, self.compiled)), self.info.warmup_s,
        )  # fmt: skip

    def _running(self, stage: _Stage, choosing: Sequence[StepPrograms]) -> Stage:
        """`stage` with its state allocated; `choosing` are the programs of the last stage, if it is here."""
        state = jax.block_until_ready(allocate(stage.states, stage.own(self.capacity), stage.mesh))
        params = jax.tree.leaves(stage.params)
        if stage.arch.stage.is_last:
            (last,) = choosing
            return Stage(StepRunner(last, stage.arch, params, state), stage.mesh, params)
        return Stage(PassingRunner(stage.programs, self.buckets, params, state), stage.mesh, params)

    @property
    def recompiles(self) -> int:
        """See `StepEngine`."""
        return self._compiles.count

    def submit(self, inputs: StepInputs) -> LaunchedHandle:
        """Has each part do its own of a step, one after the other, and returns at once.

        What a part raises comes with the handle; after that the engine can't go on.
        """
        before: Future[Any] | None = None
        for part in self._parts:
            before = part.launch(inputs, before)
        assert before is not None
        return LaunchedHandle(before, self._parts[-1].launcher)

    def start_profile(self, folder: str) -> None:
        """Starts to record a trace of devices and host; see `profiler.start`."""
        profiler.start(folder)

    def stop_profile(self) -> None:
        """Writes the trace; see `profiler.stop`."""
        profiler.stop()

    def close(self) -> None:
        """Stops counting compilations, ends the threads and frees the devices' memory."""
        self._compiles.close()
        for part in self._parts:
            part.close()
        for array in jax.tree.leaves(([(stage.runner.state, stage.params) for stage in self._stages], self._walls)):
            if not array.is_deleted():
                array.delete()
