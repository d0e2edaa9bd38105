"""The contenders for transformers, in its two modes: `generate` on static batches, and continuous batching."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from bench.peers.contender import CannotRun, Setup
from jaxsgl.bench.requests import Job

PAD = 0
PAGE_SIZE = 64  # tokens per page in continuous batching
STEP_TOKENS = 512  # tokens of a step of continuous batching at most, on a CPU


class _Model:
    """Loads the model; outputs are greedy and ignore EOS."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype

    def start(self, setup: Setup) -> None:
        """See `Contender`."""
        if setup.device == "gpu" and not torch.cuda.is_available():
            raise CannotRun("torch sees no GPU")
        torch.set_num_threads(setup.num_threads)
        self._setup = setup
        self._device = "cuda" if setup.device == "gpu" else "cpu"
        dtype = getattr(torch, self._dtype)
        model = AutoModelForCausalLM.from_pretrained(setup.model, dtype=dtype, local_files_only=True)
        self._model: Any = model.to(self._device).eval()
        self._model.config.eos_token_id = self._model.generation_config.eos_token_id = None

    def versions(self) -> dict[str, str]:
        """See `Contender`."""
        found = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
        return found | {"attention": str(self._model.config._attn_implementation)}

    def reset(self) -> None:
        """See `Contender`. Nothing is kept between calls."""

    def close(self) -> None:
        """See `Contender`."""


class Static(_Model):
    """`generate` on batches in the order of the jobs, padded on the left; each batch runs to its longest output."""

    def __init__(self, dtype: str, batch_size: int) -> None:
        super().__init__(dtype)
        self._batch_size = batch_size

    def run(self, jobs: list[Job]) -> list[list[int]]:
        """See `Contender`. Tokens beyond a request's own output length are dropped."""
        batches = [jobs[first : first + self._batch_size] for first in range(0, len(jobs), self._batch_size)]
        return [output for batch in batches for output in self._generate(batch)]

    def _generate(self, jobs: list[Job]) -> list[list[int]]:
        width = max(len(job.prompt_ids) for job in jobs)
        padded = [[PAD] * (width - len(job.prompt_ids)) + job.prompt_ids for job in jobs]
        mask = [[0] * (width - len(job.prompt_ids)) + [1] * len(job.prompt_ids) for job in jobs]
        longest = max(job.output_len for job in jobs)
        config = GenerationConfig(do_sample=False, max_new_tokens=longest, eos_token_id=None, pad_token_id=PAD)
        with torch.inference_mode():
            rows = self._model.generate(
                input_ids=torch.tensor(padded, device=self._device),
                attention_mask=torch.tensor(mask, device=self._device),
                generation_config=config,
            )
        outputs: list[list[int]] = rows[:, width:].tolist()
        return [output[: job.output_len] for output, job in zip(outputs, jobs, strict=True)]


class Continuous(_Model):
    """`ContinuousBatchingManager` with all requests at once, and with a new cache for each run."""

    _manager: Any = None

    def reset(self) -> None:
        """Starts a new manager with an empty cache."""
        self.close()
        # A quarter more, for the manager's own safety margin.
        blocks = (self._setup.total // PAGE_SIZE + 2 * self._setup.num_jobs) * 5 // 4
        fields = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
        size = {"page_size" if "page_size" in fields else "block_size": PAGE_SIZE}  # block_size: before 5.18
        most = STEP_TOKENS if self._device == "cpu" else None
        config = ContinuousBatchingConfig(**size, num_blocks=blocks, max_batch_tokens=most)
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=PAD)
        self._manager = self._model.init_continuous_batching(generation, config)
        self._manager.warmup()
        self._manager.start()

    def run(self, jobs: list[Job]) -> list[list[int]]:
        """See `Contender`. Requests are sorted as `generate_batch` sorts them, so that shared prefixes are found."""
        for i in sorted(range(len(jobs)), key=lambda i: jobs[i].prompt_ids, reverse=True):
            self._manager.add_request(jobs[i].prompt_ids, request_id=str(i), max_new_tokens=jobs[i].output_len)
        outputs: dict[int, list[int]] = {}
        while len(outputs) < len(jobs):
            result = self._manager.get_result(timeout=1)
            if result is not None:
                if result.error is not None:
                    raise RuntimeError(result.error)
                outputs[int(result.request_id)] = result.generated_tokens
            elif not self._manager.is_running():
                raise RuntimeError("the manager's thread ended")
        return [outputs[i] for i in range(len(jobs))]

    def close(self) -> None:
        """Ends the manager's thread."""
        if self._manager is not None:
            self._manager.stop(block=True)
            self._manager.destroy()
