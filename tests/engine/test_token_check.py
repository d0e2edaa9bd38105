"""After warm-up on an accelerator, extend and decode steps must agree on real tokens."""

from __future__ import annotations

import dataclasses
import json
import logging
from contextlib import AbstractContextManager
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.engine.kernels.tester import KernelTester
from jaxsgl.engine.start import token_check
from pallas_kernels.backend import Kernel
from pallas_kernels.dispatch import BACKEND_OF_NAME
from pallas_kernels.native import library
from tests.engine.conftest import MODEL, ConfigMaker
from tests.engine.driving import Driver, greedy_engine

NATIVE = BACKEND_OF_NAME["native"]
ACCELERATOR = KernelTester("cpu")
LONG: dict[str, Any] = {
    "dtype": "bfloat16", "skip_kernel_test": True, "page_size": 16, "chunked_prefill_size": 512,
    "extend_buckets": (512,), "max_total_tokens": 1024,
}  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, tiny_config: ConfigMaker) -> EngineConfig:
    folder = tmp_path_factory.mktemp("long_model")
    changes = {"head_dim": 32, "dtype": "bfloat16", "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(MODEL | changes))
    return tiny_config(model=str(folder), **LONG)


def started(config: EngineConfig, tester: KernelTester) -> AbstractContextManager[Engine]:
    return greedy_engine(config, kernel_tester=tester)


def test_right_kernels_agree_and_the_state_stays_as_it_was(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = {0: [3, 5, 7], 1: [11, 13, 17, 19, 23]}
    with started(config, KernelTester(None)) as plain, started(config, ACCELERATOR) as checked:
        assert not np.asarray(checked._runner.state.page_table).any()
        assert not np.asarray(checked._runner.state.last_tokens).any()
        assert checked.recompiles == 0
        assert Driver(checked).generate(prompts, 4) == Driver(plain).generate(prompts, 4)
    assert "of their norm" not in caplog.text


@pytest.mark.skipif(library.load() is not None, reason="this machine has no C++ kernels")
def test_an_extend_that_is_wrong_for_some_tokens_is_warned_of(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def clipping(q: Any, offsets: Any, *rest: Any) -> Any:
        """Queries of zeros for sequences whose first token stands at no multiple of 8."""
        owners = jnp.searchsorted(offsets, jnp.arange(len(q)), side="right") - 1
        return NATIVE.extend.run(jnp.where((offsets[owners] % 8 != 0)[:, None, None], 0, q), offsets, *rest)

    changes: dict[str, Any] = {"extend": Kernel[Any](clipping, NATIVE.extend.refuse)}
    monkeypatch.setitem(BACKEND_OF_NAME, "native", dataclasses.replace(NATIVE, **changes))
    with started(config, ACCELERATOR):
        pass
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("attention of extend or decode steps is wrong here" in warning for warning in warnings)


def test_an_engine_without_room_for_the_tokens_is_not_checked(tiny_config: ConfigMaker) -> None:
    capacity = Capacity(page_size=4, num_pages=65, num_rows=4, context_length=64, max_extend_tokens=16, vocab_size=101)
    assert not token_check.fits(BucketSet.derive(capacity), capacity)
    larger = dataclasses.replace(capacity, num_pages=200, context_length=512, max_extend_tokens=512)
    assert token_check.fits(BucketSet.derive(larger), larger)
