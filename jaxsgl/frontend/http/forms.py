"""Forms (multipart/form-data): their fields, and where their file lies.

Knows no endpoint; `openai/batches.py` reads forms on disk, `openai/speech.py` in memory.
"""

from __future__ import annotations

import email.parser
import mmap
import re
from email.message import Message
from typing import NamedTuple

from jaxsgl.errors import InvalidRequest

MAX_HEAD_BYTES = 4096
MAX_FIELD_BYTES = 1 << 16
MAX_PARTS = 32


class Form(NamedTuple):
    """A form: its fields, the name of its file as the client calls it, and where in the body that begins and ends."""

    fields: dict[str, str]
    filename: str
    start: int
    stop: int


def boundary_of(content_type: str) -> bytes:
    """What separates the parts of a form, by its header. Raises `InvalidRequest`."""
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_boundary()
    if header.get_content_type() != "multipart/form-data" or not boundary:
        raise InvalidRequest("the body is no form: send multipart/form-data with a field file")
    return boundary.encode("latin-1", "replace")


def read_form(data: bytes | bytearray | mmap.mmap, boundary: bytes) -> Form:
    """Returns the form in `data`, whose field `file` is its file. Raises `InvalidRequest`."""
    fields: dict[str, str] = {}
    found: tuple[str, int, int] | None = None
    mark = b"--" + boundary
    start = data.find(mark)
    for _ in range(MAX_PARTS):
        start = start + len(mark)
        if start < len(mark) or data[start : start + 2] == b"--":
            break
        blank, end = data.find(b"\r\n\r\n", start), data.find(b"\r\n" + mark, start)
        if blank < 0 or end < 0 or blank > end:
            raise InvalidRequest("the form is cut: its last boundary is missing")
        head = bytes(data[start + 2 : min(blank, start + MAX_HEAD_BYTES)])
        described = email.parser.BytesHeaderParser().parsebytes(head)
        first, name = min(blank + 4, end), str(described.get_param("name", "", "content-disposition"))
        if name == "file" and found is not None:
            raise InvalidRequest("the form has several fields file, but may have one: send each file in its own form")
        if name == "file":
            filename = re.sub(r"[^ -~]|[/\\]", "_", str(described.get_filename() or "file"))[:200]
            found = filename, first, end
        else:
            if end - first > MAX_FIELD_BYTES:
                raise InvalidRequest(
                    f"the field {name[:100]} of the form has {end - first} bytes, but may have {MAX_FIELD_BYTES}: "
                    "send less"
                )
            fields[name] = bytes(data[first:end]).decode(errors="replace")
        start = end + 2
    else:
        raise InvalidRequest(f"the form has {MAX_PARTS} fields or more: send fewer")
    if found is None:
        raise InvalidRequest("the form has no field file: send the file under this name")
    return Form(fields, *found)
