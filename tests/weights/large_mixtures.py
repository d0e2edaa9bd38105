"""Mixtures of some hundred megabytes, quantized as they are published, of random bytes; and what they take when loaded.

    python -m tests.weights.large_mixtures FOLDER

prints the bytes of the folder's tensors, and by how much the process grows while it loads them as a CPU keeps them.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import torch
from safetensors.torch import save_file
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from jaxsgl.engine.weight_formats import as_kept
from jaxsgl.models import arch_from_folder
from jaxsgl.weights import load_params
from jaxsgl.weights.sharding import make_mesh

COMMON = {
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "eos_token_id": None,
    "num_experts_per_tok": 4,
    "torch_dtype": "bfloat16",
}
BLOCK = 128  # of FP8
MIXTURES = ("gpt-oss in MXFP4", "Qwen3 in FP8 blocks")


def make(name: str, folder: Path) -> Path:
    """Writes the mixture, 230 to 260 MB."""
    is_mxfp4 = name == MIXTURES[0]
    config = (
        GptOssConfig(**COMMON, num_local_experts=32, intermediate_size=1024)
        if is_mxfp4
        else Qwen3MoeConfig(**COMMON, num_experts=32, moe_intermediate_size=640, intermediate_size=1024)
    )
    with torch.device("meta"):
        model = GptOssForCausalLM(config) if is_mxfp4 else Qwen3MoeForCausalLM(config)
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for key, meta in model.state_dict().items():
        shape = tuple(meta.shape)
        if is_mxfp4 and key.endswith(("gate_up_proj", "down_proj")):
            experts, num_in, out = shape
            tensors[f"{key}_blocks"] = torch.randint(0, 256, (experts, out, num_in // 32, 16), dtype=torch.uint8)
            tensors[f"{key}_scales"] = torch.randint(118, 122, (experts, out, num_in // 32), dtype=torch.uint8)
        elif not is_mxfp4 and ".experts." in key and len(shape) == 3:  # stacks, published singly
            kinds = ("gate_proj", "up_proj") if "gate_up" in key else ("down_proj",)
            for expert in range(shape[0]):
                for kind in kinds:
                    one = key.split(".experts.")[0] + f".experts.{expert}.{kind}.weight"
                    tensors |= _in_fp8(one, (shape[1] // len(kinds), shape[2]))
        elif not is_mxfp4 and "_proj.weight" in key:
            tensors |= _in_fp8(key, shape)
        else:
            tensors[key] = (torch.randn(shape) / 32 + ("norm" in key)).bfloat16()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    quantization = {"quant_method": "mxfp4"} if is_mxfp4 else fp8
    values = {**config.to_dict(), "architectures": [type(model).__name__], "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def _in_fp8(name: str, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    out, num_in = shape
    scales = torch.rand(-(-out // BLOCK), -(-num_in // BLOCK)) / 32
    return {name: torch.randn(shape).to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}


def resident_bytes() -> int:
    """Of this process's own memory, without mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def main() -> None:
    """See the module."""
    folder, dtype = Path(sys.argv[1]), jnp.dtype("bfloat16")
    arch = as_kept(arch_from_folder(folder), dtype, "cpu", 1)
    jnp.zeros(1).block_until_ready()
    before = resident_bytes()
    params = jax.block_until_ready(load_params(folder, arch, dtype, make_mesh()))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    grown = resident_bytes() - before
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    print(json.dumps({"files": (folder / "model.safetensors").stat().st_size, "grown": grown, "held": held}))


if __name__ == "__main__":
    main()
