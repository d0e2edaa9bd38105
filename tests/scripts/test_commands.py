"""`scripts/bench NAME`, `scripts/check NAME` and `scripts/make NAME` find their tools, and say what there is."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench.output import run_named

from tests.scripts.running import ROOT

FIGURES = sorted(path.stem for path in (ROOT / "scripts/bench/figures").glob("[a-z]*.py"))
CHECKS = sorted(path.stem for path in (ROOT / "scripts/check").glob("[a-z]*.py"))
MADE = sorted(path.stem for path in (ROOT / "scripts/make").glob("[a-z]*.py"))


@pytest.mark.parametrize(("command", "names"), [("bench", FIGURES), ("check", CHECKS), ("make", MADE)])
def test_help_lists_every_tool_with_a_line_and_imports_none(command: str, names: list[str]) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program = f"""
import runpy, sys
sys.modules["jax"] = sys.modules["jaxsgl"] = None  # importing them raises
sys.argv[1:] = ["--help"]
runpy.run_path("scripts/{command}", run_name="__main__")
"""
    shown = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE)
    assert shown.returncode == 0
    listed = [line.split(maxsplit=1) for line in shown.stdout.splitlines() if line.startswith("  ")]
    told = {words[0]: words[1] for words in listed if len(words) == 2}
    assert set(names) <= set(told) and all(told[name].endswith(".") for name in names)


@pytest.mark.parametrize(
    "module",
    [
        *(f"bench.figures.{name}" for name in FIGURES),
        *(f"check.{name}" for name in CHECKS),
        *(f"make.{name}" for name in MADE),
    ],
)
def test_each_tool_shows_its_own_help(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, name = module.split(".")[0], module.split(".")[-1]
    with pytest.raises(SystemExit) as ended:
        run_named(module.rpartition(".")[0], "", [name, "--help"])
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: {command} {name} ")
    assert (importlib.import_module(module).__doc__ or "").partition("\n")[0] in shown


def test_an_unknown_tool_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_named("bench.figures", "", ["stepp"])
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert "'stepp'" in shown and all(name in shown for name in FIGURES)


@pytest.mark.parametrize(
    ("flags", "told"),
    [(["--model", "/nowhere"], "error: the model folder /nowhere"), (["--text", "/nowhere"], "'/nowhere'")],
)
def test_a_bad_value_ends_a_check_with_one_line(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_named("check", "", ["quantization", *flags]) == 1
    shown = capsys.readouterr().err
    assert told in shown and shown.count("\n") == 1


def test_nothing_to_score_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_named("check", "", ["quantization", "--documents", "0"])
    assert "--documents 0 has nothing to score" in capsys.readouterr().err


def test_a_tool_runs_by_the_path_of_its_command_from_another_folder(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "scripts/bench"),
        "transfer",
        "--mib",
        "1",
        "--page-kib",
        "16",
        "--repeats",
        "1",
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = subprocess.run(command, cwd=tmp_path, env=env, text=True, check=True, stdout=subprocess.PIPE).stdout
    assert "64 pages of 0.02 MB" in shown and "tcp" in shown
