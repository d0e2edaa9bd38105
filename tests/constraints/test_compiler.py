"""Grammars of all kinds, compiled for the bundled tokenizer: which texts they allow, and which grammars are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer

from jaxsgl.config.engine import BUNDLED_MODEL
from jaxsgl.constraints.compiler import Compiler, LlMatcher
from jaxsgl.errors import InvalidRequest, RequestFailed
from jaxsgl.requests.grammar import Grammar
from jaxsgl.scheduler.grammars.constraint import Constraint

VOCAB = 1100  # the tokenizer has 1,024 tokens: the model's vocabulary is padded
EOS = (1021, 1023)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TIGHT = {"x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None}}  # as disable_any_whitespace asks
JSON = {"type": "json_schema", "json_schema": SCHEMA}
TAGS: dict[str, Any] = {
    "structures": [
        {"begin": "<f=x>", "schema": SCHEMA, "end": "</f>"},
        {"begin": "<f=y>", "schema": {"type": "integer"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(Path(BUNDLED_MODEL), VOCAB, EOS)


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(str(Path(BUNDLED_MODEL) / "tokenizer.json"))


def tag(begin: str, end: str | list[str] = "</t>", content: Any = JSON) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def formatted(element: dict[str, Any]) -> Grammar:
    return Grammar.structural_tag({"type": "structural_tag", "format": element})


def mask_of(matcher: LlMatcher, vocab: int = VOCAB) -> list[int]:
    words = np.zeros(-(-vocab // 32), dtype=np.uint32)
    matcher.mask_into(words)
    found: list[int] = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
    return found


def read(compiler: Compiler, tokenizer: LLTokenizer, grammar: Grammar, text: str) -> str:
    """What the grammar says of `text`: "whole" (and nothing may follow), "complete", "begun" or "refused"."""
    matcher = compiler.compile(grammar)
    for token_id in tokenizer.tokenize_str(text, parse_special=True):
        if matcher.ended or token_id not in mask_of(matcher):
            return "refused"
        matcher.advance(token_id)
    return "whole" if matcher.ended else "complete" if matcher.accepts else "begun"


ANY: dict[str, Any] = {"type": "any_text"}
NAMED_FORMAT: dict[str, Any] = {"type": "object", "properties": {"format": {"const": {"format": "x"}}}}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


TRIGGERED = {
    "type": "triggered_tags",
    "triggers": ["<t"],
    "tags": [tag("<t>"), tag("<tx>", "</t>", ANY)],
}
SEPARATED = {"type": "tags_with_separator", "tags": [tag("<t>")], "separator": ","}
THINKING = sequence(ANY, const("</think>"), JSON)


@pytest.mark.parametrize(
    ("grammar", "text", "says"),
    [
        (Grammar.json_schema(SCHEMA), '{"a": 12}', "whole"),
        (Grammar.json_schema(SCHEMA), '{"a": 1', "begun"),
        (Grammar.json_schema(SCHEMA), '{"b": 1}', "refused"),
        (Grammar.json_schema(SCHEMA), '{"a": 1} ', "refused"),
        (Grammar.json_schema(True), "[1, null]", "whole"),
        (Grammar.json_schema({"type": "string", "format": "uuid"}), '"x"', "refused"),
        (Grammar.json_schema({"type": "string", "format": "uuid4"}), '"x"', "whole"),
        (Grammar.json_schema(NAMED_FORMAT), '{"format": {"format":"y', "refused"),
        (Grammar.json_schema(NAMED_FORMAT), '{"format": {"format":"x"}}', "whole"),
        (Grammar.json_object(), '{"x": [1, null]}', "whole"),
        (Grammar.json_object(), "[1]", "refused"),
        (Grammar.json_object(), "{" + " " * 32 + '"', "begun"),
        (Grammar.json_object(), "{" + " " * 33 + '"', "refused"),
        (Grammar.json_schema(SCHEMA | {"x-guidance": {"whitespace_pattern": " ?"}}), '{ "a":  1}', "refused"),
        (Grammar.json_schema(SCHEMA | {"x-guidance": {"whitespace_pattern": " ?"}}), '{ "a": 1 }', "whole"),
        (Grammar.json_schema(SCHEMA | TIGHT), '{"a":1}', "whole"),
        (Grammar.json_schema(SCHEMA | TIGHT), '{"a": 1}', "refused"),
        (Grammar.json_schema(SCHEMA | {"x-guidance": {"whitespace_flexible": False}}), '{"a": 1}', "refused"),
        (Grammar.regex("[0-9]{2}/x+"), "12/xx", "complete"),
        (Grammar.regex("a|b"), "b", "whole"),
        (Grammar.regex(r"\d\w[\s\d]\D"), "1a x", "whole"),
        (Grammar.regex(r"\d"), "٧", "refused"),
        (Grammar.regex(r"\w"), "é", "refused"),
        (Grammar.regex(r"[\w.-]+@\W"), "a.b-c@é", "whole"),
        (Grammar.regex(r"\p{Nd}"), "٧", "whole"),
        (Grammar.ebnf(r'start: "\\d" /\d \# \s \/ \d/x'), "\\d1# /2", "whole"),
        (Grammar.lark(r"start: /\d/"), "٧", "refused"),
        (Grammar.ebnf('root ::= "a" rest\nrest ::= [0-9]+'), "a12", "complete"),
        (Grammar.ebnf('start: "a" /[0-9]+/'), "a12", "complete"),
        (Grammar.ebnf(r'root ::= "\u0041bcd" [\u0061-\U0000007a]'), "Abcdz", "whole"),
        (Grammar.ebnf(r'root ::= "caf\u00e9de" [^\u0000-\u001f"]'), "caféde ", "whole"),
        (Grammar.ebnf(r'root ::= "\\u0041\u0022"'), r"\u0041" + '"', "whole"),
        (Grammar.ebnf(r'root ::= "\[" [a\-z]+ "\]"'), "[a-]", "whole"),
        (Grammar.ebnf('root ::= "a\tb\nc"'), "a\tb\nc", "whole"),
        (Grammar.ebnf("root ::= 'it\\'s \"x\"'"), 'it\'s "x"', "whole"),
        (Grammar.ebnf('# start: here\nroot ::= start\nstart ::= "x" | "y" start'), "yyx", "whole"),
        (Grammar.ebnf('root ::= a-b a_b X x\na-b ::= "1"\na_b ::= "2"\nx ::= "3"\nX ::= "4"'), "1243", "whole"),
        (Grammar.ebnf('Root ::= "a"\nroot ::= Root'), "a", "whole"),
        (Grammar.ebnf('root ::= "a" # one\n  # two\n  | "b"\n    "c"\n\nx ::= "d"'), "bc", "whole"),
        (Grammar.ebnf('root ::= "x" |\n"start: y"'), "start: y", "whole"),
        (Grammar.ebnf('?start: one\none: "1" | one "+" one'), "1+1", "complete"),
        (Grammar.ebnf('// root\n!start: "a ::= b"'), "a ::= b", "whole"),
        (Grammar.lark('start: <|im_start|> "a"'), "<|im_start|>a", "whole"),
        (Grammar("answer_grammar", "start: A\nA: /[ab]{2}/ & ~/.b/"), "ba", "whole"),
        (Grammar("answer_grammar", "start: A\nA: /[ab]{2}/ & ~/.b/"), "ab", "refused"),
        (Grammar.choice(["yes", 'né "x"\n']), 'né "x"\n', "whole"),
        (Grammar.choice(["a", "ab"]), "a", "complete"),
        (Grammar.choice(["a", "ab"]), "ab", "whole"),
        (Grammar.choice(["", "a"]), "", "complete"),
        (Grammar.structural_tag(TAGS), "a < b <f", "complete"),
        (Grammar.structural_tag(TAGS), 'so <f=x>{"a":1}</f> and <f=y>3</f>!', "complete"),
        (Grammar.structural_tag(TAGS), "<f=y>3", "begun"),
        (Grammar.structural_tag(TAGS), "<f=z>", "refused"),
        (Grammar.structural_tag(TAGS), "<f=y>x", "refused"),
        (formatted(const("ab")), "ab", "whole"),
        (formatted({"type": "regex", "pattern": "a/b"}), "a/b", "whole"),
        (formatted({"type": "regex", "pattern": r"\d"}), "٧", "refused"),
        (formatted({"type": "grammar", "grammar": 'root ::= "a" b\nb ::= "b"+'}), "abb", "complete"),
        (formatted(ANY), "a\nb", "complete"),
        (formatted(THINKING), 'hm\n so</think>{"a":3}', "whole"),
        (formatted(THINKING), "hm</think>no", "refused"),
        (formatted({"type": "or", "elements": [JSON, const("no")]}), "no", "whole"),
        (formatted(tag("<think>", "</think>", ANY)), "<think>a < b</think>", "whole"),
        (formatted({"type": "star", "content": JSON}), '{"a":1}{"a":2}', "complete"),
        (formatted(TRIGGERED), 'hey <t>{"a":1}</t> ho <tx>foo</t>', "complete"),
        (formatted(TRIGGERED | {"at_least_one": True}), "hey", "begun"),
        (formatted(TRIGGERED | {"at_least_one": True, "stop_after_first": True}), 'hey <t>{"a":1}</t>', "whole"),
        (formatted(tag("<o>", "</o>", sequence(const("x:"), ANY))), "<o>x:a < b</o>", "whole"),
        (formatted(tag("<o>", "<|im_start|>", sequence(const("x:"), ANY))), "<o>x:a<|im_start|>", "whole"),
        (formatted(tag("<o>", ["</o>", "</p>"], sequence(const("x:"), ANY))), "<o>x:a</p>", "whole"),
        (formatted(tag("<o>", "</o>", TRIGGERED)), '<o>a <t>{"a":1}</t> <tx>b</t></o>', "whole"),
        (formatted(tag("<o>", "</o>", TRIGGERED)), "<o></o>", "whole"),
        (formatted(tag("<o>", "", TRIGGERED)), "<o>a", "complete"),
        (formatted(tag("<o>", "</o>", TRIGGERED | {"stop_after_first": True})), "<o>a <tx>b</t></o>", "whole"),
        (formatted(tag("<o>", "</o>", {"type": "or", "elements": [JSON, ANY]})), "<o>{a}</o>", "whole"),
        (formatted(tag("<o>", "</o>", {"type": "regex", "pattern": "[a-z<>/]*"})), "<o>b</o>", "whole"),
        (formatted(sequence(TRIGGERED, const("END"), JSON)), 'a <tx>b</t> END{"a":1}', "whole"),
        (formatted(sequence(TRIGGERED, tag("<b>", "</b>"))), 'a<b>{"a":1}</b>', "whole"),
        (formatted(sequence({"type": "or", "elements": [ANY, const("a")]}, const("END"))), "foo aEND", "whole"),
        (formatted(sequence({"type": "optional", "content": ANY}, const("END"))), "END", "whole"),
        (formatted(sequence({"type": "star", "content": tag("<t>", "</t>", ANY)}, const("!"))), "<t>!</t>!", "whole"),
        (formatted(sequence(tag("<o>", "", ANY), tag("<t>", "</t>", ANY))), "<o>a<t>b</t>", "whole"),
        (formatted(tag("<t>")), '<t>{"a":' + " " * 32 + "1}</t>", "whole"),
        (formatted(tag("<t>")), '<t>{"a":' + " " * 33 + "1}</t>", "refused"),
        (formatted(SEPARATED), '<t>{"a":1}</t>,<t>{"a":1}</t>', "complete"),
        (formatted(SEPARATED | {"stop_after_first": True}), '<t>{"a":1}</t>,', "refused"),
        (
            formatted({"type": "triggered_tags", "triggers": ["<|im_start|>"], "tags": [tag("<|im_start|>call ")]}),
            'hey <|im_start|>call {"a":1}</t>',
            "complete",
        ),
    ],
)
def test_a_grammar_allows_its_texts_and_no_others(
    compiler: Compiler, tokenizer: LLTokenizer, grammar: Grammar, text: str, says: str
) -> None:
    assert read(compiler, tokenizer, grammar, text) == says


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar.ebnf("root ::= ("), "the ebnf can't be read as GBNF"),
        (Grammar.ebnf("root ::= 'a"), "the ebnf can't be read as GBNF"),
        (Grammar.ebnf(r'root ::= "\ud800"'), "the ebnf can't be used"),
        (Grammar.ebnf("hello"), "neither GBNF (root ::= ...) nor Lark's form"),
        (Grammar.lark("start: foo"), "unknown name"),
        (Grammar.regex("(a"), "unclosed group"),
        (Grammar.regex("a\\"), "ends with a backslash"),
        (Grammar.regex("(?=a)b"), "look-around"),
        (Grammar.json_schema('{"not": {}}'), "not"),
        (Grammar.json_schema('{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (Grammar.json_schema('{"oneOf": [{"type": "integer"}, {"type": "number"}]}'), "oneOf"),
        (Grammar.json_schema('{"type": "foo"}'), "Invalid type: foo"),
        (Grammar.json_schema("[1"), "not JSON"),
        (Grammar.json_schema("[]"), "must be an object, or true"),
        (Grammar.json_schema("false"), "must be an object, or true"),
        (Grammar.json_schema('{"items":' * 300 + "{}" + "}" * 300), "nested more than"),
        (Grammar.json_schema('{"type": "integer", "multipleOf": 1234567}'), "multipleOf is 1234567"),
        (Grammar.json_schema('{"allOf": [{"multipleOf": 9967}, {"multipleOf": 9973}]}'), "least common multiple"),
        (Grammar.json_schema('{"exclusiveMinimum": 2, "maximum": 2.5}'), "less than 1 away"),
        (Grammar.json_schema('{"type": "number", "minimum": -3.5, "exclusiveMaximum": -3}'), "less than 1 away"),
        (Grammar.lark('start: "a" %json {"type": "integer", "multipleOf": 1234567}'), "multipleOf is 1234567"),
        (Grammar("answer_grammar", 'start: %json {"multipleOf": 1234567}'), "multipleOf is 1234567"),
        (Grammar("choice", "[1]"), "list of texts"),
        (Grammar.structural_tag("[]"), "must be an object"),
        (Grammar.structural_tag("{}"), "neither structures nor a format"),
        (formatted({"type": "qwen_xml"}), "isn't understood"),
        (formatted(TRIGGERED | {"triggers": ["<x"]}), "begins with none of the triggers"),
        (formatted(sequence(JSON, {"type": []})), "is of type '[]', which isn't understood"),
        (formatted(sequence(JSON, {"type": "tag"})), "needs begin as a text"),
        (formatted(sequence(ANY, JSON)), "must follow any_text"),
        (formatted(sequence(ANY, const(""), JSON)), "must follow any_text"),
        (formatted(sequence(TRIGGERED, JSON)), "must follow any_text and triggered_tags"),
        (formatted(sequence({"type": "star", "content": ANY}, const("END"))), "must follow any_text"),
        (formatted(sequence(tag("<o>", ["</o>", ""], ANY), const("END"))), "must follow any_text"),
        (formatted(tag("<o>", "</tail>", TRIGGERED | {"triggers": ["<", "<t"]})), "the trigger '<' "),
        (formatted({"type": "json_schema", "json_schema": {"type": "foo"}}), "Invalid type: foo"),
    ],
)
def test_what_is_no_grammar_is_refused_in_words(compiler: Compiler, grammar: Grammar, words: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(words)):
        compiler.compile(grammar)


def test_added_tokens_in_angle_brackets_are_tokens_in_structural_tags(tmp_path: Path) -> None:
    """As Qwen's <tool_call>, which is no special token: llguidance takes it for one, and for no text."""
    backend = Tokenizer.from_file(str(Path(BUNDLED_MODEL) / "tokenizer.json"))
    backend.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("</tool_call>", special=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    compiler, tokenizer = Compiler(tmp_path, VOCAB, EOS), LLTokenizer(str(tmp_path / "tokenizer.json"))
    called = tag("<tool_call>", "</tool_call>")
    grammar = formatted({"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [called]})
    assert read(compiler, tokenizer, grammar, 'hi <tool_call>{"a": 1}</tool_call>') == "complete"
    assert read(compiler, tokenizer, grammar, "hi <tool_call>1") == "refused"


@pytest.mark.parametrize("vocab", [1024, 1026])
def test_added_tokens_beyond_the_models_vocabulary_never_come(vocab: int, tmp_path: Path) -> None:
    """As Gemma 3 1B's token for a picture, or a [PAD] that training added: here the tokenizer has 1,027 tokens."""
    backend = Tokenizer.from_file(str(Path(BUNDLED_MODEL) / "tokenizer.json"))
    backend.add_tokens([AddedToken(name, special=name != "<b>") for name in ("<a>", "<b>", "[PAD]")])
    backend.save(str(tmp_path / "tokenizer.json"))
    compiler = Compiler(tmp_path, vocab, EOS)
    matcher = compiler.compile(Grammar.regex("(.|\n)*"))
    for token_id in backend.encode('{"a": 1}', add_special_tokens=False).ids:
        assert token_id in mask_of(matcher, vocab)
        matcher.advance(token_id)
    assert matcher.accepts
    assert len(mask_of(matcher, vocab)) > 900 and max(mask_of(matcher, vocab)) < 1024
    begins = mask_of(compiler.compile(formatted(const("<a>"))), vocab)
    assert begins == [1024] if vocab > 1024 else backend.token_to_id("<") in begins, "beyond, its name is text"


def walk(compiler: Compiler, grammar: Grammar, num_tokens: int, seed: int = 0) -> LlMatcher:
    dice, matcher = np.random.default_rng(seed), compiler.compile(grammar)
    for _ in range(num_tokens):
        matcher.advance(int(dice.choice([token for token in mask_of(matcher) if token not in EOS])))
    return matcher


@pytest.mark.parametrize(
    "grammar", [Grammar.regex("((a{1,1000}){1,1000}){1,1000}"), Grammar.json_schema('{"$ref":"#"}')]
)
def test_a_hostile_grammar_fails_in_words_where_its_masks_are_made(compiler: Compiler, grammar: Grammar) -> None:
    with pytest.raises(InvalidRequest, match="can't be followed any further"):
        walk(compiler, grammar, 200)


@pytest.mark.parametrize("token_id", [90, 1050, 5000])
def test_a_token_that_the_mask_forbids_is_our_fault_and_not_the_clients(compiler: Compiler, token_id: int) -> None:
    """A "{" where only "a" or "b" may come; tokens beyond the tokenizer's, and beyond the model's."""
    matcher = compiler.compile(Grammar.regex("[ab]{3}"))
    assert token_id not in mask_of(matcher)
    with pytest.raises(RequestFailed, match=f"the grammar refuses token {token_id}: "):
        matcher.advance(token_id)


def test_a_token_after_the_grammars_end_is_our_fault(compiler: Compiler) -> None:
    matcher = compiler.compile(Grammar.regex("a"))
    matcher.advance(mask_of(matcher)[0])
    assert matcher.ended
    with pytest.raises(RequestFailed, match="the grammar refuses token"):
        matcher.advance(64)


def test_a_copy_goes_its_own_way(compiler: Compiler) -> None:
    """Requests that share a schema get matchers of their own."""
    first = compiler.compile(Grammar.regex("ab|cd"))
    second = first.copy()
    first.advance(mask_of(first)[0])
    assert mask_of(first) != mask_of(second)


def test_a_vocabulary_that_is_padded_beyond_the_tokenizer_gets_no_token_there(compiler: Compiler) -> None:
    for grammar in (Grammar.regex("(.|\n)*"), Grammar.json_object(), Grammar.structural_tag(TAGS)):
        assert max(mask_of(walk(compiler, grammar, 2))) < 1024


@pytest.mark.parametrize("stop_ids", [(), (1023,), (1021, 1023, 5), (90,)])
def test_every_eos_and_stop_token_is_masked_until_the_grammar_accepts(
    compiler: Compiler, stop_ids: tuple[int, ...]
) -> None:
    """With token 90, "{", as stop token nothing may begin the object, which is said."""
    constraint = Constraint(compiler.compile(Grammar.json_object()), EOS, stop_ids, min_tokens=0)
    words = np.zeros(-(-VOCAB // 32), dtype=np.uint32)

    def allowed() -> set[int]:
        assert constraint.mask_into(words)
        return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())

    if stop_ids == (90,):
        assert allowed() == {481}, 'only {" is left'
        return
    for text in (90, 92):
        assert not allowed() & {*EOS, *stop_ids} and text in allowed()
        constraint.advance(text)
    assert constraint.ended


def test_where_the_grammar_accepts_stop_tokens_may_come_from_min_tokens_on(compiler: Compiler) -> None:
    constraint = Constraint(compiler.compile(Grammar.regex("a+")), EOS, {1023, 5}, min_tokens=2)
    words = np.zeros(-(-VOCAB // 32), dtype=np.uint32)
    seen = []
    for _ in range(3):
        assert constraint.mask_into(words)
        seen.append(set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()))
        constraint.advance(64)
    assert [bool(ids & {1023, 5}) for ids in seen] == [False, False, True]
    assert all(1021 not in ids for ids in seen), "an EOS token that doesn't end the request never comes"


def test_a_model_without_a_tokenizer_takes_no_grammars(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"no tokenizer\.json"):
        Compiler(tmp_path, VOCAB, EOS)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {}}))
    with pytest.raises(InvalidRequest, match="can't be used with the model's tokenizer"):
        Compiler(tmp_path, VOCAB, EOS)
