"""What the engine tells the front end of its requests, and of its own life."""

from __future__ import annotations

import enum

import msgspec

from jaxsgl.config.engine import Limits
from jaxsgl.messages.load import Load
from jaxsgl.requests.outputs import Pooled, TokenStates
from jaxsgl.requests.request import FinishReason


class RefusalKind(enum.Enum):
    """Why the scheduler refused or ended a request."""

    INVALID = "invalid"  # it can never be served
    OVERLOADED = "overloaded"  # the queue is full
    WAITED = "waited"  # it waited too long for its admission
    RAN = "ran"  # it ran too long
    FAILED = "failed"  # the server failed at it, and would again
    PEER = "peer"  # the worker of its other leg is gone


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """A refused request; `text` is for the client."""

    kind: RefusalKind
    text: str


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities at one position.

    Attributes:
      logprob: of the token that stands there.
      top: (token id, log-probability) of the most likely ones, best first; as many as were asked for.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class StageTimes(msgspec.Struct, frozen=True, array_like=True):
    """Seconds that a sample spent in the engine before its first token.

    Attributes:
      queue_s: from its arrival to its first admission.
      prefill_s: from there until its first token was read.
    """

    queue_s: float
    prefill_s: float


class Reply(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """News about one sample of a request: its new tokens, and its end if it ended.

    Attributes:
      request_id: as in `Request`.
      token_ids: new output tokens (empty when the request was refused or aborted).
      finish_reason: None while it runs.
      cached_tokens: prompt tokens whose KV was already cached when it was admitted.
      refusal: set when the scheduler refused the request, and then nothing more comes of any of its samples.
      index: which of the request's n samples.
      logprob: of the new token, if asked for; such requests get one token a step.
      prompt_logprobs: of prompt tokens 1, 2, ... (nothing stands before token 0), if asked for; comes once, with the
        first token of sample 0.
      times: with a sample's first token, or with `pooled`.
      pooled: the whole answer to a request for pooling, with its end.
      states: of the tokens since the reply before, up to the one before its last new one, if asked for.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    refusal: Refusal | None = None
    index: int = 0
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    times: StageTimes | None = None
    pooled: Pooled | None = None
    states: TokenStates | None = None


class Replies(msgspec.Struct, frozen=True, tag="replies"):
    """All news of one turn of the loop; sent after every step and every message, even if no request has news."""

    replies: list[Reply]
    load: Load = Load()


class EngineInfo(msgspec.Struct, frozen=True):
    """What the front end must know about the engine to check requests and to answer GetModelInfo.

    `warmup_s` is the time in seconds that loading and compiling took; `kv_bytes` and `weight_bytes` the
    sizes of all KV buffers and parameters; `kv_cache_dtype` what --kv-cache-dtype came to.
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
    weight_bytes: int
    warmup_s: float
    kv_cache_dtype: str = "auto"


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    """Every bucket is compiled; requests may be sent."""

    info: EngineInfo


class EngineFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine ends because of this."""

    message: str
