"""Small tokenizers of the kinds that models bring, trained on a few lines; saved as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "The quick brown fox jumps over the lazy dog, again and again.",
    "hello world, hello you. How are you? I'm fine.",
    "Grüße aus Köln, naïve café.",
    "你好，世界。今天天气很好。日本語も少し。",
    "🙂 👍🏽 👩‍👩‍👧 🇩🇪 😀😀😀",
    "def f(x):\n    return x + 1\n",
]
SPECIAL = ["<|start|>", "<|end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def byte_level() -> Tokenizer:
    """Byte-level BPE, as in Qwen and Llama 3. Two added tokens aren't special; one has letters beyond the alphabet."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
    )
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("5 €", special=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """A BPE as in Llama 2: words with a space mark, single bytes for unknown characters, the first space stripped."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, show_progress=False, special_tokens=["<unk>", *SPECIAL], limit_alphabet=60
    )
    trained.train_from_iterator(TEXT[:3] * 3, trainer)
    vocab = trained.get_vocab()
    for token in byte_tokens:
        vocab.setdefault(token, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = trained.normalizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", *SPECIAL])
    return tokenizer


def metaspace() -> Tokenizer:
    """Words with a space mark and no byte fallback, as in T5 and older SentencePiece models."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, special_tokens=["<unk>", *SPECIAL])
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    return tokenizer


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace}


def save(tokenizer: Tokenizer, folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> str:
    """Writes the folder that a model with this tokenizer has; returns its path."""
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    wrapped.chat_template = chat_template
    wrapped.save_pretrained(folder)
    return str(folder)
