"""Kernels and engine steps compile for GPUs and TPUs that aren't there, and the compilers made what was meant."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from compile_check import environments  # noqa: E402
from compile_check.gpu_code import kernels_in  # noqa: E402
from compile_check.targets import TARGETS  # noqa: E402

ENVIRONMENTS = ROOT / ".venv-targets"
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


@pytest.fixture(scope="module", params=TARGETS)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the script says of one target, on the shapes that most models serve with."""
    target = TARGETS[request.param]
    ENVIRONMENTS.mkdir(exist_ok=True)
    if reason := environments.missing_for(target.extra, ENVIRONMENTS):
        pytest.skip(f"{target.name} isn't compiled for: {reason}")
    file = tmp_path_factory.mktemp("compiled") / "results.json"
    command = [sys.executable, "scripts/compile_targets.py", target.name, "--grid", "common", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert file.exists(), done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads(file.read_text())["results"]
    assert done.returncode == int(any(result["problems"] for result in found))
    return found


@pytest.mark.timeout(1200)
def test_everything_compiles_in_place_without_spills(results: list[dict[str, Any]]) -> None:
    assert not [result for result in results if result["problems"]]
    compiled = [result for result in results if "compile_s" in result]
    target = TARGETS[results[0]["target"]]
    for backend in target.backends:
        names = " ".join(result["program"] for result in compiled if result["backend"] == backend)
        stores = () if backend == "mosaic_gpu" else ("store_kv",)
        for op in (*stores, "paged_decode_attention", "paged_extend_attention", "step_decode", "step_extend"):
            assert op in names, f"{backend} compiled no {op}"


def test_registers_and_instructions_are_read_from_ptx(tmp_path: Path) -> None:
    (tmp_path / "module_0001.jit_x.ptx").write_text(PTX)
    ptxas = _ptxas()
    (kernel,) = kernels_in(tmp_path, ptxas)  # XLA's own fusion_7 is left out
    assert kernel.name == "store_kv_like" and kernel.spill_bytes == 0 and 0 < kernel.registers < 32
    assert kernel.instructions == ("vector store",)


def _ptxas() -> Path:
    made: Iterator[Path] = ENVIRONMENTS.glob("cuda13/lib/python*/site-packages/nvidia/*/bin/ptxas")
    found = next(made, None)
    if found is None:
        pytest.skip("no ptxas: the CUDA environment of scripts/compile_targets.py wasn't made")
    return found
