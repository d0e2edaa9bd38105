"""What the JSON schema of a tool says of a parameter: which types it takes, and which texts.

Follows `$ref` into the definitions of the tool's schema, and alternatives. Never judges whether a value is valid:
grammars do (call_grammar.py). calls.py types the texts that models write by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any

from jaxsgl.text.json_text import BROKEN, decoded

_MAX_DEPTH = 50  # of schemas that are looked into; what lies deeper counts as unknown
_DEFINITIONS = ("$defs", "definitions")


def as_typed(text: str, parameters: Mapping[str, Any], key: str) -> Any:
    """Returns the value that `text` stands for, if the schema of `key` takes anything but texts; else `text`.

    If it takes texts and others, a value of a type that it doesn't take is a text.
    """
    types = types_of(schema_of(parameters, key), parameters)
    if is_text(parameters, key):
        return text
    value = decoded({"True": "true", "False": "false", "None": "null"}.get(text.strip(), text.strip()))
    if value is BROKEN or (types is not None and "string" in types and _type_of(value) not in types):
        return text
    return value


def is_text(parameters: Mapping[str, Any], key: str) -> bool:
    """Returns whether the schema of `key` takes texts and nothing else."""
    schema = schema_of(parameters, key)
    types = types_of(schema, parameters)
    return types == frozenset({"string"}) or (types is None and isinstance(schema, dict) and bool(schema))


def schema_of(parameters: Mapping[str, Any], key: str) -> Any:
    """Returns the schema of a tool's parameter `key`, or None if `parameters` describe none of that name."""
    properties = parameters.get("properties")
    return properties.get(key) if isinstance(properties, dict) else None


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str] | None:
    """Returns the types that a schema takes, integers apart from numbers, or None if nothing names them.

    `root`: the schema that has the definitions.
    """
    return _types_of(schema, root, {}, 0) or None


def _types_of(
    schema: Any, root: Mapping[str, Any], known: dict[str, frozenset[str] | None], depth: int
) -> frozenset[str] | None:
    """`known`: the types of definitions that were looked into."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return None
    found = [_named(schema)]
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference not in known:
            known[reference] = frozenset()  # what refers to itself adds no type
            known[reference] = _types_of(definition(reference, root), root, known, depth + 1)
        found.append(known[reference])
    for others in alternatives(schema):
        types = [_types_of(other, root, known, depth + 1) for other in others]
        found.append(None if None in types else frozenset[str]().union(*(one for one in types if one is not None)))
    found += [_types_of(other, root, known, depth + 1) for other in _items(schema, "allOf")]
    told = [types for types in found if types is not None]
    return reduce(frozenset.intersection, told) if told else _shown(schema)


def choices_of(schema: Any, root: Mapping[str, Any]) -> list[str] | None:
    """Returns the only texts that a schema of texts takes, or None if it doesn't list them."""
    return _choices_of(schema, root, {}, 0)


def _choices_of(
    schema: Any, root: Mapping[str, Any], known: dict[str, list[str] | None], depth: int
) -> list[str] | None:
    """`known`: the texts of definitions that were looked into."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return None
    listed = [schema["const"]] if "const" in schema else _items(schema, "enum")
    if texts := [value for value in listed if isinstance(value, str)]:
        return texts
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference not in known:
            known[reference] = None
            known[reference] = _choices_of(definition(reference, root), root, known, depth + 1)
        if (found := known[reference]) is not None:
            return found
    for other in _items(schema, "allOf"):
        if (found := _choices_of(other, root, known, depth + 1)) is not None:
            return found
    for others in alternatives(schema):
        several = [_choices_of(other, root, known, depth + 1) for other in others]
        if None not in several:
            return list(dict.fromkeys(text for found in several for text in found or ()))
    return None


def definition(reference: object, root: Mapping[str, Any]) -> Any:
    """Returns the schema that a `$ref` into the definitions of `root` means, or None if it leads to no definition."""
    if not isinstance(reference, str) or not reference.startswith(tuple(f"#/{word}/" for word in _DEFINITIONS)):
        return None
    schema: Any = root
    for step in reference.split("/")[1:]:
        schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return schema


def definitions(root: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a part of `root` must hold so that its references are known there, too."""
    return {word: root[word] for word in _DEFINITIONS if word in root}


def alternatives(schema: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Yields the lists of schemas of which one must hold."""
    for word in ("anyOf", "oneOf"):
        if others := _items(schema, word):
            yield others


def _items(schema: Mapping[str, Any], word: str) -> list[Any]:
    value = schema.get(word)
    return value if isinstance(value, list) else []


def _named(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """Returns the types that the schema itself names, or those of the values that it lists."""
    named = schema.get("type")
    names = [named] if isinstance(named, str) else _items(schema, "type")
    if names:
        types = frozenset(name for name in names if isinstance(name, str))
        return types | {"integer"} if "number" in types else types
    listed = [schema["const"]] if "const" in schema else _items(schema, "enum")
    return frozenset(map(_type_of, listed)) or None


def _shown(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """Returns the type that a schema without any type is meant for."""
    if not schema.keys().isdisjoint(("properties", "additionalProperties")):
        return frozenset({"object"})
    return None if schema.keys().isdisjoint(("items", "prefixItems")) else frozenset({"array"})


def _type_of(value: Any) -> str:
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    names = {str: "string", bool: "boolean", int: "integer", list: "array", dict: "object"}
    return names.get(type(value), "null")
