"""Compare the programs that the engines of two trees compile: a change of structure must leave their text as it is.

    python scripts/check programs ../before
    python scripts/check programs ../before --only plain tp2 --show

Engines of random tiny models start in both trees, in processes of their own, with the same flags: plain, with several
decode steps, embeddings, labels, states, adapters, a host tier, float8 KV, sliding windows, two devices and two stages.
What is compared is each StableHLO text that is compiled ahead of time, without the names of results. Exits with status
1 if one differs.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from bench.output import command_parser, write_json

ROOT = Path(__file__).resolve().parents[2]
DENSE = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48,
    "max_position_embeddings": 64, "tie_word_embeddings": True, "dtype": "float32", "eos_token_id": 1,
}  # fmt: skip
MOE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [0],
}  # fmt: skip
LABELS = DENSE | {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 3}
WINDOWS = DENSE | {
    "architectures": ["Gemma3ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16,
    "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "rope_theta": 1e6,
    "rope_local_base_freq": 1e4, "rms_norm_eps": 1e-6,
}  # fmt: skip
FLAGS = {
    "load_format": "dummy", "page_size": 4, "max_running_requests": 4, "max_total_tokens": 256,
    "chunked_prefill_size": 16, "decode_buckets": (4,), "extend_buckets": (16,), "grammar_backend": "none",
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # the model and flags, those of a feature in its own dict
    "plain": (DENSE, {"grammar_backend": "llguidance"}),
    "bfloat16": (DENSE, {"dtype": "bfloat16"}),
    "float8": (DENSE, {"kv_cache_dtype": "fp8_e4m3"}),
    "windows": (WINDOWS, {}),
    "decode_steps": (DENSE, {"decode_steps": 4}),
    "embeddings": (DENSE, {"enable_embeddings": True}),
    "labels": (LABELS, {"is_embedding": True}),
    "states": (MOE, {"enable_return_hidden_states": True, "enable_return_routed_experts": True}),
    "adapters": (DENSE, {"lora": {"enable_lora": True, "max_lora_rank": 4, "max_loras_per_batch": 2}}),
    "host_tier": (DENSE, {"host_kv": {"host_kv_gib": 0.001}}),
    "tp2": (DENSE, {"tp": 2, "host_kv": {"host_kv_gib": 0.001}}),
    "tp2_all": (MOE, {"tp": 2, "enable_embeddings": True, "enable_return_hidden_states": True, "decode_steps": 4}),
    "stages": (DENSE, {"pp_size": 2, "grammar_backend": "llguidance"}),
}
_RESULT_NAMES = re.compile(r'\s*\{?jax\.result_info = "[^"]*"(, )?\}?')


def record(case: str, file: Path) -> None:
    """In a process of the tree that is looked at: starts the engine of `case` and writes the texts of its programs."""
    import jax

    from jaxsgl.config.engine import EngineConfig
    from jaxsgl.wiring import build_engine

    texts: list[str] = []
    compiles = jax.stages.Lowered.compile

    def recorded(lowered: jax.stages.Lowered, *args: Any, **kwargs: Any) -> jax.stages.Compiled:
        texts.append(_RESULT_NAMES.sub("", lowered.as_text()))
        return compiles(lowered, *args, **kwargs)

    jax.stages.Lowered.compile = recorded  # type: ignore[method-assign, assignment]
    model, flags = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model))
        config = EngineConfig(**{"model": folder, **FLAGS, **{k: v for k, v in flags.items() if type(v) is not dict}})
        parts = {k: dataclasses.replace(getattr(config, k), **v) for k, v in flags.items() if type(v) is dict}
        config = dataclasses.replace(config, **parts)
        build_engine(config).close()
    file.write_text(json.dumps(sorted(texts)))


def programs_of(tree: Path, case: str) -> list[str]:
    """The texts of the programs of `case` in that tree, in order."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONPATH": str(tree),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2" if case.startswith(("tp2", "stages")) else "",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "programs.json"
        code = f"import sys; sys.path.insert(1, {str(ROOT / 'scripts')!r}); from check.programs import record"
        call = f"from pathlib import Path; record({case!r}, Path({str(file)!r}))"
        done = subprocess.run(
            [sys.executable, "-c", f"{code}; {call}"], cwd=tree, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"{case}: the engine of {tree} does not start:\n{done.stderr[-3000:]}")
        texts: list[str] = json.loads(file.read_text())
    return texts


def differences(ours: list[str], others: list[str], show: bool) -> tuple[list[str], list[str]]:
    """The texts of each side that the other one lacks."""
    missing, added = Counter(others) - Counter(ours), Counter(ours) - Counter(others)
    if show:
        for old, new in zip(missing.elements(), added.elements(), strict=False):
            print("\n".join([*difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=1)][:60]))
    return list(added.elements()), list(missing.elements())


def main(arguments: list[str] | None = None) -> int:
    """Compares this tree with another one; returns the exit status."""
    parser = command_parser(__doc__, __name__)
    parser.add_argument("tree", type=Path, help="the other checkout")
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES), help="engines (default all)")
    parser.add_argument("--show", action="store_true", help="print how texts differ")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts to this file")
    args = parser.parse_args(arguments)
    counts: dict[str, dict[str, int]] = {}
    for case in args.only:
        ours, others = programs_of(ROOT, case), programs_of(args.tree.resolve(), case)
        added, missing = differences(ours, others, args.show)
        counts[case] = {"programs": len(ours), "added": len(added), "missing": len(missing)}
        same = "the same text" if ours == others else f"{len(added)} only here, {len(missing)} only there"
        print(f"{case:14}{len(ours):4} programs: {same}", flush=True)
    if args.json:
        write_json(args.json, {"tree": str(args.tree), "cases": counts})
    return int(any(count["added"] or count["missing"] for count in counts.values()))
