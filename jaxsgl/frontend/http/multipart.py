"""Reads a form that carries a file (multipart/form-data, RFC 7578) by way of a file: it may be larger than memory.

openai/batches.py reads uploads with it.
"""

from __future__ import annotations

import email.parser
import mmap
import re
from email.message import Message
from pathlib import Path
from typing import NamedTuple

from jaxsgl.errors import InvalidRequest

MAX_FIELD_BYTES = 4096
MAX_PARTS = 32
CHUNK_BYTES = 1 << 20


class Form(NamedTuple):
    """A form: its fields, and the name of its file as the client calls it."""

    fields: dict[str, str]
    filename: str


def boundary_of(content_type: str) -> bytes:
    """What separates the parts of a form, by its header. Raises `InvalidRequest`."""
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_boundary()
    if header.get_content_type() != "multipart/form-data" or not boundary:
        raise InvalidRequest("the body is no form: send multipart/form-data with the fields purpose and file")
    return boundary.encode("latin-1", "replace")


def read_form(body: Path, boundary: bytes, content: Path) -> Form:
    """Returns the form in `body`, and writes its field `file` to `content`. Raises `InvalidRequest`."""
    fields: dict[str, str] = {}
    filename: str | None = None
    if not body.stat().st_size:
        raise InvalidRequest("the form is empty: send the fields purpose and file")
    with body.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        mark = b"--" + boundary
        start = data.find(mark)
        for _ in range(MAX_PARTS):
            start = start + len(mark)
            if start < len(mark) or data[start : start + 2] == b"--":
                break
            blank, end = data.find(b"\r\n\r\n", start), data.find(b"\r\n" + mark, start)
            if blank < 0 or end < 0 or blank > end:
                raise InvalidRequest("the form is cut: its last boundary is missing")
            head = email.parser.BytesHeaderParser().parsebytes(data[start + 2 : min(blank, start + MAX_FIELD_BYTES)])
            first, name = min(blank + 4, end), str(head.get_param("name", "", "content-disposition"))
            if name == "file":
                filename = re.sub(r"[^ -~]|[/\\]", "_", str(head.get_filename() or "file"))[:200]
                with content.open("wb") as out:
                    for at in range(first, end, CHUNK_BYTES):
                        out.write(data[at : min(at + CHUNK_BYTES, end)])
            else:
                fields[name] = data[first : min(end, first + MAX_FIELD_BYTES)].decode(errors="replace")
            start = end + 2
    if filename is None:
        raise InvalidRequest("the form has no field file: send the file under this name")
    return Form(fields, filename)
