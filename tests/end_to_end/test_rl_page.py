"""The code of docs/rl.md runs as it stands there: a trainer samples, scores and updates the weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxsgl.config.engine import BUNDLED_MODEL

PAGE = Path(__file__).parents[2] / "docs" / "rl.md"
PROMPTS = ["The code is", "Once upon a time"]
NOISE = 0.05


def test_a_trainer_runs_the_pages_code() -> None:
    names: dict[str, Any] = {"__name__": "rl_page"}
    for code in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(code, str(PAGE), "exec", dont_inherit=True), names)
    rollout = names["JaxsglRollout"](decode_buckets=(32,), extend_buckets=(64,), chunked_prefill_size=64)
    tensors = load_file(Path(BUNDLED_MODEL) / "model.safetensors")
    rng = np.random.default_rng(0)

    def learn(out: Any) -> dict[str, Any]:
        seen.append(out)
        noise = {name: rng.normal(size=array.shape) * NOISE for name, array in tensors.items()}
        return {name: array.astype(np.float32) * (1 + noise[name]) for name, array in tensors.items()}

    seen: list[Any] = []
    outs = [names["step"](rollout, PROMPTS, learn, number) for number in range(3)]
    assert outs == seen
    assert [out.versions for out in outs] == [["default"] * 2, ["1"] * 2, ["2"] * 2]
    assert all(
        len(tokens) == len(logprobs) for out in outs for tokens, logprobs in zip(out.tokens, out.logprobs, strict=True)
    )

    prompts = [rollout.llm.tokenizer.encode(text) for text in PROMPTS]
    last = rollout.generate(PROMPTS, max_tokens=16, seed=7)
    scored = rollout.get_per_token_logps(prompts, last.tokens)
    for found, sampled in zip(scored, last.logprobs, strict=True):
        assert found == pytest.approx(sampled, abs=0.05), "the weights that sampled them score them alike"
    by_others = rollout.get_per_token_logps(prompts, outs[0].tokens)
    assert np.abs(np.subtract(by_others[0], outs[0].logprobs[0])).max() > 0.1, "other weights had sampled these"
    assert rollout.eos_id() in rollout.llm.engine.arch.eos_token_ids
    rollout.llm.close()
