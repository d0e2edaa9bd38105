"""JSON schemas of tools as clients send them, in the words that parsers and grammars know.

`$ref`s lead anywhere in a schema (zod repeats one by where it stood first); here they lead into its definitions. And
many tools are not described in JSON Schema's words alone: types are called as in Python or Gemini's API, references
lead to what isn't there. Unless the tool is strict, such words get their meaning or are left out, since arguments need
not hold to them; those of a strict tool are kept, and its grammar is refused. The HTTP endpoints' tools.py calls
`standard`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxsgl.errors import InvalidRequest
from jaxsgl.requests.json_schemas import DEFINITIONS, NAMING, VALUES, is_unknown
from jaxsgl.text.parameters import at, definition

_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
_OTHER_NAMES = {
    "str": "string", "text": "string", "int": "integer", "long": "integer", "float": "number", "double": "number",
    "bool": "boolean", "dict": "object", "list": "array", "tuple": "array", "none": "null",
}  # fmt: skip
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_LISTS = ("enum", "anyOf", "oneOf", "allOf")
_MAX_MOVED = 10_000  # schemas that are written once more, since references lead to them or around them


def standard(schema: Mapping[str, Any], is_strict: bool) -> dict[str, Any]:
    """Returns the schema of a tool's parameters in standard words. Raises `InvalidRequest` if it gets too large."""
    return _Writer(schema, is_strict).whole()


class _Writer:
    """Writes one schema anew."""

    def __init__(self, root: Mapping[str, Any], is_strict: bool) -> None:
        self._root = root
        self._is_strict = is_strict
        self._found: dict[str, dict[str, Any]] = {}  # to what references lead elsewhere, by its name as a definition
        self._todo: list[str] = []  # names of those that are to be written
        self._num_schemas = 0

    def whole(self) -> dict[str, Any]:
        written: dict[str, Any] = self._written(dict(self._root))
        most = self._num_schemas + _MAX_MOVED
        moved: dict[str, Any] = {}
        while self._todo:
            name = self._todo.pop()
            inner = {word: part for word, part in self._found[name].items() if word not in DEFINITIONS}
            moved[name] = self._written(inner)
            if self._num_schemas > most:
                raise InvalidRequest(
                    f"the $refs in a tool's parameters lead to more than {_MAX_MOVED} schemas: define these in $defs"
                )
        defined = written.get("$defs")
        return {**written, "$defs": {**(defined if isinstance(defined, dict) else {}), **moved}} if moved else written

    def _written(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self._written(part) for part in schema]
        if not isinstance(schema, dict):
            return schema
        self._num_schemas += 1
        return {word: self._value(word, value) for word, value in schema.items() if self._is_kept(word, value)}

    def _is_kept(self, word: str, value: Any) -> bool:
        """Whether `value` means something, or has to be refused."""
        if is_unknown(word, value):
            return False
        if self._is_strict:
            return True
        if word == "$ref":
            return isinstance(at(value, self._root), dict)
        if word in _NUMBERS:
            return isinstance(value, int | float) and not isinstance(value, bool)
        if word in _COUNTS:
            return isinstance(value, int) and not isinstance(value, bool)
        if word in _LISTS:
            return isinstance(value, list) and bool(value)
        return word not in NAMING or isinstance(value, dict)

    def _value(self, word: str, value: Any) -> Any:
        """Returns the value of a word that is kept."""
        if word == "$ref":
            return self._reference(value)
        if word == "type" and not self._is_strict:
            return _types(value)
        if word in VALUES:
            return value
        if word in NAMING and isinstance(value, dict):
            return {name: self._written(part) for name, part in value.items()}
        return self._written(value)

    def _reference(self, value: Any) -> Any:
        if definition(value, self._root) is not None:
            return value
        schema = at(value, self._root)
        if not isinstance(schema, dict):
            return value
        name = value.removeprefix("#").strip("/").replace("/", ".") or "root"
        if name not in self._found:
            self._found[name] = schema
            self._todo.append(name)
        return f"#/$defs/{name.replace('~', '~0')}"


def _types(value: Any) -> Any:
    """Returns the types that a name or a list of names means; one that is unknown may mean any."""
    names = value if isinstance(value, list) else [value]
    if names and all(name in _TYPES for name in names):
        return value
    lower = [name.lower() if isinstance(name, str) else "" for name in names]
    known = list(dict.fromkeys(_OTHER_NAMES.get(name, name) for name in lower))
    if not known or any(name not in _TYPES for name in known):
        known = [name for name in _TYPES if name != "integer"]
    return known if len(known) > 1 else known[0]
