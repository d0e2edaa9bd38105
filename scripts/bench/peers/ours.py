"""The contender for jaxsgl itself, through `jaxsgl.LLM`."""

from __future__ import annotations

import argparse
import importlib.metadata
import shlex

import jax

from bench.peers.contender import CannotRun, Setup
from jaxsgl import LLM, SamplingParams
from jaxsgl.bench.requests import Job
from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.flags import add_flags, from_flags

PAGES = 64  # spare tokens per request in the pool: admission counts whole pages, and one more


class Ours:
    """jaxsgl with any flags of the engine.

    Args:
      flags: as on the server's command line. Without --max-total-tokens, the pool holds all requests at once.
    """

    def __init__(self, flags: str) -> None:
        self._flags = flags

    def start(self, setup: Setup) -> None:
        """See `Contender`."""
        if jax.default_backend() != setup.device:
            raise CannotRun(f"JAX computes on {jax.default_backend()}, not on {setup.device}")
        parser = argparse.ArgumentParser(exit_on_error=False)
        add_flags(parser, EngineConfig)
        parser.set_defaults(model=setup.model, max_total_tokens=setup.total + PAGES * setup.num_jobs)
        config = from_flags(EngineConfig, parser.parse_args(shlex.split(self._flags)))
        self._llm = LLM(**vars(config))

    def versions(self) -> dict[str, str]:
        """See `Contender`."""
        return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")} | {"flags": self._flags}

    def reset(self) -> None:
        """Empties the prefix cache."""
        self._llm.flush_cache()

    def run(self, jobs: list[Job]) -> list[list[int]]:
        """See `Contender`."""
        params = [SamplingParams(temperature=0, max_tokens=job.output_len, ignore_eos=True) for job in jobs]
        completions = self._llm.generate([job.prompt_ids for job in jobs], params, use_tqdm=False)
        return [completion.token_ids for completion in completions]

    def close(self) -> None:
        """See `Contender`."""
