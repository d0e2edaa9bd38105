"""The contender for llama.cpp, through the low-level batch API of llama-cpp-python: all sequences are in one context.

Prompts come first, with one or more calls for each; then every step of all running sequences is one call.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp as lib
import numpy as np
import numpy.typing as npt

from bench.peers.contender import CannotRun, Setup
from bench.peers.gguf_file import write_gguf
from jaxsgl.bench.requests import Job

PAD = 256  # llama.cpp rounds the tokens of a sequence up to this
STEP_TOKENS = 512  # tokens of one call at most
ALL_LAYERS = 1 << 20


class Token(NamedTuple):
    """A token to compute, and whether the token after it is wanted."""

    token_id: int
    position: int
    sequence: int
    wanted: bool


class Llama:
    """llama.cpp.

    Args:
      dtype: of the matrices: float32, float16, bfloat16, q8_0 or q4_0.
      share: compute the prefix of each group once, and copy it to the other sequences of the group.
    """

    def __init__(self, dtype: str, share: bool = False) -> None:
        self._dtype, self._share = dtype, share

    def start(self, setup: Setup) -> None:
        """See `Contender`."""
        if setup.device == "gpu" and not lib.llama_supports_gpu_offload():
            raise CannotRun("llama-cpp-python was built for the CPU alone")
        if setup.num_jobs > lib.llama_max_parallel_sequences():
            raise CannotRun(f"{setup.num_jobs} sequences: a context holds {lib.llama_max_parallel_sequences()}")
        self._setup = setup
        lib.llama_backend_init()
        with tempfile.TemporaryDirectory(prefix="bench-peers-") as folder:
            path = Path(folder) / "model.gguf"
            write_gguf(Path(setup.model), path, self._dtype)
            params = lib.llama_model_default_params()
            params.n_gpu_layers = ALL_LAYERS if setup.device == "gpu" else 0
            self._model = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise CannotRun("llama.cpp doesn't load the model")
        self._context: Any = lib.llama_init_from_model(self._model, self._context_params())
        if not self._context:
            raise CannotRun("llama.cpp makes no context")
        self._memory = lib.llama_get_memory(self._context)
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._batch = lib.llama_batch_init(STEP_TOKENS, 0, 1)

    def versions(self) -> dict[str, str]:
        """See `Contender`."""
        told = {name: importlib.metadata.version(name) for name in ("llama-cpp-python", "gguf")}
        return told | {
            "kv_unified": "False",
            "flash_attention": "True",
            "system": lib.llama_print_system_info().decode(),
        }

    def reset(self) -> None:
        """Empties the KV cache."""
        lib.llama_memory_clear(self._memory, False)

    def run(self, jobs: list[Job]) -> list[list[int]]:
        """See `Contender`.

        Sequences are numbered by falling output length. The running ones are then always the first ones, whose buffers
        llama.cpp computes in one piece.
        """
        order = sorted(range(len(jobs)), key=lambda i: -jobs[i].output_len)
        sorted_jobs = [jobs[i] for i in order]
        outputs = [[first] for first in self._prompts(sorted_jobs)]
        while running := [s for s, job in enumerate(sorted_jobs) if len(outputs[s]) < job.output_len]:
            lengths = (len(sorted_jobs[s].prompt_ids) + len(outputs[s]) - 1 for s in running)
            tokens = [Token(outputs[s][-1], at, s, True) for s, at in zip(running, lengths, strict=True)]
            for s, token_id in zip(running, self._decode(tokens), strict=True):
                outputs[s].append(token_id)
        of_job = dict(zip(order, outputs, strict=True))
        return [of_job[i] for i in range(len(jobs))]

    def close(self) -> None:
        """Frees the memory."""
        if getattr(self, "_context", None):
            lib.llama_batch_free(self._batch)
            lib.llama_free(self._context)
            lib.llama_model_free(self._model)

    def _prompts(self, jobs: Sequence[Job]) -> list[int]:
        """Computes all prompts; returns the first output token of each."""
        firsts: list[int] = []
        holders: dict[tuple[int, ...], int] = {}
        for s, job in enumerate(jobs):
            begin = 0
            if self._share:
                prefix = tuple(job.prompt_ids[: self._setup.prefix_len])
                holder = holders.setdefault(prefix, s)
                if holder != s:
                    begin = len(prefix)
                    lib.llama_memory_seq_cp(self._memory, holder, s, 0, -1)
                    lib.llama_memory_seq_rm(self._memory, s, begin, -1)
            last = len(job.prompt_ids) - 1
            tokens = [Token(job.prompt_ids[at], at, s, at == last) for at in range(begin, last + 1)]
            for first in range(0, len(tokens), STEP_TOKENS):
                firsts += self._decode(tokens[first : first + STEP_TOKENS])
        return firsts

    def _decode(self, tokens: Sequence[Token]) -> list[int]:
        """Computes `tokens`; returns the most likely next token of each that wants one."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token.token_id, token.position, token.wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, token.sequence
        status = lib.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        num_wanted = sum(token.wanted for token in tokens)
        if not num_wanted:
            return []
        pointer = ctypes.cast(lib.llama_get_logits(self._context), ctypes.POINTER(ctypes.c_float))
        logits: npt.NDArray[np.float32] = np.ctypeslib.as_array(pointer, (num_wanted, self._vocab_size))
        chosen: list[int] = logits.argmax(axis=1).tolist()
        return chosen

    def _context_params(self) -> Any:
        setup = self._setup
        params = lib.llama_context_default_params()
        params.n_ctx = -(-setup.longest // PAD) * PAD * setup.num_jobs
        params.n_batch = params.n_ubatch = STEP_TOKENS
        params.n_seq_max = setup.num_jobs
        params.n_threads = params.n_threads_batch = setup.num_threads
        params.kv_unified = False  # one buffer for all sequences would make attention look at all tokens
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        return params
