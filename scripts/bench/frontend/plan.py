"""The plan of a run, known to all its processes: the tokens of each stream and their times; and the check of them.

The script writes a `Plan` to a file; the fake engine, the server and the load read it. The load's clients only keep the
bytes they receive. They are read after the run: so the load costs little while it is measured, and yet every token of
every stream is compared with what the engine sent.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from jaxsgl.config.engine import BUNDLED_MODEL
from jaxsgl.text.detokenizer import ByteDetokenizer, TokenBytes

MODEL = "bench"  # name of the model in the APIs
PATIENCE_S = 60.0
STRIDE = 7  # each stream starts this many tokens after the one before it, so that all differ
TEXT = """The server reads every step of the engine once, and each of its streams gets its own tokens: in order, none
of them twice. 12 + 30 = 42; {"name": "Anna", "age": 31, "city": "Paris"}. Once upon a time a fox lived in a forest
near the old mill. "Who are you?" asked the owl. "I am a very small model that lives inside an inference server."
Monday, Tuesday, Wednesday... こんにちは! 👋 Grüße aus Köln, ça va? 红色, 蓝色. Count: 1 2 3 4 5 6 7 8 9 10 11 12.
"""


class Plan(msgspec.Struct, frozen=True):
    """The plan of a run.

    Attributes:
      num_streams: requests at the same time.
      num_tokens: tokens of each stream.
      step_s: seconds from one step of the engine to the next; a step gives one token to every stream.
      ids: the tokens, repeated as often as needed; stream s starts at s x STRIDE.
      folder: where the processes leave files for each other.
      num_workers: front-end processes.
      num_connections: that all streams share over gRPC.
    """

    num_streams: int
    num_tokens: int
    step_s: float
    ids: list[int]
    folder: str
    num_workers: int = 1
    num_connections: int = 8

    @classmethod
    def make(cls, num_streams: int, num_tokens: int, rate: float, folder: Path, **more: int) -> Plan:
        """A plan with the tokens of `TEXT`; `rate` is tokens per second of all streams together, 0 for no pauses."""
        ids = tokenizer().encode(TEXT).ids
        return cls(num_streams, num_tokens, num_streams / rate if rate else 0.0, ids, str(folder), **more)

    @classmethod
    def load(cls, path: str) -> Plan:
        """Reads the plan from a file."""
        return msgspec.json.decode(Path(path).read_bytes(), type=cls)

    def save(self) -> Path:
        """Writes the plan into its folder; returns the path."""
        path = Path(self.folder) / "plan.json"
        write_whole(path, self)
        return path

    @property
    def steps_path(self) -> Path:
        """Where the engine writes the times of its steps, in seconds by the monotonic clock."""
        return Path(self.folder) / "steps.json"

    @property
    def lines_path(self) -> Path:
        """Where the engine writes how many streams each front-end process had, in the order of their lines."""
        return Path(self.folder) / "lines.json"

    @property
    def profile_path(self) -> Path:
        """Where the server writes its profile."""
        return Path(self.folder) / "profile.json"

    def token(self, stream: int, step: int) -> int:
        """The id that `stream` gets in `step`."""
        return self.ids[(stream * STRIDE + step) % len(self.ids)]

    def tokens(self, stream: int) -> list[int]:
        """All ids of `stream`."""
        return [self.token(stream, step) for step in range(self.num_tokens)]


def written(path: Path) -> Path:
    """Waits until another process has written `path`, and returns it."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{path} was not written within {PATIENCE_S:g} s")
        time.sleep(0.01)
    return path


def write_whole(path: Path, value: object) -> None:
    """Writes JSON for another process, which sees the whole file or none."""
    partial = path.with_suffix(".part")
    partial.write_bytes(msgspec.json.encode(value))
    partial.rename(path)


def tokenizer() -> Tokenizer:
    """The bundled model's tokenizer, without transformers around it."""
    return Tokenizer.from_file(f"{BUNDLED_MODEL}/tokenizer.json")


@dataclass
class Received:
    """What one stream received: (seconds by the monotonic clock, bytes), in order."""

    parts: list[tuple[float, bytes]] = field(default_factory=list)

    def add(self, data: bytes) -> None:
        """Keeps `data` with the time."""
        self.parts.append((time.monotonic(), data))


@dataclass(frozen=True)
class Chunk:
    """A message of the protocol. Text or ids are None if the protocol has none."""

    time_s: float
    text: str | None
    ids: Sequence[int] | None


class WrongStream(Exception):
    """A stream differs from what the engine sent."""


class Expected:
    """What the streams of a plan must receive."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._tokenizer = tokenizer()
        self._bytes = TokenBytes(self._tokenizer.id_to_token, ())

    def check(self, stream: int, chunks: Sequence[Chunk]) -> list[tuple[float, int]]:
        """Returns (seconds, tokens so far) for each chunk. Raises `WrongStream` if text or ids differ from the plan."""
        ids = self._plan.tokens(stream)
        if all(chunk.ids is not None for chunk in chunks):
            got = [id for chunk in chunks for id in chunk.ids or ()]
            if got != ids:
                raise WrongStream(f"stream {stream}: {len(got)} ids differ from the {len(ids)} of the engine")
        if any(chunk.text for chunk in chunks):
            text = "".join(chunk.text or "" for chunk in chunks)
            if text != self._tokenizer.decode(ids, skip_special_tokens=True):
                raise WrongStream(f"stream {stream}: the text of {len(text)} characters differs from the engine's")
        elif any(chunk.ids is None for chunk in chunks):
            raise WrongStream(f"stream {stream}: neither text nor ids")
        counts = itertools.accumulate(self._num_tokens(stream, chunks))
        return [(chunk.time_s, count) for chunk, count in zip(chunks, counts, strict=True)]

    def _num_tokens(self, stream: int, chunks: Sequence[Chunk]) -> list[int]:
        """The number of tokens in each chunk. A token without text counts with the next token that has some."""
        if all(chunk.ids is not None for chunk in chunks):
            return [len(chunk.ids or ()) for chunk in chunks]
        detokenizer = ByteDetokenizer(self._bytes)
        ends = list(itertools.accumulate(len(detokenizer.feed([id])) for id in self._plan.tokens(stream)))
        at = list(itertools.accumulate(len(chunk.text or "") for chunk in chunks))
        done = [bisect.bisect_left(ends, position) + 1 if position else 0 for position in at]
        done[-1] = len(ends)
        return [now - before for before, now in itertools.pairwise([0, *done])]
