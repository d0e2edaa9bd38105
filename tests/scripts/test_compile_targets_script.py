"""compile_targets.py goes on where another run was ended, and keeps what that one wrote."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import compile_targets
import pytest
from bench.processes import python_path

pytestmark = pytest.mark.unit


def test_it_needs_no_jax_of_its_own() -> None:
    """The environments that compile have theirs."""
    program = "import sys; sys.modules['jax'] = None; import compile_targets"
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": python_path()}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def result(program: str, problems: Sequence[str] = (), by: str = "now") -> dict[str, Any]:
    return {"target": "h200", "program": program, "backend": "triton", "problems": list(problems), "by": by}


@pytest.mark.parametrize(
    ("flag", "compiled", "kept"), [("--missing", "bc", "a"), ("--update", "abc", ""), (None, "abc", "")]
)
def test_a_run_compiles_what_the_file_lacks_or_has_with_problems(
    flag: str | None, compiled: str, kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "results.json"
    before = [result("a", by="before"), result("b", ["spills"], by="before"), result("other", by="before")]
    file.write_text(json.dumps({"jax": "0", "results": before}))
    asked = []

    def compile_in(*arguments: Any) -> Iterator[dict[str, Any]]:
        *_, done, _, _ = arguments
        for name in ("c", "b", "a"):
            if name not in done:
                asked.append(name)
                yield result(name)

    monkeypatch.setattr(compile_targets, "compile_in", compile_in)
    monkeypatch.setattr(compile_targets, "missing_for", lambda *_: None)
    monkeypatch.setattr(compile_targets, "make_environment", lambda *_: Path())
    flags = ["h200", "--environments", str(tmp_path), "--json", str(file), *([flag] if flag else [])]
    monkeypatch.setattr(sys, "argv", ["compile_targets.py", *flags])
    assert compile_targets.main() == 0
    assert sorted(asked) == list(compiled)
    written = {each["program"]: each["by"] for each in json.loads(file.read_text())["results"]}
    expected = dict.fromkeys(compiled, "now") | dict.fromkeys(kept, "before")
    assert written == expected | ({"other": "before"} if flag else {})
    assert list(written) == sorted(written)


def test_results_in_brief_have_no_lists_of_launches() -> None:
    launches = {"num_launches": 2, "listed": [{"name": "a"}], "kernels": [{"count": 2}]}
    result = {"program": "p", "launches": launches, "problems": []}
    assert compile_targets.in_brief(result) == result | {"launches": {"num_launches": 2}}
    assert compile_targets.in_brief({"program": "encode"}) == {"program": "encode"}
