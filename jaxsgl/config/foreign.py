"""Flags of SGLang and vLLM that are no flags here: those that change nothing, and those that name what to give instead.

Flags that mean the same under another name are aliases of ours. A command pasted from their pages so starts, with a
line for each flag that has no effect, or ends with one that names ours. command_line.py adds them to the parser; help
shows none.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

_ON = "that is on already"
_COMPILED = "steps are compiled programs in any case"
_FAMILIES = "code of a checkpoint is never run, all families are built in (docs/models.md)"

# Switch -> why it changes nothing.
SWITCHES = {
    "--trust-remote-code": _FAMILIES,
    "--enable-prefix-caching": _ON,
    "--enable-chunked-prefill": _ON,
    "--async-scheduling": _ON,
    "--enable-auto-tool-choice": "calls are found as the chat template shows (--tool-call-parser)",
    "--enable-metrics": "/metrics is always there",
    "--enable-cache-report": "answers always say how many tokens were cached",
    "--disable-log-requests": "requests are not logged unless --log-requests asks for it",
    "--no-enable-log-requests": "requests are not logged unless --log-requests asks for it",
    "--disable-log-stats": "the log has one line of load in ten seconds",
    "--enforce-eager": _COMPILED,
    "--disable-cuda-graph": _COMPILED,
    "--enable-torch-compile": _COMPILED,
    "--disable-custom-all-reduce": "XLA chooses how devices exchange data",
    "--enable-p2p-check": "XLA chooses how devices exchange data",
    "--skip-server-warmup": "every program is compiled before the server is ready",
    "--disable-fastapi-docs": "/docs loads nothing from elsewhere",
    "--use-v2-block-manager": "there is one",
}
# Flag with a value -> the same.
SETTINGS = {
    "--cuda-graph-max-bs": "give --decode-buckets to choose the compiled sizes",
    "--compilation-config": "give --decode-buckets and --extend-buckets to choose the compiled sizes",
    "--max-seq-len-to-capture": _COMPILED,
    "--sampling-backend": "there is one",
    "--stream-interval": "tokens are sent as they come, merged where a client is slow",
    "--scheduler-delay-factor": "give --schedule-policy or --max-itl-ms",
    "--num-scheduler-steps": "give --decode-steps",
    "--swap-space": "give --host-kv-gib for prefixes in host memory",
    "--distributed-executor-backend": "one process drives all devices",
    "--guided-decoding-backend": "grammars are llguidance's (--grammar-backend)",
    "--moe-runner-backend": "give --kernels experts=...",
    "--reasoning-config": "reasoning is found as the chat template shows (--reasoning-parser)",
}
# Flag -> what to do instead.
REFUSED = {
    "--cpu-offload-gb": "weights stay on the device: give --quantization, or --tp with more devices",
    "--speculative-config": "give --speculative-algorithm NGRAM or SUFFIX (docs/speculation.md)",
    "--hf-overrides": "edit the folder's config.json",
    "--json-model-override-args": "edit the folder's config.json",
    "--rope-scaling": "edit rope_scaling in the folder's config.json",
    "--tokenizer": "the tokenizer is the model folder's: put its files there",
    "--tokenizer-path": "the tokenizer is the model folder's: put its files there",
    "--device": "set JAX_PLATFORMS, as JAX_PLATFORMS=cpu",
    "--root-path": "have the proxy strip the prefix",
    "--limit-mm-per-prompt": "give --media-max-bytes and --media-max-pixels (docs/multimodal.md)",
    "--allowed-local-media-path": "files come as data: URLs, or from --allowed-media-domains",
    "--max-logprobs": "20 are the most",
    "--dtype-kv-cache": "give --kv-cache-dtype",
    "--task": "give --is-embedding, or nothing for a model that generates",
    "--runner": "give --is-embedding, or nothing for a model that generates",
}


class _Ignored(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, args: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        args.without_effect = [*args.without_effect, option]


class _Refused(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, args: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if values != "1":  # one of something is what there is
            parser.error(f"{option} is no flag of jaxsgl: {REFUSED[option or '']}")


def add_foreign_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags; those without effect are listed in `without_effect` of the parsed flags."""
    parser.set_defaults(without_effect=[])
    actions: list[tuple[Iterable[str], type[argparse.Action], int | str | None]] = [
        (SWITCHES, _Ignored, 0), (SETTINGS, _Ignored, None), (REFUSED, _Refused, "?")
    ]  # fmt: skip
    hidden = argparse.SUPPRESS
    for flags, action, num_values in actions:
        for name in flags:
            parser.add_argument(name, action=action, nargs=num_values, dest=hidden, default=hidden, help=hidden)


def words_of(without_effect: Sequence[str]) -> list[str]:
    """Returns a line for each flag that has no effect."""
    why = SWITCHES | SETTINGS
    return [f"{name} changes nothing here: {why[name]}" for name in dict.fromkeys(without_effect)]
