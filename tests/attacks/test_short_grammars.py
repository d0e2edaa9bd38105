"""Grammars of some characters that would take minutes and gigabytes, if nothing held them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from jaxsgl.errors import InvalidRequest
from jaxsgl.requests.grammar import Kind
from jaxsgl.sandbox import Limits, Sandbox
from tests.attacks.compiling import request

LIMITS = Limits(memory_bytes=128 << 20, cpu_s=5.0, time_s=60.0)
MOST_MS = 100.0  # of a mask; they take 5 at most, and processor time is measured


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    one = Sandbox("tests.attacks.compiling:make")
    yield one
    one.close()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("lark", "start: /a+/ /a+/"),
        ("regex", "(((a{1000}){1000}){1000}){1000}"),
        ("regex", "a{100000000}"),
        ("regex", "a{1000000}"),
        ("ebnf", 'root ::= x{1000000}\nx ::= "a"{1000000}'),
        ("lark", 'start: x{1000000}\nx: "a"{1000000}'),
        ("lark", "start: /(((a{1000}){1000}){1000}){1000}/"),
        ("json_schema", json.dumps({"type": "string", "pattern": "^((a{100}){100}){100}$"})),
        ("json_schema", json.dumps({"type": "array", "minItems": 10**6, "items": {"const": "a" * 99}})),
        ("structural_tag", json.dumps({"format": {"type": "regex", "pattern": "((a{1000}){1000}){1000}"}})),
        ("structural_tag", json.dumps({"format": {"type": "grammar", "grammar": "start: /a+/ /a+/"}})),
    ],
)
def test_bytes_that_a_grammar_forces_are_never_computed_whole(sandbox: Sandbox, kind: Kind, text: str) -> None:
    """Each mask allows the next token alone, at once, however many bytes are known to follow it."""
    try:
        compile_ms, mask_ms = json.loads(sandbox.call(request(kind, text), LIMITS))
    except InvalidRequest:
        return  # at the limits of llguidance's work, within those of the sandbox
    assert compile_ms < 1000 and mask_ms < MOST_MS


def patterns(count: int) -> list[dict[str, str]]:
    """Schemas of texts that 2^n states follow together."""
    return [{"type": "string", "pattern": f"^[ab]*{'ab'[i % 2]}[ab]{{{i}}}$"} for i in range(count)]


MANY = patterns(30)
OF_PROPERTY = [{"type": "object", "properties": {"a": part}} for part in MANY]
NESTED: dict[str, object] = {"allOf": [{"allOf": MANY[i : i + 3]} for i in range(0, 30, 3)]}
REFERRED = {"$defs": {"p": {"allOf": MANY[:6]}}, "allOf": [{"$ref": "#/$defs/p"}, {"$ref": "#/$defs/p"}]}
CHAINED = {
    "$defs": {f"p{i}": MANY[i] | {"$ref": f"#/$defs/p{i + 1}"} for i in range(29)} | {"p29": MANY[29]},
    "$ref": "#/$defs/p0",
}


@pytest.mark.parametrize(
    "schema",
    [{"allOf": MANY}, {"allOf": OF_PROPERTY}, NESTED, REFERRED, CHAINED, {"items": {"allOf": MANY}}],
    ids=["allOf", "of a property", "nested", "referred", "chained", "items"],
)
def test_more_than_eight_patterns_that_meet_are_refused_before_they_are_compiled(
    sandbox: Sandbox, schema: dict[str, object]
) -> None:
    with pytest.raises(InvalidRequest, match=r"\d+ patterns.* meet in one allOf, but 8 are the most"):
        sandbox.call(request("json_schema", json.dumps(schema)), LIMITS)
    with pytest.raises(InvalidRequest, match="meet in one allOf"):
        sandbox.call(request("lark", f"start: %json {json.dumps(schema)}"), LIMITS)


def test_schemas_whose_patterns_do_not_meet_are_compiled(sandbox: Sandbox) -> None:
    of_each = [{"type": "object", "properties": {f"p{i}": part}} for i, part in enumerate(MANY)]
    recursive = {"type": "object", "properties": {"next": {"$ref": "#"}, "id": MANY[0]}}
    for schema in ({"allOf": of_each}, {"anyOf": MANY}, recursive):
        assert json.loads(sandbox.call(request("json_schema", json.dumps(schema)), LIMITS))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("start: A\nA: /x./ & /.y/", "the operator & "),
        ("start: A\nA: /x./ & ~/.y/", "the operator & "),
        ("start: A\nA: ~/x/", "the operator ~ "),
        ("start: A\nA: (~ /x/)~2", "the operator ~ "),
        ('start: A\nA: /x\n"/ & ~/y/ & /"/', "the operator & "),
        ('start: <"> (/x/ & /y/) <">', "the operator & "),
        ('%llguidance {"no_forcing": false}\nstart: /a+/ /a+/', "%llguidance"),
        ('start: "a"\n  %llguidance {}', "%llguidance"),
        ('%llguidance {}\n%llguidance {}\nstart: "a"', "%llguidance"),
    ],
)
def test_operators_that_take_two_to_the_power_of_their_number_and_directives_are_refused(
    sandbox: Sandbox, text: str, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        sandbox.call(request("lark", text), LIMITS)
    tag = {"format": {"type": "grammar", "grammar": text}}
    with pytest.raises(InvalidRequest, match=words):
        sandbox.call(request("structural_tag", json.dumps(tag)), LIMITS)


@pytest.mark.parametrize(
    "text",
    [
        'start: "a & b" // & in a comment, and %llguidance',
        'start: /a&~b/ # ~ "',
        'start: "%llguidance" A\nA: "x" ~ 2..3',
        'start: %json {"const": "a & ~b %llguidance"}',
        'start: "\\"&" /\\/&/',
        '%llguidance {}\nstart: "a"',
    ],
)
def test_the_same_characters_in_texts_patterns_and_comments_are_fine(sandbox: Sandbox, text: str) -> None:
    assert json.loads(sandbox.call(request("lark", text), LIMITS))
