"""Which tools a chat may call, how its template gets them, and how its answers are taken apart.

Reads tools, tool_choice and what belongs to reasoning out of a body, into a `Turn` for one call: chat.py and
responses.py make their messages of it. Never knows how a model writes calls: the `Dialect` does.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jaxsgl.config.server import ServerConfig
from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.generation import ServedModel
from jaxsgl.frontend.http.openai.schemas import ChatRequest, Tool
from jaxsgl.requests.grammar import Grammar
from jaxsgl.text.answer import MAX_CALLS, Parser
from jaxsgl.text.call_grammar import (
    WITHOUT_PLACE,
    Calls,
    behind_reasoning,
    call_grammar,
    content_grammar,
    free_text,
    harmony_grammar,
)
from jaxsgl.text.calls import FORMS, CallForm
from jaxsgl.text.tool_schemas import standard

Mode = Literal["auto", "none", "required"]
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_PROMPT_TAIL = 64  # tokens in which a prompt may have opened the reasoning


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request.

    Attributes:
      shown: what the chat template is given.
      callable: name -> schema of the parameters, of the tools that may be called; empty: calls are not looked for.
      strict: names of the tools whose arguments always hold to their schema.
      required: the answer is a call.
      max_calls: 1 if calls may not be parallel.
      legacy: the client speaks of functions, and gets `function_call`.
    """

    shown: list[dict[str, Any]] = field(default_factory=list)
    callable: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    strict: frozenset[str] = frozenset()
    required: bool = False
    max_calls: int = MAX_CALLS
    legacy: bool = False


def tool_use(body: ChatRequest) -> ToolUse:
    """Returns what `body` asks for. Raises `InvalidRequest`."""
    tools, given = body.tools or [], body.tool_choice
    legacy = not tools and bool(body.functions)
    if legacy:
        tools = [Tool(type="function", function=function) for function in body.functions or ()]
        given = body.function_call
        if isinstance(given, dict):
            given = {"type": "function", "function": given}
    if not tools:
        if given not in (None, "none", "auto"):
            raise InvalidRequest(f"tool_choice is {given!r:.100}, but there are no tools: send some, or leave it out")
        return ToolUse()
    schemas = {tool.function.name: _parameters(tool) for tool in tools}
    if len(schemas) < len(tools):
        raise InvalidRequest(f"{len(tools)} tools have {len(schemas)} different names: give each its own")
    mode, names = _choice(given, list(schemas))
    is_named = isinstance(given, dict) and given.get("type") == "function"
    if mode == "none":
        return ToolUse()
    return ToolUse(
        [shown_tool(tool) for tool in tools],
        {name: schemas[name] for name in names},
        frozenset(tool.function.name for tool in tools if tool.function.strict),
        mode == "required",
        1 if legacy or is_named or body.parallel_tool_calls is False else MAX_CALLS,
        legacy,
    )


def shown_tool(tool: Tool) -> dict[str, Any]:
    """Returns a tool as templates get it, many of which fail without a description or parameters."""
    shown: dict[str, Any] = tool.model_dump(exclude_unset=True)
    function = shown["function"]
    if function.get("description") is None:
        function["description"] = ""
    if function.get("parameters") is None:
        function["parameters"] = dict(_NO_PARAMETERS)
    return shown


def _parameters(tool: Tool) -> Mapping[str, Any]:
    """Returns the schema of a tool's arguments, which are an object. An empty schema allows any, a missing one none.

    Raises `InvalidRequest` for a schema of something else.
    """
    parameters, name = tool.function.parameters, tool.function.name
    if parameters is None:
        return _NO_PARAMETERS
    schema = standard(parameters, bool(tool.function.strict))
    types = schema.get("type", "object")
    if "object" not in (types if isinstance(types, list) else [types]):
        raise InvalidRequest(f"the parameters of the tool {name} are of type {types!r:.100}, but must be an object")
    return {**schema, "type": "object"}


def _choice(given: str | dict[str, Any] | None, names: list[str]) -> tuple[Mode, list[str]]:
    """Returns the mode, and the names of the tools that may be called. Raises `InvalidRequest`."""
    match given:
        case None | "auto":
            return "auto", names
        case "none":
            return "none", names
        case "required" | "any":  # Mistral's word
            return "required", names
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return "required", _known([name], names)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(allowed)}}:
            return mode, _known([_name_of(tool) for tool in allowed], names)
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(allowed)}:
            return mode, _known([_name_of(tool) for tool in allowed], names)
    raise InvalidRequest(
        f"tool_choice is {given!r:.200}, but must be auto, none, required or "
        '{"type": "function", "function": {"name": ...}}'
    )


def _name_of(tool: object) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
    raise InvalidRequest(f"tool_choice names {tool!r:.100}, but only functions can be called")


def _known(wanted: list[str], names: list[str]) -> list[str]:
    for name in wanted:
        if name not in names:
            raise InvalidRequest(f"tool_choice names the function {name:.100}, but no tool is called that")
    if not wanted:
        raise InvalidRequest("tool_choice allows no tool: name one, or send none")
    return wanted


def template_variables(body: ChatRequest) -> dict[str, Any]:
    """Returns the chat template's variables that have fields of their own, and those of chat_template_kwargs."""
    given: dict[str, Any] = {}
    effort, thinking = body.reasoning_effort, body.enable_thinking
    if body.reasoning is not None:
        effort = effort or body.reasoning.effort or body.reasoning.reasoning_effort
        thinking = body.reasoning.enabled if thinking is None else thinking
    if effort is not None:
        given["reasoning_effort"] = effort
    if thinking is None and effort == "none":
        thinking = False
    if thinking is not None:
        given |= {"enable_thinking": thinking, "thinking": thinking}  # Qwen's and GLM's word, DeepSeek's word
    if body.documents:
        given["documents"] = body.documents
    return given | (body.chat_template_kwargs or {})


@dataclass(frozen=True)
class AnswerForm:
    """How the samples of one request are taken apart.

    Attributes:
      reasoning_is_open: the prompt has opened the reasoning.
      constrained: a grammar guarantees that calls are well formed.
      separate: False: reasoning stays in the text.
      include: False: reasoning is dropped.
      in_one: reasoning comes in one chunk, at its end.
      prompt_tail: the end of the prompt.
    """

    model: ServedModel
    use: ToolUse
    reasoning_is_open: bool
    separate: bool
    include: bool = True
    in_one: bool = False
    constrained: bool = False
    prompt_tail: str = ""

    @property
    def visible(self) -> frozenset[int]:
        """Ids of the special tokens that the parser must see."""
        dialect = self.model.dialect
        wanted = dialect.is_harmony or dialect.reasoning is not None or bool(self.use.callable)
        wanted |= dialect.template is not None
        return self.model.tokenizer.special_ids_of(dialect.markers) if wanted else frozenset()

    @property
    def call_form(self) -> CallForm | None:
        """The form of calls, or None if no calls are looked for or they are Harmony's."""
        dialect, use = self.model.dialect, self.use
        if not use.callable:
            return None
        return FORMS["json"] if use.required and not dialect.has_calls else dialect.calls

    def new_call_id(self) -> str:
        """Returns the id of a new call. Mistral's templates take ids of nine characters alone."""
        made = uuid.uuid4().hex
        calls = self.model.dialect.calls
        return made[:9] if calls is not None and "[TOOL_CALLS]" in calls.opens else f"call_{made[:24]}"

    def parser(self) -> Parser:
        """Returns the parser of one sample."""
        use = self.use
        return self.model.dialect.parser(
            use.callable,
            reasoning_is_open=self.reasoning_is_open,
            constrained=self.constrained,
            max_calls=use.max_calls,
            separate=self.separate,
            other_form=self.call_form,
            prompt_tail=self.prompt_tail,
        )


def constrained(
    form: AnswerForm, asked: Grammar | None, free_calls: bool, budget: int | None = None
) -> tuple[AnswerForm, Grammar | None]:
    """Returns `form`, and the grammar of its answers: `asked`, or calls in its place, with reasoning before it.

    An answer that must be a call has no text that `asked` could be about. `free_calls`: calls that need not be made, of
    tools that aren't strict, aren't held to a grammar. `budget`: tokens of reasoning at most. Raises `InvalidRequest`.
    """
    use, dialect, token_of = form.use, form.model.dialect, form.model.tokenizer.unit_of
    asked = None if use.required else asked
    call_form = form.call_form
    calls = Calls(use.callable, use.strict, use.required, use.max_calls)
    if dialect.is_harmony:
        if asked is not None or use.required or use.strict:
            return replace(form, constrained=True), harmony_grammar(calls, token_of, asked)
        return form, None
    must = use.required or bool(use.strict)
    if call_form is None or (asked is not None and _leaves_no_calls(call_form, asked)):
        if asked is not None:  # no call is possible, so that none is looked for
            form = replace(form, use=replace(use, callable={}))
        return form, _behind_reasoning(form, asked, budget)
    is_free = call_form.bare or (budget is None and (free_calls or not form.model.tokenizer.has_grammars))
    if is_free and not must and asked is None:
        return form, _behind_reasoning(form, None, budget)
    try:
        lark = call_grammar(call_form, calls, token_of, asked)
        held = behind_reasoning(lark, dialect.reasoning, form.reasoning_is_open, budget)
    except InvalidRequest:  # too long, for very many tools
        if must or asked is not None:
            raise
        return form, _behind_reasoning(form, None, budget)
    return replace(form, constrained=True), held


def _leaves_no_calls(form: CallForm, asked: Grammar) -> bool:
    """Whether no call can stand next to `asked`: llguidance doesn't tell a call's bare object of JSON from another."""
    return form.bare == "{" or (bool(form.bare) and asked.kind in WITHOUT_PLACE)


def _behind_reasoning(form: AnswerForm, asked: Grammar | None, budget: int | None) -> Grammar | None:
    """Returns the grammar of an answer that is `asked`, or any text, after its reasoning, if the model reasons."""
    reasoning, token_of = form.model.dialect.reasoning, form.model.tokenizer.unit_of
    if asked is None and budget is None:
        return None
    if reasoning is None or (
        asked is not None and asked.kind in WITHOUT_PLACE and not form.reasoning_is_open and budget is None
    ):
        return asked
    lark = free_text(token_of) if asked is None else content_grammar(asked, token_of)
    return behind_reasoning(lark, reasoning, form.reasoning_is_open, budget)


def bounds_reasoning(model: ServedModel, config: ServerConfig) -> bool:
    """Whether the model's reasoning can be held to a budget: a grammar may end it, by a token of its own."""
    reasoning, tokenizer = model.dialect.reasoning, model.tokenizer
    if reasoning is None or model.dialect.is_harmony or config.engine.grammar_backend == "none":
        return False
    return tokenizer.has_grammars and tokenizer.unit_of(reasoning.close) is not None


def reasoning_budget(body: ChatRequest, model: ServedModel, config: ServerConfig) -> int | None:
    """Returns how many tokens the reasoning may have, or None if nothing bounds it. Raises `InvalidRequest`."""
    given = [budget for budget in (body.thinking_token_budget, body.thinking_budget) if budget not in (None, -1)]
    if not given or (model.dialect.reasoning is None and not model.dialect.is_harmony):  # nothing to bound
        return None
    if len(set(given)) > 1:
        raise InvalidRequest("thinking_token_budget and thinking_budget differ, but mean the same: send one of them")
    if not bounds_reasoning(model, config):
        raise InvalidRequest(
            "thinking_token_budget is given, but this model's reasoning has no end that a grammar could write, or the "
            "server has no grammars: leave it out, or lower reasoning_effort or max_tokens"
        )
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return None if most is not None and given[0] >= most else given[0]


def answer_form(body: ChatRequest, model: ServedModel, use: ToolUse, prompt_ids: list[int]) -> AnswerForm:
    """Returns how the answers to a prompt are taken apart."""
    last = body.messages[-1].content if body.continue_final_message else None
    tail = model.tokenizer.text_with_names(prompt_ids[-_PROMPT_TAIL:])
    return AnswerForm(
        model,
        use,
        model.dialect.reasoning_is_open_after(tail, last if isinstance(last, str) else None),
        separate=body.separate_reasoning is not False,
        include=body.include_reasoning is not False,
        in_one=body.stream_reasoning is False,
        prompt_tail=tail,
    )
