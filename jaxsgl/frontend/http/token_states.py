"""Hidden states and routed experts of tokens in answers over HTTP, in SGLang's forms.

OpenAI's choices hold the hidden state of their last token that has one, and `sglext` of the answer the experts of the
first choice; /generate holds all of them. chat.py, completions.py and SGLang's replies use it.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated

from msgspec import UNSET, UnsetType
from pydantic import Field

from jaxsgl.frontend.http.bodies import Body
from jaxsgl.requests.outputs import StatesSpec, TokenStates, hidden_states, routed_experts
from jaxsgl.requests.request import Request
from jaxsgl.text.sample import Piece


class StatesAsked(Body):
    """A body that may ask for states."""

    return_hidden_states: (
        Annotated[bool, Field(description="of the last token; of servers with --enable-return-hidden-states")] | None
    ) = None
    return_routed_experts: (
        Annotated[bool, Field(description="of all tokens; of servers with --enable-return-routed-experts")] | None
    ) = None


class StatesCollector:
    """The states of all choices of a call while their pieces arrive.

    Choice `number` is sample `number % n` of request `number // n`. `spec` says what the server returns.
    """

    def __init__(self, requests: Sequence[Request], spec: StatesSpec | None) -> None:
        sampling = requests[0].sampling
        self._spec = spec if sampling.wants_states else None
        self._sampling = sampling
        self._prompt_lens = [len(request.prompt_ids) for request in requests]
        self._parts: dict[int, list[TokenStates]] = {}

    def add(self, number: int, piece: Piece) -> None:
        """Takes a piece of choice `number`."""
        if self._spec is not None:
            self._parts.setdefault(number, []).extend(piece.states)

    @property
    def num_numbers(self) -> int:
        """Numbers to write, or to read before."""
        return sum(len(part.hidden) + len(part.experts) for parts in self._parts.values() for part in parts) // 4

    def hidden(self, number: int) -> list[float] | UnsetType:
        """Returns the state of the last token of choice `number` that has one; [] if no generated token does."""
        if self._spec is None or not self._sampling.return_hidden_states:
            return UNSET
        rows = hidden_states(self._parts.get(number, []), self._spec)
        generated: list[list[float]] = rows[self._prompt_lens[number // self._sampling.n] :][-1:].tolist()
        return generated[0] if generated else []

    def all_hidden(self) -> list[tuple[int, list[float]]]:
        """Returns the number and the last state of each choice that has pieces; nothing unless they are asked for."""
        numbered = ((number, self.hidden(number)) for number in sorted(self._parts))
        return [(number, state) for number, state in numbered if not isinstance(state, UnsetType)]

    def extension(self) -> dict[str, str] | UnsetType:
        """Returns `sglext`."""
        if self._spec is None or not self._sampling.return_routed_experts:
            return UNSET
        return {"routed_experts": experts_text(self._parts.get(0, []), self._spec)}


def experts_text(states: Sequence[TokenStates], spec: StatesSpec) -> str:
    """Returns base64 of int32 `[tokens, num_layers, top_k]`."""
    return base64.b64encode(routed_experts(states, spec).astype("<i4").tobytes()).decode()
