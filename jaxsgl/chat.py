"""`jaxsgl chat`, or `python -m jaxsgl.chat`: a conversation with the model of a running server, see `/help`.

Owns the conversation: each turn sends all of it, and the server finds most of it in its prefix cache. Never knows
tokens. Without a terminal, each line of standard input is a turn.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import signal
import sys
from collections.abc import Iterator
from typing import Any

import grpc

from jaxsgl import terminal
from jaxsgl.frontend.proto import jaxsgl_pb2 as pb
from jaxsgl.frontend.proto import jaxsgl_pb2_grpc as pb_grpc
from jaxsgl.http_stub import HttpStub
from jaxsgl.interrupts import Interrupts
from jaxsgl.terminal import CALL_ERRORS, ClientError, HttpError

HELP = """\
/reset        forget the conversation, but not the system's turn
/system TEXT  what comes before the conversation from now on; without TEXT: nothing
/help         this text
/exit         leave, as Ctrl-C and Ctrl-D do at the prompt
Ctrl-C during an answer ends that answer; what was shown of it stays in the conversation.
A line that begins with a space is a turn, even if a / follows."""
PROMPT = "> "


def main(argv: list[str] | None = None) -> int:
    """Runs one conversation; returns the exit status (1: no server, or a turn from a pipe got no answer)."""
    parser = argparse.ArgumentParser("jaxsgl chat", description="Talks with the model of a running server.")
    parser.add_argument("--system", metavar="TEXT", help="the system's turn, before the conversation")
    terminal.add_sampling_flags(parser)
    terminal.add_connection_flags(parser)
    parser.add_argument("--url", help="any server of OpenAI's API, as http://host:port, in place of --addr")
    args = parser.parse_args(argv)
    return terminal.run(lambda: _talk(args))


def _talk(args: argparse.Namespace) -> int:
    terminal.check_text("--system", args.system or "")
    sampling = terminal.sampling_params(args)
    keyboard = sys.stdin.isatty() and sys.stdout.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    with _stub_of(args) as stub:
        info = stub.GetModelInfo(pb.GetModelInfoRequest())
        if not info.has_chat_template:
            raise ClientError(
                f"{info.model_path} has no chat template, so it can't take turns: use `python -m jaxsgl.client --raw`"
            )
        if keyboard:
            _tell(f"{info.model_path}, {info.context_length} tokens of context; /help lists the commands")
        conversation = Conversation(stub, sampling, args.system, min(info.context_length, info.pool_tokens))
        return _talk_by_keyboard(conversation) if keyboard else _talk_by_lines(conversation)


@contextlib.contextmanager
def _stub_of(args: argparse.Namespace) -> Iterator[pb_grpc.JaxsglStub | HttpStub]:
    if args.url is not None:
        yield HttpStub(args)
        return
    with terminal.connect(args) as channel:
        yield pb_grpc.JaxsglStub(channel)


def _talk_by_keyboard(conversation: Conversation) -> int:
    with contextlib.suppress(ImportError):  # not on every platform
        import readline  # noqa: F401  (gives `input` the arrow keys)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # programs that a script puts in the background ignore it
    while True:
        try:
            line = input(PROMPT)
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
            return 0
        if line.strip() == "/exit":
            return 0
        try:
            conversation.take(line)
        except KeyboardInterrupt:
            continue
        except CALL_ERRORS as error:
            _tell_failure(conversation, error)


def _talk_by_lines(conversation: Conversation) -> int:
    status = 0
    for line in sys.stdin:
        if line.strip() == "/exit":
            break
        try:
            conversation.take(line.removesuffix("\n"))
        except CALL_ERRORS as error:
            _tell_failure(conversation, error)
            status = 1
    return status


class Conversation:
    """The turns so far, and the options with which the next one is sent.

    Attributes:
      turns: the user's and the assistant's, alternating.
    """

    def __init__(
        self,
        stub: pb_grpc.JaxsglStub | HttpStub,
        sampling: pb.SamplingParams,
        system: str | None,
        most_tokens: int,
    ) -> None:
        self.turns: list[pb.ChatMessage] = []
        self._stub = stub
        self._sampling = sampling
        self._system = system
        self._most_tokens = most_tokens

    def take(self, line: str) -> None:
        """Runs a command, or prints the answer to a user's turn on standard output. Ignores an empty line.

        If the call fails or is interrupted (`CALL_ERRORS`, `KeyboardInterrupt`), the part of the answer that was
        shown stays in the conversation, since the next turn may be about it. If none was shown, the turn is forgotten.
        """
        command, _, rest = line.partition(" ")
        if not line.strip():
            return
        if command == "/reset":
            self.turns.clear()
        elif command == "/system":
            self._system = rest.strip() or None
        elif command == "/help":
            _tell(HELP)
        elif command.startswith("/"):
            _tell(f"{command} is no command: /help lists them; a space before it makes it a turn")
        else:
            self._answer(line.strip())

    def _answer(self, text: str) -> None:
        turn = pb.ChatMessage(role="user", content=text)
        system = [] if self._system is None else [pb.ChatMessage(role="system", content=self._system)]
        chat = pb.ChatMessages(messages=[*system, *self.turns, turn])
        request = pb.GenerateRequest(chat=chat, sampling=self._sampling, stream=True)
        said: list[str] = []
        last, call = pb.GenerateReply(), None
        try:
            with Interrupts():
                call = self._stub.Generate(request)
            for last in call:
                said.append(last.text)
                sys.stdout.write(last.text)
                sys.stdout.flush()
        finally:
            if call is not None:
                call.cancel()  # has no effect after the end
            answer = "".join(said)
            if answer:
                self.turns += [turn, pb.ChatMessage(role="assistant", content=answer)]
            sys.stdout.write("\n")
        self._explain_end(last)

    def _explain_end(self, last: Any) -> None:
        """Prints why an answer ended, unless the model ended it."""
        if last.finish_reason == pb.FINISH_REASON_LENGTH:
            if last.usage.prompt_tokens + last.usage.completion_tokens >= self._most_tokens:
                _tell(f"(cut: all {self._most_tokens} tokens of context are in use; /reset forgets the conversation)")
            else:
                by = "--max-tokens" if self._sampling.HasField("max_tokens") else "the server"
                _tell(f"(cut after {last.usage.completion_tokens} tokens, by {by})")
        elif last.finish_reason == pb.FINISH_REASON_ABORT:
            _tell("(ended by the server)")


def _tell_failure(conversation: Conversation, error: grpc.RpcError | HttpError) -> None:
    """Prints the server's error, and the way out where the conversation may have grown too long."""
    _tell(f"error: {terminal.describe(error)}")
    if terminal.is_refusal(error) and conversation.turns:
        _tell("if the conversation has grown too long: /reset forgets it")


def _tell(text: str) -> None:
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
