"""The states of one request's tokens between the steps that compute them and the reply that takes them along.

A retracted request computes its first tokens again; their states are handed over once. Never knows steps: apply.py
hands over what they yield.
"""

from __future__ import annotations

from jaxsgl.batch.engine_api import StatesRows
from jaxsgl.requests.sampling import SamplingParams
from jaxsgl.requests.token_states import TokenStates


class KeptStates:
    """Collects states in the order of positions. `sampling` says which."""

    __slots__ = ("_experts", "_hidden", "_next", "_wants_experts", "_wants_hidden")

    def __init__(self, sampling: SamplingParams) -> None:
        self._wants_hidden, self._wants_experts = sampling.return_hidden_states, sampling.return_routed_experts
        self._next = 0  # the first position that has not come yet
        self._hidden: list[bytes] = []
        self._experts: list[bytes] = []

    def take(self, rows: StatesRows, first: int, count: int, start: int) -> None:
        """Takes rows first .. first + count - 1 of a step, of the tokens from position `start` on."""
        known = max(self._next - start, 0)
        part = slice(first + known, first + count)
        if known >= count:
            return
        assert start + known == self._next, "states of tokens in between are missing"
        self._next = start + count
        if self._wants_hidden:
            self._hidden.append(rows.hidden[part].tobytes())
        if self._wants_experts and rows.experts is not None:
            self._experts.append(rows.experts[part].tobytes())

    def taken(self) -> TokenStates:
        """Hands over what has come since the last call."""
        states = TokenStates(b"".join(self._hidden), b"".join(self._experts))
        self._hidden, self._experts = [], []
        return states
