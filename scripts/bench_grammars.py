"""What grammars cost: steps of 64 rows with a vocabulary of 151,936, free, held to JSON schemas, and half of each.

The model has random weights (4 layers of 512) and so is small: masks are a larger part of its steps than of a real
model's. Runs take turns, and report processor time per step of the whole process, which other programs disturb least.
The free half of the mixed runs must yield the tokens that it yields alone.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench.output import command_line, command_parser, write_json

VOCAB_SIZE, NUM_TEXTS, ROWS, TOKENS = 151_936, 150_000, 64, 16


def main() -> int:
    """Runs the benchmark; returns 0."""
    parser = command_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        figures = measured(folder, args.rounds)
    for name, value in figures.items():
        print(f"{name}: {value:.1f} ms a step")
    if args.json:
        write_json(args.json, {"command": command_line(), "cpu_ms_per_step": figures})
    return 0


def make_model(folder: Path) -> None:
    """Writes a configuration, and the bundled tokenizer with made-up tokens."""
    from jaxsgl.config.engine import BUNDLED_MODEL

    config = {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": VOCAB_SIZE, "hidden_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1536,
        "max_position_embeddings": 512, "tie_word_embeddings": True, "dtype": "float32", "eos_token_id": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((Path(BUNDLED_MODEL) / "tokenizer.json").read_text())
    vocabulary, dice = tokenizer["model"]["vocab"], random.Random(0)
    letters = [token for token in vocabulary if len(token) == 1 and token.isalnum()]
    next_id = len(vocabulary) + len(tokenizer["added_tokens"])
    while len(vocabulary) < NUM_TEXTS:
        text = dice.choice(["", "Ġ"]) + "".join(dice.choices(letters, k=dice.randint(3, 9)))
        if text not in vocabulary:
            vocabulary[text] = next_id
            next_id += 1
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def measured(folder: str, rounds: int) -> dict[str, float]:
    """Median milliseconds of processor time per step, by kind of batch."""
    from jaxsgl import LLM, Grammar, SamplingParams

    llm = LLM(
        folder, load_format="dummy", dtype="float32", max_running_requests=ROWS, max_total_tokens=4096,
        decode_buckets=(ROWS,), extend_buckets=(256,), chunked_prefill_size=256, context_length=128, page_size=16,
    )  # fmt: skip
    items = [{"type": "object", "properties": {f"k{i}": {"type": "string"}}, "required": [f"k{i}"]} for i in range(8)]
    grammars = [Grammar.json_schema({"type": "array", "minItems": 500, "items": item}) for item in items]
    free = [SamplingParams(seed=i, max_tokens=TOKENS, ignore_eos=True) for i in range(ROWS)]
    held = [
        SamplingParams(seed=i, max_tokens=TOKENS, ignore_eos=True, grammar=grammars[i % len(grammars)])
        for i in range(ROWS)
    ]
    kinds = {"free": free, "held": held, "half": [held[i] if i % 2 else free[i] for i in range(ROWS)]}
    prompts = [[2 + i, 3, 4, 5] for i in range(ROWS)]
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    alone: list[list[int]] = []
    for number in range(rounds + 1):
        for kind, params in kinds.items():
            start_s, before = time.process_time(), llm._scheduler.num_steps
            ids = [answer.token_ids for answer in llm.generate(prompts, params, progress=False)]
            per_step_s = (time.process_time() - start_s) / (llm._scheduler.num_steps - before)
            if number:  # the first round warms up
                seconds[kind].append(per_step_s)
            alone = ids if kind == "free" else alone
            assert kind != "half" or ids[::2] == alone[::2], "free rows draw other tokens beside constrained ones"
    return {kind: 1000 * statistics.median(found) for kind, found in seconds.items()}


if __name__ == "__main__":
    sys.exit(main())
