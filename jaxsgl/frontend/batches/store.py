"""`BatchStore`: files and batches of a server's clients, in a folder that a flag names; all of it outlives the server.

    files/ID            what was uploaded, or what a batch has answered
    files/ID.json       what is known of it
    batches/ID.json     a batch
    batches/ID.jsonl    its answers so far, see batch.py

Each object is written to a file beside it and moved there, so that none is ever half a one. A tenant sees its own
alone. Knows no endpoint and runs nothing; http/openai/batches.py does both.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxsgl.errors import NotFound, StartupError
from jaxsgl.frontend.batches.run import is_success

_ID = re.compile(r"(file|batch)-[0-9a-f]{32}")
OPEN_STATES = ("in_progress", "finalizing", "cancelling")


class BatchStore:
    """The folder. Raises `StartupError` if it can't be used."""

    def __init__(self, folder: Path) -> None:
        self._files, self._batches = folder / "files", folder / "batches"
        try:
            for each in (self._files, self._batches):
                each.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise StartupError(f"--batch-dir {folder} can't be used: {error.strerror}") from None

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
        written.replace(self._files / file_id)
        self._write(self._files / f"{file_id}.json", found, tenant)
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
        kept = sorted((self._load(path) for path in self._batches.glob("*.json")), key=lambda each: _age(each[0]))
        yield from ((batch, tenant) for batch, tenant in kept if batch["status"] in OPEN_STATES)

    def results_path(self, batch_id: str) -> Path:
        """Where the answers to a batch are collected."""
        return self._batches / f"{batch_id}.jsonl"

    def split_results(self, batch_id: str, tenant: str) -> tuple[str | None, str | None]:
        """Makes files of the answers to a batch: successes and errors. Returns their ids; None: there are none."""
        paths = {True: self.new_file_path(), False: self.new_file_path()}
        with (
            self.results_path(batch_id).open("rb") as lines,
            paths[True].open("wb") as good,
            paths[False].open("wb") as bad,
        ):
            for line in lines:
                (good if is_success(json.loads(line)["response"]["status_code"]) else bad).write(line)
        ids: list[str | None] = []
        for what, path in (("output", paths[True]), ("error", paths[False])):
            if path.stat().st_size:
                ids.append(self.add_file(path, f"{batch_id}_{what}.jsonl", "batch_output", tenant)["id"])
            else:
                path.unlink()
                ids.append(None)
        self.results_path(batch_id).unlink()
        return ids[0], ids[1]

    # Objects.

    def _write(self, path: Path, found: dict[str, Any], tenant: str) -> None:
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps({"tenant": tenant, "object": found}))
        beside.replace(path)

    def _load(self, path: Path) -> tuple[dict[str, Any], str]:
        kept = json.loads(path.read_text())
        return kept["object"], kept["tenant"]

    def _read(self, folder: Path, object_id: str, tenant: str) -> dict[str, Any]:
        path = folder / f"{object_id}.json"
        if _ID.fullmatch(object_id) and path.exists():
            found, owner = self._load(path)
            if owner == tenant:
                return found
        raise NotFound(f"there is no {folder.name.removesuffix('es').removesuffix('s')} {object_id[:100]}")

    def _all(self, folder: Path, tenant: str) -> list[dict[str, Any]]:
        kept = [self._load(path) for path in folder.glob("*.json")]
        return sorted((found for found, owner in kept if owner == tenant), key=_age, reverse=True)


def _age(found: dict[str, Any]) -> tuple[int, str]:
    return found["created_at"], found["id"]
