"""`Trial`: compiles a grammar and follows an output of it in a child process, before the engine compiles it.

Compiling is native code that takes minutes and gigabytes for some short grammars, and may end its process. Inside the
engine a thread that is busy with it can't be ended, and the serving loop that makes the masks can't leave one. So what
is left here within limits of memory and time is compiled in the engine, and nothing else. What a grammar costs is
measured on the way. Knows no requests; wiring.py makes it, and threads of scheduler/grammars/queue.py call it.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from jaxsgl.errors import EngineUnavailable, InvalidRequest
from jaxsgl.requests.grammar import Grammar
from jaxsgl.requests.grammar_work import GrammarWork
from jaxsgl.sandbox import Limits, Sandbox, SandboxLimit

MAX_TRIAL_BYTES = 128 << 20  # the largest that is of use takes 32 MiB: 262,144 characters of schema
NUM_TOKENS = 64  # of the output that is followed: more takes no more time a token, unless the grammar is ambiguous
CLOCK_FACTOR = 4  # time by the clock for each second of processor time: other work may keep the processors busy


class _Vocabulary(msgspec.Struct):
    """The arguments of `Compiler`."""

    folder: str
    vocab_size: int
    eos_token_ids: list[int]


class Trial:
    """Tries grammars for one vocabulary. Safe to call from several threads, whose trials run at the same time.

    Args:
      folder: of the model, as the other arguments those of `Compiler`.
      timeout_s: of processor time that one grammar may take, within `CLOCK_FACTOR` times as much by the clock.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int], timeout_s: float) -> None:
        vocabulary = _Vocabulary(str(folder), vocab_size, list(eos_token_ids))
        self._sandbox = Sandbox("jaxsgl.constraints.trial:make", msgspec.json.encode(vocabulary), "grammars")
        self._limits = Limits(MAX_TRIAL_BYTES, timeout_s, CLOCK_FACTOR * timeout_s)

    def start(self) -> None:
        """Starts the helper, if it doesn't run: about a second. Raises `InvalidRequest` or `SandboxCrash`."""
        self._sandbox.start()

    def run(self, grammar: Grammar) -> int:
        """Bytes of memory that `grammar` takes.

        Raises:
          InvalidRequest: it is no grammar, or takes more than it may.
          EngineUnavailable: it was not compiled in time, since it got too little processor time.
          SandboxCrash: it ended the process that tried it.
        """
        try:
            return int(self._sandbox.call(msgspec.json.encode(grammar), self._limits))
        except SandboxLimit as error:
            if error.kind == "time":
                raise EngineUnavailable(
                    f"the {grammar.kind} was not compiled within {self._limits.time_s:g} s, in which it got less than "
                    f"{self._limits.cpu_s:g} s (--grammar-timeout) of processor time: try later"
                ) from None
            most = f"{MAX_TRIAL_BYTES >> 20} MiB of memory"
            if error.kind != "memory":
                most = f"{self._limits.cpu_s:g} s of processor time to compile (--grammar-timeout)"
            raise InvalidRequest(f"the {grammar.kind} takes more than {most}: simplify it") from None


def make(argument: bytes) -> Callable[[bytes], bytes]:
    """What the helper does once: reads the vocabulary. Raises `InvalidRequest` as `Compiler`."""
    from jaxsgl.constraints.compiler import Compiler  # here alone: the engine's process has no use for llguidance yet

    vocabulary = msgspec.json.decode(argument, type=_Vocabulary)
    compiler = Compiler(Path(vocabulary.folder), vocabulary.vocab_size, vocabulary.eos_token_ids)

    def try_it(request: bytes) -> bytes:
        """Compiles a grammar, and follows an output of its first allowed tokens; returns the bytes that it took.

        Raises `InvalidRequest` for what the engine would have no time for, too.
        """
        grammar = msgspec.json.decode(request, type=Grammar)
        words = np.zeros(-(-vocabulary.vocab_size // 32), dtype=np.uint32)
        before = _held_bytes()
        matcher, work = compiler.compile(grammar), GrammarWork()
        for num_tokens in range(NUM_TOKENS):
            with work:
                matcher.mask_into(words)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            text = allowed[~np.isin(allowed, vocabulary.eos_token_ids)]
            if matcher.ended or not len(text):
                break
            with work:
                matcher.advance(int(text[0]))
            work.check(num_tokens + 1)
        return b"%d" % max(0, _held_bytes() - before)

    return try_it


def _held_bytes() -> int:
    """Memory of this process that no file stands behind; 0 where the system doesn't say."""
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_bytes().split()
    except FileNotFoundError:
        return 0
    return (int(resident) - int(shared)) * resource.getpagesize()
