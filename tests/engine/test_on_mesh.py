"""What several devices compute of their parts is what one device computes of the whole."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxsgl.batch.sampling import SamplingArrays
from jaxsgl.engine.programs import each_device
from jaxsgl.engine.sampling import sampler, vocabulary
from jaxsgl.engine.sampling.masking import masked_step
from jaxsgl.engine.step import SAMPLING_ROWS
from jaxsgl.models.matrix import Matrices, Matrix, dequantized
from jaxsgl.models.precision import product
from jaxsgl.models.quantization import WeightFormat
from jaxsgl.models.tensor_parallel import of_this_part, sum_of_parts
from jaxsgl.weights.sharding import logits_sharding, make_mesh, param_sharding, replicated
from pallas_kernels.native import library as native_library

NUM_DEVICES = 4
VOCAB_SIZE = 397  # of which the last device has 3 fewer
NUM_IN, NUM_OUT, GROUP = 96, 6, 64  # a device has 24 inputs: parts begin inside groups, and the last group is cut
WHOLE_GROUP = 12  # of which a device has two


def test_parts_of_several_devices_are_those_of_one() -> None:
    """The checks below, in a process with as many devices."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(NUM_DEVICES)}
    command = [sys.executable, "-m", "tests.engine.test_on_mesh"]
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_on_one_device_a_program_stays_as_it_is() -> None:
    def program(x: jax.Array) -> jax.Array:
        return vocabulary.greedy(sum_of_parts(x))

    mesh = make_mesh()
    assert each_device(program, mesh, (jnp.ones((2, 64)),), replicated(mesh)) is program
    assert logits_sharding(mesh) == replicated(mesh)
    text = str(jax.make_jaxpr(program)(jnp.ones((2, 64))))
    assert text == str(jax.make_jaxpr(sampler.greedy)(jnp.ones((2, 64))))


class Down(Matrices):
    def __init__(self, fmt: WeightFormat, num_out: int, num_in: int) -> None:
        self.declare("down", (num_out, num_in), (None, "ffn"), jnp.dtype("float32"), fmt, fan_in=num_in)


def check_no_part_gets_the_scales_of_another() -> None:
    rng, mesh = np.random.default_rng(0), make_mesh(jax.devices())
    row_bits = 8 if native_library.multiplies_bytes() else 16  # those of 8 meet packed weights
    both = (False, True)
    for kind, zeros, reorders, group in itertools.product(("", "cpu", "gpu"), both, both, (GROUP, WHOLE_GROUP, None)):
        if kind and group == WHOLE_GROUP:  # what is packed keeps the scales of several outputs side by side
            continue
        plain = WeightFormat("test", "int4" if kind == "gpu" else "int8", group, has_zeros=zeros, reorders=reorders)
        if kind == "gpu":  # a device has 192 inputs: one and a half groups
            fmt = plain.on_gpu("bfloat16", parts=NUM_DEVICES)
        else:
            fmt = plain.on_cpu("float32", row_bits=row_bits, packs=kind == "cpu", parts=NUM_DEVICES)
        fmt = replace(fmt, sharers=NUM_DEVICES)
        if fmt.packing:
            fmt = replace(fmt, group=group and 2 * group)
        module = Down(fmt, 32 * NUM_DEVICES, 8 * NUM_IN) if fmt.packing else Down(fmt, NUM_OUT, NUM_IN)
        for name, param in vars(module).items():
            if isinstance(param, nnx.Param):
                module_param: nnx.Param[jax.Array] = param
                module_param[...] = jnp.asarray(numbers(rng, name, param.shape, param.dtype), param.dtype)
        matrix = module.matrix("down")
        assert isinstance(matrix, Matrix) and matrix.packing == fmt.packing
        assert bool(fmt.packing) == (kind == "gpu" or (kind == "cpu" and row_bits == 8))
        x = jnp.asarray(rng.normal(size=(5, matrix.shape[1])), jnp.float32)
        expected = x @ dequantized(matrix, jnp.float32).T
        graphdef, params = nnx.split(module)

        def of_part(params: Any, x: jax.Array, graphdef: Any = graphdef) -> jax.Array:
            weights = nnx.merge(graphdef, params).matrix("down")
            return sum_of_parts(product(of_this_part(x, axis=1), weights))

        placed = nnx.from_flat_state(
            [
                (path, param.replace(jax.device_put(param[...], param_sharding(param, mesh))))
                for path, param in nnx.to_flat_state(params)
            ]
        )
        own_groups = placed["down_scale"][...].addressable_shards[0].data.shape[-1]
        assert own_groups == (2 if group == WHOLE_GROUP else matrix.scale.shape[-1])
        arguments = (placed, jax.device_put(x, replicated(mesh)))
        found = jax.jit(each_device(of_part, mesh, arguments, replicated(mesh)))(*arguments)
        off = 2e-2 * float(jnp.abs(expected).max()) if fmt.row_bits == 8 else 1e-3
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=off, err_msg=str(fmt))


def numbers(rng: np.random.Generator, name: str, shape: tuple[int, ...], dtype: jnp.dtype) -> np.ndarray:
    if name == "down_order":
        return rng.permutation(shape[0])
    if name == "down_scale":
        return rng.uniform(0.5, 2.0, shape) * 10.0 ** rng.integers(-3, 1, shape)  # another's would be far off
    if dtype == jnp.uint32:
        return rng.integers(0, 2**32, shape, np.uint32)
    return rng.integers(-5, 6, shape)


def check_tokens_and_scores_are_those_of_one_device() -> None:
    rng, mesh = np.random.default_rng(1), make_mesh(jax.devices())
    num_rows = 6  # not a multiple of the devices
    logits = rng.normal(0, 3, (num_rows, VOCAB_SIZE)).astype(np.float32)
    logits[:2] = np.round(logits[:2])  # many equal ones, on several devices
    sampling = SamplingArrays(
        np.array([0, 1, 5, 0, 30, 0], np.int32), np.arange(num_rows, dtype=np.int32),
        np.array([0, 1, 1, 1, 2, 0.5], np.float32), np.array([1, 1, 1, 0.8, 0.9, 1], np.float32),
        np.array([0, 0, 0, 0, 0, 0.1], np.float32),
    )  # fmt: skip
    positions = np.arange(num_rows, dtype=np.int32) + 7

    def choose(logits: jax.Array, sampling: Any, positions: jax.Array) -> Any:
        best = vocabulary.greedy(logits)
        of_rows = functools.partial(vocabulary.sample, logits, sampling, positions, best, vocab_size=VOCAB_SIZE)
        drawn = [of_rows(filtered=filtered) for filtered in (False, True)]
        return best, drawn, vocabulary.by_rows(sampler.score, logits, best, vocab_size=VOCAB_SIZE)

    alone = jax.jit(choose)(logits, sampling, positions)
    arguments = (
        jax.device_put(padded(logits), logits_sharding(mesh)), *jax.device_put((sampling, positions), replicated(mesh))
    )  # fmt: skip
    shardings = jax.tree.map(lambda _: replicated(mesh), alone)
    shared = jax.jit(each_device(choose, mesh, arguments, shardings))(*arguments)
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(shared), strict=True):
        np.testing.assert_array_equal(one, other)


def check_masks_are_those_of_one_device() -> None:
    """Parts of 100 tokens, the last with padding: they begin inside of a mask's words."""
    rng, mesh = np.random.default_rng(2), make_mesh(jax.devices())
    logits, packed = rng.normal(size=(6, VOCAB_SIZE)).astype(np.float32), np.zeros((SAMPLING_ROWS, 6), np.int32)
    masks = rng.integers(0, 2**32, (6, 13), dtype=np.uint32)
    alone = jax.jit(masked_step)(logits, packed, masks)
    shardings = (logits_sharding(mesh), replicated(mesh))
    arguments = (jax.device_put(padded(logits), shardings[0]), *jax.device_put((packed, masks), shardings[1]))
    shared = jax.jit(each_device(masked_step, mesh, arguments, shardings))(*arguments)
    np.testing.assert_array_equal(alone[0], shared[0][:, :VOCAB_SIZE])
    np.testing.assert_array_equal(alone[1], shared[1])


def padded(logits: np.ndarray) -> np.ndarray:
    """With the model's padding behind the vocabulary."""
    padding = -VOCAB_SIZE % NUM_DEVICES
    return np.pad(logits, ((0, 0), (0, padding)), constant_values=-np.inf)


if __name__ == "__main__":
    assert jax.device_count() == NUM_DEVICES
    check_no_part_gets_the_scales_of_another()
    check_tokens_and_scores_are_those_of_one_device()
    check_masks_are_those_of_one_device()
