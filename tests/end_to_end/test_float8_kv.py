"""A float8 KV cache through checkpoint, engine and scheduler: tokens follow from what is stored, whatever came when."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jaxsgl.engine.engine import Engine
from jaxsgl.models import Qkv, StepContext, abstract_model, arch_from_folder
from jaxsgl.models.layers import Queries
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.weights import load_params
from pallas_kernels import GroupedQkv
from pallas_kernels.paged_kv import FLOAT8, to_format
from tests.checkpoint_kinds.sizes import VOCAB_SIZE
from tests.checkpoints import make_checkpoint
from tests.end_to_end.offline import outputs, serve, small_pool
from tests.engine.driving import Driver
from tests.plain_model import causal_attention, mesh_of
from tests.weights.test_loading import rewrite

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("greedy_steps_by_day")]

K_SCALE, V_SCALE = 32.0, 16.0  # far too large, so that rounding shows in the tokens
KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as llm-compressor writes it for a quantized KV cache: unquantized weights, a scheme and scales."""
    folder = make_checkpoint("qwen3", tmp_path_factory.mktemp("float8"), seed=3)
    scales = {
        f"model__layers__{layer}__self_attn__{part}_scale": torch.tensor([scale])
        for layer in range(2)
        for part, scale in (("k", K_SCALE), ("v", V_SCALE))
    }
    rewrite(folder, **scales)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "kv_cache_scheme": KV_SCHEME}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return small_pool(folder)


def plain_tokens(folder: Path, prompt: Sequence[int], num_tokens: int, *, rounds: bool) -> list[int]:
    """Greedy tokens of the model without pages; `rounds`: all keys and values as float8 holds them."""
    arch = arch_from_folder(folder)
    graphdef, _ = abstract_model(arch, jnp.dtype("float32"))
    model = nnx.merge(graphdef, load_params(folder, arch, jnp.dtype("float32"), mesh_of()))

    def attend(layer: int, qkv: Qkv | Queries, sinks: jax.Array | None) -> jax.Array:
        assert not isinstance(qkv, Queries | GroupedQkv)
        q, k, v = qkv.split()
        if rounds:
            k, v = (to_format(x / s, FLOAT8).astype(x.dtype) * s for x, s in ((k, K_SCALE), (v, V_SCALE)))
        return causal_attention(q, k, v)

    size = len(prompt) + num_tokens
    run = jax.jit(lambda ids: model.logits(model(ids, jnp.arange(size), StepContext(attend))))
    ids = list(prompt)
    for _ in range(num_tokens):
        logits = run(np.array(ids + [0] * (size - len(ids)), np.int32))
        ids.append(int(logits[len(ids) - 1].argmax()))
    return ids[len(prompt) :]


def test_auto_is_what_the_checkpoint_was_calibrated_for_and_takes_one_byte_a_number(engine: Engine) -> None:
    arch, capacity = engine.arch, engine.capacity
    assert engine.info.kv_cache_dtype == "fp8_e4m3"
    per_token = 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim
    assert engine.info.kv_bytes == per_token * capacity.num_pages * capacity.page_size
    assert engine.info.kv_bytes == sum(array.nbytes for array in jax.tree.leaves(engine._runner.state.kv))


def test_queries_attend_to_stored_numbers_also_to_those_of_their_own_step(engine: Engine, folder: Path) -> None:
    """So chunks change nothing: an extend sees the keys and values of its own tokens rounded, too."""
    prompt = [3 + 7 * i % 250 for i in range(40)]
    tokens = partial(plain_tokens, folder, prompt, 12)
    expected = tokens(rounds=True)
    for chunk in (48, 7, 1):
        assert Driver(engine).generate({0: prompt}, 12, chunk) == {0: expected}
    assert expected != tokens(rounds=False)


def test_shared_prefixes_chunks_and_retraction_leave_no_trace_in_the_tokens(engine: Engine) -> None:
    rng = random.Random(1)
    texts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(140)] for _ in range(2)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [rng.choice(texts)[: rng.randint(1, 130)] for _ in range(24)]
    requests = [Request(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]
    together = outputs(serve(engine, [requests], retract_every=5), requests)
    alone = [outputs(serve(engine, [[each]], radix=False, overlap=False), [each])[0] for each in requests]
    assert together == alone
