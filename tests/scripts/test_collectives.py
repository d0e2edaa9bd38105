"""What devices exchange is counted in the optimized HLO, and held against what tensor parallelism needs."""

from pathlib import Path

import pytest
from bench.targets.collectives import Wanted, num_peers, problems_of, sent
from bench.targets.hlo import launches
from bench.targets.launch_report import Layers, launch_report
from bench.targets.thunks import SUFFIX

pytestmark = pytest.mark.unit

# As XLA writes them for GPUs (started and done, or at once) and TPUs (in the chip's own memory, fused with a slice).
HLO = """HloModule jit_forward, is_scheduled=true, num_partitions=8

%summed (a: bf16[64,32]) -> bf16[8,32] {
  %a = bf16[64,32]{1,0:S(1)} parameter(0)
  %all = bf16[64,32]{1,0:S(1)} all-reduce(%a), replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %mine = bf16[8,32]{1,0:S(1)} slice(%all), slice={[0:8]}
}

%scattered (b: bf16[64,32]) -> bf16[8,32] {
  %b = bf16[64,32]{1,0} parameter(0)
  ROOT %part = bf16[8,32]{1,0} reduce-scatter(%b), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, to_apply=%add
}

%all-reduce-scatter (c: bf16[64,32]) -> bf16[9,32] {
  %c = bf16[64,32]{1,0} parameter(0)
  %pad = bf16[72,32]{1,0} pad(%c, %zero), padding=0_8x0_0
  %each = bf16[72,32]{1,0} all-reduce(%pad), replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %padded = bf16[9,32]{1,0} dynamic-slice(%each, %number, %zero), dynamic_slice_sizes={9,32}
}

ENTRY %main (x: bf16[64,32], best: s32[64,2]) -> s32[64,16] {
  %x = bf16[64,32]{1,0} parameter(0)
  %best = s32[64,2]{1,0} parameter(1)
  %sum = ((bf16[64,32]), bf16[64,32]) all-reduce-start(%x), replica_groups=mesh['data'=1,'tensor'=8] {'tensor'}
  %sum.1 = bf16[64,32]{1,0} all-reduce-done(%sum)
  %fused = bf16[8,32]{1,0:S(1)} fusion(%sum.1), kind=kOutput, calls=%summed
  %start = ((bf16[64,32]{1,0}), bf16[8,32]{1,0}) async-start(%sum.1), calls=%scattered
  %done = bf16[8,32]{1,0} async-done(%start)
  %whole = (bf16[8,32]{1,0}, bf16[64,32]{1,0}) all-gather-start(%done), replica_groups={{0,1,2,3,4,5,6,7}}
  %whole.1 = bf16[64,32]{1,0} all-gather-done(%whole)
  %ring = bf16[9,32] fusion(%sum.1), calls=%all-reduce-scatter, backend_config={"x":"SingleInputAllReduceScatterFusion"}
  ROOT %all = s32[64,16]{1,0} all-gather(%best), replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={1}
}
"""
RESIDUAL = 64 * 32 * 2
WANTED = Wanted(num_devices=8, residual_bytes=RESIDUAL, num_rows=4)


def test_collectives_are_counted_with_their_bytes_and_peers() -> None:
    found = [(each.kind, each.bytes_read, each.bytes_written, each.peers) for each in launches(HLO)]
    assert found == [
        ("all-reduce", RESIDUAL, RESIDUAL, 8),
        ("all-reduce", RESIDUAL, RESIDUAL, 8),
        ("reduce-scatter", RESIDUAL, RESIDUAL // 8, 8),
        ("all-gather", RESIDUAL // 8, RESIDUAL, 8),
        ("reduce-scatter", 72 * 32 * 2, 9 * 32 * 2, 8),
        ("all-gather", 64 * 2 * 4, 64 * 16 * 4, 2),
    ]


def test_groups_of_two_axes_have_the_devices_of_both() -> None:
    assert num_peers("replica_groups=mesh['data'=2,'tensor'=4] {'data','tensor'}") == 8
    assert num_peers("replica_groups=mesh['data'=2,'tensor'=4] {'tensor'}") == 4


def test_two_sums_of_the_residual_stream_are_what_a_layer_needs() -> None:
    one = ("all-reduce", RESIDUAL)
    assert problems_of([one, one], [one, ("all-gather", 4 * 8 * 8)], WANTED) == []
    (problem,) = problems_of([one, one, ("all-gather", 0)], [], WANTED)
    assert problem == "a layer has 1 all-gather, 2 all-reduce; 2 all-reduce are needed"
    (problem,) = problems_of([one, ("all-reduce", 2 * RESIDUAL)], [], WANTED)  # as float32
    assert problem == f"collectives of a layer carry {3 * RESIDUAL} bytes; {2 * RESIDUAL} are needed"


def test_layers_that_recur_in_groups_need_the_sums_of_each() -> None:
    pairs = Wanted(num_devices=8, residual_bytes=RESIDUAL, num_rows=4, recurring=2)
    one = ("all-reduce", RESIDUAL)
    assert problems_of([one] * 4, [], pairs) == []
    assert [problem.split(";")[0] for problem in problems_of([one] * 5, [], pairs)] == [
        "a group of 2 layers has 5 all-reduce",
        f"collectives of a group of 2 layers carry {5 * RESIDUAL} bytes",
    ]


def test_a_sum_that_is_scattered_and_gathered_again_is_one() -> None:
    halves = [("reduce-scatter", RESIDUAL), ("all-gather", RESIDUAL)]
    assert problems_of([*halves, *halves], [], WANTED) == []


def test_ranks_gather_their_tokens_and_scatter_their_sums_once_a_layer() -> None:
    """Next to the sums within each rank. A TPU writes a small scatter as a sum of all."""
    ranks = Wanted(num_devices=8, residual_bytes=RESIDUAL, num_rows=4, num_ranks=2)
    within = [("all-reduce", RESIDUAL)] * 2
    gathered, scattered = ("all-gather", 2 * RESIDUAL), ("reduce-scatter", 2 * RESIDUAL)
    embedding_and_flags = [("all-reduce", RESIDUAL), ("all-gather", 2 * 64)]
    assert problems_of([*within, gathered, scattered], embedding_and_flags, ranks) == []
    assert problems_of([*within, gathered, ("all-reduce", 2 * RESIDUAL)], embedding_and_flags, ranks) == []
    padded, edges = ("reduce-scatter", 2 * RESIDUAL + 32), ("collective-permute", 32)
    assert problems_of([*within, gathered, padded, edges], embedding_and_flags, ranks) == []
    assert len(problems_of([*within, gathered, scattered, ("collective-permute", RESIDUAL // 8)], [], ranks)) == 2
    twice = problems_of([*within, gathered, gathered, scattered], embedding_and_flags, ranks)
    assert [problem.split(";")[0] for problem in twice] == [
        "a layer has 2 all-gather, 2 all-reduce, 1 reduce-scatter",
        f"collectives of a layer carry {8 * RESIDUAL} bytes",
    ]
    alone = Wanted(num_devices=8, residual_bytes=RESIDUAL, num_rows=4, num_ranks=8)  # a device each: nothing to add up
    assert problems_of([("all-gather", 8 * RESIDUAL), ("reduce-scatter", 8 * RESIDUAL)], [], alone) == []
    assert len(problems_of([*within, ("all-gather", 8 * RESIDUAL), ("reduce-scatter", 8 * RESIDUAL)], [], alone)) == 2


def test_logits_that_are_gathered_for_greedy_tokens_are_a_problem() -> None:
    logits = ("all-gather", 4 * 151_936 * 4)
    (problem,) = problems_of([], [("all-reduce", RESIDUAL), logits], WANTED)
    assert problem.startswith(f"collectives outside of layers carry {RESIDUAL + logits[1]} bytes")


def test_a_ring_sends_a_sum_nearly_twice_and_a_gathered_array_once() -> None:
    assert sent("all-reduce", 800, 8) == 1400
    assert sent("all-gather", 800, 8) == sent("reduce-scatter", 800, 8) == 700


LAYERS, REDUCED = 4, "  %{name} = bf16[64,32]{{1,0}} all-reduce(%x), replica_groups={{{{0,1,2,3,4,5,6,7}}}}"
ATTENTION = (
    '  %{name} = bf16[64,32]{{1,0}} custom-call(%x), custom_call_target="mosaic_gpu_v2", '
    'metadata={{op_name="paged_decode_attention/mpmd_map"}}'
)


def program(*, sums: int) -> str:
    """A step of 4 layers with so many sums each, and one for the embedding."""
    body = ["  %x = bf16[64,32]{1,0} parameter(0)", REDUCED.format(name="embedded")]
    for layer in range(LAYERS):
        body += [ATTENTION.format(name=f"attention.{layer}")]
        body += [REDUCED.format(name=f"sum.{layer}.{each}") for each in range(sums)]
    head = "HloModule jit_forward, is_scheduled=true\n", "ENTRY %main (x: bf16[64,32]) -> bf16[64,32] {"
    return "\n".join((*head, *body, "}\n"))


def test_a_step_on_several_devices_reports_what_it_exchanges(tmp_path: Path) -> None:
    report = launch_report(program(sums=2), tmp_path, (), Layers(LAYERS, 10), wanted=WANTED)
    assert not report["problems"]
    assert report["exchanged"] == [{"kind": "all-reduce", "by": "", "bytes": RESIDUAL, "peers": 8, "count": 21}]
    assert report["layer_kinds"] == {"attention": 1, "all-reduce": 2}
    (problem,) = launch_report(program(sums=3), tmp_path, (), Layers(LAYERS, 10), wanted=WANTED)["problems"][:1]
    assert problem == "a layer has 3 all-reduce; 2 all-reduce are needed"


def test_collectives_cut_a_step_into_command_buffers_at_every_layer(tmp_path: Path) -> None:
    """XLA leaves them out by default. On one device anything outside is a problem."""
    thunks = ["000: kCommandBuffer [source] ", "    001: kCopy [source] kCopy", "002: kAllReduce [source] kAllReduce"]
    loose = ["003: kCustomKernel [source] silu grid: [1]"]
    dump = "\n".join([*thunks, *loose, *thunks] * LAYERS)
    (tmp_path / f"module_0001.jit_forward.{SUFFIX}").write_text(dump)
    report = launch_report(program(sums=2), tmp_path, (), Layers(LAYERS, 10), wanted=WANTED)
    assert not report["problems"]
    assert (report["command_buffers"], report["loose_kernels"]) == (20, 10)
    (problem,) = launch_report(program(sums=2), tmp_path, (), Layers(LAYERS, 10))["problems"]
    assert problem == "8 command buffers; kAllReduce, silu outside of them"


@pytest.mark.parametrize(
    ("strategy", "by"), [("TRITON_ONE_SHOT", "one-shot"), ("TRITON_TWO_SHOT", "two-shot"), ("DEFAULT", "")]
)
def test_a_sum_names_the_kernel_of_xlas_that_makes_it(strategy: str, by: str) -> None:
    config = f', backend_config={{"collective_backend_config":{{"kernel_strategy":"KERNEL_STRATEGY_{strategy}"}}}}'
    (found,) = launches(program(sums=0).replace("all-reduce(%x),", "all-reduce(%x)," + config), ())[:1]
    assert (found.kind, found.by) == ("all-reduce", by)
