"""Logging of both processes: one line per event on standard error, as text for people or as JSON for machines.

A line holds the time, the process, and the id of the request being served, which `name_request` sets. Both processes
call `configure`; the front end names requests. Owns the form of lines, and what must not be in them: secrets, metadata
of calls, and the same warning again and again. stderr.py writes them, and never makes the caller wait. `StartParts`
counts the parts of a start, whose times are logged at level debug.
"""

from __future__ import annotations

import contextvars
import dataclasses
import logging
import os
import re
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from jaxsgl.stderr import Stderr

FLUSH_S = 2.0  # for standard error to take the last lines at the end
REPEATS = 10  # lines of one place of the code in `PERIOD_S`: warnings, errors, and those with `OF_CLIENTS`
PERIOD_S = 10.0

# Libraries whose debug lines would drown ours.
_NOISY = (
    *("asyncio", "jax", "jaxlib", "absl", "httpx", "httpcore", "huggingface_hub", "filelock", "urllib3", "grpc"),
    "uvicorn",
)
OF_CLIENTS = {"of_clients": True}  # `extra` of lines below warnings that a client causes as often as it likes
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord(OF_CLIENTS))) | {"message", "asctime", "request_id", "taskName"}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but tabs, and line breaks of stacks
_BEARER = re.compile(r"\b(bearer)\s+[^\s'\"\\,;)\]}]+", re.IGNORECASE)

_request_id: contextvars.ContextVar[str | None] = contextvars.ContextVar("request_id", default=None)


class LogStyle(msgspec.Struct, frozen=True):
    """The least severe level that is logged ("debug" to "error"), and the format ("text" or "json")."""

    level: str
    format: str


def configure(style: LogStyle, process_name: str, secrets: Iterable[str] = ()) -> Output:
    """Sends the log lines of this process to standard error, `secrets` blacked out."""
    output = Output(style.format, process_name, secrets)
    root = logging.getLogger()
    root.handlers = [output.handler]
    root.setLevel(style.level.upper())
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    logging.captureWarnings(True)
    if style.format == "json":
        os.environ.setdefault("TQDM_DISABLE", "1")  # a progress bar is no JSON object
    # transformers prints through a handler of its own, and warns about models that we refuse with a better message.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # gRPC's core prints a line for each client that sends it junk. Its errors that matter come as exceptions, too.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    return output


def secrets_of(config_type: type, args: object) -> list[str]:
    """Returns the values of the secret flags that are given in `args`, parsed flags or a configuration."""
    specs = dataclasses.fields(config_type)
    return [value for spec in specs if spec.metadata.get("secret") and (value := getattr(args, spec.name)) is not None]


def child_stderr(process_name: str) -> int | None:
    """Returns a file descriptor for a child process to use as standard error; None if it may inherit ours.

    Lines that the child formats itself are passed on, others are given the form of a log line. Close it once the child
    is started.
    """
    output = _configured()
    return None if output is None else output.stderr.pipe(process_name)


def are_read_on_terminal() -> bool:
    """Whether this process's log lines, and those of its children, end up on a terminal."""
    output = _configured()
    return os.isatty(2 if output is None else output.stderr.real_fd)


def line_counts() -> Counter[str]:
    """Returns the counts of this process's log lines, which go on counting: those `dropped`."""
    output = _configured()
    return Counter(dropped=0) if output is None else output.stderr.writer.counts


def name_request(request_id: str) -> None:
    """Marks all that this task logs from now on with the request's id."""
    _request_id.set(request_id)


def name_unnamed_request(request_id: str) -> None:
    """Does the same unless the protocol has named the request already."""
    if _request_id.get() is None:
        _request_id.set(request_id)


class Output:
    """Where this process's log lines go: its standard error.

    Attributes:
      handler: the root logger's.
      stderr: writes the lines.
    """

    def __init__(self, log_format: str, process_name: str, secrets: Iterable[str]) -> None:
        self._log_format = log_format
        self._process_name = process_name
        self._clean = Cleaner(secrets)
        self._formatter = new_formatter(log_format, process_name, self._clean)
        self.stderr = Stderr(self._told_of_dropped, self._take)
        self.handler = Handler(self._formatter, self.stderr.writer.put, self)

    def replace_stderr(self) -> None:
        """Lets native code and other modules write to standard error without waiting, and in the form of log lines."""
        self.stderr.replace(self._process_name)

    def line(self, text: str) -> None:
        """Writes `text` as it is."""
        self.stderr.writer.put(_encoded(self._clean(text)))

    def close(self) -> None:
        """Writes what standard error takes within `FLUSH_S` seconds. Later lines are written, too."""
        self.stderr.close(FLUSH_S)

    def _take(self, process_name: str, line: bytes) -> None:
        """Passes on a line that some process wrote to its standard error."""
        text = self._clean(line.decode(errors="backslashreplace"))
        if self._log_format == "json" and not _is_object(text):
            record = _warning("stderr", text.strip("\r\n"))
            text = new_formatter("json", process_name, self._clean).format(record) + "\n"
        self.stderr.writer.put(text.encode())

    def _told_of_dropped(self, count: int) -> bytes:
        words = f"{count} log lines were dropped, because nothing read standard error"
        return _encoded(self._formatter.format(_warning(__name__, words)))


class Handler(logging.Handler):
    """Formats records and hands the lines to `put`, each with its line break. `output` owns the place they go to."""

    def __init__(
        self, formatter: logging.Formatter, put: Callable[[bytes], None], output: Output | None = None
    ) -> None:
        super().__init__()
        self.output = output
        self._put = put
        self.setFormatter(formatter)
        self.addFilter(_add_request_id)
        self.addFilter(_hide_bytes)
        self.addFilter(RepeatLimit())

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one line, whatever the record holds."""
        try:
            line = self.format(record)
        except Exception as error:  # a call with wrong arguments, in whatever library
            words = f"a log line of {record.pathname}:{record.lineno} can't be formatted: {error!r}"
            line = self.format(_warning(record.name, words))
        self._put(_encoded(line))

    def flush(self) -> None:
        """Waits a moment for standard error. Python calls it when the process ends."""
        if self.output is not None:
            self.output.stderr.writer.flush(FLUSH_S)


class Cleaner:
    """Blacks out `secrets`, and credentials of clients, in any text."""

    def __init__(self, secrets: Iterable[str]) -> None:
        self._secrets = tuple(secret for secret in secrets if secret)

    def __call__(self, text: str) -> str:
        """Returns `text` without them, and without what UTF-8 can't hold."""
        for secret in self._secrets:
            if secret in text:
                text = text.replace(secret, "***")
        if "earer" in text or "EARER" in text:
            text = _BEARER.sub(r"\1 ***", text)
        return text if text.isascii() else text.encode(errors="backslashreplace").decode()


class RepeatLimit:
    """A filter that lets a place of the code log `REPEATS` warnings, errors or lines of clients in `PERIOD_S` seconds.

    Clients that send junk, and a system without free files, would otherwise fill the disk. The last line before such a
    silence says how long it lasts (`silent_s`), the first one behind it how many lines it swallowed (`left_out`).
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[tuple[str, str, int], tuple[float, int]] = {}  # when the period began, lines since

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether `record` is written."""
        if record.levelno < logging.WARNING and not hasattr(record, "of_clients"):
            return True
        place = (record.name, record.pathname, record.lineno)
        now_s = self._clock()
        since_s, count = self._seen.get(place, (now_s, 0))
        if now_s - since_s < PERIOD_S:
            self._seen[place] = (since_s, count + 1)
            if count + 1 == REPEATS:
                record.silent_s = round(PERIOD_S - (now_s - since_s), 1)
            return count < REPEATS
        self._seen[place] = (now_s, 1)
        if count > REPEATS:
            record.left_out = count - REPEATS
        return True


def new_formatter(log_format: str, process_name: str, clean: Callable[[str], str]) -> logging.Formatter:
    """Returns what makes lines in `log_format`; `clean` is applied to all text."""
    return _Json(process_name, clean) if log_format == "json" else _Text(process_name, clean)


def _configured() -> Output | None:
    return next((handler.output for handler in logging.getLogger().handlers if isinstance(handler, Handler)), None)


def _warning(name: str, text: str) -> logging.LogRecord:
    return logging.LogRecord(name, logging.WARNING, "", 0, text, None, None)


def _encoded(line: str) -> bytes:
    return line.encode() + b"\n"


def _is_object(text: str) -> bool:
    """Whether a line is a JSON object already; only a child process that uses this module writes those."""
    if not text.startswith("{"):
        return False
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except msgspec.DecodeError:
        return False


def _add_request_id(record: logging.LogRecord) -> bool:
    record.request_id = getattr(record, "request_id", None) or _request_id.get()
    return True


def _hide_bytes(record: logging.LogRecord) -> bool:
    """Replaces bytes that a library would print: gRPC prints metadata that is not UTF-8, the authorization included."""
    if isinstance(record.args, tuple):
        record.args = tuple(f"<{len(arg)} bytes>" if isinstance(arg, bytes) else arg for arg in record.args)
    return True


class _Text(logging.Formatter):
    def __init__(self, process_name: str, clean: Callable[[str], str]) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03d %(levelname)-7s {process_name}: %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
        )
        self._clean = clean

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line, and a traceback on lines of its own; a terminal obeys nothing that a client has sent."""
        return self._clean(_CONTROL.sub(lambda found: ascii(found[0])[1:-1], super().format(record)))

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Returns the line without a traceback that may follow. The id is a client's: line breaks in it are escaped."""
        line = super().formatMessage(record)
        if hasattr(record, "left_out"):
            line += f" (left out {record.left_out} lines like this)"
        if hasattr(record, "silent_s"):
            line += f" (lines like this are left out for {record.silent_s:g} s)"
        request_id = getattr(record, "request_id", None)
        return line if request_id is None else f"{line} [{ascii(request_id)[1:-1]}]"


class _Json(logging.Formatter):
    """Writes one object per line; a call's `extra` becomes fields of it."""

    converter = staticmethod(time.gmtime)

    def __init__(self, process_name: str, clean: Callable[[str], str]) -> None:
        super().__init__(datefmt="%Y-%m-%dT%H:%M:%S")
        self._process_name = process_name
        self._clean = clean

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
        fields = {name: self._clean(value) if isinstance(value, str) else value for name, value in fields.items()}
        return msgspec.json.encode(fields, enc_hook=str).decode()


class StartParts:
    """Counts the parts of a start that follow one another, from when it is made: on the clock, and of the processor.

    The clock alone misleads where other programs run: a part that waited for a processor looks slow.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[str, float, float]] = []
        self._since = _now()

    def end(self, name: str) -> None:
        """Notes that a part has ended here, and the next one begins."""
        now = _now()
        self._parts.append((name, now[0] - self._since[0], now[1] - self._since[1]))
        self._since = now

    def __str__(self) -> str:
        """All parts, as `weights 0.1 s (0.1 of the processor)`; children that have ended, such as compilers, count."""
        return ", ".join(
            f"{name} {clock_s:.1f} s ({cpu_s:.1f} of the processor)" for name, clock_s, cpu_s in self._parts
        )


def _now() -> tuple[float, float]:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic(), own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
