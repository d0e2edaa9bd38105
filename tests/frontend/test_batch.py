"""Batches: a file of requests becomes a file of answers, each once, whatever kills the run; offline and over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import openai
import pytest
from fake_engine_process import Script
from fastapi import APIRouter
from http_calls import connect, error_of
from server_process import PATIENCE_S, ROOT, ServerProcess, wait_for

from jaxsgl import logs
from jaxsgl.errors import InvalidRequest, NotFound
from jaxsgl.frontend.batches import (
    OPEN_STATES,
    Answered,
    BatchRequest,
    BatchStore,
    Results,
    check_file,
    requests_of,
    run,
)
from jaxsgl.frontend.http.forms import boundary_of
from jaxsgl.frontend.http.in_process import InProcess
from jaxsgl.frontend.http.openai import batches as of_server
from jaxsgl.frontend.http.openai import routes
from jaxsgl.frontend.http.openai.batches import read_upload
from jaxsgl.offline import run_batch
from tests.grids import count as number_of

Start = Callable[..., ServerProcess]
COMPLETIONS: Final = "/v1/completions"
ENDED: Final = {"status": "completed", "created_at": 0}
OFFLINE = """
import sys
from jaxsgl.offline.run_batch import main
sys.exit(main(sys.argv[1:], [sys.executable, "tests/frontend/fake_engine_process.py"]))
"""


def line(custom_id: str, prompt: list[int], url: str = COMPLETIONS, **body: Any) -> str:
    body = {"prompt": prompt, "max_tokens": 8, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no request"),
        ("{\n", "line 1: it is no JSON"),
        (line("a", [1]) + line("a", [2]), "line 2: custom_id is 'a', as on line 1"),
        (line("a", [1], url="/flush_cache"), "line 1: url is '/flush_cache', but must be one of"),
        (line("a", [1], stream=True), "line 1: body.stream is true"),
        ('{"custom_id": 5}', "line 1: custom_id is 5, but must be a text"),
        (line("a", [1], url="/v1/embeddings"), "url is /v1/embeddings, but that of the batch is /v1/completions"),
        (line("a", [1]) * 2 + "\n" + "[]\n" * 9, "line 4: it is no JSON object"),
    ],
)
def test_a_file_is_refused_with_the_lines_that_are_wrong(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "in").write_text(text)
    with pytest.raises(InvalidRequest) as refused:
        check_file(tmp_path / "in", COMPLETIONS)
    assert words in str(refused.value)


def test_a_run_asks_what_is_missing_and_asks_again_what_was_refused_for_now(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("".join(line(f"r{at}", [at]) for at in range(9)))
    requests, asked = list(requests_of(tmp_path / "in")), list[str]()

    async def ask(request: BatchRequest) -> Answered:
        asked.append(request.custom_id)
        refused = request.custom_id == "r7" and asked.count("r7") < 3
        return Answered(429 if refused else 400 if request.custom_id == "r8" else 200, "id", b"{}")

    results = Results(tmp_path / "out")
    asyncio.run(run(requests[:4], results, ask, 2))
    with pytest.raises(OSError, match="another run writes to"):
        Results(tmp_path / "out")
    results.close()
    with (tmp_path / "out").open("a") as out:
        out.write('{"id": "batch_req_0f", "custom_id": "r8", "respo')  # a run that was killed as it wrote
    again = Results(tmp_path / "out")
    asyncio.run(run(requests, again, ask, 3))
    again.close()
    assert sorted(each["custom_id"] for each in answers(tmp_path / "out")) == [f"r{at}" for at in range(9)]
    assert again.num_failed == 1
    assert {name: asked.count(name) for name in set(asked)} == {f"r{at}": 3 if at == 7 else 1 for at in range(9)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1}', "line 1, the last, is no part of an answer: name another file"),
        (line("a", [1]), "line 1 is no answer to a request of a batch"),
        ('\n{"custom_id": "a", "response": {"status_code": "200"}}\n', "line 2 is no answer"),
        ("hello\n", "line 1 is no answer"),
        ("[]\n", "line 1 is no answer"),
    ],
)
def test_a_file_that_holds_anything_but_answers_stays_as_it_is(
    text: str, words: str, model_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "in").write_text(line("a", [1]))
    (tmp_path / "out").write_text(text)
    assert run_status(monkeypatch, tmp_path / "in", tmp_path / "out", model_folder) == 2
    assert f"out: {words}" in capsys.readouterr().err and (tmp_path / "out").read_text() == text


def test_answers_are_not_written_into_the_file_of_requests(
    model_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its other name: a run would take its last line for an answer that was cut."""
    source, text = tmp_path / "in", line("a", [1]).rstrip()
    source.write_text(text)
    (tmp_path / "hard").hardlink_to(source)
    (tmp_path / "soft").symlink_to(source)
    for name in ("in", "hard", "soft"):
        assert run_status(monkeypatch, source, tmp_path / name, model_folder) == 2
        assert f"{name} is this file, and answers would be written into it" in capsys.readouterr().err
    assert source.read_text() == text


def test_a_file_that_answers_cannot_be_written_to_ends_a_run_before_it_begins(
    model_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").write_text(line("a", [1]))
    assert run_status(monkeypatch, tmp_path / "in", tmp_path / "nowhere" / "out", model_folder) == 2
    assert "No such file" in capsys.readouterr().err
    other = Results(tmp_path / "out")
    assert run_status(monkeypatch, tmp_path / "in", tmp_path / "out", model_folder) == 2
    assert "another run writes to" in capsys.readouterr().err
    other.close()


def test_flags_of_other_servers_are_taken_as_by_a_server(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logs, "configure", lambda *_: None)  # this process has its own
    files = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    with caplog.at_level("INFO"):
        assert run_batch.main([*files, "--trust-remote-code", "--attention-backend", "FLASHINFER"]) == 2
    assert "No such file" in capsys.readouterr().err
    assert "--trust-remote-code changes nothing here" in caplog.text
    assert "--attention-backend flashinfer changes nothing here" in caplog.text
    assert run_batch.main([*files, "--ep", "8"]) == 1
    assert "error: --ep takes no number: give --tp 8 --ep" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run_batch.main([*files, "--max-modle-len", "5"])
    assert "--max-modle-len (is it --max-model-len?)" in capsys.readouterr().err


def run_status(monkeypatch: pytest.MonkeyPatch, source: Path, output: Path, model: str) -> int:
    monkeypatch.setattr(logs, "configure", lambda *_: None)  # this process has its own
    return run_batch.main(["-i", str(source), "-o", str(output), "--model", model])


def test_a_request_that_meets_a_fault_of_the_server_is_answered_500_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = APIRouter()

    @api.post(COMPLETIONS)
    async def complete(body: dict[str, Any]) -> dict[str, Any]:
        return {"inverse": 1 / body["prompt"][0]}

    monkeypatch.setattr(routes, "router", lambda _: api)
    limits = SimpleNamespace(max_body_bytes=1 << 20, max_message_bytes=1 << 20)
    front_end: Any = SimpleNamespace(engine=SimpleNamespace(refusal=None), config=limits, metrics=None)
    (tmp_path / "in").write_text("".join(line(f"r{at}", [at - 2]) for at in range(5)))
    results = Results(tmp_path / "out")
    asyncio.run(run(requests_of(tmp_path / "in"), results, InProcess(front_end).ask, 1))
    results.close()
    found = {each["custom_id"]: each["response"] for each in answers(tmp_path / "out")}
    assert {name: told["status_code"] for name, told in found.items()} == {
        f"r{at}": 500 if at == 2 else 200 for at in range(5)
    }
    assert found["r2"]["body"]["error"]["message"].startswith("internal error: ZeroDivisionError")


def test_a_batch_that_fails_has_the_answers_that_came_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(request: BatchRequest) -> Answered:
        if request.custom_id == "r2":
            raise OSError("No space left on device")
        return Answered(200, "id", b"{}")

    serve(monkeypatch, ask)
    monkeypatch.setattr(of_server, "CONCURRENCY", 1)
    store = BatchStore(tmp_path)
    batch_id = kept_batch(store, 5)

    async def run_one() -> None:
        of_server.Batches(store, NO_FRONT_END)  # takes up what is in progress
        await until_ended(store, batch_id)

    asyncio.run(run_one())
    batch = store.batch(batch_id, "")
    assert (batch["status"], batch["request_counts"]["completed"], batch["error_file_id"]) == ("failed", 2, None)
    assert [each["custom_id"] for each in answers(store.content(batch["output_file_id"], ""))] == ["r0", "r1"]
    assert not store.results_path(batch_id).exists()


def test_a_batch_that_another_server_runs_waits_and_is_taken_up_when_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(_: BatchRequest) -> Answered:
        return Answered(200, "id", b"{}")

    monkeypatch.setattr(of_server, "InProcess", lambda _: SimpleNamespace(ask=ask))
    monkeypatch.setattr(of_server, "RETRY_S", 0.02)
    front_end: Any = None
    store = BatchStore(tmp_path)
    (tmp_path / "in").write_text(line("a", [5]))
    file = store.add_file(tmp_path / "in", "in", "batch", "")["id"]
    made = {"status": "in_progress", "input_file_id": file, "request_counts": {"total": 1}, "created_at": 0}
    left, done = (store.add_batch(made, "") for _ in range(2))

    async def scenario() -> None:
        with store.claimed(left["id"]), store.claimed(done["id"]):
            batches = of_server.Batches(BatchStore(tmp_path), front_end)
            await asyncio.sleep(0.2)
            assert {store.batch(each["id"], "")["status"] for each in (left, done)} == {"in_progress"}
            store.keep_batch({**done, "status": "completed", "output_file_id": "the other server's"}, "")
        while store.batch(left["id"], "")["status"] == "in_progress" or batches._running or batches._waiting.qsize():
            await asyncio.sleep(0.01)

    asyncio.run(scenario())
    assert store.batch(left["id"], "")["status"] == "completed"
    assert store.batch(done["id"], "")["output_file_id"] == "the other server's"


def test_what_a_server_that_was_killed_has_left_is_cleared_and_what_cannot_be_read_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = BatchStore(tmp_path)
    (tmp_path / "in").write_text("x")
    kept, batch = store.add_file(tmp_path / "in", "in", "batch", "")["id"], store.add_batch(ENDED, "")
    left = [store.new_file_path(), tmp_path / "batches" / f"{batch['id']}.new", tmp_path / "files" / f"file-{'0' * 32}"]
    for path in (*left, written := store.new_file_path()):
        path.touch()
    for path in (*left, tmp_path / "files" / kept, tmp_path / "files" / f"{kept}.json"):
        os.utime(path, (0, 0))
    for name in ("files/file", "batches/batch"):
        (tmp_path / f"{name}-{'1' * 32}.json").touch()
    again = BatchStore(tmp_path)
    assert not any(path.exists() for path in left) and written.exists()
    assert again.content(kept, "").read_text() == "x"
    assert list(again.open_batches()) == [] and again.batches("") == [batch]
    assert f"batch-{'1' * 32}.json can't be read, and is left out" in caplog.text
    with pytest.raises(NotFound):
        again.file(f"file-{'1' * 32}", "")


NO_FRONT_END: Any = None


def serve(monkeypatch: pytest.MonkeyPatch, ask: Any) -> None:
    monkeypatch.setattr(of_server, "InProcess", lambda _: SimpleNamespace(ask=ask))


async def yes(request: BatchRequest) -> Answered:
    await asyncio.sleep(0)
    return Answered(200, "id", b"{}")


def kept_batch(store: BatchStore, num_requests: int = 1) -> str:
    path = store.new_file_path()
    path.write_text("".join(line(f"r{at}", [at]) for at in range(num_requests)))
    file = store.add_file(path, "in", "batch", "")["id"]
    counts = {"total": num_requests, "completed": 0, "failed": 0}
    made = {"status": "in_progress", "input_file_id": file, "request_counts": counts, "created_at": 0}
    return str(store.add_batch(made, "")["id"])


async def until_ended(store: BatchStore, batch_id: str) -> str:
    async with asyncio.timeout(PATIENCE_S):
        while (status := str(store.batch(batch_id, "")["status"])) in OPEN_STATES:
            await asyncio.sleep(0.01)
    return status


def test_a_batch_whose_end_cannot_be_written_ends_later_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while the disk is full."""
    serve(monkeypatch, yes)
    monkeypatch.setattr(of_server, "AGAIN_S", 0.2)
    store = BatchStore(tmp_path)
    full, other = kept_batch(store), kept_batch(store)
    keep, tried = store.keep_batch, list[str]()

    def keep_unless_full(batch: dict[str, Any], tenant: str) -> None:
        tried.append(batch["id"])
        if batch["id"] == full and tried.count(full) < 3:
            raise OSError("No space left on device")
        keep(batch, tenant)

    async def run_both() -> None:
        store.keep_batch = keep_unless_full  # type: ignore[method-assign]
        of_server.Batches(store, NO_FRONT_END)
        assert await until_ended(store, other) == "completed"
        assert store.batch(full, "")["status"] == "in_progress"
        assert await until_ended(store, full) == "completed"

    asyncio.run(run_both())
    assert tried.count(full) == 3
    outputs = [file["id"] for file in store.files("") if file["purpose"] == "batch_output"]
    assert sorted(outputs) == sorted(store.batch(each, "")["output_file_id"] for each in (full, other))


def test_a_batch_that_is_cancelled_before_it_begins_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(monkeypatch, yes)
    store = BatchStore(tmp_path)
    batch_id = kept_batch(store)

    async def cancel_first() -> str:
        batches = of_server.Batches(store, NO_FRONT_END)
        tasks = asyncio.all_tasks()
        while asyncio.all_tasks() == tasks:  # the turn of the event loop in which the batch's task is made
            await asyncio.sleep(0)
        store.keep_batch({**store.batch(batch_id, ""), "status": "cancelling", "cancelling_at": 1}, "")
        batches.cancel(batch_id)
        return await until_ended(store, batch_id)

    assert asyncio.run(cancel_first()) == "cancelled"


def test_a_batch_that_is_cancelled_while_it_runs_says_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(request: BatchRequest) -> Answered:
        store.keep_batch({**store.batch(batch_id, ""), "status": "cancelling", "cancelling_at": 1}, "")
        batches.cancel(batch_id)
        await asyncio.sleep(PATIENCE_S)
        return Answered(200, "id", b"{}")

    serve(monkeypatch, ask)
    store = BatchStore(tmp_path)
    batch_id = kept_batch(store)

    batches: Any = None

    async def run_one() -> str:
        nonlocal batches
        batches = of_server.Batches(store, NO_FRONT_END)
        return await until_ended(store, batch_id)

    assert asyncio.run(run_one()) == "cancelled"
    assert store.batch(batch_id, "")["cancelling_at"] == 1


def test_answers_are_collected_until_the_batch_is_kept_with_their_files(tmp_path: Path) -> None:
    """A server that is killed in between asks nothing again."""
    store = BatchStore(tmp_path)
    batch_id = store.add_batch({"created_at": 0}, "")["id"]
    results = Results(store.results_path(batch_id))
    results.add(BatchRequest("a", COMPLETIONS, b"{}"), Answered(200, "id", b"{}"))
    results.close()
    for _ in range(2):
        output, errors = store.split_results(batch_id, "")
        assert output is not None and errors is None
        assert [each["custom_id"] for each in answers(store.content(output, ""))] == ["a"]


def test_a_form_is_read_whatever_its_file_holds(tmp_path: Path) -> None:
    content = b"--b\r\nno boundary\r\n\r\n" * 3 + b"--"
    (tmp_path / "body").write_bytes(
        b'--xyz\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--xyz\r\n'
        b'Content-Disposition: form-data; name="file"; filename="../a.jsonl"\r\nContent-Type: text/plain\r\n\r\n'
        + content
        + b"\r\n--xyz--\r\n"
    )
    boundary = boundary_of('multipart/form-data; boundary="xyz"')
    form = read_upload(tmp_path / "body", boundary, tmp_path / "content")
    assert (form.fields, form.filename) == ({"purpose": "batch"}, ".._a.jsonl")
    assert (tmp_path / "content").read_bytes() == content
    (tmp_path / "cut").write_bytes((tmp_path / "body").read_bytes()[:-30])
    with pytest.raises(InvalidRequest, match="cut"):
        read_upload(tmp_path / "cut", boundary, tmp_path / "content")
    with pytest.raises(InvalidRequest, match="no form"):
        boundary_of("application/json")


def offline(model: str, source: Path, output: Path, *flags: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", OFFLINE, "-i", str(source), "-o", str(output), "--model", model, *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE)


def has_lines(path: Path, count: int) -> bool:
    return path.exists() and path.read_bytes().count(b"\n") >= count


def test_a_run_that_is_killed_goes_on_and_answers_all_once(model_folder: str, tmp_path: Path) -> None:
    names = [f"r{at}" for at in range(60)]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(line(name, [at + 1, at + 2], max_tokens=20) for at, name in enumerate(names)))
    others = Results(output)  # of another file, and more of them
    for at in range(len(names) + 1):
        others.add(BatchRequest(f"other{at}", COMPLETIONS, b""), Answered(200, "id", b"{}"))
    others.close()
    num_others = len(others.done)
    for kills in range(number_of(1, 2)):
        process = offline(model_folder, source, output, "--concurrency", "2")
        wait_for(partial(has_lines, output, num_others + 12 * (kills + 1)), "some answers")
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert output.read_bytes().count(b"\n") < num_others + len(names), "it was killed too late to show anything"
    process = offline(model_folder, source, output)
    _, log = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, log.decode()
    found = answers(output)[num_others:]
    assert sorted(each["custom_id"] for each in found) == sorted(names)
    assert all(each["response"]["status_code"] == 200 for each in found)
    assert all(each["response"]["body"]["usage"]["prompt_tokens"] == 2 for each in found)
    assert b"60/60" in log, "no progress bar"


def test_offline_errors_are_answers_and_a_bad_file_starts_nothing(model_folder: str, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("good", [1]) + line("bad", [1], temperature=-1))
    process = offline(model_folder, source, output)
    _, log = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0 and b"1 answers are errors" in log
    by_name = {each["custom_id"]: each["response"] for each in answers(output)}
    assert by_name["good"]["status_code"] == 200
    assert by_name["bad"]["status_code"] == 400 and "temperature" in by_name["bad"]["body"]["error"]["message"]
    source.write_text("nonsense")
    process = offline(model_folder, source, output)
    _, log = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2 and b"line 1: it is no JSON" in log


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept") / "batches"


@pytest.fixture(scope="module")
def client(
    model_folder: str, batches: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[openai.OpenAI, ServerProcess]]:
    server = ServerProcess(tmp_path_factory.mktemp("server"), model_folder, "--batch-dir", str(batches))
    server.wait_until_ready()
    with openai.OpenAI(base_url=f"http://{server.http_address}/v1", api_key="none") as made:
        yield made, server
    server.end()


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    return wait_for(
        lambda: (batch := client.batches.retrieve(batch_id)).status in ("completed", "failed", "cancelled") and batch,
        "end of the batch",
    )


def test_openais_client_runs_a_batch(client: tuple[openai.OpenAI, ServerProcess]) -> None:
    api, _ = client
    text = "".join(line(f"r{at}", [at + 1], temperature=-1 if at == 3 else 0) for at in range(5))
    text += line("r5", [6], temperature=0, user="long" * 20_000)  # a body that takes some time to parse
    file = api.files.create(file=("requests.jsonl", text.encode()), purpose="batch")
    assert (file.filename, file.bytes, file.purpose) == ("requests.jsonl", len(text), "batch")
    assert api.files.content(file.id).text == text
    made = api.batches.create(
        input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h", metadata={"who": "me"}
    )
    batch = ended(api, made.id)
    assert (batch.status, batch.metadata) == ("completed", {"who": "me"})
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (6, 5, 1)
    good = [json.loads(text) for text in api.files.content(batch.output_file_id).text.splitlines()]
    (bad,) = (json.loads(text) for text in api.files.content(batch.error_file_id).text.splitlines())
    assert sorted(each["custom_id"] for each in good) == ["r0", "r1", "r2", "r4", "r5"]
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("r3", 400)
    assert [each.id for each in api.batches.list()] == [made.id]
    assert {each.id for each in api.files.list()} == {file.id, batch.output_file_id, batch.error_file_id}
    assert [each.id for each in api.files.list(purpose="batch")] == [file.id]
    pages = list(api.files.list(limit=1, order="asc").iter_pages())
    assert [[each.id for each in page.data] for page in pages] == [
        [each.id] for each in reversed(list(api.files.list()))
    ]
    assert not api.batches.list(limit=1, after=made.id).data
    with pytest.raises(openai.BadRequestError, match="after is batch-0, but there is no such object"):
        api.batches.list(after="batch-0")
    assert api.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        api.files.retrieve(file.id)


def idle(server: ServerProcess) -> bool:
    with connect(server) as http:
        return bool(http.get("/internal_state").json()["num_running"] == 0)


def test_files_and_batches_are_refused_in_words(
    client: tuple[openai.OpenAI, ServerProcess], server: ServerProcess
) -> None:
    api, own = client
    with connect(own) as http:
        assert "purpose is None" in error_of(http.post("/v1/files", files={"file": b"a"}))["message"]
        assert "no form" in error_of(http.post("/v1/files", json={}))["message"]
        file = api.files.create(file=("a", b"nonsense"), purpose="batch").id
        body = {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"}
        assert "line 1: it is no JSON" in error_of(http.post("/v1/batches", json=body))["message"]
        assert http.get("/v1/files/..%2F..%2Fetc").status_code == 404
        for kind in ("file", "batch"):
            missing = http.get(f"/v1/{kind.replace('ch', 'che')}s/{kind}-0")
            assert (missing.status_code, error_of(missing)["message"]) == (404, f"there is no {kind} {kind}-0")
    with connect(server) as http:  # without --batch-dir
        for refused in (http.post("/v1/files", files={"file": b"a"}), http.get("/v1/batches/batch-0")):
            assert refused.status_code == 404 and "start it with --batch-dir" in error_of(refused)["message"]


def test_tenants_see_their_own_files_alone(start_server: Start, model_folder: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-a\nsk-b\n")
    flags = ("--batch-dir", str(tmp_path / "batches"), "--api-key-file", str(tmp_path / "keys"))
    server = start_server(*flags, model=model_folder)
    server.wait_until_ready()
    mine, other = (
        openai.OpenAI(base_url=f"http://{server.http_address}/v1", api_key=key, max_retries=0)
        for key in ("sk-a", "sk-b")
    )
    with mine, other:
        file = mine.files.create(file=("a.jsonl", line("a", [1]).encode()), purpose="batch")
        batch = mine.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
        for call in (lambda: other.files.content(file.id), lambda: other.batches.retrieve(batch.id)):
            with pytest.raises(openai.NotFoundError):
                call()
        assert list(other.files.list()) == [] and list(other.batches.list()) == []
        assert ended(mine, batch.id).status == "completed"
    assert time.time() - batch.created_at < PATIENCE_S


def test_a_batch_outlives_the_server_and_can_be_cancelled(
    client: tuple[openai.OpenAI, ServerProcess], start_server: Start, model_folder: str, batches: Path
) -> None:
    """The last test of this server."""
    api, server = client
    text = line("first", [5]) + line("hangs", [Script.HANG])
    file = api.files.create(file=("requests.jsonl", text.encode()), purpose="batch")
    batch = api.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")

    def first_is_done(api: openai.OpenAI) -> bool:
        counts = api.batches.retrieve(batch.id).request_counts
        return counts is not None and counts.completed == 1

    wait_for(lambda: first_is_done(api), "first answer")
    server.process.kill()
    server.process.wait()
    again = start_server("--batch-dir", str(batches), model=model_folder)
    again.wait_until_ready()
    with openai.OpenAI(base_url=f"http://{again.http_address}/v1", api_key="none") as api:
        wait_for(lambda: first_is_done(api), "batch that goes on")
        with pytest.raises(openai.BadRequestError, match="cancel that first"):
            api.files.delete(file.id)
        api.batches.cancel(batch.id)
        cancelled = ended(api, batch.id)
        assert (cancelled.status, cancelled.error_file_id) == ("cancelled", None)
        assert [
            json.loads(text)["custom_id"] for text in api.files.content(cancelled.output_file_id).text.splitlines()
        ] == ["first"]
        wait_for(lambda: "uvicorn" not in again.log and idle(again), "an idle engine")
