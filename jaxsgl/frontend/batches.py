"""Batches as OpenAI has them: a file of requests, one JSON object a line, becomes a file of answers.

A run appends each answer as it comes, so that a run that was killed is taken up where it ended: what the file of
answers holds is not asked again, and a line that was written in part is. `BatchStore` keeps the files and batches of a
server's clients. Knows no endpoint: `ask` answers one request. offline/run_batch.py runs a file of a user's,
http/openai/batches.py those of a server's clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxsgl.errors import InvalidRequest, NotFound, StartupError

URLS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/score", "/v1/rerank"
)  # fmt: skip
RETRY_STATUSES = (429, 503)  # for what passes, as a full queue
MAX_TRIES = 30
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 10.0
MAX_SHOWN_PROBLEMS = 5
_ANSWER_ID = "batch_req_"
_LINE_START = f'{{"id": "{_ANSWER_ID}'.encode()
_ID = re.compile(r"(file|batch)-[0-9a-f]{32}")
_OTHER_OUTPUT = "name another file for the answers, or a new one"
OPEN_STATES = ("in_progress", "finalizing", "cancelling")
LEFT_S = 3600.0  # a file that is no object's, and was not written for so long, is of a server that was killed

logger = logging.getLogger(__name__)


class BatchRequest(NamedTuple):
    """One line of a batch.

    Attributes:
      custom_id: its client's name for it, by which the answer is found.
      url: the endpoint that answers it.
      body: what that endpoint takes, as JSON.
    """

    custom_id: str
    url: str
    body: bytes


class Answered(NamedTuple):
    """What an endpoint has answered: a status of HTTP, the id of the request, and JSON."""

    status: int
    request_id: str
    body: bytes


Ask = Callable[[BatchRequest], Awaitable[Answered]]


@dataclass(frozen=True)
class BatchFile:
    """A file of requests that has been checked.

    Attributes:
      path: the file.
      custom_ids: of its requests.
    """

    path: Path
    custom_ids: frozenset[str]

    @property
    def num_requests(self) -> int:
        """Its lines that are not empty."""
        return len(self.custom_ids)


def requests_of(path: Path) -> Iterator[BatchRequest]:
    """Yields the requests of a file that has been checked, in its order; the file may be larger than memory."""
    with path.open("rb") as lines:
        for line in lines:
            if line.strip():
                yield _request_of(line)


def check_file(path: Path, url: str | None = None, max_requests: int | None = None) -> BatchFile:
    """Returns the file at `path`, each of whose lines is a request, to `url` if that is given.

    Raises `InvalidRequest` with the first lines that are none, or that have the id of another.
    """
    problems: list[str] = []
    seen: dict[str, int] = {}
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                request = _request_of(line)
                if url is not None and request.url != url:
                    raise InvalidRequest(f"url is {request.url}, but that of the batch is {url}")
                first = seen.setdefault(request.custom_id, number)
                if first != number:
                    raise InvalidRequest(f"custom_id is {request.custom_id!r}, as on line {first}: give each its own")
            except InvalidRequest as error:
                problems.append(f"line {number}: {error}")
                if len(problems) >= MAX_SHOWN_PROBLEMS:
                    break
            if max_requests is not None and len(seen) > max_requests:
                problems.append(f"there are more than {max_requests} requests: send several batches")
                break
    if not (seen or problems):
        problems.append("the file holds no request: write one JSON object a line")
    if problems:
        raise InvalidRequest("; ".join(problems))
    return BatchFile(path, frozenset(seen))


def _request_of(line: bytes) -> BatchRequest:
    """Raises `InvalidRequest`."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"it is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidRequest("it is no JSON object")
    custom_id, url, body = found.get("custom_id"), found.get("url"), found.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise InvalidRequest(
            f"custom_id is {custom_id!r:.100}, but must be a text: name the request, so that its answer can be found"
        )
    if found.get("method", "POST") != "POST":
        raise InvalidRequest(f"method is {found['method']!r}, but must be POST")
    if url not in URLS:
        raise InvalidRequest(f"url is {url!r}, but must be one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise InvalidRequest("body is no JSON object")
    if body.get("stream"):
        raise InvalidRequest("body.stream is true, but a batch has whole answers: leave it out")
    return BatchRequest(custom_id, url, json.dumps(body).encode())


class Results:
    """The file of answers of a batch, to which a run appends.

    Raises `OSError`, also if another run has it open, and `InvalidRequest` for a file that holds anything else, which
    stays as it is.

    Attributes:
      done: the `custom_id` of each answer in the file.
      num_failed: how many of those are no success.
    """

    def __init__(self, path: Path) -> None:
        self.done: set[str] = set()
        self.num_failed = 0
        self._file: BinaryIO = path.open("ab+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise OSError(f"another run writes to {path}: wait for it, or name another file") from None
        try:
            self._file.truncate(self._read())
        except BaseException:
            self._file.close()
            raise

    def _read(self) -> int:
        """Counts the answers in the file; returns where the last whole one ends."""
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                if not (line.startswith(_LINE_START) or _LINE_START.startswith(line)):
                    raise InvalidRequest(f"line {number}, the last, is no part of an answer: {_OTHER_OUTPUT}")
                break  # the run that wrote it was killed
            if line.strip():
                self._count(*_told_by(line, number))
            end += len(line)
        return end

    def add(self, request: BatchRequest, answered: Answered) -> None:
        """Appends an answer."""
        self._file.write(_line_of(request.custom_id, answered) + b"\n")
        self._file.flush()
        self._count(request.custom_id, answered.status)

    def close(self) -> None:
        """Closes the file, whose bytes are on the disk then."""
        try:
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def _count(self, custom_id: str, status: int) -> None:
        self.done.add(custom_id)
        self.num_failed += not is_success(status)


def _told_by(line: bytes, number: int) -> tuple[str, int]:
    """The `custom_id` and the status of an answer. Raises `InvalidRequest` if the line is none."""
    try:
        found = json.loads(line)
        custom_id, status = found["custom_id"], found["response"]["status_code"]
    except (ValueError, LookupError, TypeError, RecursionError):
        custom_id, status = None, None
    if not isinstance(custom_id, str) or not isinstance(status, int):
        raise InvalidRequest(f"line {number} is no answer to a request of a batch: {_OTHER_OUTPUT}")
    return custom_id, status


def is_success(status: int) -> bool:
    """Whether a status of HTTP says that there is an answer."""
    return 200 <= status < 300


def _line_of(custom_id: str, answered: Answered) -> bytes:
    line: dict[str, Any] = {
        "id": f"{_ANSWER_ID}{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": {
            "status_code": answered.status,
            "request_id": answered.request_id,
            "body": json.loads(answered.body or b"null"),
        },
        "error": None,
    }
    return json.dumps(line).encode()


async def run(
    requests: Iterable[BatchRequest],
    results: Results,
    ask: Ask,
    concurrency: int,
    on_done: Callable[[], object] = lambda: None,
) -> None:
    """Asks all that `results` lacks, `concurrency` requests at a time; `on_done` hears of each that is answered.

    Refusals that pass, as a full queue, are asked again; others are answers. Raises what `ask` raises; all that was
    answered before is kept.
    """
    todo = (request for request in requests if request.custom_id not in results.done)

    async def work() -> None:
        for request in todo:  # shared: each worker takes the next one
            results.add(request, await _ask_patiently(ask, request))
            on_done()

    async with asyncio.TaskGroup() as workers:
        for _ in range(concurrency):
            workers.create_task(work())


async def _ask_patiently(ask: Ask, request: BatchRequest) -> Answered:
    wait_s = FIRST_WAIT_S
    for _ in range(MAX_TRIES - 1):
        answered = await ask(request)
        if answered.status not in RETRY_STATUSES:
            return answered
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)
    return await ask(request)


class BatchStore:
    """Files and batches of a server's clients, in a folder that a flag names; all of it outlives the server.

        files/ID            what was uploaded, or what a batch has answered
        files/ID.json       what is known of it
        batches/ID.json     a batch
        batches/ID.jsonl    its answers so far
        batches/ID.lock     locked by the server that runs it

    Each object is written to a file beside it and moved there, so that none is ever half a one; one that can't be read
    all the same is left out, with a line in the log. A tenant sees its own alone. Several servers may share the folder.
    Runs nothing. Raises `StartupError` if the folder can't be used.
    """

    def __init__(self, folder: Path) -> None:
        self._files, self._batches = folder / "files", folder / "batches"
        try:
            for each in (self._files, self._batches):
                each.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise StartupError(f"--batch-dir {folder} can't be used: {error.strerror}") from None
        for path in [*self._files.iterdir(), *self._batches.glob("*.new")]:
            is_whole = _ID.fullmatch(path.stem) and path.suffix != ".new" and path.with_suffix(".json").exists()
            with contextlib.suppress(OSError):  # another server may be faster
                if not is_whole and path.stat().st_mtime < time.time() - LEFT_S:
                    path.unlink()

    # Files.

    def new_file_path(self) -> Path:
        """Where to write a file that `add_file` takes."""
        return self._files / f"new-{uuid.uuid4().hex}"

    def add_file(self, written: Path, name: str, purpose: str, tenant: str) -> dict[str, Any]:
        """Takes the file `written`, which is moved; returns OpenAI's object for it."""
        file_id = f"file-{uuid.uuid4().hex}"
        found = {
            "id": file_id,
            "object": "file",
            "bytes": written.stat().st_size,
            "created_at": int(time.time()),
            "filename": name,
            "purpose": purpose,
            "status": "processed",
        }
        _keep_bytes(written)
        written.replace(self._files / file_id)
        try:
            self._write(self._files / f"{file_id}.json", found, tenant)
        except OSError:
            (self._files / file_id).unlink()
            raise
        return found

    def file(self, file_id: str, tenant: str) -> dict[str, Any]:
        """OpenAI's object for a file. Raises `NotFound`."""
        return self._read(self._files, file_id, tenant)

    def files(self, tenant: str) -> list[dict[str, Any]]:
        """Those of all files, the newest first."""
        return self._all(self._files, tenant)

    def content(self, file_id: str, tenant: str) -> Path:
        """Where the file is. Raises `NotFound`."""
        self.file(file_id, tenant)
        return self._files / file_id

    def delete_file(self, file_id: str, tenant: str) -> None:
        """Forgets a file. Raises `NotFound`."""
        self.content(file_id, tenant).unlink(missing_ok=True)
        (self._files / f"{file_id}.json").unlink(missing_ok=True)

    # Batches.

    def add_batch(self, batch: dict[str, Any], tenant: str) -> dict[str, Any]:
        """Keeps a new batch; returns it with its id."""
        batch = {"id": f"batch-{uuid.uuid4().hex}", **batch}
        self.keep_batch(batch, tenant)
        return batch

    def keep_batch(self, batch: dict[str, Any], tenant: str) -> None:
        """Writes a batch that has changed."""
        self._write(self._batches / f"{batch['id']}.json", batch, tenant)

    def batch(self, batch_id: str, tenant: str) -> dict[str, Any]:
        """A batch. Raises `NotFound`."""
        return self._read(self._batches, batch_id, tenant)

    def batches(self, tenant: str) -> list[dict[str, Any]]:
        """All batches, the newest first."""
        return self._all(self._batches, tenant)

    def open_batches(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Yields each batch that has not ended, and its tenant; the oldest first."""
        kept = sorted(self._load_all(self._batches), key=lambda each: _age(each[0]))
        yield from ((batch, tenant) for batch, tenant in kept if batch["status"] in OPEN_STATES)

    @contextlib.contextmanager
    def claimed(self, batch_id: str) -> Iterator[bool]:
        """Keeps a batch from other servers while the block runs; yields False if one of them has it."""
        with self._lock_path(batch_id).open("wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def _lock_path(self, batch_id: str) -> Path:
        return self._batches / f"{batch_id}.lock"

    def results_path(self, batch_id: str) -> Path:
        """Where the answers to a batch are collected."""
        return self._batches / f"{batch_id}.jsonl"

    def split_results(self, batch_id: str, tenant: str) -> tuple[str | None, str | None]:
        """Makes files of the answers to a batch: successes and errors. Returns their ids; None: there are none.

        What was collected stays until `drop_results`: a server that is killed before the batch is kept does this again.
        """
        good, bad = self.new_file_path(), self.new_file_path()
        ids: list[str | None] = []
        try:
            self._split(batch_id, good, bad)
            for what, path in (("output", good), ("error", bad)):
                is_empty = not path.stat().st_size
                name = f"{batch_id}_{what}.jsonl"
                ids.append(None if is_empty else self.add_file(path, name, "batch_output", tenant)["id"])
        except OSError:
            for file_id in filter(None, ids):
                self.delete_file(file_id, tenant)
            raise
        finally:
            good.unlink(missing_ok=True)
            bad.unlink(missing_ok=True)
        return ids[0], ids[1]

    def _split(self, batch_id: str, good: Path, bad: Path) -> None:
        with self.results_path(batch_id).open("rb") as lines, good.open("wb") as successes, bad.open("wb") as errors:
            for line in lines:
                is_good = is_success(json.loads(line)["response"]["status_code"])
                (successes if is_good else errors).write(line)

    def drop_results(self, batch_id: str) -> None:
        """Forgets the answers that were collected, of a batch that has ended."""
        self.results_path(batch_id).unlink(missing_ok=True)
        self._lock_path(batch_id).unlink(missing_ok=True)  # who gets the lock later finds that the batch has ended

    # Objects.

    def _write(self, path: Path, found: dict[str, Any], tenant: str) -> None:
        beside = path.with_suffix(".new")
        try:
            beside.write_text(json.dumps({"tenant": tenant, "object": found}))
            _keep_bytes(beside)
            beside.replace(path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise

    def _load(self, path: Path) -> tuple[dict[str, Any], str] | None:
        try:
            kept = json.loads(path.read_text())
            return kept["object"], kept["tenant"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            logger.warning("%s can't be read, and is left out: %r: delete it, or restore it", path, error)
            return None

    def _load_all(self, folder: Path) -> list[tuple[dict[str, Any], str]]:
        return [kept for path in folder.glob("*.json") if (kept := self._load(path)) is not None]

    def _read(self, folder: Path, object_id: str, tenant: str) -> dict[str, Any]:
        path = folder / f"{object_id}.json"
        if _ID.fullmatch(object_id) and path.exists() and (kept := self._load(path)) is not None:
            found, owner = kept
            if owner == tenant:
                return found
        kind = "file" if folder == self._files else "batch"
        raise NotFound(f"there is no {kind} {object_id[:100]}")

    def _all(self, folder: Path, tenant: str) -> list[dict[str, Any]]:
        return sorted((found for found, owner in self._load_all(folder) if owner == tenant), key=_age, reverse=True)


def _keep_bytes(path: Path) -> None:
    """Has the disk take what was written: a machine that loses its power may keep a move and lose the bytes."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _age(found: dict[str, Any]) -> tuple[int, str]:
    return found["created_at"], found["id"]
