"""`Grammar`: the language that a request's output must belong to, as a value that travels with its sampling parameters.

Holds the words of the grammar and bounds their size. Never knows how a grammar is compiled or applied, so that clients,
front ends and the scheduler share it. Front ends and users of `LLM` make grammars by the methods named for their kinds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from jaxsgl.errors import InvalidRequest

Kind: TypeAlias = Literal[
    "json_schema", "json_object", "regex", "ebnf", "lark", "choice", "structural_tag", "answer_grammar"
]

KINDS: tuple[str, ...] = get_args(Kind)
MAX_GRAMMAR_CHARS = 1 << 18
MAX_CHOICES = 4096


class Grammar(msgspec.Struct, frozen=True):
    """What an output must be. Raises `InvalidRequest` for texts that are no grammar at first sight.

    Whether the text means something is known when it is compiled, in the engine's process: a request whose grammar
    means nothing is refused then. Equal values are one grammar, which is compiled once.

    Attributes:
      kind: how to read the text.
      text: a JSON schema; nothing for json_object; a regular expression (Rust's, without lookaround); a grammar in
        GBNF, xgrammar's EBNF or Lark's form ("ebnf") or in Lark's as llguidance extends it ("lark"); a JSON list of
        texts ("choice"); a structural tag of SGLang or xgrammar, as JSON; Lark's form of a whole answer, with reasoning
        and calls, as the front end writes it ("answer_grammar"): no client can send one, so it may have operators that
        a client's may not.
    """

    kind: Kind
    text: str

    def __post_init__(self) -> None:
        """Checks types, too, since Python code may pass anything."""
        if self.kind not in KINDS:
            raise InvalidRequest(f"a grammar's kind is {self.kind!r:.100}, but must be one of {', '.join(KINDS)}")
        if not isinstance(self.text, str):
            raise InvalidRequest(f"the {self.kind} is {self.text!r:.100}, but must be a text")
        if len(self.text) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(
                f"the {self.kind} has {len(self.text)} characters, but {MAX_GRAMMAR_CHARS} are the most: shorten it"
            )
        if not self.text.isascii():
            _check_surrogates(self.kind, self.text)
        if not self.text.strip() and self.kind != "json_object":
            raise InvalidRequest(f"the {self.kind} is empty: send one, or leave it out")

    @classmethod
    def json_schema(cls, schema: str | bool | Mapping[str, Any] | type) -> Grammar:
        """JSON that `schema` describes: an object, its text, or a pydantic model's class."""
        if isinstance(schema, str):
            return cls("json_schema", schema)
        if schema is False:
            raise InvalidRequest("the json_schema is false, which no JSON meets: send another, or leave it out")
        describe = getattr(schema, "model_json_schema", None)
        return cls("json_schema", _json_text("json_schema", schema if describe is None else describe()))

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_object", "")

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Texts that `pattern` matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def ebnf(cls, grammar: str) -> Grammar:
        """Texts of a grammar in GBNF (root ::= ...) or in Lark's form."""
        return cls("ebnf", grammar)

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Texts of a grammar in Lark's form, with what llguidance adds to it."""
        return cls("lark", grammar)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of `texts`."""
        if isinstance(texts, str) or not isinstance(texts, Sequence) or not all(isinstance(x, str) for x in texts):
            raise InvalidRequest(f"the choice is {texts!r:.100}, but must be a list of texts")
        if not 1 <= len(texts) <= MAX_CHOICES:
            raise InvalidRequest(f"the choice has {len(texts)} texts, but must have 1 to {MAX_CHOICES}")
        return cls("choice", _json_text("choice", list(texts)))

    @classmethod
    def structural_tag(cls, tag: str | Mapping[str, Any]) -> Grammar:
        """Text that is free until a trigger, and then holds to the tag that it begins; `tag` is an object or its text.

        Two forms are known: SGLang's `structures` with `triggers`, and xgrammar's `format`.
        """
        return cls("structural_tag", tag if isinstance(tag, str) else _json_text("structural_tag", tag))


def _json_text(kind: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"the {kind} is not JSON: {error}") from None


def _check_surrogates(kind: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the {kind} holds half a surrogate pair at character {error.start}: send whole pairs"
        ) from None
