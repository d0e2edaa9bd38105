"""Logging of both processes: one line per event on standard error, as text for people or as JSON for machines.

A line holds the time, the process, and the id of the request being served, which `name_request` sets. Both processes
call `configure`; the front end names requests.
"""

from __future__ import annotations

import contextvars
import logging
import os
import sys
import time
from typing import Any, TextIO

import msgspec

# Libraries whose debug lines would drown ours.
_NOISY = (
    *("asyncio", "jax", "jaxlib", "absl", "httpx", "httpcore", "huggingface_hub", "filelock", "urllib3", "grpc"),
    "uvicorn",
)
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "request_id", "taskName"}

_request_id: contextvars.ContextVar[str | None] = contextvars.ContextVar("request_id", default=None)


class LogStyle(msgspec.Struct, frozen=True):
    """The least severe level that is logged ("debug" to "error"), and the format ("text" or "json")."""

    level: str
    format: str


def configure(style: LogStyle, process_name: str) -> None:
    """Sends the log lines of this process to standard error."""
    root = logging.getLogger()
    root.handlers = [new_handler(style.format, process_name, sys.stderr)]
    root.setLevel(style.level.upper())
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    logging.captureWarnings(True)
    if style.format == "json":
        os.environ.setdefault("TQDM_DISABLE", "1")  # a progress bar is no JSON object
    # transformers prints through a handler of its own, and warns about models that we refuse with a better message.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def new_handler(log_format: str, process_name: str, stream: TextIO) -> logging.Handler:
    """Returns a handler that writes lines in `log_format` to `stream`."""
    handler = logging.StreamHandler(stream)
    handler.addFilter(_add_request_id)
    handler.setFormatter(_Json(process_name) if log_format == "json" else _Text(process_name))
    return handler


def name_request(request_id: str) -> None:
    """Marks all that this task logs from now on with the request's id."""
    _request_id.set(request_id)


def name_unnamed_request(request_id: str) -> None:
    """Does the same unless the protocol has named the request already."""
    if _request_id.get() is None:
        _request_id.set(request_id)


def _add_request_id(record: logging.LogRecord) -> bool:
    record.request_id = getattr(record, "request_id", None) or _request_id.get()
    return True


class _Text(logging.Formatter):
    def __init__(self, process_name: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03d %(levelname)-7s {process_name}: %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
        )

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Returns the line without a traceback that may follow. The id is a client's: line breaks in it are escaped."""
        line = super().formatMessage(record)
        request_id = getattr(record, "request_id", None)
        return line if request_id is None else f"{line} [{ascii(request_id)[1:-1]}]"


class _Json(logging.Formatter):
    """Writes one object per line; a call's `extra` becomes fields of it."""

    converter = staticmethod(time.gmtime)

    def __init__(self, process_name: str) -> None:
        super().__init__(datefmt="%Y-%m-%dT%H:%M:%S")
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line."""
        fields: dict[str, Any] = {
            "time": f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process_name,
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = getattr(record, "request_id", None)
        if request_id is not None:
            fields["request_id"] = request_id
        fields |= {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields, enc_hook=str).decode()
