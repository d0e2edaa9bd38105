"""Run the bundled model on this machine's device with each attention backend and compare the tokens with XLA's.

    python scripts/check engine --json engine.json

Greedy tokens must not depend on the backend, except where rounding breaks a tie: a prompt counts as equal up to the
first token that differs. Exits with status 1 if a backend failed, unless it refused this device or these shapes. Needs
msgspec in addition to what the kernels need, and says so if it is missing.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from bench.kernels.contenders import backends_for
from bench.output import command_parser, write_json

from check import common_prefix
from pallas_kernels.target import target_device

PROMPTS = ["3 + 4 =", "3 6 9 12", "Once upon a time", "one two three four", "12 + 30 =", "a b c d e f"]
NUM_TOKENS = 48


def generate(backend: str) -> dict[str, Any]:
    """Greedy tokens of all prompts, and the seconds to start and to generate (the second time, when warm)."""
    import jaxsgl

    begin = time.perf_counter()
    llm = jaxsgl.LLM(
        attention_backend=backend,
        skip_kernel_test=True,  # which would replace a kernel that is wrong
        max_total_tokens=4096,
        max_running_requests=8,
        decode_buckets=(8,),
        extend_buckets=(128,),
        chunked_prefill_size=128,
        compilation_cache_dir="",
    )
    started = time.perf_counter()
    params = jaxsgl.SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    llm.generate(PROMPTS, params, use_tqdm=False)
    warm = time.perf_counter()
    completions = llm.generate(PROMPTS, params, use_tqdm=False)
    generate_s = time.perf_counter() - warm
    llm.close()
    return {
        "token_ids": [completion.token_ids for completion in completions],
        "start_s": started - begin,
        "generate_s": generate_s,
    }


def main(arguments: list[str]) -> int:
    """Runs XLA first, then the other backends. A backend that can't run is reported and skipped."""
    platform = target_device().platform
    parser = command_parser(__doc__, __name__)
    others = [name for name in backends_for(platform) if name != "xla"]
    parser.add_argument(
        "--backends", nargs="+", metavar="NAME", default=["auto", *others], help="backends to compare with xla"
    )
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="start no backend after this many seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcome here, after each backend")
    options = parser.parse_args(arguments)
    try:
        import jaxsgl.offline.llm  # noqa: F401
    except ImportError as error:
        note = f"skipped: {error}; install it, or put its wheel on PYTHONPATH"
        print(note)
        if options.json:
            write_json(options.json, {"engine": {"note": note}})
        return 0
    from jaxsgl.errors import ConfigError

    begin = time.monotonic()
    expected = generate("xla")
    results: dict[str, Any] = {"xla": expected}
    any_failed = False
    for backend in options.backends:
        if time.monotonic() - begin > options.budget_s:
            results[backend] = {"note": "no time left"}
            continue
        try:
            results[backend] = generate(backend)
            pairs = zip(results[backend]["token_ids"], expected["token_ids"], strict=True)
            equal = [common_prefix(left, right) for left, right in pairs]
            results[backend]["equal_tokens"] = equal
            # Later tokens may differ where two are equally likely; no prompt here has such a first token.
            any_failed |= min(equal) == 0
        except Exception as error:  # the failure of the backend is the finding
            results[backend] = {"note": f"{type(error).__name__}: {str(error)[:300]}"}
            any_failed |= not isinstance(error, ConfigError)
        told = {name: value for name, value in results[backend].items() if name != "token_ids"}
        print(f"{backend}: {told}", flush=True)
        if options.json:
            write_json(options.json, results)
    return int(any_failed)
