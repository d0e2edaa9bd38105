"""Measure what the scheduler and the cache cost the host. Uses no device and no JAX.

Prints host microseconds per decode step (launch, collect, replies, load) with many running requests; the time to admit
new requests, also 64 at once beside three quarters of --running; a decode step of 64 free and of 64 constrained
requests with a vocabulary of 151,936 (processor time, in turns; without the grammars' own work); one of --running
requests in one rank and in eight ranks of one engine, likewise, and of four times as many; the launch of a decode
step before an empty queue and before 8,000 waiting requests, when rows or pages are short; a step that orders 128
waiting requests of 4,096 tokens by their prefixes in a radix tree of a million tokens; and the rates of match, insert
and evict in the radix tree.
Reproduce the figures of docs/performance.md with:

    python scripts/bench_scheduler.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from bench.output import command_parser, write_json

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.cache.pages import as_pages, pages_for
from jaxsgl.cache.radix import RadixCache
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.requests.grammar import Grammar
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.scheduler.grammars.constraint import ALL, Words
from jaxsgl.scheduler.grammars.queue import GrammarQueue
from jaxsgl.scheduler.ranks import RankedScheduler
from jaxsgl.scheduler.scheduler import Scheduler
from jaxsgl.scheduler.serving import AnyScheduler

NUM_RANKS = 8


def decode_and_admission(num_running: int, context: int, page_size: int, steps: int) -> dict[str, float]:
    """Host time of decode steps with `num_running` requests of `context` tokens, and of their admission."""
    room = context + steps + 2
    num_pages = num_running * (pages_for(room, page_size) + 1) + 1
    sizes = Capacity(page_size, num_pages, num_running, room, num_running * context, 32_000)
    scheduler = Scheduler(
        sizes, BucketSet.derive(sizes), {2}, SchedulingConfig(max_prefill_tokens=num_running * context)
    )
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=steps + 1)
    prompts = rng.integers(3, 32_000, (num_running, context))
    requests = [Request(str(i), prompt.tolist(), params) for i, prompt in enumerate(prompts)]
    start = time.perf_counter()
    scheduler.receive(requests)
    launched = scheduler.launch()
    admission_s = time.perf_counter() - start
    assert launched is not None and launched.num_seqs == num_running
    tokens = np.full(num_running, 5, dtype=np.int32)
    scheduler.launch()  # one step ahead, as in the overlapped loop
    times = []
    for _ in range(steps - 2):
        start = time.perf_counter()
        launched = scheduler.launch()
        scheduler.collect(tokens)
        replies = scheduler.take_replies()
        scheduler.load(0)
        times.append(time.perf_counter() - start)
        assert launched is not None and launched.num_seqs == len(replies) == num_running
    return {
        "decode_step_us_median": 1e6 * statistics.median(times),
        "decode_step_us_p99": 1e6 * sorted(times)[int(0.99 * len(times))],
        "admission_us_per_request": 1e6 * admission_s / num_running,
    }


class AnyText:
    """A grammar's matcher that costs nothing: what is left is the scheduler's own work for masks."""

    num_bytes = 0
    ended = False
    accepts = True

    def copy(self) -> AnyText:
        """It holds nothing."""
        return self

    def advance(self, token_id: int) -> None:
        """Any token may come."""

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """All of them."""
        return len(token_ids)

    def mask_into(self, words: Words) -> None:
        """Allows all tokens."""
        words[:] = ALL


def constrained_decode(num_running: int, vocab_size: int, page_size: int, steps: int) -> dict[str, float]:
    """Median processor seconds of a decode step of free requests and of constrained ones, masks included, in turns."""
    room = steps + 40
    num_pages = num_running * (pages_for(room, page_size) + 1) + 1
    sizes = Capacity(page_size, num_pages, num_running, room, num_running * 32, vocab_size)
    schedulers = {}
    tokens = np.full(num_running, 5, dtype=np.int32)
    for kind, grammar in (("free", None), ("constrained", Grammar.regex(".*"))):
        grammars = GrammarQueue(lambda grammar: AnyText(), 30.0)
        scheduler = Scheduler(sizes, BucketSet.derive(sizes), {2}, grammars=grammars)
        params = SamplingParams(temperature=0.0, max_tokens=steps + 8, grammar=grammar)
        scheduler.receive([Request(str(i), [i + 3] * 32, params) for i in range(num_running)])
        while (launched := scheduler.launch()) is None:
            pass
        assert launched.num_seqs == num_running
        schedulers[kind] = scheduler
    times: dict[str, list[float]] = {kind: [] for kind in schedulers}
    for _ in range(steps):
        for kind, scheduler in schedulers.items():
            start = time.thread_time()
            launched = scheduler.launch()
            scheduler.collect(tokens)
            assert launched is not None and launched.masked == (kind == "constrained")
            if launched.masked:
                scheduler.masks(num_running)
            scheduler.take_replies()
            scheduler.load(0)
            times[kind].append(time.thread_time() - start)
    return {kind: statistics.median(values) for kind, values in times.items()}


def decode_in_ranks(num_running: int, num_ranks: int, context: int, page_size: int, steps: int) -> dict[str, float]:
    """Median processor seconds of a decode step of equally many requests in one rank and in several, in turns."""
    room = context + steps + 2
    schedulers: dict[str, AnyScheduler] = {}
    for name, count in (("one_rank", 1), ("ranks", num_ranks)):
        rows = num_running // count
        num_pages = rows * (pages_for(room, page_size) + 1) + 1
        sizes = Capacity(page_size, num_pages, rows, room, rows * context, 32_000)
        config = SchedulingConfig(max_prefill_tokens=rows * context)
        each = [Scheduler(sizes, BucketSet.derive(sizes), {2}, config) for _ in range(count)]
        schedulers[name] = each[0] if count == 1 else RankedScheduler(each)
    tokens = np.full(num_running, 5, dtype=np.int32)
    params = SamplingParams(temperature=0.0, max_tokens=steps + 1)
    prompts = np.random.default_rng(3).integers(3, 32_000, (num_running, context)).tolist()
    for scheduler in schedulers.values():
        scheduler.receive([Request(str(i), prompt, params) for i, prompt in enumerate(prompts)])
        for _ in range(2):  # one step ahead, as in the overlapped loop
            launched = scheduler.launch()
            assert launched is not None and launched.num_seqs == num_running
    times: dict[str, list[float]] = {name: [] for name in schedulers}
    for _ in range(steps - 2):
        for name, scheduler in schedulers.items():
            start = time.thread_time()
            scheduler.launch()
            scheduler.collect(tokens)
            scheduler.take_replies()
            scheduler.load(0)
            times[name].append(time.thread_time() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def admission(num_running: int, num_new: int, prompt_len: int, ignore_eos: bool, page_size: int) -> float:
    """Host seconds of a step that admits `num_new` requests at once beside `num_running`, from their arrival on."""
    num_rows, room = num_running + num_new, prompt_len + 258
    num_pages = num_rows * (pages_for(room, page_size) + 2) + 1
    sizes = Capacity(page_size, num_pages, num_rows, room, num_rows * prompt_len, 32_000)
    scheduler = Scheduler(
        sizes, BucketSet.derive(sizes), {2}, SchedulingConfig(max_prefill_tokens=num_rows * prompt_len)
    )
    rng, params = np.random.default_rng(2), SamplingParams(temperature=0.0, max_tokens=256, ignore_eos=ignore_eos)
    seconds = []
    for count in (num_running, num_new):
        first = scheduler.num_running
        prompts = rng.integers(3, 32_000, (count, prompt_len)).tolist()
        requests = [Request(str(first + i), prompt, params) for i, prompt in enumerate(prompts)]
        start = time.perf_counter()
        scheduler.receive(requests)
        launched = scheduler.launch()
        seconds.append(time.perf_counter() - start)
        assert launched is not None and launched.num_seqs == count
        scheduler.collect(np.full(count, 5, dtype=np.int32))
    return seconds[-1]


def decode_before_queue(short_of: str, policy: str, page_size: int, steps: int) -> dict[int, float]:
    """Median host seconds of launching a decode step of 64 requests while none, and while 8,000 more, wait.

    The 64 take all rows or, by what is held for their output, all pages, as `short_of` says. Both cases take turns.
    """
    num_running, prompt_len, room = 64, 32, 76 + steps
    num_pages = num_running * pages_for(room, page_size) + 8
    num_rows = num_running if short_of == "rows" else 2 * num_running
    sizes = Capacity(page_size, num_pages, num_rows, 4 * room, num_rows * prompt_len, 32_000)
    config = SchedulingConfig(schedule_policy=policy, schedule_conservativeness=10.0)
    params = SamplingParams(temperature=0.0, max_tokens=room - prompt_len)
    requests = [
        Request(str(i), [i % 30_000 + 3] * (prompt_len if i < num_running else 3 * room), params)
        for i in range(num_running + 8_000)
    ]
    schedulers = {}
    for num_waiting in (0, 8_000):
        schedulers[num_waiting] = scheduler = Scheduler(sizes, BucketSet.derive(sizes), {2}, config)
        scheduler.receive(requests[: num_running + num_waiting])
        while scheduler.num_running < num_running:
            launched = scheduler.launch()
            assert launched is not None
            scheduler.collect(np.full(launched.num_seqs, 5, dtype=np.int32))
    times: dict[int, list[float]] = {0: [], 8_000: []}
    for _ in range(steps):
        for num_waiting, scheduler in schedulers.items():
            start = time.perf_counter()
            launched = scheduler.launch()
            times[num_waiting].append(time.perf_counter() - start)
            assert launched is not None and launched.num_seqs == num_running and scheduler.num_waiting == num_waiting
            scheduler.collect(np.full(num_running, 5, dtype=np.int32))
    return {num_waiting: statistics.median(values) for num_waiting, values in times.items()}


def longest_match_first(
    num_waiting: int, length: int, cached_tokens: int, page_size: int, steps: int
) -> tuple[float, float]:
    """Median host seconds of a step that orders `num_waiting` requests, all of which have a cached prefix.

    And those of a yardstick, in turns with the step.

    One running request decodes. It also holds so much of the pool that no waiting request can be admitted.
    """
    num_prefixes = cached_tokens // length
    holder = num_prefixes * length
    sizes = Capacity(page_size, 2 * pages_for(holder, page_size) + 8, 8, 2 * holder, holder, 32_000)
    config = SchedulingConfig(max_prefill_tokens=holder, schedule_policy="lpm", schedule_conservativeness=1.0)
    scheduler = Scheduler(sizes, BucketSet.derive(sizes), {2}, config)
    rng = np.random.default_rng(3)
    prefixes = rng.integers(3, 32_000, (num_prefixes, length))

    def serve(name: str, prompt: list[int], max_tokens: int) -> None:
        scheduler.receive(
            [Request(name, prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))]
        )
        launched = scheduler.launch()
        assert launched is not None
        scheduler.collect(np.full(launched.num_seqs, 5, dtype=np.int32))

    for i, prefix in enumerate(prefixes.tolist()):
        serve(f"cached {i}", prefix, 1)
    assert scheduler.cache.cached_tokens >= num_prefixes * (length - page_size)
    serve("holder", rng.integers(3, 32_000, holder - page_size * num_prefixes).tolist(), holder)
    params = SamplingParams(temperature=0.0, max_tokens=holder, ignore_eos=True)
    waiting = [
        Request(f"waiting {i}", [*prefixes[i % num_prefixes, :-1].tolist(), 1, i + 3], params)
        for i in range(num_waiting)
    ]
    scheduler.receive(waiting)
    yardstick = Yardstick(num_waiting, length)
    times, yardstick_times = [], []
    for _ in range(steps):
        yardstick_times.append(yardstick.seconds())
        scheduler.state.failed_admission = None  # as after the end of a request: the queue is ordered again
        start = time.perf_counter()
        launched = scheduler.launch()
        times.append(time.perf_counter() - start)
        assert launched is not None and launched.num_seqs == 1 and scheduler.num_waiting == num_waiting
        scheduler.collect(np.full(1, 5, dtype=np.int32))
    return statistics.median(times), statistics.median(yardstick_times)


class Yardstick:
    """Work of the scheduler's kind whose time says how fast this machine is now: lookups, objects, and long compares.

    It reads as much memory as `longest_match_first` does.
    """

    def __init__(self, num_rows: int, length: int) -> None:
        self._rows = np.random.default_rng(4).integers(3, 32_000, (num_rows, length))
        self._same = [row.copy() for row in self._rows]

    def seconds(self) -> float:
        """Of the whole work, once."""
        start = time.perf_counter()
        for row, same in zip(self._rows, self._same, strict=True):
            assert np.array_equal(row, same)
        places = {str(i): (i, [i]) for i in range(4_000)}
        assert sum(place for place, _ in places.values()) == sum(range(4_000))
        return time.perf_counter() - start


def radix_rates(num_prefixes: int, tokens: int, page_size: int) -> dict[str, float]:
    """Operations per second on a radix tree of `num_prefixes` prefixes; groups of 16 share half of each prefix."""
    rng = np.random.default_rng(1)
    groups = rng.integers(0, 32_000, (num_prefixes // 16 + 1, tokens // 2), dtype=np.int32)
    tails = rng.integers(0, 32_000, (num_prefixes, tokens - tokens // 2), dtype=np.int32)
    prefixes = [as_pages(np.concatenate((groups[i // 16], tail)), page_size) for i, tail in enumerate(tails)]
    pages = np.arange(num_prefixes * len(prefixes[0]), dtype=np.int32).reshape(num_prefixes, -1) + 1
    tree = RadixCache(page_size)
    start = time.perf_counter()
    for prefix, row in zip(prefixes, pages, strict=True):
        tree.insert(prefix, row)
    insert_s = time.perf_counter() - start
    start = time.perf_counter()
    for prefix in prefixes:
        tree.match(prefix)
    match_s = time.perf_counter() - start
    evicted, cached = 0, tree.num_pages
    start = time.perf_counter()
    while tree.num_pages:
        evicted += len(tree.evict(8))
    evict_s = time.perf_counter() - start
    assert evicted == cached
    return {
        "tree_pages": cached,
        "insert_per_s": num_prefixes / insert_s,
        "match_per_s": num_prefixes / match_s,
        "evict_pages_per_s": evicted / evict_s,
    }


def main() -> None:
    """Runs all measurements and prints them."""
    parser = command_parser(__doc__)
    parser.add_argument("--running", type=int, default=256, help="running requests (default 256)")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each request (default 1024)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens per page (default 16)")
    parser.add_argument("--steps", type=int, default=300, help="decode steps that are timed (default 300)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    figures = decode_and_admission(args.running, args.context, args.page_size, args.steps)
    figures |= radix_rates(num_prefixes=2_000, tokens=args.context, page_size=args.page_size)
    for name, ignore_eos in (("admission_of_64_ms", False), ("admission_of_64_ignoring_eos_ms", True)):
        runs = (admission(args.running * 3 // 4, 64, 256, ignore_eos, args.page_size) for _ in range(5))
        figures[name] = 1e3 * min(runs)
    for kind, seconds in constrained_decode(64, 151_936, args.page_size, args.steps).items():
        figures[f"decode_step_of_64_{kind}_us"] = 1e6 * seconds
    for running in (args.running, 4 * args.running):
        for name, seconds in decode_in_ranks(running, NUM_RANKS, 64, args.page_size, args.steps).items():
            figures[f"decode_step_of_{running}_in_{name}_us"] = 1e6 * seconds
    for short_of, policy in (("rows", "fcfs"), ("pages", "fcfs"), ("pages", "lpm")):
        for num_waiting, seconds in decode_before_queue(short_of, policy, args.page_size, steps=100).items():
            figures[f"{policy}_short_of_{short_of}_before_{num_waiting}_us"] = 1e6 * seconds
    in_turns = longest_match_first(128, 4096, 1_000_000, args.page_size, steps=20)
    figures["lpm_step_ms"], figures["yardstick_ms"] = (1e3 * seconds for seconds in in_turns)
    print(f"{args.running} running requests of {args.context} tokens, page size {args.page_size}")
    for name, value in figures.items():
        print(f"  {name:34} {value:14,.1f}")
    if args.json:
        settings = {"running": args.running, "context": args.context, "page_size": args.page_size, "steps": args.steps}
        write_json(args.json, {"settings": settings, "figures": figures})


if __name__ == "__main__":
    main()
