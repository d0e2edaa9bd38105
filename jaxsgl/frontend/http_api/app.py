"""The HTTP application: its routers and what holds for all of them."""

from __future__ import annotations

from fastapi import FastAPI

import jaxsgl
from jaxsgl.frontend.front_end import FrontEnd


def build_app(front_end: FrontEnd) -> FastAPI:
    """All endpoints, for `front_end`."""
    return FastAPI(title="jaxsgl", version=jaxsgl.__version__)
