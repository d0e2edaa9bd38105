"""Measure what the host tier saves: chats of several turns over a pool that holds a tenth of them, and a restart.

One engine with random weights serves the same chats without a tier and with each write policy, in turns, in this
process. Prints prompt tokens that were computed, output tokens per second of wall time and per second of processor
time, and whether all tokens were equal. Then it keeps a prompt of 4,000 tokens in a file, takes a new scheduler, and
prints what the first request with that prompt computes. On a machine that other programs use, trust processor time.
Reproduce the figures of docs/prefix-cache.md with:

    python scripts/bench host_kv
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from bench.output import figure_parser, write_figures
from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.features import WRITE_POLICIES, HostKvConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.messages.orders import News, Shutdown, ToEngine
from jaxsgl.messages.replies import Replies, Reply
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.scheduler import Scheduler
from jaxsgl.wiring import build_scheduler, keep_prefixes

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 2000,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 1024,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "dtype": "float32",
    "eos_token_id": 1,
}
PAGE_SIZE = 16
FIRST_TOKENS, TURN_TOKENS, OUTPUT_TOKENS = 256, 48, 16
KNOWN_TOKENS = 4000
HOST_GIB = 0.5


class Round:
    """A `Mailbox` that delivers requests at once, and `Shutdown` when all have ended."""

    def __init__(self, requests: list[Request]) -> None:
        self._messages: list[ToEngine] = list(requests)
        self.outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}

    def receive(self, wait_s: float) -> list[ToEngine]:
        """See `Mailbox`."""
        messages, self._messages = self._messages, []
        return messages or ([Shutdown()] if wait_s else [])

    def send(self, news: News) -> None:
        """Keeps the tokens."""
        assert isinstance(news, Replies)
        for reply in news.replies:
            self._take(reply)

    def _take(self, reply: Reply) -> None:
        assert reply.refusal is None, reply.refusal
        self.outputs[reply.request_id] += reply.token_ids


@dataclass(frozen=True)
class Figures:
    """What serving all chats took.

    Attributes:
      prompt, computed, loaded: prompt tokens; of those, computed and loaded from the host.
      tokens_per_s, tokens_per_cpu_s: output tokens per second of wall time, and of processor time.
      outputs: all tokens.
    """

    prompt: int
    computed: int
    loaded: int
    tokens_per_s: float
    tokens_per_cpu_s: float
    outputs: list[list[int]]


def chats(scheduler: Scheduler, engine: Engine, num_chats: int, num_turns: int) -> Figures:
    """All chats take a turn, then all take the next one."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(3, 2000, FIRST_TOKENS).tolist() for _ in range(num_chats)]
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    outputs: list[list[int]] = []
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    for turn in range(num_turns):
        mailbox = Round([Request(f"{turn}-{i}", list(text), params) for i, text in enumerate(texts)])
        run_loop(scheduler, engine, mailbox, depth=1)
        outputs += mailbox.outputs.values()
        for text, output in zip(texts, mailbox.outputs.values(), strict=True):
            text += [*output, *rng.integers(3, 2000, TURN_TOKENS).tolist()]
    wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    totals, num_tokens = scheduler.state.totals, sum(map(len, outputs))
    loaded = scheduler.load(0).host.loaded_tokens
    return Figures(totals.prompt_tokens, totals.extend_tokens, loaded, num_tokens / wall_s, num_tokens / cpu_s, outputs)


def restart(config: EngineConfig, engine: Engine, folder: str) -> list[int]:
    """Tokens that the first request with a known prompt computes, before the restart and after it."""
    config = replace(config, host_kv=replace(config.host_kv, kv_file=folder))
    prompt = np.random.default_rng(1).integers(3, 2000, KNOWN_TOKENS).tolist()
    params, computed = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), []
    for _ in range(2):
        (scheduler,) = build_scheduler(config, engine).ranks
        run_loop(scheduler, engine, Round([Request("a", prompt, params)]), depth=1)
        computed.append(scheduler.state.totals.extend_tokens)
        keep_prefixes(config, engine, scheduler)
    return computed


def main(arguments: list[str]) -> None:
    """Parses the command line and prints the figures."""
    parser = figure_parser(__doc__, __name__)
    parser.add_argument("--chats", type=int, default=20)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2, help="how often each contender runs, in turns")
    args = parser.parse_args(arguments)
    chat_tokens = FIRST_TOKENS + args.turns * (TURN_TOKENS + OUTPUT_TOKENS)
    pool_tokens = max(args.chats // 10, 2) * chat_tokens
    results: dict[str, list[Figures]] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        config = config_of(folder, pool_tokens)
        engine = Engine(config, progress=False, moves_pages=True)
        hosts = {policy: HostKvConfig(host_kv_gib=HOST_GIB, host_kv_write_policy=policy) for policy in WRITE_POLICIES}
        for _ in range(args.rounds):
            for name, host in {"no tier": HostKvConfig(), **hosts}.items():
                (scheduler,) = build_scheduler(replace(config, host_kv=host), engine).ranks
                results.setdefault(name, []).append(chats(scheduler, engine, args.chats, args.turns))
        engine.close()
        config = config_of(folder, KNOWN_TOKENS + 200)
        engine = Engine(config, progress=False, moves_pages=True)
        first, known = restart(config, engine, f"{folder}/kept")
        engine.close()
    print(f"{args.chats} chats of {args.turns} turns, {chat_tokens} tokens each; the pool holds {pool_tokens} tokens")
    outputs = results["no tier"][0].outputs
    for name, runs in results.items():
        same = "the same tokens" if all(run.outputs == outputs for run in runs) else "OTHER TOKENS"
        print(
            f"{name:24s} computed {runs[0].computed:7} of {runs[0].prompt} prompt tokens, {runs[0].loaded:6} loaded, "
            f"{max(run.tokens_per_s for run in runs):7.1f} output tokens/s, "
            f"{max(run.tokens_per_cpu_s for run in runs):7.1f} per s of processor time, {same}"
        )
    print(f"a prompt of {KNOWN_TOKENS} tokens: {first} computed, {known} after a restart")
    lines = [{**asdict(run), "name": name, "outputs": None} for name, runs in results.items() for run in runs]
    write_figures(args.json, chats=lines, first=first, restart=known)


def config_of(folder: str, pool_tokens: int) -> EngineConfig:
    """An engine of random weights whose pool holds so many tokens."""
    return EngineConfig(
        model=folder,
        load_format="dummy",
        page_size=PAGE_SIZE,
        max_running_requests=2,
        max_total_tokens=pool_tokens,
        context_length=KNOWN_TOKENS + 200,
        chunked_prefill_size=256,
        decode_buckets=(2,),
        extend_buckets=(64, 256),
        host_kv=HostKvConfig(host_kv_gib=HOST_GIB),
        compilation_cache_dir="",
    )
