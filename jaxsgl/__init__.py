"""jaxsgl: an LLM serving engine on JAX. The public surface is what `__all__` names; it is imported lazily, so that
`import jaxsgl.scheduler` pulls in no JAX."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["LLM", "EngineConfig", "Grammar", "SamplingParams"]
__version__ = "0.1.0"

_HOME = {
    "LLM": "jaxsgl.llm",
    "EngineConfig": "jaxsgl.config",
    "Grammar": "jaxsgl.grammar",
    "SamplingParams": "jaxsgl.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'jaxsgl' has no attribute {name!r}; it has {', '.join(__all__)}")
