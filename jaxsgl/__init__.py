"""jaxsgl: an LLM serving engine on JAX. The public surface is what `__all__` names; it is imported lazily, so that
`import jaxsgl.scheduler` pulls in no JAX."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["LLM", "EngineConfig", "Grammar", "SamplingParams"]
__version__ = "0.1.0"

_HOME = {
    "LLM": "jaxsgl.offline.llm",
    "EngineConfig": "jaxsgl.config.engine",
    "Grammar": "jaxsgl.requests.grammar",
    "SamplingParams": "jaxsgl.requests.request",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'jaxsgl' has no attribute {name!r}; it has {', '.join(__all__)}")
