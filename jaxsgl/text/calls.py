"""The forms in which models write tool calls, as data, and the calls in a finished text of each form.

A `CallForm` says what opens and closes a text of calls and how to read it; `READERS` reads. Anything that is no call by
its form gives None, and comes back as text. Never knows streams (answer.py) or grammars (call_grammar.py).
"""

from __future__ import annotations

import ast
import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec

Kind: TypeAlias = Literal["json", "named_json", "tagged", "keyed", "invoked", "python", "unquoted"]
Tools: TypeAlias = Mapping[str, Mapping[str, Any]]  # a tool's name -> the JSON schema of its parameters

_OUTSIDE = frozenset(
    '{}[]:,"-+.0123456789 \t\n\r' + "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
)  # of strings
_MAX_DEPTH = 200


@dataclass(frozen=True)
class CallForm:
    """How a family writes calls.

    Attributes:
      kind: what stands between `opens` and `close`. "json": an object with a name and arguments, or a list of such.
        "named_json": a name, `between`, and an object of arguments. "tagged", "keyed": parameters in tags, as
        Qwen3-Coder and GLM write them; "invoked": several such calls in a row, as MiniMax's. "python": a list of calls
        as in Python. "unquoted": a name and an object whose keys have no quotes and whose texts stand between `quote`,
        as Gemma's.
      opens: each of these texts opens calls, wherever it stands.
      close: ends what `opens` has opened; "": the calls end with their own brackets.
      bare: a bracket that opens calls if the answer begins with it; "": none does.
      arguments_key: what the JSON object calls the arguments.
      space: what the model writes after `opens` and before `close`.
      between: what stands between name and arguments.
      one_by_one: several calls are opened one by one; else they stand in one list, or follow after `separator`.
      separator: between calls of one opening.
      section: what begins and ends all calls of an answer, if anything does; it is no text of the answer.
      prefix: what stands before a name of "named_json".
      numbered: a name of "named_json" is followed by a colon and the number of the call.
      tail: what stands before `close`, after space.
      quote: what begins and ends texts in arguments of "unquoted".
    """

    kind: Kind
    opens: tuple[str, ...] = ()
    close: str = ""
    bare: str = ""
    arguments_key: str = "arguments"
    space: str = ""
    between: str = ""
    one_by_one: bool = True
    separator: str = ""
    section: tuple[str, str] | None = None
    prefix: str = ""
    numbered: bool = False
    tail: str = ""
    quote: str = ""


class Call(msgspec.Struct, frozen=True):
    """A call that was read; `arguments` is a JSON object, as text."""

    name: str
    arguments: str


HERMES = CallForm("json", opens=("<tool_call>",), close="</tool_call>", space="\n")
FORMS: dict[str, CallForm] = {
    "hermes": HERMES,
    "qwen3_coder": CallForm("tagged", opens=("<tool_call>",), close="</tool_call>", space="\n"),
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
    "granite": CallForm("json", opens=("<|tool_call|>", "<tool_call>"), one_by_one=False),
    "phi4_mini": CallForm("json", opens=("<|tool_call|>",), close="<|/tool_call|>", one_by_one=False),
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
    return re.compile(rf'[\s\[\]}},;]*\{{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:{keys})"\s*:\s*(?=\S)')


def _read_json(form: CallForm, text: str, tools: Tools) -> list[Call] | None:
    value = _decoded(text)
    found: list[Call] = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            return None
        arguments: Any = next((item[key] for key in _KEYS if key in item), {})
        if not isinstance(arguments, dict):
            return None
        found.append(Call(item["name"], _encoded(arguments)))
    header = header_pattern(form)
    assert header is not None
    if len(found) == 1 and (match := header.match(text)) is not None:
        # The model's own spelling, so that whole answers and streams agree.
        end = _end_of_value(text, match.end())
        if re.fullmatch(r"\s*\}\s*\]?\s*", text[end:]) and isinstance(_decoded(text[match.end() : end]), dict):
            return [Call(found[0].name, text[match.end() : end])]
    return found


def _read_named_json(form: CallForm, text: str, tools: Tools) -> list[Call] | None:
    header = header_pattern(form)
    assert header is not None
    match = header.match(text)
    if match is None or not isinstance(_decoded(text[match.end() :]), dict):
        return None
    return [Call(match["plain"], text[match.end() :])]


_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>)?", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?(?:</parameter>\s*|(?=<parameter=)|\Z)", re.DOTALL)
_KEYED = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def _read_tagged(form: CallForm, text: str, tools: Tools) -> list[Call] | None:
    match = _FUNCTION.fullmatch(text)
    return None if match is None else _from_pairs(match[1], match[2], _PARAMETER, tools)


def _read_keyed(form: CallForm, text: str, tools: Tools) -> list[Call] | None:
    match = re.fullmatch(r"([^\s<]+)\s*(.*)", text, re.DOTALL)
    return None if match is None else _from_pairs(match[1], match[2], _KEYED, tools)


_INVOKED = re.compile(r'\s*<invoke name="?([^">]+)"?>(.*?)</invoke>\s*', re.DOTALL)
_NAMED = re.compile(r'\s*<parameter name="?([^">]+)"?>(.*?)</parameter>\s*', re.DOTALL)


def _read_invoked(form: CallForm, text: str, tools: Tools) -> list[Call] | None:
    found: list[Call] = []
    place = 0
    while place < len(text):
        match = _INVOKED.match(text, place)
        calls = None if match is None else _from_pairs(match[1], match[2], _NAMED, tools)
        if match is None or calls is None:
            return None
        found += calls
        place = match.end()
    return found


def _from_pairs(name: str, text: str, pair: re.Pattern[str], tools: Tools) -> list[Call] | None:
    arguments: dict[str, Any] = {}
    text, place = text.strip(), 0
    while place < len(text):
        match = pair.match(text, place)
        if match is None or match.end() == place:
            return None
        arguments[match[1].strip()] = as_typed(match[2], tools.get(name, {}), match[1].strip())
        place = match.end()
    return [Call(name, _encoded(arguments))]


def as_typed(text: str, parameters: Mapping[str, Any], key: str) -> Any:
    """Returns the value that `text` stands for, if the schema of `key` takes anything but texts; else `text`."""
    if is_text(parameters, key):
        return text
    value = _decoded({"True": "true", "False": "false", "None": "null"}.get(text.strip(), text.strip()))
    return text if value is _BROKEN else value


def is_text(parameters: Mapping[str, Any], key: str) -> bool:
    """Returns whether the schema of `key` takes texts and nothing else."""
    schema = _schema_of(parameters, key)
    types = _types_of(schema)
    return types == {"string"} or (not types and isinstance(schema, dict) and bool(schema))


def _schema_of(parameters: Mapping[str, Any], key: str) -> Any:
    properties = parameters.get("properties")
    return properties.get(key) if isinstance(properties, dict) else None


def _types_of(schema: Any) -> set[str]:
    """Returns the types that a schema names, those of its alternatives included; empty: it names none."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type")
    types = {named} if isinstance(named, str) else set(named) if isinstance(named, list) else set()
    if isinstance(schema.get("enum"), list) and not types:
        types = {"string" if isinstance(value, str) else "any" for value in schema["enum"]}
    for alternatives in ("anyOf", "oneOf"):
        for other in schema.get(alternatives) or ():
            types |= _types_of(other)
    return types


def _read_python(form: CallForm, text: str, tools: Tools) -> list[Call] | None:
    if not text.startswith("["):
        text = "[" + ", ".join(line for line in text.splitlines() if line.strip()) + "]"
    try:
        tree = ast.parse(text, mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else []
        found: list[Call] = []
        for node in nodes:
            if not isinstance(node, ast.Call) or node.args or any(item.arg is None for item in node.keywords):
                return None
            arguments = {str(item.arg): _literal(item.value) for item in node.keywords}
            found.append(Call(ast.unparse(node.func), _encoded(arguments)))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    return found


_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:]+)\s*:")


def _read_unquoted(form: CallForm, text: str, tools: Tools) -> list[Call] | None:
    match = re.fullmatch(rf"{re.escape(form.prefix)}([^\s{{]+)\s*(\{{.*\}})", text, re.DOTALL)
    if match is None:
        return None
    between = match[2].split(form.quote)  # every second one is a text
    if any('"' in part for part in between[::2]):
        return None
    spelled = [_encoded(part) if number % 2 else _KEY.sub(r'\1"\2":', part) for number, part in enumerate(between)]
    arguments = _decoded("".join(spelled)) if len(between) % 2 else _BROKEN
    return [Call(match[1], _encoded(arguments))] if isinstance(arguments, dict) else None


def _literal(node: ast.expr) -> Any:
    """Returns the value of a literal; true, false and null are known, too. Raises `ValueError`."""
    for name in ast.walk(node):
        if isinstance(name, ast.Name) and name.id not in ("true", "false", "null"):
            raise ValueError(name.id)
    words = {"true": "True", "false": "False", "null": "None"}

    class Words(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return ast.copy_location(ast.parse(words[node.id], mode="eval").body, node)

    return ast.literal_eval(Words().visit(node))


_READERS: dict[Kind, Callable[[CallForm, str, Tools], list[Call] | None]] = {
    "json": _read_json,
    "named_json": _read_named_json,
    "tagged": _read_tagged,
    "keyed": _read_keyed,
    "invoked": _read_invoked,
    "python": _read_python,
    "unquoted": _read_unquoted,
}
_BROKEN = object()


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return _BROKEN


def _encoded(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _end_of_value(text: str, start: int) -> int:
    return JsonScanner().feed(text, start)


class Scan(enum.Enum):
    """How far a value has come."""

    OPEN = "open"
    DONE = "done"
    BROKEN = "broken"


class JsonScanner:
    """Finds the end of a JSON object or array in a text that comes in pieces; it must begin with a bracket.

    Looks at brackets and strings alone and refuses characters that JSON can't have there, so that a broken value ends
    where it breaks. Never parses: its callers do, once they have the whole value.

    Attributes:
      state: whether the value is complete, or can't become one any more.
    """

    def __init__(self) -> None:
        self.state = Scan.OPEN
        self._closers: list[str] = []
        self._in_string = self._escaped = False

    def feed(self, text: str, start: int = 0) -> int:
        """Reads `text` from `start` on; returns where it stops: after the value, at what breaks it, or at the end."""
        for place in range(start, len(text)):
            if self.state is not Scan.OPEN:
                return place
            if not self._take(text[place]):
                self.state = Scan.BROKEN
                return place
        return len(text)

    def _take(self, char: str) -> bool:
        """Returns whether `char` may stand here."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
            return char >= " "
        if char in "{[":
            self._closers.append("}" if char == "{" else "]")
            return len(self._closers) <= _MAX_DEPTH
        if not self._closers or char not in _OUTSIDE:
            return False
        if char in "}]":
            return self._close(char)
        self._in_string = char == '"'
        return True

    def _close(self, char: str) -> bool:
        matches = char == self._closers.pop()
        if matches and not self._closers:
            self.state = Scan.DONE
        return matches
