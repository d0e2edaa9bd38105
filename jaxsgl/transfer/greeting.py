"""How two workers greet each other before any frame: who both are, that both have the secret, and what pages they have.

    decode (connects)   Hello          Proof                  Terms
    prefill (listens)          Hello          Proof, Terms

`Hello` has a protocol, a mode, whether there is a secret, and a nonce. `Proof` is the HMAC-SHA256, under the secret, of
both Hellos and of the address at which the connection arrived, as each side sees it: a stranger to whom a decode worker
was sent can't pass the greeting on to a true prefill worker and speak for it afterwards. `Terms` is the geometry of the
pages, which only a worker that has proved itself gets. The side that listens says nothing before a valid Hello. All
parts but the last have fixed sizes, and none is read beyond its end, so that frames may follow at once. Without a
secret the proofs prove nothing, and anyone who speaks the protocol gets in.

Knows no sockets: tcp.py greets with blocking ones, listener.py with many at the same time.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Generator
from typing import NamedTuple, TypeAlias

import msgspec

from jaxsgl.shared_secret import NONCE_BYTES, PROOF_BYTES, is_proof, proof
from jaxsgl.transfer.frames import PROTOCOL, Geometry, WireError

GREETING_S = 10.0  # for all of it, however many reads it takes
MAX_TERMS_BYTES = 1024
_MAGIC = b"JKVG"
_HELLO = struct.Struct("<4sHBB32s")
_SIZE = struct.Struct("<H")
_PURPOSE = b"jaxsgl KV transfer"
_MODES = ("prefill", "decode")


class Step(NamedTuple):
    """What to do next: send `send`, then read exactly `wanted` bytes (0: none) and pass them on."""

    send: bytes
    wanted: int


Greeting: TypeAlias = Generator[Step, bytes, None]


def greeting(mode: str, geometry: Geometry, secret: bytes, at: bytes, connects: bool) -> Greeting:
    """Greets one worker: yields steps, gets what they wanted, and ends when both have agreed.

    Args:
      mode: of this worker, "prefill" or "decode".
      geometry: of its pages.
      secret: what both must know; b"": there is no secret.
      at: the `endpoint` of the side that listens.
      connects: whether this worker has made the connection.

    Raises:
      WireError: the other side is no such worker, has another secret, or other pages.
    """
    mine = _HELLO.pack(_MAGIC, PROTOCOL, _MODES.index(mode), bool(secret), os.urandom(NONCE_BYTES))
    theirs = yield Step(mine if connects else b"", _HELLO.size)
    if theirs[:4] != _MAGIC:
        raise WireError(f"it began with {theirs[:4]!r}, not with the greeting of a prefill or decode worker")
    if not connects:
        yield Step(mine, 0)  # before it is compared: the other side learns what differs, too
    _compare(mine, theirs)
    both = (mine + theirs if connects else theirs + mine) + at
    terms = msgspec.msgpack.encode(geometry)
    assert len(terms) <= MAX_TERMS_BYTES, f"the geometry takes {len(terms)} bytes"
    terms = _SIZE.pack(len(terms)) + terms
    mine_proved, expected = (proof(secret, _PURPOSE, side, both) for side in (connects, not connects))
    proved = yield Step(mine_proved if connects else b"", PROOF_BYTES)
    if not is_proof(proved, expected):
        raise WireError(
            "its secret is another one (give both the same --disaggregation-secret-file), or the connection is passed "
            f"on by another program or by NAT (let decode reach {at.decode().replace(' ', ' port ')} itself)"
        )
    (size,) = _SIZE.unpack((yield Step(b"" if connects else mine_proved + terms, _SIZE.size)))
    if not 1 <= size <= MAX_TERMS_BYTES:
        raise WireError(f"it announces {size} bytes about its pages, but 1 to {MAX_TERMS_BYTES} may come")
    their_geometry = _geometry((yield Step(b"", size)))
    if connects:
        yield Step(terms, 0)
    difference = geometry.mismatch(their_geometry)
    if difference is not None:
        raise WireError(difference)


def _compare(mine: bytes, theirs: bytes) -> None:
    """Raises `WireError` if two Hellos do not go together."""
    _, protocol, mode, secured, _ = _HELLO.unpack(mine)
    _, their_protocol, their_mode, their_secured, _ = _HELLO.unpack(theirs)
    if their_protocol != protocol:
        raise WireError(f"its protocol is {their_protocol}, but {protocol} here: run the same version on both")
    if their_mode == mode:
        raise WireError(f"both workers have --disaggregation-mode {_MODES[mode]}: one must be prefill, one decode")
    if their_secured != secured:
        here, there = ("this worker has", "that one has not") if secured else ("that worker has", "this one has not")
        raise WireError(f"{here} a --disaggregation-secret-file, {there}: give both the same")


def _geometry(data: bytes) -> Geometry:
    try:
        return msgspec.msgpack.decode(data, type=Geometry)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"what it says of its pages is malformed: {error}") from None
