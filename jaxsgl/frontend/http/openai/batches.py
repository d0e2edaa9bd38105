"""/v1/files and /v1/batches: batches of requests whose files lie in the folder of --batch-dir.

A batch runs in this process, through the same endpoints as its clients' other requests, and is taken up again when the
server starts anew; frontend/batches.py runs it, and keeps files and states. Files come as forms, of which parts are
read as they arrive (`read_upload`). app.py includes the router.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import time
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from jaxsgl.errors import InvalidRequest, NotFound
from jaxsgl.frontend.access import Caller, current_tenant, enter
from jaxsgl.frontend.batches import OPEN_STATES, BatchStore, Results, check_file, requests_of, run
from jaxsgl.frontend.generation import FrontEnd
from jaxsgl.frontend.http.bodies import Body, StrictJson
from jaxsgl.frontend.http.forms import Form, boundary_of, read_form
from jaxsgl.frontend.http.in_process import InProcess

MAX_FILE_BYTES = 200 << 20  # as OpenAI's
MAX_REQUESTS = 50_000
AGAIN_S = 60.0  # after which the end of a batch that could not be kept is tried again
CONCURRENCY = 128  # requests of one batch at once; batches run one after the other
RETRY_S = 3.0  # until a batch that another server runs is looked at again
MAX_FILES_SHOWN, MAX_BATCHES_SHOWN, DEFAULT_BATCHES_SHOWN = 10_000, 100, 20  # in one list, as OpenAI's
FILES_PATH = "/v1/files"

logger = logging.getLogger(__name__)


class BatchBody(Body):
    """Body of /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: Annotated[Literal["24h"], Field(description="has no effect: a batch runs until it is done")]
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None


class Batches:
    """Runs the batches of a store, one after the other, in the order of their arrival.

    Args:
      store: keeps them.
      front_end: what their requests are answered by.
    """

    def __init__(self, store: BatchStore, front_end: FrontEnd) -> None:
        self._store = store
        self._ask = InProcess(front_end).ask
        self._waiting: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._counts: dict[str, Results] = {}
        for batch, tenant in store.open_batches():
            self._waiting.put_nowait((batch["id"], tenant))
        self._worker = asyncio.ensure_future(self._work())

    def add(self, batch_id: str, tenant: str) -> None:
        """Has a batch run when those before it have ended."""
        self._waiting.put_nowait((batch_id, tenant))

    def cancel(self, batch_id: str) -> None:
        """Stops a batch, if it runs; its answers so far are kept."""
        if batch_id in self._running:
            self._running[batch_id].cancel()

    def shown(self, batch: dict[str, Any]) -> dict[str, Any]:
        """`batch` as its client sees it: with what is answered so far, if it runs."""
        results = self._counts.get(batch["id"])
        return batch if results is None else {**batch, "request_counts": _counts(batch, results)}

    async def _work(self) -> None:
        while True:
            batch_id, tenant = await self._waiting.get()
            try:
                await self._run_one(batch_id, tenant)
            except OSError:
                logger.exception("the end of batch %s can't be kept: tried again in %g s", batch_id, AGAIN_S)
                asyncio.get_running_loop().call_later(AGAIN_S, self.add, batch_id, tenant)
            except Exception:
                logger.exception("batch %s is lost", batch_id)

    async def _run_one(self, batch_id: str, tenant: str) -> None:
        """Runs a batch to its end, in a task of its own that can be cancelled. Raises what keeps it from being kept."""
        task = asyncio.create_task(self._run_if_free(batch_id, tenant))
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
            self._running.pop(batch_id, None)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, OSError):  # the disk is full, say: nothing that was answered is lost
            raise error
        if error is not None:
            logger.error("batch %s failed", batch_id, exc_info=error)
            self._end(self._store.batch(batch_id, tenant), tenant, "failed", errors=_errors(error))

    async def _run_if_free(self, batch_id: str, tenant: str) -> None:
        """Runs a batch, or has it wait: another server on the folder may run it, and may end before it does."""
        with self._store.claimed(batch_id) as free:
            if not free:
                asyncio.get_running_loop().call_later(RETRY_S, self.add, batch_id, tenant)
            elif self._store.batch(batch_id, tenant)["status"] in OPEN_STATES:
                await self._run(batch_id, tenant)

    async def _run(self, batch_id: str, tenant: str) -> None:
        """Answers all that is not answered, and makes files of the answers; also after a `cancel` or a failure."""
        task = asyncio.current_task()
        assert task is not None
        self._running[batch_id] = task  # not before: a task that is cancelled before it begins would end nothing
        batch, problems = self._store.batch(batch_id, tenant), None
        enter(Caller(tenant=tenant))
        results = self._counts[batch_id] = Results(self._store.results_path(batch_id))
        try:
            if batch["status"] == "in_progress":
                content = self._store.content(batch["input_file_id"], tenant)
                await run(requests_of(content), results, self._ask, CONCURRENCY)
        except asyncio.CancelledError:
            if self._store.batch(batch_id, tenant)["status"] != "cancelling":
                raise  # the server ends: the next one goes on
        except Exception as error:
            logger.exception("batch %s failed", batch_id)
            problems = _errors(error)
        finally:
            del self._counts[batch_id]
            results.close()
        batch = self._store.batch(batch_id, tenant)  # with what has changed since
        status = "completed" if problems is None else "failed"
        if batch["status"] == "cancelling":
            status = "cancelled"
        output, errors = self._store.split_results(batch_id, tenant)
        files = {"output_file_id": output, "error_file_id": errors, "request_counts": _counts(batch, results)}
        try:
            self._end(batch, tenant, status, errors=problems, **files)
        except OSError:
            for file_id in filter(None, (output, errors)):  # made again with the next try
                self._store.delete_file(file_id, tenant)
            raise
        self._store.drop_results(batch_id)

    def _end(self, batch: dict[str, Any], tenant: str, status: str, **changes: Any) -> None:
        self._store.keep_batch({**batch, **changes, "status": status, f"{status}_at": int(time.time())}, tenant)


def _errors(error: BaseException) -> dict[str, Any]:
    """What OpenAI's object of a batch says of the cause of its end."""
    problem = {"code": "server_error", "message": str(error), "param": None, "line": None}
    return {"object": "list", "data": [problem]}


def _counts(batch: dict[str, Any], results: Results) -> dict[str, int]:
    failed = results.num_failed
    return {"total": batch["request_counts"]["total"], "completed": len(results.done) - failed, "failed": failed}


def router(front_end: FrontEnd) -> APIRouter:
    """Returns the endpoints, for `front_end`; without --batch-dir they name that flag."""
    api = APIRouter(route_class=StrictJson)
    if front_end.config.batch_dir is None:
        for path in (FILES_PATH, "/v1/batches"):
            for each in (path, f"{path}/{{rest:path}}"):
                api.add_api_route(each, _have_no_folder, methods=["GET", "POST", "DELETE"], include_in_schema=False)
        return api
    store = BatchStore(Path(front_end.config.batch_dir).expanduser())
    batches = Batches(store, front_end)
    _add_files(api, store)
    _add_batches(api, store, batches)
    return api


async def _have_no_folder() -> None:
    raise NotFound("this server keeps no files: start it with --batch-dir FOLDER, or run the file by jaxsgl run-batch")


def _add_files(api: APIRouter, store: BatchStore) -> None:
    @api.post(FILES_PATH)
    async def upload(http: Request) -> dict[str, Any]:
        """Keeps a file: a form with the fields `file` and `purpose`, which is batch."""
        boundary, body, content = (
            boundary_of(http.headers.get("content-type", "")),
            store.new_file_path(),
            store.new_file_path(),
        )
        try:
            with body.open("wb") as out:
                async for part in http.stream():
                    out.write(part)
            form = await asyncio.get_running_loop().run_in_executor(None, read_upload, body, boundary, content)
            if form.fields.get("purpose") != "batch":
                raise InvalidRequest(f"purpose is {form.fields.get('purpose')!r}, but must be batch")
            return store.add_file(content, form.filename, "batch", current_tenant())
        finally:
            body.unlink(missing_ok=True)
            content.unlink(missing_ok=True)

    @api.get(FILES_PATH)
    async def list_files(
        purpose: str | None = None,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_FILES_SHOWN)] = MAX_FILES_SHOWN,
        order: Literal["asc", "desc"] = "desc",
    ) -> dict[str, Any]:
        """The files, of one purpose if it is given; the newest first, unless the order is asc."""
        found = [file for file in store.files(current_tenant()) if purpose in (None, file["purpose"])]
        return _page(found if order == "desc" else found[::-1], after, limit)

    @api.get("/v1/files/{file_id}")
    async def get_file(file_id: str) -> dict[str, Any]:
        """What is known of a file."""
        return store.file(file_id, current_tenant())

    @api.get("/v1/files/{file_id}/content", response_class=Response)
    async def file_content(file_id: str) -> Response:
        """The file."""
        return FileResponse(store.content(file_id, current_tenant()), media_type="application/octet-stream")

    @api.delete("/v1/files/{file_id}")
    async def delete_file(file_id: str) -> dict[str, Any]:
        """Deletes a file."""
        tenant = current_tenant()
        users = [batch["id"] for batch in store.batches(tenant) if batch["status"] in OPEN_STATES]
        if any(store.batch(batch_id, tenant)["input_file_id"] == file_id for batch_id in users):
            raise InvalidRequest(f"{file_id} is the input of a batch that runs: cancel that first")
        store.delete_file(file_id, tenant)
        return {"id": file_id, "object": "file", "deleted": True}


def _page(found: list[dict[str, Any]], after: str | None, limit: int) -> dict[str, Any]:
    """Returns `limit` objects of `found` at most, from behind the one of the id `after`. Raises `InvalidRequest`."""
    ids = [each["id"] for each in found]
    if after is not None and after not in ids:
        raise InvalidRequest(f"after is {after:.100}, but there is no such object to go on behind: leave it out")
    start = 0 if after is None else ids.index(after) + 1
    shown = found[start : start + limit]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return {"object": "list", "data": shown, **ends, "has_more": start + limit < len(found)}


def _add_batches(api: APIRouter, store: BatchStore, batches: Batches) -> None:
    @api.post("/v1/batches")
    async def create_batch(body: BatchBody) -> dict[str, Any]:
        """Runs the requests of a file that was uploaded."""
        tenant, now = current_tenant(), int(time.time())
        content = store.content(body.input_file_id, tenant)
        checked = asyncio.get_running_loop().run_in_executor(None, check_file, content, body.endpoint, MAX_REQUESTS)
        file = await checked
        batch = store.add_batch({
            "object": "batch",
            "endpoint": body.endpoint,
            "errors": None,
            "input_file_id": body.input_file_id,
            "completion_window": body.completion_window,
            "status": "in_progress",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "in_progress_at": now,
            "expires_at": None,
            "request_counts": {"total": file.num_requests, "completed": 0, "failed": 0},
            "metadata": body.metadata,
        }, tenant)  # fmt: skip
        batches.add(batch["id"], tenant)
        return batch

    @api.get("/v1/batches")
    async def list_batches(
        after: str | None = None, limit: Annotated[int, Query(ge=1, le=MAX_BATCHES_SHOWN)] = DEFAULT_BATCHES_SHOWN
    ) -> dict[str, Any]:
        """The batches, the newest first."""
        return _page([batches.shown(batch) for batch in store.batches(current_tenant())], after, limit)

    @api.get("/v1/batches/{batch_id}")
    async def get_batch(batch_id: str) -> dict[str, Any]:
        """How far a batch is."""
        return batches.shown(store.batch(batch_id, current_tenant()))

    @api.post("/v1/batches/{batch_id}/cancel")
    async def cancel_batch(batch_id: str) -> dict[str, Any]:
        """Ends a batch; its answers so far become its output."""
        tenant = current_tenant()
        batch = store.batch(batch_id, tenant)
        if batch["status"] != "in_progress":
            raise InvalidRequest(f"the batch is {batch['status']}: it can't be cancelled")
        batch = {**batch, "status": "cancelling", "cancelling_at": int(time.time())}
        store.keep_batch(batch, tenant)
        batches.cancel(batch_id)
        return batches.shown(batch)


CHUNK_BYTES = 1 << 20


def read_upload(body: Path, boundary: bytes, content: Path) -> Form:
    """Returns the form in `body`, and writes its field `file` to `content`. Raises `InvalidRequest`."""
    if not body.stat().st_size:
        raise InvalidRequest("the form is empty: send the fields purpose and file")
    with body.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        form = read_form(data, boundary)
        with content.open("wb") as out:
            for at in range(form.start, form.stop, CHUNK_BYTES):
                out.write(data[at : min(at + CHUNK_BYTES, form.stop)])
            out.flush()
            os.fsync(out.fileno())  # here, on a thread; `add_file` then has little to wait for
    return form
