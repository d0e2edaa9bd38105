"""A real server keeps prefixes in host memory, and in a file for the next start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from tests.checkpoints import make_checkpoint
from tests.end_to_end.servers import COMMON_FLAGS, check_log, running_server

FLAGS = (
    *COMMON_FLAGS,
    "--max-total-tokens",
    "1024",
    "--host-kv-gib",
    "0.25",
    "--host-kv-write-policy",
    "write_through",
)
PROMPT = [5 + i * 7 % 240 for i in range(400)]
OTHERS = [[5 + (i * 11 + first) % 240 for i in range(400)] for first in range(1, 6)]


def ask(http: httpx.Client, prompt: list[int]) -> dict[str, Any]:
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    answer = http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = json.loads(answer.text)
    return found


def test_prefixes_come_back_from_host_memory_and_from_the_file_of_the_start_before(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    model = make_checkpoint("qwen3", tmp_path / "model")
    flags = (*FLAGS, "--model", str(model), "--kv-file", str(kept))
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with running_server(tmp_path / "first", flags) as server:
        with httpx.Client(base_url=f"http://{server.http_address}", timeout=60.0) as http:
            first = ask(http, PROMPT)
            assert first["meta_info"]["cached_tokens"] == 0
            for other in OTHERS:  # the pool holds two of them, so the first prompt leaves it
                ask(http, other)
            again = ask(http, PROMPT)
            assert again["output_ids"] == first["output_ids"]
            assert again["meta_info"]["cached_tokens"] >= 384, "its pages come back from host memory"
            assert http.get("/internal_state?check=true").json()["leaks"] == []
        assert server.stop() == 0
        check_log(server)
    (file,) = kept.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    with running_server(tmp_path / "second", flags) as server:
        with httpx.Client(base_url=f"http://{server.http_address}", timeout=60.0) as http:
            found = ask(http, PROMPT)
            assert found["output_ids"] == first["output_ids"]
            assert found["meta_info"]["cached_tokens"] >= 384, "its pages come from the file"
        assert server.stop() == 0
        check_log(server)
