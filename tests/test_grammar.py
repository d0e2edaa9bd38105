"""`Grammar` as a value: what it refuses at first sight, and that it comes through the line between processes."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pydantic
import pytest

from jaxsgl.errors import InvalidRequest
from jaxsgl.requests.grammar import MAX_CHOICES, MAX_GRAMMAR_CHARS, Grammar
from jaxsgl.requests.request import SamplingParams


class City(pydantic.BaseModel):
    """An answer."""

    name: str
    inhabitants: int


def test_a_schema_is_given_as_text_as_an_object_or_as_a_pydantic_model() -> None:
    schema = {"type": "object", "properties": {"ä": {"const": 1}}}
    assert json.loads(Grammar.json_schema(schema).text) == schema
    assert Grammar.json_schema(schema) == Grammar.json_schema(Grammar.json_schema(schema).text)
    assert json.loads(Grammar.json_schema(City).text) == City.model_json_schema()
    assert Grammar.json_schema(True).text == "true"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Grammar("json", "{}"), "must be one of json_schema"),  # type: ignore[arg-type]
        (lambda: Grammar("regex", 5), "must be a text"),  # type: ignore[arg-type]
        (lambda: Grammar.regex(""), "the regex is empty"),
        (lambda: Grammar.json_schema("  "), "the json_schema is empty"),
        (lambda: Grammar.ebnf("a" * (MAX_GRAMMAR_CHARS + 1)), f"{MAX_GRAMMAR_CHARS} are the most"),
        (lambda: Grammar.lark("\ud800"), "half a surrogate pair at character 0"),
        (lambda: Grammar.json_schema({"const": float("nan")}), "not JSON"),
        (lambda: Grammar.json_schema({"const": object()}), "not JSON"),
        (lambda: Grammar.choice([]), f"1 to {MAX_CHOICES}"),
        (lambda: Grammar.choice(["a"] * (MAX_CHOICES + 1)), f"1 to {MAX_CHOICES}"),
        (lambda: Grammar.choice("abc"), "must be a list of texts"),
        (lambda: SamplingParams(grammar="a+"), "must be a jaxsgl.Grammar"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_grammar_at_first_sight_is_refused(make: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        make()


def test_a_grammar_travels_with_its_sampling_parameters() -> None:
    params = SamplingParams(grammar=Grammar.choice(["yes", "nö"]))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
