"""The contender for OpenVINO GenAI, in its continuous batching: all requests at once, pages of 32 tokens."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import openvino
import openvino_genai as genai

from bench.peers.contender import CannotRun, Setup
from bench.peers.openvino_file import write_openvino
from jaxsgl.bench.requests import Job

PAGE_SIZE = 32  # tokens of a page on a CPU
STEP_TOKENS = 512  # tokens of a step at most


class OpenVINO:
    """OpenVINO GenAI.

    Args:
      weights: float16, int8 or int4. With a byte or less, the plugin rounds activations to int8, too, where it can.
      arithmetic: "f32" or "bf16", the hint for all that isn't quantized.
      kv: format of the KV cache: f32, bf16 or u8, which is OpenVINO's default.
      share: compute the prefix of each group before all requests are added, so that they find it cached.
    """

    def __init__(self, weights: str, arithmetic: str, kv: str, share: bool = False) -> None:
        self._weights, self._share = weights, share
        self._properties = {"INFERENCE_PRECISION_HINT": arithmetic, "KV_CACHE_PRECISION": kv}
        self._ids = itertools.count()

    def start(self, setup: Setup) -> None:
        """See `Contender`."""
        if setup.device != "cpu":
            raise CannotRun("it is measured on CPUs only")
        self._setup = setup
        self._folder = write_openvino(Path(setup.model), Path(setup.scratch), self._weights)
        self._properties["INFERENCE_NUM_THREADS"] = str(setup.num_threads)
        self._pipeline = self._loaded()

    def versions(self) -> dict[str, str]:
        """See `Contender`."""
        names = ("openvino", "openvino-genai", "optimum-intel", "nncf")
        return {name: importlib.metadata.version(name) for name in names} | self._properties

    def reset(self) -> None:
        """Loads the model again where prefixes are cached, since nothing else drops them."""
        if self._setup.prefix_len:
            self._pipeline = self._loaded()

    def run(self, jobs: list[Job]) -> list[list[int]]:
        """See `Contender`."""
        if self._share:
            prefixes = {tuple(job.prompt_ids[: self._setup.prefix_len]): job for job in jobs}
            self._serve([dataclasses.replace(job, prompt_ids=list(ids), output_len=1) for ids, job in prefixes.items()])
        return self._serve(jobs)

    def close(self) -> None:
        """See `Contender`."""

    def _serve(self, jobs: Sequence[Job]) -> list[list[int]]:
        handles = [self._pipeline.add_request(next(self._ids), _prompt(job), _greedy(job.output_len)) for job in jobs]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return [list(handle.read_all()[0].generated_ids) for handle in handles]

    def _loaded(self) -> genai.ContinuousBatchingPipeline:
        config = genai.SchedulerConfig()
        config.max_num_batched_tokens = STEP_TOKENS
        config.num_kv_blocks = self._setup.total // PAGE_SIZE + 2 * self._setup.num_jobs
        config.enable_prefix_caching = bool(self._setup.prefix_len)
        return genai.ContinuousBatchingPipeline(str(self._folder), config, "CPU", self._properties)


def _prompt(job: Job) -> openvino.Tensor:
    return openvino.Tensor(np.array([job.prompt_ids], np.int64))


def _greedy(num_tokens: int) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = num_tokens
    config.ignore_eos, config.do_sample = True, False
    return config
