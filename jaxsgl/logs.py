"""Logging of both processes: one line per event on standard error, with time and process name."""

from __future__ import annotations

import logging
import os
import sys

# Libraries whose debug lines drown ours.
_NOISY = ("asyncio", "jax", "jaxlib", "absl", "httpx", "httpcore", "huggingface_hub", "filelock", "urllib3", "grpc")


def configure(level: str, process_name: str) -> None:
    """Sends the log lines of this process at `level` ("debug" to "error") and above to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s.%(msecs)03d %(levelname)-7s {process_name}: %(message)s", "%Y-%m-%d %H:%M:%S")
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    # transformers prints by a handler of its own, and warns about models that we refuse in better words.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
