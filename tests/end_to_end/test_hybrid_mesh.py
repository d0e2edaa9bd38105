"""Hybrids on two devices, or in two ranks, yield the tokens of one: chunks, retraction, and prefixes that begin at kept
states."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint_kinds import BLOCK_KINDS, HYBRID_KINDS, two_layers
from tests.checkpoints import make_checkpoint
from tests.grids import NIGHTLY

UNSHARED = ("jamba",)  # whose states devices don't share
# Unoptimized, since each device's program takes minutes to compile otherwise.
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


@pytest.mark.skipif(not NIGHTLY, reason="compiles a model for one device and twice for two")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", HYBRID_KINDS)
def test_two_devices_and_two_ranks_give_the_tokens_of_one(kind: str, tmp_path: Path) -> None:
    sizes = two_layers(kind)
    if kind in BLOCK_KINDS:
        sizes["layers_block_type"] += ["mlp"]
    if kind in ("qwen3_5", "bamba", "lfm2", "lfm3"):
        sizes["num_key_value_heads"] = 1  # else ranks of a dense model gain nothing, and are refused
    folder = make_checkpoint(kind, tmp_path, seed=3, **sizes)
    done = subprocess.run(
        [sys.executable, "-m", "tests.end_to_end.hybrid_mesh", str(folder), *["ranks alone"] * (kind in UNSHARED)],
        capture_output=True, text=True, env=ENVIRONMENT, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    one, *two, ranks = json.loads(done.stdout)
    assert len(two) == (kind not in UNSHARED)
    for answers in (one, *two, ranks):
        assert answers["retracted"] == answers["drafted"] == answers["tokens"]
        assert answers["cached"] == [0, 0, 128, 128], "a shared beginning is found from the third request on"
        assert answers["recompiles"] == answers["copies"] == 0
        assert answers["tokens"] == one["tokens"] and answers["turns"] == one["turns"]
    assert len(set(map(tuple, one["tokens"]))) == len(one["tokens"])  # else any model would agree
    for shared in two:
        for whole, part in zip(one["shards"], shared["shards"], strict=True):  # each device holds half of the key heads
            assert math.prod(whole) == 2 * math.prod(part)
    assert ranks["shards"] == one["shards"], "each rank has states of its own"
