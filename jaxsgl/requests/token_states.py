"""What a model computed for single tokens, if a request asks for it: hidden states and the experts that were chosen.

Position p's state is that of token p, which yields token p + 1: a prompt of m tokens with n of output has m + n - 1.
Owns the values and their checks. Never knows steps or devices: the engine computes, the scheduler collects.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from jaxsgl.errors import InvalidRequest
from jaxsgl.requests.sampling import SamplingParams

MAX_STATE_NUMBERS = 1 << 23  # of one request: 32 MB in memory, 160 MB as JSON


class StatesSpec(msgspec.Struct, frozen=True):
    """What the server returns.

    Attributes:
      hidden: whether it returns hidden states, `[tokens, hidden_size]`.
      experts: whether it returns the chosen experts, `[tokens, num_layers, top_k]`, with -1 in layers without.
    """

    hidden: bool
    experts: bool
    hidden_size: int
    num_layers: int
    top_k: int


class TokenStates(msgspec.Struct, frozen=True, array_like=True):
    """Of consecutive tokens; bytes of float32 and int32."""

    hidden: bytes = b""
    experts: bytes = b""


def check_states(sampling: SamplingParams, num_tokens: int, spec: StatesSpec | None) -> None:
    """Raises `InvalidRequest` for states of up to `num_tokens` tokens that a server with `spec` doesn't return."""
    asked, per_token = (sampling.return_hidden_states, sampling.return_routed_experts), 0
    for name, flag, wanted in zip(("hidden_states", "routed_experts"), ("hidden", "experts"), asked, strict=True):
        if wanted and not (spec is not None and getattr(spec, flag)):
            needs = "" if flag == "hidden" else ", and serve a model with a mixture of experts"
            raise InvalidRequest(
                f"return_{name} is true, but the server returns none: start it with "
                f"--enable-return-{name.replace('_', '-')}{needs}"
            )
        if wanted and spec is not None:
            per_token += spec.hidden_size if flag == "hidden" else spec.num_layers * spec.top_k
    if num_tokens * per_token > MAX_STATE_NUMBERS:
        raise InvalidRequest(
            f"the states of {num_tokens} tokens may be {num_tokens * per_token} numbers, but {MAX_STATE_NUMBERS} are "
            "the most: shorten the prompt or lower max_tokens"
        )


def hidden_states(parts: Sequence[TokenStates], spec: StatesSpec) -> npt.NDArray[np.float32]:
    """`[tokens, hidden_size]` of all parts."""
    return np.frombuffer(b"".join(part.hidden for part in parts), np.float32).reshape(-1, spec.hidden_size)


def routed_experts(parts: Sequence[TokenStates], spec: StatesSpec) -> npt.NDArray[np.int32]:
    """`[tokens, num_layers, top_k]` of all parts."""
    joined = np.frombuffer(b"".join(part.experts for part in parts), np.int32)
    return joined.reshape(-1, spec.num_layers, spec.top_k)
