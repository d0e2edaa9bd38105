"""What grammars cost: steps of 64 rows with a vocabulary of 151,936, free, held to JSON schemas, and half of each.

The model has random weights (4 layers of 512) and so is small: masks are a larger part of its steps than of a real
model's. Runs take turns, and report processor time per step of the whole process, which other programs disturb least,
and the wall time between the tokens of a row: how much later those of free rows come because of constrained ones. The
free half of the mixed runs must yield the tokens that it yields alone.

A fourth kind shows what free rows wait for: all rows are free, and the masks of the mixed runs are made and applied
beside them for nothing. What that costs them is the masks' share of the processors; anything more would be a wait. When
masks and logits of a step are there is timed, too.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

from bench.first_grammar import print_first_calls
from bench.mask_work import Moments, TimedEngine, WorkBeside, prepare_cpu_s
from bench.output import figure_parser, write_figures

if TYPE_CHECKING:
    from jaxsgl import LLM, Grammar, SamplingParams
    from jaxsgl.scheduler.grammars.constraint import Constraint, Matcher
    from jaxsgl.scheduler.served_engine import ServedEngine

VOCAB_SIZE, NUM_TEXTS, ROWS, TOKENS = 151_936, 150_000, 64, 16
HELD = range(1, ROWS, 2)  # of the mixed runs
LATER = ("half", "beside")

Quartiles: TypeAlias = tuple[float, float, float]


def main(arguments: list[str]) -> int:
    """Runs the benchmark; returns 0."""
    parser = figure_parser(__doc__, __name__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--server", action="store_true", help="measure the first requests of a server instead")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        if args.server:
            print_first_calls(folder)
            return 0
        figures = measured(folder, args.rounds)
    for kind in figures.cpu_ms:
        print(f"{kind}: {figures.cpu_ms[kind]:.1f} ms of processor time a step, {figures.wall_ms[kind]:.1f} ms of wall")
    print("processor time (s) of a start for grammars, and of the first one:", figures.first_cpu_s)
    for kind, words in (("half", "beside constrained ones"), ("beside", "if the same masks are made for nothing")):
        low, middle, high = figures.later_ms[kind]
        print(f"tokens of free rows come {middle:.2f} ms a step later {words} ({low:.2f} to {high:.2f})")
    low, middle, high = figures.early_ms
    print(
        f"masks are there {middle:.1f} ms before the logits ({low:.1f} to {high:.1f}), in {100 * figures.in_time:.1f}% "
        f"of {figures.num_masked} steps; logits wait {figures.waited_ms:.3f} ms a step for them"
    )
    print("processor time of a step with 32 constrained rows:", figures.share_ms)
    write_figures(args.json, **asdict(figures))
    return 0


@dataclass(frozen=True)
class Figures:
    """What was measured.

    Attributes:
      cpu_ms: by kind of batch, median processor time of the process per step.
      wall_ms: by kind of batch, median time between two tokens of a row.
      first_cpu_s: processor time of what is done before the first constrained request runs.
      later_ms: by kind, quartiles, over pairs of runs one after the other, of what the latter grows by from free to it.
      early_ms: quartiles, over masked steps, of the time from a step's masks to its logits.
      in_time: the share of these steps whose masks came first.
      waited_ms: mean time of the steps from logits to masks, 0 where masks came first.
      num_masked: steps.
      share_ms: what of a half step's processor time is the matchers', the masks' and their program's.
    """

    cpu_ms: dict[str, float]
    wall_ms: dict[str, float]
    first_cpu_s: dict[str, float]
    later_ms: dict[str, Quartiles]
    early_ms: Quartiles
    in_time: float
    waited_ms: float
    num_masked: int
    share_ms: dict[str, float]


def make_model(folder: Path) -> None:
    """Writes a configuration, and the bundled tokenizer with made-up tokens."""
    from jaxsgl.config.engine import BUNDLED_MODEL

    config = {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": VOCAB_SIZE, "hidden_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1536,
        "max_position_embeddings": 512, "tie_word_embeddings": True, "dtype": "float32",
    }  # fmt: skip
    tokenizer = json.loads((Path(BUNDLED_MODEL) / "tokenizer.json").read_text())
    config["eos_token_id"] = tokenizer["added_tokens"][-1]["id"]
    (folder / "config.json").write_text(json.dumps(config))
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
    first_cpu_s = {name: round(seconds, 2) for name, seconds in of_first_grammar(llm, grammars[0]).items()}
    prompts = [[2 + i, 3, 4, 5] for i in range(ROWS)]
    cpu_s: dict[str, list[float]] = {kind: [] for kind in (*kinds, "beside")}
    wall_s: dict[str, list[float]] = {kind: [] for kind in (*kinds, "beside")}
    alone: list[list[int]] = []
    mixed: list[list[int]] = []
    moments: list[Moments] = []
    works: list[WorkBeside] = []
    for number in range(rounds + 1):
        for kind in wall_s:
            work = None
            if kind == "beside":
                work = WorkBeside(llm.engine, {i: constraint_of(llm, grammars[i % 8]) for i in HELD}, mixed, ROWS)
                works.append(work)
            engine = TimedEngine(llm.engine, work)
            run = Run.of(llm, engine, prompts, kinds.get(kind, free))
            of_run = engine.moments()
            if number:  # the first round warms up
                cpu_s[kind].append(run.cpu_s)
                wall_s[kind].append(run.wall_s)
                moments += of_run
            alone = run.token_ids if kind == "free" else alone
            mixed = run.token_ids if kind == "half" else mixed
            assert kind != "half" or run.token_ids[::2] == alone[::2], "free rows draw other tokens beside others"
    later = {kind: _quartiles([b - a for a, b in zip(wall_s["free"], wall_s[kind], strict=True)]) for kind in LATER}
    early_s = [step.logits_s - step.masks_s for step in moments]
    num_worked = sum(work.num_steps for work in works[1:])
    share_s = {
        "matchers": sum(work.advance_s for work in works[1:]) / num_worked,
        "masks": sum(work.masks_s for work in works[1:]) / num_worked,
        "program": works[-1].program_cpu_s(),
    }
    return Figures(
        _medians(cpu_s), _medians(wall_s), first_cpu_s, later, _quartiles(early_s),
        in_time=sum(early > 0 for early in early_s) / len(early_s),
        waited_ms=1000 * statistics.mean(max(-early, 0.0) for early in early_s),
        num_masked=len(early_s),
        share_ms={name: round(1000 * seconds, 2) for name, seconds in share_s.items()},
    )  # fmt: skip


def of_first_grammar(llm: LLM, grammar: Grammar) -> dict[str, float]:
    """Processor seconds: of what servers do before they are ready, and of what the first request waits for.

    The former are the vocabulary, and programs for masks of up to 64 rows, three for each of seven numbers of rows, if
    no earlier start has kept them; the latter the grammar itself and the first mask.
    """
    import numpy as np

    from jaxsgl.constraints.compiler import Compiler

    times_s = [time.process_time()]
    compiler = Compiler(Path(llm.engine.info.model_path), VOCAB_SIZE, llm.engine.arch.eos_token_ids)
    times_s.append(time.process_time())
    matcher = compiler.compile(grammar)
    times_s.append(time.process_time())
    matcher.mask_into(np.zeros(-(-VOCAB_SIZE // 32), dtype=np.uint32))
    times_s.append(time.process_time())
    vocabulary, compiled, masked = (later - sooner for sooner, later in pairwise(times_s))
    programs = prepare_cpu_s(llm.engine, [1 << i for i in range(7)])
    return {"vocabulary": vocabulary, "21 programs": programs, "grammar": compiled, "first mask": masked}


def constraint_of(llm: LLM, grammar: Grammar) -> Constraint:
    """What holds a sample of its own to `grammar`, which the scheduler has compiled."""
    from jaxsgl.scheduler.grammars.constraint import Constraint

    assert llm._scheduler._grammars is not None
    matcher = llm._scheduler._grammars.ask("beside", grammar)
    eos_ids = llm.engine.arch.eos_token_ids
    return Constraint(cast("Matcher", matcher), eos_ids, (), 0)


def _quartiles(seconds: list[float]) -> Quartiles:
    """In milliseconds."""
    found = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return 1000 * found[0], 1000 * found[1], 1000 * found[2]


def _medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {kind: 1000 * statistics.median(found) for kind, found in seconds.items()}


class Run(NamedTuple):
    """One batch: processor time per step, the median wall time between two decode steps' tokens, and all tokens."""

    cpu_s: float
    wall_s: float
    token_ids: list[list[int]]

    @classmethod
    def of(cls, llm: LLM, engine: TimedEngine, prompts: list[list[int]], params: list[SamplingParams]) -> Run:
        """Serves the batch by the loop of every server, and notes when tokens come."""
        from tqdm import tqdm

        from jaxsgl.interrupts import Interrupts
        from jaxsgl.messages.orders import News
        from jaxsgl.messages.replies import Replies
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
        mailbox = Mailbox(requests, llm.tokenizer, tqdm(disable=True), Interrupts())
        start_s, before = time.process_time(), llm._scheduler.num_steps
        run_loop(llm._scheduler, cast("ServedEngine", engine), mailbox, depth=1)
        cpu_s = (time.process_time() - start_s) / (llm._scheduler.num_steps - before)
        gaps_s = [later - sooner for sooner, later in pairwise(came_s)]
        tokens = [[token for piece in pieces for token in piece.token_ids] for pieces in mailbox.pieces.values()]
        return cls(cpu_s, statistics.median(gaps_s[1:]), tokens)
