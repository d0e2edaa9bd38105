"""What the front end reads besides the tokenizer: the model's sampling defaults, and the chat template of a flag.

server.py reads both at the start.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from jaxsgl.errors import CheckpointError, InvalidRequest, StartupError
from jaxsgl.json_file import read_object
from jaxsgl.requests.request import SamplingParams

DEFAULTS_FILE = "generation_config.json"
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # vLLM's and SGLang's

logger = logging.getLogger(__name__)


def sampling_defaults(folder: str) -> Mapping[str, float]:
    """Returns what the model's generation_config.json says of sampling: fields of `SamplingParams`.

    What is missing, or out of bounds, is left out; so is all of a file that can't be read.
    """
    try:
        given = read_object(Path(folder) / DEFAULTS_FILE)
    except CheckpointError:
        return {}
    found: dict[str, float] = {}
    for name in _DEFAULTS:
        value = given.get(name)
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
            found[name] = value
        except InvalidRequest as error:
            logger.warning("%s is left out in part: %s", DEFAULTS_FILE, error)
    return found


def template_of(given: str | None) -> str | None:
    """Returns the chat template that a flag names by its file, or gives itself. Raises `StartupError`."""
    if given is None or ("{" in given and "\n" in given):
        return given
    try:
        return Path(given).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        if "{{" in given or "{%" in given:
            return given
        reason = getattr(error, "strerror", None) or "it is no text"
        raise StartupError(f"--chat-template {given:.200} can't be read: {reason}: name a file of Jinja") from None
