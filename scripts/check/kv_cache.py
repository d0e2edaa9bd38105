"""Compare the bundled model's greedy answers over a float8 KV cache with those over a bfloat16 one.

    python scripts/check kv_cache --samples 8 --json kv.json

Questions of every skill that the model was trained for, with answers that are known; those about a code word look back
over up to 900 tokens. For each skill: the share of right answers over either cache, the share of answers that are the
same token for token, and the tokens that are equal before the first difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from bench.output import figure_parser, write_figures
from tiny import documents
from tiny.corpus import SINGLE_TURN

import jaxsgl
from check import common_prefix

CACHES = ("bfloat16", "fp8_e4m3")
DISTANCES = ((0, 50), (50, 200), (200, 500), (500, 900))  # tokens between a code word and the question for it


def questions(samples: int) -> dict[str, list[tuple[str, str]]]:
    """By skill, `samples` prompts in chat markup and the answers that are right."""
    makers: dict[str, Any] = {
        name: lambda rng, make=make: documents.chat([make(rng)]) for name, (make, _) in SINGLE_TURN.items()
    }
    for low, high in DISTANCES:
        makers[f"code word {low}-{high}"] = lambda rng, low=low, high=high: documents.code_word(
            rng, rng.randint(low, high), raw=False
        )
    return {
        skill: [_split(make(Random(f"kv {skill} {sample}"))) for sample in range(samples)]
        for skill, make in makers.items()
    }


def _split(document: documents.Document) -> tuple[str, str]:
    """What comes before the first answer, and that answer."""
    first = next(i for i, piece in enumerate(document) if piece.weight > 0)
    return "".join(str(piece.content) for piece in document[:first]), str(document[first].content)


def generate(kv_cache_dtype: str, prompts: Sequence[str], max_tokens: int) -> list[tuple[list[int], str]]:
    """Greedy tokens and texts over a cache of that format."""
    llm = jaxsgl.LLM(kv_cache_dtype=kv_cache_dtype, decode_buckets=(32,), extend_buckets=(512,))
    params = jaxsgl.SamplingParams(temperature=0.0, max_tokens=max_tokens)
    completions = llm.generate(list(prompts), params, use_tqdm=False)
    llm.close()
    return [(list(completion.token_ids), completion.text) for completion in completions]


def compare(asked: dict[str, list[tuple[str, str]]], answers: dict[str, list[tuple[list[int], str]]]) -> dict[str, Any]:
    """The figures of each skill and of all together."""
    rows = []
    flat = [(skill, right) for skill, pairs in asked.items() for _, right in pairs]
    for (skill, right), wide, narrow in zip(flat, *(answers[cache] for cache in CACHES), strict=True):
        (wide_ids, wide_text), (narrow_ids, narrow_text) = wide, narrow
        wanted = right.removesuffix(documents.TURN_END)
        equal = common_prefix(wide_ids, narrow_ids)
        rows.append((skill, wide_text == wanted, narrow_text == wanted, wide_ids == narrow_ids, equal, len(wide_ids)))
    found = {}
    for name in (*asked, "all"):
        mine = [row[1:] for row in rows if name in (row[0], "all")]
        sums = [sum(column) for column in zip(*mine, strict=True)]
        found[name] = {
            "answers": len(mine),
            "right_bfloat16": sums[0] / len(mine),
            "right_float8": sums[1] / len(mine),
            "same": sums[2] / len(mine),
            "tokens_equal": sums[3],
            "tokens": sums[4],
        }
    return found


def main(arguments: list[str]) -> int:
    """Runs both caches, prints a line per skill."""
    parser = figure_parser(__doc__, __name__)
    parser.add_argument("--samples", type=int, default=8, help="questions of each skill")
    parser.add_argument("--max-tokens", type=int, default=300, help="of an answer at most")
    options = parser.parse_args(arguments)
    asked = questions(options.samples)
    prompts = [prompt for pairs in asked.values() for prompt, _ in pairs]
    answers = {cache: generate(cache, prompts, options.max_tokens) for cache in CACHES}
    found = compare(asked, answers)
    for name, row in found.items():
        told = (
            f"{row['answers']:4} answers, right {row['right_bfloat16']:4.0%} and {row['right_float8']:4.0%}, "
            f"same {row['same']:4.0%}, tokens equal until the first difference {row['tokens_equal']} of {row['tokens']}"
        )
        print(f"{name:20} {told}")
    write_figures(options.json, skills=found)
    return 0
