"""Logits of checkpoints on virtual devices of a CPU. A program: JAX has one number of devices per process.

python -m tests.models.on_devices < folders.json > differences.json

With `joined` as an argument products with experts take shared ones among the others on all but the one device. With
`float8` experts of FP8 in groups stay so where GPUs keep them, and with `packed` weights of 4 bits.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxsgl.engine.programs import each_device
from jaxsgl.engine.weight_formats import as_kept
from jaxsgl.models import ModelArch, StepContext, abstract_model, arch_from_folder, moe
from jaxsgl.models.tensor_parallel import DATA_AXIS, num_parts
from jaxsgl.weights import as_stored, load_params
from jaxsgl.weights.sharding import logits_sharding, make_mesh, model_on_devices
from tests.plain_model import causal_attend, mesh_of, plain_logits, plain_recur

NUM_DEVICES = 4
LAYOUTS = ((2, 1, False), (4, 1, False), (4, 2, False), (2, 1, True), (2, 2, True))  # devices, ranks, by experts
LENGTH = 40  # tokens of each prompt; longer than windows


def main() -> None:
    """Prints for each folder the largest difference of each layout's logits from one device's."""
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    if sys.argv[1:] == ["joined"]:
        vars(moe)["joins_shared"] = lambda *weights, **backend: num_parts() > 1
    kept = {"float8": ("gpu", "float32"), "packed": ("gpu", "bfloat16")}.get("".join(sys.argv[1:]), ("cpu", "float32"))
    for folder in json.load(sys.stdin):
        print(json.dumps(differences(Path(folder), *kept)), flush=True)


def kept_on(arch: ModelArch, platform: str, dtype: str, num_devices: int) -> ModelArch:
    """As `as_kept`, beside others in `dtype`; but floats of 4 bits become float32 in products."""
    kept = as_kept(arch, jnp.dtype(dtype), platform, num_devices, rounds_rows=True)
    weights, experts = (
        None if fmt is None else replace(fmt, widened_to="float32") for fmt in (kept.weight_format, kept.expert_format)
    )
    return replace(kept, weight_format=weights, expert_format=experts)


def differences(folder: Path, platform: str, dtype: str) -> dict[str, float]:
    """By layout, such as "4 devices in 2 ranks"; each rank has a prompt of its own. Kept as on `platform`."""
    arch = as_stored(arch_from_folder(folder), folder)
    prompts = np.random.default_rng(7).integers(3, arch.vocab_size, (2, LENGTH)).tolist()
    one_device = kept_on(arch, platform, dtype, 1) if platform == "gpu" else arch
    params = load_params(folder, one_device, jnp.dtype("float32"), mesh_of(1))
    expected = [plain_logits(one_device, params, prompt) for prompt in prompts]
    found: dict[str, float] = {}
    for devices, ranks, by_experts in LAYOUTS:
        if by_experts and arch.mixture is None:
            continue
        name = f"{devices} devices in {ranks} ranks{' by experts' * by_experts}"
        logits = logits_of(folder, arch, prompts[:ranks], devices, by_experts, (platform, dtype))
        pairs = zip(np.split(logits, ranks), expected, strict=False)
        found[name] = max(float(np.abs(mine[:, : arch.vocab_size] - one).max()) for mine, one in pairs)
    return found


def logits_of(
    folder: Path, arch: ModelArch, prompts: list[list[int]], num_devices: int, by_experts: bool, kept: tuple[str, str]
) -> np.ndarray:
    """Logits `[R T, V]` of R prompts in as many ranks, by the programs' own sums and exchanges."""
    ranks = len(prompts)
    arch = model_on_devices(arch, num_devices, by_experts=by_experts, num_ranks=ranks)
    arch = kept_on(arch, *kept, num_devices)
    mesh = make_mesh(jax.devices()[:num_devices], num_ranks=ranks)
    graphdef, _ = abstract_model(arch, jnp.dtype("float32"))
    params = load_params(folder, arch, jnp.dtype("float32"), mesh)
    leaves, treedef = jax.tree.flatten(params)
    by_rank = NamedSharding(mesh, PartitionSpec(DATA_AXIS if ranks > 1 else None))
    ids = jax.device_put(jnp.asarray(prompts, jnp.int32).reshape(-1), by_rank)

    def run(leaves: list[jax.Array], token_ids: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
        positions = jnp.arange(len(token_ids), dtype=jnp.int32)
        is_token = jnp.ones(len(token_ids), bool)
        context = StepContext(causal_attend(arch), plain_recur, is_token)
        return model.logits(model(token_ids, positions, context))

    return np.asarray(jax.jit(each_device(run, mesh, (leaves, ids), logits_sharding(mesh)))(leaves, ids))


if __name__ == "__main__":
    main()
