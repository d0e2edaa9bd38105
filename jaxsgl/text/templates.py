"""What clients may put into a chat besides text: templates of their own, and names of special tokens.

Jinja's sandbox keeps a template from files and modules, not from computing: `{{ 9 ** (9 ** 8) }}` is one call into C
that no thread can end, and it holds Python's lock meanwhile. So `ClientTemplates` renders such templates where the
kernel ends them: it owns the helper process, which starts with the first template and ends with its owner.
`SplitSpecial` makes ordinary text of names of special tokens (`--split-special-tokens`). tokenizer.py calls both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from jaxsgl.errors import CheckpointError, InvalidRequest
from jaxsgl.sandbox import Limits, Sandbox, SandboxCrash, SandboxLimit

CPU_S = 2.0  # of processor time that a template may take
TIME_S = 30.0  # by the clock, on a machine that has other work
MEMORY_BYTES = 128 << 20
_MAX_REASON_CHARS = 500
_BEGIN, _END = "\ufdd0", "\ufdd1"


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


class SplitSpecial:
    """Marks names, and makes ids of texts with marks. Safe to use from several threads.

        turns --mark--> turns with marks --chat template--> text --ids--> the template's own special tokens, and text

    A chat template only joins texts, so the tokenizer takes `<|im_end|>` in a message for the end of a turn. Here each
    such name gets two marks around it before the template runs, which tell it from the template's own afterwards. Marks
    are characters that Unicode keeps for a program's own use. A name that a template itself puts together from parts of
    a message isn't found. Byte-level tokenizers alone, since others mark the beginnings of texts.

    Args:
      backend: a tokenizer of `tokenizers`.
      special: names of special tokens, and their ids.

    Raises:
      CheckpointError: its special tokens take spaces next to them along, which can't be kept.
    """

    def __init__(self, backend: Any, special: Mapping[str, int]) -> None:
        self._plain = type(backend).from_str(backend.to_str())
        self._plain.encode_special_tokens = True  # as text
        self._ids = dict(special)
        for token in backend.get_added_tokens_decoder().values():
            if token.special and (token.lstrip or token.rstrip):
                raise CheckpointError(
                    f"--split-special-tokens: the token {token.content} takes spaces next to it along: leave it out"
                )
        names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
        self._names = re.compile(names or r"(?!)")
        self._parts = re.compile(f"{_BEGIN}(.*?){_END}|({names or '(?!)'})", re.DOTALL)

    def mark(self, value: Any) -> Any:
        """A copy of a value of JSON with marks around names in its texts; keys stay as they are.

        Raises `InvalidRequest` if the value holds a mark.
        """
        if isinstance(value, str):
            if _BEGIN in value or _END in value:
                raise InvalidRequest("the chat holds U+FDD0 or U+FDD1, which are no characters: leave them out")
            return self._names.sub(f"{_BEGIN}\\g<0>{_END}", value)
        if isinstance(value, Mapping):
            return {key: self.mark(each) for key, each in value.items()}
        if isinstance(value, Sequence):
            return [self.mark(each) for each in value]
        return value

    def ids(self, text: str) -> list[int]:
        """The ids of a text with marks: names between these are text, others are their tokens."""
        ids: list[int] = []
        plain, place = "", 0
        for found in self._parts.finditer(text):
            plain, place = plain + text[place : found.start()], found.end()
            if found[2] is None:
                plain += found[1]
                continue
            ids += [*self._encode(plain), self._ids[found[2]]]
            plain = ""
        return ids + self._encode(plain + text[place:])

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids if text else []
        return ids
