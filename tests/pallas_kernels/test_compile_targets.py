"""Kernels and engine steps compile for GPUs and TPUs that aren't there, and the compilers made what was meant."""

import os
import re
from operator import attrgetter
from pathlib import Path

import pytest
from bench.processes import python_path
from bench.targets.gpu_code import kernels_in
from bench.targets.targets import TARGETS, Target, make_environment, missing_for

from tests.grids import NIGHTLY
from tests.pallas_kernels.elsewhere import ENVIRONMENTS, compile_for, run

pytestmark = pytest.mark.foreign

PTX = """
.version 8.0
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 smem[];
.visible .entry store_kv_like(.param .u64 out) {
    .reg .b64 %rd<2>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %tid.x;
    st.global.v4.u32 [%rd1], {%r1, %r1, %r1, %r1};
    ret;
}
.visible .entry fusion_7() { ret; }
"""


by_night = pytest.mark.skipif(not NIGHTLY, reason="installs compilers; by day kernels are lowered (test_lowering.py)")
# The newer chip of a platform gets all but two groups on pages of 16 tokens, the older one a group on pages of 64.
NEWER, OLDER = r"^(?!.*_g[28]_p16_)", r"_g4_p64_|^quantized_product_256|^step_"


@by_night
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", TARGETS.values(), ids=attrgetter("name"))
def test_everything_compiles_in_place_without_spills(target: Target, tmp_path: Path) -> None:
    programs = NEWER if target.name in ("h200", "v6e") else OLDER
    results = compile_for(target, tmp_path, "--grid", "common", "--match", programs)
    if isinstance(results, str):
        pytest.skip(results)
    assert not [result for result in results if result["problems"]]
    compiled = [result for result in results if "compile_s" in result]
    for backend in target.backends:
        names = " ".join(result["program"] for result in compiled if result["backend"] == backend)
        others = {
            "triton": ("store_kv", "store_rotated", "quantized_product"),
            "mosaic_tpu": ("store_kv", "store_decoded"),
        }
        attending = "paged_decode_attention", "paged_extend_attention"
        for op in (*others.get(backend, ()), *attending, "step_decode", "step_extend"):
            assert op in names, f"{backend} compiled no {op}"
    if target.platform == "cuda":  # a step is one CUDA graph, whichever kernels it runs
        launches = {result["program"]: result["launches"] for result in compiled if result.get("steps")}
        assert len(launches) == 2 * (1 + len(target.backends)), launches
        assert {each["command_buffers"] for each in launches.values()} == {1}, launches


# Of Triton's steps those of the smallest model and of one with experts; the fewest rows and the most; one vocabulary.
FEW_TRITON = r"(?!(qwen3-8b|phi3).* triton$)"
STEPS = {
    "decode": rf"^{FEW_TRITON}.* decode (1|256) ",
    "others": rf"^{FEW_TRITON}(?!.* decode |.* of 32064$)",
}


@by_night
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("programs", STEPS.values(), ids=STEPS)
def test_steps_of_served_models_are_one_command_buffer_with_few_kernels(programs: str, tmp_path: Path) -> None:
    results = compile_for(TARGETS["h200"], tmp_path, "--grid", "steps", "--match", programs)
    if isinstance(results, str):
        pytest.skip(results)
    assert not [result for result in results if result["problems"]]
    stepping = [result for result in results if result.get("steps")]  # steps with adapters are only compiled
    assert len(stepping) > 10
    for result in stepping:
        kinds, program = result["launches"]["layer_kinds"], result["program"]
        recurring = result["launches"]["recurring"] or 1
        has_experts = any("experts" in kind for kind in kinds)
        most = 12 if has_experts else 13 if "states" in kinds else 5 if "256" in program else 8
        if "states" in kinds and "extend" in program:
            most = 36  # XLA's around the kernel of blocks: the convolution, and corrections inside of blocks
        if program.startswith("qwen3-30b-a3b decode 1 triton"):
            most += 2  # the splits of one row's attention are merged by XLA's kernels
        assert kinds.get("small", 0) + kinds.get("pallas", 0) <= most * recurring, program


def test_advisories_of_ptxas_are_read(tmp_path: Path) -> None:
    """Serialized products are as slow as spills, and ptxas tells of both only in passing."""
    (tmp_path / "module_0001.jit_x.ptx").write_text(PTX)
    ptxas = tmp_path / "ptxas"
    lines = [
        "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
        "insufficient register resources in function 'store_kv_like'",
        "ptxas info    : Compiling entry function 'store_kv_like' for 'sm_90a'",
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads",
        "ptxas info    : Used 24 registers",
    ]
    ptxas.write_text("#!/bin/sh\ncat >&2 <<'END'\n" + "\n".join(lines) + "\nEND\n")
    ptxas.chmod(0o755)
    (kernel,) = kernels_in(tmp_path, ptxas)
    (advisory,) = kernel.advisories
    assert advisory.startswith("C7515 Potential Performance Loss") and kernel.registers == 24


@pytest.fixture
def python() -> Path:
    """That of the environment which compiles for NVIDIA's chips."""
    if reason := missing_for("cuda13", ENVIRONMENTS):
        pytest.skip(reason)
    ENVIRONMENTS.mkdir(exist_ok=True)
    return make_environment("cuda13", ENVIRONMENTS)


@by_night
@pytest.mark.timeout(600)
def test_registers_and_instructions_are_read_from_ptx(python: Path, tmp_path: Path) -> None:
    (tmp_path / "module_0001.jit_x.ptx").write_text(PTX)
    ptxas = next(python.parents[1].glob("lib/python*/site-packages/nvidia/*/bin/ptxas"))
    (kernel,) = kernels_in(tmp_path, ptxas)  # XLA's own fusion_7 is left out
    assert kernel.name == "store_kv_like" and kernel.spill_bytes == 0 and 0 < kernel.registers < 32
    assert kernel.instructions == ("vector store",)


# Compiles Mosaic's decode for an H200.
DECODE_FOR_H200 = """
import sys, tempfile
from pathlib import Path
from bench.targets.targets import TARGETS, prepare_environment
prepare_environment(Path(tempfile.mkdtemp()))
import jax, jax.numpy as jnp
from pallas_kernels import PagedKv, paged_decode_attention
target = TARGETS["h200"]
(device,) = target.devices()
sharding = jax.sharding.SingleDeviceSharding(device)
def spec(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
pages = spec((4, 8, 64, 128), jnp.bfloat16)
def call(q, k, v, table, lengths):
    return paged_decode_attention(q, PagedKv(k, v, table, lengths), backend="mosaic_gpu")
with target.traced_for(device):
    lowered = jax.jit(call).trace(
        spec((2, 16, 128), jnp.bfloat16), pages, pages, spec((2, 1), jnp.int32), spec((2,), jnp.int32)
    ).lower(lowering_platforms=("cuda",))
lowered.compile()
"""


@by_night
@pytest.mark.timeout(600)
def test_mosaic_runs_the_compiler_that_was_chosen_for_it(python: Path, tmp_path: Path) -> None:
    """With an old compiler first on the PATH; the log of the compilers says what ran."""
    old = tmp_path / "ptxas"
    old.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    old.chmod(0o755)
    done = run(
        [python, "-c", DECODE_FOR_H200],
        PATH=os.pathsep.join([str(tmp_path), os.environ["PATH"]]),
        PYTHONPATH=python_path(),
        TF_CPP_MIN_LOG_LEVEL="0",
        TF_CPP_VMODULE="subprocess_compilation=9",
    )
    used = re.findall(r"Using (\S+/ptxas) with version (\S+)", done.stderr)
    assert used and all("site-packages/nvidia" in ptxas for ptxas, _ in used), used
