"""The model's own tokenizer: text and chat messages to token ids, and a detokenizer for each stream back.

Owns the tokenizer of transformers; never knows requests or limits. Servers and `LLM` use it. Safe to call from several
threads: with neither padding nor truncation, encoding changes nothing in the tokenizer.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from jaxsgl.errors import CheckpointError, InvalidRequest
from jaxsgl.text.detokenizer import ByteDetokenizer, Detokenizer, NoText, TokenBytes, WindowDetokenizer
from jaxsgl.text.templates import ClientTemplates, SplitSpecial, refusal

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "tekken.json",
)  # fmt: skip
_MIN_MAX_TOKEN_BYTES = 64
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_TEMPLATES = ("tool_use", "default")  # the names that transformers chooses by
_ANY_TEXT = "a"
_SPACE_MARK = "▁"  # what SentencePiece writes for a space
_NAMED_BY_ID = "<|tool_call_argument_begin|>"  # of Kimi's templates, which write of a call its id and its arguments
_ONE_ANALYSIS = "Cannot pass both content and thinking"  # of gpt-oss's template, about messages with calls
_NINE_CHARACTERS = re.compile(r"alphanumeric strings with length (?:>= )?9")  # of ids, in errors of Mistral's
_NUMBERED_ID = re.compile(r"functions\..+:[0-9]+")

Turn: TypeAlias = Mapping[str, Any]  # a message as chat templates take it: role, content, perhaps tool_calls etc.


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation; `role` is one that the model's template knows (user, assistant, system)."""

    role: str
    content: str


@dataclass(frozen=True)
class TemplateOptions:
    """What a chat template gets with the messages.

    Attributes:
      tools: descriptions of functions, in OpenAI's form.
      add_generation_prompt: end the text where the assistant's turn begins.
      continue_final_message: end the text within the last message, which the model continues.
      variables: further variables of the template, such as enable_thinking.
      template: takes the place of the model's; "": the model's.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    template: str = ""


@dataclass(frozen=True)
class Truncation:
    """Keeps the last `num_tokens` tokens of a longer prompt, or its first ones."""

    num_tokens: int
    first: bool = False

    def of(self, ids: Sequence[int], num_before: int = 0, num_behind: int = 0) -> list[int]:
        """Returns what is kept of `ids`; `num_before` at their beginning and `num_behind` at their end always are.

        Raises `InvalidRequest` if nothing of the others would be.
        """
        excess = len(ids) - self.num_tokens
        if excess <= 0:
            return list(ids)
        own = range(num_before, len(ids) - num_behind)
        if excess >= len(own):
            raise InvalidRequest(
                f"truncate_prompt_tokens is {self.num_tokens}, but {num_before + num_behind} tokens of the prompt "
                "can't be cut: raise it"
            )
        kept = own[:-excess] if self.first else own[excess:]
        return [*ids[:num_before], *ids[kept.start : kept.stop], *ids[own.stop :]]


class Tokenizer:
    """Wraps a tokenizer of transformers, or None for a model folder that holds none (ids only).

    Args:
      tokenizer: see above.
      split_special_tokens: names of special tokens in messages of chats are text. Raises `CheckpointError` if the
        tokenizer can't do that.

    Attributes:
      max_token_bytes: a text of more than n * max_token_bytes bytes (UTF-8) certainly has more than n tokens. The bound
        is generous for small vocabularies, since a normalizer may shorten text before it becomes tokens.
      special_ids: of the tokens that have no text, unless it is asked for.
    """

    def __init__(self, tokenizer: Any | None, split_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._client_templates = ClientTemplates()
        self._token_bytes: TokenBytes | None = None
        self._text_ids: frozenset[int] = frozenset()
        self._byte_ids: frozenset[int] = frozenset()
        self._names: dict[int, bytes] = {}  # of special tokens; of all, unless the vocabulary is byte-level
        self.special_ids: frozenset[int] = frozenset()
        self._added_ids: dict[str, int] = {}
        self._with_names: dict[frozenset[int], TokenBytes] = {}  # by the special tokens that have a text
        self.max_token_bytes = _MIN_MAX_TOKEN_BYTES
        self._split: SplitSpecial | None = None
        if tokenizer is None:
            return
        special_ids = self.special_ids = _special_ids(tokenizer)
        self._added_ids = tokenizer.get_added_vocab()
        self.max_token_bytes = max(_MIN_MAX_TOKEN_BYTES, _longest_token_bytes(tokenizer))
        if tokenizer.is_fast and _is_byte_level(tokenizer.backend_tokenizer):
            id_to_token = tokenizer.backend_tokenizer.id_to_token
            self._token_bytes = TokenBytes(id_to_token, special_ids)
            self._names = {id: id_to_token(id).encode() for id in special_ids}
        else:
            vocabulary = tokenizer.get_vocab()
            self._names = {id: _bytes_of(token) for token, id in vocabulary.items()}
            self._text_ids = frozenset(vocabulary.values()) - special_ids
            self._byte_ids = frozenset(id for token, id in vocabulary.items() if _BYTE_TOKEN.fullmatch(token))
        if split_special_tokens:
            if self._token_bytes is None:
                raise CheckpointError("--split-special-tokens needs a byte-level tokenizer, as Qwen's or Llama 3's")
            special = {name.decode(): token_id for token_id, name in self._names.items()}
            self._split = SplitSpecial(tokenizer.backend_tokenizer, special)

    @property
    def exists(self) -> bool:
        """False for a model without a tokenizer: it takes token ids only, and returns no text."""
        return self._tokenizer is not None

    @property
    def of_transformers(self) -> Any:
        """The tokenizer that is wrapped. Raises `InvalidRequest` without one."""
        return self._or_refuse()

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` works."""
        return self._tokenizer is not None and self._tokenizer.chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True, truncation: Truncation | None = None) -> list[int]:
        """Returns the ids of `text`, cut by `truncation`. Raises `InvalidRequest`.

        `add_special_tokens` puts the model's start token first, if the model has one.
        """
        if not text:
            raise InvalidRequest("the prompt's text is empty: send at least one character")
        num_bytes_of(text)
        ids: list[int] = self._or_refuse().encode(text, add_special_tokens=add_special_tokens)
        if truncation is None or len(ids) <= truncation.num_tokens:
            return ids
        return truncation.of(ids, *(self.num_added() if add_special_tokens else (0, 0)))

    def ids_of_nothing(self) -> list[int]:
        """Returns the ids that `encode` puts around a text."""
        before, behind = self._added_around()
        return before + behind

    def ids_before_texts(self) -> list[int]:
        """Returns the ids that `encode` puts before a text: the model's start token, if it has one."""
        return self.encode(_ANY_TEXT)[: self.num_added()[0]]

    def num_added(self) -> tuple[int, int]:
        """Returns how many tokens `encode` puts before a text and after it."""
        before, behind = self._added_around()
        return len(before), len(behind)

    def _added_around(self) -> tuple[list[int], list[int]]:
        """Returns the tokens that are put before a text, and those after it."""
        bare, whole = self.encode(_ANY_TEXT, False), self.encode(_ANY_TEXT)
        before = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
        return whole[:before], whole[before + len(bare) :]

    def encode_pair(self, one: str, other: str, truncation: Truncation | None = None) -> list[int]:
        """Returns the ids of two texts as the tokenizer joins them, with what it adds. Raises `InvalidRequest`.

        `truncation` cuts the second text.
        """
        for text in (one, other):
            num_bytes_of(text)
        tokenizer = self._or_refuse()
        encoding = tokenizer(one, other)
        ids: list[int] = encoding["input_ids"]
        if truncation is None or len(ids) <= truncation.num_tokens:
            return ids
        if not tokenizer.is_fast:
            raise InvalidRequest(
                "the model's tokenizer can't truncate pairs of texts: leave truncate_prompt_tokens out"
            )
        places = [i for i, text in enumerate(encoding.sequence_ids()) if text == 1] or [len(ids)]
        return truncation.of(ids, places[0], max(len(ids) - places[-1] - 1, 0))

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Returns the ids of `messages` in the chat template, ready for the assistant's turn. Errors: `render_chat`."""
        turns = [{"role": message.role, "content": message.content} for message in messages]
        return self.encode_rendered(self.render_chat(turns, TemplateOptions()))

    def render_chat(self, turns: Sequence[Turn], options: TemplateOptions) -> str:
        """Returns the text that the chat template makes of `turns`, with special tokens written out.

        It is for `encode_rendered`: there are marks in it if names of special tokens in `turns` are to be text.
        Raises `InvalidRequest` if the model has no template, or its template refuses the messages or fails.
        """
        tokenizer = self._or_refuse()
        if not options.template and not self.has_chat_template:
            raise InvalidRequest(
                "the model has no chat template, so that it takes no chat messages: send text to /v1/completions, or "
                "start the server with --chat-template FILE"
            )
        if not turns:
            raise InvalidRequest("the chat has 0 messages: send at least one")
        if options.variables:
            reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters} - {"documents"}
            for name in options.variables:
                if name in reserved:
                    raise InvalidRequest(f"a chat template's variable can't be called {name}: leave it out")
        tools, variables = list(options.tools) or None, options.variables
        if self._split is not None:
            turns, tools, variables = map(self._split.mark, (turns, tools, variables))
        template = options.template or self.chat_template or ""
        if _NAMED_BY_ID in template:
            turns = _with_ids(turns, _kimis_id)
        if _NINE_CHARACTERS.search(template):
            turns = _with_ids(turns, _mistrals_id)
        if _ONE_ANALYSIS in template:
            turns = [_with_one_analysis(turn) for turn in turns]
        arguments = {
            "tools": tools,
            "add_generation_prompt": options.add_generation_prompt,
            "continue_final_message": options.continue_final_message,
            **variables,
        }
        if options.template:
            names = tokenizer.special_tokens_map
            return self._client_templates.render(turns, {**names, **arguments, "chat_template": options.template})
        try:
            try:
                text: str = tokenizer.apply_chat_template(list(turns), tokenize=False, **arguments)
            except TypeError:
                text = tokenizer.apply_chat_template(_with_spelled_calls(turns), tokenize=False, **arguments)
        except Exception as error:  # a program that comes with the model works on what the client sent
            raise InvalidRequest(refusal("model", error)) from None
        return text

    def encode_rendered(
        self, text: str, add_special_tokens: bool = False, truncation: Truncation | None = None
    ) -> list[int]:
        """Returns the ids of what `render_chat` has made. Otherwise as `encode`."""
        if self._split is None or not text:
            return self.encode(text, add_special_tokens, truncation)
        num_bytes_of(text)
        before, behind = self._added_around() if add_special_tokens else ([], [])
        ids = [*before, *self._split.ids(text), *behind]
        return ids if truncation is None else truncation.of(ids, len(before), len(behind))

    @property
    def chat_template(self) -> str | None:
        """The template. Of several with names: the one for tools, and behind it the one for the rest."""
        template = None if self._tokenizer is None else self._tokenizer.chat_template
        if isinstance(template, dict):
            template = "\n".join(template[name] for name in _TEMPLATES if name in template)
        return template

    @property
    def response_template(self) -> dict[str, Any] | None:
        """How the model's answers are written, if the tokenizer says it in transformers' form."""
        template = getattr(self._tokenizer, "response_template", None)
        return template if isinstance(template, dict) else None

    @property
    def special_names(self) -> tuple[str, ...]:
        """The texts of all special tokens."""
        return tuple(self._names[token_id].decode() for token_id in sorted(self.special_ids) if token_id in self._names)

    def knows_role(self, role: str) -> bool:
        """Whether the chat template names `role`."""
        return self.has_chat_template and names_role(str(self._or_refuse().chat_template), role)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the UTF-8 bytes that a token stands for, which need not be whole characters.

        A special token stands for its name, an id that the tokenizer doesn't know for no bytes.
        """
        name = self._names.get(token_id)
        if name is None:
            name = b"" if self._token_bytes is None else self._token_bytes[token_id]
        return name

    def detokenizer(self, visible: frozenset[int] = frozenset()) -> Detokenizer:
        """Returns a new detokenizer, for one stream. Special tokens among `visible` give their names as text."""
        if self._tokenizer is None:
            return NoText()
        if self._token_bytes is not None:
            return ByteDetokenizer(self._bytes_with(visible) if visible else self._token_bytes)
        if not visible:
            return WindowDetokenizer(self.decode, self._text_ids, self._byte_ids)
        return WindowDetokenizer(
            partial(self.decode, with_names=True), self._text_ids | visible, self._byte_ids, visible
        )

    def special_ids_of(self, texts: Sequence[str]) -> frozenset[int]:
        """Returns the ids of those of `texts` that are special tokens."""
        wanted = {text.encode() for text in texts}
        return frozenset(token_id for token_id in self.special_ids if self._names.get(token_id) in wanted)

    def unit_of(self, text: str) -> int | None:
        """Returns the id of an added token that grammars know by its id alone: special ones, and those in <..>."""
        if self._tokenizer is None:
            return None
        token_id = self._added_ids.get(text)
        is_unit = token_id in self.special_ids or (text.startswith("<") and text.endswith(">"))
        return token_id if is_unit else None

    def id_of(self, name: str) -> int | None:
        """Returns the id of the token of this name in the vocabulary, or None if there is none."""
        token_id = self._added_ids.get(name)
        if token_id is None and self._tokenizer is not None and self._tokenizer.is_fast:
            token_id = self._tokenizer.backend_tokenizer.token_to_id(name)
        return token_id

    @property
    def has_grammars(self) -> bool:
        """Whether the engine can hold answers to grammars: it reads tokenizer.json."""
        if self._tokenizer is None or not self._tokenizer.is_fast:
            return False
        folder = Path(str(self._tokenizer.name_or_path))
        return not folder.is_dir() or (folder / "tokenizer.json").exists()

    def text_with_names(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids` with the names of special tokens; the beginning of a part may be cut."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def _bytes_with(self, visible: frozenset[int]) -> TokenBytes:
        if visible not in self._with_names:
            id_to_token = self._tokenizer.backend_tokenizer.id_to_token if self._tokenizer is not None else str
            self._with_names[visible] = TokenBytes(id_to_token, self.special_ids - visible)
        return self._with_names[visible]

    def decode(self, ids: list[int], with_names: bool = False) -> str:
        """Returns the text of a whole sequence of ids with all its spaces; `with_names`: of special tokens, too."""
        decode = self._or_refuse().decode
        text: str = decode(ids, skip_special_tokens=not with_names, clean_up_tokenization_spaces=False)
        return text

    def check_text_comes_back(self) -> None:
        """Raises `InvalidRequest` for what ends a request by its text if the model has no tokenizer."""
        if self._tokenizer is None:
            raise InvalidRequest(
                "stop strings and stop_regex are looked for in text, but the model folder has no tokenizer: "
                "leave them out"
            )

    def _or_refuse(self) -> Any:
        if self._tokenizer is None:
            raise InvalidRequest("the model folder has no tokenizer: send token_ids instead of text")
        return self._tokenizer


def names_role(template: str, role: str) -> bool:
    """Whether a chat template, or the repr of several, names `role` between quotes."""
    return re.search(rf"""["']{re.escape(role)}\\?["']""", template) is not None


def is_gguf(model: str) -> bool:
    """Whether the model is a GGUF file, or a folder of some: the engine makes the folder that has the tokenizer."""
    path = Path(model).expanduser()
    if path.is_dir():
        return any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))
    return path.suffix == ".gguf" and path.is_file()


def _with_spelled_calls(turns: Sequence[Turn]) -> list[Turn]:
    """Returns `turns` with the arguments of calls as JSON texts, to which DeepSeek's own templates add others."""

    def spelled(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    return [
        {**turn, "tool_calls": [spelled(call) for call in turn["tool_calls"]]} if turn.get("tool_calls") else turn
        for turn in turns
    ]


def _kimis_id(given: Any, name: str, number: int) -> str:
    """Returns an id as Kimi gives them to its calls: its templates know their names from nothing else."""
    return given if isinstance(given, str) and _NUMBERED_ID.fullmatch(given) else f"functions.{name}:{number}"


def _mistrals_id(given: Any, name: str, number: int) -> str:
    """Returns an id of nine letters and digits: Mistral's templates refuse others."""
    kept = "".join(char for char in str(number if given is None else given) if char.isascii() and char.isalnum())
    return kept[-9:].rjust(9, "0")


def _with_ids(turns: Sequence[Turn], new_id: Callable[[Any, str, int], str]) -> list[Turn]:
    """Returns `turns` with other ids of calls, made of the id given, the function's name and the call's number."""
    ids: dict[Any, str] = {}
    number = 0
    renamed: list[Turn] = []
    for turn in turns:
        calls = []
        for call in turn.get("tool_calls") or ():
            given = call.get("id")
            ids[given] = new_id(given, call["function"]["name"], number)
            calls.append({**call, "id": ids[given]})
            number += 1
        if calls:
            turn = {**turn, "tool_calls": calls}
        elif (answered := turn.get("tool_call_id")) in ids:
            turn = {**turn, "tool_call_id": ids[answered]}
        renamed.append(turn)
    return renamed


def _with_one_analysis(turn: Turn) -> Turn:
    """Returns a turn whose text before its calls stands behind its reasoning: gpt-oss shows one of them alone."""
    reasoning, content = turn.get("reasoning_content"), turn.get("content")
    if not (turn.get("tool_calls") and reasoning and content and isinstance(content, str)):
        return turn
    return {**turn, "thinking": f"{reasoning}\n\n{content}", "content": ""}


def load_tokenizer(
    model: str, revision: str | None = None, split_special_tokens: bool = False, chat_template: str | None = None
) -> Tokenizer:
    """Loads the tokenizer of a local folder, or of a hub id at `revision`. Takes seconds: it imports transformers.

    A `chat_template`, which a flag gives, replaces the model's own.

    A folder without any tokenizer file gives a `Tokenizer` that takes token ids only. Raises `CheckpointError` if the
    folder is missing, or its tokenizer or the `chat_template` is broken.
    """
    folder = Path(model)
    if folder.is_dir() and not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return Tokenizer(None)
    if not folder.exists() and (folder.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1):
        raise CheckpointError(f"the model folder {model} does not exist")
    from jaxsgl.text.tokenizer_files import TokenizerFiles

    try:
        found = TokenizerFiles(model, revision).tokenizer()
        if chat_template is not None:
            found.chat_template = chat_template
            _check_syntax(found)
        return Tokenizer(found, split_special_tokens)
    except CheckpointError:
        raise
    except Exception as error:  # transformers and tokenizers raise all kinds here, bare Exception included
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"the tokenizer of {model} can't be loaded: {type(error).__name__}: {reason}") from error


def _check_syntax(tokenizer: Any) -> None:
    """Raises `CheckpointError` if its chat template is no Jinja. Which messages it refuses is its own matter."""
    from jinja2 import TemplateSyntaxError

    try:
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    except TemplateSyntaxError as error:
        reason = f"at line {error.lineno}: {error.message}"
        raise CheckpointError(f"--chat-template is no Jinja {reason}: correct it") from None
    except Exception:  # the template runs, and may raise anything for a message that it refuses
        return


def num_bytes_of(text: str) -> int:
    """Returns the length of `text` in UTF-8. Raises `InvalidRequest` if it holds half a surrogate pair."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        place = error.start
        raise InvalidRequest(f"the text holds half a surrogate pair at character {place}: send whole pairs") from None


def _bytes_of(token: str) -> bytes:
    """Returns the bytes of a token in SentencePiece's spelling: `<0x0A>` for a byte, a mark for a space."""
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes.fromhex(byte[1]) if byte else token.replace(_SPACE_MARK, " ").encode()


def _is_byte_level(backend: Any) -> bool:
    if backend.decoder is None:
        return False
    decoder = json.loads(backend.decoder.__getstate__())
    while decoder["type"] == "Sequence" and len(decoder["decoders"]) == 1:
        (decoder,) = decoder["decoders"]
    return bool(decoder["type"] == "ByteLevel")


def _longest_token_bytes(tokenizer: Any) -> int:
    """Returns the bytes of text that the longest token stands for, or more.

    Byte-level vocabularies write a byte as one character.
    """
    added = tokenizer.get_added_vocab()
    byte_level = tokenizer.is_fast and _is_byte_level(tokenizer.backend_tokenizer)
    return max(
        (len(token) if byte_level and token not in added else len(token.encode()) for token in tokenizer.get_vocab()),
        default=1,
    )


def _special_ids(tokenizer: Any) -> frozenset[int]:
    """Returns the ids that decoding skips: added tokens flagged as special, plus those that slow tokenizers list."""
    flagged = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(flagged if tokenizer.is_fast else flagged | set(tokenizer.all_special_ids))
