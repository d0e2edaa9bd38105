"""Compare the perplexity of quantized weights with that of unquantized ones, on the bundled model or any other.

    python scripts/check_quantization.py
    python scripts/check_quantization.py --model path/or/hub-id --text essays.txt --formats int8

Scores the tokens of documents that the bundled model is made for but has not seen: conversations, code words, plain
text. Of a document, the tokens count that the model would write: its answers. With --text, all tokens of a file's
lines count. For each format: the perplexity, how much larger it is than without quantization, and the memory of the
weights.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from random import Random
from typing import Any

from bench.output import command_line, command_parser, write_json
from tiny import documents

import jaxsgl
from jaxsgl.config import BUNDLED_MODEL
from jaxsgl.text.tokenizer import Tokenizer, load_tokenizer

MOST_TOKENS = 1024  # of a document
NONE = "none"


def held_out(num: int, tokenizer: Tokenizer) -> list[tuple[list[int], list[bool]]]:
    """Token ids of documents, and whether each one counts."""
    makers: list[Any] = [
        lambda rng: documents.conversation(rng, 2),
        lambda rng: documents.code_word(rng, rng.randint(0, 200)),
        documents.persona,
        documents.raw_text,
    ]
    made = []
    for index in range(num):
        document = makers[index % len(makers)](Random(f"quantization {index}"))
        ids: list[int] = []
        counts: list[bool] = []
        for piece in document:
            of_piece = tokenizer.encode(piece.content) if isinstance(piece.content, str) else list(piece.content)
            ids += of_piece
            counts += [piece.weight > 0] * len(of_piece)
        made.append((ids[:MOST_TOKENS], counts[:MOST_TOKENS]))
    return made


def lines_of(path: Path, tokenizer: Tokenizer) -> list[tuple[list[int], list[bool]]]:
    """The same of a file's lines, all of whose tokens count."""
    encoded = [tokenizer.encode(line)[:MOST_TOKENS] for line in path.read_text(encoding="utf-8").splitlines()]
    return [(ids, [True] * len(ids)) for ids in encoded if len(ids) > 1]


def perplexity(
    model: str, scored: list[tuple[list[int], list[bool]]], quantization: str | None, dtype: str
) -> tuple[float, int]:
    """The perplexity of the tokens that count, and the bytes of the weights."""
    llm = jaxsgl.LLM(model, quantization=quantization, dtype=dtype, decode_buckets=(32,), extend_buckets=(512,))
    params = jaxsgl.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    done = llm.generate([ids for ids, _ in scored], params, progress=False)
    weight_bytes = llm.engine.info.weight_bytes
    llm.close()
    total, num = 0.0, 0
    for completion, (_, counts) in zip(done, scored, strict=True):
        for score, wanted in zip(completion.prompt_logprobs or (), counts[1:], strict=True):
            if wanted:
                total += score.logprob
                num += 1
    return math.exp(-total / num), weight_bytes


def main() -> int:
    """Measures the formats one after another, prints a line each."""
    parser = command_parser(__doc__)
    parser.add_argument("--model", default=BUNDLED_MODEL, help="folder or hub id (default: the bundled model)")
    parser.add_argument("--formats", nargs="+", default=["int8", "fp8"], help="of --quantization (default: int8 fp8)")
    parser.add_argument("--documents", type=int, default=64, help="how many are scored (default 64)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="score its lines instead")
    parser.add_argument("--dtype", default="auto", help="as the server's (default: auto)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.model, None)
    assert tokenizer is not None
    scored = lines_of(options.text, tokenizer) if options.text else held_out(options.documents, tokenizer)
    num_tokens = sum(sum(counts[1:]) for _, counts in scored)
    found: dict[str, dict[str, float]] = {}
    for name in (NONE, *options.formats):
        value, weight_bytes = perplexity(options.model, scored, None if name == NONE else name, options.dtype)
        worse = value / found[NONE]["perplexity"] - 1 if found else 0.0
        found[name] = {"perplexity": value, "worse": worse, "weight_bytes": weight_bytes}
        print(f"{name:8} perplexity {value:9.5f}  {worse:+8.3%}  weights {weight_bytes / 2**20:8.1f} MiB", flush=True)
    if options.json:
        write_json(options.json, {"command": command_line(), "tokens": num_tokens, "formats": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
