"""The command line of `jaxsgl serve`: flags in sections by topic, those of other servers, and a file of flags.

`--config FILE.yaml` holds flags as vLLM's does: `max-running-requests: 64`, true for a switch, lists for several
values. What the command line says goes before it. serve.py calls `parse`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jaxsgl
from jaxsgl.config.flags import add_flags
from jaxsgl.config.foreign import add_foreign_flags
from jaxsgl.config.server import ServerConfig
from jaxsgl.config.topics import TOPICS
from jaxsgl.errors import ConfigError

PROGRAM = "jaxsgl serve"
CONFIG_FLAG = "--config"


class _Help(argparse.Action):
    """`--help`, or `--help TOPIC` for one section."""

    def __call__(
        self, parser: argparse.ArgumentParser, args: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if values is None:
            parser.print_help()
        elif values in TOPICS:
            new_parser([values]).print_help()
        else:
            parser.error(f"--help has no topic {values}, but {', '.join(TOPICS)}")
        parser.exit()


def new_parser(topics: Sequence[str] = tuple(TOPICS)) -> argparse.ArgumentParser:
    """Returns the parser of the flags of `topics`; of all topics, it also takes flags of other servers."""
    parser = argparse.ArgumentParser(
        PROGRAM,
        usage=f"{PROGRAM} [MODEL] [flags]",
        description="Serves a model by HTTP and gRPC.",
        epilog=f"--help TOPIC shows one section: {', '.join(TOPICS)}",
        allow_abbrev=False,
        add_help=False,
    )
    is_whole = len(topics) == len(TOPICS)
    if is_whole:
        parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="as --model")
        parser.add_argument("--help", "-h", nargs="?", action=_Help, metavar="TOPIC", help="this text, or a section")
        parser.add_argument("--version", action="version", version=f"jaxsgl {jaxsgl.__version__}")
        parser.add_argument(
            CONFIG_FLAG, metavar="FILE", help="YAML file of flags, as `page-size: 16`; the command line goes before it"
        )
    groups = {name: parser.add_argument_group(TOPICS[name].title) for name in topics}
    topic_of = {field: name for name, topic in TOPICS.items() for field in topic.fields}
    add_flags(parser, ServerConfig, lambda field: groups.get(topic_of[field]))
    if is_whole:
        add_foreign_flags(parser)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the command line and the file that it names. Raises `ConfigError` for a file that can't be used."""
    parser = new_parser()
    args = parser.parse_args(argv)
    if args.config is not None:
        # Its own flag ends a list of words that the file may end with.
        args = parser.parse_args([*_flags_in(args.config), f"{CONFIG_FLAG}={args.config}", *argv])
    if args.positional_model is not None:
        args.model = args.positional_model
    return args


def _flags_in(path: str) -> list[str]:
    """Returns the command line that the file stands for. Raises `ConfigError`."""
    import yaml

    try:
        entries = yaml.safe_load(Path(path).expanduser().read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"{CONFIG_FLAG} {path} can't be read: {reason}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{CONFIG_FLAG} {path} is no YAML: {' '.join(str(error).split())[:300]}") from None
    if not isinstance(entries, dict | None):
        raise ConfigError(f"{CONFIG_FLAG} {path} holds no flags: write lines as `page-size: 16`")
    argv: list[str] = []
    for name, value in (entries or {}).items():
        flag = "--" + str(name).lstrip("-").replace("_", "-")
        if flag == CONFIG_FLAG:
            raise ConfigError(f"{CONFIG_FLAG} {path} names another file: put its flags here")
        if isinstance(value, list):
            words = list(map(str, value))
            argv += [flag, *words] if flag in ("--lora-paths", "--lora-modules") else [flag, ",".join(words)]
        elif value is True:
            argv.append(flag)
        elif value is not False and value is not None:
            argv.append(f"{flag}={value}")
    return argv
