"""The process of one canary: runs it on this machine's device and compares it with numbers that are known.

    python -m bench.report.rung KIND SPEC FILE

SPEC is JSON of `bench.report.ladder`. Writes the verdict to FILE: "passed", "failed", "refused" (the backend doesn't
take the call), and figures. A device that isn't a GPU interprets Pallas's kernels. Called by `bench.report.results`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.output import write_json
from pallas_kernels import Groups, ScaledRows
from pallas_kernels.target import target_device

Spec = Mapping[str, Any]
Verdict = dict[str, Any]
MOST_ERROR = 2e-2  # of the output's norm, for numbers of 16 bits


def main() -> int:
    """Runs one rung."""
    kind, spec, file = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    begin = time.monotonic()
    found = KINDS[kind](spec)
    found |= {"seconds_in_process": round(time.monotonic() - begin, 1), "device": target_device().kind}
    write_json(file, found)
    print(found, flush=True)
    return int(found["verdict"] == "failed")


def product(spec: Spec) -> Verdict:
    """A product that XLA compiles: whether the device works at all."""
    rows = spec["rows"]
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (rows, rows), jnp.bfloat16) for key in keys)
    out = jnp.dot(a, b, preferred_element_type=jnp.float32)
    some = np.arange(0, rows, max(1, rows // 16))
    right = np.asarray(a[some], np.float64) @ np.asarray(b, np.float64)
    return _judged(np.asarray(out[some], np.float64), right)


def attention(spec: Spec) -> Verdict:
    """A store, decode or extend against float64, and against XLA's; equal in 3 runs."""
    from bench.kernels.cases import STORE, KernelCase
    from bench.kernels.check import judge_runs
    from bench.kernels.contenders import Unsupported, prepare_backend
    from bench.kernels.inputs import make_inputs
    from bench.kernels.runners import JaxRunner

    fields = dict(spec)
    backend, cached, new = fields.pop("backend"), tuple(fields.pop("cached")), tuple(fields.pop("new"))
    inputs = make_inputs(KernelCase("rung", cached=cached, new=new, **fields), seed=2, adverse=True)
    try:
        runner = JaxRunner(prepare_backend(backend, inputs, interpret=not _on_gpu()))
    except Unsupported as error:
        return {"verdict": "refused", "note": str(error)}
    with jax.default_matmul_precision("highest"):
        other = None if spec["op"] == STORE else JaxRunner(prepare_backend("xla", inputs))
    return dataclasses.asdict(judge_runs(inputs, backend, runner, other, runs=3))


def layer(spec: Spec) -> Verdict:
    """`rotate_and_store` and `add_and_norm`."""
    from bench.kernels.check_layer import check_layer
    from pallas_kernels.specs import GRID_SPECS, SMALL_SPECS

    (chosen,) = (each for each in (*SMALL_SPECS, *GRID_SPECS) if each.name == spec["spec"])
    checks = [dataclasses.asdict(each) for each in check_layer(chosen, "triton", runs=3, interpret=not _on_gpu())]
    wrong = [each for each in checks if each["verdict"] not in ("passed", "refused")]
    return {"verdict": "failed" if wrong else "passed", "checks": checks, "note": "; ".join(e["note"] for e in wrong)}


def start(spec: Spec) -> Verdict:
    """What an engine's start tests: every kernel at a model's shapes, up to the first that fails."""
    from pallas_kernels.choice import AUTO, OPS
    from pallas_kernels.selftest import report
    from pallas_kernels.selftest.__main__ import test
    from pallas_kernels.selftest.cases import CASES_OF

    said: list[report.News] = []

    def say(news: report.News) -> None:
        said.append(news)
        print(news, flush=True)

    test(report.Request(target_device().platform, spec, dict.fromkeys(OPS, AUTO)), say, CASES_OF)
    verdicts = [each for each in said if isinstance(each, report.Verdict)]
    problems = [each.problem for each in said if isinstance(each, report.Ended) and each.problem]
    wrong = [f"{each.op} on {each.backend}: {each.verdict}, {each.note}" for each in verdicts if each.failed] + problems
    found = [dataclasses.asdict(each) for each in verdicts]
    return {"verdict": "failed" if wrong else "passed", "kernels": found, "note": "; ".join(wrong)}


def experts(spec: Spec) -> Verdict:
    """Choice and groups of experts, to be those of XLA, and products of random rows, each sent to some.

    Of weights in groups the rows are rounded to float8 first.
    """
    from pallas_kernels import Router, choose_experts, float8_rows, group_by_expert, grouped_product

    tokens, num, top = spec["tokens"], spec["experts"], spec["top"]
    keys = jax.random.split(jax.random.key(1), 3)
    router, logits = Router(top, renormalize=True), jax.random.normal(keys[0], (tokens, num))
    chosen, shares = choose_experts(router, logits, backend="xla")
    x = jax.random.normal(keys[1], (tokens, spec["inputs"]), jnp.bfloat16)
    weights = _numbers(keys[2], (num, spec["outputs"], spec["inputs"]), spec["dtype"])
    groups = group_by_expert(chosen, num, backend="xla")
    options: dict[str, Any] = {"backend": "triton", "interpret": not _on_gpu()}
    found, found_shares = choose_experts(router, logits, **options)
    grouped = group_by_expert(chosen, num, **options)
    pairs = [(getattr(grouped, name), getattr(groups, name)) for name in ("tokens", "experts", "sizes", "place_of")]
    is_right = np.allclose(found_shares, shares, rtol=1e-4) and all(
        (a == b).all() for a, b in [(found, chosen), *pairs]
    )
    if not is_right:
        return {"verdict": "failed", "note": "choose_experts or group_by_expert differ from XLA's"}
    options["backend"] = spec.get("backend", "triton")
    try:
        if spec.get("group"):
            rounded = float8_rows(x, backend="reference")
            x = rounded.values(jnp.float32)
            blocks = spec.get("block_outputs", 1)
            out, weights = _with_scales(rounded, grouped, weights, spec["group"], blocks, options)
        else:
            out = np.asarray(grouped_product(x, grouped, weights, of_tokens=True, **options), np.float64)
    except ValueError as error:
        return {"verdict": "refused", "note": str(error)}
    places = np.random.default_rng(1).permutation(len(out))[:64]
    rows, owners, kept = np.asarray(x)[np.asarray(groups.tokens)], np.asarray(groups.experts), np.asarray(weights)
    right = np.stack([kept[owners[p]].astype(np.float64) @ rows[p].astype(np.float64) for p in places])
    return _judged(out[places], right)


def _with_scales(
    rows: ScaledRows, groups: Groups, numbers: jax.Array, group: int, block_outputs: int, options: dict[str, Any]
) -> tuple[np.ndarray, jax.Array]:
    """The product in float8 with weights of these numbers and random scales, and the weights."""
    from pallas_kernels import ScaledMatrix, grouped_float8_product
    from pallas_kernels.scaled import widened

    num_experts, num_outputs, num_inputs = numbers.shape
    scale = _scales((num_experts, num_outputs, num_inputs // group), block_outputs)
    stack = ScaledMatrix(numbers, scale, None, group, block_outputs)
    out = grouped_float8_product(rows, groups, stack, of_tokens=True, **options)
    return np.asarray(out, np.float64), widened(numbers, scale, None, group, jnp.float32)


def _scales(shape: tuple[int, ...], block_outputs: int) -> jax.Array:
    """Random ones `[..., O, G]`, of which so many outputs share each."""
    blocks = (*shape[:-2], shape[-2] // block_outputs, shape[-1])
    drawn = jax.random.uniform(jax.random.key(2), blocks, jnp.float32, 0.5, 1.5)
    return jnp.repeat(drawn, block_outputs, axis=-2)


def matrix(spec: Spec) -> Verdict:
    """A product with quantized weights, as a layer computes it, against float64; its rows may be rounded first."""
    from jaxsgl.models.matrix import Matrix, dequantized, quantized_product, rounds_rows
    from pallas_kernels import KernelChoice, ScaledMatrix, float8_rows, packed

    keys = jax.random.split(jax.random.key(1))
    x = jax.random.normal(keys[0], (spec["rows"], spec["inputs"]), jnp.bfloat16)
    numbers = _numbers(keys[1], (spec["outputs"], spec["inputs"]), spec["dtype"])
    group, blocks = spec["group"] or spec["inputs"], spec.get("block_outputs", 1)
    scale = _scales((spec["outputs"], spec["inputs"] // group), blocks)
    kernels = KernelChoice(**spec.get("kernels", {}))
    if spec["dtype"] == "int4":
        kept = packed.fragments_of(ScaledMatrix(numbers, scale, None, group))
        weights = Matrix(kept.numbers, kept.scale, None, None, group, kept.packing, kernels=kernels)
    else:
        weights = Matrix(numbers, scale, None, None, group, kernels=kernels, block_outputs=blocks)
    out = jax.jit(lambda rows: quantized_product(rows, weights, jnp.float32))(x)
    rounded = rounds_rows(x.dtype, weights)
    rows = float8_rows(x, backend="reference").values(jnp.float32) if rounded else x
    right = np.asarray(rows, np.float64) @ np.asarray(dequantized(weights, jnp.float32), np.float64).T
    return {**_judged(np.asarray(out, np.float64), right), "rows_in_float8": rounded}


def step(spec: Spec) -> Verdict:
    """Tokens of 8 prompts on the engine's own choice of kernels, against those on XLA's attention and store.

    `on_xla` names operations that are XLA's there, too, by their names of --kernels; `config` replaces keys of
    config.json, `flags` are options of both engines, `speculation` those of the first, and `tokens` are 2 by default.
    Random weights have near ties, which rounding breaks: one prompt in four may differ. With `against` "alone" the same
    engine gets one prompt after the other instead, and none may differ.
    """
    from bench.models import write_config

    with tempfile.TemporaryDirectory(prefix="rung-") as home:
        folder = write_config(spec["shape"], Path(home))
        config = json.loads((folder / "config.json").read_text()) | spec.get("config", {})
        if spec["layers"]:
            config["num_hidden_layers"] = spec["layers"]
        write_json(folder / "config.json", config)
        rng = np.random.default_rng(1)
        prompts = [rng.integers(2, config["vocab_size"], spec["prompt"] - i).tolist() for i in range(8)]
        other = spec.get("against", "xla")
        xla = {"attention_backend": "xla", "kernels": tuple(f"{op}=xla" for op in spec.get("on_xla", ()))}
        asked = {"auto": {"speculation": spec.get("speculation")}, other: xla if other == "xla" else {}}
        found = {
            name: _tokens(folder, prompts, spec.get("tokens", 2), spec.get("flags", {}) | own, alone=name == "alone")
            for name, own in asked.items()
        }
    equal = sum(a == b for a, b in zip(found["auto"][0], found[other][0], strict=True))
    verdict = "passed" if equal >= (8 if other == "alone" else 6) else "failed"
    return {"verdict": verdict, "equal_of_8": equal, "start_s": {name: each[1] for name, each in found.items()}}


def _tokens(
    folder: Path, prompts: list[list[int]], num_tokens: int, flags: Mapping[str, Any], *, alone: bool
) -> tuple[list[tuple[int, ...]], float]:
    """Tokens of each prompt, and the seconds that the engine took to start; prompts come at once, or one by one."""
    import jaxsgl
    from jaxsgl.config.features import SpeculationConfig

    begin = time.monotonic()
    longest = max(map(len, prompts))
    speculation = SpeculationConfig(**(flags.get("speculation") or {}))
    llm = jaxsgl.LLM(
        model=str(folder), load_format="dummy", skip_kernel_test=True, dtype="bfloat16",
        context_length=2 * longest, max_total_tokens=16 * longest + 4096, max_running_requests=8, decode_buckets=(8,),
        extend_buckets=(2 * longest,), chunked_prefill_size=2 * longest, **(dict(flags) | {"speculation": speculation}),
    )  # fmt: skip
    start_s = round(time.monotonic() - begin, 1)
    params = jaxsgl.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    calls = [[prompt] for prompt in prompts] if alone else [prompts]
    completions = [each for call in calls for each in llm.generate(call, params, use_tqdm=False)]
    llm.close()
    return [tuple(completion.token_ids) for completion in completions], start_s


def hang(_: Spec) -> Verdict:
    """A program that never ends, as a kernel that waits for a barrier that never comes."""
    jax.block_until_ready(jax.jit(lambda x: jax.lax.while_loop(lambda n: n >= 0, lambda n: n * 0, x))(jnp.int32(0)))
    return {"verdict": "passed"}


def crash(_: Spec) -> Verdict:
    """A read of memory that isn't there."""
    ctypes.string_at(0)
    return {"verdict": "passed"}


KINDS: Mapping[str, Callable[[Spec], Verdict]] = {
    each.__name__: each for each in (product, attention, layer, start, experts, matrix, step, hang, crash)
}


def _numbers(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Random weights that use the range of their format."""
    numbers = jax.random.normal(key, shape, jnp.float32) * (40 if dtype == "int8" else 1)
    return jnp.clip(numbers, -127, 127).astype(dtype)


def _judged(out: np.ndarray, right: np.ndarray) -> Verdict:
    error = float(np.linalg.norm(out - right) / np.linalg.norm(right))
    return {"verdict": "passed" if error < MOST_ERROR else "failed", "error": error}  # NaN fails


def _on_gpu() -> bool:
    return target_device().platform == "gpu"


if __name__ == "__main__":
    sys.exit(main())
