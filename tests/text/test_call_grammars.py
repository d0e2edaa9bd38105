"""Grammars of answers with calls allow what the parsers read, and nothing malformed. The engine's compiler is asked."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from jaxsgl.constraints.compiler import Compiler
from jaxsgl.errors import InvalidRequest
from jaxsgl.requests.grammar import Grammar
from jaxsgl.text.answer import ReasoningForm
from jaxsgl.text.call_grammar import (
    Calls,
    behind_reasoning,
    call_grammar,
    content_grammar,
    free_text,
    harmony_grammar,
)
from jaxsgl.text.calls import FORMS
from jaxsgl.text.dialects import REASONING_FORMS, THINK, Dialect
from jaxsgl.text.harmony import MARKERS
from jaxsgl.text.tokenizer import load_tokenizer
from tests.grids import daily
from tests.text.small_tokenizers import byte_level, save

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
}
TOOLS: dict[str, Any] = {"weather": WEATHER, "now": {"type": "object", "properties": {}}}
TEXTS = {
    "hermes": [
        '<tool_call>\n{"name": "weather", "arguments": {"city": "x", "days": 3}}\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ],
    "longcat": ['<longcat_tool_call>\n{"name": "weather", "arguments": {"city": "x"}}\n</longcat_tool_call>'],
    "llama3": ['{"name": "weather", "parameters": {"city": "x"}}; {"name": "now", "parameters": {}}'],
    "mistral": ['[TOOL_CALLS] [{"name": "weather", "arguments": {"city":"x"}}, {"name": "now", "arguments": {}}]'],
    "mistral_v11": ['[TOOL_CALLS]weather[ARGS]{"city": "x"}[TOOL_CALLS]now[ARGS]{}'],
    "qwen3_coder": [
        "<tool_call>\n<function=weather>\n<parameter=city>\nx\ny\n</parameter>\n<parameter=unit>\n"
        "C\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ],
    "seed_oss": [
        "<seed:tool_call>\n<function=weather>\n<parameter=city>x\ny</parameter>\n<parameter=days>2</parameter>\n"
        "<parameter=unit>C</parameter>\n</function>\n</seed:tool_call>",
    ],
    "glm45": [
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>x y</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>x y</arg_value></tool_call>",  # GLM-4.7
    ],
    "kimi_k2": [
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "x"}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>"
    ],
    "deepseek_v31": [
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "x"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ],
    "deepseek_v3": [
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "x"}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ],
    "minimax_m2": [
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">x\ny</parameter>\n'
        '<parameter name="unit">C</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>'
    ],
    **{
        name: [
            f'<｜DSML｜{tag}>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">x\ny'
            '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="unit" string="true">C</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
            f'<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜{tag}>'
        ]
        for name, tag in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls"))
    },
    "granite": ['<|tool_call|>[{"name": "now", "arguments": {}}]'],
    "phi4_mini": ['<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>'],
    "functools": ['functools[{"name": "weather", "arguments": {"city": "x"}}, {"name": "now", "arguments": {}}]'],
    "hunyuan": [
        '<tool_calls>[{"name": "weather", "arguments": {"city": "x"}}, {"name": "now", "arguments": {}}]</tool_calls>'
    ],
    "nemotron": [
        '<TOOLCALL>[{"name": "weather", "arguments": {"city": "x"}}, {"name": "now", "arguments": {}}]</TOOLCALL>'
    ],
    "cohere": [
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "x"}},\n'
        '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>'
    ],
    "pythonic": ['[weather(city="x", unit="C"), now()]'],
    "olmo3": ['<function_calls>\nweather(city="x", days=2)\nnow()\n</function_calls>'],
    "lfm2": [
        "<|tool_call_start|>[weather(city='x, \\'y\\' \"z\"\\n', unit=\"C\")]<|tool_call_end|>",
        '<|tool_call_start|>[weather(city="x", unit="C"), now()]<|tool_call_end|>',
    ],
    "gemma4": [
        '<|tool_call>call:weather{city:<|"|>x\ny<|"|>,days:3,unit:<|"|>C<|"|>}<tool_call|><|tool_call>call:now{}<tool_call|>'
    ],
    "json": ['{"name": "weather", "arguments": {"city": "x"}}'],
}
PLAIN = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
SPECIAL = (
    "｜DSML｜", "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<｜tool▁sep｜>", "<|tool_call_argument_begin|>", *MARKERS,
    "<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_ACTION|>",
    "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<|tool_call_start|>", "<|tool_call_end|>",
    *{
        mark: None
        for form in FORMS.values()
        if form.section is not None
        for mark in (*form.section, *form.opens, form.close)
    },
)  # fmt: skip


class Grammars:
    """A tokenizer, and what the engine's compiler makes of grammars for it."""

    def __init__(self, plain: Sequence[str] = (), special: Sequence[str] = ()) -> None:
        backend = byte_level()
        backend.add_tokens([AddedToken(text, special=False) for text in plain])
        backend.add_special_tokens([AddedToken(text, special=True) for text in special])
        self.backend = backend
        eos_id: int = backend.get_vocab()["<|return|>" if "<|return|>" in special else "<|end|>"]
        with tempfile.TemporaryDirectory() as folder:
            self.tokenizer = load_tokenizer(save(backend, Path(folder)))
            self.compiler = Compiler(Path(folder), backend.get_vocab_size(), [eos_id])

    def follow(self, grammar: Grammar, ids: list[int]) -> tuple[int, bool]:
        """Returns how many of `ids`, from the first, the masks of an answer allow, and whether it may end there."""
        matcher = self.compiler.compile(grammar)
        words = np.zeros(-(-self.backend.get_vocab_size() // 32), dtype=np.uint32)
        for count, token_id in enumerate(ids):
            matcher.mask_into(words)
            if not words[token_id // 32] >> np.uint32(token_id % 32) & 1:
                return count, False
            matcher.advance(token_id)
        return len(ids), matcher.accepts

    def allows(self, grammar: Grammar, text: str) -> bool:
        """Whether an answer may be `text`."""
        _, is_whole = self.follow(grammar, self.backend.encode(text).ids)
        return is_whole


@cache
def grammars(with_markers: bool) -> Grammars:
    return Grammars(PLAIN, SPECIAL) if with_markers else Grammars()


def lark_of(
    of: Grammars, name: str, reasoning: ReasoningForm | None = None, is_open: bool = False, **calls: Any
) -> Grammar:
    lark = call_grammar(FORMS[name], Calls(TOOLS, **calls), of.tokenizer.unit_of)
    return behind_reasoning(lark, reasoning, is_open)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("with_markers", [False, True])
def test_calls_that_must_be_made_hold_to_their_form_and_schema(name: str, with_markers: bool) -> None:
    of = grammars(with_markers)
    lark = lark_of(of, name, required=True)
    for text in TEXTS[name]:
        assert of.allows(lark, text)
        assert not of.allows(lark, f"Well. {text}"), "nothing stands before it"
        assert not of.allows(lark, text[:-2]), "it ends where it is complete"
        assert not of.allows(lark, text.replace("weather", "w").replace("now", "n")), "only tools are called"
        if "days" in text or "city" in text:
            assert not of.allows(lark, text.replace("city", "town").replace("days", "hours"))
        parser = Dialect(calls=FORMS[name]).parser(TOOLS, constrained=True)
        parts = parser.feed(text) + parser.finish()
        assert {part.kind for part in parts} == {"call", "arguments"}
        arguments = [part.text for part in parts if part.kind == "arguments" and part.number == 0]
        told = json.loads("".join(arguments))
        assert told.get("unit", "C") == "C", "texts of a list stand in tags without quotes"
        assert told.get("city", "x")[0] == "x"


@pytest.mark.parametrize("name", daily([name for name in TEXTS if FORMS[name].opens and not FORMS[name].bare], every=2))
@pytest.mark.parametrize("with_markers", [False, True])
def test_calls_that_may_be_made_stand_in_free_text(name: str, with_markers: bool) -> None:
    of = grammars(with_markers)
    lark = lark_of(of, name)
    for text in TEXTS[name]:
        assert of.allows(lark, "Hello. [1] {a}")
        assert of.allows(lark, f"Well.\n{text}")
        assert not of.allows(lark, f"Well.\n{text[:-3]}")
        assert not of.allows(lark, text.replace("weather", "w").replace("now", "n"))


@pytest.mark.parametrize("with_markers", [False, True])
def test_a_call_that_the_model_forgot_to_open_may_be_closed(with_markers: bool) -> None:
    of = grammars(with_markers)
    unopened = "Well.\n<function=now>\n</function>\n</tool_call>"
    assert of.allows(lark_of(of, "qwen3_coder"), unopened)
    assert of.allows(lark_of(of, "qwen3_coder"), f"{unopened}\n{TEXTS['qwen3_coder'][0]}\n")


def test_arguments_of_calls_that_may_be_made_hold_to_their_schema_if_the_tool_is_strict() -> None:
    of = grammars(True)
    free = '<tool_call>\n{"name": "weather", "arguments": {"town": 1}}\n</tool_call>'
    assert of.allows(lark_of(of, "hermes"), free)
    assert not of.allows(lark_of(of, "hermes", strict=frozenset({"weather"})), free)


# Parameters as pydantic describes them: by reference, with alternatives.
BOOK: dict[str, Any] = {
    "type": "object",
    "properties": {
        "at": {"$ref": "#/$defs/Place"},
        "by": {"allOf": [{"$ref": "#/$defs/Mode"}]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "via": {"items": {"$ref": "#/$defs/Place"}},
    },
    "required": ["at", "by"],
    "$defs": {
        "Place": {
            "properties": {
                "city": {"type": "string"},
                "next": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
            },
            "required": ["city"],
            "type": "object",
        },
        "Mode": {"enum": ["air", "rail"], "type": "string"},
    },
}
BOOKED = {"at": {"city": "x", "next": {"city": "y"}}, "by": "rail", "note": None, "via": [{"city": "z"}]}
BOOKINGS = {
    "qwen3_coder": '<tool_call>\n<function=book>\n<parameter=at>\n{"city": "x", "next": {"city": "y"}}\n</parameter>\n'
    "<parameter=by>\nrail\n</parameter>\n<parameter=note>\nnull\n</parameter>\n<parameter=via>\n"
    '[{"city": "z"}]\n</parameter>\n</function>\n</tool_call>',
    "glm45": '<tool_call>book<arg_key>at</arg_key><arg_value>{"city": "x", "next": {"city": "y"}}</arg_value>'
    "<arg_key>by</arg_key><arg_value>rail</arg_value><arg_key>note</arg_key><arg_value>null</arg_value>"
    '<arg_key>via</arg_key><arg_value>[{"city": "z"}]</arg_value></tool_call>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="book">\n<parameter name="at">{"city": "x", "next": {"city": "y"}}'
    '</parameter>\n<parameter name="by">rail</parameter>\n<parameter name="note">null</parameter>\n'
    '<parameter name="via">[{"city": "z"}]</parameter>\n</invoke>\n</minimax:tool_call>',
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="book">\n<｜DSML｜parameter name="at" string="false">'
    '{"city": "x", "next": {"city": "y"}}</｜DSML｜parameter>\n<｜DSML｜parameter name="by" string="true">rail'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="note" string="false">null</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="via" string="false">[{"city": "z"}]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    "</｜DSML｜tool_calls>",
    "gemma4": '<|tool_call>call:book{at:{city:<|"|>x<|"|>,next:{city:<|"|>y<|"|>}},by:<|"|>rail<|"|>,note:null,'
    'via:[{city:<|"|>z<|"|>}]}<tool_call|>',
}


@pytest.mark.parametrize("name", BOOKINGS)
def test_parameters_hold_to_schemas_that_are_referred_to(name: str) -> None:
    of, text = grammars(True), BOOKINGS[name]
    for strict in (frozenset[str](), frozenset({"book"})):
        calls = Calls({"book": BOOK}, strict, required=True)
        lark = behind_reasoning(call_grammar(FORMS[name], calls, of.tokenizer.unit_of), None, False)
        assert of.allows(lark, text)
        assert not of.allows(lark, text.replace("rail", "road"))
        assert not of.allows(lark, text.replace('{"city": "z"}', "5").replace('{city:<|"|>z<|"|>}', "5"))
        assert not of.allows(lark, text.replace('"city": "y"', "").replace('city:<|"|>y<|"|>', ""))
    for constrained in (False, True):
        parser = Dialect(calls=FORMS[name]).parser({"book": BOOK}, constrained=constrained)
        parts = parser.feed(text) + parser.finish()
        assert json.loads("".join(part.text for part in parts if part.kind == "arguments")) == BOOKED


def test_deepseeks_mark_may_be_special_or_not() -> None:
    for of, is_unit in ((Grammars(), False), (Grammars(plain=["｜DSML｜"]), False), (grammars(True), True)):
        lark = lark_of(of, "deepseek_v4", THINK, True)
        assert (lark.text.count("<[") > 10) == (of.tokenizer.unit_of("｜DSML｜") is not None) == is_unit
        text = "Hm: <｜DS.</think>I look: 1 < 2.\n\n" + TEXTS["deepseek_v4"][0]
        assert of.allows(lark, text)
        assert not of.allows(lark, text.replace("now", "then"))
        assert not of.allows(lark, text.replace("</｜DSML｜invoke>", "</｜DSML｜parameter>"))


def test_what_no_grammar_can_say_of_arguments_is_left_out_unless_the_tool_is_strict() -> None:
    of = grammars(True)
    price = {"type": "string", "pattern": r"^(?!^[-+.]*$)\d+$"}
    ids = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    tools = {"buy": {"type": "object", "properties": {"price": price, "ids": ids}, "required": ["price", "ids"]}}
    text = '<tool_call>\n{"name": "buy", "arguments": {"price": "x", "ids": [1, 1]}}\n</tool_call>'
    for strict in (frozenset[str](), frozenset({"buy"})):
        calls = Calls(tools, strict, required=True)
        lark = behind_reasoning(call_grammar(FORMS["hermes"], calls, of.tokenizer.unit_of), None, False)
        if not strict:
            assert of.allows(lark, text)
        else:
            with pytest.raises(InvalidRequest, match="uniqueItems"):
                of.compiler.compile(lark)


@pytest.mark.parametrize("name", ["pythonic", "olmo3", "lfm2"])
def test_names_that_are_none_in_python_are_written_and_read(name: str) -> None:
    of, strings = grammars(True), {"from": {"type": "string"}, "max-results": {"type": "integer"}}
    tools: dict[str, Any] = {"maps/find-way": {"type": "object", "properties": strings, "required": list(strings)}}
    text = TEXTS[name][0].replace(", now()", "").replace("\nnow()", "")
    text = re.sub(r"weather\(.*?\)", 'maps/find-way(from="a", max-results=2)', text)
    lark = call_grammar(FORMS[name], Calls(tools, required=True), of.tokenizer.unit_of)
    assert of.allows(behind_reasoning(lark, None, False), text)
    parser = Dialect(calls=FORMS[name]).parser(tools, constrained=True)
    assert [part.text for part in parser.feed(text) + parser.finish()] == [
        "maps/find-way",
        '{"from":"a","max-results":2}',
    ]


@pytest.mark.parametrize(("opening", "closing"), [("Here is", "Here's"), ("Here's", "Here is")])
def test_granites_reasoning_is_read_and_held_to_a_grammar_in_both_spellings(opening: str, closing: str) -> None:
    of, form = grammars(True), REASONING_FORMS["granite"]
    call = '<|tool_call|>[{"name": "now", "arguments": {}}]'
    text = f"{opening} my thought process: functools\n{closing} my response: {call}"
    assert of.allows(lark_of(of, "granite", form, required=True), text)
    assert not of.allows(lark_of(of, "granite", form, required=True), text.replace("my response", "an answer"))
    parts = Dialect(form, FORMS["granite"]).parser(TOOLS)
    read = [part for char in text for part in parts.feed(char)] + parts.finish()
    found = [(part.kind, part.text) for part in read]
    reasoning = "".join(text for kind, text in found if kind == "reasoning")
    assert (reasoning, found[-2:]) == ("functools", [("call", "now"), ("arguments", "{}")])


def test_operators_of_what_a_client_sends_are_text() -> None:
    """The compiler takes the server's own operators, so nothing of a client's may be read as one."""
    of, sign = grammars(True), '" & ~/(.|\n)*/ | "'
    tools = {"find": {"type": "object", "properties": {sign: {"enum": [sign, "/"]}}, "required": [sign]}}
    for name, text in (
        ("hermes", json.dumps({"name": "find", "arguments": {sign: sign}})),
        ("qwen3_coder", f"<function=find>\n<parameter={sign}>\n{sign}\n</parameter>\n</function>"),
    ):
        text = f"<tool_call>\n{text}\n</tool_call>"
        calls = call_grammar(FORMS[name], Calls(tools, required=True), of.tokenizer.unit_of)
        assert of.allows(behind_reasoning(calls, None, False), text)
        assert not of.allows(behind_reasoning(calls, None, False), text.replace("~", "-"))
    for asked, text in (
        (Grammar.choice([sign, "a"]), sign),
        (Grammar.regex(r"x/ & ~\/y//z|a" + "\n\\\n"), "x/ & ~/y//z"),
        (Grammar.regex(r"x/ & ~\/y//z|a" + "\n\\\n"), "a\n\n"),
        (Grammar.json_schema({"const": sign}), json.dumps(sign)),
    ):
        lark = behind_reasoning(content_grammar(asked, of.tokenizer.unit_of), THINK, True)
        assert of.allows(lark, f"Hm.</think>{text}")
        assert not of.allows(lark, "Hm.</think>b")
    wide = {"allOf": [{"type": "string", "pattern": f"^a{{{i}}}"} for i in range(9)]}
    lark = behind_reasoning(content_grammar(Grammar.json_schema(wide), of.tokenizer.unit_of), THINK, True)
    with pytest.raises(InvalidRequest, match="9 patterns meet"):
        of.compiler.compile(lark)


def test_there_is_one_call_if_calls_may_not_be_parallel() -> None:
    of = grammars(True)
    for name in ("hermes", "mistral", "mistral_v11", "llama3", "pythonic", "olmo3", "lfm2"):
        assert not of.allows(lark_of(of, name, required=True, max_calls=1), TEXTS[name][-1]), name


@pytest.mark.parametrize("name", FORMS)
def test_answers_with_one_call_at_most_have_a_grammar_in_every_form(name: str) -> None:
    of = grammars(True)
    for asked in ({}, {"required": True}, {"strict": frozenset({"weather"})}):
        of.compiler.compile(lark_of(of, name, max_calls=1, **asked))


# Several calls as the templates of the models write them again.
_DEEPSEEK = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "x"}\n```<｜tool▁call▁end｜>'
_NEMOTRON = "<tool_call>\n<function=weather>\n<parameter=city>\nx\n</parameter>\n</function>\n</tool_call>\n"
_EXAONE = '<tool_call>{"name": "weather", "arguments": {"city": "x"}}</tool_call>'
_GLM = "<tool_call>weather<arg_key>city</arg_key><arg_value>x</arg_value></tool_call>"
SEVERAL = {
    "DeepSeek R1": ("deepseek_v3", f"<｜tool▁calls▁begin｜>{_DEEPSEEK}\n{_DEEPSEEK}<｜tool▁calls▁end｜>"),
    "Nemotron 3": ("qwen3_coder", _NEMOTRON * 2),
    "Qwen3-Coder": ("qwen3_coder", (_NEMOTRON * 2).strip()),
    "GLM-4.7": ("glm45", _GLM * 2),
    "EXAONE 4": ("hermes", f"{_EXAONE}\n{_EXAONE}"),
    "GLM-4.5": ("glm45", f"{_GLM}\n{_GLM}"),
}


@pytest.mark.parametrize("model", SEVERAL)
@pytest.mark.parametrize("required", [False, True])
def test_several_calls_stand_as_the_templates_write_them(model: str, required: bool) -> None:
    of, (name, text) = grammars(True), SEVERAL[model]
    assert of.allows(lark_of(of, name, required=required), text)
    parser = Dialect(calls=FORMS[name]).parser(TOOLS, constrained=True)
    parts = parser.feed(text) + parser.finish()
    assert [part.text for part in parts if part.kind == "call"] == ["weather", "weather"]
    assert not [part for part in parts if part.kind == "content"]


def test_a_marker_that_is_a_token_cannot_be_spelled_out() -> None:
    of = grammars(True)
    ids = of.backend.encode("<tool").ids + of.backend.encode("_call").ids + of.backend.encode(">").ids
    assert of.follow(lark_of(of, "hermes"), ids) == (len(ids) - 1, False)


@pytest.mark.parametrize("with_markers", [False, True])
def test_a_grammar_begins_behind_the_reasoning(with_markers: bool) -> None:
    of = grammars(with_markers)
    (call, _) = TEXTS["hermes"]
    is_open = lark_of(of, "hermes", THINK, is_open=True, required=True)
    assert of.allows(is_open, f'Hm, {{"a": <b>.</think>\n\n{call}')
    assert not of.allows(is_open, "Hm.</think>\n\nHello")
    may_open = lark_of(of, "hermes", THINK, required=True)
    assert of.allows(may_open, f"<think>Hm.</think>{call}")
    assert of.allows(may_open, call)
    for asked in (may_open, lark_of(of, "hermes", THINK)):
        assert of.allows(asked, f"\n<think>Hm.</think>\n{call}"), "GLM-4.5 breaks the line before it thinks"
    schema = Grammar.json_schema({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]})
    for grammar, good in (
        (schema, '{"x": 1}'),
        (Grammar.json_schema(True), "[1]"),
        (Grammar.json_object(), "{}"),
        (Grammar.choice(["a/b", 'c"']), 'c"'),
        (Grammar.regex("[a-c]+/\\d"), "ab/1"),
    ):
        may_open = behind_reasoning(content_grammar(grammar, of.tokenizer.unit_of), THINK, False)
        assert of.allows(may_open, f"\n<think>Hm.</think>\n{good}"), grammar
        lark = behind_reasoning(content_grammar(grammar, of.tokenizer.unit_of), THINK, True)
        assert of.allows(lark, f"Hm.</think>\n{good}"), grammar
        assert not of.allows(lark, f"Hm.</think>\nno{good}"), grammar
    for grammar, bad in (
        (Grammar.regex("\\d"), "१"),
        (Grammar.json_schema({"type": "object", "x-guidance": {"lenient": True}}), "{" + " " * 33 + "}"),
        (Grammar.json_schema(True), "[" + " " * 33 + "]"),
    ):
        lark = behind_reasoning(content_grammar(grammar, of.tokenizer.unit_of), THINK, True)
        assert not of.allows(lark, f"Hm.</think>{bad}"), "as without reasoning"
    with pytest.raises(InvalidRequest, match="ends with a backslash"):
        content_grammar(Grammar.regex("a\\\\\\"), of.tokenizer.unit_of)
    with pytest.raises(InvalidRequest, match="a lark can't begin behind reasoning"):
        content_grammar(Grammar.lark("start: /a/"), of.tokenizer.unit_of)


@pytest.mark.parametrize("with_markers", [False, True])
def test_reasoning_may_open_with_a_token_and_a_text(with_markers: bool) -> None:
    of, form = grammars(with_markers), REASONING_FORMS["gemma4"]
    dialect = Dialect(form, FORMS["gemma4"])
    named = {of.backend.id_to_token(one) for one in of.tokenizer.special_ids_of(dialect.markers)}
    assert named >= ({"<|channel>", "<channel|>"} if with_markers else set())
    thought, call = "<|channel>thought\nHm.\n<channel|>", TEXTS["gemma4"][0]
    required = lark_of(of, "gemma4", form, required=True)
    assert of.allows(required, thought + call)
    assert of.allows(required, call)
    assert of.allows(lark_of(of, "gemma4", form), f"{thought}Hello")
    if with_markers:
        lark = behind_reasoning(free_text(of.tokenizer.unit_of), form, False, budget=4)
        assert of.allows(lark, f"{thought}Hello")
        assert not of.allows(lark, f"{thought.replace('Hm', 'Hm, a, b')}Hello")


@pytest.mark.parametrize("with_markers", [False, True])
def test_an_answer_may_stand_in_its_frame(with_markers: bool) -> None:
    of, form = grammars(with_markers), REASONING_FORMS["cohere"]
    lark = behind_reasoning(content_grammar(Grammar.json_object(), of.tokenizer.unit_of), form, False)
    for begin, end in (("", ""), *form.frames):
        assert of.allows(lark, f"<|START_THINKING|>Hm.<|END_THINKING|>{begin}{{}}{end}")
    assert not of.allows(lark, "<|START_RESPONSE|>Hi<|END_RESPONSE|>")


def test_reasoning_ends_after_its_budget() -> None:
    of = grammars(True)
    text = free_text(of.tokenizer.unit_of)
    for is_open, begun in ((True, ""), (False, "<think>")):
        lark = behind_reasoning(text, THINK, is_open, budget=3)
        assert of.allows(lark, f"{begun}Hm.</think>\nHello <b>.")
        assert not of.allows(lark, f"{begun}Hm, a.</think>\nHello")
    assert of.allows(behind_reasoning(text, THINK, True, budget=0), "</think>Hello")
    assert not of.allows(behind_reasoning(text, THINK, True, budget=0), "H</think>Hello")
    call = TEXTS["hermes"][0]
    lark = behind_reasoning(call_grammar(FORMS["hermes"], Calls(TOOLS), of.tokenizer.unit_of), THINK, True, budget=3)
    assert of.allows(lark, f"Hm.</think>{call}")
    assert not of.allows(lark, f"Hm, a.</think>{call}")


def test_calls_without_a_mark_stand_next_to_a_schema() -> None:
    name, of = "pythonic", grammars(True)
    content = Grammar.json_schema({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]})
    lark = behind_reasoning(call_grammar(FORMS[name], Calls(TOOLS), of.tokenizer.unit_of, content), None, False)
    for text, kinds in ((TEXTS[name][0], {"call", "arguments"}), ('{"x": 1}', {"content"})):
        assert of.allows(lark, text)
        parser = Dialect(calls=FORMS[name]).parser(TOOLS, constrained=True)
        assert {part.kind for char in text for part in parser.feed(char)} | {
            part.kind for part in parser.finish()
        } == kinds
    assert not of.allows(lark, "Hello")


def test_an_answer_is_json_by_a_schema_or_calls() -> None:
    of = grammars(True)
    content = Grammar.json_schema({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]})
    lark = behind_reasoning(call_grammar(FORMS["hermes"], Calls(TOOLS), of.tokenizer.unit_of, content), None, False)
    assert of.allows(lark, '{"x": 1}')
    assert of.allows(lark, TEXTS["hermes"][0])
    assert not of.allows(lark, "Hello")


def test_harmony_ends_with_a_call_or_a_final_message() -> None:
    of = grammars(True)
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{json.dumps({'city': 'x'})}"
    final = "<|channel|>final<|message|>Hello"
    must = harmony_grammar(Calls(TOOLS, required=True), of.tokenizer.unit_of)
    may = harmony_grammar(Calls(TOOLS), of.tokenizer.unit_of)
    assert of.allows(must, thought + call)
    assert of.allows(may, thought + call)
    assert not of.allows(must, thought + final)
    assert of.allows(may, thought + final)
    assert not of.allows(must, call.replace("city", "town"))
    by_schema = harmony_grammar(Calls({}), of.tokenizer.unit_of, Grammar.json_object())
    assert of.allows(by_schema, f"{thought}<|channel|>final<|message|>{{}}")
    assert not of.allows(by_schema, thought + final)


def test_harmony_has_a_preamble_where_it_is_no_part_of_a_format() -> None:
    of = grammars(True)
    preamble = "<|channel|>commentary<|message|>Well.<|end|><|start|>assistant"
    call = f"{preamble}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{{}}"
    final = f"{preamble}<|channel|>final<|message|>{{}}"
    may = harmony_grammar(Calls(TOOLS), of.tokenizer.unit_of)
    assert of.allows(may, call)
    assert of.allows(may, final)
    beside_calls = harmony_grammar(Calls(TOOLS), of.tokenizer.unit_of, Grammar.json_object())
    assert of.allows(beside_calls, call)
    alone = harmony_grammar(Calls({}), of.tokenizer.unit_of, Grammar.json_object())
    for lark in (beside_calls, alone):
        assert of.allows(lark, final.removeprefix(preamble))
        assert not of.allows(lark, final)
