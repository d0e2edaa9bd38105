"""What the two processes say to each other, as msgspec structs (MessagePack on ZeroMQ; never pickle); here the orders.

Front end to engine: `Request`, `Abort`, `Shutdown`, and commands of operators, each answered once unless a `Withdraw`
comes first: by an `Answer`, or in the case of `WatchCache` by `CacheEvents`. Several front-end processes that share an
engine send `LineOrder`s too, which shared_mailbox.py carries out.
Engine to front end (replies.py): `EngineReady` once, then one `Replies` per turn of the loop (hence per step),
`CacheEvents` after a `WatchCache`, and `EngineFailed` as the final message.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

from jaxsgl.messages.replies import CacheEvents, EngineFailed, EngineReady, HostsLoad, Replies
from jaxsgl.requests.request import Request

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
      index: the sample to end, or None for all of the request's.
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


class WatchEngine(msgspec.Struct, frozen=True, tag="watch_engine"):
    """Report what the scheduler holds and does, for people who look on; the `Answer.text` is JSON, an `EngineView`.

    Steps are recorded from the first of these orders until `seconds` after the latest one, and never without one.

    Attributes:
      since: leave out the steps up to the one of this number.
      seconds: record on for so long.
    """

    number: int
    since: int = 0
    seconds: float = 5.0


class StartProfile(msgspec.Struct, frozen=True, tag="start_profile"):
    """Record a trace of the device and the host from the next step on; one at a time. Lost if the engine ends before.

    Attributes:
      folder: where the trace goes.
      num_steps: stop by itself after this many steps, or at `StopProfile` if None.
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
    """Send `CacheEvents` from now on, first of all one (with this `number`) that has all that is cached now."""

    number: int


class UpdateMode(enum.Enum):
    """What becomes of the requests that have begun when the weights change. Those that wait get the new ones."""

    WAIT = "wait"  # they end with the old weights first; requests that have not begun wait
    RETRACT = "retract"  # they go on with the new weights, which compute their KV again
    ABORT = "abort"  # they end, and so do those that wait
    IN_PLACE = "in_place"  # they go on with the new weights over the KV of the old ones


class UpdateWeights(msgspec.Struct, frozen=True, tag="update_weights"):
    """Serve the weights of another checkpoint of the same model; if that fails, the old ones serve on.

    The `Answer.text` is JSON if it succeeds: an `UpdateReport`.

    Attributes:
      folder: a model folder or hub id.
      version: the new `weight_version`; if None, the number of updates since the start.
    """

    number: int
    folder: str
    mode: UpdateMode = UpdateMode.WAIT
    version: str | None = None


class UpdateReport(msgspec.Struct, frozen=True):
    """What an update has done: the version served now, and how many samples went on with it after the old one."""

    weight_version: str
    num_continued: int = 0


class SetWeightVersion(msgspec.Struct, frozen=True, tag="set_weight_version"):
    """Call the weights that are served `version`."""

    number: int
    version: str


class MemoryTag(enum.Enum):
    """A part of the device's memory that the engine can do without for a while."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


class ReleaseMemory(msgspec.Struct, frozen=True, tag="release_memory"):
    """Give parts of the device's memory back once no request runs; generation is paused until all are back."""

    number: int
    tags: tuple[MemoryTag, ...]


class ResumeMemory(msgspec.Struct, frozen=True, tag="resume_memory"):
    """Take parts of the device's memory that were released again, and fill the weights; generation goes on after all.

    The `Answer.text` is empty, or says what is still released.
    """

    number: int
    tags: tuple[MemoryTag, ...]


WeightOrder: TypeAlias = UpdateWeights | SetWeightVersion | ReleaseMemory | ResumeMemory


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter"):
    """Load an adapter, so that requests may name it. The `Answer.text` is empty, or says why it can't be served.

    Attributes:
      name: what requests and lists of models call it.
      folder: a folder in PEFT's layout, or a hub id.
      pinned: keep it on the device once it is there.
      replace: take the place of one of the same name, for requests that come from then on.
      alias: another name for requests, if there is one: gateways number adapters.
    """

    number: int
    name: str
    folder: str
    pinned: bool = False
    replace: bool = False
    alias: str = ""


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter"):
    """Forget an adapter: requests that come from now on can't name it. Answered when those that have it have ended."""

    number: int
    name: str


class ListAdapters(msgspec.Struct, frozen=True, tag="list_adapters"):
    """Tell the adapters that requests may name; the `Answer.text` is JSON, a list of `LoadedAdapter`."""

    number: int


class LoadedAdapter(msgspec.Struct, frozen=True):
    """An adapter that requests may name.

    Attributes:
      name, folder, pinned, alias: see `LoadAdapter`.
      rank: its highest one.
      on_device: whether it is on the device now, so that a request for it needn't wait for room.
      num_requests: samples that have it and have not ended.
    """

    name: str
    folder: str
    rank: int
    pinned: bool
    on_device: bool
    num_requests: int
    alias: str = ""


AdapterOrder: TypeAlias = LoadAdapter | UnloadAdapter | ListAdapters


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
    | WatchEngine
    | ProfileOrder
    | WatchCache
    | WeightOrder
    | AdapterOrder
)


ToEngine: TypeAlias = Request | Abort | Command | Withdraw | Shutdown
LineOrder: TypeAlias = OpenLine | CloseLine | AbortMatching
ToMailbox: TypeAlias = ToEngine | LineOrder
News: TypeAlias = Replies | Answer | CacheEvents
FromEngine: TypeAlias = EngineReady | News | HostsLoad | EngineFailed
