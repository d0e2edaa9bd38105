"""Reasoning and tool calls in what a model writes, however the text is cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from jaxsgl.config import server
from jaxsgl.errors import ConfigError
from jaxsgl.text.answer import Parser
from jaxsgl.text.dialects import REASONING_PARSERS, TOOL_CALL_PARSERS, dialect_of
from jaxsgl.text.parameters import as_typed

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "exact": {"type": "boolean"},
        "spots": {"type": "array"},
    },
}
WAY = "maps/find-way:v1.2"
WAY_PARAMETERS = {"properties": {"from": {"type": "string"}, "max-results": {"type": "integer"}, "at noon": {}}}
TOOLS: dict[str, Any] = {"weather": WEATHER, "now": {}, WAY: WAY_PARAMETERS}
PARIS = {"city": "Paris", "days": 2}


def result(parser: Parser, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """Returns (reasoning, text, calls with arguments as text)."""
    reasoning, content, calls = "", "", list[list[str]]()
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    for part in parts:
        match part.kind:
            case "reasoning":
                reasoning += part.text
            case "content":
                content += part.text
            case "call":
                assert part.number == len(calls)
                calls.append([part.text, ""])
            case "arguments":
                assert part.number == len(calls) - 1, "a call's arguments follow its name"
                calls[-1][1] += part.text
    return reasoning, content, [(name, arguments) for name, arguments in calls]


def whole(name: str, text: str, **options: Any) -> tuple[str, str, list[tuple[str, object]]]:
    reasoning, content, calls = result(dialect_of(None, name, "think").parser(TOOLS, **options), [text])
    return reasoning, content, [(name, json.loads(arguments)) for name, arguments in calls]


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
HARMONY_CALL = (
    "<|channel|>analysis<|message|>The user asks.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    '<|constrain|>json<|message|>{"city": "Paris", "days": 2}'
)
HARMONY_TEXT_AND_CALL = (
    "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.now<|channel|>commentary<|message|>"
    "{}<|call|>"
)
MISTRAL = (
    '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris", "days": 2}}, {"name": "now", "arguments": {}}]'
)
HUNYUAN_CALLS = f"<tool_calls>{MISTRAL.removeprefix('[TOOL_CALLS] ')}</tool_calls>"
MISTRAL_V11 = '[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 2}[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{}'
OLMO = '<function_calls>\nweather(city="Paris", days=2)\nnow()\n</function_calls>'
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Paris", "days": 2}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>'
    "{}<|tool_call_end|><|tool_calls_section_end|>"
)
DEEPSEEK_V31 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris", "days": 2}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
DEEPSEEK_V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Paris", "days": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n'
    "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n'
    '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>'
)
DSML_V4 = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Paris'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)
DSML_END = "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
GEMMA = '<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:2}<tool_call|><|tool_call>call:now{}<tool_call|>'


def alone(form: str, text: str, name: str, arguments: object) -> tuple[str, str, str, str, list[tuple[str, object]]]:
    """Returns the case of a text that is one call and nothing else."""
    return form, text, "", "", [(name, arguments)]


# Values that hold the texts that end values and calls.
QUOTED: list[tuple[str, str, str]] = [
    *(
        (
            "qwen3_coder",
            f"<tool_call>\n<function=weather>\n<parameter=city>\n{city}\n</parameter>\n</function>\n</tool_call>",
            city,
        )
        for city in (
            "a </tool_call> b",
            "a </function> b\n",
            "</parameter> </tool_call",
            "a </parameter> <b> <parameter=",
        )
    ),
    *(
        ("glm45", f"<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{city}</arg_value>\n</tool_call>", city)
        for city in ("a </tool_call> b", "</arg_value> b <arg_key>")
    ),
    *(
        (
            "minimax_m2",
            f'<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">{city}</parameter>\n</invoke>\n'
            "</minimax:tool_call>",
            city,
        )
        for city in ("a </invoke> b", "</invoke>\n</minimax:tool_call>", '<parameter name="days">')
    ),
    *(
        ("deepseek_v4", DSML_V4.replace("Paris", city).partition('<｜DSML｜parameter name="days')[0] + DSML_END, city)
        for city in (
            "a </｜DSML｜invoke> b",
            "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
            "</｜DSML｜parameter> <b>",
            " 5 ",
        )
    ),
    *(
        (name, text.format("weather(city=" + spelled + ")"), value)
        for name, text in (
            ("olmo3", "<function_calls>\n{}\n</function_calls>"),
            ("lfm2", "<|tool_call_start|>[{}]<|tool_call_end|>"),
            ("pythonic", "[{}]"),
        )
        for spelled, value in (
            ('"</function_calls> <|tool_call_end|> )]"', "</function_calls> <|tool_call_end|> )]"),
            (r"'it\'s \"</function_calls>'", "it's \"</function_calls>"),
            ('"""a "b" it\'s\n<|tool_call_end|>"""', 'a "b" it\'s\n<|tool_call_end|>'),
            (r'"\ud83d\ude00\/"', "😀/"),
        )
    ),
]
BOTH: list[tuple[str, object]] = [("weather", PARIS), ("now", {})]
# (dialect, text, reasoning, content, calls)
VALID: list[tuple[str, str, str, str, list[tuple[str, object]]]] = [
    ("hermes", "Hello\nyou. \n", "", "Hello\nyou. \n", []),
    *(
        (name, f"<think>Hm</think>I look.\n{text}", "Hm", "I look.", BOTH)
        for name, text in (
            ("kimi_k2", KIMI),
            ("deepseek_v31", DEEPSEEK_V31),
            ("deepseek_v3", DEEPSEEK_V3),
            ("minimax_m2", MINIMAX),
            ("deepseek_v32", DSML_V4.replace("tool_calls", "function_calls")),
            ("deepseek_v4", DSML_V4),
        )
    ),
    ("hermes", CALL, "", "", [("weather", PARIS)]),
    ("hermes", f"I look.\n{CALL}\n{NOW}\n", "", "I look.", [("weather", PARIS), ("now", {})]),
    ("hermes", f"<think>\nHm: <tool_call>?\n</think>\n\n{NOW}", "Hm: <tool_call>?", "", [("now", {})]),
    ("hermes", f"{NOW}\nDone.", "", "Done.", [("now", {})]),
    ("hermes", CALL.removesuffix("\n</tool_call>"), "", "", [("weather", PARIS)]),
    (
        "hermes",
        CALL.replace("Paris", r"Pa}\" </tool_call>{ris"),
        "",
        "",
        [("weather", PARIS | {"city": 'Pa}" </tool_call>{ris'})],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"days": 1}, "name": "weather"}</tool_call>',
        "",
        "",
        [("weather", {"days": 1})],
    ),
    ("longcat", CALL.replace("tool_call", "longcat_tool_call"), "", "", [("weather", PARIS)]),
    ("llama3", '{"name": "weather", "parameters": {"city": "Paris", "days": 2}}', "", "", [("weather", PARIS)]),
    ("llama3", "<|python_tag|>{0}; {0}".format('{"name": "now", "parameters": {}}'), "", "", [("now", {})] * 2),
    ("llama3", '{"type": "function", "name": "now", "parameters": {}}', "", "", [("now", {})]),
    ("mistral", MISTRAL, "", "", [("weather", PARIS), ("now", {})]),
    ("mistral_v11", f"Well. {MISTRAL_V11}", "", "Well.", [("weather", PARIS), ("now", {})]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        '<parameter=units>\nnull\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=spots>\n[1, "a"]\n'
        "</parameter>\n</function>\n</tool_call>",
        "",
        "",
        [("weather", PARIS | {"units": None, "exact": True, "spots": [1, "a"]})],
    ),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", "", [("now", {})]),
    (
        "glm45",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>5</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        "",
        "",
        [("weather", {"city": "5", "days": 2}), ("now", {})],
    ),
    ("granite", '<|tool_call|>[{"name": "now", "arguments": {}}]', "", "", [("now", {})]),
    ("phi4_mini", '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>', "", "", [("now", {})]),
    ("functools", 'functools[{"name": "now", "arguments": {}}]', "", "", [("now", {})]),
    ("functools", 'Well.\nfunctools[\n{"name": "now", "parameters": {}}]', "", "Well.", [("now", {})]),
    ("hunyuan", HUNYUAN_CALLS, "", "", [("weather", PARIS), ("now", {})]),
    ("nemotron", '<TOOLCALL>[{"name": "now", "arguments": {}}]</TOOLCALL>', "", "", [("now", {})]),
    (
        "cohere",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": '
        '{"city": "Paris", "days": 2}},\n'
        '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        "",
        "",
        [("weather", PARIS), ("now", {})],
    ),
    (
        "pythonic",
        "[weather(city='Pa)ris', days=2, exact=true, units=None), now()]",
        "",
        "",
        [("weather", {"city": "Pa)ris", "days": 2, "exact": True, "units": None}), ("now", {})],
    ),
    ("olmo3", OLMO, "", "", [("weather", PARIS), ("now", {})]),
    *(alone(name, text, "weather", {"city": city}) for name, text, city in QUOTED),
    *(
        alone(
            name,
            text.format(f'{WAY}(from="a", max-results=2, at noon=[true, None, (1,)])'),
            WAY,
            {"from": "a", "max-results": 2, "at noon": [True, None, [1]]},
        )
        for name, text in (
            ("pythonic", "[{}]"),
            ("olmo3", "<function_calls>\n{}\n</function_calls>"),
            ("lfm2", "<|tool_call_start|>[{}]<|tool_call_end|>"),
        )
    ),
    ("pythonic", "[now(), weather(\n  city='a'\n  'b',\n),]", "", "", [("now", {}), ("weather", {"city": "ab"})]),
    (
        "lfm2",
        '<|tool_call_start|>[weather(city="Paris", days=2), now()]<|tool_call_end|>I look.',
        "",
        "I look.",
        [("weather", PARIS), ("now", {})],
    ),
    ("gemma4", f"I look.{GEMMA}", "", "I look.", BOTH),
    (
        "gemma4",
        '<|tool_call>call:weather{city:<|"|>a "b", c:{d}\n<|"|>,exact:true,spots:[1,<|"|>x<|"|>,{k:null}]}<tool_call|>',
        "",
        "",
        [("weather", {"city": 'a "b", c:{d}\n', "exact": True, "spots": [1, "x", {"k": None}]})],
    ),
    ("gpt-oss", HARMONY_CALL, "The user asks.", "", [("weather", PARIS)]),
    ("gpt-oss", f"{HARMONY_CALL}<|call|>", "The user asks.", "", [("weather", PARIS)]),
    ("gpt-oss", "<|channel|>final<|message|>Hello.<|return|>", "", "Hello.", []),
    ("gpt-oss", HARMONY_TEXT_AND_CALL, "", "I look.", [("now", {})]),
]
# Texts that are no calls of ours, whole; what of them comes back.
MALFORMED: list[tuple[str, str, str]] = [
    ("hermes", CALL.replace('"arguments"', "arguments"), ""),
    ("hermes", CALL.replace("}}", "}"), ""),
    ("hermes", CALL.replace("Paris", "Pa\nris"), ""),
    ("hermes", CALL.replace("weather", "wetter"), ""),
    ("hermes", CALL.replace('{"city": "Paris", "days": 2}', "[1]"), ""),
    ("hermes", CALL.replace("</tool_call>", "<tool_call>"), ""),
    ("hermes", "<tool_call>\nnothing\n</tool_call>", ""),
    ("hermes", "<tool_call>", ""),
    ("hermes", '<tool_call>\n{"name": "weather", "argum', ""),
    ("hermes", CALL.replace("2}}", "2}} and"), ""),
    ("llama3", '{"city": "Paris"}', ""),
    ("llama3", '{"name": "weather", "parameters": {"city": "Pa', ""),
    ("mistral", "[TOOL_CALLS] [1, 2]", ""),
    ("mistral_v11", "[TOOL_CALLS]weather[ARGS]{,}", ""),
    ("mistral_v11", "[TOOL_CALLS]weather {}", ""),
    ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nPa", ""),
    ("qwen3_coder", "<tool_call>\n<function=weather>\nParis\n</function>\n</tool_call>", ""),
    ("glm45", "<tool_call>weather\n<arg_key>city</arg_key>\n</tool_call>", ""),
    ("glm45", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Pa", ""),
    ("pythonic", "[1, 2, 3]", ""),
    ("pythonic", "[weather('Paris')]", ""),
    ("pythonic", "[weather(city=open('x'))]", ""),
    ("pythonic", "[now(", ""),
    ("pythonic", '[find-way(from="a")]', ""),
    ("pythonic", "[weather(of the=2)]", ""),
    ("pythonic", "[weather(days=)]", ""),
    ("pythonic", "[weather(days=2 3)]", ""),
    ("pythonic", "[weather(days==2)]", ""),
    ("pythonic", "[weather(**{})]", ""),
    ("pythonic", "[now(), [now()]]", ""),
    ("pythonic", "[now()now()]", ""),
    ("olmo3", "<function_calls>\nweather(city='a)\n</function_calls>", ""),
    ("glm45", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>a</tool_call>", ""),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="now">\n</minimax:tool_call>', ""),
    ("deepseek_v4", DSML_V4.replace('<｜DSML｜invoke name="now">\n', ""), ""),
    ("deepseek_v4", DSML_V4.replace(' string="false"', ""), ""),
    ("deepseek_v4", DSML_V4[: DSML_V4.index("ris")], ""),
    ("olmo3", "<function_calls>\nweather(\n</function_calls>", ""),
    ("lfm2", "<|tool_call_start|>[weather('Paris')]<|tool_call_end|>", ""),
    ("lfm2", "<|tool_call_start|>[now(", ""),
    ("functools", "import functools\nfunctools[0], functools[{}]", ""),
    ("gemma4", '<|tool_call>call:weather{city:<|"|>Paris}<tool_call|>', ""),
    ("gemma4", '<|tool_call>call:weather{"city":<|"|>Paris<|"|>}<tool_call|>', ""),
    ("gemma4", "<|tool_call>weather{}<tool_call|>", ""),
    ("gemma4", "<|tool_call>call:now{", ""),
    ("gpt-oss", HARMONY_CALL.replace("2}", "2"), "The user asks."),
]


@pytest.mark.parametrize(("name", "text", "reasoning", "content", "calls"), VALID)
def test_an_answer_is_taken_apart(
    name: str, text: str, reasoning: str, content: str, calls: list[tuple[str, object]]
) -> None:
    parser = "gpt-oss" if name == "gpt-oss" else "think"
    got = result(dialect_of(None, name, parser).parser(TOOLS), [text])
    assert (got[0], got[1]) == (reasoning, content)
    assert [(name, json.loads(arguments)) for name, arguments in got[2]] == calls


# The template of transformers for Qwen's answers, in its own words.
QWEN = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<\|im_end\|>"},
    },
}


@pytest.mark.parametrize(
    "text",
    [
        text
        for name, text, *_ in VALID
        if name == "hermes" and text.count("</tool_call>") == text.count("tool_call>") / 2
    ],
)
def test_transformers_reads_the_same(text: str, chat_parsing: Any) -> None:
    """Where it can: it raises for malformed calls, and forgets the text before calls if text follows them."""
    theirs = chat_parsing.parse_response(text.rstrip(), QWEN, prefix="<|im_start|>assistant\n")
    reasoning, content, calls = whole("hermes", text)
    assert theirs.get("reasoning_content", "") == reasoning
    assert theirs.get("content", "") == content.strip()
    functions = [call["function"] for call in theirs.get("tool_calls", [])]
    assert [(function["name"], function["arguments"]) for function in functions] == calls


@pytest.fixture
def chat_parsing() -> Any:
    """What transformers reads response templates with."""
    return pytest.importorskip("transformers.utils.chat_parsing", reason="transformers is older than 5.13")


# The template ends a call at the first mark, in a text or not.
OF_HERMES = [case[1:] for case in VALID if case[0] == "hermes" and "</tool_call>{" not in case[1]]


@pytest.mark.usefixtures("chat_parsing")
@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), OF_HERMES)
def test_a_model_that_nobody_knows_is_read_as_its_tokenizer_says(
    text: str, reasoning: str, content: str, calls: list[tuple[str, object]]
) -> None:
    dialect = dialect_of("{{ messages }}", response_template=QWEN, special_tokens=("<think>", "</think>", "<pad>"))
    assert dialect.markers == ("<think>", "</think>")
    got = result(dialect.parser(TOOLS), [text])
    assert (got[0].strip(), got[1].strip()) == (reasoning, content.strip())
    assert [(name, json.loads(arguments)) for name, arguments in got[2]] == calls
    assert result(dialect.parser(TOOLS), list(text)) == got


@pytest.mark.usefixtures("chat_parsing")
def test_what_a_response_template_cant_read_comes_back_as_text() -> None:
    dialect = dialect_of(None, response_template=QWEN)
    broken = '<tool_call>{"name": "weather", "arg</tool_call>'
    for text in (f"I look.{broken} Well.", f"Hm {NOW.replace('now', 'then')}", broken[:20]):
        reasoning, content, calls = result(dialect.parser(TOOLS), [text])
        assert (reasoning, content, calls) == ("", text, [])
    assert result(dialect.parser(TOOLS), [f"{broken}{CALL}"])[2] == [("weather", '{"city":"Paris","days":2}')]
    one = result(dialect.parser(TOOLS, max_calls=1), [f"{CALL}{NOW}"])
    assert [name for name, _ in one[2]] == ["weather"]
    opened = dialect.parser(TOOLS, prompt_tail="<|im_start|>assistant\n<think>\n")
    assert result(opened, ["Hm</think>Hello"]) == ("Hm", "Hello", [])
    assert dialect_of("<tool_call>", response_template=QWEN).template is None, "a form of ours goes before it"
    assert dialect_of(None, "none", response_template=QWEN).template is None
    assert dialect_of(None, response_template={"fields": {"a": {"open": 5}}}).template is None


@pytest.mark.parametrize(("name", "text", "reasoning"), MALFORMED)
def test_a_malformed_call_comes_back_as_text(name: str, text: str, reasoning: str) -> None:
    got = result(dialect_of(None, name, "gpt-oss" if name == "gpt-oss" else "think").parser(TOOLS), [text])
    if name == "gpt-oss":
        assert got == (reasoning, text.partition("<|start|>assistant")[2], [])
    else:
        assert got == ("", text, [])


UNOPENED = "<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>"


@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [
        (UNOPENED, "", 1),
        (f"I look.\n\n{UNOPENED}\n</tool_call>", "I look.", 1),
        (f"{UNOPENED}\n{UNOPENED}\n</tool_call>\n<tool_call>\n{UNOPENED}\n</tool_call>", "", 3),
        (f"{UNOPENED} Done.", "Done.", 1),
        (UNOPENED.replace("weather", "unknown") + " Done.", UNOPENED.replace("weather", "unknown") + " Done.", 0),
        ("Write `<function=weather>`, <b>", "Write `<function=weather>`, <b>", 0),
        (UNOPENED[:-4], UNOPENED[:-4], 0),
    ],
)
def test_a_call_that_qwen3_coder_forgot_to_open_is_one(
    text: str, content: str, num_calls: int, constrained: bool
) -> None:
    for pieces in ([text], list(text)):
        got = result(dialect_of(None, "qwen3_coder").parser(TOOLS, constrained=constrained), pieces)
        assert got == ("", content, [("weather", '{"city":"Paris"}')] * num_calls)
    parser = dialect_of(None, "qwen3_coder").parser(TOOLS)
    told = "".join(part.text for part in parser.feed("Write `<function=weather>`, <b> and so on"))
    assert told.endswith("and so on"), "text is not held back"


def test_arguments_may_be_an_object_in_a_text_or_missing() -> None:
    quoted = json.dumps(json.dumps(PARIS))
    for name, text in (
        ("hermes", f'<tool_call>{{"name": "weather", "arguments": {quoted}}}</tool_call>'),
        ("llama3", f'{{"name": "weather", "parameters": {quoted}}}'),
        ("mistral", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {quoted}}}]'),
    ):
        assert whole(name, text) == ("", "", [("weather", PARIS)])
        assert whole(name, text.replace("weather", "now").replace(quoted, "null")) == ("", "", [("now", {})])
        wrong = text.replace(quoted, '"[1]"')
        assert whole(name, wrong) == ("", wrong, [])


@pytest.mark.parametrize("header", ["<|channel|>analysis", "<|channel|>commentary to=functions.now <|constrain|>json"])
def test_nothing_is_written_of_a_header_that_the_end_cuts(header: str) -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for text, reasoning in ((header, ""), (thought, "Hm."), (thought + header, "Hm."), (" to=functions.n", "")):
        assert result(dialect_of(None, "gpt-oss", "gpt-oss").parser(TOOLS), list(text)) == (reasoning, "", []), text
    cut = thought.replace("<|end|>", "") + header
    assert result(dialect_of(None, "gpt-oss", "gpt-oss").parser(TOOLS), [cut]) == ("Hm.", "", [])
    assert result(dialect_of(None, "gpt-oss", "gpt-oss").parser(TOOLS), ["Hello"]) == ("", "Hello", [])


@pytest.mark.parametrize("constrained", [False, True])
def test_any_split_gives_the_same_result(constrained: bool) -> None:
    """500 random splits of valid and malformed calls, alone and behind one another."""
    rng = random.Random(7)
    cases = [(name, text) for name, text, *_ in VALID] + [(name, text) for name, text, _ in MALFORMED]
    for _ in range(500):
        name, text = rng.choice(cases)
        if rng.random() < 0.5:
            others = [other for other_name, other in cases if other_name == name]
            text += rng.choice(["", "\n", " then "]) + rng.choice(others)
        dialect = dialect_of(None, name, "gpt-oss" if name == "gpt-oss" else "think")
        options: Any = {"constrained": constrained, "max_calls": rng.choice([1, 128])}
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, len(text))))
        pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        expected = result(dialect.parser(TOOLS, **options), [text])
        assert result(dialect.parser(TOOLS, **options), pieces) == expected, (name, text, pieces)
        assert result(dialect.parser(TOOLS, **options), list(text)) == expected, (name, text)


MAYBE: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "null"}]}
DEFINED: dict[str, Any] = {
    "Text": {"type": "string"},
    "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "integer"}]},
    "Self": {"$ref": "#/$defs/Self"},
    **{f"Deep{n}": {"anyOf": [{"$ref": f"#/$defs/Deep{n + 1}"}] * 2} for n in range(40)},
    "Deep40": {"type": "string"},
}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (MAYBE, "12345", "12345"),
        (MAYBE, "None", None),
        (MAYBE, '"a"', "a"),
        ({"type": ["string", "number"]}, "12", 12),
        ({"type": ["string", "integer"]}, "1.5", "1.5"),
        ({"type": "integer"}, "many", "many"),
        ({"enum": ["1", 2]}, "2", 2),
        ({"const": 3}, "3", 3),
        ({"description": "unknown"}, "3", "3"),
        ({}, "3", 3),
        ({"properties": {}}, '{"a": 1}', {"a": 1}),
        ({"items": {"type": "integer"}}, "[1]", [1]),
        ({"type": "string", "anyOf": [{"minLength": 1}, {"pattern": "a"}]}, "3", "3"),
        ({"allOf": [{"$ref": "#/$defs/Text"}], "default": ""}, "3", "3"),
        ({"$ref": "#/$defs/Loop"}, "3", 3),
        ({"$ref": "#/$defs/Self"}, "3", "3"),
        ({"$ref": "#/$defs/Deep0"}, "3", "3"),
        ({"$ref": "#/$defs/none"}, "3", "3"),
        ({"type": "array"}, "[{'a': True, \"b\": None}]", [{"a": True, "b": None}]),
        ({"type": "object"}, r"{\"a\": \"C:\\\\x\"}", {"a": "C:\\x"}),
        ({"type": "array"}, "[1j, f()]", "[1j, f()]"),
        ({"type": "array"}, "{'a': 1}", "{'a': 1}"),
        ({"type": ["array", "string"]}, "['a']", "['a']"),
    ],
)
def test_a_value_in_tags_is_of_a_type_that_its_schema_takes(schema: Any, text: str, value: object) -> None:
    assert as_typed(text, {"properties": {"x": schema}, "$defs": DEFINED}, "x") == value


@pytest.mark.parametrize(
    ("name", "opening", "key", "closing"),
    [("hermes", "<tool_call>\n", "arguments", "\n</tool_call>"), ("llama3", "", "parameters", "")],
)
def test_arguments_of_constrained_calls_come_while_the_model_writes_them(
    name: str, opening: str, key: str, closing: str
) -> None:
    """Also of calls that nothing opens but their own bracket."""
    parser = dialect_of(None, name).parser(TOOLS, constrained=True)
    texts = [f'{opening}{{"name": "wea', f'ther", "{key}": {{"city"', ': "Paris"', f"}}}}{closing}"]
    parts = [[(part.kind, part.text) for part in parser.feed(text)] for text in texts]
    assert parts == [
        [],
        [("call", "weather"), ("arguments", '{"city"')],
        [("arguments", ': "Paris"')],
        [("arguments", "}")],
    ]


@pytest.mark.parametrize(("name", "text", "city"), QUOTED)
def test_constrained_calls_are_those_of_the_whole_text(name: str, text: str, city: str) -> None:
    text = f"{text}Bye"
    whole_text = result(dialect_of(None, name).parser(TOOLS), [text])
    assert [json.loads(arguments) for _, arguments in whole_text[2]] == [{"city": city}]
    assert result(dialect_of(None, name).parser(TOOLS, constrained=True), list(text)) == whole_text


@pytest.mark.parametrize(("name", "text"), [("minimax_m2", MINIMAX), ("deepseek_v4", DSML_V4)])
def test_several_calls_of_one_opening_come_while_the_model_writes_them(name: str, text: str) -> None:
    for most, rest in ((128, [("call", "now", 1), ("arguments", "{}", 1)]), (1, [])):
        parser = dialect_of(None, name).parser(TOOLS, constrained=True, max_calls=most)
        ends = [text.index("ris"), text.index("2<"), text.index("\n<", text.index("2<")), len(text)]
        pieces = [text[i:j] for i, j in zip([0, *ends], ends, strict=False)]
        parts = [[(part.kind, part.text, part.number) for part in parser.feed(piece)] for piece in pieces]
        assert parts == [
            [("call", "weather", 0), ("arguments", '{"city":"Pa', 0)],
            [("arguments", 'ris","days":', 0)],
            [],
            [("arguments", "2}", 0), *rest],
        ]


@pytest.mark.parametrize("broken", ["nothing", "<function=weather>\nParis", "<function=weather>\n<parameter=city>\na"])
def test_a_call_that_breaks_ends_at_its_closing_text(broken: str) -> None:
    text = f"<tool_call>\n{broken}\n</tool_call>"
    good = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
    _, content, calls = whole("qwen3_coder", f"{text}\n{good}")
    assert calls[-1] == ("now", {})
    assert (content == text) == (len(calls) == 1)


def test_texts_in_tags_come_while_the_model_writes_them() -> None:
    parser = dialect_of(None, "qwen3_coder").parser(TOOLS, constrained=True)
    texts = [
        "<tool_call>\n<function=weather>\n<parameter=city>\nKö",
        'ln "1"\n<',
        "/param",
        "eter>\n<parameter=days>\n2",
    ]
    texts += ["\n</parameter>\n</function>\n</tool_call>"]
    parts = [[(part.kind, part.text) for part in parser.feed(text)] for text in texts]
    assert parts == [
        [("call", "weather"), ("arguments", '{"city":"Kö')],
        [("arguments", 'ln \\"1\\"')],
        [],
        [("arguments", '","days":')],
        [("arguments", "2}")],
    ]


def test_one_call_is_left_if_calls_may_not_be_parallel() -> None:
    assert whole("hermes", f"{NOW}\n{CALL}", max_calls=1) == ("", "", [("now", {})])
    text = '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]'
    assert whole("mistral", text, max_calls=1)[2] == [("now", {})]


def test_a_blank_line_stands_between_harmonys_messages_of_a_kind() -> None:
    messages = [
        ("analysis", "One."),
        ("analysis", "Two.\n"),
        ("commentary", "I look."),
        ("final", "It is "),
        ("final", ""),
    ]
    text = "<|end|><|start|>assistant".join(f"<|channel|>{channel}<|message|>{body}" for channel, body in messages)
    for pieces in ([text], list(text)):
        got = result(dialect_of(None, "gpt-oss", "gpt-oss").parser(TOOLS), pieces)
        assert got == ("One.\n\nTwo.\n", "I look.\n\nIt is ", [])


def test_harmonys_reasoning_stays_in_the_text_if_no_reasoning_is_looked_for() -> None:
    parser = dialect_of(None, "gpt-oss", "none").parser(TOOLS)
    assert result(parser, [HARMONY_CALL])[:2] == ("", "The user asks.")


def test_calls_are_text_without_tools() -> None:
    assert result(dialect_of(None, "hermes").parser({}), [CALL]) == ("", CALL, [])


def test_gemmas_reasoning_is_told_from_its_answer() -> None:
    text = f"<|channel>thought\nHm.\n<channel|>I look.{GEMMA}"
    assert result(dialect_of(None, "gemma4", "gemma4").parser(TOOLS), list(text))[:2] == ("Hm.", "I look.")
    assert "<|channel>" in dialect_of(None, "gemma4", "gemma4").markers


@pytest.mark.parametrize("tools", [TOOLS, {}])
def test_what_frames_coheres_answers_is_no_text_of_them(tools: dict[str, Any]) -> None:
    """With and without reasoning, and where the prompt has opened it."""
    dialect = dialect_of("<|START_THINKING|><|START_RESPONSE|><|START_ACTION|>")
    thought, answer = "Hm.<|END_THINKING|>", "<|START_RESPONSE|>Hi <b>!<|END_RESPONSE|>"
    for text, is_open in ((thought + answer, True), (f"<|START_THINKING|>{thought}\n{answer}", False)):
        assert result(dialect.parser(tools, reasoning_is_open=is_open), list(text)) == ("Hm.", "Hi <b>!", [])
    assert result(dialect.parser(tools), [answer.replace("RESPONSE", "TEXT")]) == ("", "Hi <b>!", [])
    assert {"<|START_RESPONSE|>", "<|END_ACTION|>"} <= {*dialect.markers}


@pytest.mark.parametrize("tools", [TOOLS, {}])
def test_what_frames_hunyuans_answers_and_calls_is_no_text_of_them(tools: dict[str, Any]) -> None:
    dialect = dialect_of(None, "hunyuan_a13b", "hunyuan_a13b")
    for thought in ("Hm.", ""):
        text = f"<think>\n{thought}\n</think>\n<answer>\nI look.\n{HUNYUAN_CALLS}\n</answer>"
        calls = [("weather", json.dumps(PARIS, separators=(",", ":"))), ("now", "{}")] if tools else []
        answer = "I look." if tools else f"I look.\n{HUNYUAN_CALLS}"
        assert result(dialect.parser(tools), list(text)) == (thought, answer, calls)


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        ("<answer>\nHi </b>!\n</answer>", "Hi </b>!"),
        ("<answer>Hi</answer>\n", "Hi"),
        ("<response>\nAn </response>, an <answer>\n</response>\n\n", "An </response>, an <answer>"),
        ("Hi <answer> </answer>", "Hi <answer> </answer>"),
        ("<answer>\nHi", "Hi"),
        ("<answer>\nHi</ans", "Hi</ans"),
        ("<ans", "<ans"),
        ("<b>Hi", "<b>Hi"),
    ],
)
def test_tags_around_the_whole_answer_are_no_text_of_it(answer: str, content: str) -> None:
    dialect = dialect_of(None, "hermes", "hunyuan_a13b")
    for tools in (TOOLS, {}):
        for text in (f"<think>\nHm.\n</think>\n{answer}", answer):
            reasoning = "Hm." if "Hm." in text else ""
            assert result(dialect.parser(tools), [text]) == (reasoning, content, []), text
            assert result(dialect.parser(tools), list(text)) == (reasoning, content, []), text
    assert result(dialect.parser(TOOLS), list(f"<think>Hm.</think>{NOW}")) == ("Hm.", "", [("now", "{}")])
    assert result(dialect.parser({}, separate=False), [answer])[1] == answer


def test_reasoning_that_the_prompt_opened_ends_where_it_is_closed() -> None:
    dialect = dialect_of(None, "hermes", "qwen3")
    assert dialect.reasoning_is_open_after("<|im_start|>assistant\n<think>\n")
    assert not dialect.reasoning_is_open_after("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not dialect.reasoning_is_open_after("what does <think> mean?<|im_end|>\n<|im_start|>assistant\n")
    parser = dialect.parser(TOOLS, reasoning_is_open=True)
    assert result(parser, [f"Well.\n</think>\n\n{NOW}"]) == ("Well.", "", [("now", "{}")])
    assert result(dialect.parser(TOOLS, reasoning_is_open=True), ["Well, "]) == ("Well, ", "", [])
    always = dialect_of(None, "none", "deepseek-r1").parser({})
    assert result(always, ["Well.</think>Hi."]) == ("Well.", "Hi.", [])


@pytest.mark.parametrize("size", [1, 100])
def test_reasoning_that_is_open_may_be_opened_once_more(size: int) -> None:
    text = "\n<think>\nWell <think>.</think>Hi."
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert result(dialect_of(None, "none", "deepseek-r1").parser({}), pieces) == ("Well <think>.", "Hi.", [])
    asked = dialect_of(None, "none", "think").parser({}, reasoning_is_open=True)
    assert result(asked, pieces) == ("Well <think>.", "Hi.", [])
    whole = dialect_of(None, "none", "deepseek-r1").parser({}, separate=False)
    assert result(whole, pieces)[:2] == ("", text)


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        ("{{ messages }}", None, None),
        ("<tool_call>{{ tool }}</tool_call>", "hermes", None),
        ("<longcat_tool_call>{{ tool }}</longcat_tool_call><tool_call>", "longcat", None),
        ("<longcat_tool_call>{{ name }}<longcat_arg_key>", None, None),
        ("<think>{{ reasoning }}</think><tool_call>\n<function=", "qwen3_coder", "think"),
        ("</think><tool_call>{{ name }}<arg_key>", "glm45", "think"),
        ("<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>", "kimi_k2", None),
        ("'function<｜tool▁sep｜>' + name + '\\n```json\\n' + arguments", "deepseek_v3", None),
        ("name + '<｜tool▁sep｜>' + arguments", "deepseek_v31", None),
        ("</think>{{ '<minimax:tool_call>' }}<invoke name=", "minimax_m2", "think"),
        ("</think>{{ calls }}<｜DSML｜function_calls>", "deepseek_v32", "think"),
        ("{% set mark = '｜DSML｜' %}{{ '<' ~ mark ~ 'function_calls>' }}", "deepseek_v32", None),
        ("{% for call in message.tool_calls %}<｜DSML｜tool_calls></think>", "deepseek_v4", "think"),
        ("<|channel>thought\n{{ '<|tool_call>call:' + name }}", "gemma4", "gemma4"),
        ("<|START_THINKING|>{{ plan }}<|START_ACTION|>[", "cohere", "cohere"),
        ("'List of tools: <|tool_list_start|>[' + tool", "lfm2", None),
        ("'use the following format:\n' + '<TOOLCALL>[{{'", "nemotron", None),
        ("Write between <think></think> and <response></response>.", None, "think_answer"),
        (r"{% if '<answer>' in text %}{{ '<think>\n\n</think>\n' }}", None, "think_answer"),
        (r"{{ '</think>' + '\n<response>' }}{{ result }}{{ '</response>' }}", None, "think"),
        ("[TOOL_CALLS] [", "mistral", None),
        ("prefix calls with functools, as <|tool_calls|>[..]", "functools", None),
        ("Write your thoughts after 'Here is my thought process:'<|tool_call|>", "granite", "granite"),
        ("[TOOL_CALLS]{{ name }}[ARGS]", "mistral_v11", None),
        ("<think>{{ '<answer>' }}</think><tool_calls>[{{ calls }}]", "hunyuan", "think_answer"),
        ('{"name": function name, "parameters": dictionary of argument', "llama3", None),
        ("in the format of [func_name1(params_name1=params_value1), func_name2(params)]", "pythonic", None),
        ("<seed:think>{{ thought }}</seed:think><seed:tool_call>\n<function=", "seed_oss", "seed_oss"),
        ("{% if add_generation_prompt %}{{ '<|assistant|>\n<think>' }}{% endif %}", None, "think"),
    ],
)
def test_the_forms_are_found_in_the_chat_template(template: str, calls: str | None, reasoning: str | None) -> None:
    assert dialect_of(template) == dialect_of(None, calls or "none", reasoning or "none")


@pytest.mark.parametrize(("token", "calls"), [("<|tool_call_start|>", "lfm2"), ("<|/tool_call|>", "phi4_mini")])
def test_a_special_token_shows_a_form_that_the_template_hides(token: str, calls: str) -> None:
    assert dialect_of("{{ messages }}", special_tokens=("<pad>", token)) == dialect_of(None, calls, "none")
    assert dialect_of("<tool_call>", special_tokens=(token,)) == dialect_of(None, "hermes", "none")


def test_seed_oss_thinks_and_calls_in_words_of_its_own() -> None:
    call = "<seed:tool_call>\n<function=weather>\n<parameter=city>\nParis</parameter>\n</function>\n</seed:tool_call>"
    dialect = dialect_of(None, "seed_oss", "seed_oss")
    assert dialect.reasoning_is_open_after("<seed:bos>assistant\n<seed:think><seed:cot_budget_reflect>")
    assert not dialect.reasoning_is_open_after("<seed:bos>assistant\n")
    parser = dialect.parser(TOOLS)
    assert result(parser, list(f"<seed:think>Hm</seed:think>I look.\n{call}")) == (
        "Hm", "I look.", [("weather", '{"city":"Paris"}')],
    )  # fmt: skip


def test_names_of_other_servers_are_understood_and_unknown_ones_refused() -> None:
    assert dialect_of(None, "qwen25", "qwen3") == dialect_of(None, "hermes", "think")
    assert dialect_of("<|channel|>") == dialect_of(None, "openai", "openai_gptoss")
    assert dialect_of(None, "deepseekv32", "deepseek-v3") == dialect_of(None, "deepseek_v32", "think")
    assert dialect_of(None, "deepseekv4", "deepseek-v4") == dialect_of(None, "deepseek_v4", "think")
    assert dialect_of(None, "granite4", "nemotron_v3") == dialect_of(None, "hermes", "think")
    assert dialect_of(None, "mimo", "step3p5") == dialect_of(None, "qwen3_coder", "think_always")
    assert dialect_of("[TOOL_CALLS]{{ name }}[ARGS]", "mistral") == dialect_of(None, "mistral_v11", "none")
    with pytest.raises(ConfigError, match="--tool-call-parser is klingon, but must be one of auto, none"):
        dialect_of(None, "klingon")


def test_flags_offer_the_parsers_that_there_are() -> None:
    assert server.TOOL_CALL_PARSERS == TOOL_CALL_PARSERS
    assert server.REASONING_PARSERS == REASONING_PARSERS
