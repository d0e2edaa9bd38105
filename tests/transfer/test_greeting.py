"""Two workers greet each other: only those with the same secret learn anything, and only like ones go on."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from jaxsgl.shared_secret import endpoint
from jaxsgl.transfer.frames import Geometry, WireError
from jaxsgl.transfer.greeting import Greeting, greeting
from tests.grids import count

SHAPE = (2, 2, 2, 16, 8)
GEOMETRY = Geometry(16, "bfloat16", SHAPE, math.prod(SHAPE) * 2, "tiny", 64)
SECRET = b"s" * 32
AT = endpoint(("10.0.0.5", 8998))


class Side:
    """One side, with what it has said and heard."""

    def __init__(self, talk: Greeting) -> None:
        self._talk = talk
        self.said = b""
        self.is_over = False
        self.error = ""
        self._wanted = 0
        self._inbox = b""
        self._started = False

    def hear(self, data: bytes) -> bytes:
        """Takes bytes, whatever the pieces; returns what it says to them."""
        self._inbox += data
        before = len(self.said)
        while not self.is_over and not self.error and len(self._inbox) >= self._wanted:
            got, self._inbox = self._inbox[: self._wanted], self._inbox[self._wanted :]
            try:
                step = self._talk.send(got) if self._started else next(self._talk)
            except StopIteration:
                self.is_over = True
                break
            except WireError as error:
                self.error = str(error)
                break
            self._started = True
            self.said, self._wanted = self.said + step.send, step.wanted
        return self.said[before:]


def sides(
    secrets: tuple[bytes, bytes] = (SECRET, SECRET),
    modes: tuple[str, str] = ("decode", "prefill"),
    geometries: tuple[Geometry, Geometry] = (GEOMETRY, GEOMETRY),
    ats: tuple[bytes, bytes] = (AT, AT),
) -> tuple[Side, Side]:
    """The side that connects, and the one that listens."""
    connects, listens = (Side(greeting(modes[i], geometries[i], secrets[i], ats[i], i == 0)) for i in (0, 1))
    return connects, listens


def talk(one: Side, other: Side, rng: random.Random | None = None) -> None:
    """Carries bytes between both until neither says anything more, in random pieces if there is an `rng`."""
    from_one, from_other = one.hear(b""), other.hear(b"")
    while from_one or from_other:
        first = rng.randint(1, max(len(from_one), 1)) if rng else len(from_one)
        second = rng.randint(1, max(len(from_other), 1)) if rng else len(from_other)
        heard_by_other, from_one = from_one[:first], from_one[first:]
        heard_by_one, from_other = from_other[:second], from_other[second:]
        from_other += other.hear(heard_by_other)
        from_one += one.hear(heard_by_one)


@pytest.mark.parametrize("secret", [b"", SECRET])
def test_workers_with_the_same_secret_agree_however_bytes_are_cut(secret: bytes) -> None:
    rng = random.Random(1)
    for _ in range(50):
        one, other = sides((secret, secret))
        talk(one, other, rng)
        assert one.is_over and other.is_over


@pytest.mark.parametrize(
    ("secrets", "words"),
    [
        ((SECRET, b"t" * 32), "its secret is another one"),
        ((SECRET, b""), "has a --disaggregation-secret-file"),
        ((b"", SECRET), "has a --disaggregation-secret-file"),
    ],
    ids=["another", "only decode's", "only prefill's"],
)
def test_a_worker_with_another_secret_or_none_is_refused_and_learns_nothing(
    secrets: tuple[bytes, bytes], words: str
) -> None:
    one, other = sides(secrets)
    talk(one, other)
    assert not one.is_over and not other.is_over
    assert words in one.error + other.error
    for said in (one.said, other.said):
        assert b"tiny" not in said and b"bfloat16" not in said


@pytest.mark.parametrize(
    ("modes", "geometry", "words"),
    [
        (("prefill", "prefill"), GEOMETRY, "both workers have --disaggregation-mode prefill"),
        (("decode", "prefill"), msgspec.structs.replace(GEOMETRY, page_size=64), "--page-size"),
    ],
)
def test_unlike_workers_are_refused_on_both_sides(modes: tuple[str, str], geometry: Geometry, words: str) -> None:
    one, other = sides(modes=modes, geometries=(GEOMETRY, geometry))
    talk(one, other)
    assert words in one.error and words in other.error


def test_what_a_side_has_said_proves_nothing_when_it_is_sent_back_or_again() -> None:
    """A stranger between the two records a greeting, and plays it to either; or it sends back what it hears."""
    one, other = sides()
    talk(one, other)
    _, again = sides()
    again.hear(b"")
    again.hear(one.said)
    assert "secret" in again.error, "another nonce"
    _, mirror = sides()
    mirror.hear(b"")
    hello = mirror.hear(bytes(one.said[:40]))
    mirror.hear(hello)
    assert not mirror.is_over and GEOMETRY.weights.encode() not in mirror.said
    echo, _ = sides()
    echo.hear(echo.hear(b""))
    assert not echo.is_over and echo.error


def test_no_changed_byte_lets_anyone_in_or_raises_anything_else() -> None:
    """Any change of what either says before it is proved; and junk of any length."""
    rng = random.Random(2)
    for _ in range(count(300, 20_000)):
        one, other = sides()
        if rng.random() < 0.5:
            heard = bytearray(one.hear(b""))
            heard[rng.randrange(len(heard))] ^= 1 << rng.randrange(8)
            other.hear(b"")
            one.hear(other.hear(bytes(heard)))
            other.hear(one.said[len(heard) :])
        else:
            other.hear(b"")
            other.hear(rng.randbytes(rng.randint(1, 2000)))
        assert not other.is_over
        assert b"bfloat16" not in other.said


def test_sides_that_see_another_address_between_them_are_refused() -> None:
    same = endpoint(("::ffff:10.0.0.5", 8998, 0, 0))
    one, other = sides(ats=(AT, same))
    talk(one, other)
    assert one.is_over and other.is_over
    assert endpoint(("fe80::1%eth0", 1, 0, 2)) == endpoint(("fe80:0::1%en1", 1, 0, 3))
    for at in (endpoint(("10.0.0.5", 8999)), endpoint(("10.0.0.6", 8998))):
        one, other = sides(ats=(at, AT))
        talk(one, other)
        assert not one.is_over and "10.0.0.5 port 8998" in other.error
        assert b"tiny" not in one.said + other.said
