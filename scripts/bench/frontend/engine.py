"""The fake engine process: waits until all streams have arrived, then gives each one token per step, at an even pace.

It talks to the front end as the real engine does, with one message per step. The first id of a prompt is the number of
the stream. The engine never waits for the front end; when it is late for a step, it sends the next ones sooner.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter

from bench.frontend.plan import Plan, write_whole
from jaxsgl.config.engine import BUNDLED_MODEL, Limits
from jaxsgl.engine_process import read_launch, set_signals
from jaxsgl.ipc import EngineMailbox, open_mailbox
from jaxsgl.messages.orders import Abort, Answer, Shutdown, WatchCache, line_of
from jaxsgl.messages.replies import CacheEvents, EngineInfo, Load, Replies, Reply, Totals
from jaxsgl.parent import follow_parent
from jaxsgl.requests.request import FinishReason, Request
from jaxsgl.shared_mailbox import SharedMailbox

VOCAB_SIZE = 1024
PROMPT_ROOM = 64


class FakeEngine:
    """Runs the plan again and again until a `Shutdown` arrives."""

    def __init__(self, plan: Plan, mailbox: EngineMailbox | SharedMailbox) -> None:
        self._plan = plan
        self._mailbox = mailbox
        self._streams: dict[str, int] = {}  # request id -> number of the stream
        self._num_tokens = 0
        self._ended = False

    def run(self) -> None:
        """Runs rounds until the end. A round begins when all streams have arrived."""
        while not self._ended:
            self._take_messages(block=True)
            if len(self._streams) == self._plan.num_streams:
                write_whole(self._plan.lines_path, self._streams_of_lines())
                write_whole(self._plan.steps_path, self._round())
                self._streams.clear()

    def _streams_of_lines(self) -> list[int]:
        """The number of streams of each front-end process."""
        lines = Counter(line_of(int(id.rpartition("/")[2])) for id in self._streams)
        return [lines[line] for line in sorted(lines)]

    def _round(self) -> list[float]:
        """Sends all tokens of all streams; returns the time of each step."""
        times: list[float] = []
        start_s = time.monotonic()
        for step in range(self._plan.num_tokens):
            pause_s = start_s + step * self._plan.step_s - time.monotonic()
            if pause_s > 0:
                time.sleep(pause_s)
            times.append(time.monotonic())
            self._step(step)
            self._take_messages(block=False)
        return times

    def _step(self, step: int) -> None:
        reason = FinishReason.LENGTH if step + 1 == self._plan.num_tokens else None
        replies = [Reply(id, (self._plan.token(number, step),), reason) for id, number in self._streams.items()]
        self._num_tokens += len(replies)
        load = Load(len(replies), totals=Totals(output_tokens=self._num_tokens, steps=step))
        self._mailbox.send(Replies(replies, load))

    def _answer_probe(self, request_id: str) -> None:
        """Answers at once a client that asks what the server takes, before it opens its streams."""
        load = Load(0, totals=Totals(output_tokens=self._num_tokens))
        self._mailbox.send(Replies([Reply(request_id, (self._plan.token(0, 0),), FinishReason.LENGTH)], load))

    def _take_messages(self, block: bool) -> None:
        for message in self._mailbox.receive(math.inf if block else 0.0):
            match message:
                case Request() if message.sampling.max_tokens == 1 < self._plan.num_tokens:
                    self._answer_probe(message.request_id)
                case Request():
                    self._streams[message.request_id] = message.prompt_ids[0]
                case Abort():
                    self._streams.pop(message.request_id, None)
                case Shutdown():
                    self._ended = True
                case WatchCache(number):
                    self._mailbox.send(CacheEvents([], number))
                case _:
                    self._mailbox.send(Answer(message.number, True))


def engine_info(plan: Plan) -> EngineInfo:
    """What this engine announces to the front end."""
    context = plan.num_tokens + PROMPT_ROOM
    return EngineInfo(
        model_path=BUNDLED_MODEL,
        architecture="FakeForCausalLM",
        dtype="float32",
        limits=Limits(VOCAB_SIZE, context, context * plan.num_streams),
        eos_token_ids=(VOCAB_SIZE - 1,),
        page_size=16,
        max_running_requests=plan.num_streams,
        attention_backend="reference",
        platform="cpu",
        kv_bytes=0,
        weight_bytes=0,
        warmup_s=0.0,
    )


def main() -> None:
    """Runs the engine process; the server starts it with the path of the plan."""
    set_signals()
    launch = read_launch(sys.stdin.buffer)
    follow_parent(sys.stdin.fileno(), launch.endpoints.remove)
    plan = Plan.load(sys.argv[1])
    with open_mailbox(launch.endpoints) as mailbox:
        mailbox.announce(engine_info(plan))
        FakeEngine(plan, mailbox).run()


if __name__ == "__main__":
    main()
