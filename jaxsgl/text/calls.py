"""The forms in which models write tool calls, as data, and the calls in a finished text of each form.

A `CallForm` says what opens and closes a text of calls and how to read it; `READERS` reads. Anything that is no call by
its form gives None, and comes back as text. Never knows streams (answer.py) or grammars (call_grammar.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from jaxsgl.text.json_text import BROKEN, JsonScanner, decoded, encoded
from jaxsgl.text.parameters import as_said
from jaxsgl.text.python_calls import read_python
from jaxsgl.text.tags import DSML, read_tags

Kind: TypeAlias = Literal["json", "named_json", "tagged", "keyed", "invoked", "dsml", "python", "unquoted"]
Tools: TypeAlias = Mapping[str, Mapping[str, Any]]  # a tool's name -> the JSON schema of its parameters


@dataclass(frozen=True)
class CallForm:
    """How a family writes calls.

    Attributes:
      kind: what stands between `opens` and `close`. "json": an object with a name and arguments, or a list of such.
        "named_json": a name, `between`, and an object of arguments. "tagged", "keyed": parameters in tags, as
        Qwen3-Coder and GLM write them; "invoked": several such calls in a row, as MiniMax's; "dsml": those of
        DeepSeek, whose tags say whether a value is a text or JSON. "python": a list of calls as in Python. "unquoted":
        a name and an object whose keys have no quotes and whose texts stand between `quote`, as Gemma's.
      opens: each of these texts opens calls, wherever it stands; a bracket at its end is the list's.
      close: ends what `opens` has opened; "": the calls end with their own brackets.
      bare: a bracket that opens calls if the answer begins with it; "": none does.
      name_key, arguments_key: what the JSON object calls the name and the arguments.
      id_key: what it calls a number of the call that comes first; "": it has none.
      indent: what stands before each call of a list, whose bracket is closed on a line of its own; "": nothing does.
      space: what the model writes after `opens` and before `close`.
      lead: what it may write before `opens` in an answer that is calls alone.
      between: what stands between name and arguments.
      one_by_one: several calls are opened one by one; else they stand in one list, or follow after `separator`.
      separator: between calls of one opening.
      section: what begins and ends all calls of an answer, if anything does; it is no text of the answer.
      prefix: what stands before a name of "named_json".
      numbered: a name of "named_json" is followed by a colon and the number of the call.
      tail: what stands before `close`, after space.
      quote: what begins and ends texts in arguments of "unquoted".
      around: what the model writes around a value of "tagged".
      head: what begins a call of "tagged", also one before which the model has forgotten `opens`; "": it never does.
    """

    kind: Kind
    opens: tuple[str, ...] = ()
    close: str = ""
    bare: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    id_key: str = ""
    indent: str = ""
    space: str = ""
    lead: str = ""
    between: str = ""
    one_by_one: bool = True
    separator: str = ""
    section: tuple[str, str] | None = None
    prefix: str = ""
    numbered: bool = False
    tail: str = ""
    quote: str = ""
    around: str = ""
    head: str = ""


class Call(msgspec.Struct, frozen=True):
    """A call that was read; `arguments` is a JSON object, as text."""

    name: str
    arguments: str


HERMES = CallForm("json", opens=("<tool_call>",), close="</tool_call>", space="\n")
FORMS: dict[str, CallForm] = {
    "hermes": HERMES,
    "longcat": CallForm("json", opens=("<longcat_tool_call>",), close="</longcat_tool_call>", space="\n"),
    "qwen3_coder": CallForm(
        "tagged", opens=("<tool_call>",), close="</tool_call>", space="\n", around="\n", head="<function="
    ),
    "seed_oss": CallForm("tagged", opens=("<seed:tool_call>",), close="</seed:tool_call>", space="\n"),
    "glm45": CallForm("keyed", opens=("<tool_call>",), close="</tool_call>"),
    "llama3": CallForm(
        "json", opens=("<|python_tag|>",), bare="{", arguments_key="parameters", one_by_one=False, separator="; "
    ),
    "mistral": CallForm("json", opens=("[TOOL_CALLS]",), one_by_one=False),
    "mistral_v11": CallForm("named_json", opens=("[TOOL_CALLS]",), between="[ARGS]"),
    "kimi_k2": CallForm(
        "named_json",
        opens=("<|tool_call_begin|>",),
        close="<|tool_call_end|>",
        between="<|tool_call_argument_begin|>",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        prefix="functions.",
        numbered=True,
    ),
    "deepseek_v31": CallForm(
        "named_json",
        opens=("<｜tool▁call▁begin｜>",),
        close="<｜tool▁call▁end｜>",
        between="<｜tool▁sep｜>",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "deepseek_v3": CallForm(
        "named_json",
        opens=("<｜tool▁call▁begin｜>",),
        close="<｜tool▁call▁end｜>",
        between="\n```json\n",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        prefix="function<｜tool▁sep｜>",
        tail="\n```",
    ),
    "minimax_m2": CallForm(
        "invoked",
        opens=("<minimax:tool_call>",),
        close="</minimax:tool_call>",
        one_by_one=False,
        separator="\n",
    ),
    **{
        name: CallForm(
            "dsml", opens=(f"<{DSML}{tag}>",), close=f"</{DSML}{tag}>", one_by_one=False, separator="\n", lead="\n\n"
        )
        for name, tag in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls"))
    },
    "granite": CallForm("json", opens=("<|tool_call|>", "<tool_call>"), one_by_one=False),
    "phi4_mini": CallForm("json", opens=("<|tool_call|>",), close="<|/tool_call|>", one_by_one=False),
    "functools": CallForm("json", opens=("functools[",), one_by_one=False),
    "hunyuan": CallForm("json", opens=("<tool_calls>",), close="</tool_calls>", one_by_one=False),
    "nemotron": CallForm("json", opens=("<TOOLCALL>",), close="</TOOLCALL>", one_by_one=False),
    "cohere": CallForm(
        "json",
        opens=("<|START_ACTION|>",),
        close="<|END_ACTION|>",
        name_key="tool_name",
        arguments_key="parameters",
        id_key="tool_call_id",
        indent="\n    ",
        one_by_one=False,
    ),
    "olmo3": CallForm(
        "python", opens=("<function_calls>",), close="</function_calls>", one_by_one=False, separator="\n"
    ),
    "lfm2": CallForm(
        "python", opens=("<|tool_call_start|>",), close="<|tool_call_end|>", one_by_one=False, separator=", "
    ),
    "pythonic": CallForm("python", bare="[", one_by_one=False, separator=", "),
    "gemma4": CallForm("unquoted", opens=("<|tool_call>",), close="<tool_call|>", prefix="call:", quote='<|"|>'),
    "json": CallForm("json", bare="{", one_by_one=False),
}
_KEYS = ("arguments", "parameters")


def read_calls(form: CallForm, text: str, tools: Tools) -> list[Call] | None:
    """Returns the calls between `opens` and `close`, or None if they are malformed or call no tool of ours."""
    calls = _READERS[form.kind](form, text.strip(), tools)
    if not calls or any(call.name not in tools for call in calls):
        return None
    return calls


def header_pattern(form: CallForm) -> re.Pattern[str] | None:
    """Matches a call of JSON up to the first character of its arguments; None if arguments are no JSON.

    The group `name` is a JSON text, or a plain name where `form` has one.
    """
    if form.kind == "named_json":
        prefix = f"(?:{re.escape(form.prefix)})?" if form.prefix else ""
        number = r"(?::\d+)?" if form.numbered else ""
        between = re.escape(form.between.strip())
        return re.compile(rf"\s*{prefix}(?P<plain>[^\s\[{{]+?){number}\s*(?:\[CALL_ID\][^\[]*)?{between}\s*(?=\S)")
    if form.kind != "json":
        return None
    keys = "|".join(_KEYS)
    text = r'"(?:[^"\\]|\\.)*"'
    number = rf'(?:"{form.id_key}"\s*:\s*(?:{text}|\d+)\s*,\s*)?' if form.id_key else ""
    name = rf'"{form.name_key}"\s*:\s*(?P<name>{text})\s*,\s*'
    return re.compile(rf'[\s\[\]}},;]*\{{\s*{number}{name}"(?:{keys})"\s*:\s*(?=\S)')


def _read_json(form: CallForm, text: str, tools: Tools) -> list[Call] | None:
    value = decoded(text)
    found: list[Call] = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict) or not isinstance(item.get(form.name_key), str):
            return None
        arguments: Any = next((item[key] for key in _KEYS if item.get(key) is not None), {})
        if isinstance(arguments, str):  # the object as a text, as Granite 4 and Llama 3 write it at times
            arguments = decoded(arguments)
        if not isinstance(arguments, dict):
            return None
        found.append(Call(item[form.name_key], encoded(arguments)))
    header = header_pattern(form)
    assert header is not None
    if len(found) == 1 and (match := header.match(text)) is not None:
        # The model's own spelling, so that whole answers and streams agree.
        end = _end_of_value(text, match.end())
        if re.fullmatch(r"\s*\}\s*\]?\s*", text[end:]) and isinstance(decoded(text[match.end() : end]), dict):
            return [Call(found[0].name, text[match.end() : end])]
    return found


def _read_named_json(form: CallForm, text: str, tools: Tools) -> list[Call] | None:
    header = header_pattern(form)
    assert header is not None
    match = header.match(text)
    if match is None or not isinstance(decoded(text[match.end() :]), dict):
        return None
    return [Call(match["plain"], text[match.end() :])]


def _read_tags(form: CallForm, text: str, tools: Tools) -> list[Call] | None:
    found = read_tags(form.kind, text, form.close)
    if found is None:
        return None
    return [
        Call(
            name,
            encoded(
                {key: as_said(value.text, value.is_text, tools.get(name, {}), key) for key, value in values.items()}
            ),
        )
        for name, values in found
    ]


def _read_python(form: CallForm, text: str, tools: Tools) -> list[Call] | None:
    try:
        found = read_python(text, tools)
        return None if found is None else [Call(name, encoded(arguments)) for name, arguments in found]
    except (ValueError, TypeError, RecursionError):  # a value that JSON can't hold
        return None


_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:]+)\s*:")


def _read_unquoted(form: CallForm, text: str, tools: Tools) -> list[Call] | None:
    match = re.fullmatch(rf"{re.escape(form.prefix)}([^\s{{]+)\s*(\{{.*\}})", text, re.DOTALL)
    if match is None:
        return None
    between = match[2].split(form.quote)  # every second one is a text
    if any('"' in part for part in between[::2]):
        return None
    spelled = [encoded(part) if number % 2 else _KEY.sub(r'\1"\2":', part) for number, part in enumerate(between)]
    arguments = decoded("".join(spelled)) if len(between) % 2 else BROKEN
    return [Call(match[1], encoded(arguments))] if isinstance(arguments, dict) else None


_READERS: dict[Kind, Callable[[CallForm, str, Tools], list[Call] | None]] = {
    "json": _read_json,
    "named_json": _read_named_json,
    "tagged": _read_tags,
    "keyed": _read_tags,
    "invoked": _read_tags,
    "dsml": _read_tags,
    "python": _read_python,
    "unquoted": _read_unquoted,
}


def _end_of_value(text: str, start: int) -> int:
    return JsonScanner().feed(text, start)
