"""Hidden states and routed experts of a tiny mixture of experts beside transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import jaxsgl
from jaxsgl.offline.llm import LLM
from tests.checkpoints import load_reference, make_checkpoint
from tests.grids import NIGHTLY

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("greedy_steps_by_day")]


@pytest.mark.skipif(not NIGHTLY, reason="compiles an engine of its own; by night")
def test_hidden_states_and_experts_are_those_of_transformers(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3_moe", tmp_path)
    llm = LLM(
        str(folder),
        enable_return_hidden_states=True,
        enable_return_routed_experts=True,
        max_running_requests=2,
        decode_buckets=(2,),
        extend_buckets=(32,),
        chunked_prefill_size=32,
        max_total_tokens=512,
        context_length=128,
    )
    prompt = np.random.default_rng(0).integers(3, 199, 50).tolist()  # two chunks
    params = jaxsgl.SamplingParams(
        temperature=0.0, max_tokens=5, ignore_eos=True, return_hidden_states=True, return_routed_experts=True
    )
    plain = jaxsgl.SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    answer, without = llm.generate([prompt, prompt], [params, plain], use_tqdm=False)
    assert answer.token_ids == without.token_ids and without.hidden_states is None
    ids = [*prompt, *answer.token_ids][:-1]
    model = load_reference(folder)
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_hidden_states=True, output_router_logits=True)
    assert answer.hidden_states is not None and answer.routed_experts is not None
    np.testing.assert_allclose(answer.hidden_states, out.hidden_states[-1][0].numpy(), rtol=0, atol=1e-3)
    assert answer.routed_experts.shape == (len(ids), 3, 3)
    assert (answer.routed_experts[:, 1] == -1).all(), "layer 1 has a plain MLP: -1 is no expert"
    for layer, logits in zip((0, 2), out.router_logits, strict=True):
        best = torch.topk(logits, 3).indices.sort().values.numpy()
        assert (np.sort(answer.routed_experts[:, layer]) == best).all()
    assert llm.engine.recompiles == 0
    llm.close()
