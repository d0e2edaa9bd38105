"""What the front end asks of the engine beside requests: aborts, operators' commands, lines of several front ends.

A command is answered once, by an `Answer` or its own kind of news, unless a `Withdraw` comes first. weights.py and
adapters.py have the commands about those.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

from jaxsgl.messages.adapters import AdapterOrder
from jaxsgl.messages.weights import WeightOrder

PARENT_LINE = 0  # of the process that started the engine; other front-end processes have the lines 1, 2, ...


_LINE_SHIFT = 32


def first_number(line: int) -> int:
    """Returns the first of the numbers by which the front-end process at `line` names its requests and commands."""
    return line << _LINE_SHIFT


def line_of(number: int) -> int:
    """Returns the line of the process that counted `number`."""
    return number >> _LINE_SHIFT


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """The client gave up, or one sample has all that it needs; what is unknown or has finished is ignored.

    Attributes:
      request_id: as in `Request`.
      index: the sample to end; None: all of the request's.
    """

    request_id: str
    index: int | None = None


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Leave the loop and end the process."""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Asks for a sign of life: the loop answers between two steps.

    Attributes:
      number: names this command in its `Answer`, as in all commands.
    """

    number: int


class FlushCache(msgspec.Struct, frozen=True, tag="flush_cache"):
    """Drop every cached prefix. Refused (`Answer.ok` False) while requests wait or run.

    While generation is paused those that wait don't matter.

    Attributes:
      timeout_s: wait so long for the last of them to end. New ones are let in meanwhile.
    """

    number: int
    timeout_s: float = 0.0


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """The command `number` needs no answer: its client has left. A flush or a weight order that waits is dropped."""

    number: int


class PauseMode(enum.Enum):
    """What becomes of the requests when generation is paused."""

    IN_PLACE = "in_place"  # they keep their KV, and go on with it
    RETRACT = "retract"  # they go back to the queue without their KV, so that the cache can be flushed
    ABORT = "abort"  # they end


class PauseGeneration(msgspec.Struct, frozen=True, tag="pause_generation"):
    """Launch nothing until `ContinueGeneration`; requests queue up. Answered when no step is in flight any more."""

    number: int
    mode: PauseMode


class ContinueGeneration(msgspec.Struct, frozen=True, tag="continue_generation"):
    """Go on, if generation is paused."""

    number: int


class DumpState(msgspec.Struct, frozen=True, tag="dump_state"):
    """Tell the scheduler's state; the `Answer.text` is JSON.

    Attributes:
      check: account for all pages, rows and locks, too; takes milliseconds.
    """

    number: int
    check: bool = False


class StartProfile(msgspec.Struct, frozen=True, tag="start_profile"):
    """Record a trace of the device and the host from the next step on; one at a time. Lost if the engine ends before.

    Attributes:
      folder: where the trace goes.
      num_steps: stop by itself after this many steps; None: at `StopProfile`.
      by_stage: record two traces, one from the first step on that extends prompts, one from the first that only
        decodes, each until it holds `num_steps` steps of its kind.
      max_s: stop by itself after so many seconds, waiting for steps included.
      max_mb: stop by itself before the trace takes about so many megabytes of memory, writing it included.
    """

    number: int
    folder: str
    num_steps: int | None = None
    by_stage: bool = False
    max_s: float = 60.0
    max_mb: int = 1024


class StopProfile(msgspec.Struct, frozen=True, tag="stop_profile"):
    """Stop recording and write the trace; answered when that is done, which takes seconds after hundreds of steps."""

    number: int


class WatchCache(msgspec.Struct, frozen=True, tag="watch_cache"):
    """Send `CacheEvents` from now on, first of all one (with this `number`) that tells all that is cached now."""

    number: int


class OpenLine(msgspec.Struct, frozen=True, tag="open_line"):
    """A front-end process starts, and will talk over `line`, a number that no process had before. Never answered."""

    line: int


class CloseLine(msgspec.Struct, frozen=True, tag="close_line"):
    """The front-end process at `line` has ended; its requests have no client any more. Never answered."""

    line: int


class AbortMatching(msgspec.Struct, frozen=True, tag="abort_matching"):
    """End the requests of all front-end processes that have this id. `Answer.text` is their number.

    Attributes:
      request_id: as clients gave it.
      prefix: end all requests whose ids begin with it.
    """

    number: int
    request_id: str
    prefix: bool = False


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """What became of the command `number`; `text` says why not, or where the result is."""

    number: int
    ok: bool
    text: str = ""


ProfileOrder: TypeAlias = StartProfile | StopProfile


Command: TypeAlias = (
    Ping
    | FlushCache
    | PauseGeneration
    | ContinueGeneration
    | DumpState
    | ProfileOrder
    | WatchCache
    | WeightOrder
    | AdapterOrder
)
