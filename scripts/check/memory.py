"""Say what memory a model takes on each device, before there is one: weights, KV per token, tokens that fit.

    python scripts/check memory --model path/to/folder --tp 2 --device-gib 80
    python scripts/check memory --recipes                # the tables of docs/recipes

Reads config.json alone and asks the engine's own sizing (`abstract_model`, `plan_capacity`); allocates nothing. Tables
and states of running requests, states of kept prefixes and embeddings of images are taken off what KV may have. What
the steps take next to that is known once they are compiled, 1 to 3 GiB mostly; --mem-fraction-static leaves it free.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.models import COMPILED_SHAPES, QUANTIZED, SHAPES, gpt_oss
from bench.output import figure_parser, write_figures, write_json

from jaxsgl.errors import JaxsglError

MAX_DEVICES = 16
GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """Bytes on each device, and tokens that the pools of all devices hold together."""

    weight_bytes: int
    kv_bytes_per_token: float
    pool_tokens: int


def memory_of(folder: Path, device_gib: float, platform: str = "gpu", **flags: Any) -> Memory:
    """What an engine with `flags` would have on devices of `device_gib` GiB.

    Raises `StartupError`, also if the weights leave no room.
    """
    devices = f"--xla_force_host_platform_device_count={MAX_DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices}".strip()
    from jaxsgl.config.engine import EngineConfig
    from jaxsgl.engine.kernels.choice import asked_kernels, may_round_rows_of_experts
    from jaxsgl.engine.start import memory
    from jaxsgl.engine.start.devices import mesh_of
    from jaxsgl.engine.start.sizing import choose_states, plan_capacity
    from jaxsgl.engine.weight_formats import as_kept
    from jaxsgl.engine.weight_store import read_arch
    from jaxsgl.models import abstract_model, resolve_precision
    from jaxsgl.models.tensor_parallel import TENSOR_AXIS
    from jaxsgl.weights.sharding import bytes_on_each_device

    config = EngineConfig(model=str(folder), **flags)
    arch = read_arch(config, folder)
    dtype, activations, kv_dtype = resolve_precision(
        config.dtype, config.kv_cache_dtype, arch, platform, cpu_multiplies_bfloat16=lambda: True
    )
    rounds_rows = may_round_rows_of_experts(asked_kernels(config, arch))  # as GPUs since Ada can
    arch = as_kept(arch, dtype, platform, config.num_devices, rounds_rows=rounds_rows)
    mesh = mesh_of(config)
    _, shapes = abstract_model(arch, dtype, activations)
    weights = bytes_on_each_device(shapes, mesh)
    states = choose_states(config, arch, platform, kv_dtype, mesh.shape[TENSOR_AXIS])
    whole = device_gib * GIB
    told = f"weights take {weights / GIB:.1f} of {device_gib:g} GiB"
    left = memory.Memory(platform, int(whole * config.mem_fraction_static) - weights, int(whole) - weights, told)
    capacity = plan_capacity(config, arch, states, left)
    of_rank = (capacity.num_pages - 1) * capacity.page_size  # all but the dummy page
    return Memory(weights, states.page_bytes / states.page_size, config.num_ranks * of_rank)


def _llama(hidden: int, layers: int, heads: int, ffn: int) -> dict[str, Any]:
    rope = {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8, "intermediate_size": ffn,
        "vocab_size": 128_256, "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
        "rope_scaling": rope, "max_position_embeddings": 131_072, "hidden_act": "silu", "torch_dtype": "bfloat16",
        "bos_token_id": 128_000, "eos_token_id": [128_001, 128_008, 128_009],
    }  # fmt: skip


def _glm(
    hidden: int, layers: int, ffn: int, expert_ffn: int, experts: int, dense: int, qk_norm: bool
) -> dict[str, Any]:
    return {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": ffn, "moe_intermediate_size": expert_ffn, "n_routed_experts": experts,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": dense, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5 if qk_norm else 1.0, "use_qk_norm": qk_norm,
        "partial_rotary_factor": 0.5, "attention_bias": True, "vocab_size": 151_552, "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5, "rope_theta": 1_000_000, "max_position_embeddings": 131_072, "hidden_act": "silu",
        "torch_dtype": "bfloat16", "eos_token_id": [151_329, 151_336, 151_338],
    }  # fmt: skip


FP8 = {"quantization_config": QUANTIZED["fp8"]}
QWEN3_8B = SHAPES["qwen3-8b"]
# By page of docs/recipes: rows of model, config.json, devices, GiB of each (as the driver counts them), flags.
RECIPES: dict[str, list[tuple[str, dict[str, Any], str, float, dict[str, Any]]]] = {
    "qwen3": [
        ("Qwen3-8B", QWEN3_8B, "1 x L4 (24 GB)", 22.0, {"kv_cache_dtype": "fp8_e4m3", "quantization": "fp8"}),
        ("Qwen3-8B", QWEN3_8B, "1 x H100 (80 GB)", 79.0, {}),
        ("Qwen3-8B-FP8", QWEN3_8B | FP8, "1 x H100 (80 GB)", 79.0, {}),
        ("Qwen3-30B-A3B", COMPILED_SHAPES["qwen3-30b-a3b"], "1 x H100 (80 GB)", 79.0, {}),
        ("Qwen3-30B-A3B-FP8", COMPILED_SHAPES["qwen3-30b-a3b"] | FP8, "1 x H100 (80 GB)", 79.0, {}),
        ("Qwen3-235B-A22B-FP8", COMPILED_SHAPES["qwen3-235b-a22b"] | FP8, "4 x H100 (80 GB)", 79.0, {"tp": 4}),
        (
            "Qwen3-235B-A22B-FP8", COMPILED_SHAPES["qwen3-235b-a22b"] | FP8, "8 x H100 (80 GB)", 79.0,
            {"tp": 8, "ep": True},
        ),
        (
            "Qwen3-30B-A3B-FP8", COMPILED_SHAPES["qwen3-30b-a3b"] | FP8, "2 x TPU v6e (32 GB)", 31.2,
            {"tp": 2, "ep": True},
        ),
    ],
    "qwen3-vl": [
        ("Qwen3-VL-30B-A3B", COMPILED_SHAPES["qwen3-vl-30b-a3b"], "1 x H100 (80 GB)", 79.0, {}),
        ("Qwen3-VL-30B-A3B", COMPILED_SHAPES["qwen3-vl-30b-a3b"], "2 x A100 (80 GB)", 79.0, {"tp": 2}),
        ("Qwen3-VL-235B-A22B", COMPILED_SHAPES["qwen3-vl-235b-a22b"], "8 x H100 (80 GB)", 79.0, {"tp": 8}),
    ],
    "gpt-oss": [
        ("gpt-oss-20b", COMPILED_SHAPES["gpt-oss-20b"], "1 x L4 (24 GB)", 22.0, {}),
        ("gpt-oss-20b", COMPILED_SHAPES["gpt-oss-20b"], "1 x H100 (80 GB)", 79.0, {}),
        ("gpt-oss-120b", gpt_oss(36, 128), "1 x H100 (80 GB)", 79.0, {}),
        ("gpt-oss-120b", gpt_oss(36, 128), "2 x H100 (80 GB)", 79.0, {"tp": 2}),
        ("gpt-oss-20b", COMPILED_SHAPES["gpt-oss-20b"], "1 x TPU v6e (32 GB)", 31.2, {}),
        ("gpt-oss-120b", gpt_oss(36, 128), "4 x TPU v6e (32 GB)", 31.2, {"tp": 4, "ep": True}),
    ],
    "glm-4.5": [
        ("GLM-4.5-Air", _glm(4096, 46, 10_944, 1408, 128, 1, False), "4 x H100 (80 GB)", 79.0, {"tp": 4}),
        ("GLM-4.5-Air", _glm(4096, 46, 10_944, 1408, 128, 1, False), "2 x H200 (141 GB)", 140.0, {"tp": 2}),
        ("GLM-4.5", _glm(5120, 92, 12_288, 1536, 160, 3, True), "8 x H200 (141 GB)", 140.0, {"tp": 8}),
    ],
    "llama-3": [
        ("Llama-3.1-8B", _llama(4096, 32, 32, 14_336), "1 x A100 (40 GB)", 39.0, {}),
        ("Llama-3.1-8B", _llama(4096, 32, 32, 14_336), "1 x L4 (24 GB)", 22.0, {"quantization": "fp8"}),
        ("Llama-3.3-70B", _llama(8192, 80, 64, 28_672), "4 x H100 (80 GB)", 79.0, {"tp": 4}),
        (
            "Llama-3.3-70B", _llama(8192, 80, 64, 28_672), "2 x H100 (80 GB)", 79.0,
            {"tp": 2, "quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"},
        ),
    ],
    "embeddings": [
        ("Qwen3-Embedding-0.6B", SHAPES["qwen3-0.6b"], "1 x L4 (24 GB)", 22.0, {"is_embedding": True}),
        ("Qwen3-Embedding-8B", QWEN3_8B, "1 x L4 (24 GB)", 22.0, {"is_embedding": True}),
    ],
}  # fmt: skip


def recipe_rows(page: str) -> Iterator[tuple[str, str, str, Memory]]:
    """Yields model, hardware, flags and memory of each row of a recipe's table."""
    with tempfile.TemporaryDirectory(prefix="recipes-") as name:
        for model, config, hardware, device_gib, flags in RECIPES[page]:
            write_json(Path(name) / "config.json", config)
            words = " ".join(
                f"--{flag.replace('_', '-')}" + ("" if value is True else f" {value}") for flag, value in flags.items()
            )
            platform = "tpu" if "TPU" in hardware else "gpu"
            yield model, hardware, words, memory_of(Path(name), device_gib, platform, **flags)


def table(page: str) -> str:
    """The table of a page of docs/recipes."""
    lines = [
        "| model | devices | flags | weights, GiB a device | KV, KiB a token and device | tokens of KV |",
        "|---|---|---|--:|--:|--:|",
    ]
    for model, hardware, flags, memory in recipe_rows(page):
        shown = f"`{flags}`" if flags else ""
        sizes = f"{memory.weight_bytes / GIB:.1f} | {memory.kv_bytes_per_token / 1024:.1f} | {memory.pool_tokens:,}"
        lines.append(f"| {model} | {hardware} | {shown} | {sizes} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Prints the memory of one model, or all tables of docs/recipes."""
    parser = figure_parser(__doc__, __name__)
    parser.add_argument("--model", type=Path, help="folder with config.json")
    parser.add_argument("--tp", type=int, default=1, help=f"devices, {MAX_DEVICES} at most (default 1)")
    parser.add_argument("--dp-size", type=int, default=1, help="ranks of --enable-dp-attention (default 1: none)")
    parser.add_argument("--quantization", help="as of jaxsgl.serve")
    parser.add_argument("--kv-cache-dtype", default="auto", help="as of jaxsgl.serve")
    parser.add_argument("--platform", default="gpu", choices=("cpu", "gpu", "tpu"))
    parser.add_argument("--device-gib", type=float, default=79.0, help="memory of one device (default 79: an H100)")
    parser.add_argument("--recipes", action="store_true", help="print the tables of docs/recipes")
    args = parser.parse_args(arguments)
    if args.recipes:
        for page in RECIPES:
            print(f"{page}:\n{table(page)}\n")
        return
    if args.model is None:
        parser.error("give --model or --recipes")
    flags = {"tp": args.tp, "quantization": args.quantization, "kv_cache_dtype": args.kv_cache_dtype}
    if args.dp_size > 1:
        flags |= {"dp_size": args.dp_size, "enable_dp_attention": True}
    try:
        found = memory_of(args.model, args.device_gib, args.platform, **flags)
    except JaxsglError as error:
        raise SystemExit(f"error: {error}") from None
    weights, per_token = found.weight_bytes / GIB, found.kv_bytes_per_token / 1024
    print(
        f"{weights:.2f} GiB of weights on each device, {per_token:.1f} KiB of KV a token; "
        f"{found.pool_tokens:,} tokens fit"
    )
    write_figures(args.json, **asdict(found))
