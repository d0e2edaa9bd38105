"""Grammars that take minutes and gigabytes where nothing holds them, sent to a real server, which serves on.

tests/attacks/test_short_grammars.py has those that were found, one by one; here families of them come at random.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.servers import COMMON_FLAGS, RunningServer, check_log, running_server
from tests.grids import count

PATIENCE_S = 120.0
AT_ONCE = 4
MOST_MORE_BYTES = 200 << 20
LONGEST_GAP_S = 0.5
LETTERS = "ab0"
NUMBERS = (2, 9, 100, 1000, 4000, 10**6, 10**8)


def pattern(rng: random.Random, depth: int = 0) -> str:
    """A regular expression whose repetitions are nested, optional, or follow each other without an end between them."""
    match rng.randrange(6 if depth < 4 else 2):
        case 0:
            return rng.choice(LETTERS)
        case 1:
            return f"[{LETTERS[: rng.randint(1, 3)]}]"
        case 2:
            inner = pattern(rng, depth + 1)
            most = rng.choice(NUMBERS)
            return f"({inner}){{{rng.choice((f'{most}', f'1,{most}', f'{most},', f'0,{most}'))}}}"
        case 3:
            return f"({pattern(rng, depth + 1)})" + rng.choice("*+?")
        case 4:
            return pattern(rng, depth + 1) + pattern(rng, depth + 1)
    return f"({pattern(rng, depth + 1)}|{pattern(rng, depth + 1)})"


def schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A JSON schema with patterns, many of which may meet."""
    kind = rng.randrange(5 if depth < 3 else 2)
    if kind == 0:
        return {"type": "string", "pattern": f"^{pattern(rng)}$"}
    if kind == 1:
        return {
            "allOf": [
                {"type": "string", "pattern": f"^[ab]*{rng.choice('ab')}[ab]{{{i}}}$"}
                for i in range(rng.randint(2, 12))
            ]
        }
    if kind == 2:
        least = rng.choice(NUMBERS)
        return {"type": "array", "items": schema(rng, depth + 1), "minItems": least, "maxItems": least * 2}
    if kind == 3:
        names = [f"p{i}" for i in range(rng.choice((1, 9, 60)))]
        return {"type": "object", "properties": {name: schema(rng, depth + 2) for name in names}, "required": names}
    return {rng.choice(("anyOf", "oneOf", "allOf")): [schema(rng, depth + 1) for _ in range(rng.randint(2, 4))]}


def lark(rng: random.Random) -> str:
    parts = [f"/{pattern(rng)}/" for _ in range(rng.randint(1, 4))]
    parts.append(f"x{{{rng.choice(NUMBERS)}}}")
    rng.shuffle(parts)
    return f"start: {' '.join(parts)}\nx: {json.dumps(rng.choice(LETTERS) * rng.choice((1, 50)))}"


def ebnf(rng: random.Random) -> str:
    numbers = rng.choices(NUMBERS, k=3)
    return f'root ::= x{{{numbers[0]}}} | y+ y+\nx ::= y{{{numbers[1]}}}\ny ::= "a"{{{numbers[2]}}} | [ab]+'


def fields(rng: random.Random) -> dict[str, Any]:
    """What a completion may ask for."""
    match rng.randrange(6):
        case 0 | 1:
            return {"regex": pattern(rng)}
        case 2:
            return {"json_schema": json.dumps(schema(rng))}
        case 3:
            return {"ebnf": ebnf(rng)}
        case 4:
            grammar = {"type": "grammar", "grammar": lark(rng)}
            return {"structural_tag": json.dumps({"type": "structural_tag", "format": grammar})}
    return {"guided_grammar": lark(rng)}


class Stream:
    """A client that reads tokens all the time, and notes the longest time between two of them.

    Less what the loops of the server and its engine waited for a core meanwhile, since other work may hold it.
    """

    def __init__(self, http: httpx.Client, server: RunningServer) -> None:
        self.longest_s = 0.0
        self._pids = (server.process.pid, server.engine_pid)
        self.num_tokens = 0
        self._http = http
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Stream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _read(self) -> None:
        body = {"prompt": "Tell me a story.", "max_tokens": 400, "ignore_eos": True, "stream": True}
        while not self._ends.is_set():
            with self._http.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)  # a request may wait until it is admitted
                last_s = self._running_s()
                for line in lines:
                    if line:
                        now_s = self._running_s()
                        self.longest_s, last_s = max(self.longest_s, now_s - last_s), now_s
                        self.num_tokens += 1

    def _running_s(self) -> float:
        """The time, less what the first threads of both processes have waited for a core so far."""
        waited_ns = sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) for pid in self._pids)
        return time.monotonic() - waited_ns / 1e9


def resident_bytes(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) << 10


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("server"), COMMON_FLAGS) as server:
        yield server


def ask(http: httpx.Client, asked: dict[str, Any]) -> int:
    """The status of a completion that is held to a grammar; it must come, and be no failure of the server."""
    body = {"prompt": "Hi", "max_tokens": 6, "temperature": 0, **asked}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code in (200, 400), (answer.status_code, answer.text, asked)
    return answer.status_code


@pytest.mark.timeout(count(300, 3600))
def test_grammars_stop_no_stream_and_leave_no_memory_taken(server: RunningServer) -> None:
    """Streams may stand still for half a second, and for what other work on the machine takes."""
    rng = random.Random(31)
    num_grammars = count(100, 2000)
    with httpx.Client(base_url=f"http://{server.http_address}", timeout=PATIENCE_S) as http:
        good = {"prompt": "What is 3 + 4?", "max_tokens": 8, "temperature": 0}
        expected = http.post("/v1/completions", json=good).json()["choices"][0]["text"]
        ask(http, {"regex": "[ab]+"})  # what the first grammar of a server costs once isn't measured
        with Stream(http, server) as undisturbed:
            time.sleep(2.0)
        before = resident_bytes(server.engine_pid)
        with Stream(http, server) as stream, ThreadPoolExecutor(AT_ONCE) as threads:
            asked = [fields(rng) for _ in range(num_grammars)]
            statuses = Counter(threads.map(ask, itertools.repeat(http), asked))
        taken = resident_bytes(server.engine_pid) - before
        assert http.post("/v1/completions", json=good).json()["choices"][0]["text"] == expected
        metrics = http.get("/metrics").text
    assert min(statuses[200], statuses[400]) > num_grammars // 20, statuses
    assert stream.num_tokens > 50 and undisturbed.num_tokens > 50
    assert stream.longest_s <= LONGEST_GAP_S + 2 * undisturbed.longest_s
    assert taken <= MOST_MORE_BYTES
    (failed,) = [line for line in metrics.splitlines() if line.startswith("jaxsgl:failed_requests_total")]
    assert failed.endswith(" 0.0")
    check_log(server)
    print(dict(statuses), f"{taken >> 20} MiB, {stream.longest_s:.2f} s, {undisturbed.longest_s:.2f} s undisturbed")
