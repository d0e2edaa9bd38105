"""What the JSON schema of a tool says of a parameter: which types it takes, and which texts.

Follows `$ref` into the definitions of the tool's schema, and alternatives. Never judges whether a value is valid:
grammars do (call_grammar.py). calls.py types the texts that models write by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any

from jaxsgl.requests.json_schemas import DEFINITIONS, NAMING, VALUES
from jaxsgl.text.json_text import BROKEN, decoded, encoded, literal

_MAX_DEPTH = 50  # of schemas that are looked into; what lies deeper counts as unknown
_JOINING = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
_ANNOTATIONS = frozenset({"title", "description", "examples", "default", "$comment"})
_OF_OBJECTS = (
    "not", "if", "patternProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired",
    "dependentSchemas", "dependencies",
)  # fmt: skip


def as_said(text: str, says_text: bool | None, parameters: Mapping[str, Any], key: str) -> Any:
    """Returns the value that `text` stands for where a model says whether that is a text or JSON; None: it doesn't.

    What is no JSON is typed by the schema, and a text where the schema takes texts alone.
    """
    if says_text:
        return text
    value = BROKEN if says_text is None else decoded(text.strip())
    takes = types_of(schema_of(parameters, key), parameters)
    if value is BROKEN or (takes == frozenset({"string"}) and not isinstance(value, str)):
        return as_typed(text, parameters, key)
    return value


def as_typed(text: str, parameters: Mapping[str, Any], key: str) -> Any:
    """Returns the value that `text` stands for, if the schema of `key` takes anything but texts; else `text`.

    If it takes texts and others, a value of a type that it doesn't take is a text. A list or an object that the schema
    takes and no text may be spelled as in Python, or as in a string of JSON, with a backslash before each quote.
    """
    types = types_of(schema_of(parameters, key), parameters)
    if is_text(parameters, key):
        return text
    value = decoded({"True": "true", "False": "false", "None": "null"}.get(text.strip(), text.strip()))
    if value is BROKEN and types is not None and "string" not in types:
        value = _misspelled(text.strip())
        return value if _type_of(value) in types & {"array", "object"} else text
    if value is BROKEN or (types is not None and "string" in types and _type_of(value) not in types):
        return text
    return value


def _misspelled(text: str) -> Any:
    """Returns the value of a text that is no JSON but means some, or `BROKEN`."""
    if not text.startswith(("[", "{")):
        return BROKEN
    inner = decoded(f'"{text}"')
    if isinstance(inner, str) and (value := decoded(inner)) is not BROKEN:
        return value
    try:
        return decoded(encoded(literal(text)))
    except (TypeError, ValueError, RecursionError):  # what JSON can't hold
        return BROKEN


def is_text(parameters: Mapping[str, Any], key: str) -> bool:
    """Returns whether the schema of `key` takes texts and nothing else."""
    return takes_texts_alone(schema_of(parameters, key), parameters)


def takes_texts_alone(schema: Any, root: Mapping[str, Any]) -> bool:
    """Returns whether a schema takes texts and nothing else; one that says nothing of types counts as such."""
    types = types_of(schema, root)
    return types == frozenset({"string"}) or (types is None and isinstance(schema, dict) and bool(schema))


def takes_texts(schema: Any, root: Mapping[str, Any]) -> bool:
    """Returns whether a schema takes texts, perhaps among others."""
    return _takes(schema, root, "string")


def _takes(schema: Any, root: Mapping[str, Any], kind: str) -> bool:
    types = types_of(schema, root)
    return schema is not False if types is None else kind in types


def schema_of(parameters: Mapping[str, Any], key: str) -> Any:
    """Returns the schema of a tool's parameter `key`, or None if `parameters` describe none of that name."""
    properties = parameters.get("properties")
    if not parameters.keys().isdisjoint(_JOINING):
        properties = parameters_of(parameters)[0]
    return (properties if isinstance(properties, dict) else {}).get(key, parameters.get("additionalProperties"))


def parameters_of(root: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """Returns the schemas of a tool's parameters by name, and the names of those that must be given.

    They may stand behind the `$ref` of `root`, and in the schemas of its `allOf`, `anyOf` and `oneOf`.
    """
    found: dict[str, list[Any]] = {}
    required: set[str] = set()
    uncertain: set[str] = set()
    for schema, must_hold in parts_of(root, root, "object"):
        properties = schema.get("properties")
        for key, value in properties.items() if isinstance(properties, dict) else ():
            if value not in found.setdefault(key, []):
                found[key].append(value)
            if not must_hold:
                uncertain.add(key)
        if must_hold:
            required.update(key for key in _items(schema, "required") if isinstance(key, str))
    one = {
        key: values[0] if len(values) == 1 else {"anyOf" if key in uncertain else "allOf": values}
        for key, values in found.items()
    }
    return one, frozenset(required)


def takes_any(root: Mapping[str, Any]) -> bool:
    """Returns whether a tool takes parameters although its schema names none."""
    parts = [schema for schema, _ in parts_of(root, root, "object")]
    if any(schema.get("properties") or schema.get("additionalProperties") is False for schema in parts):
        return False
    says_more = any("additionalProperties" in schema or "patternProperties" in schema for schema in parts)
    return says_more or not any("properties" in schema for schema in parts)


def beyond_parameters(root: Mapping[str, Any]) -> list[str]:
    """Returns the words by which a tool's schema says more of its parameters than which there are and must be."""
    parts = list(parts_of(root, root, "object"))
    words = [word for schema, _ in parts for word in _OF_OBJECTS if word in schema]
    return words + ["anyOf"] * any(not must_hold for _, must_hold in parts)


def parts_of(schema: Any, root: Mapping[str, Any], kind: str) -> Iterator[tuple[Mapping[str, Any], bool]]:
    """Yields the schemas of which `schema` is made, each with whether values of the type `kind` must hold to it."""
    return _parts_of(schema, root, kind, set(), True, 0)


def _parts_of(
    schema: Any, root: Mapping[str, Any], kind: str, seen: set[tuple[str, bool]], must_hold: bool, depth: int
) -> Iterator[tuple[Mapping[str, Any], bool]]:
    """`seen`: the references that were followed."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return
    yield schema, must_hold
    others = [(other, must_hold) for other in _items(schema, "allOf")]
    for several in alternatives(schema):
        fitting = [other for other in several if _takes(other, root, kind)]
        others += [(other, must_hold and len(fitting) == 1) for other in fitting]
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference, must_hold) not in seen:
        seen.add((reference, must_hold))
        others.append((definition(reference, root), must_hold))
    for other, must in others:
        yield from _parts_of(other, root, kind, seen, must, depth + 1)


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
        of_texts = [other for other in others if takes_texts(other, root)]
        several = [_choices_of(other, root, known, depth + 1) for other in of_texts]
        if several and None not in several:
            return list(dict.fromkeys(text for found in several for text in found or ()))
    return None


def definition(reference: object, root: Mapping[str, Any]) -> Any:
    """Returns the schema that a `$ref` into the definitions of `root` means, or None if it leads to no definition."""
    if not isinstance(reference, str) or not reference.startswith(tuple(f"#/{word}/" for word in DEFINITIONS)):
        return None
    return at(reference, root)


def at(reference: object, root: Mapping[str, Any]) -> Any:
    """Returns what a `$ref` into `root` leads to, or None if there is nothing."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    place: Any = root
    for step in reference.split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list):
            place = place[int(step)] if step.isdecimal() and int(step) < len(place) else None
        else:
            place = place.get(step) if isinstance(place, Mapping) else None
    return place


def part_of(root: Mapping[str, Any], part: Any) -> Any:
    """Returns a schema in `root` as one that stands alone, with the definitions that it reaches."""
    found: dict[str, dict[str, Any]] = {}
    todo = [part]
    while todo:
        for reference in _references(todo.pop()):
            _, word, name, *_ = [*reference.split("/"), "", ""]
            schema, name = definition(f"#/{word}/{name}", root), name.replace("~1", "/").replace("~0", "~")
            if schema is not None and name not in found.get(word, {}):
                found.setdefault(word, {})[name] = schema
                todo.append(schema)
    return {**part, **found} if isinstance(part, dict) else part


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(reference := schema.get("$ref"), str):
            yield reference
        schema = list(schema.values())
    for part in schema if isinstance(schema, list) else ():
        yield from _references(part)


def without_annotations(schema: Any) -> Any:
    """Returns a schema without what tells readers of values but allows and forbids none."""
    if isinstance(schema, list):
        return [without_annotations(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
    return {key: _without_annotations_in(key, value) for key, value in kept.items()}


def _without_annotations_in(word: str, value: Any) -> Any:
    if word in VALUES:
        return value
    if word in NAMING and isinstance(value, dict):
        return {name: without_annotations(part) for name, part in value.items()}
    return without_annotations(value)


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
