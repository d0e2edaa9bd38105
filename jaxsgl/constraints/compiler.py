"""`Compiler`: grammars to matchers, by llguidance. `LlMatcher` follows one output and tells which tokens may come next.

Owns the vocabulary as llguidance knows it, and the limits of its work. Compiling leaves Python's lock alone, so that
threads may do it beside the serving loop (scheduler/grammars/queue.py). Building the vocabulary holds the lock, for
0.6 s at 150,000 tokens: servers do it before they are ready. wiring.py makes it, and so does the helper process of
trial.py; the scheduler sees only `compile`.

`llguidance_text` says a `Grammar` in llguidance's own words: its form of Lark, in which JSON schemas and regular
expressions are embedded. Never knows a vocabulary beyond the names of special tokens, which are no text for llguidance.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from jaxsgl.constraints import structural_tags
from jaxsgl.constraints.checked import check_schema, check_schemas_in, checked_lark
from jaxsgl.constraints.ebnf import lark_of_ebnf
from jaxsgl.errors import InvalidRequest, RequestFailed
from jaxsgl.requests.grammar import Grammar
from jaxsgl.requests.json_schemas import for_llguidance
from jaxsgl.requests.regexes import in_slashes

MAX_REASON_CHARS = 500
_WORDS_OF_LIMITS = ("too many", "too complex", "fuel", "lexer error")  # in llguidance's errors, which have no kinds
# llguidance's defaults would let one request's grammar stop the serving loop for half a second a token. A mask takes
# milliseconds at most with these, and hundreds of properties are still few enough.
LIMITS = LLParserLimits(
    max_items_in_row=8_000,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    precompute_large_lexemes=False,  # may take minutes and hundreds of megabytes
    verbose_errors=False,
)
# At the head of every text. llguidance would otherwise compute the bytes that a grammar forces, whole, inside one mask:
# "start: /a+/ /a+/" forces bytes without end. Masks allow the same tokens with it.
HEAD = '%llguidance {"no_forcing": true}'
SpecialTokens: TypeAlias = Mapping[str, int]  # name -> id


class Compiler:
    """Compiles grammars for one vocabulary. Safe to call from several threads.

    Args:
      folder: of the model.
      vocab_size: V of the model's logits, which may be more than the tokenizer's tokens. Added tokens beyond, as a
        picture's in Gemma 3 1B or a [PAD], can't come, and are text in grammars.
      eos_token_ids: tokens that end a text.

    Raises:
      InvalidRequest: for this model no grammar can be compiled.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        path = folder / "tokenizer.json"
        if not path.exists():
            raise InvalidRequest("the model folder has no tokenizer.json, which grammars need: leave the grammar out")
        try:
            tokenizer, source = Tokenizer.from_file(str(path)), str(path)
            if max(tokenizer.get_added_tokens_decoder(), default=0) >= vocab_size:
                source = _tokens_below(vocab_size, path)
                tokenizer = Tokenizer.from_str(source)
            self._tokenizer = LLTokenizer(source, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
        except Exception as error:  # tokenizers raises bare Exception
            raise InvalidRequest(f"grammars can't be used with the model's tokenizer: {_short(error)}") from None
        self._special: SpecialTokens = {
            token.content: token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))  # llguidance's rule
        }

    def compile(self, grammar: Grammar, num_bytes: int = 0) -> LlMatcher:
        """The matcher of an empty output. Raises `InvalidRequest` for what is no grammar or goes beyond the limits.

        `num_bytes`: of memory that the grammar takes, if a trial has measured it.
        """
        matcher = LLMatcher(self._tokenizer, llguidance_text(grammar, self._special), log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise InvalidRequest(f"the {grammar.kind} can't be used: {_short(matcher.get_error())}")
        return LlMatcher(matcher, num_bytes)


class LlMatcher:
    """Follows one output token by token; a `Matcher` of scheduler/grammars/constraint.py."""

    __slots__ = ("_matcher", "num_bytes")

    def __init__(self, matcher: LLMatcher, num_bytes: int) -> None:
        self._matcher = matcher
        self.num_bytes = num_bytes

    def copy(self) -> LlMatcher:
        """Another one for the same output so far; costs microseconds."""
        return LlMatcher(self._matcher.deep_copy(), self.num_bytes)

    def advance(self, token_id: int) -> None:
        """Takes the next token, which the mask before must have allowed.

        Raises:
          RequestFailed: the grammar refuses it, so that mask, sampling or llguidance are wrong.
          InvalidRequest: at the grammar's limits.
        """
        if self._matcher.consume_token(token_id):
            return
        if any(word in str(self._matcher.get_error()).lower() for word in _WORDS_OF_LIMITS):
            self._check()
        raise RequestFailed(f"the grammar refuses token {token_id}: {_short(self._matcher.get_error())}")

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of `token_ids`, from the first, may come next, one after the other; a question."""
        return self._matcher.validate_tokens(list(token_ids))

    @property
    def accepts(self) -> bool:
        """Whether the output may end here."""
        return self._matcher.is_accepting()

    @property
    def ended(self) -> bool:
        """Whether nothing may follow."""
        return self._matcher.is_stopped()

    def mask_into(self, words: npt.NDArray[np.uint32]) -> None:
        """Writes `words [ceil(V / 32)]`, contiguous: bit i % 32 of word i // 32 says whether token i may come next.

        EOS tokens may be among them where the output may end. Raises `InvalidRequest` at the limits.
        """
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidRequest(
                f"the grammar can't be followed any further: {_short(self._matcher.get_error())}: simplify it"
            )


def _tokens_below(vocab_size: int, path: Path) -> str:
    """Returns tokenizer.json without added tokens from `vocab_size` on: the model has no logits for them."""
    content = json.loads(path.read_text("utf-8"))
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < vocab_size]
    return json.dumps(content)


def _short(reason: object) -> str:
    text = " ".join(str(reason).replace("<non-verbose/>", "").split())
    return text if len(text) <= MAX_REASON_CHARS else text[:MAX_REASON_CHARS] + "..."


def llguidance_text(grammar: Grammar, special: SpecialTokens) -> str:
    """What llguidance compiles for `grammar`. Raises `InvalidRequest`."""
    text = grammar.text
    try:
        if grammar.kind == "json_object":
            return _text(_start_of_schema({"type": "object"}))
        if grammar.kind == "json_schema":
            schema = parsed("json_schema", text)
            if schema is True:
                schema = {}
            elif not isinstance(schema, dict):
                raise InvalidRequest("the json_schema must be an object, or true (any JSON)")
            check_schema(schema)
            return _text(_start_of_schema(schema))
        if grammar.kind == "regex":
            return _text(f"start: {in_slashes(text)}")
        if grammar.kind in ("lark", "ebnf"):
            lark = text if grammar.kind == "lark" else lark_of_ebnf(text)
            return _text(checked_lark(lark))
        if grammar.kind == "answer_grammar":
            check_schemas_in(text)
            return _text(text)
        if grammar.kind == "choice":
            return _text(_lark_of_choice(parsed("choice", text)))
        return _text(structural_tags.lark_of(parsed("structural_tag", text), special))
    except InvalidRequest:
        raise
    except ValueError as error:
        raise InvalidRequest(f"the {grammar.kind} can't be used: {str(error)[:300]}") from None


def _text(lark: str) -> str:
    """What llguidance compiles for a grammar in Lark's form."""
    return LLMatcher.grammar_from_lark(f"{HEAD}\n{lark}")


def _start_of_schema(schema: Mapping[str, Any]) -> str:
    return f"start: %json {json.dumps(for_llguidance(schema))}"


def parsed(kind: str, text: str) -> Any:
    """`text` as JSON. Raises `InvalidRequest`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the {kind} is not JSON: {str(error)[:200]}") from None


def _lark_of_choice(texts: Any) -> str:
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest("the choice must be a list of texts, one at least")
    some = [json.dumps(text) for text in texts if text]
    if not some:
        return 'start: ""'
    return f"start: CHOICE{'' if all(texts) else '?'}\nCHOICE: {' | '.join(some)}"
