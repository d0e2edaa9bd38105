"""DeepSeek V3.2 and V4 bring no chat template: chats are written as their own programs write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxsgl.errors import InvalidRequest
from jaxsgl.text.dialects import dialect_of
from jaxsgl.text.tokenizer import TemplateOptions, Tokenizer, load_tokenizer
from tests.text.small_tokenizers import byte_level, save

BOS, EOS, USER, ANSWER = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
TOOLS = [{"type": "function", "function": {"name": name, "description": "Läuft"}} for name in ("run", "now")]
SCHEMAS = '{"name": "run", "description": "Läuft"}\n{"name": "now", "description": "Läuft"}'
CALLS = [
    {"id": "a", "type": "function", "function": {"name": "run", "arguments": {"at": "Köln", "days": [1, True]}}},
    {"id": "b", "type": "function", "function": {"name": "now", "arguments": {}}},
]
TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi", "reasoning_content": "greets"},
    {"role": "user", "content": "When?"},
    {"role": "assistant", "content": "", "reasoning_content": "asks", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "b", "content": "noon"},
    {"role": "tool", "tool_call_id": "a", "content": "done"},
]
WRITTEN_CALLS = (
    '\n\n<｜DSML｜{0}>\n<｜DSML｜invoke name="run">\n'
    '<｜DSML｜parameter name="at" string="true">Köln</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">[1, true]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n</｜DSML｜{0}>' + EOS
)


def folder(path: Path, model_type: str, template: str | None = None) -> Path:
    save(byte_level(), path, template)
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    return path


@pytest.fixture(scope="module")
def v32(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(str(folder(tmp_path_factory.mktemp("v32"), "deepseek_v32")))


@pytest.fixture(scope="module")
def v4(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(str(folder(tmp_path_factory.mktemp("v4"), "deepseek_v4")))


def prompt(tokenizer: Tokenizer, turns: list[dict[str, Any]], **variables: Any) -> str:
    return tokenizer.render_chat(turns, TemplateOptions(variables=variables))


@pytest.mark.parametrize(
    ("variables", "by_v32", "by_v4"),
    [
        ({}, "</think>", "<think>"),
        ({"thinking": True}, "<think>", "<think>"),
        ({"thinking": False}, "</think>", "</think>"),
        ({"enable_thinking": True}, "<think>", "<think>"),
        ({"enable_thinking": False, "reasoning_effort": "high"}, "</think>", "</think>"),
        ({"reasoning_effort": "high"}, "<think>", "<think>"),
        ({"reasoning_effort": "none"}, "</think>", "</think>"),
    ],
)
def test_a_chat_opens_the_reasoning_or_closes_it(
    v32: Tokenizer, v4: Tokenizer, variables: dict[str, Any], by_v32: str, by_v4: str
) -> None:
    for tokenizer, mark in ((v32, by_v32), (v4, by_v4)):
        text = prompt(tokenizer, TURNS[:2], **variables)
        assert text == f"{BOS}Be brief.{USER}hello{ANSWER}{mark}"
        assert dialect_of(tokenizer.chat_template).reasoning_is_open_after(text) is (mark == "<think>")


def test_the_reasoning_of_earlier_turns_is_dropped(v32: Tokenizer, v4: Tokenizer) -> None:
    inside = [*TURNS[:2], {"role": "assistant", "content": "<think>greets</think>hi"}, TURNS[3]]
    text = f"{BOS}Be brief.{USER}hello{ANSWER}</think>hi{EOS}{USER}When?{ANSWER}"
    for tokenizer in (v32, v4):
        assert prompt(tokenizer, TURNS[:4], thinking=True) == text + "<think>"
        assert prompt(tokenizer, TURNS[:4], thinking=False) == text + "</think>"
        assert prompt(tokenizer, inside, thinking=True) == text + "<think>"
    kept = f"{BOS}Be brief.{USER}hello{ANSWER}<think>greets</think>hi{EOS}{USER}When?{ANSWER}<think>"
    assert prompt(v4, TURNS[:4], drop_thinking=False) == kept


@pytest.mark.parametrize(("thinking", "begin"), [(True, "<think>asks</think>"), (False, "</think>")])
def test_v32s_calls_and_results_in_the_order_of_the_calls(v32: Tokenizer, thinking: bool, begin: str) -> None:
    text = v32.render_chat(TURNS, TemplateOptions(tools=TOOLS, variables={"thinking": thinking}))
    before, behind = text.split(f"\n<functions>\n{SCHEMAS}\n</functions>\n")
    assert before.startswith(f"{BOS}Be brief.\n\n## Tools\n\nYou have access to a set of tools you can use to ans")
    assert behind == (
        f"{USER}hello{ANSWER}</think>hi{EOS}{USER}When?{ANSWER}{begin}{WRITTEN_CALLS.format('function_calls')}"
        "\n\n<function_results>\n<result>done</result>\n<result>noon</result>\n</function_results>\n\n"
        + ("<think>" if thinking else "</think>")
    )


@pytest.mark.parametrize("thinking", [True, False])
def test_v4s_results_are_the_users_and_with_tools_all_reasoning_is_kept(v4: Tokenizer, thinking: bool) -> None:
    turns = [*TURNS[1:], {"role": "user", "content": "So?"}]
    text = v4.render_chat(turns, TemplateOptions(tools=TOOLS, variables={"thinking": thinking}))
    before, behind = text.split(f"\n\n### Available Tool Schemas\n\n{SCHEMAS}\n\nYou MUST strictly follow the above ")
    assert before.startswith(f"{BOS}\n\n## Tools\n\nYou have access to a set of tools to help answer the user's")
    first, second = ("<think>greets</think>", "<think>asks</think>") if thinking else ("</think>", "</think>")
    assert behind == (
        "defined tool name and parameter schemas to invoke tool calls.\n"
        f"{USER}hello{ANSWER}{first}hi{EOS}{USER}When?{ANSWER}{second}{WRITTEN_CALLS.format('tool_calls')}"
        f"{USER}<tool_result>done</tool_result>\n\n<tool_result>noon</tool_result>\n\nSo?{ANSWER}"
        + ("<think>" if thinking else "</think>")
    )


def test_the_templates_show_in_which_section_calls_stand(v32: Tokenizer, v4: Tokenizer) -> None:
    for tokenizer, section in ((v32, "function_calls"), (v4, "tool_calls")):
        calls = dialect_of(tokenizer.chat_template).calls
        assert calls is not None and calls.opens == (f"<｜DSML｜{section}>",)
        assert calls.close == f"</｜DSML｜{section}>"


def test_a_message_is_continued(v32: Tokenizer, v4: Tokenizer) -> None:
    options = TemplateOptions((), False, True, {"thinking": True})
    begun = f"{BOS}Be brief.{USER}hello{ANSWER}"
    for tokenizer in (v32, v4):
        for turn, text in (
            ({"content": "Well, "}, "<think></think>Well, "),
            ({"content": "Well,", "reasoning_content": "greets"}, "<think>greets</think>Well,"),
            ({"content": "<think>gre"}, "<think>gre"),
        ):
            assert tokenizer.render_chat([*TURNS[:2], {"role": "assistant", **turn}], options) == begun + text


def test_v4_is_told_how_much_to_think_in_the_words_of_its_release(v4: Tokenizer, tmp_path: Path) -> None:
    program = folder(tmp_path, "deepseek_v4") / "encoding" / "encoding_dsv4.py"
    program.parent.mkdir()
    program.write_text('raise SystemExit("a program of the folder has run")\nPROMPTS = {"max": "Beyond maximum"}\n')
    later = load_tokenizer(str(tmp_path))
    absolute, beyond = f"{BOS}Reasoning Effort: Absolute maximum", f"{BOS}Reasoning Effort: Beyond maximum — exhaustive"
    for tokenizer, effort, begin in (
        (v4, "max", absolute), (v4, "high", f"{BOS}Be brief."), (later, "max", beyond), (later, "high", absolute),
        (later, "low", f"{BOS}Be brief."),
    ):  # fmt: skip
        assert prompt(tokenizer, TURNS[:2], reasoning_effort=effort).startswith(begin)
    assert prompt(v4, TURNS[:2], reasoning_effort="max", thinking=False).startswith(f"{BOS}Be brief.")


def test_a_role_that_the_formats_dont_have_is_refused(v32: Tokenizer, v4: Tokenizer) -> None:
    for tokenizer in (v32, v4):
        assert not tokenizer.knows_role("developer")  # so that it becomes the system's
        with pytest.raises(InvalidRequest, match="the role critic is none of"):
            prompt(tokenizer, [{"role": "critic", "content": "no"}])


def test_a_template_of_the_folder_or_of_the_flag_counts_first(tmp_path: Path) -> None:
    path = str(folder(tmp_path, "deepseek_v32", "its own"))
    assert prompt(load_tokenizer(path), TURNS[:2]) == "its own"
    assert prompt(load_tokenizer(path, chat_template="the flag's"), TURNS[:2]) == "the flag's"
