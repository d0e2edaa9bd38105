"""GET /: a short page for people who open the server's address in a browser, and for load balancers that probe it.

Shows the model, the state and where to read more; without the API key it tells what /health tells. GET /docs lists the
endpoints, in place of FastAPI's page, which runs scripts from elsewhere. app.py includes the router.
"""

from __future__ import annotations

import html
from typing import Any

from fastapi import APIRouter, Request, Response

import jaxsgl
from jaxsgl.frontend.generation import FrontEnd

# The page loads nothing and runs nothing.
HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}
_HEAD = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>jaxsgl</title>
<style>body { font-family: sans-serif; margin: 3em; max-width: 60em } dt { font-weight: bold }
td { padding: 0.2em 1em 0.2em 0; vertical-align: top }</style></head>
<body>
<h1>jaxsgl</h1>
"""
_PAGE = """
<dl>
{rows}
</dl>
<p><a href="docs">API documentation</a> | <a href="metrics">metrics</a> | <a href="health">health</a></p>
</body>
</html>
"""


def router(front_end: FrontEnd) -> APIRouter:
    """Returns the endpoint, for `front_end`."""
    api = APIRouter()

    @api.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page() -> Response:
        """The page; with status 503 while /health is bad."""
        status = 200 if front_end.engine.refusal is None else 503
        return Response(_page(front_end), status, HEADERS, "text/html; charset=utf-8")

    @api.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        """All endpoints, with what they do."""
        return Response(_docs(request.app.openapi()), 200, HEADERS, "text/html; charset=utf-8")

    return api


def _docs(schema: dict[str, Any]) -> str:
    rows = [
        (method.upper(), path, operation.get("description") or operation.get("summary") or "")
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
    ]
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    table = "\n".join(f"<tr>{row}</tr>" for row in cells)
    about = 'Bodies and answers are described in <a href="openapi.json">openapi.json</a>, for any viewer of OpenAPI.'
    return f"{_HEAD}<p>{about}</p>\n<table>\n{table}\n</table>\n</body>\n</html>\n"


def _page(front_end: FrontEnd) -> str:
    """Returns the page. Browsers send no key, so with one set it names neither the model nor the version."""
    engine, config = front_end.engine, front_end.config
    rows = {"State": engine.state}
    if engine.state != "loading" and engine.problems:
        rows["Reason"] = "; ".join(engine.problems)
    if not config.needs_key:
        rows |= {"Model": config.model_name, "Version": jaxsgl.__version__}
    else:
        rows["Access"] = "everything but health and metrics needs an API key"
    return _HEAD + _PAGE.format(
        rows="\n".join(f"<dt>{name}</dt><dd>{html.escape(text)}</dd>" for name, text in rows.items())
    )
