"""A report runs every rung and section, whatever hangs or crashes, and writes each result as it comes."""

import dataclasses
import functools
import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from bench.kernels.cases import DECODE, EXTEND, FUNCTIONS, STORE, KernelCase, work_of
from bench.models import NAMES
from bench.processes import python_path
from bench.report import results
from bench.report.ladder import CRASHES, HANGS, Rung, ladder
from bench.report.plan import BUDGET, COMMANDS, PARTS, Section, sections
from bench.report.results import Report
from bench.report.summary import judge_engine
from bench.report.trace import kernels
from bench.report.watched import watch

from pallas_kernels import (
    ScaledMatrix,
    float8_rows,
    gpu_compiler,
    group_by_expert,
    grouped_float8_product,
    grouped_product,
)
from pallas_kernels.dispatch import BACKEND_OF_NAME
from pallas_kernels.selftest import __main__ as selftest
from pallas_kernels.selftest.cases import CASES_OF
from pallas_kernels.selftest.report import Request, Verdict
from pallas_kernels.selftest.shapes import KernelShapes
from pallas_kernels.specs import GRID_SPECS, SMALL_SPECS
from tests.grids import NIGHTLY
from tests.scripts.running import ROOT, run_script


def nightly(test: Any) -> Any:
    """By day nothing of it: what the sections run has tests of its own."""
    skip = pytest.mark.skipif(not NIGHTLY, reason="takes minutes")
    return skip(pytest.mark.timeout(1200)(test))


def python(work: Path, name: str, code: str, kind: str = "check", **fields: Any) -> Section:
    result = work / f"{name}.json"
    fields = {"least_s": 0.1, "most_s": 30.0, **fields}
    return Section(name, kind, kind, (sys.executable, "-c", code, str(result), BUDGET), result, **fields)


def write(checks: str) -> str:
    return f"import json, sys; open(sys.argv[1], 'w').write(json.dumps({checks})); print('told', sys.argv[2])"


@functools.cache
def usage_of(script: str) -> str:
    return run_script(script, "--help").stdout


PASSED = "{'checks': [{'backend': 'xla', 'op': 'store_kv', 'spec': 'x', 'verdict': 'passed'}], 'left_out': ['y']}"


def run(tmp_path: Path, *sections: Section, budget_s: float = 60) -> tuple[Report, dict[str, Any]]:
    report = Report(tmp_path, tmp_path, budget_s)
    report.machine["found"] = ["msgspec"]
    report.run(sections)
    return report, json.loads((tmp_path / "report.json").read_text())


def test_a_hanging_section_is_ended_and_keeps_what_it_had_written(tmp_path: Path) -> None:
    hangs = python(tmp_path, "hangs", write(PASSED) + "; import time; time.sleep(600)", most_s=3.0)
    begin = time.monotonic()
    report, result = run(tmp_path, hangs, python(tmp_path, "fine", write(PASSED)))
    assert time.monotonic() - begin < 30
    hung, fine = result["sections"]
    assert hung["hung"] == "no end after 3 s" and "sleep" not in fine["hung"] and fine["status"] == 0
    assert "Fatal Python error: Aborted" in hung["stacks"] and 'File "<string>", line 1' in hung["stacks"]
    assert len(result["check"]) == 2
    assert report.found_wrong


def test_a_crash_leaves_its_stacks_and_the_results_of_other_sections(tmp_path: Path) -> None:
    crash = python(tmp_path, "crash", "print('illegal address'); import os; os.abort()")
    report, result = run(tmp_path, crash, python(tmp_path, "fine", write(PASSED)))
    crashed, fine = result["sections"]
    assert crashed["status"] == -6 and "Fatal Python error: Aborted" in crashed["stacks"]
    assert fine["status"] == 0 and len(result["check"]) == 1
    assert report.found_wrong
    assert "illegal address" in (tmp_path / "log.txt").read_text()


GRID = """
import json, sys, time
done, checks, bad = [], [], "{bad}"
skip = sys.argv[sys.argv.index("--skip") + 1 :] if "--skip" in sys.argv else []
def put(**more):
    open(sys.argv[1], "w").write(json.dumps({{"checks": checks, "left_out": [], "done": done, **more}}))
for spec in "abcde":
    if spec in skip: continue
    put(running=spec)
    if spec in bad: time.sleep(600)
    checks.append({{"backend": "xla", "op": "store_kv", "spec": spec, "verdict": "passed"}})
    done.append(spec)
put()
"""


def test_an_item_that_hangs_is_named_and_skipped_and_the_rest_runs(tmp_path: Path) -> None:
    section = python(tmp_path, "check", GRID.format(bad="bd"), quiet_s=2.0, most_s=60.0, skips=True)
    report, result = run(tmp_path, section)
    (told,) = result["sections"]
    assert told["hung_at"] == ["b", "d"] and told["status"] == 0
    assert [check["spec"] for check in result["check"]] == ["a", "c", "e"]
    assert report.found_wrong
    assert "hung or crashed at: b, d" in (tmp_path / "summary.md").read_text()


def test_a_start_that_hangs_before_its_first_item_is_not_begun_again(tmp_path: Path) -> None:
    section = python(tmp_path, "check", "import time; time.sleep(600)", quiet_s=1.0, most_s=60.0, skips=True)
    _, result = run(tmp_path, section)
    (told,) = result["sections"]
    assert told["hung_at"] == ["its start, or between items"] and told["seconds"] < 20


def test_results_are_on_the_disk_while_a_section_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that whoever ends the report loses the running item alone."""
    found = []

    def watched(*arguments: Any, progress: Any, **limits: Any) -> Any:
        def look() -> None:
            progress()
            if (tmp_path / "report.json").exists():
                found.append([check["spec"] for check in json.loads((tmp_path / "report.json").read_text())["check"]])

        return watch(*arguments, progress=look, **limits)

    monkeypatch.setattr(results, "watch", watched)
    run(tmp_path, python(tmp_path, "check", GRID.format(bad="c"), quiet_s=3.0))
    assert ["a", "b"] in found


def test_sections_get_their_time_on_the_command_line(tmp_path: Path) -> None:
    report, result = run(tmp_path, python(tmp_path, "fine", write(PASSED), most_s=40.0), budget_s=100)
    assert not report.found_wrong
    assert "told 20" in (tmp_path / "log.txt").read_text()
    assert result["sections"][0]["left_out"] == ["y"]


def test_a_section_for_which_too_little_time_is_left_is_not_begun(tmp_path: Path) -> None:
    long, short = (python(tmp_path, name, write(PASSED), least_s=s) for name, s in (("long", 100.0), ("short", 1.0)))
    report, result = run(tmp_path, long, short, budget_s=50)
    assert not report.found_wrong and not long.result.exists()
    assert result["sections"][0]["note"].startswith("not run: it needs 100 s, and ")
    assert len(result["check"]) == 1


def test_a_section_whose_package_is_missing_is_skipped_with_a_note(tmp_path: Path) -> None:
    section = python(tmp_path, "peers", write(PASSED), needs=("msgspec", "transformers"))
    report, _ = run(tmp_path, section)
    assert not report.found_wrong and not section.result.exists()
    assert "peers: not run: no transformers here" in (tmp_path / "summary.md").read_text()


@pytest.mark.timeout(300)
def test_a_rung_that_hangs_and_one_that_crashes_are_named_and_the_others_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    report = Report(tmp_path, tmp_path, 240, dry=True)
    last = Rung("last", "product", {"rows": 64}, limit_s=120)
    no_engine = Rung("step", "step", {}, needs=("engine",))
    report.climb([Rung(HANGS, "hang", {}, limit_s=8), Rung(CRASHES, "crash", {}), no_engine, last])
    rungs = {rung["name"]: rung for rung in json.loads((tmp_path / "report.json").read_text())["rungs"]}
    verdicts = {name: rung["verdict"] for name, rung in rungs.items()}
    assert verdicts == {HANGS: "hung", CRASHES: "crashed", "step": "not run", "last": "passed"}
    assert "Fatal Python error: Aborted" in rungs[HANGS]["stacks"]
    assert "in string_at" in rungs[CRASHES]["stacks"] and rungs[CRASHES]["note"] == "signal 11"
    assert not report.found_wrong  # both are meant to fail
    said = capfd.readouterr().out.splitlines()
    assert said.index(f"{HANGS}: hang {{}}") < said.index(f"{HANGS}: hung no end after 8 s")
    assert said.index('last: product {"rows": 64}') < said.index("last: passed ")


STEP = """
import os, re, sys
from pathlib import Path
folder = Path(re.search(r"--xla_dump_to=(\\S+)", os.environ["XLA_FLAGS"])[1])
folder.mkdir()
text = "000: kCommandBuffer [dst] jit_forward\\n  001: kKernel a\\n001: kKernel b\\n"
(folder / "module_0007.jit_forward.thunk_sequence_after_thunk_passes.txt").write_text(text)
print("I0000 subprocess_compilation.cc:201] Using /here/bin/ptxas with version 13.5.37")
Path(sys.argv[3]).write_text('{"verdict": "passed"}')
"""


def test_on_a_gpu_a_rung_says_which_compilers_ran_and_what_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COMMANDS, "rung", ("-c", STEP))
    report = Report(tmp_path, tmp_path, 60)
    report.machine["platform"] = "gpu"
    report.climb([Rung("one step", "step", {})])
    (rung,) = json.loads((tmp_path / "report.json").read_text())["rungs"]
    assert rung["ptxas"] == ["/here/bin/ptxas"]
    assert rung["command_buffers"] == [{"program": "module_0007.jit_forward", "count": 1, "outside": 1}]
    assert "one step: passed, command buffers of its programs: 1" in (tmp_path / "summary.md").read_text()


@pytest.mark.parametrize("dry", [True, False])
def test_the_ladder_has_all_kinds_of_kernels_and_steps(dry: bool) -> None:
    rungs = ladder(("mosaic_gpu", "triton"), dry=dry)
    names = [rung.name for rung in rungs]
    assert len(set(names)) == len(names)
    kinds = {rung.kind for rung in rungs} - {"hang", "crash"}
    assert kinds == {"product", "attention", "layer", "start", "experts", "matrix", "step"}
    assert {rung.spec["dtype"] for rung in rungs if rung.kind in ("experts", "matrix")} >= {"int8", "float8_e4m3fn"}
    assert {"one layer of a mixture", "one layer in FP8", "one step"} <= set(names)
    assert ({HANGS, CRASHES} <= set(names)) == dry
    json.dumps([dict(rung.spec) for rung in rungs])


@pytest.mark.parametrize("dry", [True, False])
def test_every_specification_is_one_that_its_rung_takes(dry: bool) -> None:
    for rung in ladder(("mosaic_gpu", "triton"), dry=dry):
        spec = dict(rung.spec)
        if rung.kind == "attention":
            assert spec.pop("backend") in BACKEND_OF_NAME
            cached, new = (tuple(spec.pop(name)) for name in ("cached", "new"))
            case = KernelCase(rung.name, cached=cached, new=new, **spec)
            assert work_of(case).num_bytes > 0
        elif rung.kind == "start":
            shapes = KernelShapes.from_json(json.loads(json.dumps(spec)))
            assert shapes.experts or shapes.latents or shapes.grouped
        elif rung.kind == "layer":
            assert spec["spec"] in {each.name for each in (*SMALL_SPECS, *GRID_SPECS)}
        elif rung.kind == "step":
            assert spec["shape"] in NAMES


@pytest.mark.parametrize("dry", [True, False])
def test_the_starts_rungs_test_all_operations_but_those_in_a_fixed_order(dry: bool) -> None:
    news: list[object] = []
    for rung in ladder(("triton",), dry=dry):
        if rung.kind == "start":
            request = Request("cpu", rung.spec, dict.fromkeys(CASES_OF, "auto"))
            selftest.test(request, news.append, dict.fromkeys(CASES_OF, lambda shapes: iter(())))
    tested = {each.op for each in news if isinstance(each, Verdict)}
    of_large_sizes = {"float8_product", "attend_to_chosen", "attend_to_groups", "score_tokens"} if dry else set()
    assert set(CASES_OF) - tested <= {"ordered_product", "store_kv", "store_and_decode"} | of_large_sizes, tested


@dataclasses.dataclass
class H200:
    device_kind: str = "NVIDIA H200"
    compute_capability: str = "9.0"
    platform: str = "gpu"
    core_count: int = 132


def test_every_kernel_of_the_ladder_is_taken_on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rung that is refused there would show nothing."""
    jax.clear_caches()
    monkeypatch.setattr(jax, "devices", lambda *_: [H200()])
    monkeypatch.setattr(gpu_compiler, "TOOLKITS", ())
    monkeypatch.setenv("PATH", "")
    for rung in ladder(("mosaic_gpu", "triton"), dry=False):
        spec = dict(rung.spec)
        if rung.kind == "attention":
            backend, cached, new = (spec.pop(name) for name in ("backend", "cached", "new"))
            case = KernelCase(rung.name, cached=tuple(cached), new=tuple(new), **spec)
            arguments = {STORE: case.spec.store_args, DECODE: case.spec.decode_args, EXTEND: case.spec.extend_args}
            jax.eval_shape(
                functools.partial(FUNCTIONS[case.op], backend=backend, **case.options), *arguments[case.op]()
            )
        elif rung.kind == "experts":
            product = of_experts_in_float8 if spec.get("group") else of_experts
            jax.eval_shape(functools.partial(product, spec["experts"]), *expert_args(spec))


def of_experts(num: int, x: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
    return grouped_product(x, group_by_expert(chosen, num), weights, of_tokens=True, backend="triton")


def of_experts_in_float8(num: int, x: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
    stack = ScaledMatrix(weights, jnp.ones((*weights.shape[:2], weights.shape[2] // 128)), None, 128)
    rows, groups = float8_rows(x, backend="triton"), group_by_expert(chosen, num)
    return grouped_float8_product(rows, groups, stack, of_tokens=True, backend="triton")


def expert_args(spec: dict[str, Any]) -> list[Any]:
    shapes = {
        "x": ((spec["tokens"], spec["inputs"]), "bfloat16"),
        "chosen": ((spec["tokens"], spec["top"]), "int32"),
        "weights": ((spec["experts"], spec["outputs"], spec["inputs"]), spec["dtype"]),
    }
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes.values()]


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_every_command_of_the_plan_is_one_that_its_script_takes(platform: str, dry: bool, tmp_path: Path) -> None:
    plan = sections(platform, tmp_path, parts=PARTS, dry=dry)
    assert [section.part for section in plan] == sorted((s.part for s in plan), key=PARTS.index)
    assert {section.part for section in plan} == set(PARTS) - {"ladder"}
    engines = usage_of("bench_offline.py")  # a step's flags go to its engines
    for section in plan:
        name = " ".join(COMMANDS[section.kind]).removeprefix("scripts/")
        if not name.startswith("-m"):
            usage = usage_of(name) + (engines if section.kind == "steps" else "")
            flags = [flag.split("=")[0] for flag in section.command if flag.startswith("--")]
            assert all(flag in usage for flag in [*flags, *["--skip"] * section.skips]), section.name


def test_only_chosen_sections_are_planned(tmp_path: Path) -> None:
    plan = sections("gpu", tmp_path, parts=("sampling", "offline"), dry=False)
    assert [section.name for section in plan] == ["offline qwen3-0.6b", "offline qwen3-8b", "sampling"]


def test_limits_are_longer_than_a_start(tmp_path: Path) -> None:
    """Compiling takes 100 s and more for 0.6B with the default buckets; with few it is a fifth."""
    plan = sections("gpu", tmp_path, parts=PARTS, dry=False)
    assert all(s.most_s >= 240 and s.least_s >= 60 for s in plan if s.kind in ("steps", "engine", "offline", "peers"))


WITHOUT_LLGUIDANCE = """
import importlib.abc, importlib.metadata, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "llguidance":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
version = importlib.metadata.version
def absent(name):
    if name == "llguidance":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = absent
"""


def test_without_llguidance_preflight_says_so_and_the_engine_can_be_used(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_LLGUIDANCE)
    file = tmp_path / "found.json"
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{python_path()}"}
    command = [sys.executable, *COMMANDS["preflight"], str(file)]
    subprocess.run(command, env=env, cwd=ROOT, check=True)
    found = json.loads(file.read_text())
    lines = {line["what"]: line for line in found["lines"]}
    assert lines["llguidance"]["detail"] == "is not installed: grammars can't be used; this report has none"
    assert lines["engine"]["ok"] and "engine" in found["machine"]["found"]
    assert found["machine"]["platform"] == "cpu" and "ptxas" in lines


def test_where_jax_does_not_start_preflight_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "preflight", ("-c", "raise ImportError('no jax here')"))
    report = Report(tmp_path, tmp_path, 60)
    assert report.preflight() is False
    assert "JAX: JAX doesn't start here: ImportError: no jax here" in (tmp_path / "summary.md").read_text()


def test_kernels_of_a_trace_are_summed_over_the_gpus_streams(tmp_path: Path) -> None:
    lanes = [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        for pid, tid, name in ((1, 7, "Stream #7(Compute)"), (1, 8, "XLA Ops"), (2, 7, "python"))
    ]
    ran = (("decode", 1, 7, 4.0), ("decode", 1, 7, 6.0), ("norm", 1, 7, 3.0), ("decode", 1, 8, 9.0), ("x", 2, 7, 99.0))
    events = [{"ph": "X", "name": name, "pid": pid, "tid": tid, "dur": dur} for name, pid, tid, dur in ran]
    (tmp_path / "x.trace.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": lanes + events}).encode()))
    assert kernels(tmp_path) == [
        {"name": "decode", "count": 2, "us": 10.0, "us_each": 5.0},
        {"name": "norm", "count": 1, "us": 3.0, "us_each": 3.0},
    ]
    assert kernels(tmp_path / "nothing") == []


def offline(fraction: float, idle: float, step_ms: float) -> dict[str, Any]:
    return {
        "roofline": {"fraction": fraction, "fraction_of_busy": fraction},
        "time_split": {"idle": idle, "host_exposed": idle},
        "step_ms": {"decode T=256 S=256 greedy": {"median": step_ms}, "decode T=8 S=8 greedy": {}},
    }


def test_the_engine_passes_what_it_reaches_and_fails_what_it_misses() -> None:
    peers = {
        "settings": {"model": "qwen3-0.6b"},
        "contenders": {f"transformers-{n}": {"ratio_of_best_jaxsgl": {"median": n}} for n in (4.0, 2.5)},
    }
    found = {
        "offline": {"qwen3-0.6b": offline(0.59, 0.04, 1.0), "qwen3-8b": offline(0.61, 0.06, 9.0)},
        "sampling": {"ms": {"256 x 151936": 0.2}},
        "peers": peers,
    }
    passed = [verdict.passed for verdict in judge_engine(found)]
    assert passed == [False, True, False, True, False, True, False]
    assert {verdict.passed for verdict in judge_engine({"offline": {}})} == {None}


def dry_run(out: Path, *parts: str) -> tuple[dict[str, Any], str]:
    """The report and the summary of a dry run, all of whose sections ran and ended well."""
    run_script("gpu_report.py", "--dry-run", "--sections", ",".join(parts), "--out", out)
    report = json.loads((out / "report.json").read_text())
    assert all(section["status"] == 0 and not section.get("note") for section in report["sections"]), report["sections"]
    plan = sections("cpu", out, parts=parts, dry=True)
    assert [section["name"] for section in report["sections"]] == [section.name for section in plan]
    assert report["machine"]["platform"] == "cpu" and report["machine"]["packages"]["jax"]
    assert len(list(out.iterdir())) <= 8
    return report, (out / "summary.md").read_text()


@nightly
def test_a_dry_run_samples(tmp_path: Path) -> None:
    report, summary = dry_run(tmp_path, "sampling")
    assert report["sampling"]["ms"]["4 x 1024"] > 0
    assert "not measured: decode 64 x 4096" in summary and "not measured: offline, qwen3-8b" in summary


@nightly
def test_a_dry_run_checks(tmp_path: Path) -> None:
    report, summary = dry_run(tmp_path, "check")
    assert {check["backend"] for check in report["check"]} == {"triton"}
    assert all(check["verdict"] == "passed" for check in report["check"])
    assert "pass: correct on this device: triton" in summary


@nightly
def test_a_dry_run_climbs_the_ladder(tmp_path: Path) -> None:
    report, _ = dry_run(tmp_path, "ladder")
    verdicts = {rung["name"]: rung["verdict"] for rung in report["rungs"]}
    assert list(verdicts) == [rung.name for rung in ladder(("triton", "mosaic_gpu"), dry=True)]
    assert verdicts.pop(HANGS) == "hung" and verdicts.pop(CRASHES) == "crashed"
    assert set(verdicts.values()) == {"passed"}


@nightly
def test_a_dry_run_times_kernels_products_and_steps(tmp_path: Path) -> None:
    report, summary = dry_run(tmp_path, "kernels", "products", "steps", "tune")
    assert {row["is_ours"] for row in report["bench"]} == {True}
    assert all(row["seconds"] for row in report["products"])
    assert {row["step"] for rows in report["steps"].values() for row in rows} == {"2x1+7", "1x16"}
    assert set(report["steps"]) == {"tiny", "tiny-moe", "tiny-fp8"} and "| tiny-moe 2x1+7 | " in summary
    assert all(row["kernels"] for rows in report["steps"].values() for row in rows)
    assert json.loads((tmp_path / "table.json").read_text())["devices"] == ["cpu"]


@nightly
def test_a_dry_run_runs_engines(tmp_path: Path) -> None:
    report, summary = dry_run(tmp_path, "engine", "offline", "peers")
    assert all(count == 48 for count in report["engine"]["auto"]["equal_tokens"])
    assert report["offline"]["bundled"]["output_tokens_per_s"] > 0 and "- bundled: " in summary
    assert report["peers"]["contenders"]["transformers-static8-float32"]["ratio_of_best_jaxsgl"]["median"] > 0
