"""The files of the page at / and of /docs, which anybody may load: they hold nothing of this server.

What they show they ask of the endpoints, with the key that a person types in. They load nothing from elsewhere, and the
headers forbid it. app.py includes the router.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxsgl.frontend.generation import FrontEnd

FOLDER = Path(__file__).parent / "files"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "cache-control": "no-cache",  # a browser asks each time whether its copy is still right
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class PageFile(NamedTuple):
    """A file: its bytes, its media type, and a tag that changes with it."""

    content: bytes
    media_type: str
    tag: str


def _read(path: Path) -> PageFile:
    content = path.read_bytes()
    return PageFile(content, TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:16]}"')


def _path_of(name: str) -> str:
    """Where a file is served: the two pages at short paths, as servers of other makes have them."""
    return {"index.html": "/", "docs.html": "/docs"}.get(name, f"/page/{name}")


PATHS = frozenset(_path_of(path.name) for path in FOLDER.iterdir() if path.suffix in TYPES)


def router(front_end: FrontEnd) -> APIRouter:
    """Returns the endpoints; the files don't depend on `front_end`."""
    api = APIRouter()
    for path in FOLDER.iterdir():
        if path.suffix in TYPES:
            endpoint = _endpoint(_read(path))
            api.add_api_route(_path_of(path.name), endpoint, methods=["GET", "HEAD"], include_in_schema=False)
    return api


def _endpoint(file: PageFile) -> Callable[[Request], Awaitable[Response]]:
    headers = {**HEADERS, "etag": file.tag}

    async def send(http: Request) -> Response:
        if http.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, 200, headers, file.media_type)

    return send
