"""The load generator against the real engine: prefixes of conversations are found in the cache."""

from __future__ import annotations

import json
from pathlib import Path

from tests.end_to_end.servers import RunningServer
from tests.scripts.running import run_command

CONVERSATIONS = (
    "--dataset-name", "multi-turn", "--turns", 3, "--turn-input-len", 16, "--turn-output-len", 20, "--turn-system-len",
    64, "--random-range-ratio", 1, "--num-prompts", 9, "--max-concurrency", 2, "--flush-cache",
)  # fmt: skip


def test_conversations_find_their_earlier_turns_in_the_cache(shared_server: RunningServer, tmp_path: Path) -> None:
    """All but the question of a turn has been served before; its whole pages are cached."""
    out = tmp_path / "out.jsonl"
    for backend, address in (
        ("jaxsgl-grpc", shared_server.address),
        ("sglang", f"http://{shared_server.http_address}"),
    ):
        run_command("bench", "--backend", backend, "--base-url", address, "--output-file", out, *CONVERSATIONS)
    for found in map(json.loads, out.read_text().splitlines()):
        assert found["completed"] == 9 and found["total_output_tokens"] == 9 * 20
        assert found["total_cached_tokens"] >= 0.5 * found["total_input_tokens"]
        assert 0 < found["median_ttft_ms"] <= found["median_e2e_latency_ms"]
        # Tokens that are read together have gaps of 0: under load, all of an answer's.
        assert 0 <= found["median_itl_ms"] <= found["max_itl_ms"] < 1000 * found["duration"]
