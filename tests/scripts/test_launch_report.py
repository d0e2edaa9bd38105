"""What a compiled program launches is read from its optimized HLO and from XLA's dump of thunks."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench.targets import compile_for
from bench.targets.hlo import Launch, launches, num_bytes
from bench.targets.launch_report import Layers, last_layers, launch_report
from bench.targets.thunks import read

pytestmark = pytest.mark.unit

# As XLA writes it for a GPU: a slice and a gather that are fused, Pallas calls, a product, a loop.
HLO = """HloModule jit_forward, is_scheduled=true

%sliced (p0: s32[1000]) -> s32[8] {
  %p0 = s32[1000]{0} parameter(0)
  ROOT %s = s32[8]{0} slice(%p0), slice={[0:8]}
}

%gathered (t: bf16[500,64], i: s32[8]) -> bf16[8,64] {
  %t = bf16[500,64]{1,0} parameter(0)
  %i = s32[8]{0} parameter(1)
  ROOT %g = bf16[8,64]{1,0} gather(%t, %i), slice_sizes={1,64}
}

%multiplied (x: bf16[8,64], w: bf16[128,64]) -> f32[8,128] {
  %x = bf16[8,64]{1,0} parameter(0)
  %w = bf16[128,64]{1,0} parameter(1)
  ROOT %d = f32[8,128]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s.1 = (s32[], f32[8]{0}) parameter(0)
  %n = f32[8]{0} negate(%s.1#1)
  ROOT %r = (s32[], f32[8]{0}) tuple(%s.1#0, %n)
}

%condition (s: (s32[], f32[8])) -> pred[] {
  %s.2 = (s32[], f32[8]{0}) parameter(0)
  ROOT %c = pred[] compare(%s.2#0, %s.2#0), direction=LT
}

ENTRY %main (packed: s32[1000], table: bf16[500,64], weight: bf16[128,64], cache: bf16[99,16]) -> bf16[99,16] {
  %packed = s32[1000]{0} parameter(0)
  %table = bf16[500,64]{1,0} parameter(1)
  %weight = bf16[128,64]{1,0} parameter(2)
  %cache = bf16[99,16]{1,0} parameter(3)
  %ids = s32[8]{0} fusion(%packed), kind=kLoop, calls=%sliced, metadata={op_name="jit(forward)/slice"}
  %rows = bf16[8,64]{1,0} fusion(%table, %ids), kind=kLoop, calls=%gathered
  %seen = bf16[8,64]{1,0} custom-call(%rows, %cache), custom_call_target="mosaic_gpu_v2", \
metadata={op_name="jit(forward)/paged_decode_attention/mpmd_map"}
  %out = f32[8,128]{1,0} fusion(%seen, %weight), kind=kCustom, calls=%multiplied
  %again = f32[8,64]{1,0} bitcast(%out)
  %loop = (s32[], f32[8]{0}) while(%state), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"31"}}
  ROOT %stored = bf16[99,16]{1,0} custom-call(%seen, %cache), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(forward)/jit(store_kv)/store_kv/pallas_call"}
}
"""

THUNKS = """000: kCommandBuffer [source | sink]
    001: kCopy         [source       | next=003 (2) ] kCopy
    002: kCustomKernel [source       | sink] gemm_fusion_dot grid: [4, 1, 1] threads: [128, 1, 1]
    003: kDynamicSliceFusion [prev=013 (1) | next=016 (1) ] params=5, results=1
        004: kCustomCall [source | sink] kCustomCall
"""


def test_fused_slices_and_gathers_count_what_they_take() -> None:
    ids, rows = launches(HLO)[:2]
    assert (ids.kind, ids.bytes_read, ids.bytes_written) == ("small", 8 * 4, 8 * 4)
    assert (rows.bytes_read, rows.bytes_written) == (8 * 64 * 2 + 8 * 4, 8 * 64 * 2)


def test_pallas_kernels_are_known_and_do_not_count_the_cache() -> None:
    attention, store = (each for each in launches(HLO, [(99, 16)]) if each.kind in ("attention", "pallas"))
    assert (attention.kind, attention.bytes_read, attention.bytes_written) == ("attention", 1024, 1024)
    assert (store.kind, store.bytes_read, store.bytes_written) == ("pallas", 1024, 0)


def test_products_with_experts_read_the_weights_of_shared_ones_whole() -> None:
    shapes = ("bf16[8,64]", "s32[24]", "s32[5]", "s32[5]", "s32[5]", "bf16[4,128,64]", "bf16[2,1,64,64]")
    inputs = "".join(f"  %p{i} = {shape} parameter({i})\n" for i, shape in enumerate(shapes))
    call = (
        '  ROOT %c = bf16[24,64]{{1,0}} custom-call({}), custom_call_target="__gpu$xla.gpu.triton", '
        'metadata={{op_name="jit(forward)/jit({})/gated_product/pallas_call"}}\n}}\n'
    )
    head, names = "HloModule jit_forward\n\nENTRY %main () -> bf16[24,64] {\n", [f"%p{i}" for i in range(7)]
    (alone,) = launches(head + inputs + call.format(", ".join(names[:6]), "gated_product"))
    (joined,) = launches(head + inputs + call.format(", ".join(names), "products_with_shared"))
    assert (alone.kind, alone.shared_bytes) == ("experts", 0)
    assert (joined.kind, joined.shared_bytes) == ("experts", 2 * 2 * 64 * 64)
    assert joined.bytes_read == alone.bytes_read + joined.shared_bytes


def test_products_have_their_flops() -> None:
    (product,) = (each for each in launches(HLO) if each.kind == "product")
    assert product.flops == 2 * 8 * 128 * 64
    assert product.bytes_read == 2 * 64 * (8 + 128) and product.bytes_written == 4 * 8 * 128


def test_one_row_times_a_matrix_is_a_product_although_xla_writes_a_sum() -> None:
    text = """HloModule jit_forward

%summed (x: bf16[1,1024], w: bf16[1024,1024]) -> f32[1,1024] {
  %x = bf16[1,1024]{1,0} parameter(0)
  %w = bf16[1024,1024]{1,0} parameter(1)
  ROOT %r = f32[1,1024]{1,0} reduce(%w, %x), dimensions={1}
}

ENTRY %main (x: bf16[1,1024], w: bf16[1024,1024]) -> f32[1,1024] {
  %x.1 = bf16[1,1024]{1,0} parameter(0)
  %w.1 = bf16[1024,1024]{1,0} parameter(1)
  %same = bf16[1024,1024]{1,0} bitcast(%w.1)
  ROOT %sum = f32[1,1024]{1,0} fusion(%x.1, %same), kind=kInput, calls=%summed
}
"""
    (found,) = launches(text)
    assert found.kind == "product"


def test_products_that_convert_weights_have_flops_and_read_them_as_they_are() -> None:
    text = """HloModule jit_forward

ENTRY %main (x: bf16[8,256], w: s4[64,256], s: f32[64,2]) -> f32[2,8,64] {
  %x = bf16[8,256]{1,0} parameter(0)
  %w = s4[64,256]{1,0:E(4)} parameter(1)
  %s = f32[64,2]{1,0} parameter(2)
  %bytes = u8[64,128]{1,0} bitcast(%w)
  ROOT %parts = f32[2,8,64]{2,1,0} custom-call(%x, %bytes, %s), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(forward)/jit(quantized_product)/quantized_product/pallas_call"}
}
"""
    (found,) = launches(text)
    assert (found.kind, found.flops) == ("quantized", 2 * 8 * 256 * 64)
    assert (found.bytes_read, found.bytes_written) == (2 * 8 * 256 + 64 * 128 + 4 * 64 * 2, 4 * 2 * 8 * 64)


def test_products_of_float8_have_flops_and_rows_that_are_rounded_have_none() -> None:
    text = """HloModule jit_forward

ENTRY %main (x: bf16[8,256], w: f8e4m3fn[64,256], s: f32[64,2]) -> bf16[8,64] {
  %x = bf16[8,256]{1,0} parameter(0)
  %w = f8e4m3fn[64,256]{1,0} parameter(1)
  %s = f32[64,2]{1,0} parameter(2)
  %rows = (f8e4m3fn[8,256]{1,0}, f32[8,2]{1,0}) custom-call(%x), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(forward)/jit(float8_rows)/float8_rows/pallas_call"}
  %numbers = f8e4m3fn[8,256]{1,0} get-tuple-element(%rows), index=0
  %scale = f32[8,2]{1,0} get-tuple-element(%rows), index=1
  ROOT %y = bf16[8,64]{1,0} custom-call(%numbers, %w, %scale, %s), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(forward)/jit(float8_product)/float8_product/pallas_call"}
}
"""
    by_hopper = text.replace("float8_product", "float8_product_of_many")
    assert [(each.kind, each.flops) for each in launches(by_hopper)][1] == ("float8 of many", 2 * 8 * 256 * 64)
    rounded, product = launches(text)
    assert (rounded.kind, rounded.flops, rounded.bytes_written) == ("pallas", 0, 8 * 256 + 4 * 8 * 2)
    assert (product.kind, product.flops) == ("float8", 2 * 8 * 256 * 64)
    assert product.bytes_read == 8 * 256 + 64 * 256 + 4 * (8 * 2 + 64 * 2)


def test_rows_of_many_experts_meet_one_matrix_each() -> None:
    text = """HloModule jit_forward

ENTRY %main (x: f8e4m3fn[512,256], w: f8e4m3fn[4,64,256], s: f32[2,512]) -> bf16[512,64] {
  %x = f8e4m3fn[512,256]{1,0} parameter(0)
  %w = f8e4m3fn[4,64,256]{2,1,0} parameter(1)
  %s = f32[2,512]{1,0} parameter(2)
  ROOT %y = bf16[512,64]{1,0} custom-call(%x, %w, %s), custom_call_target="mosaic_gpu_v2", \
metadata={op_name="jit(forward)/jit(_product_of_many)/grouped_float8_product_of_many/mpmd_map"}
}
"""
    (product,) = launches(text)
    assert (product.kind, product.flops) == ("float8 experts of many", 2 * 512 * 256 * 64)


# As XLA writes it for a TPU: weights pass a fusion of a bitcast, copies run beside kernels; S(1) is its own memory.
TPU_HLO = """HloModule jit_forward, is_scheduled=true

%same (b: bf16[2,64,32]) -> bf16[2,64,32] {
  %b = bf16[2,64,32]{2,1,0:T(8,128)(2,1)} parameter(0)
  ROOT %bitcast = bf16[2,64,32]{2,1,0:T(8,128)(2,1)} bitcast(%b)
}

%multiplied (x: bf16[8,32], w: bf16[2,64,32]) -> f32[8,2,64] {
  %x = bf16[8,32,1]{1,0,2:T(8,128)(2,1)S(1)} parameter(0)
  %w = bf16[2,64,32]{2,1,0:T(8,128)(2,1)} parameter(1)
  %v = bf16[2,64,32]{2,1,0:T(8,128)(2,1)} fusion(%w), kind=kLoop, calls=%same
  ROOT %c = f32[8,2,64]{2,1,0:T(8,128)S(1)} convolution(%x, %v), window={size=2 pad=1_1}, dim_labels=bf0_0oi->b0f
}

ENTRY %main (x: bf16[8,32], w: bf16[2,64,32], next: bf16[64,32]) -> f32[8,2,64] {
  %x.1 = bf16[8,32,1]{1,0,2:T(8,128)(2,1)S(1)} parameter(0)
  %w.1 = bf16[2,64,32]{2,1,0:T(8,128)(2,1)} parameter(1)
  %next = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(2)
  %start = (bf16[64,32]{1,0:T(8,128)(2,1)S(1)}, bf16[64,32]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%next)
  %back = ((bf16[64,32]{1,0:S(1)}), bf16[16,32]{1,0:T(8,128)}, s32[]{:S(2)}) slice-start(%start#0), slice={[0:16]}
  ROOT %out = f32[8,2,64]{2,1,0:T(8,128)S(1)} fusion(%x.1, %w.1), kind=kOutput, calls=%multiplied
}
"""


def test_weights_that_pass_a_fused_bitcast_are_read() -> None:
    product = launches(TPU_HLO)[-1]
    assert product.kind == "product" and product.bytes_read == 2 * 2 * 64 * 32 and product.bytes_written == 0
    assert product.flops == 2 * 8 * 2 * 64 * 32


def test_copies_of_a_tpu_count_on_the_side_that_is_not_its_own_memory() -> None:
    start, back = launches(TPU_HLO)[:2]
    assert (start.kind, start.bytes_read, start.bytes_written) == ("prefetch", 2 * 64 * 32, 0)
    assert (back.kind, back.bytes_read, back.bytes_written) == ("prefetch", 0, 2 * 16 * 32)


def test_a_matrix_that_the_step_before_fetched_counts_once() -> None:
    again = (
        "%again = (bf16[64,32]{1,0:S(1)}, bf16[64,32]{1,0}, u32[]) copy-start(%next), cross_program_prefetch_index=0"
    )
    text = TPU_HLO.replace("  %start =", f"  {again}\n  %start =")
    assert launches(text) == launches(TPU_HLO)


def test_a_step_that_seems_to_read_less_than_its_weights_was_counted_wrong(tmp_path: Path) -> None:
    read = launch_report(TPU_HLO, tmp_path, (), None)["bytes_read"]
    assert not launch_report(TPU_HLO, tmp_path, (), None, weight_bytes=read)["problems"]
    (problem,) = launch_report(TPU_HLO, tmp_path, (), None, weight_bytes=2 * read)["problems"]
    assert problem == f"{read} bytes read are counted, the weights have {2 * read}"


def test_matrices_that_are_fetched_ahead_count_for_each_layer(tmp_path: Path) -> None:
    """All are fetched before the last layer here; in a step of more layers each fetches as much as it multiplies."""
    layers = range(3)
    text = "HloModule jit_forward\n\nENTRY %main () -> f32[8] {\n" + "\n".join(
        (
            *(f"  %w.{i} = bf16[64,32]{{1,0}} parameter({i})" for i in layers),
            *(f"  %s.{i} = (bf16[64,32]{{1,0:S(1)}}, bf16[64,32]{{1,0}}, u32[]) copy-start(%w.{i})" for i in layers),
            *(
                f'  %a.{i} = f32[8]{{0:S(1)}} custom-call(%s.{i}#0), custom_call_target="tpu_custom_call", '
                'metadata={op_name="paged_decode_attention/pallas_call"}'
                for i in layers
            ),
            "}\n",
        )
    )
    assert launch_report(text, tmp_path, (), Layers(3, 10))["bytes_read"] == 10 * 2 * 64 * 32
    read_in_place = re.sub("  %s.0 = .*\n", "", text).replace("custom-call(%s.0#0)", "custom-call(%w.0)")
    assert launch_report(read_in_place, tmp_path, (), Layers(3, 10))["bytes_read"] == 10 * 2 * 64 * 32


def test_layers_that_recur_in_groups_are_multiplied_as_groups(tmp_path: Path) -> None:
    """Of three layers one attends and two update states; three of eight groups were compiled."""
    assert Layers(9, 24, recurring=3).left_out == 5
    kernels = ["delta_decode", "delta_decode", "paged_decode_attention"] * 3
    text = "HloModule jit_forward\n\nENTRY %main () -> f32[8] {\n" + "\n".join(
        (
            "  %w = bf16[64,32]{1,0} parameter(0)",
            *(
                f'  %a.{i} = f32[8]{{0}} custom-call(%w), custom_call_target="__gpu$xla.gpu.triton", '
                f'metadata={{op_name="jit(forward)/jit({name})/{name}/pallas_call"}}'
                for i, name in enumerate(kernels)
            ),
            "}\n",
        )
    )
    report = launch_report(text, tmp_path, (), Layers(9, 24, recurring=3))
    assert (report["num_layers"], report["recurring"]) == (24, 3)
    assert report["layer_kinds"] == {"attention": 1, "states": 2}
    assert {each["kind"]: each["count"] for each in report["kernels"]} == {"attention": 8, "states": 16}
    assert report["bytes_read"] == 24 * 2 * 64 * 32


def test_a_program_of_all_layers_is_counted_as_it_is(tmp_path: Path) -> None:
    """Also if it attends once, in whatever layer."""
    text = """HloModule jit_forward

ENTRY %main () -> f32[8] {
  %w = bf16[64,32]{1,0} parameter(0)
  %a = f32[8]{0} custom-call(%w), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(forward)/jit(delta_step)/delta_step/pallas_call"}
  ROOT %b = f32[8]{0} custom-call(%w), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(forward)/jit(attend)/paged_decode_attention/pallas_call"}
}
"""
    report = launch_report(text, tmp_path, (), Layers(3, 3, recurring=3))
    assert report["layer_kinds"] == {"attention": 1, "states": 1} and report["num_launches"] == 2
    assert report["bytes_read"] == 2 * 2 * 64 * 32


@pytest.mark.parametrize("kernel", ["merge_splits", "merge_latents"])
def test_a_split_decode_is_attention_and_a_merge(kernel: str) -> None:
    text = "HloModule jit_forward\n\nENTRY %main () -> f32[8] {\n  %w = f32[64]{0} parameter(0)\n" + "".join(
        f'  %a.{i} = f32[8]{{0}} custom-call(%w), custom_call_target="__gpu$xla.gpu.triton", '
        f'metadata={{op_name="jit(forward)/jit(decode_latents)/{name}/pallas_call"}}\n'
        for i, name in enumerate(("paged_decode_attention", kernel))
    )
    assert [each.kind for each in launches(text + "}\n")] == ["attention", "merge"]


def test_kernels_of_a_loop_count_for_each_of_its_runs_and_known_turns_need_no_condition() -> None:
    assert [(each.name, each.times) for each in launches(HLO) if each.times > 1] == [("n", 31)]
    unknown = HLO.replace("known_trip_count", "no_trip_count")
    assert [(each.name, each.times) for each in launches(unknown) if each.times != 1] == [("c", 0), ("n", 0)]


# Two conditions that one comparison decides, and one that another number does: on the side of "true" of the first two
# are one kernel and three, on the other two and one.
CONDITIONS = """HloModule jit_forward

%copies_1 (p: f32[8]) -> f32[8] {
  ROOT %one = f32[8]{0} copy(%p)
}

%copies_2 (p: f32[8]) -> f32[8] {
  %first = f32[8]{0} copy(%p)
  ROOT %second = f32[8]{0} copy(%first)
}

%attends_3 (p: f32[8]) -> f32[8] {
  %a = f32[8]{0} custom-call(%p), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(forward)/cond/branch_0_fun/jit(attend_to_chosen)/attend_to_chosen/pallas_call"}
  %b = f32[8]{0} copy(%a)
  ROOT %c = f32[8]{0} copy(%b)
}

%attends_1 (p: f32[8]) -> f32[8] {
  ROOT %all = f32[8]{0} custom-call(%p), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(forward)/cond/branch_1_fun/jit(attend)/paged_decode_attention/pallas_call"}
}

ENTRY %main (x: f32[8], n: s32[]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %n = s32[] parameter(1)
  %less = pred[] fusion(%n), kind=kLoop, calls=%compared
  %again = pred[] bitcast(%less)
  %y = f32[8]{0} conditional(%less, %x, %x), true_computation=%copies_1, false_computation=%copies_2
  %z = f32[8]{0} conditional(%again, %y, %y), true_computation=%attends_3, false_computation=%attends_1
  ROOT %w = f32[8]{0} conditional(%n, %z, %z, %z), branch_computations={%copies_1, %copies_2, %copies_1}
}

%compared (n: s32[]) -> pred[] {
  %n.1 = s32[] parameter(0)
  ROOT %c.1 = pred[] compare(%n.1, %n.1), direction=LT
}
"""


def test_of_branches_those_on_the_largest_side_of_their_condition_are_launched(tmp_path: Path) -> None:
    """Four kernels on the side of "true", three on the other; all conditions of one comparison take the same side."""
    found = [(each.name, each.kind, each.is_branched) for each in launches(CONDITIONS)]
    taken = [("one", "small"), ("a", "attention"), ("b", "small"), ("c", "small"), ("first", "small")]
    assert found == [("less", "small", False), *((*each, True) for each in taken), ("second", "small", True)]
    report = launch_report(CONDITIONS, tmp_path, (), Layers(1, 1))
    assert (report["num_launches"], report["num_branched"]) == (7, 6)
    smaller = CONDITIONS.replace("  %b = f32[8]{0} copy(%a)\n", "").replace("copy(%b)", "bitcast(%a)")
    kinds = [each.source.split("/")[-2] for each in launches(smaller) if each.kind == "attention"]
    assert kinds == ["paged_decode_attention"]  # two kernels against three


def test_types_have_their_bytes() -> None:
    assert num_bytes("(bf16[8,4]{1,0:T(8,128)(2,1)}, /*index=1*/s32[2]{0}, pred[], f8e4m3fn[16]{0})") == 64 + 8 + 1 + 16


def _launch(kind: str) -> Launch:
    return Launch("name", kind, "", 1, 1, 0, 1)


def test_a_layer_lies_between_the_last_two_attention_kernels() -> None:
    first, rest = ("small", "attention", "product"), ("small", "pallas", "attention", "product")
    layer, before = last_layers([_launch(kind) for kind in (*first, *rest, *rest, *rest)], Layers(4, 9))
    assert [each.kind for each in layer] == ["attention", "product", "small", "pallas"]
    assert [each.kind for each in before] == [each.kind for each in layer]


def test_the_first_layers_may_launch_what_is_made_once_and_groups_begin_at_any_layer() -> None:
    """Of two layers both attend, the second with a mask that the first such layer makes."""
    plain, masked = ("attention", "product"), ("attention", "pallas")
    kinds = (*plain, "small", *masked, *(*plain, *masked) * 2, *plain)
    layer, before = last_layers([_launch(kind) for kind in kinds], Layers(7, 21, recurring=2))
    assert [each.kind for each in layer] == [each.kind for each in before] == [*plain, *masked]


def test_a_group_has_the_attention_kernels_of_its_own_layers_that_attend() -> None:
    """Kimi Linear's fourth layers; 15 of 27 are compiled, since the first one is another, and groups are left out."""
    layers = Layers(15, 27, recurring=4, attending=(4, 8, 12))
    assert layers.left_out == 3
    group = ("attention", "product", *("states", "product") * 3)
    kinds = ("small", *group[2:], "states", "small", *group * 3)
    layer, before = last_layers([_launch(kind) for kind in kinds], layers)
    assert [each.kind for each in layer] == [each.kind for each in before] == list(group)


def test_attention_kernels_that_no_number_of_layers_explains_are_refused() -> None:
    with pytest.raises(ValueError, match="3 attention kernels in 2 layers that attend"):
        last_layers([_launch("attention")] * 3, Layers(2, 9))


def test_a_step_in_one_command_buffer_launches_nothing_outside() -> None:
    assert read(THUNKS).count == 1 and not read(THUNKS).outside


def test_thunks_between_command_buffers_are_named(tmp_path: Path) -> None:
    (tmp_path / "module_0001.jit_forward.thunk_sequence_after_thunk_passes.txt").write_text(
        "000: kCommandBuffer [source | sink]\n    001: kCopy [source | sink] kCopy\n"
        "002: kCustomCall [source | sink] kCustomCall\n003: kCommandBuffer [source | sink]\n"
    )
    (problem,) = launch_report(HLO, tmp_path, (), None)["problems"]
    assert problem == "2 command buffers; kCustomCall outside of them"


def test_a_condition_in_no_command_buffer_is_named(tmp_path: Path) -> None:
    """As one whose branch holds a loop is: the host reads what decides it."""
    (tmp_path / "module_0001.jit_forward.thunk_sequence_after_thunk_passes.txt").write_text(
        "000: kCommandBuffer [source]\n    001: kCopy [source | sink] kCopy\n002: kConditional  [sink]   \n"
        "      false_branch:\n        003: kCustomKernel [source | sink] k_zeros grid: [1, 1, 1]\n"
        "      true_branch:\n    000: kCommandBuffer [source | sink] \n        004: kCustomKernel [source | sink] k_1\n"
    )
    (problem,) = launch_report(HLO, tmp_path, (), None)["problems"]
    assert problem == "2 command buffers; kConditional, k_zeros outside of them"


@pytest.mark.parametrize(("turns", "problems"), [("known", []), ("no", ["2 command buffers; k_less outside of them"])])
def test_the_body_of_a_loop_is_a_command_buffer_of_its_own_if_its_turns_are_known(
    tmp_path: Path, turns: str, problems: list[str]
) -> None:
    (tmp_path / "module_0001.jit_forward.thunk_sequence_after_thunk_passes.txt").write_text(
        "000: kCommandBuffer [source]\n    001: kCopy [source | sink] kCopy\n002: kWhile         [sink]   \n"
        "condition:\n    003: kCustomKernel [source | sink] k_less grid: [1, 1, 1]\n"
        "  body:\n    000: kCommandBuffer [source | sink] \n        004: kCustomKernel [source | sink] k_1\n"
    )
    report = launch_report(HLO.replace("known_trip_count", f"{turns}_trip_count"), tmp_path, (), None)
    assert report["problems"] == problems
    assert report["command_buffers"] == 2


def test_a_step_whose_layers_cannot_be_told_apart_has_a_problem_and_ends_no_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*_: object) -> dict[str, Any]:
        raise ValueError("3 attention kernels in 4 layers")

    monkeypatch.setattr(compile_for, "_launches", fails)
    program: Any = SimpleNamespace(steps=("p",), facts={})
    assert compile_for._reported(program, "", tmp_path) == {"problems": ["launches: 3 attention kernels in 4 layers"]}
