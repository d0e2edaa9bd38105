"""Makes the tokenizer of a GGUF file's metadata, and says which tokens end an answer, as llama.cpp reads them.

transformers builds the tokenizer, in code of its own that knows llama.cpp's words. What that leaves out is added here:
the token that begins a text, where spaces are put and dropped, more ways of cutting words, and that some take words of
their vocabulary whole. Each follows src/llama-vocab.cpp of https://github.com/ggml-org/llama.cpp. Never reads files.
Called by `gguf_folder.py`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxsgl.errors import CheckpointError

OWN_FILES = "put the model's own tokenizer.json and tokenizer_config.json next to the file, and name their folder"
_PREFIX = "tokenizer.ggml."
_SENTENCEPIECE, _BYTES = "llama", "gpt2"  # kinds of vocabularies
# llama.cpp's keys, with transformers' names for them.
_KEYS = {
    "model": "tokenizer_type", "pre": "pre_tokenizer_type", "tokens": "tokens", "scores": "scores",
    "token_type": "token_type", "merges": "merges", "add_space_prefix": "add_prefix_space",
}  # fmt: skip
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_NEVER_NAMED = {"bos": 1, "eos": 2, "unknown": 0}  # ids in a vocabulary of SentencePiece whose file names none
# How texts are cut into words. Those that take words of their vocabulary whole also begin texts with a token.
_WHOLE_WORDS = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken",
)  # fmt: skip
_AS_GPT2 = ("default", "gpt-2", "olmo", "exaone4", "mellum", "a.x-4.0", "trillion", "granite-docling")
_DIGITS_APART = ("smollm", "refact", "starcoder", "minerva-7b")  # and else as GPT-2's
_AS_LLAMA3 = ("glm4", "chatglm-bpe")  # but with merges, and without a token that begins texts
_SEED = "seed-coder"
_SEED_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL, _ADDED = 3, 4  # llama.cpp's types of special tokens, and of others that texts are searched for
_PHI3 = re.compile("phi[- ]?3", re.IGNORECASE)
_KEEP_BLANKS = ("<unk>", "<s>", "<|endoftext|>")  # of Phi 3's special tokens, those that blanks may follow
# Tokens that end a text, a turn or a message, however they are called in a file; in Harmony one ends a part of it.
_ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<turn|>", "<|endoftext|>", "<|end_of_text|>",
    "<|return|>", "<|call|>",
})  # fmt: skip
_HARMONY, _END_OF_PART = frozenset({"<|return|>", "<|call|>"}), "<|end|>"

logger = logging.getLogger(__name__)


def end_tokens(metadata: Mapping[str, Any]) -> list[int]:
    """Ids that end an answer: those that a file names, and those whose spelling says so."""
    ids = _special_ids(metadata)
    tokens, kinds = (metadata.get(_PREFIX + word) or () for word in ("tokens", "token_type"))
    told = [ids.get(word) for word in ("eos", "eot", "eom")]
    told += [each for each in metadata.get(f"{_PREFIX}eos_token_ids") or () if _is_token(each, tokens)]
    spelled = {token: number for number, token in enumerate(tokens) if token in _ENDS}
    if spelled.keys() >= _HARMONY:
        spelled.pop(_END_OF_PART, None)
    told += [each for each in spelled.values() if each >= len(kinds) or kinds[each] in (_CONTROL, _ADDED)]
    return sorted({int(each) for each in told if each is not None})


def save_tokenizer(metadata: Mapping[str, Any], folder: Path, where: str) -> None:
    """Writes the files into `folder`; none if the GGUF file has no tokenizer, so that requests must be of ids.

    Raises `CheckpointError` for a tokenizer that transformers can't build, or would build otherwise than the model's.
    """
    told = {ours: metadata[_PREFIX + key] for key, ours in _KEYS.items() if _PREFIX + key in metadata}
    kind = told.get("tokenizer_type", "no_vocab")
    if kind in ("no_vocab", "none") or "tokens" not in told:
        return
    from transformers import PreTrainedTokenizerFast  # seconds to import

    ids = _special_ids(metadata)
    _warn_of_ids(metadata, where)
    words = told.get("pre_tokenizer_type", _AS_GPT2[0])
    backend = _as_told(_built(metadata, told, where), metadata, told)
    if kind == _SENTENCEPIECE and not str(metadata["general.architecture"]).startswith("gemma"):
        _put_spaces(backend, before_texts=bool(told.get("add_prefix_space", True)))
    if kind == _BYTES:
        _cut_words(backend, words)
        if "pre_tokenizer_type" not in told:
            logger.warning(
                "%s: tokenizer.ggml.pre is missing, so its tokenizer cuts texts into words as GPT-2's, which may not "
                "be how the model was trained: %s",
                where, OWN_FILES,
            )  # fmt: skip
    if words in _WHOLE_WORDS:
        backend.model.ignore_merges = True
    special = {name: told["tokens"][ids[word]] for name, word in _SPECIAL.items() if word in ids}
    begins = kind == _SENTENCEPIECE or words in _WHOLE_WORDS
    backend.post_processor = _begins_and_ends(metadata, begins, special, ids)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)
    wrapped.chat_template = metadata.get("tokenizer.chat_template")
    wrapped.save_pretrained(folder)


def _is_token(token_id: Any, tokens: Any) -> bool:
    """Whether a vocabulary has a token of that id; one that isn't known may have any."""
    return not tokens or 0 <= token_id < len(tokens)


def _special_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Ids of special tokens by llama.cpp's words. One that no token of the vocabulary has is as good as not named."""
    tokens = metadata.get(f"{_PREFIX}tokens") or ()
    defaults = _NEVER_NAMED if metadata.get(f"{_PREFIX}model") == _SENTENCEPIECE else {}
    named = {
        word: metadata[f"{_PREFIX}{word}_token_id"]
        for word in (*_SPECIAL.values(), "eot", "eom")
        if metadata.get(f"{_PREFIX}{word}_token_id") is not None
    }
    fitting = {word: token_id for word, token_id in named.items() if _is_token(token_id, tokens)}
    return {word: token_id for word, token_id in {**defaults, **fitting}.items() if _is_token(token_id, tokens)}


def _warn_of_ids(metadata: Mapping[str, Any], where: str) -> None:
    tokens = metadata[f"{_PREFIX}tokens"]
    for key, token_id in metadata.items():
        if key.startswith(_PREFIX) and key.endswith("_token_id") and not _is_token(token_id, tokens):
            logger.warning(
                "%s: %s is %s, but the vocabulary has %d tokens: it counts as not named", where, key, token_id,
                len(tokens),
            )  # fmt: skip


def _built(metadata: Mapping[str, Any], told: Mapping[str, Any], where: str) -> Any:
    """The tokenizer that transformers makes of what the file says."""
    try:
        from transformers.integrations.gguf import convert_gguf_tokenizer
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError as error:
        raise CheckpointError(
            f"tokenizers of GGUF files need a newer transformers: pip install 'jaxsgl[gguf]' ({error})"
        ) from error
    words = told.get("pre_tokenizer_type", _AS_GPT2[0])
    known = (*GGUF_PRE_TOKENIZER_SPLITS, *_AS_GPT2, *_DIGITS_APART, *_AS_LLAMA3, _SEED)
    if told["tokenizer_type"] == _BYTES and words not in known:
        raise CheckpointError(f"{where}: its tokenizer cuts texts into words as {words}, not known here: {OWN_FILES}")
    if words in _AS_LLAMA3:
        told = {**told, "pre_tokenizer_type": _WHOLE_WORDS[0]}
    try:
        backend, _ = convert_gguf_tokenizer(str(metadata["general.architecture"]), dict(told))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{where}: no tokenizer can be made of its metadata ({error!r}): {OWN_FILES}") from error
    return backend


def _put_spaces(backend: Any, *, before_texts: bool) -> None:
    """Makes spaces of SentencePiece's letter for them, and puts one before each text that no other text precedes.

    Texts stand between special tokens, so also one that follows such a token has it, as in Llama 2's own tokenizer.
    """
    from tokenizers import decoders, normalizers

    spaces = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.pre_tokenizer = None
    if before_texts:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer, backend.decoder = spaces, decoders.Sequence(steps)


def _cut_words(backend: Any, words: str) -> None:
    """Cuts texts into words where transformers doesn't know how."""
    from tokenizers import Regex, pre_tokenizers

    if words in _DIGITS_APART:
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if words == _SEED:
        split = pre_tokenizers.Split(Regex(_SEED_WORDS), behavior="isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])


def _begins_and_ends(
    metadata: Mapping[str, Any], begins: bool, special: Mapping[str, str], ids: Mapping[str, int]
) -> Any:
    """Puts the tokens that begin and end a text around it, if the file says so or `begins` without a word."""
    from tokenizers.processors import TemplateProcessing

    begins = metadata.get(f"{_PREFIX}add_bos_token", begins) and "bos_token" in special
    ends = metadata.get(f"{_PREFIX}add_eos_token", False) and "eos_token" in special
    parts = [*([special["bos_token"]] if begins else []), "$A", *([special["eos_token"]] if ends else [])]
    known = {special[f"{word}_token"]: ids[word] for word in ("bos", "eos") if word in ids}
    return TemplateProcessing(single=parts, pair=[*parts, "$B"], special_tokens=list(known.items()))


def _as_told(backend: Any, metadata: Mapping[str, Any], told: Mapping[str, Any]) -> Any:
    """The tokenizer with the added tokens of the file and no others.

    transformers adds defaults of its classes beyond the vocabulary. In one of bytes it leaves out those with letters
    that no byte stands for, as DeepSeek's special ones.
    """
    from tokenizers import Tokenizer

    model = json.loads(backend.to_str())
    spelled = {token_id: token for token, token_id in model["model"]["vocab"].items()}
    model["added_tokens"] = [each for each in model["added_tokens"] if each["id"] < len(told["tokens"])]
    known = {each["id"] for each in model["added_tokens"]}
    kinds = told.get("token_type") or () if told["tokenizer_type"] == _BYTES else ()
    for token_id, (token, kind) in enumerate(zip(told["tokens"], kinds, strict=False)):
        if kind in (_CONTROL, _ADDED) and token_id not in known:
            model["model"]["vocab"][token] = model["model"]["vocab"].pop(spelled[token_id])
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            model["added_tokens"].append({"id": token_id, "content": token, "special": kind == _CONTROL, **flags})
    model["added_tokens"].sort(key=lambda each: each["id"])
    if _drops_blanks(metadata):
        for each in model["added_tokens"]:
            each["rstrip"] = each["content"] not in _KEEP_BLANKS
    return Tokenizer.from_str(json.dumps(model))


def _drops_blanks(metadata: Mapping[str, Any]) -> bool:
    """Whether blanks after a special token are dropped: those of Phi 3, which files name or have as architecture."""
    names = (metadata["general.architecture"], metadata.get("general.name", ""))
    return metadata[f"{_PREFIX}model"] == _SENTENCEPIECE and any(_PHI3.search(str(name)) for name in names)
