"""`jaxsgl serve`, or `python -m jaxsgl.serve`: parses the flags and runs the front end, which starts the engine."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from jaxsgl import logs, stacks
from jaxsgl.config.command_line import parse, words_of
from jaxsgl.config.flags import from_flags
from jaxsgl.config.hosts import fill_in
from jaxsgl.config.server import ADMIN_API_KEY_VARIABLE, API_KEY_VARIABLE, ServerConfig
from jaxsgl.errors import ConfigError, StartupError
from jaxsgl.frontend.access import keys_in_file
from jaxsgl.frontend.engines.owned import ENGINE_COMMAND
from jaxsgl.logs import StartParts

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None, engine_command: Sequence[str] = ENGINE_COMMAND) -> int:
    """Serves until Ctrl-C or SIGTERM; returns the exit status (1: the start failed, or the engine died)."""
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.api_key is None:
        args.api_key = os.environ.get(API_KEY_VARIABLE)
    if args.admin_api_key is None:
        args.admin_api_key = os.environ.get(ADMIN_API_KEY_VARIABLE)
    secrets = [*logs.secrets_of(ServerConfig, args), *keys_in_file(args.api_key_file)]
    output = logs.configure(logs.LogStyle(args.log_level, args.log_format), "server", secrets)
    output.replace_stderr()
    stacks.dump_at_signals(crashes_fd=output.stderr.real_fd)
    for line in words_of(args.without_effect):
        logger.info(line)
    try:
        fill_in(args, os.environ)
        config = from_flags(ServerConfig, args)
        parts = StartParts()
        from jaxsgl.frontend.server import serve  # importing gRPC takes a while: bad flags fail before it

        parts.end("imports")
        logger.debug("the front end's start: %s", parts)
        return asyncio.run(serve(config, engine_command))
    except StartupError as error:
        if args.log_format == "json":
            logger.error("%s", error)
        else:
            output.line(f"error: {error}")
        return 1
    except KeyboardInterrupt:  # it came before the loop had its own handler
        return 130
    finally:
        output.close()


def run(engine_command: Sequence[str] = ENGINE_COMMAND) -> NoReturn:
    """Runs `main` and ends the process with its status, without joining threads: downloads can't be interrupted."""
    status = main(engine_command=engine_command)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    run()
