"""Answers with drafts next to the same answers without, in turns on one engine: tokens a second and processor time.

    python scripts/bench speculation --speculative-algorithm NGRAM --rows 1 8 32
    python scripts/bench speculation --layers 7 --ffn 8192 --texts echo story counting --json speculation.json
    python scripts/bench speculation --shape mid-delta --texts right wrong --dtype bfloat16

The bundled model answers, made as large as --layers and --ffn say (7 and 8192: as many weights as the shape mid; 0: as
it is), or a shape with random weights (--shape). Texts are `repeated` (a span of words again and again), `echo` (a
sentence to repeat), `story` and `counting` (which can't be guessed), and any words whose answers are known: drafts are
always `right`, or always `wrong`. Of a shape there are only those of any words. Prints the median over the rounds
of how many times as fast the answers with drafts came, by the clock and by processor time (more than 1: they took
less), the tokens of a step that verified, and the share of drafts that was kept. Flags of the engine may follow.
"""

from __future__ import annotations

import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tiny.corpus import echo
from tiny.facts import STORY_ANIMALS

from bench.inflated import write_inflated
from bench.models import SHAPES, write_config
from bench.output import figure_parser, write_figures
from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.flags import add_flags, from_flags
from jaxsgl.offline.llm import LLM
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.scheduler.speculation.drafter import Drafter
from jaxsgl.scheduler.speculation.proposing import Drafters, Proposing
from jaxsgl.text.sample import Speculated
from jaxsgl.text.tokenizer import ChatMessage

TEXTS = ("repeated", "echo", "story", "counting", "wrong")
KNOWN = ("right", "wrong")  # texts whose drafts follow from the answer
OF_SHAPES = ("repeated", *KNOWN)
HEAD = f"{'text':>10}{'rows':>5}{'tok/s':>8}{'with':>8}{'clock':>7}{'cpu':>6}{'a step':>8}{'kept':>6}  same"


@dataclass(frozen=True)
class Answers:
    """One run: seconds by the clock and of the processor, all output tokens, and what became of drafts."""

    seconds: float
    cpu_seconds: float
    ids: list[list[int]]
    drafts: list[Speculated]

    @property
    def num_tokens(self) -> int:
        """Of all answers."""
        return sum(map(len, self.ids))


class Knowing:
    """A source that knows the answer, and says it, or always something else."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], *, is_right: bool) -> None:
        self._answers, self._is_right = answers, is_right
        self._known: list[int] = []
        self._prompt_len = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """See `Source`."""
        self._prompt_len = self._prompt_len or len(tokens)
        self._known += tokens

    def propose(self, most: int) -> tuple[int, ...]:
        """See `Source`."""
        prompt, so_far = tuple(self._known[: self._prompt_len]), len(self._known) - self._prompt_len
        answer = self._answers[prompt]
        if self._is_right:
            return tuple(answer[so_far : so_far + most])
        return (answer[so_far] ^ 1,) * most if so_far < len(answer) else ()

    def end(self) -> None:
        """See `Source`."""


def main(arguments: list[str]) -> int:
    """Measures and prints a line for each text and number of rows."""
    parser = figure_parser(__doc__, __name__)
    parser.add_argument("--layers", type=int, default=7, help="of the model (default 7); 0: the bundled one as it is")
    parser.add_argument("--ffn", type=int, default=8192, help="columns of each MLP (default 8192)")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="a shape with random weights, instead of that model")
    parser.add_argument(
        "--texts", nargs="+", choices=(*TEXTS, "right"), help="what is answered (default: all but right)"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="requests at once (default 1 8 32)")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer at most (default 128)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (default 3)")
    options, flags = parser.parse_known_args(arguments)
    if "--speculative-algorithm" not in flags:
        flags += ["--speculative-algorithm", "NGRAM"]
    texts = options.texts or (OF_SHAPES if options.shape else TEXTS)
    if options.shape and not set(texts) <= set(OF_SHAPES):
        parser.error(f"--texts are {' '.join(texts)}, but a --shape has no words: give {', '.join(OF_SHAPES)}")
    with tempfile.TemporaryDirectory(prefix="bench-speculation-") as folder:
        if options.shape:
            flags += ["--model", str(write_config(options.shape, Path(folder))), "--load-format", "dummy"]
        elif options.layers:
            flags += ["--model", str(write_inflated(Path(folder), options.layers, options.ffn))]
        llm = llm_of(flags, max(options.rows))
    print(HEAD)
    rows = [figure(llm, text, num, options.tokens, options.rounds) for text in texts for num in options.rows]
    write_figures(options.json, rows=rows)
    return 0


def llm_of(flags: list[str], rows: int) -> LLM:
    """The engine, with room for so many requests unless `flags` say something else."""
    parser = figure_parser(None, __name__)
    add_flags(parser, EngineConfig)
    least = ["--max-running-requests", str(rows), "--context-length", "1024"]
    config = from_flags(EngineConfig, parser.parse_args([*least, *flags]))
    return LLM(**{name: getattr(config, name) for name in EngineConfig.__dataclass_fields__})


def figure(llm: LLM, text: str, num: int, num_tokens: int, rounds: int) -> dict[str, Any]:
    """Answers `num` prompts with drafts and without, in turns; prints and returns what came of it."""
    prompts = prompts_of(llm, text, num)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=text in OF_SHAPES)
    known = answered(llm, prompts, params, False)
    answers = dict(zip(map(tuple, prompts), known.ids, strict=True))
    with_drafters(llm, answers, text)
    answered(llm, prompts, params, True)
    turns = [(answered(llm, prompts, params, False), answered(llm, prompts, params, True)) for _ in range(rounds)]
    clock = statistics.median(without.seconds / with_.seconds for without, with_ in turns)
    cpu = statistics.median(without.cpu_seconds / with_.cpu_seconds for without, with_ in turns)
    plain, drafted = turns[-1]
    steps = sum(told.num_steps for told in drafted.drafts)
    kept = sum(told.accepted_tokens for told in drafted.drafts)
    tried = sum(told.draft_tokens for told in drafted.drafts)
    row = {
        "text": text,
        "rows": num,
        "tokens": plain.num_tokens,
        "tokens_per_s": statistics.median(without.num_tokens / without.seconds for without, _ in turns),
        "tokens_per_s_with": statistics.median(with_.num_tokens / with_.seconds for _, with_ in turns),
        "times_clock": clock,
        "times_cpu": cpu,
        "verifies": steps,
        "accept_length": 1 + kept / steps if steps else 0.0,
        "accept_rate": kept / tried if tried else 0.0,
        "same": plain.ids == drafted.ids,
    }
    print(
        f"{text:>10}{num:5}{row['tokens_per_s']:8.0f}{row['tokens_per_s_with']:8.0f}{clock:7.2f}{cpu:6.2f}"
        f"{row['accept_length']:8.2f}{row['accept_rate']:6.2f}  {'yes' if row['same'] else 'NO'}",
        flush=True,
    )
    return row


def answered(llm: LLM, prompts: list[list[int]], params: SamplingParams, speculative: bool) -> Answers:
    """Answers all `prompts` together, with an empty prefix cache."""
    llm.flush_cache()
    start_s, start_cpu_s = time.monotonic(), cpu_seconds()
    completions = llm.generate(prompts, params, speculative=speculative, use_tqdm=False)
    seconds, cpu = time.monotonic() - start_s, cpu_seconds() - start_cpu_s
    return Answers(seconds, cpu, [one.token_ids for one in completions], [one.speculated for one in completions])


def cpu_seconds() -> float:
    """Processor time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def with_drafters(llm: LLM, answers: dict[tuple[int, ...], list[int]], text: str) -> None:
    """Has requests from now on guess as flags say, or as a `KNOWN` text says."""
    config = llm.config.speculation

    def drafter_of(request: Request) -> Drafter:
        if text not in KNOWN or not request.speculative:
            return Drafters(config)(request)
        return Proposing([Knowing(answers, is_right=text == "right")], config.num_draft_tokens)

    llm._scheduler.ranks[0].state.speculation.drafter_of = drafter_of  # type: ignore[method-assign]


def prompts_of(llm: LLM, text: str, num: int) -> list[list[int]]:
    """Token ids of `num` prompts."""
    rng = Random(num)
    if text in OF_SHAPES:
        return [[rng.randrange(30, 900) for _ in range(16)] * 3 for _ in range(num)]
    asked: list[str] = []
    while len(asked) < num:
        if text == "echo":
            words = echo(rng)[0]
            if len(words) > 60:
                asked.append(words)
        elif text == "counting":
            first = rng.randint(1, 40)
            asked.append(f"Count from {first} to {first + 30}")
        else:
            asked.append(f"Tell me a story about a {rng.choice(STORY_ANIMALS)}.")
    return [llm.tokenizer.encode_chat([ChatMessage("user", one)]) for one in asked]
