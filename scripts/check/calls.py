"""Count the engine-side files and functions that one Generate call passes through.

    python scripts/check calls
    python scripts/check calls --json call.json
    PYTHONPATH=../before python scripts/check calls        # the same for another tree

A request of 30 prompt tokens and 5 output tokens runs through the real mailbox, serving loop, scheduler, cache and
batch builder. A first call warms everything up; the second one is counted, from the receipt of its message to the
sending of its last reply. Start-up is not part of it. `FakeEngine` stands in for the device; it and what it calls are
not counted. --real-engine starts the bundled model instead, and counts the files of `jaxsgl/engine/` too.

A call crosses a file if the function and the nearest caller in `jaxsgl` stand in different files. Modules for
operators' orders, retraction, speculation and other things that this call does not ask for are listed if they took
part.
"""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import msgspec
import zmq
from bench.output import figure_parser, write_figures

import jaxsgl
from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.batch.engine_api import StepEngine
from jaxsgl.ipc import Endpoints, EngineMailbox
from jaxsgl.messages.orders import FromEngine, News, Shutdown, ToEngine
from jaxsgl.messages.replies import Replies
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.scheduler import Scheduler
from jaxsgl.testing import engine as testing

PACKAGE = Path(jaxsgl.__file__).resolve().parent
STAND_IN = "testing/"  # the fake engine and its parts
CAPACITY = Capacity(16, 64, 8, 256, 128, 1024)  # page size, pages, rows, context, tokens of an extend, vocabulary
UNASKED = re.compile(
    r"paus|flush|profil|retract|command|control|adapter|images|host_|latency|grammar|constraint|kept|"
    r"speculat|draft|snapshot|outputs|engine_ops|ranks|side"
)


@dataclass
class Trace:
    """What ran while `record` was the thread's profile function.

    Attributes:
      files: calls by file, relative to `jaxsgl/`.
      functions: calls by function.
      num_crossing: calls whose caller stands in another file.
    """

    files: Counter[str] = field(default_factory=Counter)
    functions: Counter[CodeType] = field(default_factory=Counter)
    num_crossing: int = 0

    def start(self) -> None:
        """Counts calls of this thread from now on. The functions that are running already count as called once."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            self.record(frame, "call", None)
            frame = frame.f_back
        sys.setprofile(self.record)

    def stop(self) -> None:
        """Ends the count."""
        sys.setprofile(None)

    def record(self, frame: FrameType, event: str, argument: object) -> None:
        """Counts a call of a Python function in `jaxsgl`; see `sys.setprofile`."""
        name = file_of(frame.f_code) if event == "call" else None
        if name is None or name.startswith(STAND_IN):
            return
        callers = list(callers_of(frame))
        if any(caller.startswith(STAND_IN) for caller in callers):
            return
        self.files[name] += 1
        self.functions[frame.f_code] += 1
        self.num_crossing += bool(callers) and callers[0] != name

    def figures(self) -> dict[str, Any]:
        """The counts as JSON."""
        num_calls = self.files.total()
        return {
            "num_files": len(self.files),
            "num_functions": len(self.functions),
            "num_calls": num_calls,
            "crossing_share": self.num_crossing / max(num_calls, 1),
            "files": dict(self.files.most_common()),
            "unasked": sorted(name for name in self.files if UNASKED.search(Path(name).name)),
        }


def callers_of(frame: FrameType) -> Iterator[str]:
    """Files of the functions that wait for `frame`, the nearest first."""
    caller = frame.f_back
    while caller is not None:
        name = file_of(caller.f_code)
        if name is not None:
            yield name
        caller = caller.f_back


@functools.cache
def file_of(code: CodeType) -> str | None:
    """The function's file relative to `jaxsgl/`; None if it stands elsewhere."""
    path = Path(code.co_filename).resolve()
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else None


class TracedMailbox:
    """The engine's real mailbox, with the front end's sockets in the same thread.

    Sends the first request, and when it has ended the second one, which `trace` counts; then ends the loop.
    """

    def __init__(self, requests: list[Request], trace: Trace) -> None:
        self._requests, self._trace = requests, trace
        self._endpoints = Endpoints.create()
        self._context = zmq.Context()
        self._to_engine, self._from_engine = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        self._to_engine.bind(self._endpoints.to_engine)
        self._from_engine.bind(self._endpoints.from_engine)
        self._mailbox = EngineMailbox(self._endpoints)
        self.num_tokens: Counter[str] = Counter()

    def receive(self, wait_s: float) -> list[ToEngine]:
        """Messages of the real mailbox; when the loop is idle, the next request comes first."""
        if wait_s:
            if not self._requests:
                return [Shutdown()]
            self._to_engine.send(msgspec.msgpack.encode(self._requests.pop(0)))
            if not self._requests:
                self._trace.start()
        return self._mailbox.receive(wait_s)

    def send(self, news: News) -> None:
        """Sends the news; the last reply of the last request ends the count."""
        self._mailbox.send(news)
        replies = news.replies if isinstance(news, Replies) else []
        if not self._requests and any(reply.finish_reason is not None for reply in replies):
            self._trace.stop()

    def close(self) -> None:
        """Reads what the engine sent, then closes the sockets."""
        while self._from_engine.poll(100):
            message = msgspec.msgpack.decode(self._from_engine.recv(), type=FromEngine)
            for reply in message.replies if isinstance(message, Replies) else []:
                self.num_tokens[reply.request_id] += len(reply.token_ids)
        self._mailbox.close()
        self._context.destroy(linger=0)
        self._endpoints.remove()


def traced_call(prompt_len: int, output_len: int, real_engine: bool = False) -> Trace:
    """Serves two requests of this size one after the other; returns what the second one passed through."""
    engine: StepEngine
    if real_engine:
        from jaxsgl.config.engine import EngineConfig
        from jaxsgl.wiring import build

        engine, scheduler = build(EngineConfig())
    else:
        engine, scheduler = testing.FakeEngine(CAPACITY), Scheduler(CAPACITY, BucketSet.derive(CAPACITY), (1,))
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    prompts = {name: [first + i for i in range(prompt_len)] for name, first in (("warm-up", 100), ("counted", 500))}
    trace = Trace()
    mailbox = TracedMailbox([Request(name, prompt, params) for name, prompt in prompts.items()], trace)
    try:
        run_loop(scheduler, engine, mailbox, depth=1)
    finally:
        trace.stop()
        mailbox.close()
    assert mailbox.num_tokens == dict.fromkeys(prompts, output_len), mailbox.num_tokens
    return trace


def table(figures: dict[str, Any]) -> str:
    """The counts as text."""
    lines = [
        f"{figures['num_files']} files, {figures['num_functions']} functions, {figures['num_calls']:,} calls, "
        f"{figures['crossing_share']:.0%} of them across files",
        *(f"{count:8,}  {name}" for name, count in figures["files"].items()),
        f"took part though the call did not ask for them: {', '.join(figures['unasked']) or 'none'}",
    ]
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Traces one call, prints the counts and writes them."""
    parser = figure_parser(__doc__, __name__)
    parser.add_argument("--prompt-len", type=int, default=30, help="tokens of the prompt (default 30)")
    parser.add_argument("--output-len", type=int, default=5, help="tokens to generate (default 5)")
    parser.add_argument("--real-engine", action="store_true", help="run the bundled model instead of FakeEngine")
    args = parser.parse_args(arguments)
    figures = traced_call(args.prompt_len, args.output_len, args.real_engine).figures()
    print(table(figures))
    write_figures(args.json, tree=str(PACKAGE.parent), **figures)
