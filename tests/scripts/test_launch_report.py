"""What a compiled program launches is read from its optimized HLO and from XLA's dump of thunks."""

import pytest
from bench.targets.hlo import Launch, launches, num_bytes
from bench.targets.launch_report import last_layers, launch_report
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


def test_kernels_of_a_loop_count_for_each_of_its_runs() -> None:
    assert [(each.name, each.times) for each in launches(HLO) if each.times > 1] == [("c", 31), ("n", 31)]


def test_types_have_their_bytes() -> None:
    assert num_bytes("(bf16[8,4]{1,0:T(8,128)(2,1)}, /*index=1*/s32[2]{0}, pred[], f8e4m3fn[16]{0})") == 64 + 8 + 1 + 16


def _launch(kind: str) -> Launch:
    return Launch("name", kind, "", 1, 1, 0, 1)


def test_a_layer_lies_between_the_last_two_attention_kernels() -> None:
    first, rest = ("small", "attention", "product"), ("small", "pallas", "attention", "product")
    layer, before = last_layers([_launch(kind) for kind in (*first, *rest, *rest, *rest)], 4)
    assert [each.kind for each in layer] == ["attention", "product", "small", "pallas"]
    assert [each.kind for each in before] == [each.kind for each in layer]


def test_attention_kernels_that_no_number_of_layers_explains_are_refused() -> None:
    with pytest.raises(ValueError, match="3 attention kernels in 2 layers"):
        last_layers([_launch("attention")] * 3, 2)


def test_a_step_in_one_command_buffer_launches_nothing_outside() -> None:
    assert read(THUNKS).count == 1 and not read(THUNKS).outside


def test_thunks_between_command_buffers_are_named(tmp_path) -> None:
    (tmp_path / "module_0001.jit_forward.thunk_sequence_after_thunk_passes.txt").write_text(
        "000: kCommandBuffer [source | sink]\n    001: kCopy [source | sink] kCopy\n"
        "002: kCustomCall [source | sink] kCustomCall\n003: kCommandBuffer [source | sink]\n"
    )
    (problem,) = launch_report(HLO, tmp_path, (), None)["problems"]
    assert problem == "2 command buffers; kCustomCall outside of them"
