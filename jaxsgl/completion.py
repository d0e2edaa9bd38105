"""`jaxsgl completion bash|zsh|fish`: prints what completes commands and flags in a shell.

    source <(jaxsgl completion bash)           # in ~/.bashrc; of zsh likewise
    jaxsgl completion fish > ~/.config/fish/completions/jaxsgl.fish

Reads the flags of a command from its own help.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import re
from collections.abc import Sequence

from jaxsgl.commands import COMMANDS

SHELLS = ("bash", "zsh", "fish")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_BASH = """\
_jaxsgl() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words
    if [ "$COMP_CWORD" -eq 1 ]; then words="{commands}"; else
        case "${{COMP_WORDS[1]}}" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _jaxsgl jaxsgl
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the script; returns the exit status."""
    parser = argparse.ArgumentParser("jaxsgl completion", description="Prints what completes commands in a shell.")
    parser.add_argument("shell", choices=SHELLS, help="put its output where the shell reads it")
    shell = parser.parse_args(arguments).shell
    print(script(shell, {name: flags_of(name) for name in COMMANDS}), end="")
    return 0


def flags_of(command: str) -> list[str]:
    """Returns the flags that the help of a command has, in its order."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        importlib.import_module(COMMANDS[command].module).main(["--help"])
    # Each stands where a line begins, or after another spelling of it.
    lines = re.findall(r"^ {2}-.*$", shown.getvalue(), re.MULTILINE)
    return list(dict.fromkeys(flag for line in lines for flag in _FLAG.findall(line)))


def script(shell: str, flags: dict[str, list[str]]) -> str:
    """Returns what completes the commands and their `flags` in `shell`."""
    if shell == "fish":
        lines = [f"complete -c jaxsgl -n __fish_use_subcommand -f -a {name}" for name in flags]
        for name, of_one in flags.items():
            within = f"'__fish_seen_subcommand_from {name}'"
            lines += [f"complete -c jaxsgl -n {within} -l {flag[2:]}" for flag in of_one]
        return "\n".join(lines) + "\n"
    cases = "\n".join(f'            {name}) words="{" ".join(of_one)}" ;;' for name, of_one in flags.items())
    text = _BASH.format(commands=" ".join(flags), cases=cases)
    return f"autoload -U +X bashcompinit && bashcompinit\n{text}" if shell == "zsh" else text


if __name__ == "__main__":
    raise SystemExit(main())
