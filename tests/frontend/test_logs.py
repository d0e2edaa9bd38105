from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine_process import Script
from server_process import PATIENCE_S, ROOT, ServerProcess, ids_request

from jaxsgl import logs
from jaxsgl.frontend.engines.owned import start_child

SECRET = 'sk-"it\\is"-me'

Start = Callable[..., ServerProcess]


@contextmanager
def logger_of(log_format: str) -> Iterator[tuple[logging.Logger, io.StringIO]]:
    """A logger, and what it has written in `log_format`."""
    written = io.StringIO()
    clean = logs.Cleaner([SECRET])
    formatter = logs.new_formatter(log_format, "server", clean)
    handler = logs.Handler(formatter, lambda line: print(line.decode(), end="", file=written))
    logger = logging.Logger("jaxsgl.of_this_test")
    logger.addHandler(handler)
    yield logger, written


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_json_log_line_is_one_object() -> None:
    with logger_of("json") as (logger, written):
        logger.info("%d of %s\nand a second line", 3, "four", extra={"prompt_tokens": 7, "path": Path("/a")})
    (line,) = objects(written.getvalue())
    time = datetime.fromisoformat(line.pop("time"))
    assert abs(datetime.now(UTC) - time) < timedelta(hours=1)
    assert line == {
        "level": "info",
        "process": "server",
        "logger": "jaxsgl.of_this_test",
        "message": "3 of four\nand a second line",
        "prompt_tokens": 7,
        "path": "/a",
    }


def test_an_exception_stays_in_its_json_log_line() -> None:
    with logger_of("json") as (logger, written):
        try:
            raise ValueError("odd")
        except ValueError:
            logger.exception("it failed")
    (line,) = objects(written.getvalue())
    assert line["level"] == "error"
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ValueError: odd")


def test_lines_of_concurrent_requests_carry_their_own_ids() -> None:
    async def serve(logger: logging.Logger, request_id: str) -> None:
        logs.name_request(request_id)
        await asyncio.sleep(0)
        logs.name_unnamed_request("the id of a part")
        await asyncio.sleep(0)
        logger.info("from %s", request_id)

    async def serve_some(logger: logging.Logger) -> None:
        await asyncio.gather(*(serve(logger, f"r{i}") for i in range(5)))
        logger.info("from nobody")

    with logger_of("json") as (logger, written):
        asyncio.run(serve_some(logger))
    ids = {line["message"]: line.get("request_id") for line in objects(written.getvalue())}
    assert ids == {"from nobody": None} | {f"from r{i}": f"r{i}" for i in range(5)}


def test_a_request_id_cannot_forge_a_log_line() -> None:
    async def serve(logger: logging.Logger) -> None:
        logs.name_request("a\n2026-01-01 ERROR server: on fire\x1b[31m")
        logger.info("served")

    for log_format in ("text", "json"):
        with logger_of(log_format) as (logger, written):
            asyncio.run(serve(logger))
        assert written.getvalue().count("\n") == 1
        assert written.getvalue().isprintable() or written.getvalue()[:-1].isprintable()


def test_no_line_moves_a_terminal() -> None:
    with logger_of("text") as (logger, written):
        logger.info("stack:\n\tof \x1b[2J\r\x9b%s", "\x07")
    assert written.getvalue().endswith("stack:\n\tof " + r"\x1b[2J\r\x9b\x07" + "\n")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_secrets_and_credentials_are_blacked_out(log_format: str) -> None:
    with logger_of(log_format) as (logger, written):
        logger.info("the key is %s", SECRET, extra={"given": f"Bearer {SECRET}"})
        logger.info("metadata: %r", (("authorization", "Bearer sk-of-a-client"), ("x", "y")))
        try:
            raise ValueError(f"bearer sk-of-a-client is not {SECRET}")
        except ValueError:
            logger.exception("it failed")
    assert "sk-" not in written.getvalue()
    assert written.getvalue().count("***") >= 4


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_bytes_that_a_library_logs_are_not_shown(log_format: str) -> None:
    """So gRPC logs metadata that is no UTF-8."""
    with logger_of(log_format) as (logger, written):
        logger.error("Invalid encoding on %s", b"Bearer sk-of-a-client\xff")
    assert "Invalid encoding on <22 bytes>" in written.getvalue()


def test_lines_of_one_place_are_limited_and_counted() -> None:
    now_s = 100.0
    limit = logs.RepeatLimit(lambda: now_s)

    def warn(level: int = logging.WARNING, line: int = 7) -> logging.LogRecord | None:
        record = logging.LogRecord("uvicorn.error", level, "a.py", line, "Invalid HTTP request received.", None, None)
        return record if limit.filter(record) else None

    def outcome(record: logging.LogRecord | None) -> object:
        return record and {name: value for name, value in vars(record).items() if name in ("silent_s", "left_out")}

    written = [outcome(warn()) for _ in range(logs.REPEATS + 50)]
    assert written == [{}] * (logs.REPEATS - 1) + [{"silent_s": logs.PERIOD_S}] + [None] * 50
    assert outcome(warn(line=8)) == {}, "another place of the code"
    assert all(warn(logging.INFO) for _ in range(100)), "no warning"
    now_s += logs.PERIOD_S
    assert [outcome(warn()) for _ in range(2)] == [{"left_out": 50}, {}]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_call_with_wrong_arguments_is_still_a_line(log_format: str) -> None:
    with logger_of(log_format) as (logger, written):
        logger.error("%d of %s", "one")
        logger.error("half a pair: \ud83d", extra={"number": 1 << 80})
    lines = written.getvalue().splitlines()
    assert len(lines) == 2
    assert "can't be formatted" in lines[0]
    assert all(isinstance(line, dict) for line in map(json.loads, lines)) if log_format == "json" else True


def post(server: ServerProcess, path: str, headers: dict[str, str], body: object) -> None:
    answer = httpx.post(f"http://{server.http_address}{path}", headers=headers, json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text


def test_both_processes_write_objects_only(start_server: Start) -> None:
    server = start_server("--log-format", "json")
    server.wait_until_ready()
    post(server, "/generate", {"x-request-id": "over http"}, {"input_ids": [5], "rid": "r"})
    with server.stub() as stub:
        prompt = (Script.FOREVER, 6, 7, 8)
        list(stub.Generate(ids_request(*prompt, request_id="mine\n", max_tokens=3, n=2, stream=False)))
    server.interrupt()
    assert server.wait_for_exit() == 0
    lines = objects(server.log)
    assert {line["process"] for line in lines} == {"server", "engine"}
    (finished,) = [line for line in lines if line.get("request_id") == "mine\n"]
    assert finished["level"] == "debug"
    assert finished["engine_id"] == "mine\n/1"
    assert finished["finish_reason"] == "length,length"
    assert (finished["prompt_tokens"], finished["cached_tokens"], finished["output_tokens"]) == (4, 2, 6)
    assert 0 < finished["first_token_s"] <= finished["total_s"]
    (over_http,) = [line for line in lines if line.get("request_id") == "over http"]
    assert over_http["engine_id"].startswith("r/")


def test_a_failing_start_is_an_object_too(start_server: Start) -> None:
    server = start_server("--log-format", "json", "--page-size", "0")
    assert server.wait_for_exit() == 1
    (line,) = objects(server.log)
    assert line["message"] == "--page-size is 0, but must be auto, or 1 to 256"
    assert line["level"] == "error"


def test_warnings_are_log_lines_and_progress_bars_stay_away_from_machines() -> None:
    program = (
        "import warnings\n"
        "from jaxsgl import logs\n"
        "logs.configure(logs.LogStyle('info', 'json'), 'engine')\n"
        "import tqdm\n"
        "list(tqdm.tqdm(range(3)))\n"
        "warnings.warn('old')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-W", "default", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    (line,) = objects(ended.stderr)
    assert line["level"] == "warning"
    assert "UserWarning: old" in line["message"]


@pytest.mark.parametrize("on_terminal", [True, False])
def test_children_draw_progress_bars_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch, on_terminal: bool) -> None:
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    reading, writing = os.openpty() if on_terminal else os.pipe()
    monkeypatch.setattr(os, "isatty", lambda fd, isatty=os.isatty: isatty(writing if fd == 2 else fd))
    look = (sys.executable, "-c", "import os, sys; sys.exit('TQDM_DISABLE' not in os.environ)")

    async def status() -> int:
        return await (await start_child("engine", look, subprocess.DEVNULL)).wait()

    assert asyncio.run(status()) == on_terminal
    os.close(reading)
    os.close(writing)
