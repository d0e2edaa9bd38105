"""Which grammar a body asks for: OpenAI's `response_format`, and what vLLM and SGLang call their fields.

    OpenAI     response_format: text, json_object, json_schema; SGLang's and xgrammar's structural_tag
    vLLM       structured_outputs: {json, regex, choice, grammar, json_object, structural_tag}; guided_json,
               guided_regex, guided_choice, guided_grammar in its older versions; guided_whitespace_pattern of JSON
    SGLang     json_schema, regex, ebnf, structural_tag

A field that is null asks for nothing, and so does a json_object that is false; one that is empty is refused, but for a
schema {} (any JSON). A body may ask for one grammar. The routes of both APIs call `grammar_of`. Never knows whether a
grammar means something.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, Field
from pydantic_core import from_json

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.http.bodies import Body, one_error
from jaxsgl.requests.grammar import MAX_CHOICES, MAX_GRAMMAR_CHARS, Grammar

GrammarText = Annotated[str, Field(max_length=MAX_GRAMMAR_CHARS)]
Schema = Annotated[
    GrammarText | bool | dict[str, Any], one_error("must be a JSON schema: an object, true or false, or its text")
]
Tag = Annotated[GrammarText | dict[str, Any], one_error("must be an object, or its text")]
Choices = Annotated[list[str], Field(max_length=MAX_CHOICES, fail_fast=True)]


class JsonSchemaFormat(Body):
    """OpenAI's `json_schema`. Output is always held to the schema, `strict` or not."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's response_format: `text`, `json_object`, `json_schema`, or `structural_tag` with the tag's own fields."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema_: Annotated[
        Schema | None, Field(alias="schema", description="in place of json_schema, as in SGLang and llama.cpp")
    ] = None


class StructuredOutputs(Body):
    """vLLM's structured_outputs; one of its grammars."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: Annotated[GrammarText, Field(description="GBNF, or Lark's form")] | None = None
    json_object: bool | None = None
    structural_tag: Tag | None = None
    whitespace_pattern: Annotated[GrammarText, Field(description="what may stand between JSON's tokens")] | None = None
    disable_any_whitespace: Annotated[bool, Field(description="true: nothing may")] | None = None


class Constrained(Body):
    """The fields of completions and chat that ask for a grammar."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Annotated[Schema, Field(description="vLLM's; as structured_outputs.json")] | None = None
    guided_regex: Annotated[GrammarText, Field(description="vLLM's; as structured_outputs.regex")] | None = None
    guided_choice: Annotated[Choices, Field(description="vLLM's; as structured_outputs.choice")] | None = None
    guided_grammar: Annotated[GrammarText, Field(description="vLLM's; as structured_outputs.grammar")] | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: Annotated[GrammarText, Field(description="vLLM's; of JSON")] | None = None
    json_schema: Annotated[Schema, Field(description="SGLang's")] | None = None
    regex: Annotated[GrammarText, Field(description="SGLang's")] | None = None
    ebnf: Annotated[GrammarText, Field(description="SGLang's: GBNF, or Lark's form")] | None = None
    structural_tag: Annotated[Tag, Field(description="SGLang's")] | None = None


def grammar_of(body: BaseModel) -> Grammar | None:
    """Returns the grammar that `body` asks for, or None if its output is free.

    Raises `InvalidRequest` for several, and for one that is empty.
    """
    found: dict[str, Grammar] = {}
    _add(found, "", body)
    outputs = getattr(body, "structured_outputs", None)
    if outputs is not None:
        _add(found, "structured_outputs.", outputs)
    response_format = getattr(body, "response_format", None)
    if response_format is not None and (grammar := _of_response_format(response_format)) is not None:
        found["response_format"] = grammar
    if len(set(found.values())) > 1:  # the same one under names old and new is one
        raise InvalidRequest(f"{' and '.join(found)} each ask for a grammar, but an output has one: send one of them")
    if not found and outputs is not None:
        names = [field.alias or name for name, field in StructuredOutputs.model_fields.items() if name in _MAKERS]
        given = f"{', '.join(outputs.model_extra):.200}, but " if outputs.model_extra else ""
        raise InvalidRequest(f"structured_outputs has {given}no grammar: send one of {', '.join(names)}")
    grammar = next(iter(found.values()), None)
    guidance: dict[str, Any] = {}
    pattern = getattr(body, "guided_whitespace_pattern", None) or getattr(outputs, "whitespace_pattern", None)
    if pattern:
        guidance["whitespace_pattern"] = pattern
    if getattr(outputs, "disable_any_whitespace", None):
        guidance = {"whitespace_flexible": False, "whitespace_pattern": None}  # the default pattern would win
    return _guided(grammar, guidance) if grammar is not None and guidance else grammar


# Field -> its grammar.
_MAKERS: dict[str, Callable[[Any], Grammar]] = {
    "guided_json": Grammar.json_schema,
    "guided_regex": Grammar.regex,
    "guided_choice": Grammar.choice,
    "guided_grammar": Grammar.ebnf,
    "guided_json_object": lambda _: Grammar.json_object(),
    "json_schema": Grammar.json_schema,
    "json_": Grammar.json_schema,
    "json_object": lambda _: Grammar.json_object(),
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.ebnf,
    "ebnf": Grammar.ebnf,
    "structural_tag": Grammar.structural_tag,
}


def _add(found: dict[str, Grammar], prefix: str, body: BaseModel) -> None:
    for name in type(body).model_fields:
        value = getattr(body, name)
        if name not in _MAKERS or value is None or (name.endswith("json_object") and not value):
            continue
        field = prefix + name.rstrip("_")
        try:
            found[field] = _MAKERS[name](value)
        except InvalidRequest as error:
            raise InvalidRequest(f"{field}: {error}") from None


def _guided(grammar: Grammar, guidance: dict[str, Any]) -> Grammar:
    """Returns `grammar` with llguidance's options for JSON, which a schema's own go before. Others have no blanks."""
    if grammar.kind not in ("json_object", "json_schema"):
        return grammar
    try:
        schema: Any = {"type": "object"} if grammar.kind == "json_object" else from_json(grammar.text)
    except ValueError:
        return grammar  # refused where it is compiled
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        return grammar
    own = schema.get("x-guidance")
    return Grammar.json_schema({**schema, "x-guidance": guidance | (own if isinstance(own, dict) else {})})


def _of_response_format(given: ResponseFormat) -> Grammar | None:
    if given.type == "text":
        return None
    if given.type == "json_object":
        return Grammar.json_object() if given.schema_ is None else Grammar.json_schema(given.schema_)
    if given.type == "json_schema":
        schema = given.schema_ if given.json_schema is None else given.json_schema.schema_
        if schema is None:
            raise InvalidRequest('response_format has no schema: send {"json_schema": {"name": ..., "schema": {...}}}')
        return Grammar.json_schema(schema)
    if given.type == "structural_tag":
        return Grammar.structural_tag(given.model_dump(by_alias=True, exclude_unset=True))
    raise InvalidRequest(
        f"response_format is of type {given.type:.100}, but must be text, json_object, json_schema or structural_tag"
    )
