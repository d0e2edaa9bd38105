"""`Occurrences`: one growing text of tokens, and where the tokens at its end, or at another's, stood in it before.

The bulk, mostly a prompt, is sorted by the tokens before each place, the nearest first. A bisection finds all places
whose tokens before agree with a context, and narrowing that range finds those that agree longest:

    tokens   a b c a b d a b          longest match of the end "a b", two tokens long: places 2 and 5,
    place    0 1 2 3 4 5 6 7            where c and d followed

What came since is in a dict of its shortest contexts, and joins the bulk when it is an eighth of it. So a token costs
about a microsecond, 16 bytes, and a few more while it is new. Knows no requests; sources.py
looks things up in it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

PACKED = 3  # tokens of a context in one sorted number
BITS = 21  # of each token, kept as its id plus one: 0 stands where a context is shorter
MAX_VOCAB = (1 << BITS) - 1
MIN_RECENT = 256  # tokens that are not sorted, at least before the bulk is sorted anew
RECENT_PART = 8  # likewise, as a part of the bulk
FEW = 64  # numbers of which Python finds the largest as fast as NumPy

_NOWHERE = array("i")


class Occurrences:
    """One text, by what stood before each of its tokens.

    Args:
      shortest, longest: tokens of a context that must agree, and that are compared.
      newest: of the places after an equal shortest context so many are known, and nothing is sorted: for texts of which
        new ones come without end. None: all are.

    Attributes:
      tokens: the text.
    """

    def __init__(self, shortest: int, longest: int, newest: int | None = None) -> None:
        assert 1 <= shortest <= longest
        self._newest = newest
        self._shortest, self._longest = shortest, longest
        self.tokens = array("i")
        self._num_sorted = 0
        self._keys = array("q")  # of each sorted place: the tokens before it, packed
        self._places = array("i")
        self._recent: dict[tuple[int, ...], list[int]] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of the text and its order, about: entries of recent places are left out."""
        return 4 * len(self.tokens) + 12 * len(self._keys)

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the text."""
        known = self.tokens
        for_dict = max(len(known), self._shortest)
        if len(tokens) > FEW:
            known.frombytes(np.asarray(tokens, dtype=np.int32).tobytes())
        else:
            known.extend(tokens)
        if self._newest is None and len(known) - self._num_sorted > max(MIN_RECENT, self._num_sorted // RECENT_PART):
            self._sort()
            return
        recent, shortest, newest = self._recent, self._shortest, self._newest
        for place in range(for_dict, len(known)):
            places = recent.setdefault(tuple(known[place - shortest : place]), [])
            places.append(place)
            if newest is not None and len(places) > newest:
                del places[0]

    def find(self, context: Sequence[int], most: int | None = None) -> tuple[int, Sequence[int]]:
        """The longest end of `context` that stood in the text with a token after it.

        Returns its length and the places after it, in no order and `most` at most; (0, ()) if none is long enough. What
        is longer than `longest` is not compared.
        """
        length, places = self._find_sorted(context)
        recent_length, recent = self._find_recent(context)
        if most is not None:
            places, recent = places[-most:], recent[-most:]
        if recent_length != length:
            return (length, places) if length > recent_length else (recent_length, recent)
        return length, [*places, *recent][-most if most else None :] if places else recent

    def last(self, context: Sequence[int]) -> tuple[int, int]:
        """How many tokens of the context occurred before, and where they did last; (0, 0) if they never did."""
        length, places = self._find_sorted(context)
        recent_length, recent = self._find_recent(context)
        if recent and recent_length >= length:
            return recent_length, recent[-1]
        if len(places) <= FEW:
            return length, max(places, default=0)
        return length, int(np.frombuffer(places, dtype=np.int32).max())

    def _find_recent(self, context: Sequence[int]) -> tuple[int, Sequence[int]]:
        shortest = self._shortest
        if len(context) < shortest:
            return 0, ()
        places: Sequence[int] = self._recent.get(tuple(context[-shortest:]), ())
        if not places:
            return 0, ()
        length, most, tokens = shortest, min(self._longest, len(context)), self.tokens
        while length < most:
            token = context[-length - 1]
            longer = [place for place in places if place > length and tokens[place - length - 1] == token]
            if not longer:
                break
            places, length = longer, length + 1
        return length, places

    def _find_sorted(self, context: Sequence[int]) -> tuple[int, array[int]]:
        keys = self._keys
        most = min(self._longest, len(context))
        for length in range(min(most, PACKED), 0, -1):
            packed = 0
            for i in range(PACKED):
                packed = packed << BITS | (context[-1 - i] + 1 if i < length else 0)
            low = bisect_left(keys, packed)
            high = bisect_left(keys, packed + (1 << BITS * (PACKED - length)), low)
            if low < high:
                break
        else:
            return 0, _NOWHERE
        if length == PACKED:
            low, high, length = self._narrow(context, low, high, most)
        return (length, self._places[low:high]) if length >= self._shortest else (0, _NOWHERE)

    def _narrow(self, context: Sequence[int], low: int, high: int, most: int) -> tuple[int, int, int]:
        """The part of places low .. high - 1, whose nearest `PACKED` tokens agree, that agrees longest; its length."""
        tokens, places, length = self.tokens, self._places, PACKED
        while length < most:

            def token_before(place: int, back: int = length + 1) -> int:
                return tokens[place - back] if place >= back else -1

            token = context[-length - 1]
            first = bisect_left(places, token, low, high, key=token_before)
            last = bisect_right(places, token, first, high, key=token_before)
            if first == last:
                break
            low, high, length = first, last, length + 1
        return low, high, length

    def _sort(self) -> None:
        """Sorts all places by the tokens before them; of equal ones the earlier goes first."""
        text = np.frombuffer(self.tokens, dtype=np.int32).astype(np.int64)
        num_places = len(text)  # 0 .. len - 1: a token follows each of them
        num_keys = -(-self._longest // PACKED)
        padded = np.concatenate([np.zeros(num_keys * PACKED, dtype=np.int64), text + 1])
        keys = [_packed(padded, num_places, num_keys, number) for number in range(num_keys)]
        order = np.lexsort(keys[::-1]) if num_keys > 1 else np.argsort(keys[0], kind="stable")
        self._keys = array("q", keys[0][order].tobytes())
        self._places = array("i", order.astype(np.int32).tobytes())
        self._num_sorted = num_places
        self._recent = {}


def _packed(padded: npt.NDArray[np.int64], num_places: int, num_keys: int, number: int) -> npt.NDArray[np.int64]:
    """`[num_places]` the tokens 3 x `number` + 1, + 2 and + 3 before each place in one number, the nearest highest.

    `padded` begins with a 0 for each token that `num_keys` such numbers hold.
    """
    packed = np.zeros(num_places, dtype=np.int64)
    for i in range(PACKED):
        back = number * PACKED + i + 1
        start = num_keys * PACKED - back
        packed = packed << BITS | padded[start : start + num_places]
    return packed
