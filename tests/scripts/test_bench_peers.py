"""Contenders get the same requests in turns, and wrong outputs or missing contenders are noticed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import CalledProcessError
from unittest.mock import Mock

import numpy as np
import pytest
from bench.peers.contender import KINDS, UNTOLD, Kind, Setup
from bench.peers.process import Process
from bench.peers.rounds import Entry, Match, WrongOutput, check, same_tokens
from safetensors.numpy import load_file

from jaxsgl.bench.requests import Job
from tests.checkpoints import make_checkpoint
from tests.grids import NIGHTLY, daily
from tests.scripts.running import run_script

JOBS = [Job([5, 6, 7], 2), Job([8, 9], 12)]
SETUP = Setup("nowhere", "cpu", num_threads=1, num_jobs=2, longest=14, total=19, prefix_len=0, scratch="nowhere")
TINY = ("--num", 4, "--input", "4:40", "--output", "3:9", "--repeats", 2)
# No requirements file has these: what they lack, where they weren't installed by hand.
BY_HAND = {"llama.cpp-float32": "llama_cpp", "openvino-float32": "--install"}
OURS = "--dtype float32 --max-running-requests 4 --decode-buckets 4 --extend-buckets 64 --chunked-prefill-size 64"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("peers"))


@contextmanager
def endpoint(missing: int) -> Iterator[str]:
    """A server whose answers lack `missing` tokens."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200 if self.path == "/v1/models" else 404, {"data": [{"id": "m"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
            if self.path != "/v1/completions":
                self._answer(200 if self.path == "/flush_cache" else 404, {})
            elif body["model"] == "m" and body["ignore_eos"] and body["temperature"] == 0 and body["prompt"]:
                self._answer(200, {"choices": [{}], "usage": {"completion_tokens": body["max_tokens"] - missing}})

        def _answer(self, status: int, told: dict) -> None:
            text = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.skipif(not NIGHTLY, reason="compiles an engine for a comparison; by night")
def test_real_engines_return_the_same_tokens_and_are_compared(tmp_path: Path, tiny_model: Path) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    engines = daily(["transformers-static8-float32", "transformers-continuous-float32"], every=2)
    names = (*engines, *BY_HAND)
    with endpoint(missing=0) as url:
        flags = ("--model", tiny_model, *TINY, "--json", out, f"--jaxsgl={OURS}", "--url", url, "--url", "127.0.0.1:9")
        printed = run_script("bench_peers.py", *flags, "--plot", picture, "--contenders", *names).stdout
    told = json.loads(out.read_text())
    ours = f"jaxsgl {OURS}"
    assert told["best_jaxsgl"] == ours
    assert "doesn't answer" in told["could_not_run"].pop("127.0.0.1:9")
    absent = told["could_not_run"]
    assert all(name in BY_HAND and BY_HAND[name] in reason for name, reason in absent.items())
    for name in (ours, *engines, *(BY_HAND.keys() - absent.keys()), url):
        of = told["contenders"][name]
        for figures in (of["output_tokens_per_s"], of["output_tokens_per_cpu_s"], of["ratio_of_best_jaxsgl"]):
            assert len(figures["rounds"]) == 2 and 0 < figures["min"] <= figures["median"] <= figures["max"]
        assert name in printed and of["versions"] and of["start_s"] > 0 and len(of["idle_cpu_share"]) == 2
        assert of["same_tokens"] is None if name == url else of["same_tokens"]["whole"] == 1.0
    assert told["contenders"][ours]["ratio_of_best_jaxsgl"]["rounds"] == [1.0, 1.0]
    assert told["contenders"][url]["versions"]["prefix cache flushed by"] == "/flush_cache"
    assert {"cpu", "cores", "system", "python"} <= set(told["machine"]) and told["settings"]["num"] == 4
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_contender_that_returns_too_few_tokens_fails_the_script(tiny_model: Path) -> None:
    with endpoint(missing=1) as url, pytest.raises(CalledProcessError) as failed:
        run_script("bench_peers.py", "--model", tiny_model, *TINY, "--contenders", "--url", url)
    assert failed.value.returncode == 1
    assert f"{url} returned " in failed.value.stderr and "which asked for" in failed.value.stderr


def fake(name: str, notes: Path, class_name: str = "Echo", **options: int) -> Kind:
    return Kind(f"tests.scripts.fake_contenders:{class_name}", {"name": name, "notes": str(notes), **options})


def test_contenders_take_turns_and_start_each_run_clean(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    match = Match(SETUP, JOBS, tmp_path, say=lambda line: None)
    match.enter("a", fake("a", notes))
    match.enter("b", fake("b", notes))
    match.round()
    match.round()
    match.close()
    warm = [f"{name} {what}" for name in "ab" for what in ("start", "reset", "run 2")]
    turns = [f"{name} {what}" for name in "abab" for what in ("reset", "run 2")]
    assert notes.read_text().splitlines() == [*warm, *turns, "a close", "b close"]
    assert match.entries["a"].outputs == [[5] * 2, [8] * 12]


def test_contenders_that_cannot_run_are_listed_and_the_rest_run(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    match = Match(SETUP, JOBS, tmp_path, say=lambda line: None)
    match.enter("refuses", fake("refuses", notes, "Refuses"))
    match.enter("dies", fake("dies", notes, "Dies"))
    match.enter("missing", Kind("no_such_package:Any"))
    match.enter("elsewhere", Kind("no_such_package:Any", environment="never-made"))
    match.enter("fails later", fake("fails later", notes, fails_at=2))
    match.enter("jaxsgl stays", fake("stays", notes))
    match.round()
    match.close()
    figures = match.figures()
    assert list(figures["contenders"]) == ["jaxsgl stays"] and figures["best_jaxsgl"] == "jaxsgl stays"
    reasons = figures["could_not_run"]
    assert reasons["refuses"] == "needs another machine"
    assert "no memory left" in reasons["dies"]
    assert "no_such_package" in reasons["missing"]
    assert "never-made is no environment: --install" in reasons["elsewhere"]
    assert reasons["fails later"] == "ValueError: out of tokens"


@pytest.mark.parametrize("outputs", [[[1, 1]], [[1, 1], [1] * 11], [[1, 1], [1] * 13], [[1, 1], [1] * 12, []]])
def test_every_request_must_get_exactly_its_tokens(outputs: list[list[int]]) -> None:
    check("x", JOBS, [[1, 1], [1] * 12])
    with pytest.raises(WrongOutput, match="x returned"):
        check("x", JOBS, outputs)


def test_tokens_are_compared_where_they_are_known() -> None:
    reference = [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert same_tokens([[1, 2], [3, 9], [9, 6], [7, 8]], reference) == {"first": 0.75, "whole": 0.5, "leading": 1.25}
    assert same_tokens([[UNTOLD, UNTOLD]] * 4, reference) is None


def test_contenders_are_compared_with_the_best_jaxsgl_of_their_class(tmp_path: Path) -> None:
    match = Match(SETUP, JOBS, tmp_path, say=lambda line: None)
    ours = {"jaxsgl-float32": 4.0, "jaxsgl-bfloat16": 2.0, "jaxsgl-int8": 1.0}
    for name, took_s in (ours | {"x-bfloat16": 3.0, "x-q8_0": 4.0, "x-int4": 2.0}).items():
        cpu_s = took_s * (3 if name == "jaxsgl-bfloat16" else 1)
        match.entries[name] = Entry(Mock(Process), {}, 0.0, [took_s], [cpu_s], [0.0], [[5, 6], [8] * 12])
    match.entries["x-bfloat16"].outputs = [[5, 7], [8] * 11 + [9]]
    figures = match.figures()
    of = figures["contenders"]
    assert figures["best_jaxsgl"] == "jaxsgl-bfloat16"
    assert of["x-bfloat16"]["ratio_of_best_jaxsgl"]["median"] == 1.5
    assert of["x-bfloat16"]["cpu_ratio_of_best_jaxsgl"]["median"] == 0.75  # the best by processor time is float32
    assert of["x-q8_0"]["ratio_of_best_jaxsgl"]["median"] == 4.0
    assert of["x-int4"]["ratio_of_best_jaxsgl"] is None
    assert of["x-bfloat16"]["same_tokens"] == {"first": 1.0, "whole": 0.0, "leading": 6.0}


def test_prefixes_are_shared_by_hand_only_where_there_are_some() -> None:
    by_hand = {name for name in KINDS if name.endswith("-shared-by-hand")}
    assert by_hand and by_hand == {name for name, kind in KINDS.items() if kind.only_shared}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "q8_0", "q4_0"])
def test_a_gguf_file_holds_the_checkpoints_weights(tmp_path: Path, tiny_model: Path, dtype: str) -> None:
    import gguf
    from bench.peers.gguf_file import write_gguf

    path = tmp_path / "model.gguf"
    write_gguf(tiny_model, path, dtype)
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    weights = load_file(tiny_model / "model.safetensors")
    assert len(read) == len(weights)
    places = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj.weight",
    }
    tolerance = 1 / 7 if dtype == "q4_0" else 0.01
    for name, place in places.items():
        values = gguf.quants.dequantize(read[name].data, read[name].tensor_type)
        np.testing.assert_allclose(values, weights[place], rtol=0.01, atol=tolerance * np.abs(weights[place]).max())
    assert read["blk.0.attn_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
