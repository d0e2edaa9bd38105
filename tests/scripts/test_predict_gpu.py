"""Steps on a GPU that is not there are predicted from what was compiled, and each constant says where it comes from."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench.targets.chips import CHIPS, steps_on
from bench.targets.prediction import (
    ASSUMED,
    FORECAST,
    FORECAST_SOURCES,
    SOURCES,
    Predicted,
    batch_of,
    decode_programs,
    floor_us,
    predict,
)

from pallas_kernels.options import AttentionOptions
from pallas_kernels.partition import SplitPlan, chain_items, split_sequences
from tests.grids import daily
from tests.scripts.running import ROOT, run_script

KEPT = ROOT / "benchmarks/h200/compiled_steps.json"
# With 1,024 tokens of KV a row, for an H200.
TOO_LARGE = ("phi3-mini mosaic_gpu decode 256", "deepseek-v3.2-32e-fp8")
FACTS = {
    "num_layers": 2, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "hidden_size": 1024, "vocab_size": 1000,
    "weights_read": 3_000_000, "weight_itemsize": 2, "kv_itemsize": 2, "page_size": 64,
}  # fmt: skip


def kernel(kind: str, count: int, moved: int = 0, flops: int = 0) -> dict[str, Any]:
    return {"kind": kind, "bytes_read": moved, "bytes_written": 0, "flops": flops, "count": count}


def compiled(*kernels: dict[str, Any], layers: int, steps: list[str], buffers: int = 1) -> dict[str, Any]:
    launches = {
        "num_layers": layers, "layer_kinds": {"attention": 1, "product": 4, "pallas": 1, "small": 2},
        "num_launches": sum(each["count"] for each in kernels), "command_buffers": buffers, "kernels": list(kernels),
    }  # fmt: skip
    return {"program": "p", "steps": steps, "facts": FACTS, "launches": launches, "problems": []}


def test_a_kernel_takes_its_bytes_or_flops_and_a_start() -> None:
    step = "m mosaic_gpu decode 1 greedy"
    slow, fast = kernel("small", 3, moved=43_000_000), kernel("product", 2, moved=43, flops=788_000_000)
    (found,) = predict([compiled(kernel("attention", 2), slow, fast, layers=2, steps=[step])], 1)
    assert found.small_us == pytest.approx(3 * (10 + ASSUMED.kernel_us))
    assert found.products_us == pytest.approx(2 * (1 + ASSUMED.kernel_us))
    assert found.small_per_layer == 3 and found.num_kernels == 7


def test_sampled_steps_add_the_program_that_samples() -> None:
    steps = [f"m triton decode 8 {sampling}" for sampling in ("greedy", "sampled")]
    forward = compiled(kernel("attention", 2), layers=2, steps=steps)
    sampling = compiled(kernel("small", 5, moved=43_000_000), layers=0, steps=steps[1:])
    greedy, sampled = predict([forward, sampling], 1024)
    assert greedy.sampling_us == 0 and sampled.sampling_us == pytest.approx(5 * (10 + ASSUMED.kernel_us))
    assert sampled.launch_us == 2 * greedy.launch_us


def test_steps_with_branches_or_loops_of_unknown_turns_are_left_out() -> None:
    plain, branched, turning = (
        compiled(kernel("attention", count), layers=2, steps=["m triton decode 8 greedy"]) for count in (2, 2, 0)
    )
    branched["launches"]["num_branched"] = 2
    assert [len(list(predict([each], 99))) for each in (plain, branched, turning)] == [1, 0, 0]


def test_launches_outside_of_one_command_buffer_cost_more() -> None:
    whole, broken = (
        next(predict([compiled(kernel("attention", 2), layers=2, steps=["m triton decode 8 greedy"], buffers=n)], 99))
        for n in (1, 3)
    )
    assert broken.launch_us > whole.launch_us


def test_attention_of_a_decode_reads_all_keys_and_values_once() -> None:
    def attention_us(context: int) -> float:
        step = "m mosaic_gpu decode 256 greedy"
        (found,) = predict([compiled(kernel("attention", 2), layers=2, steps=[step])], context)
        return found.attention_us

    kv_us = 2 * 2 * 256 * 1024 * 8 * 128 * 2 / ASSUMED.bytes_per_s * 1e6
    assert attention_us(2048) - attention_us(1024) == pytest.approx(kv_us)


@pytest.mark.parametrize(("rows", "splits"), [(32, 1), (8, 4), (1, 8)])  # as many as fill 264 slots, of 128 tokens
def test_room_for_splits_that_rows_of_one_length_do_not_have_takes_no_time(rows: int, splits: int) -> None:
    split = 4 * rows * 16 * 128

    def predicted(room: int) -> Predicted:
        """Of kernels with room for so many splits."""
        attention = kernel("attention", 2) | {"bytes_written": room * split}
        merge = kernel("merge", 2, moved=room * split + 4 * rows)
        (found,) = predict([compiled(attention, merge, layers=2, steps=[f"m triton decode {rows} greedy"])], 1024)
        return found

    full, roomy = predicted(splits), predicted(10)
    assert roomy.attention_us == pytest.approx(full.attention_us) and roomy.small_us == pytest.approx(full.small_us)
    start_us = 2 * (ASSUMED.kernel_us + (splits * split + 4 * rows) / ASSUMED.bytes_per_s * 1e6)
    assert roomy.small_us == pytest.approx(start_us)
    whole = kernel("attention", 2) | {"bytes_written": split // 2}  # the output itself, in 16 bits
    (found,) = predict([compiled(whole, layers=2, steps=[f"m triton decode {rows} greedy"])], 1024)
    (unwritten,) = predict([compiled(kernel("attention", 2), layers=2, steps=[f"m triton decode {rows} greedy"])], 1024)
    of_output_us = 2 * split / 2 / (ASSUMED.bytes_per_s * ASSUMED.decode_share["triton"]) * 1e6
    assert found.attention_us - unwritten.attention_us == pytest.approx(of_output_us)


@pytest.mark.parametrize("rows", daily([66, 256, 133, 512], every=2))
def test_programs_of_attention_are_counted_as_the_kernel_chains_rows(rows: int) -> None:
    plan = SplitPlan(rows, max_splits=1, items_at_once=33, min_tiles=2, tile_tokens=64)
    chain = jax.jit(lambda lengths: chain_items(plan, split_sequences(plan, lengths, AttentionOptions())))
    chains = chain(jnp.full(rows, 1024))
    started = int((np.diff(np.asarray(chains)) > 0).sum())
    assert decode_programs(rows, 8, "mosaic_gpu") == pytest.approx(8 * started, rel=0.03)
    assert decode_programs(rows, 8, "triton") == 8 * rows


def test_experts_that_no_token_chooses_are_not_read() -> None:
    facts = {**FACTS, "expert_weights": 2_000_000, "num_experts": 8, "experts_per_token": 1}
    moved = 430_000_000
    for rows, share in ((1, 1 / 8), (2, 1 - (7 / 8) ** 2), (1000, 1)):
        step = f"m mosaic_gpu decode {rows} greedy"
        program = compiled(kernel("attention", 2), kernel("experts", 1, moved=moved), layers=2, steps=[step])
        (found,) = predict([program | {"facts": facts}], 1)
        assert found.products_us == pytest.approx(100 * share + ASSUMED.kernel_us)
        assert floor_us(batch_of("decode", rows, 1), facts, "greedy") < found.step_us


def test_a_device_with_some_of_the_experts_multiplies_their_rows_alone() -> None:
    facts = {**FACTS, "expert_weights": 2_000_000, "num_experts": 64, "experts_per_token": 8}
    rows, weights, share = 4096, 8 * 2_000_000, ASSUMED.product_share * ASSUMED.many_experts_share
    of_all = 2 * rows * 8 * 2_000_000  # eight of 64 experts: an eighth of the rows that all devices have
    took = {}
    for matrix_bytes in (0, weights * FACTS["weight_itemsize"]):
        product = {**kernel("experts of many", 1, moved=1), "flops": of_all, "matrix_bytes": matrix_bytes}
        program = compiled(kernel("attention", 2), product, layers=2, steps=[f"m mosaic_gpu extend {rows} greedy"])
        (found,) = predict([program | {"facts": facts}], 1)
        took[bool(matrix_bytes)] = found.products_us - ASSUMED.kernel_us
    assert took[False] == pytest.approx(of_all / (ASSUMED.flops_per_s * share) * 1e6, rel=0.01)
    assert took[True] == pytest.approx(took[False] / 8, rel=0.02)


def test_shared_experts_among_the_others_are_read_and_multiplied_for_every_token() -> None:
    facts = {**FACTS, "expert_weights": 2_000_000, "num_experts": 8, "experts_per_token": 1}
    for rows, moved, shared in ((1, 430_000_000, 215_000_000), (1000, 8_600_000, 4_300_000)):
        step = f"m mosaic_gpu decode {rows} greedy"
        product = {**kernel("experts", 1, moved=moved), "shared_bytes": shared}
        program = compiled(kernel("attention", 2), product, layers=2, steps=[step])
        (found,) = predict([program | {"facts": facts}], 1)
        bytes_us = (shared + (moved - shared) * (1 - (7 / 8) ** rows)) / ASSUMED.bytes_per_s * 1e6
        flops_us = 2 * rows * (shared + (moved - shared) / 8) / 2 / ASSUMED.flops_per_s * 1e6
        assert (flops_us > bytes_us) == (rows == 1000)
        assert found.products_us == pytest.approx(max(bytes_us, flops_us) + ASSUMED.kernel_us)


def test_what_devices_exchange_takes_a_start_and_its_share_of_the_links() -> None:
    facts = {**FACTS, "num_devices": 8}
    whole = int(370e9 / 1e6 / 1.75 * 100)  # of which a ring sends 100 us
    sums = {**kernel("all-reduce", 5, moved=whole), "bytes_written": whole, "peers": 8}
    step = "m mosaic_gpu decode 1 greedy"
    program = compiled(kernel("attention", 2), sums, layers=2, steps=[step], buffers=5)
    program["launches"]["loose_kernels"] = 10
    (found,) = predict([program | {"facts": facts}], 1)
    assert found.links_us == pytest.approx(5 * (100 + ASSUMED.collective_us), rel=1e-3)
    assert found.launch_us == pytest.approx(5 * ASSUMED.program_us + 10 * (ASSUMED.loose_launch_us - ASSUMED.kernel_us))
    alone = floor_us(batch_of("decode", 256, 1), FACTS, "greedy")
    residual_us = 256 * 1024 * 2 * 1.75 / ASSUMED.link_bytes_per_s * 1e6
    assert floor_us(batch_of("decode", 256, 1), facts, "greedy") == pytest.approx(alone + 5 * residual_us)


def test_a_sum_in_one_pass_reads_what_all_others_have() -> None:
    whole = int(370e9 / 1e6 * 10)  # of which the links carry 10 us
    took = {}
    for by in ("", "one-shot", "two-shot"):
        sums = {**kernel("all-reduce", 1, moved=whole), "bytes_written": whole, "peers": 8, "by": by}
        program = compiled(kernel("attention", 2), sums, layers=2, steps=["m mosaic_gpu decode 1 greedy"])
        (found,) = predict([program | {"facts": {**FACTS, "num_devices": 8}}], 1)
        took[by] = round(found.links_us, 1)
    assert took == {"": 17.5 + 20, "one-shot": 70.0 + 11, "two-shot": 17.5 + 18}


def test_the_floor_is_the_reviewed_one_for_a_large_decode() -> None:
    """Qwen3-0.6B, 256 rows of 1,024: the figure that was computed by hand, 7.5 ms."""
    facts = {**FACTS, "num_layers": 28, "vocab_size": 151_936, "weights_read": 596_049_920}
    assert floor_us(batch_of("decode", 256, 1024), facts, "greedy") == pytest.approx(7500, rel=0.02)


# Of each model: bytes of the weights that a step reads whatever its rows, of its experts, and of a token's KV.
ROOFLINES: dict[str, tuple[int, int, int]] = {
    "deepseek-v2-lite": (
        2 * (27 * 2048 * (16 * 192 + 576 + 16 * 128) + 27 * 16 * 256 * 512  # attention
             + 3 * 2048 * 10_944 + 26 * 2048 * (3 * 2816 + 64)  # the dense MLP, shared experts, routers
             + 2048 * 102_400),
        2 * 26 * 64 * 3 * 2048 * 1408, 27 * 1152,
    ),
    "qwen3.5-9b": (
        2 * (8 * 4096 * (3 * 16 * 256 + 2 * 4 * 256) + 24 * 4096 * (16 * (4 * 128 + 2 * 128 + 4) + 4096)  # o among them
             + 32 * 3 * 4096 * 12_288 + 4096 * 248_320),
        0, 8 * 2 * 4 * 256 * 2,
    ),
    "granite-4.0-h-small": (
        2 * (4 * 4096 * 128 * (2 * 32 + 2 * 8) + 36 * 4096 * (2 * 8192 + 2 * 128 + 128 + 8192)
             + 40 * 4096 * (3 * 1536 + 72) + 4096 * 100_352),
        2 * 40 * 72 * 3 * 4096 * 768, 4 * 2 * 8 * 128 * 2,
    ),
}  # fmt: skip
# Of a row, numbers of states that a decode moves: matrices are read and written, slots of inputs read or written.
STATES = {
    "qwen3.5-9b": 24 * (2 * 32 * 128 * 128 + 4 * 16 * 512),
    "granite-4.0-h-small": 36 * (2 * 128 * 128 * 64 + 4 * (8192 + 2 * 128)),
}
VOCABULARIES = {"deepseek-v2-lite": 102_400, "qwen3.5-9b": 248_320, "granite-4.0-h-small": 100_352}
TOO_MANY_STATES = "granite-4.0-h-small", 256  # for the memory of an H200
CHOSEN = {"deepseek-v2-lite": 6 / 64, "granite-4.0-h-small": 10 / 72}  # of the experts, by a token


@pytest.mark.parametrize(
    ("model", "rows"), [(model, rows) for model in ROOFLINES for rows in (32, 256) if (model, rows) != TOO_MANY_STATES]
)
def test_floors_of_latents_and_states_are_those_of_a_hand_count(model: str, rows: int) -> None:
    """Decodes of 1,024 tokens a row on an H200. What exceeds the bytes are starts of kernels, mostly."""
    results = json.loads(KEPT.read_text())["results"]
    step = f"{model} triton decode {rows} greedy"
    (found,) = (each for each in steps_on(CHIPS["h200"], results, 1024) if each["step"] == step)
    weights, experts, token = ROOFLINES[model]
    states = rows * 4 * STATES.get(model, 0)
    moved = (
        experts * (1 - (1 - CHOSEN.get(model, 0)) ** rows) + rows * (1024 * token + 8 * VOCABULARIES[model]) + states
    )
    # Two FLOPs for each weight of two bytes and each row; from 184 rows on they take longer than the bytes.
    weights_us = weights * max(1 / ASSUMED.bytes_per_s, rows / ASSUMED.flops_per_s) * 1e6
    floor_us = weights_us + moved / ASSUMED.bytes_per_s * 1e6
    assert found["floor_us"] == pytest.approx(floor_us, rel=0.005)
    assert 0.1 < found["over_floor"] < 0.45
    assert sum(found[f"{part}_us"] for part in ("attention", "states", "products")) < 1.25 * found["floor_us"]


def test_steps_with_loops_of_unknown_length_have_no_prediction() -> None:
    step = "m triton extend 4096 greedy"
    program = compiled(kernel("attention", 2), kernel("small", 0), layers=2, steps=[step])
    assert not list(predict([program], 1024))


def test_every_constant_has_a_source() -> None:
    assert {field.name for field in dataclasses.fields(ASSUMED)} == set(SOURCES)
    assert set(FORECAST) == set(FORECAST_SOURCES) <= set(SOURCES)
    assert all(chip.source for chip in CHIPS.values())


@pytest.mark.parametrize(("kind", "share"), [("product", "product_share"), ("quantized", "quantized_share")])
def test_the_forecast_takes_the_shares_that_kernels_reach(kind: str, share: str) -> None:
    step = "m mosaic_gpu decode 1000 greedy"
    product = kernel(kind, 2, flops=788_000_000)
    (found,) = predict([compiled(kernel("attention", 2), product, layers=2, steps=[step])], 1)
    assert found.products_us == pytest.approx(2 * (1 + ASSUMED.kernel_us))
    more_us = 2 * (1 / FORECAST[share] - 1)
    attention_us = (
        1000 * 2 * 2 * 8 * 128 * 2 / ASSUMED.bytes_per_s * 1e6 * (1 / FORECAST["decode_share"]["mosaic_gpu"] - 1)
    )
    assert found.forecast_us == pytest.approx(found.step_us + more_us + attention_us, rel=1e-2)


def test_weights_that_a_kernel_converts_take_the_time_of_their_conversion_once() -> None:
    step = "m mosaic_gpu decode 8 greedy"
    product = kernel("quantized", 2, moved=43, flops=2 * 8 * 4_600_000)
    (found,) = predict([compiled(kernel("attention", 2), product, layers=2, steps=[step])], 1)
    rate = {"converted_per_s": FORECAST["converted_per_s"]}
    (sober,) = predict([compiled(kernel("attention", 2), product, layers=2, steps=[step])], 1,
                       dataclasses.replace(ASSUMED, **rate))  # fmt: skip
    assert sober.products_us == pytest.approx(2 * (1 + ASSUMED.kernel_us)) and found.products_us < sober.products_us


def test_experts_are_read_and_multiplied_at_less_than_the_ceilings() -> None:
    facts = {**FACTS, "expert_weights": 2_000_000, "num_experts": 8, "experts_per_token": 1}
    for step, share in (("decode 1000", "expert_bytes_share"), ("extend 400000", "expert_flops_share")):
        program = compiled(kernel("attention", 2), kernel("experts", 1, moved=430_000_000), layers=2,
                           steps=[f"m mosaic_gpu {step} greedy"])  # fmt: skip
        (plain,) = predict([program | {"facts": facts}], 1)
        (sober,) = predict([program | {"facts": facts}], 1, dataclasses.replace(ASSUMED, **{share: FORECAST[share]}))
        start_us = ASSUMED.kernel_us
        assert sober.products_us - start_us == pytest.approx((plain.products_us - start_us) / FORECAST[share])


def test_the_host_sets_the_pace_where_its_updates_of_a_graph_take_longer_than_the_kernels() -> None:
    """A kernel's start is shorter than that; so only where they were assumed to cost nothing."""
    step = "m mosaic_gpu decode 1 greedy"
    program = compiled(kernel("attention", 2), kernel("small", 998), layers=2, steps=[step])
    (found,) = predict([program], 1, dataclasses.replace(ASSUMED, kernel_us=0.1))
    assert found.forecast_us == 1000 * FORECAST["node_update_us"] > found.step_us


def test_the_kept_results_are_predicted_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "predicted.json"
    done = run_script("predict_gpu.py", "--json", file)
    told = json.loads(file.read_text())
    assert {chip: set(each) for chip, each in told["chips"].items()} == {name: {"source", "assumed"} for name in CHIPS}
    lines = [line for line in told["steps"] if line["chip"] == "h200"]
    results = json.loads(KEPT.read_text())["results"]
    assert not [result["program"] for result in results if result["problems"]]
    forward = [each for each in results if each["launches"]["num_layers"]]
    drawn = {step for result in results if not result["launches"]["num_layers"] for step in result["steps"]}
    every = {step for result in forward for step in result["steps"] if step in drawn or step.endswith(" greedy")}
    assert not {step for step in every - {line["step"] for line in lines} if not step.startswith(TOO_LARGE)}
    assert {field.name for field in dataclasses.fields(Predicted)} <= set(lines[0])
    for line in lines:
        assert line["step"] in done.stdout
        assert line["forecast_us"] > line["step_us"] > line["floor_us"]
        if "decode 256" in line["step"] or "extend" in line["step"]:  # small batches add up parts, of products too
            widens = "extend" in line["step"] and "-awq" in line["step"]  # 4 a layer
            more = {"qwen3-30b-a3b": 8, "qwen3-30b-a3b-awq": 8, "qwen3-30b-a3b-fp8": 11}  # experts
            more |= {"deepseek-v2-lite": 9, "qwen3.5-9b": 12, "gpt-oss-20b": 6}  # latents, states, experts of 4 bits
            more |= {"granite-4.0-h-small": 9}  # experts and states
            if "extend" in line["step"]:
                more |= {"qwen3.5-9b": 35, "granite-4.0-h-small": 22}  # XLA's around the kernel of blocks
            assert line["small_per_layer"] <= more.get(line["step"].split()[0], 9 if widens else 5)
    assert {line["chip"] for line in told["steps"]} == set(CHIPS)
    assert all(line["forecast_us"] > line["floor_us"] for line in told["steps"])


def test_chips_have_their_own_backends_and_only_steps_that_fit_their_memory() -> None:
    results = json.loads(KEPT.read_text())["results"]
    steps = {name: {each["step"] for each in steps_on(chip, results, 1024)} for name, chip in CHIPS.items()}
    assert {step.split()[1] for step in steps["a100"]} == {"triton"}
    assert all({step.split()[1] for step in steps[name]} == {"mosaic_tpu"} for name in ("v5e", "v6e", "v7x"))
    assert {step.split()[0] for step in steps["v5e"]} <= {"qwen3-0.6b", "phi3-mini"}
    assert "qwen3-8b mosaic_tpu decode 256 greedy" in steps["v7x"] - steps["v6e"]
    of_v7x = [each["step"] for each in steps_on(CHIPS["v7x"], results, 1024)]
    assert len(set(of_v7x)) == len(of_v7x), "a step of several backends is one of a TPU"
    assert "deepseek-v2-lite mosaic_tpu decode 32 greedy" in steps["v7x"] - steps["v6e"]
    assert "qwen3.5-9b mosaic_tpu decode 32 greedy" in steps["v6e"] - steps["v5e"]
    # Where there is no kernel for a format, other programs would be launched.
    for model, chips in (("qwen3-8b-fp8", {"h200", "h100"}), ("qwen3-8b-awq", {"h200", "h100", "a100"})):
        assert {name for name, each in steps.items() if any(step.startswith(f"{model} ") for step in each)} == chips


def test_a_tpus_forecast_has_the_tiles_that_its_decodes_write_and_not_a_store_of_their_own() -> None:
    results = json.loads(KEPT.read_text())["results"]
    steps = {each["step"]: each for each in steps_on(CHIPS["v7x"], results, 1024)}
    decode, extend = (steps[f"qwen3-0.6b mosaic_tpu {each} greedy"] for each in ("decode 256", "extend 4096"))
    tiles_us = 28 * 256 * 2 * 8 * 8 * 128 * 2 / CHIPS["v7x"].assumed.bytes_per_s * 1e6
    assert decode["store_us"] == pytest.approx(tiles_us) and extend["store_us"] == pytest.approx(2 * tiles_us)
    assert 30 < decode["store_alone_us"] / 28 < 50  # of a layer
    assert extend["store_alone_us"] == extend["store_us"]
    assert decode["forecast_us"] > decode["floor_us"] + decode["store_us"]


def test_the_forecast_stands_near_the_best_measured_engine() -> None:
    """vLLM on an H100, Qwen3-8B: 29.7 ms a step at 396 rows of 640 tokens on average, as much KV as 256 of 1,024."""
    results = json.loads(KEPT.read_text())["results"]
    (found,) = (
        each for each in steps_on(CHIPS["h100"], results, 1024)
        if each["step"] == "qwen3-8b mosaic_gpu decode 256 greedy"
    )  # fmt: skip
    assert 0.7 < found["forecast_us"] / 29_700 < 1.0
    assert found["floor_us"] / 29_700 < 0.7


def test_weights_with_scales_of_groups_are_predicted_next_to_bfloat16() -> None:
    """Few rows read half of the bytes, or a fourth; many gain nothing by int4, whose conversions cost more there."""
    results = json.loads(KEPT.read_text())["results"]
    found = {each.step: each for each in predict(results, 1024)}

    def ratio(weights: str, rows: int, name: str) -> float:
        in_groups, plain = (
            getattr(found[f"qwen3-8b{suffix} mosaic_gpu decode {rows} greedy"], name) for suffix in (weights, "")
        )
        return float(in_groups / plain)

    for rows in (1, 32):
        assert ratio("-fp8", rows, "step_us") < 0.75 and ratio("-fp8", rows, "forecast_us") < 0.9
        assert ratio("-awq", rows, "step_us") < 0.62 and 0.55 < ratio("-awq", rows, "forecast_us") < 0.75
    assert 0.99 < ratio("-awq", 256, "step_us") < 1.01 < ratio("-awq", 256, "forecast_us") < 1.5
    assert ratio("-fp8", 256, "step_us") < 0.9 and ratio("-fp8", 256, "forecast_us") < 1
    for result in results:
        if result["program"].startswith(("qwen3-8b-fp8 decode", "qwen3-8b-awq decode")):
            report = result["launches"]
            of_rows = "float8 of many" if " 256 " in result["program"] else "float8"
            kind = of_rows if "fp8" in result["program"] else "quantized"
            assert report["layer_kinds"][kind] == 4 and report["command_buffers"] == 1
            matrix = 24_576 * 4096
            assert all(each["bytes_written"] < matrix for each in report["listed"])  # nothing is widened in memory


def test_only_a_hopper_is_forecast_with_its_own_products_of_many_rows() -> None:
    """An A100's products with experts are Triton's, at 0.45 of its FLOPs, in steps that were compiled for an H200."""
    results = [
        each for each in json.loads(KEPT.read_text())["results"] if each["program"].startswith("deepseek-v2-lite")
    ]
    over_the_ceilings = {}
    for chip in ("h200", "a100"):
        (found,) = (each for each in steps_on(CHIPS[chip], results, 1024) if "extend" in each["step"])
        over_the_ceilings[chip] = found["forecast_us"] / found["step_us"]
    assert over_the_ceilings["h200"] < 1.3 and over_the_ceilings["a100"] > 1.5


def test_the_kept_steps_of_eight_devices_exchange_two_sums_a_layer_and_logits_once() -> None:
    results = json.loads(KEPT.with_name("compiled_steps_tp8.json").read_text())["results"]
    assert {"qwen3-8b-tp8", "qwen3-30b-a3b-tp8", "qwen3-235b-a22b-tp8"} <= {
        each["program"].split()[0] for each in results
    }
    for result in results:
        assert not result["problems"]
        facts, report = result["facts"], result["launches"]
        if not report["num_layers"]:  # it samples
            assert {each["kind"]: each["count"] for each in report["exchanged"]} == {"all-to-all": 1, "all-gather": 1}
            continue
        size = result["program"].split()[2]
        residual = int(size) * facts["hidden_size"] * facts["weight_itemsize"]
        sums = [each for each in report["exchanged"] if each["kind"] == "all-reduce"]
        assert [(each["bytes"], each["count"]) for each in sums] == [(residual, 2 * facts["num_layers"] + 1)]
        assert report["layer_kinds"]["all-reduce"] == 2
    for found in predict(results, 1024):
        assert found.floor_us < found.step_us and found.links_us > 0
