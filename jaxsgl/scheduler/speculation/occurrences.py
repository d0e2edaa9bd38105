"""`Occurrences`: one growing text of tokens, and where the tokens at its end, or at another's, stood in it before.

The bulk, mostly a prompt, is sorted by the tokens before each place, the nearest first. A bisection finds all places
whose tokens before agree with a context, and narrowing that range finds those that agree longest:

    tokens   a b c a b d a b          longest match of the end "a b", two tokens long: places 2 and 5,
    place    0 1 2 3 4 5 6 7            where c and d followed

What came since is in a dict of its shortest contexts, of each the newest places, and joins the bulk when it is an
eighth of it. So a token costs about a microsecond, 16 bytes, and a few more while it is new. A `Bulk` never changes:
texts that begin alike, as those of a request's samples, share that of their beginning, which is sorted once. Knows no
requests; sources.py looks things up in it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

PACKED = 3  # tokens of a context in one sorted number
BITS = 21  # of each token, kept as its id plus one: 0 stands where a context is shorter
MIN_RECENT = 256  # tokens that are not sorted, at least before the bulk is sorted anew
RECENT_PART = 8  # likewise, as a part of the bulk
NEWEST = 32  # places after an equal shortest context that are known of those tokens: text may repeat one token
FEW = 64  # numbers of which Python finds the largest as fast as NumPy


class Match(NamedTuple):
    """Places of a `Bulk` whose tokens before agree with a context: numbers `low` .. `high` - 1 in its order.

    Attributes:
      length: how many tokens agree; 0: there are no places.
    """

    length: int
    low: int
    high: int


NO_MATCH = Match(0, 0, 0)


class Bulk:
    """The places 0 .. n - 1 of a text, in the order of the tokens before each; of equal ones the earlier goes first.

    Args:
      tokens: the text, whose first n tokens stay as they are: all that it has now.
      longest: tokens that are compared.

    Attributes:
      num_places: n.
    """

    __slots__ = ("_keys", "_longest", "_places", "_places_view", "_tokens", "num_places")

    def __init__(self, tokens: array[int], longest: int) -> None:
        self._tokens, self._longest = tokens, longest
        text = np.frombuffer(tokens, dtype=np.int32).astype(np.int64)
        self.num_places = len(text)  # a token follows each of them
        num_keys = -(-longest // PACKED)
        padded = np.concatenate([np.zeros(num_keys * PACKED, dtype=np.int64), text + 1])
        keys = [_packed(padded, self.num_places, num_keys, number) for number in range(num_keys)]
        order = np.lexsort(keys[::-1]) if num_keys > 1 else np.argsort(keys[0], kind="stable")
        self._keys = array("q", keys[0][order].tobytes())  # of each place in order: the tokens before it, packed
        self._places = array("i", order.astype(np.int32).tobytes())
        self._places_view = np.frombuffer(self._places, dtype=np.int32)

    @property
    def num_bytes(self) -> int:
        """Memory of the order."""
        return 12 * self.num_places

    def find(self, context: Sequence[int]) -> Match:
        """The longest end of `context` that stood in the text."""
        keys = self._keys
        most = min(self._longest, len(context))
        for length in range(min(most, PACKED), 0, -1):
            packed = 0
            for i in range(PACKED):
                packed = packed << BITS | (context[-1 - i] + 1 if i < length else 0)
            low = bisect_left(keys, packed)
            high = bisect_left(keys, packed + (1 << BITS * (PACKED - length)), low)
            if low < high:
                return self._narrowed(context, low, high, most) if length == PACKED else Match(length, low, high)
        return NO_MATCH

    def places(self, match: Match, most: int | None = None) -> array[int]:
        """Those of `match`, in no order; `most` at most."""
        low = match.low if most is None else max(match.low, match.high - most)
        return self._places[low : match.high]

    def last(self, match: Match) -> int:
        """The last of the places of `match`, of which there are some."""
        if match.high - match.low <= FEW:
            return max(self._places[match.low : match.high])
        return int(self._places_view[match.low : match.high].max())

    def first_from(self, match: Match, start: int) -> int:
        """The first of the places of `match` from `start` on; the last of all if there is none."""
        places = self._places_view[match.low : match.high]
        after = places[places >= start]
        return int(after.min() if len(after) else places.max())

    def _narrowed(self, context: Sequence[int], low: int, high: int, most: int) -> Match:
        """The part of places low .. high - 1, whose nearest `PACKED` tokens agree, that agrees longest."""
        tokens, places, length = self._tokens, self._places, PACKED
        while length < most:

            def token_before(place: int, back: int = length + 1) -> int:
                return tokens[place - back] if place >= back else -1

            token = context[-length - 1]
            first = bisect_left(places, token, low, high, key=token_before)
            last = bisect_right(places, token, first, high, key=token_before)
            if first == last:
                break
            low, high, length = first, last, length + 1
        return Match(length, low, high)


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


_NOTHING = Bulk(array("i"), 1)


class SharedBulk:
    """The bulk of what several texts begin with; the first that comes has it sorted."""

    def __init__(self) -> None:
        self._bulk: Bulk | None = None

    def of(self, tokens: array[int], longest: int) -> Bulk:
        """That of `tokens`, which are the same for all."""
        if self._bulk is None:
            self._bulk = Bulk(tokens, longest)
        assert self._bulk.num_places == len(tokens), "texts that share a bulk begin alike"
        return self._bulk


class Occurrences:
    """One text, by what stood before each of its tokens.

    Args:
      shortest, longest: tokens of a context that must agree, and that are compared.
      newest: of the places after an equal shortest context so many are known, and nothing is sorted: for texts of which
        new ones come without end. None: all are, but for the oldest of very many new ones.
      beginning: of the tokens that come first, if other texts begin with the same.

    Attributes:
      tokens: the text.
    """

    def __init__(
        self, shortest: int, longest: int, newest: int | None = None, beginning: SharedBulk | None = None
    ) -> None:
        assert 1 <= shortest <= longest
        self._sorts, self._newest = newest is None, newest or NEWEST
        self._shortest, self._longest = shortest, longest
        self._beginning = beginning or SharedBulk()
        self.tokens = array("i")
        self._bulk = _NOTHING
        self._recent: dict[bytes, list[int]] = {}  # places, by the `shortest` tokens before

    @property
    def num_bytes(self) -> int:
        """Memory of the text and its order, about: entries of recent places are left out."""
        return 4 * len(self.tokens) + self._bulk.num_bytes

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the text."""
        known = self.tokens
        num_known, num_sorted = len(known), self._bulk.num_places
        if len(tokens) > FEW:
            known.frombytes(np.asarray(tokens, dtype=np.int32).tobytes())
        else:
            known.extend(tokens)
        if self._sorts and len(known) - num_sorted > max(MIN_RECENT, num_sorted // RECENT_PART):
            self._bulk = Bulk(known, self._longest) if num_known else self._beginning.of(known, self._longest)
            self._recent = {}
            return
        recent, shortest, newest = self._recent, self._shortest, self._newest
        for place in range(max(num_known, shortest), len(known)):
            key = known[place - shortest : place].tobytes()
            places = recent.get(key)
            if places is None:
                recent[key] = [place]
                continue
            places.append(place)
            if len(places) > newest:
                del places[0]

    def find(self, context: Sequence[int], most: int | None = None) -> tuple[int, Sequence[int]]:
        """The longest end of `context` that stood in the text with a token after it.

        Returns its length and the places after it, in no order and `most` at most; (0, ()) if none is long enough. What
        is longer than `longest` is not compared.
        """
        match = self._find_sorted(context)
        length, recent = self._find_recent(context)
        if match.length < length or not match.length:
            return length, recent[-most:] if most else recent
        places = self._bulk.places(match, most)
        return match.length, [*places, *recent][-most if most else None :] if match.length == length else places

    def last(self, context: Sequence[int]) -> tuple[int, int]:
        """How many tokens of the context occurred before, and where they did last; (0, 0) if they never did."""
        match = self._find_sorted(context)
        length, recent = self._find_recent(context)
        if recent and length >= match.length:
            return length, recent[-1]
        return (match.length, self._bulk.last(match)) if match.length else (0, 0)

    def _find_sorted(self, context: Sequence[int]) -> Match:
        match = self._bulk.find(context)
        return match if match.length >= self._shortest else NO_MATCH

    def _find_recent(self, context: Sequence[int]) -> tuple[int, Sequence[int]]:
        shortest = self._shortest
        if len(context) < shortest:
            return 0, ()
        places: Sequence[int] = self._recent.get(array("i", context[-shortest:]).tobytes(), ())
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
