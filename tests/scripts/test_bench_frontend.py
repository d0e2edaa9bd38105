"""Every protocol delivers all tokens of all streams, and the load notices if one doesn't."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench.frontend.load import parse_http
from bench.frontend.plan import Chunk, Expected, Plan, Received, WrongStream, tokenizer

from tests.grids import NIGHTLY
from tests.scripts.running import ROOT, run_script

NUM_STREAMS = 4
NUM_TOKENS = 100


@pytest.mark.skipif(not NIGHTLY, reason="starts a server for each protocol; by night")
def test_all_protocols_deliver_every_token(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = ("--streams", NUM_STREAMS, "--tokens", NUM_TOKENS, "--rate", 400, "--profile", "--json", out)
    printed = run_script("bench_frontend.py", *flags).stdout
    figures = json.loads(out.read_text())["figures"]
    assert set(figures) == {"http", "grpc", "sglang"}
    for of_protocol in figures.values():
        assert of_protocol["tokens"] == NUM_STREAMS * NUM_TOKENS
        assert NUM_STREAMS <= of_protocol["chunks"] <= NUM_STREAMS * (NUM_TOKENS + 1)
        assert 0 < of_protocol["tokens_per_s"] <= 1.1 * of_protocol["engine_tokens_per_s"]
        assert of_protocol["server_cpu_s"] > 0
        assert 0 < of_protocol["delay_ms_p50"] <= of_protocol["delay_ms_p99"]
    assert printed.count("profile of the front end") == 3


def test_the_profile_finds_where_the_time_goes(tmp_path: Path) -> None:
    program = """
import os, sys, time
from pathlib import Path
from bench.frontend.server import START, STOP, SamplingProfile
from tests.grids import NIGHTLY

def burn():
    end_s = time.process_time() + 0.2
    while time.process_time() < end_s:
        pass

def work():
    burn()

SamplingProfile(Path(sys.argv[1])).install()
burn()
os.kill(os.getpid(), START)
work()
os.kill(os.getpid(), STOP)
burn()
"""
    out = tmp_path / "profile.json"
    path = os.pathsep.join((str(ROOT), str(ROOT / "scripts")))
    command = [sys.executable, "-c", program, str(out)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True)
    found = json.loads(out.read_text())
    assert 5 <= found["samples"] <= 250
    assert sum(found["own"].values()) == sum(found["lines"].values()) == found["samples"]
    (burn,) = (count for name, count in found["own"].items() if name.endswith(" burn"))
    (work,) = (count for name, count in found["total"].items() if name.endswith(" work"))
    assert burn <= work <= found["samples"] and burn > 0.8 * found["samples"]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan.make(num_streams=2, num_tokens=40, rate=100, folder=tmp_path)


def test_chunks_say_how_many_tokens_have_come(plan: Plan) -> None:
    ids = plan.tokens(1)
    half, whole = tokenizer().decode(ids[:20]), tokenizer().decode(ids)
    chunks = [Chunk(1.0, half, None), Chunk(2.0, whole.removeprefix(half), None), Chunk(3.0, "", None)]
    assert Expected(plan).check(1, chunks) == [(1.0, 20), (2.0, 40), (3.0, 40)]
    assert Expected(plan).check(1, [Chunk(1.0, None, ids[:7]), Chunk(2.0, None, ids[7:])]) == [(1.0, 7), (2.0, 40)]


@pytest.mark.parametrize("wrong", ["lost", "twice", "swapped", "another's"])
def test_a_wrong_stream_is_noticed(plan: Plan, wrong: str) -> None:
    ids = plan.tokens(1)
    got = {
        "lost": ids[:-1],
        "twice": [*ids[:5], *ids[4:]],
        "swapped": [*ids[:3], ids[4], ids[3], *ids[5:]],
        "another's": plan.tokens(0),
    }[wrong]
    with pytest.raises(WrongStream, match="ids"):
        Expected(plan).check(1, [Chunk(1.0, None, got)])
    with pytest.raises(WrongStream, match="text"):
        Expected(plan).check(1, [Chunk(1.0, tokenizer().decode(got), None)])


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = [b'data: {"choices": [{"text": "a\\u00e9"}]}\n\n', b'data: {"choices": []}\n\ndata: [DONE]\n\n']
BODY = b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in [*EVENTS, b""])


def test_events_are_read_however_the_network_cuts_them() -> None:
    for size in range(1, len(HEAD + BODY) + 1):
        wire = HEAD + BODY
        parts = [(float(start), wire[start : start + size]) for start in range(0, len(wire), size)]
        assert [chunk.text for chunk in parse_http(Received(parts))] == ["aé", ""]


@pytest.mark.parametrize("wire", [HEAD, (HEAD + BODY)[:-5], HEAD.replace(b"200", b"500") + BODY, b""])
def test_an_incomplete_answer_is_noticed(wire: bytes) -> None:
    with pytest.raises(WrongStream):
        parse_http(Received([(0.0, wire)]))
