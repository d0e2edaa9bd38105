"""The outside of a recorded run: all requests at the first call, in bytes; every message made into bytes.

As `jaxsgl.ipc` does it, with the sockets left out: what comes is decoded, what goes is encoded. Stamps where turns of
the loop begin and end. Knows no figures.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

from bench.offline.recording import Recording
from jaxsgl.messages import FromEngine, News, Replies, Shutdown, StartProfile, ToEngine
from jaxsgl.request import Request

PROFILED_STEPS = 50


class RecordedMailbox:
    """Implements `Mailbox`; ends the loop once it has nothing left to do.

    Args:
      requests: what is to be done.
      recording: where stamps go.
      profile: folder for a trace of some steps, recorded once half of the output tokens are there.
    """

    def __init__(self, requests: Iterable[Request], recording: Recording, profile: str | None = None) -> None:
        requests = list(requests)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._waiting = [self._encoder.encode(request) for request in requests]
        self._recording = recording
        self._profile = profile
        self._half_tokens = sum(request.sampling.max_tokens or 0 for request in requests) // 2
        self.sent: list[bytes] = []

    def receive(self, block: bool) -> list[ToEngine]:
        """Requests or commands, if any wait, else the end."""
        self._recording.turn_begins()
        waiting, self._waiting = self._waiting, []
        messages = [self._decoder.decode(message) for message in waiting]
        self._recording.turns[-1].received_s = time.perf_counter()
        return messages or ([Shutdown()] if block else [])

    def send(self, news: News) -> None:
        """Encodes, and keeps."""
        begin_s = time.perf_counter()
        message = self._encoder.encode(news)
        turn = self._recording.turns[-1]
        turn.sent_s, turn.send_s = time.perf_counter(), begin_s
        self.sent.append(message)
        if self._profile and isinstance(news, Replies) and news.load.output_tokens_total >= self._half_tokens:
            self._waiting.append(self._encoder.encode(StartProfile(1, self._profile, PROFILED_STEPS)))
            self._profile = None

    def news(self) -> list[FromEngine]:
        """Everything that was sent, as the front end would have got it."""
        decoder = msgspec.msgpack.Decoder(FromEngine)
        return [decoder.decode(message) for message in self.sent]
