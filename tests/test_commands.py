"""The command `jaxsgl`: a table of programs."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from jaxsgl import __version__
from jaxsgl.commands import COMMANDS, main
from jaxsgl.completion import SHELLS, flags_of, script

pytestmark = pytest.mark.server  # some of the modules import JAX


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_of_the_table_shows_its_flags(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: jaxsgl {name} ")


def test_help_names_every_command_and_imports_none() -> None:
    program = (
        "import sys, jaxsgl.commands as c\n"
        "try: c.main(['--help'])\n"
        "except SystemExit: print(sorted(set(sys.modules) & {'jax', 'grpc', 'numpy', 'jaxsgl.serve'}))"
    )
    shown = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert all(f"  {name} " in shown and command.help in shown for name, command in COMMANDS.items())
    assert shown.endswith("[]\n")


@pytest.mark.parametrize("shell", SHELLS)
def test_shells_complete_commands_and_flags(shell: str) -> None:
    text = script(shell, {"serve": flags_of("serve"), "chat": ["--system"]})
    for words in ("serve", "chat", "max-itl-ms", "tensor-parallel-size", "system"):
        assert words in text
    assert "trust-remote-code" not in text


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes() -> None:
    line = "COMP_WORDS=(jaxsgl serve --max-it); COMP_CWORD=2; _jaxsgl; echo ${COMPREPLY[@]}"
    text = script("bash", {"serve": ["--max-itl-ms", "--port"]}) + line
    shown = subprocess.run(["bash", "-c", text], check=True, capture_output=True, text=True).stdout
    assert shown == "--max-itl-ms\n"


def test_the_version_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"jaxsgl {__version__}\n"
    assert main([]) == 2 and "run-batch" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bogus"])
    assert "bogus" in capsys.readouterr().err
