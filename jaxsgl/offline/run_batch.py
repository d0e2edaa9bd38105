"""`jaxsgl run-batch -i requests.jsonl -o answers.jsonl`: answers a file of OpenAI's batch requests.

It is a server without clients: the same flags, its page and metrics on a free port of this machine meanwhile. A run
that is killed goes on with the same command: what the output holds is not asked again (frontend/batches.py).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from jaxsgl import logs
from jaxsgl.config.command_line import parse_flags, words_of
from jaxsgl.config.flags import add_flags, from_flags
from jaxsgl.config.server import ServerConfig
from jaxsgl.errors import ConfigError, InvalidRequest, StartupError
from jaxsgl.frontend.batches import BatchFile, Results, check_file, requests_of, run
from jaxsgl.frontend.engines.owned import ENGINE_COMMAND

DEFAULT_CONCURRENCY = 256

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None, engine_command: Sequence[str] = ENGINE_COMMAND) -> int:
    """Answers the file; returns the exit status: 0 if all is answered, 1 if not, 2 if the file can't be used."""
    try:
        args = parse_flags(_parser(), sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    logs.configure(logs.LogStyle(args.log_level, args.log_format), "batch", logs.secrets_of(ServerConfig, args))
    for line in words_of(args.without_effect):
        logger.info(line)
    try:
        config = from_flags(ServerConfig, args)
        if config.tokenizer_worker_num > 1:
            raise ConfigError("--tokenizer-worker-num goes with servers: leave it out")
        if args.concurrency < 1:
            raise ConfigError(f"--concurrency is {args.concurrency}, but must be 1 and more")
        file, output = check_file(Path(args.input_file)), Path(args.output_file)
        if output.exists() and output.samefile(file.path):
            raise InvalidRequest(f"{output} is this file, and answers would be written into it: name another")
    except (OSError, InvalidRequest) as error:
        print(f"error: {args.input_file}: {error}", file=sys.stderr)
        return 2
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        return asyncio.run(_answer(config, file, output, args.concurrency, engine_command))
    except InvalidRequest as error:
        print(f"error: {output}: {error}", file=sys.stderr)
        return 2
    except (OSError, StartupError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped: the same command goes on from here", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "jaxsgl run-batch",
        description="Answers a file of OpenAI's batch requests, without a server; goes on where a killed run ended.",
        allow_abbrev=False,
    )
    parser.add_argument("-i", "--input-file", required=True, help="JSONL: custom_id, url and body of each request")
    parser.add_argument("-o", "--output-file", required=True, help="JSONL: answers are appended, each one once")
    parser.add_argument(
        "--concurrency",
        type=int,
        default=DEFAULT_CONCURRENCY,
        help="requests that are under way at once (default: %(default)s)",
    )
    add_flags(parser.add_argument_group("engine and server, as of jaxsgl.serve"), ServerConfig)
    parser.set_defaults(port=0, grpc_port=0)
    return parser


async def _answer(
    config: ServerConfig, file: BatchFile, output: Path, concurrency: int, engine_command: Sequence[str]
) -> int:
    from jaxsgl.frontend.http.in_process import InProcess  # importing gRPC takes a while: bad files fail before it
    from jaxsgl.frontend.server import Server, live

    try:
        results = Results(output)
    except OSError as error:
        raise InvalidRequest(str(error)) from None
    server = Server(config, engine_command)
    ask = InProcess(server.front_end).ask
    num_known = file.num_requests - len(file.custom_ids - results.done)
    with tqdm(total=file.num_requests, initial=num_known, desc="requests", unit="request") as bar:

        async def work() -> None:
            await server.serving.wait()
            try:
                await run(requests_of(file.path), results, ask, concurrency, bar.update)
            except Exception:  # the server ends as after a success; what is missing is said below
                logger.exception("the batch stops")

        try:
            if num_known < file.num_requests:
                await live(server, work())
        finally:
            results.close()
    missing = len(file.custom_ids - results.done)
    if missing:
        print(f"{missing} requests have no answer: the same command goes on from here", file=sys.stderr)
    if results.num_failed:
        print(f"{results.num_failed} answers are errors: see status_code in {output}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # downloads can't be interrupted, and would be joined
