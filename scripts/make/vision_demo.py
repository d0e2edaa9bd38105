"""Make a small Qwen3-VL checkpoint to try pictures with: the bundled model with a random vision tower in front.

    python scripts/make vision_demo /tmp/vision-demo
    python -m jaxsgl.serve --model /tmp/vision-demo

With `--experts 4` it is a Qwen3-VL-MoE: each expert is nearly the bundled model's own MLP, and two of them see a token.

It answers texts as the bundled model does, and takes pictures and videos in every protocol, but it has never seen one:
what it says of them is noise, the same for the same picture. Takes a second, and needs nothing besides jaxsgl.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from bench.output import figure_parser, write_figures
from bench.processes import ROOT
from safetensors.flax import load_file, save_file

BUNDLED = ROOT / "jaxsgl" / "bundled_model"
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TOWER = {
    "depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 16, "temporal_patch_size": 2,
    "spatial_merge_size": 2, "in_channels": 3, "num_position_embeddings": 256, "deepstack_visual_indexes": [0, 1],
    "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
PICTURES = {"shortest_edge": 32 * 32, "longest_edge": 512 * 512}
VIDEOS = {"shortest_edge": 32 * 32, "longest_edge": 16 * 256 * 256}
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for part in message['content'] %}
            {%- if part['type'] == 'image' %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part['type'] == 'video' %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- else %}
                {{- part['text'] }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def make(folder: Path, seed: int = 0, num_experts: int = 0) -> int:
    """Writes the checkpoint; returns the number of its parameters. With experts it is a mixture of them."""
    folder.mkdir(parents=True, exist_ok=True)
    text: dict[str, Any] = json.loads((BUNDLED / "config.json").read_text())
    first = text["vocab_size"]
    ids = dict(zip(VISION_TOKENS, range(first, first + len(VISION_TOKENS)), strict=True))
    _write_json(folder, "config", _config(text, ids, num_experts))
    _write_json(folder, "tokenizer", _tokenizer(ids))
    for name in ("tokenizer_config", "generation_config"):
        _write_json(folder, name, json.loads((BUNDLED / f"{name}.json").read_text()))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    processor = {
        "patch_size": TOWER["patch_size"], "temporal_patch_size": TOWER["temporal_patch_size"],
        "merge_size": TOWER["spatial_merge_size"], "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    image = {**processor, "size": PICTURES, "image_processor_type": "Qwen2VLImageProcessorFast"}
    _write_json(folder, "preprocessor_config", {**image, "processor_class": "Qwen3VLProcessor"})
    video = {**processor, "size": VIDEOS, "video_processor_type": "Qwen3VLVideoProcessor"}
    _write_json(folder, "video_preprocessor_config", video)
    rng = np.random.default_rng(seed)
    tensors = _tensors(text, len(ids), rng)
    if num_experts:
        tensors = _with_experts(tensors, num_experts, rng)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return sum(int(tensor.size) for tensor in tensors.values())


def _config(text: dict[str, Any], ids: dict[str, int], num_experts: int) -> dict[str, Any]:
    quarter = text["head_dim"] // 8
    rope = {
        "rope_type": "default", "rope_theta": text["rope_theta"], "mrope_interleaved": True,
        "mrope_section": [2 * quarter, quarter, quarter],
    }  # fmt: skip
    dropped = ("architectures", "model_type", "rope_theta", "rope_scaling", "tie_word_embeddings")
    kept = {name: value for name, value in text.items() if name not in dropped}
    kept |= {"model_type": "qwen3_vl_text", "rope_parameters": rope, "vocab_size": text["vocab_size"] + len(ids)}
    name, model_type = "Qwen3VL", "qwen3_vl"
    if num_experts:
        name, model_type = "Qwen3VLMoe", "qwen3_vl_moe"
        kept |= {
            "model_type": "qwen3_vl_moe_text", "num_experts": num_experts, "num_experts_per_tok": 2,
            "moe_intermediate_size": text["intermediate_size"], "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
    start, end, image, video = ids.values()
    return {
        "architectures": [f"{name}ForConditionalGeneration"], "model_type": model_type, "tie_word_embeddings": True,
        "image_token_id": image, "video_token_id": video, "vision_start_token_id": start, "vision_end_token_id": end,
        "text_config": kept,
        "vision_config": {"model_type": model_type, **TOWER, "out_hidden_size": text["hidden_size"]},
    }  # fmt: skip


def _tokenizer(ids: dict[str, int]) -> dict[str, Any]:
    tokenizer: dict[str, Any] = json.loads((BUNDLED / "tokenizer.json").read_text())
    like = tokenizer["added_tokens"][-1]
    tokenizer["added_tokens"] += [{**like, "id": number, "content": name} for name, number in ids.items()]
    return tokenizer


def _tensors(text: dict[str, Any], num_new: int, rng: np.random.Generator) -> dict[str, Any]:
    """The bundled model's tensors under their new names, and the tower's."""
    tensors: dict[str, Any] = {}
    for name, tensor in load_file(BUNDLED / "model.safetensors").items():
        tensors["model.language_model." + name.removeprefix("model.")] = tensor
    embedding = tensors["model.language_model.embed_tokens.weight"]
    dtype = embedding.dtype
    rows = np.zeros((num_new, text["hidden_size"]), dtype)  # logits of 0: hardly ever an answer
    tensors["model.language_model.embed_tokens.weight"] = np.concatenate((np.asarray(embedding), rows))
    for name, shape in _tower_shapes(text["hidden_size"]).items():
        values = np.zeros(shape) if name.endswith("bias") else rng.standard_normal(shape) / np.sqrt(shape[-1])
        if "norm" in name and name.endswith("weight"):
            values = np.ones(shape)
        tensors["model.visual." + name] = values.astype(dtype)
    return tensors


def _with_experts(tensors: dict[str, Any], num_experts: int, rng: np.random.Generator) -> dict[str, Any]:
    """`tensors` with experts in place of each MLP: it with other noise each, and a router that is all noise."""

    def experts(*matrices: Any) -> Any:
        """`[E, in, out]`: all of `matrices` `[out, in]`, next to each other."""
        stacked = np.concatenate([np.asarray(matrix).T for matrix in matrices], axis=1)
        noise = 1 + 0.02 * rng.standard_normal((num_experts, *stacked.shape))
        return (stacked.astype(np.float32) * noise).astype(stacked.dtype)

    found = {name: tensor for name, tensor in tensors.items() if ".mlp." not in name or "visual" in name}
    for name in (name for name in tensors if name.endswith("mlp.gate_proj.weight") and "visual" not in name):
        mlp = name.removesuffix("gate_proj.weight")
        gate, up, down = (tensors[f"{mlp}{part}_proj.weight"] for part in ("gate", "up", "down"))
        found[f"{mlp}experts.gate_up_proj"] = experts(gate, up)
        found[f"{mlp}experts.down_proj"] = experts(down)
        found[f"{mlp}gate.weight"] = rng.standard_normal((num_experts, gate.shape[1])).astype(gate.dtype)
    return found


def _tower_shapes(out_size: int) -> dict[str, tuple[int, ...]]:
    size, inner, patch = TOWER["hidden_size"], TOWER["intermediate_size"], TOWER["patch_size"]
    assert isinstance(size, int) and isinstance(inner, int) and isinstance(patch, int)
    merged = 4 * size
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (size, 3, 2, patch, patch), "patch_embed.proj.bias": (size,),
        "pos_embed.weight": (256, size),
    }  # fmt: skip
    linear = {"attn.qkv": (3 * size, size), "attn.proj": (size, size), "mlp.linear_fc1": (inner, size),
              "mlp.linear_fc2": (size, inner), "norm1": (size,), "norm2": (size,)}  # fmt: skip
    for layer in range(3):
        for name, shape in linear.items():
            shapes |= {f"blocks.{layer}.{name}.weight": shape, f"blocks.{layer}.{name}.bias": shape[:1]}
    for merger, norm in (("merger", size), ("deepstack_merger_list.0", merged), ("deepstack_merger_list.1", merged)):
        for name, shape in (("norm", (norm,)), ("linear_fc1", (merged, merged)), ("linear_fc2", (out_size, merged))):
            shapes |= {f"{merger}.{name}.weight": shape, f"{merger}.{name}.bias": shape[:1]}
    return shapes


def _write_json(folder: Path, name: str, values: dict[str, Any]) -> None:
    (folder / f"{name}.json").write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n")


def main(arguments: list[str]) -> None:
    """Reads the command line, and writes the checkpoint."""
    parser = figure_parser(__doc__, __name__)
    parser.add_argument("folder", type=Path, help="where the checkpoint goes")
    parser.add_argument("--seed", type=int, default=0, help="of the tower's weights")
    parser.add_argument("--experts", type=int, default=0, help="make a mixture of so many experts; 0: none")
    args = parser.parse_args(arguments)
    num_params = make(args.folder, args.seed, args.experts)
    print(f"{args.folder}: {num_params} parameters; try python -m jaxsgl.serve --model {args.folder}")
    write_figures(args.json, folder=str(args.folder), params=num_params, seed=args.seed)
