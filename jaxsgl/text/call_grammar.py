"""Grammars of answers with tool calls: free text until a call begins, and then what the model's form and schemas allow.

Writes llguidance's form of Lark. A marker that is a token of its own is written by its id, since a token is no text
there. Reasoning stays free: a grammar begins after it. What a client has sent stands in texts, JSON and regular
expressions, and never leaves them: the operators are the server's own. Owns the text of grammars alone; the engine
compiles them. tools.py of the HTTP endpoints calls it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jaxsgl.errors import InvalidRequest
from jaxsgl.requests.grammar import MAX_GRAMMAR_CHARS, Grammar
from jaxsgl.requests.json_schemas import for_llguidance
from jaxsgl.requests.regexes import in_slashes
from jaxsgl.text.answer import ReasoningForm
from jaxsgl.text.calls import CallForm, Tools
from jaxsgl.text.parameters import (
    alternatives,
    beyond_parameters,
    choices_of,
    definition,
    parameters_of,
    part_of,
    takes_any,
    takes_texts,
    takes_texts_alone,
    types_of,
    without_annotations,
)
from jaxsgl.text.tags import DSML
from jaxsgl.text.text_patterns import LOOKAROUND, TextLimits, text_limits

TokenOf: TypeAlias = Callable[[str], int | None]  # the id of a marker that is a token of its own
_JSON_SPACES = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_SPACE = r"/[ \n]{0,4}/"  # around the reasoning
WITHOUT_PLACE = frozenset({"ebnf", "lark", "structural_tag"})  # kinds of grammars that can't be a part of another
_MAX_NESTED = 30  # schemas in schemas that "unquoted" is held to
_TELLING = frozenset({"type", "enum", "const", "properties", "additionalProperties", "items", "prefixItems"})
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_QUOTED = r"""/'([^'\\\x00-\x1f\x7f]|\\['"\\nrt])*'/"""  # as LFM2.5 writes texts
_SAYS = {True: r'"\"true\">"', False: r'"\"false\">"'}  # as DeepSeek's tags, whether a value is a text
_META = frozenset(r"\.+*?()|[]{}^$#&-~/")


@dataclass(frozen=True)
class Calls:
    """Which calls an answer may have.

    Attributes:
      tools: those that may be called, with the schemas of their parameters.
      strict: names of those whose arguments hold to their schema; what llguidance can't express there is an error.
      required: the answer is calls and nothing else, and arguments hold to the schemas as far as they can be expressed.
      max_calls: in one answer.
    """

    tools: Tools
    strict: frozenset[str] = frozenset()
    required: bool = False
    max_calls: int = 128


def call_grammar(form: CallForm, calls: Calls, token_of: TokenOf, content: Grammar | None = None) -> Lark:
    """Returns the grammar of an answer. With a `content`, an answer without calls must be that."""
    return _Writer(form, calls, token_of, content).answer()


def harmony_grammar(calls: Calls, token_of: TokenOf, content: Grammar | None = None) -> Grammar:
    """Returns the grammar of an answer in Harmony: reasoning, and a call or a final message.

    A preamble may come before a call, and before a final message that is free: it counts as the answer's text.
    """
    lark = Lark(token_of)
    channel, message = lark.mark("<|channel|>"), lark.mark("<|message|>")
    again = f'{lark.until("<|end|>")} {lark.mark("<|start|>")} "assistant"'
    made = [
        f'{literal(f"commentary to=functions.{name} ")} {lark.mark("<|constrain|>")} "json" {message} '
        f"{lark.json(_schema(calls, name), lenient=name not in calls.strict)}"
        for name in calls.tools
    ]
    thought = f'({channel} "analysis" {message} {again})?'
    preamble = f'({channel} "commentary" {message} {again})?'
    final = f'"final" {message} {lark.free("TEXT") if content is None else lark.of(content)}'
    if content is None and calls.tools:
        endings = made if calls.required else [*made, final]
        return lark.grammar(f"{thought} {preamble} {channel} {lark.rule(' | '.join(endings))}")
    if not made:
        return lark.grammar(f"{thought} {channel} {final}")
    called = lark.rule(f"{preamble} {channel} {lark.rule(' | '.join(made))}")
    return lark.grammar(f"{thought} {lark.rule(f'{called} | {channel} {final}')}")


def content_grammar(content: Grammar, token_of: TokenOf) -> Lark:
    """Returns the grammar of an answer that is `content` alone. Raises `InvalidRequest`, as `Lark.of`."""
    lark = Lark(token_of)
    lark.start = lark.of(content)
    return lark


def free_text(token_of: TokenOf) -> Lark:
    """Returns the grammar of any text."""
    lark = Lark(token_of)
    lark.start = lark.free("TEXT")
    return lark


def behind_reasoning(lark: Lark, reasoning: ReasoningForm | None, is_open: bool, budget: int | None = None) -> Grammar:
    """Returns a grammar that begins after the reasoning, if there is any.

    `is_open`: the prompt has opened it; else the model may. With a `budget` it has so many tokens at most; its end must
    be a token of its own then.
    """
    if reasoning is None:
        return lark.grammar(lark.start)
    start = lark.start
    if reasoning.frames:
        begins, ends = (lark.rule(" | ".join(map(lark.mark, texts))) for texts in zip(*reasoning.frames, strict=True))
        start = f"{begins}? {start} {ends}?"
    thought = lark.until(reasoning.close, "THOUGHT", budget, reasoning.also_closes)
    if is_open or reasoning.opens_itself:
        return lark.grammar(f"{thought} {_SPACE} {start}")
    opening = lark.rule(" | ".join(map(lark.marks, reasoning.opens)))
    return lark.grammar(f"({_SPACE} {opening} {thought} {_SPACE})? {start}")


class Lark:
    """A grammar that is being written. `start` is its expression."""

    def __init__(self, token_of: TokenOf) -> None:
        self.start = ""
        self._rules: list[str] = []
        self._made: dict[tuple[str, str], str] = {}  # an expression and its attribute -> its rule
        self._parts: dict[tuple[int, str, bool], str] = {}  # a root's id, a schema in it, lenience -> its rule
        self._length = 0  # of all rules, in characters
        self._terminals: dict[str, str] = {}
        self._token_of = token_of

    def grammar(self, start: str) -> Grammar:
        """Returns the whole, which begins with `start`."""
        terminals = [f"{name}: {regex}" for name, regex in self._terminals.items()]
        return Grammar("answer_grammar", "\n".join([f"start: {start}", *terminals, *self._rules]))

    def rule(self, expression: str, attribute: str = "") -> str:
        """Returns the name of a rule, which is added if no other is the same. `attribute` is llguidance's, as lazy.

        Raises `InvalidRequest` if the grammar gets too long.
        """
        made = self._made.get((expression, attribute))
        if made is not None:
            return made
        self._length += len(expression)
        if self._length > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(
                f"the answer_grammar has {self._length} characters or more, but {MAX_GRAMMAR_CHARS} are the most: send "
                "fewer tools, or shorter schemas"
            )
        name = self._made[expression, attribute] = f"r{len(self._rules)}"
        self._rules.append(f"{name}{f'[{attribute}]' if attribute else ''}: {expression}")
        return name

    def reserve(self) -> str:
        """Returns the name of a rule that may be used before its expression is there; `fill` adds that."""
        self._rules.append("")
        return f"r{len(self._rules) - 1}"

    def fill(self, name: str, expression: str) -> None:
        """Adds the expression of a rule that was reserved."""
        self._rules[int(name[1:])] = f"{name}: {expression}"

    def mark(self, text: str) -> str:
        """Returns the expression of a marker: a token's id, a text, or texts around a token; nothing for no marker."""
        token_id = self._token_of(text)
        if token_id is None and (around := self._around_token(text)) is not None:
            return " ".join(part for part in map(self.mark, around) if part)
        return f"<[{token_id}]>" if token_id is not None else literal(text)

    def _around_token(self, text: str) -> tuple[str, str, str] | None:
        """Returns what stands before the token in a tag of DeepSeek's, that, and what stands behind it."""
        around = text.partition(DSML)
        return around if around[1] not in ("", text) and self._token_of(DSML) is not None else None

    def marks(self, text: str) -> str:
        """Returns the expression of a text that may hold markers that are tokens."""
        return " ".join(self.mark(part) for part in re.split(r"(<[^>]+>)", text) if part)

    def free(self, name: str, *excluded: str) -> str:
        """Adds the terminal `name`: any text without the texts `excluded`."""
        return self.terminal(name, rf"/(.|\n)*/{''.join(map(_without, excluded))}")

    def terminal(self, name: str, regex: str) -> str:
        """Adds a terminal and returns its name."""
        self._terminals[name] = regex
        return name

    def until(
        self, marker: str, name: str = "UNTIL", most_tokens: int | None = None, others: Sequence[str] = ()
    ) -> str:
        """Returns the expression of any text up to and with `marker`, or one of `others` if that is no token.

        With `most_tokens`, `marker` is a token of its own, which comes after so many others at the latest.
        """
        if most_tokens == 0:
            return self.mark(marker)
        if most_tokens is not None:
            return f"{self.rule(self.free(name, marker), f'max_tokens={most_tokens}')} {self.mark(marker)}"
        if self._token_of(marker) is not None:
            return f"{self.free(name, marker)} {self.mark(marker)}"
        if (around := self._around_token(marker)) is not None:
            begun = self.terminal(f"{name}_MARK", rf"/(.|\n)*{_regex(around[0])}/{_without(marker)}")
            return f"{begun} {self.mark(around[1])} {literal(around[2])}"
        ends = " | ".join(map(literal, (marker, *others)))
        return self.rule(f"{self.free(name)} {f'({ends})' if others else ends}", "lazy")

    def within(self, limits: TextLimits, marker: str) -> str:
        """Returns the expression of a text that holds to `limits`, up to and with `marker`."""
        is_token = self._token_of(marker) is not None
        if (around := self._around_token(marker)) is not None:
            begun = f"({limits.without_end(marker, True)}) {literal(around[0])}"
            text = self.terminal(f"WITHIN{len(self._terminals)}", begun)
            return f"{text} {self.mark(around[1])} {literal(around[2])}"
        text = self.terminal(f"WITHIN{len(self._terminals)}", limits.without_end(marker.strip(), is_token))
        return f"{text} {self.mark(marker)}" if is_token else self.rule(f"{text} {literal(marker)}", "lazy")

    def json(self, schema: Mapping[str, Any] | bool, lenient: bool = False) -> str:
        """Returns the expression of JSON by a schema, with no more space than models write."""
        if not isinstance(schema, Mapping):
            schema = {"not": {}} if schema is False else {}
        told = without_annotations(schema)
        told = _without_lookaround(told) if lenient else told
        guidance = {**_JSON_SPACES, **({"lenient": True} if lenient else {})}
        return "%json " + json.dumps({**told, "x-guidance": guidance})

    def json_in(self, root: Mapping[str, Any], value: Any, lenient: bool) -> str:
        """Returns the rule of JSON by the schema `value`, which stands in `root`."""
        value = without_annotations(value)
        place = (id(root), json.dumps(value), lenient)
        if place not in self._parts:
            self._parts[place] = self.rule(self.json(part_of(root, value), lenient))
        return self._parts[place]

    def unquoted(self, quote: str) -> str:
        """Adds a rule of any value, as JSON but with bare keys and texts between `quote`; returns its name."""
        name = "unquoted"
        if not any(rule.startswith(f"{name}:") for rule in self._rules):
            text = f"{self.mark(quote)} {self.until(quote, 'VALUE')}"
            plain = self.json({"type": ["number", "boolean", "null"]})
            items, pairs = f'({name} ("," {name})*)?', self.pairs(name)
            self._rules.append(f'{name}: {text} | {plain} | "[" {items} "]" | "{{" {pairs} "}}"')
        return name

    def unquoted_pairs(self, quote: str) -> str:
        """Returns the expression of what stands in an object of `unquoted`."""
        return self.pairs(self.unquoted(quote))

    def key(self) -> str:
        """Adds the terminal of any key of arguments that no schema names; returns its name."""
        return self.terminal("KEY", "/[A-Za-z0-9_.-]{1,64}/")

    def pairs(self, value: str) -> str:
        """Returns the expression of bare keys, each with a `value`."""
        pair = f'{self.key()} ":" {value}'
        return f'({pair} ("," {pair})*)?'

    def of(self, grammar: Grammar) -> str:
        """Returns the expression of a grammar. Raises `InvalidRequest` for those of `WITHOUT_PLACE`."""
        match grammar.kind:
            case "json_object":
                return self.json(_ANY_OBJECT)
            case "json_schema":
                schema = _parsed(grammar.text)
                schema = {} if schema is True else schema
                return f"%json {json.dumps(for_llguidance(schema) if isinstance(schema, dict) else schema)}"
            case "choice":
                return self.rule(" | ".join(literal(text) or '""' for text in _parsed(grammar.text)))
            case "regex":
                return self.terminal("PATTERN", in_slashes(grammar.text))
        raise InvalidRequest(
            f"a {grammar.kind} can't begin behind reasoning or stand beside tools: turn the reasoning off "
            "(enable_thinking: false) and send no tools, or use a JSON schema"
        )


def _without_lookaround(schema: Any) -> Any:
    """Returns a schema without patterns that llguidance refuses even where it is lenient, as of decimals."""
    if isinstance(schema, dict):
        return {
            key: _without_lookaround(value)
            for key, value in schema.items()
            if not (key == "pattern" and isinstance(value, str) and LOOKAROUND.search(value))
        }
    return [_without_lookaround(value) for value in schema] if isinstance(schema, list) else schema


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the grammar is not JSON: {str(error)[:200]}") from None


def literal(text: str) -> str:
    """Returns `text` as a string of Lark; nothing if it is empty."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _without(text: str) -> str:
    """Returns what a terminal's expression ends with if it holds no `text`."""
    return rf" & ~/(.|\n)*{_regex(text)}(.|\n)*/"


def _regex(text: str) -> str:
    return "".join("\\" + char if char in _META else "\\n" if char == "\n" else char for char in text)


def _schema(calls: Calls, name: str) -> Mapping[str, Any]:
    """Returns the schema that the arguments of a tool must hold to."""
    if not calls.required and name not in calls.strict:
        return _ANY_OBJECT
    schema = calls.tools[name]
    known = {"type", "$ref", "anyOf", "allOf", "oneOf"} & schema.keys()
    return schema if known else {"type": "object", **schema}


class _Writer:
    """Writes the calls of one form."""

    def __init__(self, form: CallForm, calls: Calls, token_of: TokenOf, content: Grammar | None) -> None:
        self._content = content
        self._form = form
        self._calls = calls
        self._lark = Lark(token_of)
        opening = next((text for text in form.opens if token_of(text) is not None), (*form.opens, "")[0])
        self._opening = "" if form.bare else opening  # a bracket opens the calls then

    def answer(self) -> Lark:
        lark, form, calls = self._lark, self._form, self._calls
        more = max(calls.max_calls - 1, 0)
        body = self._body()
        close = self._close()
        if calls.required or self._content is not None:
            opened = f"{lark.mark(self._opening)} {body} {close}"
            several = self._several(opened) if form.one_by_one else opened
            lead = f"{literal(form.lead)}?" if form.lead else ""
            several = f"{lead} {self._begin_section()} {several} {self._end_section() or self._line()}"
            others = "" if self._content is None else f" | {lark.of(self._content)}"
            lark.start = lark.rule(several + others)
        elif self._opening:
            mark = "?" if not more or not form.one_by_one else "*"
            excluded = (self._opening,) if self._is_token(self._opening) else ()
            if form.section is not None:
                begins, opened = form.section[0], f"{lark.mark(self._opening)} {body} {close}"
                several = f"{self._several(opened)} {self._end_section()}"
                excluded = (begins,) if self._is_token(begins) else ()
                lark.start = f"({lark.until(begins, 'TEXT')} {several})? {lark.free('TEXT', *excluded)}"
                return lark
            opened, text = f"{lark.until(self._opening, 'TEXT')} {body} {close}", lark.free("TEXT", *excluded)
            if form.head and self._is_token(form.close):  # it may end a call that was not opened
                opened = lark.rule(f"{opened} | {text} {lark.mark(form.close)}")
            lark.start = f"({opened}){mark} {text}"
        else:
            plain = lark.terminal("PLAIN", rf"/[ \n]*([^ \n{_regex(form.bare)}](.|\n)*)?/")
            lark.start = lark.rule(f"{body} {close} | {plain}")
        return lark

    def _several(self, opened: str) -> str:
        """Returns the expression of calls that are opened one by one."""
        more = self._calls.max_calls - 1
        return f"{opened} ({self._line()} {opened}){{0,{more}}}" if more > 0 else opened

    def _line(self) -> str:
        """Returns the expression of what may follow a closed call: some models end it with a line break."""
        return '"\\n"?' if self._form.close and self._form.kind != "unquoted" else ""

    def _begin_section(self) -> str:
        return "" if self._form.section is None else self._lark.mark(self._form.section[0])

    def _end_section(self) -> str:
        return "" if self._form.section is None else self._lark.mark(self._form.section[1])

    def _is_token(self, text: str) -> bool:
        return "<[" in self._lark.mark(text)

    def _close(self) -> str:
        form = self._form
        return f"{literal(form.tail) or self._space()} {self._lark.mark(form.close)}" if form.close else ""

    def _space(self) -> str:
        """Returns the expression of what stands around a call: of JSON some models (EXAONE 4) leave it out."""
        space = literal(self._form.space)
        return f"{space}?" if space and self._form.kind == "json" else space

    def _body(self) -> str:
        """Returns the expression of what stands between the opening and the closing text."""
        form, lark = self._form, self._lark
        write = {
            "json": self._json_call,
            "named_json": self._named_call,
            "tagged": self._tagged_call,
            "keyed": self._keyed_call,
            "python": self._python_call,
            "invoked": self._invoked_call,
            "dsml": self._dsml_call,
            "unquoted": self._unquoted_call,
        }[form.kind]
        one = lark.rule(" | ".join(write(name) for name in self._calls.tools))
        if form.one_by_one:
            return f"{self._space()} {one}" if form.kind == "json" else one
        more = max(self._calls.max_calls - 1, 0)
        separator = f",{form.indent}" if form.indent else form.separator or ", "
        several = f"{one} ({literal(separator)} {one}){{0,{more}}}" if more else one
        if form.kind == "json" and form.bare == "{":
            return several if form.separator else one
        if form.kind in ("python", "invoked", "dsml") and form.separator == "\n":
            return f'"\\n" {several} "\\n"'
        if form.indent:
            return f'"[" {literal(form.indent)} {several} {literal(chr(10))} "]"'
        begin = "" if self._opening.endswith("[") else r"/ ?\[/"
        return f'{begin} {several} "]"'

    def _json_call(self, name: str) -> str:
        form = self._form
        head = f'"{form.name_key}": {json.dumps(name)}, "{form.arguments_key}": '
        before = literal(f"{{{head}")
        if form.id_key:
            begin, end = literal(f'{{"{form.id_key}": "'), literal(f'", {head}')
            before = f"{begin} /[0-9]{{1,3}}/ {end}"
        return f'{before} {self._arguments(name)} "}}"'

    def _named_call(self, name: str) -> str:
        form, lark = self._form, self._lark
        number = r"/:[0-9]{1,3}/" if form.numbered else ""
        return f"{lark.marks(form.prefix)} {literal(name)} {number} {lark.mark(form.between)} {self._arguments(name)}"

    def _arguments(self, name: str) -> str:
        return self._lark.json(_schema(self._calls, name), lenient=name not in self._calls.strict)

    def _tagged_call(self, name: str) -> str:
        around = self._form.around

        def parameter(key: str, value: str) -> str:
            return f'"<parameter=" {key} {literal(f">{around}")} {value}'

        parts = self._in_order(name, parameter, f"{around}</parameter>\n")
        return f"{literal(f'{chr(10)}<function={name}>{chr(10)}')} {parts} {literal('</function>')}"

    def _invoked_call(self, name: str) -> str:
        def parameter(key: str, value: str) -> str:
            return f"{literal('<parameter name=' + chr(34))} {key} {literal(chr(34) + '>')} {value}"

        head = f"<invoke name={json.dumps(name)}>\n"
        parts = self._in_order(name, parameter, "</parameter>", '"\\n"')
        return f"{literal(head)} {parts} {literal('</invoke>')}"

    def _dsml_call(self, name: str) -> str:
        mark = self._lark.mark

        def parameter(key: str, value: str) -> str:
            return f"{mark(f'<{DSML}parameter name=' + chr(34))} {key} {literal(chr(34) + ' string=')} {value}"

        head = mark(f"<{DSML}invoke name={json.dumps(name)}>\n")
        parts = self._in_order(name, parameter, f"</{DSML}parameter>", '"\\n"')
        return f"{head} {parts} {mark(f'</{DSML}invoke>')}"

    def _keyed_call(self, name: str) -> str:
        lark, line = self._lark, '"\\n"?'  # GLM-4.5 and 4.6 break lines, GLM-4.7 doesn't
        ends = [lark.mark("<arg_key>"), lark.mark("</arg_key>"), lark.mark("<arg_value>"), lark.mark("</arg_value>")]

        def parameter(key: str, value: str) -> str:
            return f"{ends[0]} {key} {ends[1]} {line} {ends[2]} {value}"

        return f"{literal(name)} {line} {self._in_order(name, parameter, '</arg_value>', line)}"

    def _in_order(self, name: str, write: Callable[[str, str], str], end: str, behind: str = "") -> str:
        """Returns the parameters in the schema's order, each with the expression `behind` it.

        Those that aren't required may be left out.

        A tool without strict arguments, which need not be called, takes them in any order.
        """
        schema, is_strict = self._calls.tools[name], name in self._calls.strict
        properties, required = self._parameters(name)
        value_of = self._said_value if self._form.kind == "dsml" else self._tagged_value
        if not is_strict and takes_any(schema):
            return f"({write(self._lark.key(), value_of({}, schema, '', end, False))} {behind})*"
        parts = [
            f"{write(literal(key), value_of(value, schema, key, end, is_strict))} {behind}"
            for key, value in properties.items()
        ]
        if not parts:
            return ""
        if not self._calls.required and not is_strict:
            return f"({' | '.join(parts)})*"
        return " ".join(part if key in required else f"({part})?" for key, part in zip(properties, parts, strict=True))

    def _tagged_value(self, value: Any, root: Mapping[str, Any], key: str, end: str, is_strict: bool) -> str:
        """Returns the expression of a parameter's value and of `end`, which ends it.

        `value`: its schema. Texts stand bare, others as JSON.
        """
        lark, is_bare = self._lark, takes_texts_alone(value, root)
        takes = is_bare or takes_texts(value, root)
        one = _one_of(choices_of(value, root)) if takes else ""
        if is_bare and one:
            return f"{lark.rule(one)} {lark.mark(end)}"
        if takes and not one and not is_strict:
            return lark.until(end, "VALUE")
        others = (types_of(value, root) or frozenset()) - {"string"}
        if takes and not one and others <= {"null"}:
            limits = text_limits(value, root, key)
            text = lark.until(end, "VALUE") if limits is None else lark.within(limits, end)
            return lark.rule(f'{text} | "null" {lark.mark(end)}') if others else text
        spelled = lark.json_in(root, value, lenient=not is_strict)
        if one and (others <= {"null"} or not is_strict):  # else a bare text may be read as another type's
            spelled = lark.rule(f"{one} | {spelled}")
        return f"{spelled} {lark.mark(end)}"

    def _said_value(self, value: Any, root: Mapping[str, Any], key: str, end: str, is_strict: bool) -> str:
        """Returns the expression of what a tag says of a value, of that value, and of `end`, as `_tagged_value`."""
        lark, types = self._lark, types_of(value, root)
        spelled = []
        if takes_texts(value, root):
            one = _one_of(choices_of(value, root))
            limits = text_limits(value, root, key) if is_strict and not one else None
            text = lark.until(end, "VALUE") if limits is None else lark.within(limits, end)
            spelled.append(f"{_SAYS[True]} {f'{lark.rule(one)} {lark.mark(end)}' if one else text}")
        if types != frozenset({"string"}):
            json_text = lark.json_in(root, value, lenient=not is_strict)
            spelled.append(f"{_SAYS[False]} {json_text} {lark.mark(end)}")
        return lark.rule(" | ".join(spelled))

    def _parameters(self, name: str) -> tuple[Mapping[str, Any], frozenset[str]]:
        """Returns the parameters of a tool. Raises `InvalidRequest` if it is strict and says more of them together."""
        schema = self._calls.tools[name]
        properties, required = parameters_of(schema)
        said = ["required"] if required - properties.keys() else beyond_parameters(schema)
        if name in self._calls.strict and said:
            raise InvalidRequest(
                f"the tool {name:.100} is strict, and its parameters have {said[0]}, to which this model's form of "
                "calls can't be held: leave it out, or send strict: false"
            )
        return properties, required

    def _python_call(self, name: str) -> str:
        lark, schema, lenient = self._lark, self._calls.tools[name], name not in self._calls.strict
        properties, required = self._parameters(name)
        if lenient and takes_any(schema):
            value = lark.rule(f"{lark.json({})} | {lark.terminal('QUOTED', _QUOTED)}")
            pair = f'{lark.terminal("NAME", "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/")} "=" {value}'
            return f'{literal(f"{name}(")} ({pair} (", " {pair})*)? ")"'
        arguments = [
            f"{literal(f'{key}=')} {self._python_value(value, schema, lenient)}" for key, value in properties.items()
        ]
        listed = _listed(lark, arguments, [key in required for key in properties])
        return f"{literal(f'{name}(')} {listed} {literal(')')}"

    def _python_value(self, value: Any, root: Mapping[str, Any], lenient: bool) -> str:
        """Returns the expression of an argument as JSON, or as a text in single quotes where any text will do."""
        spelled = self._lark.json_in(root, value, lenient)
        if without_annotations(value) != {"type": "string"}:
            return spelled
        return self._lark.rule(f"{spelled} | {self._lark.terminal('QUOTED', _QUOTED)}")

    def _unquoted_call(self, name: str) -> str:
        form, schema = self._form, self._calls.tools[name]
        in_order = self._calls.required or name in self._calls.strict
        if not in_order or name in self._calls.strict or not takes_any(schema):
            written = _Unquoted(self._lark, form.quote, schema, in_order).arguments()
        else:
            written = self._lark.unquoted_pairs(form.quote)
        return f"{literal(f'{form.prefix}{name}{{')} {written} {literal('}')}"


class _Unquoted:
    """Writes values of a tool's arguments for "unquoted", as far as their schema can be written; else any value."""

    def __init__(self, lark: Lark, quote: str, root: Mapping[str, Any], in_order: bool) -> None:
        """`root`: the tool's schema. `in_order`: keys come in order, and those that are required do come."""
        self._lark = lark
        self._quote = quote
        self._root = root
        self._in_order = in_order
        self._names: dict[str, str] = {}  # of the rules of definitions

    def arguments(self) -> str:
        """Returns the expression of what stands between the brackets of the arguments."""
        properties, required = parameters_of(self._root)
        values = {
            key: self._text(value) if takes_texts_alone(value, self._root) else self._value(value)
            for key, value in properties.items()
        }
        if not values and self._in_order:
            return ""
        return self._keyed(values, required) if values else self._lark.unquoted_pairs(self._quote)

    def _keyed(self, values: Mapping[str, str], required: Iterable[str]) -> str:
        pairs = {key: f"{literal(f'{key}:')} {values[key]}" for key in sorted(values)}
        if self._in_order:
            return _listed(self._lark, list(pairs.values()), [key in required for key in pairs], ",")
        one = self._lark.rule(" | ".join(pairs.values()))
        return f'({one} ("," {one})*)?'

    def _value(self, schema: Any, depth: int = 0) -> str:
        types = types_of(schema, self._root)
        if types is None or depth > _MAX_NESTED:
            return self._lark.unquoted(self._quote)
        if "$ref" in schema:
            return self._defined(schema["$ref"], depth)
        if schema.keys().isdisjoint(_TELLING):
            several = next(alternatives(schema), schema.get("allOf") or [])
            if several == schema.get("allOf") and len(several) > 1:
                return self._lark.unquoted(self._quote)
            return self._lark.rule(" | ".join(self._value(other, depth + 1) for other in several))
        return self._lark.rule(" | ".join(self._of_types(schema, types, depth)))

    def _defined(self, reference: str, depth: int) -> str:
        """Returns the name of the rule of a definition, which may hold itself."""
        if reference not in self._names:
            self._names[reference] = self._lark.reserve()
            found = self._value(definition(reference, self._root), depth + 1)
            self._lark.fill(self._names[reference], found)
        return self._names[reference]

    def _of_types(self, schema: Mapping[str, Any], types: frozenset[str], depth: int) -> Iterator[str]:
        """Yields an expression for each of `types`; for those of plain values, one."""
        if "string" in types:
            yield self._text(schema)
        if "array" in types:
            item = self._value(schema.get("items"), depth + 1)
            yield f'"[" ({item} ("," {item})*)? "]"'
        if "object" in types:
            yield f'"{{" {self._object(schema, depth)} "}}"'
        if plain := sorted(types & {"integer", "number", "boolean", "null"}):
            listed = [schema["const"]] if "const" in schema else schema.get("enum")
            held = {"type": plain, **{word: schema[word] for word in _OF_NUMBERS if word in schema}}
            if isinstance(listed, list):
                held = {"enum": [value for value in listed if not isinstance(value, str | list | dict)]}
            yield self._lark.rule(self._lark.json(held, lenient=True))

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        properties, required = _properties(schema)
        if properties:
            return self._keyed({key: self._value(value, depth + 1) for key, value in properties.items()}, required)
        return self._lark.pairs(self._value(schema.get("additionalProperties"), depth + 1))

    def _text(self, schema: Any) -> str:
        mark, one = self._lark.mark(self._quote), _one_of(choices_of(schema, self._root))
        return f"{mark} {self._lark.rule(one)} {mark}" if one else f"{mark} {self._lark.until(self._quote, 'VALUE')}"


def _one_of(texts: Iterable[str] | None) -> str:
    """Returns the expression of one of `texts`; nothing if there are none."""
    return " | ".join(literal(text) or '""' for text in texts or ())


def _properties(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], Iterable[str]]:
    properties, required = schema.get("properties"), schema.get("required")
    return (
        properties if isinstance(properties, dict) else {},
        frozenset(key for key in required if isinstance(key, str)) if isinstance(required, list) else frozenset(),
    )


def _listed(lark: Lark, items: Sequence[str], required: Sequence[bool], comma: str = ", ") -> str:
    """Returns the expression of items between commas, of which those that aren't required may be left out."""
    tail, head = "", '""'
    for item, needed in zip(map(lark.rule, reversed(items)), reversed(required), strict=True):
        new_head = lark.rule(f"{item} {tail}" if needed else f"{item} {tail} | {head}")
        tail = lark.rule(f'"{comma}" {item} {tail}' if needed else f'("{comma}" {item})? {tail}')
        head = new_head
    return head
