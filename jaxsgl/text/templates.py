"""`ClientTemplates`: renders chat templates that clients bring, in a child process within limits.

Jinja's sandbox keeps a template from files and modules, not from computing: `{{ 9 ** (9 ** 8) }}` is one call into C
that no thread can end, and it holds Python's lock meanwhile. So such templates run where the kernel ends them. Owns
the helper process, which starts with the first template and ends with its owner; tokenizer.py calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from jaxsgl.errors import InvalidRequest
from jaxsgl.sandbox import Limits, Sandbox, SandboxCrash, SandboxLimit

CPU_S = 2.0  # of processor time that a template may take
TIME_S = 30.0  # by the clock, on a machine that has other work
MEMORY_BYTES = 128 << 20
_MAX_REASON_CHARS = 500


class ClientTemplates:
    """A helper process that renders templates. Safe to call from several threads, whose calls run at the same time."""

    def __init__(self) -> None:
        self._sandbox = Sandbox("jaxsgl.text.templates:make", name="templates")

    def render(self, turns: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> str:
        """Returns the text that a template makes of `turns`.

        Args:
          turns: values of JSON.
          arguments: of transformers' `apply_chat_template`, with the template and its variables; values of JSON.

        Raises:
          InvalidRequest: the template refuses, fails, or goes beyond its limits.
        """
        try:
            limits = Limits(MEMORY_BYTES, CPU_S, TIME_S)
            return bytes(self._sandbox.call(msgspec.json.encode((turns, arguments)), limits)).decode()
        except SandboxLimit as error:
            most = f"{CPU_S if error.kind == 'processor time' else TIME_S:g} s of {error.kind}"
            if error.kind == "memory":
                most = f"{MEMORY_BYTES >> 20} MiB of memory"
            raise InvalidRequest(f"the request's chat template takes more than {most}: simplify it") from None
        except SandboxCrash as error:
            reason = str(error)[:_MAX_REASON_CHARS]
            raise InvalidRequest(f"the request's chat template can't be rendered: {reason}") from None


def make(argument: bytes) -> Callable[[bytes], bytes]:
    """What the helper does once: imports transformers."""
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    tokenizer = PreTrainedTokenizerBase()

    def render(request: bytes) -> bytes:
        turns, arguments = msgspec.json.decode(request)
        try:
            text: str = tokenizer.apply_chat_template(turns, tokenize=False, **arguments)
            return text.encode()
        except MemoryError:
            raise
        except Exception as error:  # a program of the client's
            raise InvalidRequest(refusal("request", error)) from None

    return render


def refusal(whose: str, error: Exception) -> str:
    """What a client reads about a template that raised `error`."""
    reason = str(error)[:_MAX_REASON_CHARS] or type(error).__name__
    return f"the {whose}'s chat template refuses these messages: {reason}"
