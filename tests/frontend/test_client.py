from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

import pytest
from fake_engine_process import EOS_ID, Script
from server_process import PATIENCE_S, ROOT, ServerProcess, ids_request, wait_for

from jaxsgl.client import main
from jaxsgl.text.tokenizer import ChatMessage, Tokenizer

StartServer: TypeAlias = Callable[..., ServerProcess]
Ask: TypeAlias = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ask(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Runs the client; returns exit status, standard output and standard error."""

    def run(*flags: str) -> tuple[int, str, str]:
        status = main(["--addr", server.address, *flags])
        output = capsys.readouterr()
        return status, output.out, output.err

    return run


def test_raw_text_is_continued(ask: Ask, tokenizer: Tokenizer) -> None:
    text = "hello 🦊 world"
    count = str(len(tokenizer.encode(text)))
    assert ask(text, "--raw", "--max-tokens", count) == (0, text + "\n", "")


def test_a_prompt_is_a_users_turn(ask: Ask, tokenizer: Tokenizer) -> None:
    status, out, _ = ask("hello", "--json")  # the echo ends at the template's first <|end|>, an EOS
    ids = tokenizer.encode_chat([ChatMessage("user", "hello")])
    answer = json.loads(out)
    assert status == 0
    assert answer["text"] == "user\nhello"
    assert answer["token_ids"] == ids[: ids.index(EOS_ID) + 1]
    assert answer["finish_reason"] == "stop"
    assert answer["matched_stop_token"] == EOS_ID
    assert answer["usage"] == {
        "prompt_tokens": len(ids),
        "cached_tokens": len(ids) // 2,
        "completion_tokens": len(answer["token_ids"]),
    }


def test_the_system_turn_comes_first(ask: Ask) -> None:
    assert ask("hello", "--system", "be brief")[:2] == (0, "system\nbe brief\n")


def test_token_ids_are_sent_as_they_are(ask: Ask) -> None:
    status, out, _ = ask("--token-ids", "5,6,7", "--json", "--max-tokens", "4")
    answer = json.loads(out)
    assert (status, answer["token_ids"], answer["finish_reason"]) == (0, [5, 6, 7, 5], "length")
    assert answer["matched_stop_token"] is None


def test_several_answers_are_a_line_each_with_log_probabilities_if_asked_for(ask: Ask) -> None:
    status, out, _ = ask("--token-ids", "8,16,24", "--json", "--max-tokens", "2", "-n", "2", "--logprobs", "1")
    one, two = (json.loads(line) for line in out.splitlines())
    assert status == 0
    assert [one["index"], two["index"]] == [0, 1]
    assert [one["token_ids"], two["token_ids"]] == [[8, 16], [16, 24]]
    assert two["logprobs"] == [{"logprob": -2.0, "top": [[16, -2.0]]}, {"logprob": -3.0, "top": [[24, -3.0]]}]
    assert "prompt_logprobs" not in one


def test_a_stop_string_ends_the_answer(ask: Ask) -> None:
    assert ask("hello world", "--raw", "--stop", "never", "--stop", "wor") == (0, "hello \n", "")
    answer = json.loads(ask("hello world", "--raw", "--stop", "wor", "--json")[1])
    assert (answer["text"], answer["matched_stop_string"], answer["matched_stop_token"]) == ("hello ", "wor", None)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "either a prompt or --token-ids"),
        (["hello", "--token-ids", "1"], "either a prompt or --token-ids"),
        (["hello", "--system", "x", "--raw"], "--system needs the chat template"),
        (["hello", "--temperature", "-1"], "INVALID_ARGUMENT: temperature is -1.0"),
        (["hello", "--top-p", "2"], "INVALID_ARGUMENT: top_p is 2.0"),
        (["hello", "--top-k", "-5"], "INVALID_ARGUMENT: top_k is -5"),
        (["hello", "--seed", "-5"], "INVALID_ARGUMENT: seed is -5"),
        (["hello", "--max-tokens", "99999999999999999999"], "--max-tokens is 99999999999999999999, but must be"),
        (["hello", "--seed", "-99999999999999999999"], "--seed is -99999999999999999999, but must be"),
        (["hello", "-n", "2"], "-n above 1, --logprobs and --prompt-logprobs need --json"),
        (["hello", "--logprobs", "0"], "-n above 1, --logprobs and --prompt-logprobs need --json"),
        (["hello", "--json", "-n", "99999999999999999999"], "-n is 99999999999999999999, but must be"),
        (["hello", "--stop", "\udcff"], "--stop is no valid text from character 0 on"),
        (["hello", "--presence-penalty", "3"], "INVALID_ARGUMENT: presence_penalty is 3.0"),
        (["--token-ids", "5,99999999999"], "--token-ids holds 99999999999, but ids go from 0 to 2147483647"),
        (["hell\udcff"], "the prompt is no valid text from character 4 on"),
        (["hello", "--system", "\udcff"], "--system is no valid text from character 0 on"),
        (["--token-ids", "99999"], "INVALID_ARGUMENT: prompt holds token id 99999"),
    ],
)
def test_errors_are_one_line_and_status_1(ask: Ask, flags: list[str], words: str) -> None:
    status, out, err = ask(*flags)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("error: ")
    assert words in err


def client_command(server: ServerProcess, *flags: str) -> list[str]:
    return [sys.executable, "-m", "jaxsgl.client", "--addr", server.address, *flags]


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_reader_that_leaves_ends_the_client_quietly(server: ServerProcess, flags: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end) as pipe:
        ended = subprocess.run(
            client_command(server, "--raw", "hello", "--max-tokens", "5", *flags),
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            timeout=PATIENCE_S,
        )
    assert (ended.returncode, ended.stderr) == (1, "")


def test_a_terminal_without_the_characters_shows_the_others(server: ServerProcess, tokenizer: Tokenizer) -> None:
    text = "hello 日"
    flags = ["--raw", text, "--max-tokens", str(len(tokenizer.encode(text)))]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            client_command(server, *flags, *more),
            env=os.environ | {"PYTHONIOENCODING": "ascii"},
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=PATIENCE_S,
        )

    shown = run()
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, "hello ?\n", "")
    assert json.loads(run("--json").stdout)["text"] == text


def test_without_a_server_it_gives_up_after_the_wait(capsys: pytest.CaptureFixture[str]) -> None:
    start_s = time.monotonic()
    assert main(["hello", "--addr", "127.0.0.1:1", "--wait-s", "0.3"]) == 1
    assert time.monotonic() - start_s >= 0.3
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "no server is ready at 127.0.0.1:1 after 0.3 s (nothing answers)" in err


def test_a_port_that_speaks_something_else_is_told_from_one_where_nothing_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As a server with a certificate does that is called without --tls."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=hang_up, args=(listening,), daemon=True).start()
        assert main(["hello", "--addr", f"127.0.0.1:{listening.getsockname()[1]}", "--wait-s", "0.3"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "nothing answers" not in err and "--tls if it has a certificate" in err


def hang_up(listening: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            listening.accept()[0].close()


@pytest.mark.parametrize("wait", ["nan", "inf", "-1", "soon"])
def test_a_wait_without_an_end_is_refused(wait: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["hello", "--addr", "127.0.0.1:1", f"--wait-s={wait}"])
    assert "argument --wait-s: " in capsys.readouterr().err


def test_token_ids_that_are_none_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--token-ids", "1,x"])
    assert "--token-ids: '1,x' is no list of token ids: give one as 1,2,3" in capsys.readouterr().err


def test_no_proxy_is_asked_for_a_server_on_this_machine(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert ask("hello", "--raw", "--max-tokens", "1", "--wait-s", "1")[0] == 0


def test_the_client_waits_for_a_server_that_still_loads(
    start_server: StartServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start_server("--random-seed", str(Script.START_HANGS))
    assert main(["hello", "--addr", server.address, "--wait-s", "0.3"]) == 1
    assert "still loading" in capsys.readouterr().err


def test_ctrl_c_cancels_the_call(server: ServerProcess) -> None:
    command = [sys.executable, "-m", "jaxsgl.client", "--addr", server.address, "--token-ids", str(Script.HANG)]
    before = server.log.count(", unfinished, ")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    client = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    with server.stub() as stub:

        def hangs() -> bool:
            (reply,) = stub.Generate(ids_request(Script.REPORT, stream=False, ignore_eos=True, max_tokens=1))
            return bool(reply.token_ids[0] == 1)

        wait_for(hangs, "call in the engine")
    client.send_signal(signal.SIGINT)
    _, err = client.communicate(timeout=PATIENCE_S)
    assert (client.returncode, err) == (130, "")
    wait_for(lambda: server.log.count(", unfinished, ") > before, "abort")
