"""Tokenizers that folders hold in other files than tokenizer.json, and where their chat templates stand."""

from __future__ import annotations

import base64
import importlib.util
import json
import random
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from packaging.version import Version

from jaxsgl.errors import CheckpointError, InvalidRequest
from jaxsgl.preprocess.sources import SoundSource
from jaxsgl.text.dialects import dialect_of
from jaxsgl.text.hearing import transcript_prompt
from jaxsgl.text.kimi_tokenizer import WORDS
from jaxsgl.text.prompts import TextPrompt
from jaxsgl.text.tokenizer import TemplateOptions, Tokenizer, load_tokenizer
from tests.text.small_tokenizers import CHAT_TEMPLATE, TEXT, byte_level, save

BYTES = [bytes([byte]) for byte in range(256)]
TOOL = {"type": "function", "function": {"name": "f", "description": "d"}}


def kimi_folder(folder: Path) -> dict[bytes, int]:
    """Writes what Kimi's folder holds; returns the ranks. Each beginning of a word is a token."""
    words = [word.encode() for text in TEXT for word in text.replace(" ", "  ").split(" ")]
    tokens = dict.fromkeys(BYTES + [word[:length] for word in words for length in range(2, len(word) + 1)])
    ranks = {token: rank for rank, token in enumerate(tokens)}
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_text("".join(lines))
    added = [("[BOS]", True), ("[EOS]", True), ("<|tool_call_begin|>", False)]
    ids = (len(ranks), len(ranks) + 1, len(ranks) + 5)
    decoder = {id: {"content": name, "special": special} for id, (name, special) in zip(ids, added, strict=True)}
    config = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "added_tokens_decoder": decoder,
        "chat_template": "{{ tools | tojson }}[BOS]{{ messages[0].content }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k2", "auto_map": {"AutoConfig": "a.B"}}))
    (folder / "tokenization_kimi.py").write_text("raise SystemExit('a program of the folder has run')\n")
    return ranks


def test_kimis_folder_gives_the_ids_of_tiktoken(tmp_path: Path) -> None:
    ranks = kimi_folder(tmp_path)
    special = {"[BOS]": len(ranks), "[EOS]": len(ranks) + 1, "<|tool_call_begin|>": len(ranks) + 5}
    judge = tiktoken.Encoding("kimi", pat_str=WORDS, mergeable_ranks=ranks, special_tokens=special)
    tokenizer, dice = load_tokenizer(str(tmp_path)), random.Random(0)
    letters = [*"".join(TEXT), *special, "\n", "\r\n", "\t", "  ", "12345", "'S", "\u0301", "ǅ", "Г"]
    for text in [*TEXT, *("".join(dice.choices(letters, k=40)) for _ in range(300))]:
        ids = tokenizer.encode(text)
        assert ids == judge.encode(text, allowed_special="all"), text
        assert tokenizer.text_with_names(ids) == text
    assert tokenizer.special_ids_of(("[BOS]", "[EOS]")) == {len(ranks), len(ranks) + 1}
    assert tokenizer.decode(tokenizer.encode("[BOS]<|tool_call_begin|>f")) == "<|tool_call_begin|>f"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("中文English混合", ["中文", "English", "混合"]),
        ("北京市 Pascal", ["北京市", " Pascal"]),
        ("parseHTTPResponse it's 12345", ["parse", "HTTPResponse", " it's", " ", "123", "45"]),
        ("a  b!?\n\n c", ["a", " ", " b", "!?\n\n", " c"]),
    ],
)
def test_kimis_words_begin_and_end_where_chinese_capitals_and_numbers_do(
    text: str, words: list[str], tmp_path: Path
) -> None:
    kimi_folder(tmp_path)
    backend = load_tokenizer(str(tmp_path)).of_transformers.backend_tokenizer
    assert [text[begin:end] for _, (begin, end) in backend.pre_tokenizer.pre_tokenize_str(text)] == words


def test_kimis_template_sees_tools_with_sorted_keys(tmp_path: Path) -> None:
    kimi_folder(tmp_path)
    tokenizer, turns = load_tokenizer(str(tmp_path)), [{"role": "user", "content": "hi"}]
    text = tokenizer.render_chat(turns, TemplateOptions([TOOL]))
    assert text == '[{"function": {"description": "d", "name": "f"}, "type": "function"}][BOS]hi'
    with pytest.raises(InvalidRequest, match="variable can't be called chat_template"):
        tokenizer.render_chat(turns, TemplateOptions(variables={"chat_template": "mine"}))


def test_kimis_template_learns_from_ids_which_functions_were_called(tmp_path: Path) -> None:
    kimi_folder(tmp_path)
    template = (
        "{% for m in messages %}{% for c in m.tool_calls %}<|tool_call_begin|>{{ c['id'] }}<|tool_call_argument_begin|>"
        "{{ c.function.arguments | tojson }}{% endfor %}"
        "{% if m.tool_call_id %}Return of {{ m.tool_call_id }}{% endif %}/{% endfor %}"
    )
    tokenizer = load_tokenizer(str(tmp_path), chat_template=template)

    def turn(*calls: tuple[str | None, str]) -> dict[str, Any]:
        made = [{"id": id, "type": "function", "function": {"name": name, "arguments": {}}} for id, name in calls]
        return {"role": "assistant", "content": "", "tool_calls": made}

    turns = [
        turn(("call_4f", "now"), (None, "weather")),
        {"role": "tool", "tool_call_id": "call_4f", "content": "noon"},
        turn(("functions.weather:7", "weather")),
        {"role": "tool", "tool_call_id": "functions.weather:7", "content": "rain"},
        turn(("call_4f", "weather")),
        {"role": "tool", "tool_call_id": "call_4f", "content": "sun"},
    ]
    text = tokenizer.render_chat(turns, TemplateOptions())
    shown = text.replace("<|tool_call_begin|>", "").replace("<|tool_call_argument_begin|>{}", ";").split("/")
    assert shown[:6] == [
        "functions.now:0;functions.weather:1;",
        "Return of functions.now:0",
        "functions.weather:7;",
        "Return of functions.weather:7",
        "functions.weather:3;",
        "Return of functions.weather:3",
    ]


def test_kimi_takes_grammars_with_a_tokenizer_json_and_says_what_is_missing_with_neither_file(tmp_path: Path) -> None:
    kimi_folder(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert not tokenizer.has_grammars
    tokenizer.of_transformers.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tiktoken.model").unlink()
    again = load_tokenizer(str(tmp_path))
    assert again.has_grammars and again.encode(TEXT[3]) == tokenizer.encode(TEXT[3])
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"neither a tiktoken\.model nor a tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tiktoken.model").write_text("YQ== 0\nYg==\n")
    with pytest.raises(CheckpointError, match=r"line 2 of tiktoken\.model is no token in base64 and its rank: b'Yg=='"):
        load_tokenizer(str(tmp_path))


def tekken_folder(folder: Path, *names: str) -> str:
    tokens = [*BYTES, b"he", b"ll", b"hell", b"hello"]
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for rank, token in enumerate(tokens)]
    special = [
        {"rank": rank, "token_str": name, "is_control": True}
        for rank, name in enumerate(["<unk>", "<s>", "</s>", *names])
    ]
    config = {"pattern": r"\p{L}+|\p{N}|\s+", "default_vocab_size": 260 + len(special)}
    config["default_num_special_tokens"] = len(special)
    written = {"config": {**config, "version": "v7"}, "vocab": vocab, "special_tokens": special}
    (folder / "tekken.json").write_text(json.dumps(written))
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    return str(folder)


@pytest.mark.skipif(
    Version(metadata.version("transformers")) < Version("5.23"),
    reason="only newer transformers read a tekken.json alone",
)
def test_tekken_json_alone_is_a_tokenizer_whose_texts_begin_with_the_start_token(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tekken_folder(tmp_path))
    ids = tokenizer.encode("hello ab")
    assert ids == [1, 3 + 259, 3 + ord(" "), 3 + ord("a"), 3 + ord("b")]
    assert tokenizer.decode(ids) == "hello ab"


VOXTRALS = (
    "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[AUDIO]", "[BEGIN_AUDIO]", "[TRANSCRIBE]",
)  # fmt: skip


@pytest.mark.skipif(
    Version(metadata.version("transformers")) < Version("5.23"),
    reason="only newer transformers read a tekken.json alone",
)
def test_voxtrals_tekken_json_alone_has_mistrals_chat_format(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tekken_folder(tmp_path, *VOXTRALS))
    heard = [{"type": "audio", "audio": ""}, {"type": "audio", "audio": ""}, {"type": "text", "text": "hello"}]
    call = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "123456789"},
        {"role": "assistant", "content": "cd"},
        {"role": "user", "content": heard},
    ]
    text = tokenizer.render_chat(turns, TemplateOptions(tools=[TOOL]))
    assert text == (
        "<s>[SYSTEM_PROMPT]ab[/SYSTEM_PROMPT][INST]hello[/INST]"
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "123456789"}]</s>'
        "[TOOL_RESULTS]123456789[TOOL_CONTENT]2[/TOOL_RESULTS]cd</s>"
        '[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "f", "description": "d"}}][/AVAILABLE_TOOLS]'
        "[INST][BEGIN_AUDIO][AUDIO][BEGIN_AUDIO][AUDIO]hello[/INST]"
    )
    with pytest.raises(
        InvalidRequest, match="messages of the user alone may have sounds, not those of the role system"
    ):
        tokenizer.render_chat([{"role": "system", "content": heard}, *turns], TemplateOptions())
    special = {name: rank for rank, name in enumerate(["<unk>", "<s>", "</s>", *VOXTRALS])}
    ids = tokenizer.encode_rendered(text)
    assert ids[:2] == [special["<s>"], special["[SYSTEM_PROMPT]"]]
    assert ids[-6:-2] == [special[name] for name in ("[BEGIN_AUDIO]", "[AUDIO]") * 2]
    assert dialect_of(tokenizer.chat_template).calls is not None
    sound = SoundSource(b"")
    prompt = transcript_prompt(tokenizer, sound, "en", "")
    assert isinstance(prompt, TextPrompt) and prompt.media == (sound,) and not prompt.add_special_tokens
    spelled = [special["<s>"], *(special[name] for name in ("[INST]", "[BEGIN_AUDIO]", "[AUDIO]", "[/INST]"))]
    told = [*tokenizer.encode("lang", False), *tokenizer.encode(":", False), *tokenizer.encode("en", False)]
    assert tokenizer.encode(prompt.text, False) == [*spelled, *told, special["[TRANSCRIBE]"]]


def test_a_transformers_that_gives_other_tokens_of_tekken_json_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers.integrations.mistral.tokenizer", None)
    with pytest.raises(CheckpointError, match=r"can't read: install 5\.23 or a newer one, or put a tokenizer\.json"):
        load_tokenizer(tekken_folder(tmp_path))


def test_a_tokenizer_of_sentencepiece_alone_names_the_package_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sentencepiece" else find(name))
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model alone, .* pip install sentencepiece"):
        load_tokenizer(str(tmp_path))


def test_a_template_in_chat_template_json_is_the_tokenizers_if_it_has_none(tmp_path: Path) -> None:
    folder = save(byte_level(), tmp_path, chat_template=None)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of the file"}))
    assert load_tokenizer(folder).chat_template == "of the file"
    save(byte_level(), tmp_path)
    assert load_tokenizer(folder).chat_template == CHAT_TEMPLATE


@pytest.fixture
def with_names(tmp_path: Path) -> Tokenizer:
    """As Hermes 3: one template for chats with tools, and one for the others."""
    folder, path = save(byte_level(), tmp_path, chat_template=None), tmp_path / "tokenizer_config.json"
    templates = {"default": "plain", "tool_use": "<tool_call>{{ tools | tojson }}</tool_call>", "rag": "[TOOL_CALLS]"}
    config: dict[str, Any] = json.loads(path.read_text())
    config["chat_template"] = [{"name": name, "template": template} for name, template in templates.items()]
    path.write_text(json.dumps(config))
    return load_tokenizer(folder)


def test_templates_with_names_show_the_forms_of_calls_and_the_one_for_tools_gets_them(with_names: Tokenizer) -> None:
    assert dialect_of(with_names.chat_template) == dialect_of(None, "hermes")
    turns = [{"role": "user", "content": "hi"}]
    assert with_names.render_chat(turns, TemplateOptions()) == "plain"
    assert with_names.render_chat(turns, TemplateOptions([TOOL])).startswith('<tool_call>[{"type"')


def test_letters_are_small_where_sentence_transformers_takes_them_so(tmp_path: Path) -> None:
    folder = save(byte_level(), tmp_path)
    as_typed = load_tokenizer(folder)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    small = load_tokenizer(folder)
    assert small.encode("Über ALLEM") == as_typed.encode("über allem") != as_typed.encode("Über ALLEM")
