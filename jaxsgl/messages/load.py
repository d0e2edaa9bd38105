"""`Load`: how busy an engine is and what it has counted, as msgspec structs; `Replies` (replies.py) carry it.

The scheduler makes one per turn; metrics, routers and the APIs of load read it.
"""

from __future__ import annotations

import msgspec

from jaxsgl.config.engine import DEFAULT_WEIGHT_VERSION


class Totals(msgspec.Struct, array_like=True):
    """Counters since the start of the engine. The scheduler counts; a `Load` carries a copy.

    Attributes:
      prompt_tokens: of admitted samples.
      cached_prompt_tokens: of those, found in the prefix cache.
      output_tokens: read from the device.
      steps: launched; several decode steps in one program are one.
      decode_rows, decode_rows_padded: sequences of decode steps, and rows of their programs, of each of several steps.
      extend_tokens, extend_tokens_padded: likewise tokens of extend steps.
      retractions: running samples that were taken back to the queue.
      short_of_tokens, short_of_rows, short_of_chunk, short_of_adapters: steps at which requests waited for room in
        pool, batch, step, or on the device for their adapters.
      recompiles: programs compiled while serving; more than 0 is a bug.
      leaks: pages, rows and locks that the leak check found lost or in two places; more than 0 is a bug.
      failed_requests: requests that were ended because the work for them raised an exception; more than 0 is a bug.
      encoded_images, encoded_patches: images and frame pairs that the vision tower has encoded, and their patches.
      restored_images: whose embeddings came back from host memory instead.
    """

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    decode_rows: int = 0
    decode_rows_padded: int = 0
    extend_tokens: int = 0
    extend_tokens_padded: int = 0
    retractions: int = 0
    short_of_tokens: int = 0
    short_of_rows: int = 0
    short_of_chunk: int = 0
    short_of_adapters: int = 0
    recompiles: int = 0
    leaks: int = 0
    failed_requests: int = 0
    encoded_images: int = 0
    encoded_patches: int = 0
    restored_images: int = 0


class HostLoad(msgspec.Struct, array_like=True):
    """How full the host tier is, and counters since the start of the engine; zeros without such a tier.

    Attributes:
      total_tokens, used_tokens: tokens that host memory can hold, and holds.
      written_tokens: copied from the pool.
      loaded_tokens: copied to the pool instead of being computed.
      evicted_tokens: that left host memory because others needed their room.
      not_written_tokens: that found no room in host memory.
      given_up: loads that were stopped, so that their requests computed the rest.
    """

    total_tokens: int = 0
    used_tokens: int = 0
    written_tokens: int = 0
    loaded_tokens: int = 0
    evicted_tokens: int = 0
    not_written_tokens: int = 0
    given_up: int = 0


class TransferLoad(msgspec.Struct, frozen=True, array_like=True):
    """Requests and memory on the way between prefill and decode.

    Attributes:
      mode: "prefill" or "decode".
      num_bootstrapping: requests that wait for their other leg, or for staging memory.
      num_moving: requests whose pages are sent or received.
      staged_bytes: staging memory that is taken or promised.
      moved_bytes: sent or received since the start.
      hidden_bytes: of those, sent before the prompt was computed, so that no one waited for them. Prefill only.
    """

    mode: str
    num_bootstrapping: int
    num_moving: int
    staged_bytes: int
    moved_bytes: int
    hidden_bytes: int = 0


class Load(msgspec.Struct, frozen=True, array_like=True):
    """How busy the engine is after a turn of the loop.

    Attributes:
      num_running, num_waiting: samples that hold a row, and samples that wait for admission.
      waiting_tokens: prompt tokens of those, cached or not.
      used_tokens: KV slots in pages that running samples own or lock.
      cached_tokens: KV slots in pages that only the prefix cache holds; they are evicted when needed.
      num_retracted: waiting samples that have run before.
      paused: nothing is launched until generation is continued.
      totals: counters.
      step_times: how long steps took since the start, for messages/step_times.py: packed, since only a scrape reads it.
      weight_version: of the weights that made the tokens that come with this load, and of those served now.
      transfer: of a prefill or decode worker. Its requests on the way count as waiting too.
      host: the host tier.
      adapters: the names of the LoRA adapters that requests may name.
    """

    num_running: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    used_tokens: int = 0
    cached_tokens: int = 0
    num_retracted: int = 0
    paused: bool = False
    totals: Totals = msgspec.field(default_factory=Totals)
    step_times: bytes = b""
    weight_version: str = DEFAULT_WEIGHT_VERSION
    transfer: TransferLoad | None = None
    host: HostLoad = msgspec.field(default_factory=HostLoad)
    adapters: tuple[str, ...] = ()
