"""Which forms of reasoning and tool calls a model writes: named by a flag, or found in its chat template.

A `Dialect` makes the parser of a sample. Owns the names of parsers, those of SGLang and vLLM among them. Never knows
requests beyond their tools; the HTTP endpoints use it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxsgl.errors import ConfigError
from jaxsgl.text.answer import MAX_CALLS, AnswerParser, Parser, PlainParser, ReasoningForm
from jaxsgl.text.calls import FORMS, CallForm, Tools
from jaxsgl.text.harmony import MARKERS, HarmonyParser
from jaxsgl.text.response_template import TemplateParser, is_readable, markers_of
from jaxsgl.text.tags import DSML

logger = logging.getLogger(__name__)

AUTO, NONE, HARMONY = "auto", "none", "gpt-oss"
THINK = ReasoningForm("<think>", "</think>")
REASONING_FORMS = {
    "think": THINK,
    "think_answer": ReasoningForm(
        "<think>", "</think>", wraps=(("<answer>", "</answer>"), ("<response>", "</response>"))
    ),
    "think_always": ReasoningForm("<think>", "</think>", opens_itself=True),
    "mistral": ReasoningForm("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningForm("<seed:think>", "</seed:think>", begin="<seed:cot_budget_reflect>"),
    "granite": ReasoningForm(
        "Here is my thought process:",
        "Here is my response:",
        also_opens=("Here's my thought process:",),
        also_closes=("Here's my response:",),
    ),
    "cohere": ReasoningForm(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        frames=(("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>")),
    ),
    "gemma4": ReasoningForm("<|channel>thought\n", "<channel|>"),
}
# The names that SGLang and vLLM have for the same forms.
_OF_COHERE = ("cohere_command3", "cohere_command4")
_REASONING_NAMES = {
    "qwen3": "think", "deepseek-v3": "think", "deepseek_v3": "think", "glm45": "think",
    "interns1": "think", "kimi_k2": "think", "nano_v3": "think", "nemotron_v3": "think",
    "olmo3": "think", "smollm3": "think",
    "deepseek-r1": "think_always", "deepseek_r1": "think_always", "qwen3-thinking": "think_always",
    "step3": "think_always", "minimax": "think_always", "minimax_m2": "think_always",
    "hunyuan_a13b": "think_answer", "ernie45": "think_answer",
    "glm47": "think", "mimo": "think", "nemotron_3": "think", "step3p5": "think_always",
    "deepseek-v4": "think", "deepseek_v4": "think",
    "openai_gptoss": HARMONY, **dict.fromkeys(_OF_COHERE, "cohere"),
}  # fmt: skip
_CALL_NAMES = {
    "qwen": "hermes", "qwen25": "hermes", "smollm3": "hermes", "granite4": "hermes",
    "qwen3_xml": "qwen3_coder", "glm": "glm45", "glm47": "glm45",
    "llama3_json": "llama3", "llama4_json": "llama3", "llama4_pythonic": "pythonic",
    "minimax-m2": "minimax_m2", "deepseek-v3": "deepseek_v3", "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31", "deepseekv32": "deepseek_v32", "deepseekv4": "deepseek_v4",
    "phi4_mini_json": "functools", "hunyuan_a13b": "hunyuan", "nemotron_json": "nemotron",
    "llama_nemotron_json": "nemotron", "openai": HARMONY,
    "mimo": "qwen3_coder", "step3p5": "qwen3_coder", "ernie45": "hermes", "jamba": "hunyuan",
    **dict.fromkeys(_OF_COHERE, "cohere"),
}  # fmt: skip
TOOL_CALL_PARSERS = (AUTO, NONE, *FORMS, HARMONY, *_CALL_NAMES)
REASONING_PARSERS = (AUTO, NONE, *REASONING_FORMS, HARMONY, *_REASONING_NAMES)

_MISTRAL_V11 = re.compile(r"\[TOOL_CALLS\](?s:.*)\[ARGS\]")
# What a chat template holds if its model writes calls in a form; the first that fits counts.
_CALL_SIGNS = (
    (re.compile(r"<\|channel\|>"), HARMONY),
    (re.compile(r"<\|tool_call_argument_begin\|>"), "kimi_k2"),
    (re.compile(r"<｜tool▁sep｜>(?s:.*)```json|```json(?s:.*)<｜tool▁sep｜>"), "deepseek_v3"),
    (re.compile(r"<｜tool▁sep｜>"), "deepseek_v31"),
    (re.compile(rf"{DSML}(?s:.*)function_calls|function_calls(?s:.*){DSML}"), "deepseek_v32"),
    (re.compile(DSML), "deepseek_v4"),
    (re.compile(r"<minimax:tool_call>"), "minimax_m2"),
    (re.compile(r"<seed:tool_call>"), "seed_oss"),
    (re.compile(r"<function="), "qwen3_coder"),
    (re.compile(r"<arg_key>"), "glm45"),
    (re.compile(r"<\|START_ACTION\|>"), "cohere"),
    (re.compile(r"\bfunctools\b"), "functools"),
    (re.compile(r"<function_calls>"), "olmo3"),
    (re.compile(r"<\|tool_(?:list|call)_start\|>"), "lfm2"),
    (re.compile(r"<\|/tool_call\|>"), "phi4_mini"),
    (re.compile(r"<\|tool_call\|>"), "granite"),
    (re.compile(r"<TOOLCALL>"), "nemotron"),
    (re.compile(r"<\|tool_call>"), "gemma4"),
    (re.compile(r"<longcat_tool_call>(?!(?s:.*)<longcat_arg_key>)"), "longcat"),  # later ones have tags inside
    (re.compile(r"<tool_call>"), "hermes"),
    (re.compile(r"<tool_calls>"), "hunyuan"),
    (_MISTRAL_V11, "mistral_v11"),
    (re.compile(r"\[TOOL_CALLS\]"), "mistral"),
    (re.compile(r"\[func_name1\("), "pythonic"),
    (re.compile(r'"parameters": dictionary|<\|python_tag\|>'), "llama3"),
)
# Special tokens that show a form where the template has none of the signs.
_CALL_TOKENS = {"<|tool_call_start|>": "lfm2", "<|/tool_call|>": "phi4_mini"}
_WRAP = r"<answer>|<response>(?:</response>|\\n|\n)"  # MiniMax's results of tools stand in <response>, too
_REASONING_SIGNS = (
    (re.compile(r"<\|channel\|>"), HARMONY),
    (re.compile(r"</?seed:think>"), "seed_oss"),
    (re.compile(r"<\|START_(?:THINKING|RESPONSE)\|>"), "cohere"),
    (re.compile(rf"</think>(?s:.*)(?:{_WRAP})|(?:{_WRAP})(?s:.*)</think>"), "think_answer"),
    (re.compile(r"</think>|add_generation_prompt(?s:.*)<think>"), "think"),
    (re.compile(r"\[/THINK\]"), "mistral"),
    (re.compile(r"<\|channel>thought"), "gemma4"),
    (re.compile(r"Here is my thought process:"), "granite"),
)


@dataclass(frozen=True)
class Dialect:
    """What a model writes around its answers.

    Attributes:
      reasoning: its form, or None if no reasoning is looked for.
      calls: their form, or None if no calls are looked for.
      harmony_reasoning, harmony_calls: the model writes Harmony, and what of it is taken apart.
      template: how the tokenizer says that answers are written, if nothing else is known of the model.
      template_markers: special tokens that it looks for.
    """

    reasoning: ReasoningForm | None = None
    calls: CallForm | None = None
    harmony_reasoning: bool = False
    harmony_calls: bool = False
    template: dict[str, Any] | None = None
    template_markers: tuple[str, ...] = ()

    @property
    def is_harmony(self) -> bool:
        """Whether answers are messages in channels."""
        return self.harmony_reasoning or self.harmony_calls

    @property
    def has_calls(self) -> bool:
        """Whether the model has a form of its own for calls."""
        return self.calls is not None or self.harmony_calls

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that parsers look for. Those that are special tokens must be left in the text."""
        if self.is_harmony:
            return MARKERS
        found: tuple[str, ...] = self.template_markers
        if self.reasoning is not None:
            found += (self.reasoning.open, self.reasoning.close, *_tags_in(self.reasoning.open))
            found += tuple(text for frame in self.reasoning.frames for text in frame)
        if self.calls is not None:
            found += (*self.calls.opens, self.calls.close, self.calls.between, self.calls.quote, "[CALL_ID]", DSML)
            found += (*(self.calls.section or ()), *_tags_in(self.calls.prefix))
        return tuple(dict.fromkeys(text for text in found if text))

    def reasoning_is_open_after(self, prompt: str, continued: str | None = None) -> bool:
        """Returns whether `prompt`, or its end, has opened the reasoning; or the message that is `continued`."""
        form = self.reasoning
        if form is None:
            return False
        if continued is not None:
            return continued.rfind(form.open) > continued.rfind(form.close)
        return prompt.rstrip().removesuffix(form.begin).endswith(form.open.rstrip())

    def parser(
        self,
        tools: Tools,
        *,
        reasoning_is_open: bool = False,
        constrained: bool = False,
        max_calls: int = MAX_CALLS,
        separate: bool = True,
        other_form: CallForm | None = None,
        prompt_tail: str = "",
    ) -> Parser:
        """Returns the parser of one sample. Without tools, calls are text; `other_form` replaces the model's.

        `prompt_tail`: the end of the prompt.
        """
        if self.template is not None and other_form is None:
            return TemplateParser(self.template, tools, prompt_tail, max_calls, separate)
        if self.is_harmony:
            with_calls = bool(tools) and self.harmony_calls
            return HarmonyParser(
                tools,
                with_calls=with_calls,
                constrained=constrained,
                max_calls=max_calls,
                separate=separate and self.harmony_reasoning,
            )
        calls = (other_form or self.calls) if tools else None
        if self.reasoning is None and calls is None:
            return PlainParser()
        return AnswerParser(
            self.reasoning,
            calls,
            tools,
            reasoning_is_open=reasoning_is_open,
            constrained=constrained,
            max_calls=max_calls,
            separate=separate,
        )


def dialect_of(
    chat_template: str | None,
    tool_call_parser: str = AUTO,
    reasoning_parser: str = AUTO,
    response_template: dict[str, Any] | None = None,
    special_tokens: Sequence[str] = (),
) -> Dialect:
    """Returns what the flags say, or else what the chat template shows. Raises `ConfigError` for unknown names.

    "mistral" names all forms of Mistral's, as in vLLM and SGLang: the template shows which of them it is.
    If neither says anything, answers are read by the tokenizer's `response_template`, if it has one.
    """
    is_auto = tool_call_parser == reasoning_parser == AUTO
    calls = _named("--tool-call-parser", tool_call_parser, TOOL_CALL_PARSERS, _CALL_NAMES)
    reasoning = _named("--reasoning-parser", reasoning_parser, REASONING_PARSERS, _REASONING_NAMES)
    template = chat_template or ""
    if calls == "mistral" and _MISTRAL_V11.search(template):
        calls = "mistral_v11"
    if calls == AUTO:
        by_token = next((_CALL_TOKENS[token] for token in special_tokens if token in _CALL_TOKENS), NONE)
        calls = next((name for sign, name in _CALL_SIGNS if sign.search(template)), by_token)
    if reasoning == AUTO:
        reasoning = next((name for sign, name in _REASONING_SIGNS if sign.search(template)), NONE)
    unknown = is_auto and calls == reasoning == NONE
    if unknown and response_template is not None and is_readable(response_template):
        return Dialect(template=response_template, template_markers=markers_of(response_template, special_tokens))
    logger.info("reasoning is read as %s, tool calls as %s", reasoning, calls)
    return Dialect(
        REASONING_FORMS.get(reasoning),
        FORMS.get(calls),
        harmony_reasoning=reasoning == HARMONY,
        harmony_calls=calls == HARMONY,
    )


def _tags_in(text: str) -> list[str]:
    """Returns the parts of a text that may be special tokens."""
    return re.findall(r"<[^>]+>", text)


def _named(flag: str, given: str, known: tuple[str, ...], same: dict[str, str]) -> str:
    if given not in known:
        raise ConfigError(f"{flag} is {given}, but must be one of {', '.join(known)}")
    return same.get(given, given)
