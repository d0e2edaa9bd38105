"""Functions that are imported when they are first called: kernels of one platform and the compilers that they use."""

import importlib
from typing import Any


def imported(module: str, name: str) -> Any:
    """The function `name` of a module of this package, which is imported at the first call."""

    def call(*arguments: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(f"pallas_kernels.{module}"), name)(*arguments, **options)

    return call
