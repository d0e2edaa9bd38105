"""Load a running server: SGLang's bench_serving for any OpenAI endpoint, for SGLang, and for jaxsgl's gRPC service.

    jaxsgl serve MODEL
    jaxsgl bench --backend jaxsgl-grpc --num-prompts 200 --random-input-len 256 --max-concurrency 32
    jaxsgl bench --backend openai --base-url http://127.0.0.1:8000 --request-rate 4
    jaxsgl bench --backend sglang --dataset-name generated-shared-prefix --flush-cache

Datasets, defaults and figures are those of SGLang: 1000 prompts of random ids, all at once, temperature 0, ignoring
EOS. The exit status is 1 if a request failed. docs/benchmarking.md defines the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from jaxsgl.bench.backend import BackendError
from jaxsgl.bench.load import ServingConfig, load, settings
from jaxsgl.bench.metrics import details, failures, parse_goodput, summary, table
from jaxsgl.config.flags import add_flags, from_flags
from jaxsgl.errors import JaxsglError


def main(arguments: list[str] | None = None) -> int:
    """Runs, prints the figures and writes them; returns the exit status."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("jaxsgl bench", description=__doc__, formatter_class=raw)
    add_flags(parser, ServingConfig)
    try:
        config = from_flags(ServingConfig, parser.parse_args(arguments))
        goodput, asks = parse_goodput(config.goodput), config.dataset.asks()
        if not asks:
            raise ValueError(f"{config.dataset.dataset_path} has no requests")
        if config.output_file:
            check_writable(Path(config.output_file))  # now, not after the run
        outcome = asyncio.run(load(config, asks))
    except (JaxsglError, BackendError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped: figures are of whole runs; --num-prompts makes one shorter", file=sys.stderr)
        return 130
    result = settings(config) | summary(outcome, goodput)
    print(table(result))
    if config.output_file:
        line = result | (details(outcome.answers) if config.output_details else {})
        with Path(config.output_file).open("a") as file:
            file.write(json.dumps(line) + "\n")
    failed = failures(outcome.answers)
    if failed:
        print(f"failed:\n{failed}", file=sys.stderr)
    return 1 if failed else 0


def check_writable(path: Path) -> None:
    """Raises OSError if nothing can be added to the file; leaves no new one."""
    existed = path.exists()
    path.open("a").close()
    if not existed:
        path.unlink()


if __name__ == "__main__":
    sys.exit(main())
