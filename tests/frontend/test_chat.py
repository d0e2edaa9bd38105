"""The terminal chat against the fake engine, with a template that makes every answer a transcript of what was sent.

The template ends with EOS, so the fake engine's echo is the whole conversation. A turn that is a script's token (see
`Script`) is sent alone.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import grpc
import pytest
from fake_engine_process import LIMITS, Script
from server_process import PATIENCE_S, ROOT, ServerProcess, ids_request, wait_for
from tokenizers import AddedToken

from jaxsgl.chat import Conversation, main
from jaxsgl.frontend.proto import jaxsgl_pb2 as pb
from jaxsgl.http_stub import HttpStub
from tests.text.small_tokenizers import byte_level, save

HANG, DIE, PAUSE = "<hang>", "<die>", "<pause>"
TEMPLATE = (
    "{% if messages[-1].content.startswith('<') %}{{ messages[-1].content }}"
    "{% else %}{% for m in messages %}{{ m.role[0] }}({{ m.content }}){% endfor %}<|end|>{% endif %}"
)
IN_A_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = byte_level()
    scripts = {Script.HANG: HANG, Script.DIE: DIE, Script.PAUSE: PAUSE}
    for token_id in range(tokenizer.get_vocab_size(), Script.PAUSE + 1):
        tokenizer.add_tokens([AddedToken(scripts.get(token_id, f"<unused {token_id}>"), special=False)])
    return save(tokenizer, tmp_path_factory.mktemp("model"), TEMPLATE)


@pytest.fixture(scope="module")
def server(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("server"), model_folder)
    server.wait_until_ready()
    yield server
    server.end()


StartServer: TypeAlias = Callable[..., ServerProcess]
Say: TypeAlias = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(server: ServerProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Say:
    """Pipes lines into the chat; returns exit status, standard output and standard error."""

    def run(*lines: str | bytes, flags: tuple[str, ...] = ()) -> tuple[int, str, str]:
        data = b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        status = main(["--addr", server.address, *flags])
        output = capsys.readouterr()
        return status, output.out, output.err

    return run


def test_each_turn_is_sent_with_the_ones_before(say: Say) -> None:
    assert say("hello", "and") == (0, "u(hello)\nu(hello)a(u(hello))u(and)\n", "")


def test_a_server_of_openais_api_answers_the_same(say: Say, server: ServerProcess) -> None:
    for url in (f"http://{server.http_address}", f"http://{server.http_address}/v1/"):
        by_http = ("--url", url, "--addr", "127.0.0.1:1")
        assert say("naïve 🦊", "and", flags=by_http) == say("naïve 🦊", "and")
    assert "(cut after 2 tokens, by --max-tokens)" in say("hello", flags=(*by_http, "--max-tokens", "2"))[2]
    assert say("hello", flags=(*by_http, "--stop", "ll"))[1] == "u(he\n"
    status, out, err = say(*["hello"] * 8, "/reset", "you", flags=by_http)
    assert "tokens, by the server)" in err, "whose pool is smaller than the context"
    assert (status, out.startswith("u(hello)\n"), out.endswith("\nu(you)\n")) == (1, True, True)
    assert re.search(r"error: 400: .*shorten the prompt.*\nif the conversation has grown too long: /reset", err)


def test_an_answer_over_http_can_be_ended(server: ServerProcess) -> None:
    flags = argparse.Namespace(url=f"http://{server.http_address}", api_key=None, ca=None, wait_s=PATIENCE_S)
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=PAUSE)])
    call = HttpStub(flags).Generate(pb.GenerateRequest(chat=chat))
    call.cancel()
    assert PAUSE in next(iter(call)).text
    assert requests_in_the_engine(server) == 1
    call.cancel()
    wait_for(lambda: requests_in_the_engine(server) == 0, "end of the request in the engine")


def test_what_is_no_server_of_openais_api_is_told(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for url in (
        "127.0.0.1:1", "http://127.0.0.1:1", f"http://{server.http_address}/v2", f"http://{server.address}"
    ):  # fmt: skip
        assert main(["--url", url, "--wait-s", "0"]) == 1
    scheme, unreached, path, of_grpc = capsys.readouterr().err.splitlines()
    assert scheme == "error: --url is 127.0.0.1:1, but must begin with http:// or https://"
    assert unreached.startswith("error: no server is ready at http://127.0.0.1:1 after 0 s (no answer from")
    assert path.startswith("error: 404: no such path")
    assert "(no answer from" in of_grpc and "BadStatusLine" in of_grpc


MODELS = b'{"data": [{"id": "m"}]}'
EVENT = b'data: {"choices": [{"delta": {"content": "hi"}}]}\n\n'


def reply(length: int, body: bytes, status: str = "200 OK") -> bytes:
    """An answer that is cut if its body is shorter than `length`."""
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), length, body)


def read_request(connection: socket.socket) -> None:
    """Reads all of a request: a connection that is closed before is reset, and its answer may be lost."""
    head, end, body = b"", b"", b""
    while not end or len(body) < int((re.search(rb"content-length: (\d+)", head, re.IGNORECASE) or [b"", b"0"])[1]):
        received = connection.recv(1 << 16)
        if not received:
            return
        head, end, body = (head + end + body + received).partition(b"\r\n\r\n")


@contextlib.contextmanager
def answering(*replies: bytes) -> Iterator[str]:
    """The URL of a server that gives each of its connections the next one of `replies`, and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            for each in replies:
                connection, _ = listening.accept()
                with connection:
                    read_request(connection)
                    connection.sendall(each)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join(PATIENCE_S)


def test_an_answer_over_http_that_breaks_off_is_an_error_of_its_turn(say: Say) -> None:
    models = reply(len(MODELS), MODELS)
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n40\r\ndata:" % (len(EVENT), EVENT)
    cut_refusal = reply(99, b"{", status="500 Internal Server Error")
    with answering(reply(99, MODELS), models, chunked, cut_refusal, b"nonsense\r\n") as url:
        status, out, err = say("a", "b", "c", flags=("--url", url))
    assert (status, out) == (1, "hi\n\n\n")
    first, *others = [line for line in err.splitlines() if not line.startswith("if the conversation")]
    assert first.startswith("error: the answer broke off: IncompleteRead")
    assert others[0].startswith("error: 500: IncompleteRead") and "BadStatusLine('nonsense" in others[1]


def test_an_answer_over_http_that_ends_between_two_events_broke_off_too(say: Say) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    with answering(reply(len(MODELS), MODELS), head + b"%x\r\n%s\r\n" % (len(EVENT), EVENT)) as url:
        status, out, err = say("a", flags=("--url", url))
    assert (status, out) == (1, "hi\n") and "error: the answer broke off" in err


def test_a_proxy_is_not_asked_for_this_machine(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    done = EVENT + b"data: [DONE]\n\n"
    with answering(reply(len(MODELS), MODELS), reply(len(done), done)) as url:
        status, out, _ = say("a", flags=("--url", url))
    assert (status, out) == (0, "hi\n")


def test_an_address_that_is_no_url_is_named(say: Say) -> None:
    status, _, err = say("a", flags=("--url", "http://127.0.0.1:abc"))
    assert status == 1 and "--url is http://127.0.0.1:abc, which is no URL" in err


def test_reset_forgets_the_turns_but_not_the_system(say: Say) -> None:
    status, out, _ = say("hello", "/reset", "and", flags=("--system", "be brief"))
    assert (status, out) == (0, "s(be brief)u(hello)\ns(be brief)u(and)\n")


def test_the_system_turn_can_be_changed_and_removed(say: Say) -> None:
    assert say("/system be kind", "hello", "/reset", "/system", "you")[1] == "s(be kind)u(hello)\nu(you)\n"


def test_characters_of_several_bytes_travel_both_ways(say: Say) -> None:
    assert say("naïve 🦊 日本")[1] == "u(naïve 🦊 日本)\n"


def test_bytes_that_are_no_text_do_no_harm(say: Say) -> None:
    assert say(b"caf\xe9") == (0, "u(caf\N{REPLACEMENT CHARACTER})\n", "")


def test_exit_ends_and_help_explains(say: Say) -> None:
    status, out, err = say("", "/help", "/exit", "hello")
    assert (status, out) == (0, "")
    assert all(command in err for command in ("/reset", "/system", "/help", "/exit", "Ctrl-C"))


def test_a_line_with_a_slash_is_a_turn_only_behind_a_space(say: Say) -> None:
    status, out, err = say("/etc is what", " /etc is what")
    assert (status, out) == (0, "u(/etc is what)\n")
    assert "/etc is no command: /help lists them" in err


def test_a_conversation_that_is_too_long_is_reported_and_can_be_reset(say: Say) -> None:
    status, out, err = say(*["hello"] * 8, "/reset", "you")
    assert status == 1
    assert re.search(r"error: INVALID_ARGUMENT: .*\nif the conversation has grown too long: /reset", err)
    assert out.startswith("u(hello)\n")
    assert out.endswith("\nu(you)\n")


def test_an_answer_that_is_cut_says_why(say: Say) -> None:
    assert "(cut after 2 tokens, by --max-tokens)" in say("hello", flags=("--max-tokens", "2"))[2]
    limit = min(LIMITS.context_length, LIMITS.pool_tokens)
    status, _, err = say("<unused 600>")
    assert status == 0
    assert f"(cut: all {limit} tokens of context are in use; /reset forgets the conversation)" in err


def test_a_refused_first_turn_says_nothing_of_length(say: Say) -> None:
    status, out, err = say("hello", flags=("--top-p", "2"))
    assert (status, out, err) == (1, "\n", err)
    assert err.startswith("error: INVALID_ARGUMENT: top_p is 2.0")
    assert err.count("\n") == 1


def test_flags_are_checked_before_a_server_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--addr", "127.0.0.1:1", "--max-tokens", "99999999999999999999"]) == 1
    assert main(["--addr", "127.0.0.1:1", "--system", "\udcff"]) == 1
    too_many, no_text = capsys.readouterr().err.splitlines()
    assert too_many.startswith("error: --max-tokens is 99999999999999999999, but must be")
    assert no_text.startswith("error: --system is no valid text from character 0 on")


def test_without_a_chat_template_it_names_the_other_client(
    start_server: StartServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--addr", start_server().address, "--wait-s", str(PATIENCE_S)]) == 1
    assert "has no chat template, so it can't take turns: use `python -m jaxsgl.client" in capsys.readouterr().err


def test_an_engine_that_dies_is_reported_and_the_chat_goes_on(
    start_server: StartServer,
    model_folder: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = start_server(model=model_folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{DIE}\nhello\n"))
    assert main(["--addr", server.address, "--wait-s", str(PATIENCE_S)]) == 1
    out, err = capsys.readouterr()
    assert out in [f"{DIE * count}\n\n" for count in range(4)]  # each answer, as far as it came, on its own line
    assert err.count("error: UNAVAILABLE: ") == 2


class Terminal:
    """A chat in a terminal of its own, as for a person in front of it."""

    def __init__(self, address: str) -> None:
        self.screen = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()  # a read may end in the middle of a character
        self._keyboard, inside = os.openpty()
        os.set_blocking(self._keyboard, False)
        chat = [sys.executable, "-m", "jaxsgl.chat", "--addr", address]
        self.process = subprocess.Popen(
            [sys.executable, "-c", IN_A_TERMINAL, *chat],
            stdin=inside,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
            cwd=ROOT,
            env=os.environ | {"TERM": "dumb"},
        )
        os.close(inside)

    def press(self, keys: str) -> None:
        os.write(self._keyboard, keys.encode())

    def wait_for(self, text: str) -> None:
        """Reads the screen up to `text`."""

        def look() -> bool:
            try:
                self.screen += self._decoder.decode(os.read(self._keyboard, 65536))
            except BlockingIOError:
                pass
            except OSError:  # the other side is closed
                assert text in self.screen, self.screen
            return text in self.screen

        wait_for(look, f"{text!r} on the screen, which shows {self.screen!r}")
        self.screen = self.screen.partition(text)[2]

    def wait_for_exit(self) -> int:
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        os.close(self._keyboard)


@pytest.fixture
def screen(server: ServerProcess) -> Iterator[Terminal]:
    terminal = Terminal(server.address)
    terminal.wait_for("/help lists the commands")
    terminal.wait_for("> ")
    yield terminal
    terminal.close()


def requests_in_the_engine(server: ServerProcess) -> int:
    with server.stub() as stub:
        (reply,) = stub.Generate(ids_request(Script.REPORT, stream=False, ignore_eos=True, max_tokens=1))
    return int(reply.token_ids[0])


def test_ctrl_c_ends_an_answer_which_stays_in_the_conversation(server: ServerProcess, screen: Terminal) -> None:
    screen.press(f"{PAUSE}\n")
    screen.wait_for(PAUSE * 3)
    assert requests_in_the_engine(server) == 1
    screen.press("\x03")
    screen.wait_for("> ")
    wait_for(lambda: requests_in_the_engine(server) == 0, "end of the request in the engine")
    screen.press("hello\n")
    screen.wait_for(f"u({PAUSE})a({PAUSE * 3})u(hello)")


def test_ctrl_c_before_the_first_word_forgets_the_turn(server: ServerProcess, screen: Terminal) -> None:
    screen.press(f"{HANG}\n")
    wait_for(lambda: requests_in_the_engine(server) == 1, "request in the engine")
    screen.press("\x03")
    screen.wait_for("> ")
    wait_for(lambda: requests_in_the_engine(server) == 0, "end of the request in the engine")
    screen.press("日本\n")
    screen.wait_for("\nu(日本)")


def test_ctrl_c_while_a_call_starts_cancels_it(server: ServerProcess) -> None:
    calls: list[grpc.Call] = []

    class Stub:
        def Generate(self, request: pb.GenerateRequest) -> grpc.Call:
            calls.append(stub.Generate(request))
            signal.raise_signal(signal.SIGINT)
            return calls[0]

    with server.stub() as stub:
        interrupted: Any = Stub()
        with pytest.raises(KeyboardInterrupt):
            Conversation(interrupted, pb.SamplingParams(), None, LIMITS.context_length).take(HANG)
        assert not calls[0].is_active()


@pytest.mark.parametrize("key", ["\x03", "\x04", "/exit\n"], ids=["Ctrl-C", "Ctrl-D", "exit"])
def test_at_the_prompt_a_key_or_a_word_ends_the_chat(screen: Terminal, key: str) -> None:
    screen.press(key)
    assert screen.wait_for_exit() == 0
