r"""Send the same requests through jaxsgl and other engines in one run, and compare output tokens per second.

Contenders: jaxsgl; transformers, in static batches and in continuous batching; llama.cpp, where llama-cpp-python and
gguf are installed; OpenVINO GenAI, in an environment that --install makes; any running OpenAI-compatible server
(--url). Each one runs in a process of its own, gets the same token ids and output lengths, and must return exactly that
many tokens. All are loaded and warmed up first; then they take turns, so that changes of the machine's speed affect
them equally. Contenders that can't run here are listed with the reason. "tokens/CPU s" are output tokens by the
processor time of the contender's own process (for --url that is the client): on a busy machine the figure to compare.
Ratios are those of the best jaxsgl of the same class: weights of 16 and 32 bits, int8, int4. "leading same" is how many
tokens an output has before the first that float32's doesn't have. Reproduce the figures of docs/performance.md with the
first two; the third compares weights of a byte:

    python scripts/bench_peers.py
    python scripts/bench_peers.py --shared-prefix
    python scripts/bench_peers.py --num 8 --input 16:32 --output 128:128 --contenders jaxsgl-float32 jaxsgl-bfloat16 \
        jaxsgl-int8 llama.cpp-bfloat16 llama.cpp-q8_0 openvino-int8    # and with --num 1
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.models import SHAPES, write_checkpoint
from bench.output import command_line, command_parser, write_json
from bench.peers.contender import KINDS, Kind, Setup
from bench.peers.endpoint import FLUSHED_BY, NOTHING
from bench.peers.environments import install
from bench.peers.rounds import OURS, Match, WrongOutput
from bench.plots import plot_peers
from bench.processes import num_cores

from jaxsgl.bench.requests import Job, Lengths, random_jobs, shared_prefix_jobs

INPUTS = Lengths(100, 512)
QUESTIONS = Lengths(16, 128)  # tokens behind a shared prefix: a sentence to a paragraph
SHARED = "8:384"


def main() -> int:
    """Runs the rounds and prints the table. Returns 1 if a contender returned a wrong output or jaxsgl didn't run."""
    args = arguments()
    for environment in {kind.environment for kind in chosen(args).values()} - {""} if args.install else ():
        install(environment)
    with tempfile.TemporaryDirectory(prefix="bench-peers-") as work:
        model = write_checkpoint(args.model, Path(work) / "model") if args.model in SHAPES else Path(args.model)
        jobs = jobs_of(args, json.loads((model / "config.json").read_text())["vocab_size"])
        kept = args.keep or Path(work)
        kept.mkdir(parents=True, exist_ok=True)
        setup = setup_of(args, model, jobs, kept)
        match = Match(setup, jobs, Path(work), lambda line: print(line, flush=True))
        try:
            for name, kind in chosen(args).items():
                match.enter(name, kind)
            for _ in range(args.repeats):
                match.round()
            figures = match.figures()
        except WrongOutput as error:
            print(error, file=sys.stderr)
            return 1
        finally:
            match.close()
    print(table(figures))
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name not in ("json", "plot", "keep")}
        told = {"command": command_line(), "settings": settings, "machine": machine(), **figures}
        write_json(args.json, told, default=vars)
    if args.plot:
        shared = ", shared prefixes" if args.shared_prefix else ""
        plot_peers(figures, OURS, f"{args.model}, {args.num} requests{shared}", args.plot)
    return 0 if figures["best_jaxsgl"] else 1


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = command_parser(__doc__)
    parser.add_argument(
        "--model", default="mid", metavar="SHAPE|FOLDER", help=f"{', '.join(SHAPES)} with random weights; or a folder"
    )
    parser.add_argument("--num", type=int, default=32, help="requests (default 32)")
    parser.add_argument(
        "--input",
        type=lengths,
        metavar="LEAST:MOST",
        help="tokens of a prompt (default 100:512); after a shared prefix, of a question (default 16:128)",
    )
    parser.add_argument("--output", type=lengths, default=Lengths(64, 128), metavar="LEAST:MOST", help="default 64:128")
    parser.add_argument(
        "--shared-prefix",
        nargs="?",
        const=SHARED,
        metavar="GROUPS:TOKENS",
        help=f"prompts begin with the prefix of their group ({SHARED})",
    )
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="of all contenders (default cpu)")
    parser.add_argument("--contenders", nargs="*", choices=KINDS, default=list(KINDS), help="default: all")
    parser.add_argument(
        "--jaxsgl",
        action="append",
        default=[],
        metavar="FLAGS",
        help="one more jaxsgl, with flags of its server, as --jaxsgl='--dtype bfloat16 --page-size 32'; any number",
    )
    parser.add_argument("--url", action="append", default=[], help="an OpenAI-compatible server; any number")
    parser.add_argument(
        "--install", action="store_true", help="first download the environments of the contenders into .cache/peers"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep what OpenVINO makes of the model there, for later runs"
    )
    parser.add_argument("--seed", type=int, default=0, help="of lengths and prompts")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--plot", type=Path, help="draw them into this file; needs matplotlib")
    return parser.parse_args()


def lengths(text: str) -> Lengths:
    """Reads LEAST:MOST."""
    least, most = map(int, text.split(":"))
    if not 1 <= least <= most:
        raise ValueError(text)
    return Lengths(least, most)


def chosen(args: argparse.Namespace) -> dict[str, Kind]:
    """Contenders by name, our own first."""
    kinds = {name: KINDS[name] for name in args.contenders if args.shared_prefix or not KINDS[name].only_shared}
    added = {f"jaxsgl {flags}": Kind("bench.peers.ours:Ours", {"flags": flags}) for flags in args.jaxsgl}
    endpoints = {url: Kind("bench.peers.endpoint:Endpoint", {"url": url}) for url in args.url}
    return added | kinds | endpoints


def jobs_of(args: argparse.Namespace, vocab_size: int) -> list[Job]:
    """The requests of a round."""
    if not args.shared_prefix:
        return random_jobs(args.num, args.input or INPUTS, args.output, vocab_size, args.seed)
    groups, tokens = map(int, args.shared_prefix.split(":"))
    if args.num % groups:
        raise SystemExit(f"--num {args.num} can't be split into {groups} equal groups: choose a multiple")
    per_group, questions = args.num // groups, args.input or QUESTIONS
    return shared_prefix_jobs(groups, per_group, tokens, questions, args.output, vocab_size, args.seed)


def setup_of(args: argparse.Namespace, model: Path, jobs: list[Job], scratch: Path) -> Setup:
    """What contenders know before they load."""
    totals = [len(job.prompt_ids) + job.output_len for job in jobs]
    return Setup(
        model=str(model.resolve()),
        device=args.device,
        num_threads=num_cores(),
        num_jobs=len(jobs),
        longest=max(totals),
        total=sum(totals),
        prefix_len=int(args.shared_prefix.split(":")[1]) if args.shared_prefix else 0,
        scratch=str(scratch),
    )


def machine() -> dict[str, Any]:
    """The machine, for the JSON file."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {"cpu": model, "cores": num_cores(), "system": platform.platform(), "python": platform.python_version()}


def table(figures: dict[str, Any]) -> str:
    """The figures as text, fastest contender first."""
    best = figures["best_jaxsgl"]
    heads = (
        "tokens/s",
        "least",
        "most",
        "tokens/CPU s",
        "best jaxsgl / it",
        "least",
        "most",
        "by CPU s",
        "same first token",
        "same output",
        "leading same",
    )
    lines = ["".join(f"{head:>18}" for head in heads)]
    speeds = {name: of["output_tokens_per_s"] for name, of in figures["contenders"].items()}
    for name in sorted(speeds, key=lambda name: -speeds[name]["median"]):
        of = figures["contenders"][name]
        same, ratio, by_cpu = (of[key] for key in ("same_tokens", "ratio_of_best_jaxsgl", "cpu_ratio_of_best_jaxsgl"))
        cells = [f"{speeds[name][key]:.1f}" for key in ("median", "min", "max")]
        cells.append(f"{of['output_tokens_per_cpu_s']['median']:.1f}")
        cells += [f"{ratio[key]:.2f}" for key in ("median", "min", "max")] if ratio else [""] * 3
        cells.append(f"{by_cpu['median']:.2f}" if by_cpu else "")
        cells += [f"{same['first']:.0%}", f"{same['whole']:.0%}", f"{same['leading']:.1f}"] if same else [""] * 3
        lines.append("".join(f"{cell:>18}" for cell in cells) + f"  {name}")
    lines += [f"best jaxsgl: {best}"] if best else []
    flushed = {name: of["versions"].get(FLUSHED_BY) for name, of in figures["contenders"].items()}
    lines += [f"{name}: {FLUSHED_BY} {NOTHING}" for name, by in flushed.items() if by == NOTHING]
    lines += [f"could not run: {name}: {reason}" for name, reason in figures["could_not_run"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
