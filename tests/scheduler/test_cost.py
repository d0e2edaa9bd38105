"""What the scheduler may cost: the script that measures it runs, and stays within its bound."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_a_decode_step_of_256_requests_costs_less_than_a_millisecond(tmp_path: Path) -> None:
    result = tmp_path / "figures.json"
    command = [sys.executable, "scripts/bench_scheduler.py", "--steps", "100", "--json", str(result)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    figures = json.loads(result.read_text())["figures"]
    assert figures["decode_step_us_median"] < 1_000
    assert min(figures[name] for name in ("insert_per_s", "match_per_s", "evict_pages_per_s")) > 0
