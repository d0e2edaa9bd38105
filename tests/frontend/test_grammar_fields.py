"""Which grammar a call asks for, by the fields of OpenAI, vLLM, SGLang and both gRPC services."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError
from sglang_calls import ask

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.grpc.jaxsgl import _sampling as sampling_of_ours
from jaxsgl.frontend.grpc.sglang.convert import options_of
from jaxsgl.frontend.http.grammars import grammar_of
from jaxsgl.frontend.http.openai.schemas import ChatRequest, CompletionRequest, sampling_of
from jaxsgl.frontend.http.sglang.schemas import SamplingBody
from jaxsgl.frontend.proto import jaxsgl_pb2
from jaxsgl.requests.grammar import KINDS, Grammar

pytestmark = pytest.mark.unit

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
FORMAT = {"format": {"type": "json_schema", "json_schema": SCHEMA}}
SPELLINGS: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, Grammar.json_schema(SCHEMA)),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, Grammar.json_schema(SCHEMA)),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
        Grammar.json_schema(SCHEMA),
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, Grammar.json_schema({})),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar.json_schema(SCHEMA)),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Grammar.json_schema(json.dumps(SCHEMA))),
    ({"structured_outputs": {"regex": "a+"}}, Grammar.regex("a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar.choice(["a", "b"])),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Grammar.ebnf('root ::= "a"')),
    ({"structured_outputs": {"json_object": True}}, Grammar.json_object()),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, Grammar.structural_tag(json.dumps(TAG))),
    ({"structured_outputs": None}, None),
    ({"guided_json": SCHEMA}, Grammar.json_schema(SCHEMA)),
    ({"guided_json": {}}, Grammar.json_schema({})),
    ({"guided_regex": "a+"}, Grammar.regex("a+")),
    ({"guided_choice": ["a", "b"]}, Grammar.choice(["a", "b"])),
    ({"guided_grammar": "start: /a/"}, Grammar.ebnf("start: /a/")),
    ({"guided_json_object": True}, Grammar.json_object()),
    ({"guided_json": None, "guided_regex": None, "guided_choice": None, "guided_json_object": False}, None),
    (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
        Grammar.json_schema(SCHEMA | {"x-guidance": {"whitespace_pattern": " ?"}}),
    ),
    (
        {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}},
        Grammar.json_schema(SCHEMA | {"x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None}}),
    ),
    (
        {"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}},
        Grammar.json_schema({"type": "object", "x-guidance": {"whitespace_pattern": " ?"}}),
    ),
    ({"guided_regex": "a+", "guided_whitespace_pattern": " ?"}, Grammar.regex("a+")),
    ({"guided_whitespace_pattern": " ?"}, None),
    ({"json_schema": json.dumps(SCHEMA)}, Grammar.json_schema(json.dumps(SCHEMA))),
    ({"regex": "a+"}, Grammar.regex("a+")),
    ({"ebnf": 'root ::= "a"'}, Grammar.ebnf('root ::= "a"')),
    ({"structural_tag": json.dumps(TAG)}, Grammar.structural_tag(json.dumps(TAG))),
    ({"guided_grammar": "start: /a/", "structured_outputs": {"grammar": "start: /a/"}}, Grammar.ebnf("start: /a/")),
]


@pytest.mark.parametrize(("fields", "grammar"), SPELLINGS)
def test_completions_and_chat_know_every_spelling(fields: dict[str, Any], grammar: Grammar | None) -> None:
    completion = CompletionRequest(prompt="a", **fields)
    chat = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}]} | fields)
    assert sampling_of(completion, 5, None).grammar == sampling_of(chat, 5, None).grammar == grammar


@pytest.mark.parametrize("tag", [TAG, FORMAT])
def test_a_response_format_is_a_structural_tag_of_either_form(tag: dict[str, Any]) -> None:
    grammar = grammar_of(
        CompletionRequest.model_validate({"prompt": "a", "response_format": {"type": "structural_tag", **tag}})
    )
    assert grammar is not None and grammar.kind == "structural_tag"
    assert json.loads(grammar.text) == {"type": "structural_tag", **tag}


@pytest.mark.parametrize(("fields", "grammar"), SPELLINGS[-5:-1])
def test_sglangs_generate_takes_its_own_fields(fields: dict[str, Any], grammar: Grammar) -> None:
    assert grammar_of(SamplingBody(**fields)) == grammar


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"guided_json": SCHEMA, "regex": "a"}, "guided_json and regex each ask for a grammar"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex and response_format each"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.regex and structured_outputs.ch"),
        ({"response_format": {"type": "json_schema"}}, "has no schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "has no schema"),
        ({"response_format": {"type": "xml"}}, "is of type xml, but must be text"),
        ({"response_format": {"type": "answer_grammar"}}, "is of type answer_grammar, but must be text"),
        ({"structured_outputs": {"answer_grammar": "start: /a/"}}, "has answer_grammar, but no grammar"),
        ({"structured_outputs": {"json_schema": SCHEMA}}, "has json_schema, but no grammar: send one of json, regex,"),
        ({"structured_outputs": {}}, "structured_outputs has no grammar: send one of json, regex,"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs has no grammar"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice: the choice has 0 texts"),
        ({"guided_choice": []}, "guided_choice: the choice has 0 texts"),
        ({"guided_json": ""}, "guided_json: the json_schema is empty"),
        ({"guided_regex": ""}, "guided_regex: the regex is empty"),
        ({"ebnf": " "}, "ebnf: the ebnf is empty"),
        ({"json_schema": False}, "json_schema: the json_schema is false, which no JSON meets"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": False}}},
            "is false, which no JSON meets",
        ),
    ],
)
def test_a_body_asks_for_one_grammar_and_for_a_whole_one(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        grammar_of(CompletionRequest(prompt="a", **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": "json"},
        {"response_format": {}},
        {"guided_json": 5},
        {"guided_choice": [1]},
        {"regex": ["a"]},
        {"structured_outputs": {"choice": "a"}},
    ],
)
def test_wrong_types_are_refused_by_the_schema(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CompletionRequest(prompt="a", **fields)


@pytest.mark.parametrize(
    ("field", "grammar"),
    [
        ({"regex": "a+"}, Grammar.regex("a+")),
        ({"json_schema": "{}"}, Grammar.json_schema("{}")),
        ({"ebnf_grammar": "root ::= 'a'"}, Grammar.ebnf("root ::= 'a'")),
        ({"structural_tag": json.dumps(TAG)}, Grammar.structural_tag(json.dumps(TAG))),
        ({}, None),
    ],
)
def test_sglangs_grpc_service_knows_its_constraints(field: dict[str, Any], grammar: Grammar | None) -> None:
    assert options_of(ask(1, **field)).sampling.grammar == grammar


@pytest.mark.parametrize(
    ("field", "grammar"),
    [
        ({"json_schema": "{}"}, Grammar.json_schema("{}")),
        ({"json_object": jaxsgl_pb2.JsonObject()}, Grammar.json_object()),
        ({"regex": "a+"}, Grammar.regex("a+")),
        ({"ebnf": 'root ::= "a"'}, Grammar.ebnf('root ::= "a"')),
        ({"lark": "start: /a/"}, Grammar.lark("start: /a/")),
        ({"choice": jaxsgl_pb2.Choice(texts=["a", "b"])}, Grammar.choice(["a", "b"])),
        ({"structural_tag": json.dumps(TAG)}, Grammar.structural_tag(json.dumps(TAG))),
    ],
)
def test_our_grpc_service_knows_every_kind(field: dict[str, Any], grammar: Grammar) -> None:
    assert sampling_of_ours(jaxsgl_pb2.SamplingParams(grammar=jaxsgl_pb2.Grammar(**field))).grammar == grammar


def test_the_servers_own_grammars_are_of_a_kind_that_no_client_can_send() -> None:
    """As they may have operators that a client's may not."""
    ours = {field.name for field in jaxsgl_pb2.Grammar.DESCRIPTOR.oneofs_by_name["kind"].fields}
    over_http = {grammar.kind for _, grammar in SPELLINGS if grammar is not None}
    assert ours == set(KINDS) - {"answer_grammar"} >= over_http


@pytest.mark.parametrize("field", [{}, {"regex": ""}, {"choice": jaxsgl_pb2.Choice()}])
def test_an_empty_grammar_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        sampling_of_ours(jaxsgl_pb2.SamplingParams(grammar=jaxsgl_pb2.Grammar(**field)))
