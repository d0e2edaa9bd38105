"""What grammars say of a tool's parameters: any schema has a grammar that models can follow, and none is too long."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from jaxsgl.errors import InvalidRequest
from jaxsgl.requests.grammar import Grammar
from jaxsgl.text.call_grammar import Calls, behind_reasoning, call_grammar
from jaxsgl.text.calls import FORMS
from jaxsgl.text.dialects import Dialect
from jaxsgl.text.json_text import BROKEN, decoded
from jaxsgl.text.parameters import without_annotations
from jaxsgl.text.tool_schemas import standard
from tests.text.test_call_grammars import grammars

OF_PARAMETERS = (
    "qwen3_coder",
    "glm45",
    "minimax_m2",
    "deepseek_v4",
    "olmo3",
    "lfm2",
    "gemma4",
)  # forms that write them one by one
TAGGED = ("qwen3_coder", "glm45", "minimax_m2", "deepseek_v4")
Schema = dict[str, Any]


def lark_of(name: str, schema: Schema, **calls: Any) -> Grammar:
    """Returns the grammar of calls of `f`, whose parameters hold to `schema`."""
    lark = call_grammar(FORMS[name], Calls({"f": schema}, **calls), grammars(True).tokenizer.unit_of)
    return behind_reasoning(lark, None, False)


def call_of(name: str, **arguments: str) -> str:
    """Returns a call of `f` as models write it; of texts in tags, as they stand there."""
    match name:
        case "qwen3_coder":
            inner = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in arguments.items())
            return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"
        case "glm45":
            pairs = arguments.items()
            inner = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in pairs)
            return f"<tool_call>f\n{inner}</tool_call>"
        case "minimax_m2":
            inner = "".join(f'<parameter name="{key}">{text}</parameter>\n' for key, text in arguments.items())
            return f'<minimax:tool_call>\n<invoke name="f">\n{inner}</invoke>\n</minimax:tool_call>'
        case "deepseek_v4":
            inner = "".join(f"{dsml_parameter(key, text)}\n" for key, text in arguments.items())
            return f'<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n{inner}</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
        case "gemma4":
            inner = ",".join(f'{key}:<|"|>{text}<|"|>' for key, text in arguments.items())
            return f"<|tool_call>call:f{{{inner}}}<tool_call|>"
    inner = ", ".join(f"{key}={json.dumps(text)}" for key, text in arguments.items())
    return {
        "olmo3": f"<function_calls>\nf({inner})\n</function_calls>",
        "lfm2": f"<|tool_call_start|>[f({inner})]<|tool_call_end|>",
    }[name]


def dsml_parameter(key: str, text: str) -> str:
    """Returns a parameter as DeepSeek writes it: what is JSON counts as such."""
    is_text = decoded(text) is BROKEN
    return f'<｜DSML｜parameter name="{key}" string="{str(is_text).lower()}">{text}</｜DSML｜parameter>'


def as_texts(call: str, *keys: str) -> str:
    """Returns a call in which the parameters `keys` are texts, whatever they look like."""
    names = "|".join(keys)
    return re.sub(rf'(name="(?:{names})" string=)"false"', r'\1"true"', call)


def read(name: str, schema: Schema, text: str) -> Any:
    """Returns the arguments in the call `text`, which a stream and a whole answer agree on."""
    found = []
    for constrained in (False, True):
        parser = Dialect(calls=FORMS[name]).parser({"f": schema}, constrained=constrained)
        parts = [part for char in text for part in parser.feed(char)] + parser.finish()
        found.append(json.loads("".join(part.text for part in parts if part.kind == "arguments")))
    assert found[0] == found[1]
    return found[0]


def wide_tool(number: int) -> Schema:
    """Returns a schema as of an agent's tools: ten parameters that are described at length, and shared definitions."""
    kinds = ("string", "integer", "boolean", "number")
    properties: Schema = {f"p{i}": {"type": kinds[i % 4], "description": "x" * 80} for i in range(10)}
    properties |= {f"d{i}": {"$ref": f"#/$defs/D{i}", "title": f"Own {number}"} for i in range(8)}
    filled = {f"q{i}": {"type": "string", "description": "y" * 60} for i in range(8)}
    shared = {f"D{i}": {"type": "object", "description": "z" * 100, "properties": filled} for i in range(8)}
    return {"type": "object", "properties": properties, "required": ["p0"], "$defs": shared}


@pytest.mark.parametrize("name", OF_PARAMETERS)
@pytest.mark.parametrize("required", [False, True])
def test_grammars_of_a_hundred_tools_stay_short(name: str, required: bool) -> None:
    of = grammars(True)
    tools = {f"server__tool_{i}": wide_tool(i) for i in range(100)}
    lark = call_grammar(FORMS[name], Calls(tools, required=required), of.tokenizer.unit_of)
    grammar = behind_reasoning(lark, None, False)
    assert len(grammar.text) < 140_000
    assert "xxx" not in grammar.text


def test_annotations_are_left_out_but_nothing_that_bears_their_name() -> None:
    told = {"title": "T", "description": "D", "default": 1, "examples": [1], "$comment": "C"}
    kept: Schema = {
        "type": "object",
        "properties": {"title": {"type": "string"}, "default": {"enum": [{"title": "x"}]}},
        "items": [{"const": {"description": "x"}}],
    }
    properties = {key: value | told for key, value in kept["properties"].items()}
    given = told | kept | {"properties": properties, "items": [kept["items"][0] | told]}
    assert without_annotations(given) == kept


# Texts among other types, and what a model writes for them: in tags, texts stand bare.
OPTIONAL: dict[str, Schema] = {
    "anyOf": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "types": {"type": ["string", "integer"]},
    "anything": {},
    "choices": {"anyOf": [{"enum": ["hi", "ho"]}, {"type": "null"}]},
}


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize("kind", OPTIONAL)
@pytest.mark.parametrize("required", [False, True])
def test_texts_among_other_types_stand_bare_in_tags(name: str, kind: str, required: bool) -> None:
    of, schema = grammars(True), {"type": "object", "properties": {"q": OPTIONAL[kind]}}
    lark = lark_of(name, schema, required=required)
    other: tuple[str, Any] = ("5", 5) if kind in ("types", "anything") else ("null", None)
    for text, value in (("hi", "hi"), ('"hi"', "hi"), other):
        call = call_of(name, q=text)
        assert of.allows(lark, call), text
        assert read(name, schema, call) == {"q": value}
    assert of.allows(lark, call_of(name, q="hey")) == (kind != "choices")


@pytest.mark.parametrize("name", TAGGED)
def test_optional_texts_of_strict_tools_stand_bare_in_tags(name: str) -> None:
    of = grammars(True)
    unlimited: Schema = {}
    for limits in (unlimited, {"maxLength": 2}):
        schema = {"type": "object", "properties": {"q": {"type": ["string", "null"], **limits}}, "required": ["q"]}
        lark = lark_of(name, schema, strict=frozenset({"f"}))
        assert of.allows(lark, call_of(name, q="hi"))
        assert of.allows(lark, call_of(name, q="null"))
        assert of.allows(lark, call_of(name, q="hello")) == (not limits)


Q: Schema = {"q": {"type": "string"}}
# Schemas whose root doesn't name the parameter q.
ODD: dict[str, Schema] = {
    "anything": {"type": "object"},
    "additionalProperties": {"type": "object", "additionalProperties": {"type": "string"}},
    "patternProperties": {"type": "object", "patternProperties": {"^q": {"type": "string"}}},
    "$ref": {"$ref": "#/definitions/X", "definitions": {"X": {"properties": Q, "required": ["q"]}}},
    "allOf": {"allOf": [{"properties": Q}, {"required": ["q"]}]},
    "anyOf": {"anyOf": [{"properties": Q, "required": ["q"]}, {"properties": {"z": {"type": "integer"}}}]},
}


@pytest.mark.parametrize("name", OF_PARAMETERS)
@pytest.mark.parametrize("kind", ODD)
def test_parameters_that_the_root_does_not_name_can_be_given(name: str, kind: str) -> None:
    of, call = grammars(True), call_of(name, q="hi")
    for required in (False, True):
        lark = lark_of(name, ODD[kind], required=required)
        assert of.allows(lark, call), required
        if required:
            assert of.allows(lark, call_of(name)) == (kind not in ("$ref", "allOf")), "what must be given is given"
    assert read(name, ODD[kind], call) == {"q": "hi"}
    if kind in ("additionalProperties", "$ref", "allOf", "anyOf") and name in TAGGED:
        assert read(name, ODD[kind], call_of(name, q="12")) == {"q": "12"}, "its type is known"


@pytest.mark.parametrize("name", OF_PARAMETERS)
def test_a_tool_without_parameters_gets_none(name: str) -> None:
    lark = lark_of(name, {"type": "object", "properties": {}}, required=True)
    assert grammars(True).allows(lark, call_of(name))
    assert not grammars(True).allows(lark, call_of(name, q="hi"))


# Limits of texts, with texts that hold to them and texts that don't.
LIMITS: list[tuple[Schema, list[str], list[str]]] = [
    ({"pattern": "^[0-9]+$"}, ["12"], ["xy", "1x", "x1"]),
    ({"pattern": "[0-9]"}, ["1", "x1\ny"], ["xy"]),
    ({"pattern": "^(a|b)/"}, ["a/", "b/c"], ["/", "xa/"]),
    ({"pattern": r"^\$[$^]"}, ["$$", "$^ "], ["$", "x$$"]),
    ({"minLength": 3}, ["xyz", "äöü"], ["xy"]),
    ({"maxLength": 2}, ["", "xy", "äö"], ["xyz"]),
    ({"minLength": 1, "maxLength": 10_000}, ["a <b>\n</b>"], [""]),
    ({"minLength": 3, "maxLength": 5}, ["xyz", "<b>xy"], ["xy"]),
    ({"pattern": "^/", "maxLength": 1_000}, ["/" + "x y\n" * 100], ["x", "/" * 1_001]),
    ({"minLength": 500}, ["x" * 500], ["x" * 490]),
    ({"minLength": 1, "pattern": "^[a-z]*$"}, ["xy"], ["", "12"]),
    ({"format": "date"}, ["2026-02-28", "2026-12-31"], ["xy", "2026-02-30", "2026-13-01"]),
    ({"format": "date-time"}, ["2026-02-28T12:30:00Z", "2026-02-28T12:30:00.5+02:00"], ["2026-02-28"]),
    ({"format": "uuid"}, ["01234567-89ab-cdef-0123-456789abcdef"], ["0123"]),
    ({"format": "email"}, ["ann.lee@example.org"], ["ann", "@example.org"]),
    ({"format": "hostname"}, ["localhost", "a-b.example.org"], ["-a", "a..b", ""]),
    ({"format": "ipv4"}, ["127.0.0.1", "255.255.255.0"], ["1.2.3", "256.0.0.1"]),
    ({"format": "uri"}, ["https://example.org:80/a/b?c=d&e#f", "s3://x/%20"], ["/a", "http://", "http://a b"]),
]


@pytest.mark.parametrize("name", TAGGED)
def test_texts_of_strict_tools_hold_to_their_limits(name: str) -> None:
    of = grammars(True)
    for limits, good, bad in LIMITS:
        text = {"type": "string", **limits}
        for part in (text, {"$ref": "#/$defs/T"}, {"anyOf": [text, {"type": "null"}]}):
            schema = {"type": "object", "properties": {"q": part}, "required": ["q"], "$defs": {"T": text}}
            lark = lark_of(name, schema, strict=frozenset({"f"}))
            for value in good:
                call = as_texts(call_of(name, q=value), "q")
                assert of.allows(lark, call), (part, value)
                assert read(name, schema, call)
            for value in bad:
                call = as_texts(call_of(name, q=value), "q")
                told, is_whole = of.follow(lark, of.backend.encode(call).ids)
                before_end = call[: call.rindex("</", 0, call.rindex("</"))]
                assert not is_whole
                assert told <= len(of.backend.encode(before_end).ids), (part, value)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"q": {"type": "string", "pattern": "^a|b$"}}}, "pattern '^a|b$'"),
        ({"properties": {"q": {"type": "string", "pattern": "(?=a)b"}}}, "pattern '(?=a)b'"),
        ({"properties": {"q": {"type": "string", "pattern": "(^a|b)"}}}, "pattern '(^a|b)'"),
        ({"properties": {"q": {"type": "string", "format": "iri"}}}, "format 'iri'"),
        ({"properties": {"q": {"anyOf": [{"type": "string", "minLength": 1}, {"type": "string"}]}}}, "alternatives"),
        ({"properties": {**Q, **{"z": {}}}, "anyOf": [{"required": ["q"]}, {"required": ["z"]}]}, "have anyOf"),
        ({"properties": Q, "minProperties": 1}, "have minProperties"),
        ({"properties": Q, "required": ["z"]}, "have required"),
    ],
)
def test_what_calls_in_tags_cannot_hold_to_is_refused_of_strict_tools(schema: Schema, words: str) -> None:
    for name in TAGGED:
        lark_of(name, schema, required=True)
        with pytest.raises(InvalidRequest, match=rf"{re.escape(words)}.* strict: false"):
            lark_of(name, schema, strict=frozenset({"f"}))


@pytest.mark.parametrize(
    ("schema", "is_text", "text", "value"),
    [
        ({"type": "integer"}, True, "5", "5"),
        ({"type": "string"}, True, ' "5"\n', ' "5"\n'),
        ({"type": ["string", "integer"]}, True, "5", "5"),
        ({"type": ["string", "integer"]}, False, "5", 5),
        ({"type": "string"}, False, '"a"', "a"),
        ({"type": "string"}, False, "5", "5"),
        ({"description": "unknown"}, False, "[5]", [5]),
        ({"type": "boolean"}, False, "True", True),
        ({"type": "integer"}, False, "many", "many"),
    ],
)
def test_deepseeks_tags_say_whether_a_value_is_a_text(schema: Any, is_text: bool, text: str, value: object) -> None:
    call = call_of("deepseek_v4", q="0").replace('"false">0', f'"{str(is_text).lower()}">{text}')
    assert read("deepseek_v4", {"type": "object", "properties": {"q": schema}}, call) == {"q": value}


def test_deepseeks_tags_say_what_the_schema_says() -> None:
    of, strict = grammars(True), frozenset({"f"})
    for schema, text, others in (
        ({"type": "string"}, '"true">5', ['"false">5', '"maybe">5', ">5"]),
        ({"type": "integer"}, '"false">5', ['"true">5', '"false">x']),
        ({"type": ["string", "integer"], "maxLength": 2}, '"true">xy', ['"true">xyz', '"false">1.5']),
        ({"enum": ["C", 5]}, '"true">C', ['"true">5', '"true">F', '"false">6']),
    ):
        lark = lark_of("deepseek_v4", {"type": "object", "properties": {"q": schema}, "required": ["q"]}, strict=strict)
        call = call_of("deepseek_v4", q="0")
        assert of.allows(lark, "I look.\n\n" + call.replace('"false">0', text)), schema
        for other in others:
            assert not of.allows(lark, call.replace('"false">0', other)), (schema, other)


PLACE: Schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
LOOSE: dict[str, tuple[Schema, str, Any]] = {  # a parameter in words that few know, a value in tags, and what it is
    "Python's types": ({"type": "float"}, "1.5", 1.5),
    "Python's text": ({"type": "str"}, "12", "12"),
    "Gemini's types": ({"type": "ARRAY", "items": {"type": "STRING"}}, '["a"]', ["a"]),
    "an unknown type": ({"type": "any", "description": "of all kinds"}, '{"a": 1}', {"a": 1}),
    "an unknown type among others": ({"type": ["integer", "file"]}, "a b", "a b"),
    "limits as texts": ({"type": "integer", "minimum": "0", "maxLength": None}, "3", 3),
    "no choice": ({"type": "integer", "enum": []}, "3", 3),
    "a missing definition": ({"type": "array", "items": {"$ref": "#/components/schemas/X"}}, "[{}]", [{}]),
    "properties in a list": ({"type": "dict", "properties": []}, "{}", {}),
}


def test_tools_that_are_not_strict_may_be_described_in_other_words() -> None:
    given = {"type": "object", "properties": {f"x{number}": one for number, (one, *_) in enumerate(LOOSE.values())}}
    values = {f"x{number}": value for number, (_, value, _) in enumerate(LOOSE.values())}
    told = {f"x{number}": value for number, (*_, value) in enumerate(LOOSE.values())}
    schema = standard(given, is_strict=False)
    for name in TAGGED:
        call = as_texts(call_of(name, **values), "x1")
        assert grammars(True).allows(lark_of(name, schema), call), name
        assert read(name, schema, call) == told
    for name in ("hermes", *OF_PARAMETERS):
        grammars(True).compiler.compile(lark_of(name, schema, required=True))


def test_references_into_any_part_of_a_tools_schema_are_followed() -> None:
    given = {
        "type": "object",
        "properties": {
            "at": PLACE,
            "by": {"$ref": "#/properties/at"},
            "all": {"type": "array", "items": {"$ref": "#/properties/at"}},
            "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
            "a/b~": {"type": "integer"},
            "n": {"$ref": "#/properties/a~1b~0"},
            "type": {"$ref": "#/$defs/Kind"},
        },
        "$defs": {"Kind": {"enum": ["a", "b"]}},
    }
    values = {
        "by": '{"city": "x"}', "all": '[{"city": "x"}]', "next": '{"by": {"city": "x"}, "next": null}', "n": "3",
        "type": "a",
    }  # fmt: skip
    for is_strict in (False, True):
        schema, strict = standard(given, is_strict), frozenset({"f"} if is_strict else ())
        for name in TAGGED:
            assert grammars(True).allows(lark_of(name, schema, strict=strict), call_of(name, **values)), name
            told = {**{key: json.loads(values[key]) for key in ("by", "all", "next", "n")}, "type": "a"}
            assert read(name, schema, call_of(name, **values)) == told
            wrong = call_of(name, by='{"town": "x"}')
            assert not grammars(True).allows(lark_of(name, schema, strict=strict), wrong), name


def test_words_of_strict_tools_are_kept_and_references_are_not_followed_without_end() -> None:
    given = {"type": "OBJECT", "properties": {"x": {"type": "float", "minimum": "0", "$ref": "#/no"}}}
    assert standard(given, is_strict=True) == given
    deep: Schema = {}
    for _ in range(150):
        deep = {"type": "object", "properties": {"a": deep}}
    places = ["#" + "/properties/a" * depth for depth in range(150)]
    many = {**deep, "anyOf": [{"$ref": place} for place in places]}
    with pytest.raises(InvalidRequest, match=r"lead to more than 10000 schemas: define these in \$defs"):
        standard(many, is_strict=False)
