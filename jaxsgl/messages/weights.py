"""The commands about weights and memory, as msgspec structs: some of those of orders.py."""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec


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
      version: the new `weight_version`; None: the number of updates since the start.
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
