"""What grammars cost: steps of 64 rows with a vocabulary of 151,936, free, held to JSON schemas, and half of each.

The model has random weights (4 layers of 512) and so is small: masks are a larger part of its steps than of a real
model's. Runs take turns, and report processor time per step of the whole process, which other programs disturb least,
and the wall time between the tokens of a row: how much later those of free rows come because of constrained ones. The
free half of the mixed runs must yield the tokens that it yields alone.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bench.output import command_line, command_parser, write_json

if TYPE_CHECKING:
    from jaxsgl import LLM, SamplingParams

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
    for kind in figures.cpu_ms:
        print(f"{kind}: {figures.cpu_ms[kind]:.1f} ms of processor time a step, {figures.wall_ms[kind]:.1f} ms of wall")
    print(f"the first grammar waits for programs that take {figures.prepare_cpu_s:.1f} s of processor time to compile")
    low, middle, high = figures.later_ms
    print(f"tokens of free rows come {middle:.2f} ms a step later beside constrained ones ({low:.2f} to {high:.2f})")
    if args.json:
        write_json(args.json, {"command": command_line(), **asdict(figures)})
    return 0


@dataclass(frozen=True)
class Figures:
    """What was measured.

    Attributes:
      cpu_ms: by kind of batch, median processor time of the process per step.
      wall_ms: by kind of batch, median time between two tokens of a row.
      prepare_cpu_s: processor time of compiling the programs for masks, which the first grammar waits for.
      later_ms: quartiles, over pairs of runs one after the other, of what the latter grows by from free to half.
    """

    cpu_ms: dict[str, float]
    wall_ms: dict[str, float]
    prepare_cpu_s: float
    later_ms: tuple[float, float, float]


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


def measured(folder: str, rounds: int) -> Figures:
    """Runs all kinds of batches in turns."""
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
    start_s = time.process_time()
    llm.engine.mask_programs.prepare()
    prepare_cpu_s = time.process_time() - start_s
    prompts = [[2 + i, 3, 4, 5] for i in range(ROWS)]
    cpu_s: dict[str, list[float]] = {kind: [] for kind in kinds}
    wall_s: dict[str, list[float]] = {kind: [] for kind in kinds}
    alone: list[list[int]] = []
    for number in range(rounds + 1):
        for kind, params in kinds.items():
            run = Run.of(llm, prompts, params)
            if number:  # the first round warms up
                cpu_s[kind].append(run.cpu_s)
                wall_s[kind].append(run.wall_s)
            alone = run.token_ids if kind == "free" else alone
            assert kind != "half" or run.token_ids[::2] == alone[::2], "free rows draw other tokens beside others"
    later = [1000 * (half - free) for free, half in zip(wall_s["free"], wall_s["half"], strict=True)]
    quartiles = statistics.quantiles(later, n=4, method="inclusive") if len(later) > 1 else later * 3
    return Figures(_medians(cpu_s), _medians(wall_s), prepare_cpu_s, (quartiles[0], quartiles[1], quartiles[2]))


def _medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {kind: 1000 * statistics.median(found) for kind, found in seconds.items()}


class Run(NamedTuple):
    """One batch: processor time per step, the median wall time between two decode steps' tokens, and all tokens."""

    cpu_s: float
    wall_s: float
    token_ids: list[list[int]]

    @classmethod
    def of(cls, llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> Run:
        """Serves the batch by the loop of every server, and notes when tokens come."""
        from tqdm import tqdm

        from jaxsgl.messages.replies import Replies
        from jaxsgl.messages.wire import News
        from jaxsgl.offline.run import OfflineMailbox
        from jaxsgl.requests.request import Request
        from jaxsgl.scheduler.loop import run_loop

        came_s: list[float] = []

        class Mailbox(OfflineMailbox):
            def send(self, news: News) -> None:
                if isinstance(news, Replies) and len(news.replies) == len(prompts):
                    came_s.append(time.perf_counter())
                super().send(news)

        pairs = enumerate(zip(prompts, params, strict=True))
        requests = [Request(str(i), ids, sampling) for i, (ids, sampling) in pairs]
        mailbox = Mailbox(requests, llm.tokenizer, tqdm(disable=True))
        start_s, before = time.process_time(), llm._scheduler.num_steps
        run_loop(llm._scheduler, llm.engine, mailbox, overlap=True)
        cpu_s = (time.process_time() - start_s) / (llm._scheduler.num_steps - before)
        gaps_s = [later - sooner for sooner, later in pairwise(came_s)]
        tokens = [[token for piece in pieces for token in piece.token_ids] for pieces in mailbox.pieces.values()]
        return cls(cpu_s, statistics.median(gaps_s[1:]), tokens)


if __name__ == "__main__":
    sys.exit(main())
