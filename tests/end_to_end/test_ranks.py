"""A server with data-parallel attention: requests name ranks, and what is shown of a server names them too."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.checkpoints import make_checkpoint
from tests.end_to_end.servers import check_log, running_server
from tests.grids import NIGHTLY

FLAGS = [
    "--tp", "2", "--dp-size", "2", "--enable-dp-attention", "--page-size", "4", "--context-length", "128",
    "--max-running-requests", "8", "--max-total-tokens", "800", "--chunked-prefill-size", "32",
    "--decode-buckets", "4", "--extend-buckets", "16", "--grammar-backend", "llguidance", "--check-every-step",
]  # fmt: skip


@pytest.mark.skipif(not NIGHTLY, reason="a server on virtual devices; by night")
def test_a_server_serves_each_rank_and_shows_what_it_holds(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3_moe", tmp_path / "model", num_experts=16, vocab_size=256)
    with running_server(tmp_path, ["--model", str(folder), *FLAGS]) as server:
        url = f"http://{server.http_address}"

        def generate(body: dict[str, Any]) -> httpx.Response:
            return httpx.post(f"{url}/generate", json=body, timeout=120)

        def tokens(rank: int | None, **sampling: object) -> list[int]:
            params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True, **sampling}
            body = {"input_ids": list(range(5, 50)), "sampling_params": params, "data_parallel_rank": rank}
            answer = generate({name: value for name, value in body.items() if value is not None}).raise_for_status()
            found = answer.json()
            return [token for each in (found if isinstance(found, list) else [found]) for token in each["output_ids"]]

        with ThreadPoolExecutor(8) as threads:
            same = list(threads.map(tokens, [0, 1, None, 0, 1, None, 0, 1]))
        assert all(each == same[0] for each in same), "tokens depend on the rank"
        assert tokens(1, n=3) == same[0] * 3
        seeded = {"temperature": 1.5, "sampling_seed": 7}
        assert tokens(0, **seeded) == tokens(1, **seeded) != same[0]
        refused = generate({"input_ids": [5], "data_parallel_rank": 2})
        assert refused.status_code == 400 and "0 to 1" in refused.text

        assert [load["dp_rank"] for load in httpx.get(f"{url}/get_load").json()] == [0, 1]
        state = httpx.get(f"{url}/internal_state").json()
        assert [rank["num_running"] for rank in state["ranks"]] == [0, 0]
        assert all(rank["cache"]["cached_pages"] for rank in state["ranks"]), "a rank has served nothing"
        metrics = httpx.get(f"{url}/metrics").text
        shown = re.findall(r'^jaxsgl:rank_running_reqs\{.*dp_rank="(\d)"', metrics, re.MULTILINE)
        assert shown == ["0", "1"]
        assert json.loads(httpx.get(f"{url}/server_info").text)["num_ranks"] == 2
        check_log(server)
