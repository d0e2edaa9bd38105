"""Compare the perplexity of quantized weights with that of unquantized ones, on the bundled model or any other.

    python scripts/check quantization
    python scripts/check quantization --model path/or/hub-id --text essays.txt --formats int8

Scores the tokens of documents that the bundled model is made for but has not seen: conversations, code words, plain
text. For each format: the perplexity of the tokens that the model would write (its answers, of which it is all but
certain), the same of all tokens, how much larger each is than without quantization, and the memory of the weights. With
--text, documents are the lines of a file, and all tokens are answers.
"""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from typing import Any

from bench.output import figure_parser, write_figures
from tiny import documents

import jaxsgl
from jaxsgl.config.engine import BUNDLED_MODEL
from jaxsgl.text.tokenizer import Tokenizer, load_tokenizer

MOST_TOKENS = 1024  # of a document
NONE = "none"
WHAT = ("answers", "all tokens")


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


def perplexities(
    model: str, scored: list[tuple[list[int], list[bool]]], quantization: str | None, dtype: str
) -> tuple[list[float], int]:
    """The perplexity of answers and of all tokens, and the bytes of the weights."""
    llm = jaxsgl.LLM(model, quantization=quantization, dtype=dtype, decode_buckets=(32,), extend_buckets=(512,))
    params = jaxsgl.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    done = llm.generate([ids for ids, _ in scored], params, use_tqdm=False)
    weight_bytes = llm.engine.info.weight_bytes
    llm.close()
    scores = [score.logprob for completion in done for score in completion.prompt_logprobs or ()]
    is_answer = [wanted for _, counts in scored for wanted in counts[1:]]
    answers = [score for score, wanted in zip(scores, is_answer, strict=True) if wanted]
    return [math.exp(-sum(of) / len(of)) for of in (answers, scores)], weight_bytes


def main(arguments: list[str]) -> int:
    """Measures the formats one after another, prints a line each."""
    parser = figure_parser(__doc__, __name__)
    parser.add_argument("--model", default=BUNDLED_MODEL, help="folder or hub id (default: the bundled model)")
    parser.add_argument(
        "--formats", nargs="+", default=["int8", "int4", "fp8"], help="of --quantization (default: int8 int4 fp8)"
    )
    parser.add_argument("--documents", type=int, default=64, help="how many are scored (default 64)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="score its lines instead")
    parser.add_argument("--dtype", default="auto", help="as the server's (default: auto)")
    options = parser.parse_args(arguments)
    tokenizer = load_tokenizer(options.model, None)
    if tokenizer is None:
        parser.error(f"{options.model} has no tokenizer, which texts need: name a model with one")
    scored = lines_of(options.text, tokenizer) if options.text else held_out(options.documents, tokenizer)
    if not scored:
        parser.error(
            f"{options.text or f'--documents {options.documents}'} has nothing to score: give one text at least"
        )
    found: dict[str, dict[str, float]] = {}
    plain: list[float] = []
    for name in (NONE, *options.formats):
        of, weight_bytes = perplexities(options.model, scored, None if name == NONE else name, options.dtype)
        plain = plain or of
        worse = [value / before - 1 for value, before in zip(of, plain, strict=True)]
        found[name] = {"answers": of[0], "all": of[1], "answers_worse": worse[0], "all_worse": worse[1]}
        found[name]["weight_bytes"] = weight_bytes
        told = (f"{what} {value:9.5f} {more:+8.3%}" for what, value, more in zip(WHAT, of, worse, strict=True))
        print(f"{name:8} perplexity of {',  of '.join(told)},  weights {weight_bytes / 2**20:.1f} MiB", flush=True)
    write_figures(options.json, formats=found)
    return 0
