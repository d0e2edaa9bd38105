"""Measure prefill and decode apart: one server of each against two servers that do both, behind the real gateway.

Each server has a core of its own (--no-pin: they share all), each fleet a gateway `smg`; both fleets run all the time
and are measured in turns, on the same prompts. Two kinds of load:

- alone: long prompts one after the other. Prints the time to the first token, what it is longer by apart, and the share
  of the KV bytes that was sent while later chunks of the prompt were computed.
- bursts: streams of short prompts generate, while again and again several long prompts come at once. Prints the time
  between tokens of the streams. Bursts come such that computing their prompts takes a given share (--busy) of one
  server's time, by the time that prompts alone take in servers that do both.

On a machine that other programs use, compare the fleets of one run and processor time only. Reproduce the figures of
docs/scale-out.md with:

    python scripts/bench apart
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

import jaxsgl
from bench.fleet import MODEL_NAME, Fleet, Server, start_fleet, start_server
from bench.output import figure_parser, write_figures, write_json
from jaxsgl.bench.backend import Answer, Backend
from jaxsgl.bench.http_backends import DIALECTS, HttpBackend
from jaxsgl.bench.http_stream import HttpServer
from jaxsgl.bench.requests import Ask
from jaxsgl.bench.run import Run

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1024,
    "hidden_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2304,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "dtype": "float32",
    "eos_token_id": 1023,
}
SHORT_TOKENS = 16
PAGE_TOKENS = 16  # also the smallest extend bucket: a decode server computes less than a page of each prompt
LONG_OUTPUT_TOKENS = 4
FIRST_STREAM_SEED = 1 << 20  # no long prompt has it
WORD_IDS = 10_000  # prompts are words or ids below this, as the gateway takes them


@dataclass(frozen=True)
class Load:
    """What is sent to each fleet.

    Attributes:
      long_tokens: of a long prompt.
      num_alone: long prompts one after the other.
      num_streams, stream_tokens: streams beside the bursts, and what each of their answers has.
      num_bursts, burst_size: how often long prompts come at once, and how many.
      busy: share of one server's time that their prompts take.
    """

    long_tokens: int
    num_alone: int
    num_streams: int
    stream_tokens: int
    num_bursts: int
    burst_size: int
    busy: float


@dataclass
class Figures:
    """What one fleet gave, over all rounds.

    Attributes:
      ttfts_s, alone_cpu_s: of long prompts alone; processor time of all processes of the fleet for all of them.
      itls_s: between tokens of the streams.
      burst_ttfts_s, burst_cpu_s: of the prompts of bursts; processor time for these and the streams.
      moved_bytes, hidden_bytes: of KV in both loads; of those, sent while the prompt was computed.
    """

    name: str
    ttfts_s: list[float] = field(default_factory=list)
    alone_cpu_s: float = 0.0
    itls_s: list[float] = field(default_factory=list)
    burst_ttfts_s: list[float] = field(default_factory=list)
    burst_cpu_s: float = 0.0
    moved_bytes: dict[str, int] = field(default_factory=dict)
    hidden_bytes: dict[str, int] = field(default_factory=dict)

    def percentile_itl_ms(self, percent: float) -> float:
        """A percentile of the times between tokens."""
        return 1e3 * float(np.percentile(self.itls_s, percent))

    def hidden_share(self, load: str) -> float | None:
        """Of the bytes that moved under `load`; None if none moved."""
        moved = self.moved_bytes.get(load, 0)
        return self.hidden_bytes[load] / moved if moved else None


class Meter:
    """Notes what a fleet uses while it serves one load."""

    def __init__(self, fleet: Fleet, figures: Figures, load: str) -> None:
        self._fleet, self._figures, self._load = fleet, figures, load

    def __enter__(self) -> None:
        self._cpu_s, self._transfer = self._fleet.cpu_s(), self._fleet.transfer() or {}

    def __exit__(self, *_: object) -> None:
        used_s, figures = self._fleet.cpu_s() - self._cpu_s, self._figures
        if self._load == "alone":
            figures.alone_cpu_s += used_s
        else:
            figures.burst_cpu_s += used_s
        for name, before in self._transfer.items():
            if name in ("moved_bytes", "hidden_bytes"):
                sums: dict[str, int] = getattr(figures, name)
                sums[self._load] = sums.get(self._load, 0) + (self._fleet.transfer() or {})[name] - before


async def alone(run: Run, load: Load) -> list[Answer]:
    """Long prompts one after the other."""
    answers: list[Answer] = []
    for seed in range(load.num_alone):
        answers = (await run.send([Ask(0.0, (seed,), (load.long_tokens,), LONG_OUTPUT_TOKENS)], ignore)).answers
    return _checked(answers)


async def bursts(backend: Backend, load: Load, period_s: float, salt: int) -> tuple[list[Answer], list[Answer]]:
    """Streams beside bursts, until the last burst is answered; returns the answers of streams, and of long prompts."""
    is_over = asyncio.Event()

    async def stream(number: int) -> list[Answer]:
        run, answers = Run(backend, WORD_IDS, salt), list[Answer]()
        for seed in itertools.count(FIRST_STREAM_SEED + number, load.num_streams):
            answers = (await run.send([Ask(0.0, (seed,), (SHORT_TOKENS,), load.stream_tokens)], ignore)).answers
            if is_over.is_set():
                break
        return answers

    streams = [asyncio.create_task(stream(number)) for number in range(load.num_streams)]
    await asyncio.sleep(period_s)
    asks = [
        Ask(
            number * period_s, (load.num_alone + number * load.burst_size + i,), (load.long_tokens,), LONG_OUTPUT_TOKENS
        )
        for number in range(load.num_bursts)
        for i in range(load.burst_size)
    ]
    outcome = await Run(backend, WORD_IDS, salt).send(asks, ignore)
    is_over.set()
    of_streams = itertools.chain.from_iterable(await asyncio.gather(*streams))
    return _checked([*of_streams]), _checked(outcome.answers)


def ignore(_: int) -> None:
    """Shows no progress."""


def _checked(answers: list[Answer]) -> list[Answer]:
    for answer in answers:
        assert not answer.error, answer.error
    return answers


def backend_of(fleet: Fleet) -> Backend:
    """A client of the fleet's gateway."""
    return HttpBackend(HttpServer(fleet.url, None), DIALECTS["openai"], MODEL_NAME, ignore_eos=True)


async def measure(
    fleets: Sequence[Fleet], load: Load, rounds: int, connect: Callable[[Fleet], Backend] = backend_of
) -> list[Figures]:
    """Sends `load` to the fleets in turns, after a warm-up."""
    results = [Figures(fleet.name) for fleet in fleets]
    backends = [connect(fleet) for fleet in fleets]
    for backend in backends:
        await backend.describe()
        await Run(backend, WORD_IDS, 0).warm_up(Ask(0.0, (0,), (load.long_tokens,), LONG_OUTPUT_TOKENS), 4)
    for salt in range(1, rounds + 1):  # the same prompts for all fleets, others in each round
        for fleet, backend, figures in zip(fleets, backends, results, strict=True):
            with Meter(fleet, figures, "alone"):
                answers = await alone(Run(backend, WORD_IDS, salt), load)
            figures.ttfts_s += [answer.ttft_s for answer in answers]
        period_s = load.burst_size * statistics.median(results[-1].ttfts_s) / load.busy
        for fleet, backend, figures in zip(fleets, backends, results, strict=True):
            with Meter(fleet, figures, "bursts"):
                streams, prompts = await bursts(backend, load, period_s, salt)
            figures.itls_s += [itl_s for answer in streams for itl_s in answer.itls_s]
            figures.burst_ttfts_s += [answer.ttft_s for answer in prompts]
    for backend in backends:
        await backend.close()
    return results


def report(results: Sequence[Figures]) -> str:
    """The figures of one of each (first) and of two that do both, in words."""
    apart, both = results
    medians = [1e3 * statistics.median(figures.ttfts_s) for figures in results]
    lines = [
        f"long prompts alone: first token after {medians[0]:.0f} ms {apart.name}, {medians[1]:.0f} ms {both.name}: "
        f"{medians[0] - medians[1]:+.0f} ms; processor time {apart.alone_cpu_s:.1f} and {both.alone_cpu_s:.1f} s"
    ]
    for load in ("alone", "bursts"):
        share = apart.hidden_share(load)
        told = "nothing moved" if share is None else f"{share:.0%} of {apart.moved_bytes[load] / 1e6:.0f} MB"
        lines.append(f"sent while later chunks were computed, {load}: {told}")
    for percent in (50, 99):
        ours, theirs = apart.percentile_itl_ms(percent), both.percentile_itl_ms(percent)
        lines.append(
            f"p{percent} between tokens of streams beside bursts: {ours:.1f} ms {apart.name}, {theirs:.1f} ms "
            f"{both.name}: {theirs / ours:.1f} times lower apart"
        )
    burst_ms = [1e3 * statistics.median(figures.burst_ttfts_s) for figures in results]
    lines.append(
        f"first token of a burst's prompts: {burst_ms[0]:.0f} and {burst_ms[1]:.0f} ms; processor time "
        f"{apart.burst_cpu_s:.1f} and {both.burst_cpu_s:.1f} s"
    )
    return "\n".join(lines)


def random_model(folder: Path) -> Path:
    """Writes the configuration of a model of random weights that has the bundled model's tokenizer."""
    bundled = Path(jaxsgl.__file__).parent / "bundled_model"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(bundled / name, folder)
    write_json(folder / "config.json", MODEL)
    return folder


def start(stack: contextlib.ExitStack, folder: Path, flags: Sequence[str], pin: bool) -> list[Fleet]:
    """Starts both fleets; the first server of each has one core, the second another."""
    cores: Sequence[int | None] = sorted(os.sched_getaffinity(0))[:2] if pin else [None]
    modes = {"apart": ("prefill", "decode"), "both in each": ("null", "null")}
    servers: dict[str, list[Server]] = {}
    for name, of_fleet in modes.items():
        for number, mode in enumerate(of_fleet):
            at = folder / f"{name}{number}"
            servers.setdefault(name, []).append(start_server(stack, at, flags, cores[number % len(cores)], mode))
    return [start_fleet(stack, folder, name, of_fleet) for name, of_fleet in servers.items()]


def main(arguments: list[str]) -> None:
    """Parses the command line, measures, and prints the figures."""
    parser = figure_parser(__doc__, __name__)
    parser.add_argument("--model", help="folder of a model (default: random weights of 25 million parameters)")
    parser.add_argument("--chunk", type=int, default=128, help="--chunked-prefill-size of all servers")
    parser.add_argument("--long-tokens", type=int, default=768, help="of a long prompt, about")
    parser.add_argument("--alone", type=int, default=6, help="long prompts that are sent one after the other")
    parser.add_argument("--streams", type=int, default=4, help="that generate beside the bursts")
    parser.add_argument("--stream-tokens", type=int, default=200, help="of each answer of a stream")
    parser.add_argument("--bursts", type=int, default=12)
    parser.add_argument("--burst-size", type=int, default=2, help="long prompts that come at once")
    parser.add_argument("--busy", type=float, default=0.6, help="share of one server's time that the bursts take")
    parser.add_argument("--rounds", type=int, default=2, help="how often each fleet is measured, in turns")
    parser.add_argument("--no-pin", action="store_true", help="let all servers use all cores")
    args = parser.parse_args(arguments)
    load = Load(args.long_tokens, args.alone, args.streams, args.stream_tokens, args.bursts, args.burst_size, args.busy)
    flags = [
        "--page-size", str(PAGE_TOKENS), "--max-total-tokens", "32768", "--max-running-requests", "8",
        "--decode-buckets", "8", "--extend-buckets", f"{PAGE_TOKENS},{args.chunk}",
        "--chunked-prefill-size", str(args.chunk),
    ]  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the servers, too
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        model = ["--model", args.model] if args.model else ["--model", str(random_model(folder / "model"))]
        dummy = [] if args.model else ["--load-format", "dummy"]
        fleets = start(stack, folder, [*model, *dummy, *flags], not args.no_pin)
        results = asyncio.run(measure(fleets, load, args.rounds))
    print(report(results))
    write_figures(args.json, load=asdict(load), fleets=[*map(asdict, results)])
