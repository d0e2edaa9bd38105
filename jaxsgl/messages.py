"""What the two processes say to each other, as msgspec structs (MessagePack on ZeroMQ; never pickle).

Front end to engine: `Request` (from request.py), `Abort`, `Shutdown`. Engine to front end: `EngineReady` once,
then one `Replies` per step for all requests of that step, `EngineFailed` as a last word.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from jaxsgl.config import Limits
from jaxsgl.request import FinishReason, Request


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


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities at one position.

    Attributes:
      logprob: of the token that stands there.
      top: (token id, log-probability) of the most likely ones, best first; as many as were asked for.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """News about one sample of a request: at most one new token, and its end if it ended.

    Attributes:
      request_id: as in `Request`.
      token_ids: new output tokens (empty when the request was refused or aborted).
      finish_reason: None while it runs.
      cached_tokens: prompt tokens whose KV was already cached when it was admitted.
      error: set when the scheduler refused the request; the client's mistake, in words for the client.
      index: which of the request's n samples.
      logprob: of the new token, if asked for.
      prompt_logprobs: of prompt tokens 1, 2, ... (nothing stands before token 0), if asked for; comes once, with the
        first token of sample 0.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    error: str | None = None
    index: int = 0
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


class Replies(msgspec.Struct, frozen=True, tag="replies"):
    """All news of one step."""

    replies: list[Reply]


class EngineInfo(msgspec.Struct, frozen=True):
    """What the front end must know about the engine to check requests and to answer GetModelInfo.

    `warmup_s` is the time in seconds that loading and compiling took; `kv_bytes` the size of all KV buffers.
    """

    model_path: str
    architecture: str
    dtype: str
    limits: Limits
    eos_token_ids: tuple[int, ...]
    page_size: int
    max_running_requests: int
    attention_backend: str
    platform: str
    kv_bytes: int
    warmup_s: float


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    """Every bucket is compiled; requests may be sent."""

    info: EngineInfo


class EngineFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine ends because of this."""

    message: str


ToEngine: TypeAlias = Request | Abort | Shutdown
FromEngine: TypeAlias = EngineReady | Replies | EngineFailed
