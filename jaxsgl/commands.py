"""`jaxsgl COMMAND`: the programs of this package under one name, also as `python -m jaxsgl`.

Owns the table of commands. A module of the table has `main(arguments) -> status` and parses its own flags; it is
imported only when its command runs, so that `jaxsgl --help` takes no second.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from jaxsgl import __version__


class Command(NamedTuple):
    """A program: the module whose `main` runs it, and what it does, in a line."""

    module: str
    help: str


COMMANDS = {
    "serve": Command("jaxsgl.serve", "serve a model over HTTP and gRPC"),
    "chat": Command("jaxsgl.chat", "talk with the model of a running server"),
    "client": Command("jaxsgl.client", "send one prompt to a running server"),
    "run-batch": Command("jaxsgl.offline.run_batch", "answer a file of OpenAI's batch requests"),
    "bench": Command("jaxsgl.bench.__main__", "load a running server, and show its latencies and throughput"),
    "convert": Command("jaxsgl.convert", "convert a checkpoint to Orbax's format, which any number of devices restore"),
    "completion": Command("jaxsgl.completion", "print what completes commands and flags in a shell"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that the first argument names with the others; returns its exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    if not given:
        parser.print_help(sys.stderr)
        return 2
    options = parser.parse_args(given[:1])
    return importlib.import_module(COMMANDS[options.command].module).main(given[1:]) or 0


def run() -> NoReturn:
    """Runs `main` and ends the process with its status, without joining threads: downloads can't be interrupted."""
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        "jaxsgl",
        usage="jaxsgl COMMAND [flags]; jaxsgl COMMAND --help shows its flags",
        description="\n".join(["An LLM serving engine on JAX.", "", "commands:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"jaxsgl {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of these")
    return parser
