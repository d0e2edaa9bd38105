"""The command line of `jaxsgl serve`: flags in sections by topic, those of other servers, and a file of flags.

`--config FILE.yaml` holds flags as vLLM's does: `max-running-requests: 64`, true for a switch, lists for several
values. What the command line says goes before it. serve.py calls `parse`, offline/run_batch.py `parse_flags`.

Flags of SGLang and vLLM that mean the same under another name are aliases of ours. Of the others, some change nothing
here, and some name what to give instead: a command pasted from their pages so starts, with a line for each flag that
has no effect, or ends with one that names ours. Help shows none.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jaxsgl
from jaxsgl.config.flags import LEAST_LIKENESS, add_flags, fields_by_name
from jaxsgl.config.server import ServerConfig
from jaxsgl.errors import ConfigError

PROGRAM = "jaxsgl serve"
CONFIG_FLAG = "--config"


class Topic(NamedTuple):
    """A section of the help: its title, and the fields whose flags it shows. `--help NAME` shows one alone."""

    title: str
    fields: tuple[str, ...]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# A new flag needs a place here: the parser can't be made without.
TOPICS = {
    "model": Topic(
        "the model and its name",
        _words("model revision served_model_name dtype quantization weight_only load_format weight_version"
               " chat_template sampling_defaults tool_call_parser reasoning_parser free_tool_calls"
               " trust_request_chat_template split_special_tokens grammar_backend random_seed"),
    ),
    "memory": Topic(
        "context, KV cache and memory",
        _words("context_length max_total_tokens mem_fraction_static snapshot_share kv_cache_dtype page_size"
               " disable_radix_cache enable_hierarchical_cache host_kv_gib host_kv_write_policy host_kv_load_timeout_s"
               " kv_file enable_weights_cpu_backup"),
    ),
    "scheduling": Topic(
        "which requests run when (docs/scheduling.md)",
        _words("max_running_requests chunked_prefill_size max_prefill_tokens prefill_max_requests schedule_policy"
               " schedule_conservativeness enable_mixed_chunk decode_first max_itl_ms decode_steps"
               " disable_overlap_schedule enable_priority_scheduling schedule_low_priority_values_first"
               " priority_scheduling_preemption_threshold max_queued_requests max_queued_tokens grammar_timeout"
               " queue_timeout_s running_timeout_s"),
    ),
    "devices": Topic(
        "devices, replicas, kernels and compiled programs",
        _words("tp ep pp_size pp_async_batch_depth dp_size enable_dp_attention device_ids attention_backend kernels"
               " skip_kernel_test"
               " enable_deterministic_inference decode_buckets extend_buckets"
               " auto_buckets compilation_cache_dir"),
    ),
    "speculation": Topic(
        "drafts of tokens (docs/speculation.md)",
        _words("speculative_algorithm speculative_num_draft_tokens speculative_ngram_min_match_window_size"
               " speculative_ngram_max_match_window_size speculative_suffix_cache_mib"
               " speculative_draft_model_path"),
    ),
    "lora": Topic(
        "LoRA adapters (docs/lora.md)",
        _words("enable_lora lora_paths max_loras_per_batch max_lora_rank lora_target_modules max_loaded_loras lora_root"
               " weights_root"),
    ),
    "embeddings": Topic(
        "embeddings, scores and states (docs/embeddings.md)",
        _words("is_embedding enable_embeddings matryoshka enable_return_hidden_states enable_return_routed_experts"),
    ),
    "media": Topic(
        "pictures, videos and sound (docs/multimodal.md)",
        _words("language_only mm_enable_dp_encoder mm_pool_tokens mm_host_mib mm_max_patches allowed_media_domains"
               " media_max_tokens media_max_bytes media_max_pixels media_max_decode_bytes media_max_cpu_s"
               " media_timeout_s mm_hash_ids"),
    ),
    "network": Topic(
        "addresses, keys and limits of clients (docs/security.md)",
        _words("host port grpc_port tokenizer_worker_num api_key api_key_file admin_api_key allowed_hosts"
               " allowed_origins allow_get_control ssl_certfile ssl_keyfile max_connections max_request_bytes"
               " request_timeout_s drain_s responses_store batch_dir"),
    ),
    "operations": Topic(
        "logs, profiles and what happens in trouble (docs/operations.md)",
        _words("log_level log_format access_log log_requests otlp_traces_endpoint watchdog_s keep_stuck_server"
               " profile_dir profile_max_s profile_max_mb check_every_step"),
    ),
    "scale-out": Topic(
        "several hosts; prefill and decode on servers of their own (docs/scale-out.md)",
        _words("nnodes node_rank dist_init_addr dist_secret_file dist_timeout disaggregation_mode"
               " disaggregation_transfer_backend disaggregation_bootstrap_port disaggregation_host"
               " disaggregation_prefill_hosts disaggregation_secret_file disaggregation_staging_mib"
               " disaggregation_bootstrap_timeout_s disaggregation_peer_timeout_s"),
    ),
}  # fmt: skip


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
    """Parses the command line and the file that it names.

    Raises `ConfigError` for a file that can't be used, and for a word that is not meant to be the MODEL.
    """
    parser = new_parser()
    argv, others = _without_other_values(argv)
    args = _parse_all(parser, argv)
    _check_model(args, parser.get_default("model"))
    if args.config is not None:
        in_file, others_in_file = _without_other_values(_flags_in(args.config, parser))
        # Its own flag ends a list of words that the file may end with.
        args = _parse_all(parser, [*in_file, f"{CONFIG_FLAG}={args.config}", *argv], f" in {args.config}")
        others = [*others_in_file, *others]
    args.without_effect = [*args.without_effect, *others]
    if args.positional_model is not None:
        args.model = args.positional_model
    return args


def parse_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parses a command line of a program that has the flags of `parser`, and takes those of other servers as `parse`.

    Raises `ConfigError`.
    """
    add_foreign_flags(parser)
    argv, others = _without_other_values(argv)
    args = _parse_all(parser, argv)
    args.without_effect = [*args.without_effect, *others]
    return args


def _check_model(args: argparse.Namespace, default: str) -> None:
    """Raises `ConfigError` if the word that would be the MODEL belongs to a flag, which takes no value or one."""
    word = args.positional_model
    if word is None:
        return
    if word.lower() in ("true", "false"):
        raise ConfigError(f"{word} would be the MODEL: switches take no value, so leave {word} out")
    if args.model not in (default, word):
        raise ConfigError(
            f"{word} and --model {args.model} both name the model: give one; if {word} belongs to the flag before it, "
            "that takes one value"
        )


def _parse_all(parser: argparse.ArgumentParser, argv: Sequence[str], where: str = "") -> argparse.Namespace:
    """Parses as `parse_args`, but names the flags that unknown ones come near to."""
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"unrecognized arguments{where}: {', '.join(near_flags(parser, unknown))}")
    return args


def near_flags(parser: argparse.ArgumentParser, words: Iterable[str]) -> list[str]:
    """Returns unknown words of a command line, each with the flag that was meant, if one comes near."""
    flags = [flag for action in parser._actions for flag in action.option_strings if action.help != argparse.SUPPRESS]
    shown: list[str] = []
    for word in words:
        near = difflib.get_close_matches(word.partition("=")[0].replace("_", "-"), flags, n=1, cutoff=LEAST_LIKENESS)
        shown.append(f"{word} (is it {near[0]}?)" if near and word.startswith("-") else word)
    return shown


def _flags_in(path: str, parser: argparse.ArgumentParser) -> list[str]:
    """Returns the command line that the file stands for, of flags of `parser`. Raises `ConfigError`."""
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
            argv += [flag, *words] if flag in _OF_WORDS else [flag, ",".join(words)]
        elif value is True:
            argv.append(flag)
        elif value is False:
            argv += {f"--no-{flag[2:]}"} & parser._option_string_actions.keys()
        elif value is not None:
            argv.append(f"{flag}={value}")
    return argv


# Flags of other servers.

# Values, in lower case, that change nothing here: backends by names of other servers, of libraries or of ways to call
# them; ways to read files; and a number after a switch.
_OTHER_BACKENDS = _words(
    "aiter ascend cutlass_mla dual_chunk_flash_attn fa3 fa4 flash_attn flash_attn_vllm_v1 flashattn_mla flashinfer"
    " flashinfer_mla flashmla flex_attention flex_attention_v1 intel_amx intel_xpu mla nsa pallas rocm_aiter_fa"
    " rocm_attn rocm_flash tokenspeed_mla torch_native torch_sdpa tree_attn triton_attn triton_mla trtllm_mha"
    " trtllm_mla wave xformers"
)
_OTHER_GRAMMARS = ("auto", "guidance", "outlines", "xgrammar")
_OTHER_FILES = ("fastsafetensors", "runai_streamer", "safetensors")
OTHER_VALUES = {
    "--attention-backend": _OTHER_BACKENDS,
    "--ep": ("1",),
    "--grammar-backend": _OTHER_GRAMMARS,
    "--load-format": _OTHER_FILES,
}

_ON = "that is on already"
_COMPILED = "steps are compiled programs in any case"
_FAMILIES = "code of a checkpoint is never run, all families are built in (docs/models.md)"

_SIZES = "give --decode-buckets to choose the compiled sizes"
_XLA = "XLA chooses how devices exchange data, and what it fuses"
_RELEASES = "/release_memory_occupation and /sleep are always there"
_KERNELS = "kernels are our own, the best for the device are chosen (docs/kernels.md)"
_GRAMMARS = "grammars are llguidance's (--grammar-backend)"
_LOG_LINES = "the log has one line of load in ten seconds"
_ONE_PROCESS = "one process drives all devices"
_CHAINS = "drafts are chains of --speculative-num-draft-tokens"

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
    "--disable-log-stats": _LOG_LINES,
    "--disable-uvicorn-access-log": "requests have no line in the log unless --access-log asks for it",
    "--show-time-cost": _LOG_LINES,
    "--headless": "of several hosts (--nnodes) the first alone listens to clients",
    "--disable-cuda-graph-padding": _COMPILED,
    "--disable-hybrid-kv-cache-manager": "there is one",
    "--keep-mm-feature-on-device": "images are encoded once, and kept encoded",
    "--sleep-on-idle": "an idle engine waits for messages",
    "--enforce-eager": _COMPILED,
    "--disable-cuda-graph": _COMPILED,
    "--enable-torch-compile": _COMPILED,
    "--disable-custom-all-reduce": _XLA,
    "--enable-p2p-check": _XLA,
    "--skip-server-warmup": "every program is compiled before the server is ready",
    "--disable-fastapi-docs": "/docs loads nothing from elsewhere",
    "--use-v2-block-manager": "there is one",
    "--enable-prompt-tokens-details": "answers always say how many tokens were cached",
    "--enable-multimodal": "a model with a tower takes images (--language-only leaves it out)",
    "--enable-sleep-mode": _RELEASES,
    "--enable-memory-saver": _RELEASES,
    "--enable-flashinfer-allreduce-fusion": _XLA,
    "--enable-torch-symm-mem": _XLA,
    "--disable-shared-experts-fusion": _XLA,
    "--worker-use-ray": _ONE_PROCESS,
    "--disable-frontend-multiprocessing": "the engine always has a process of its own",
}
# Flag with a value -> the same.
SETTINGS = {
    "--cuda-graph-max-bs": _SIZES,
    "--torch-compile-max-bs": _SIZES,
    "--compilation-config": "give --decode-buckets and --extend-buckets to choose the compiled sizes",
    "--max-seq-len-to-capture": _COMPILED,
    "--sampling-backend": "there is one",
    "--stream-interval": "tokens are sent as they come, merged where a client is slow",
    "--scheduler-delay-factor": "give --schedule-policy or --max-itl-ms",
    "--num-scheduler-steps": "give --decode-steps",
    "--swap-space": "give --host-kv-gib for prefixes in host memory",
    "--distributed-executor-backend": _ONE_PROCESS,
    "--data-parallel-backend": _ONE_PROCESS,
    "--guided-decoding-backend": _GRAMMARS,
    "--moe-runner-backend": "give --kernels experts=...",
    "--reasoning-config": "reasoning is found as the chat template shows (--reasoning-parser)",
    "--structured-outputs-config": _GRAMMARS,
    "--file-storage-path": "files of batches are kept where --batch-dir says",
    "--prefill-attention-backend": _KERNELS,
    "--decode-attention-backend": _KERNELS,
    "--triton-attention-num-kv-splits": _KERNELS,
    "--fp8-gemm-backend": "give --kernels float8=...",
    "--deepep-mode": _XLA,
    "--num-continuous-decode-steps": "give --decode-steps",
    "--speculative-num-steps": _CHAINS,
    "--speculative-eagle-topk": _CHAINS,
    "--watchdog-timeout": "give --watchdog-s",
    "--decode-log-interval": _LOG_LINES,
    "--log-level-http": "give --log-level, or --access-log for a line a request",
    "--log-requests-level": "--log-requests logs sizes and times, never texts",
    "--max-logprobs": "20 are the most",
    "--tokenizer-mode": "the tokenizer is the model folder's",
    "--chat-template-content-format": "messages have the form that the chat template reads",
    "--model-impl": _FAMILIES,
    "--max-parallel-loading-workers": "files are read by as many threads as help",
    "--moe-a2a-backend": _XLA,
    "--lora-backend": "there is one",
    "--mm-attention-backend": "there is one",
    "--mm-encoder-tp-mode": "give --mm-enable-dp-encoder for data",
    "--mm-processor-cache-gb": "give --mm-host-mib for encoded images",
}
# Flag with several numbers -> the same.
LISTS = {"--cuda-graph-bs": _SIZES, "--cuda-graph-sizes": _SIZES}
# Of arguments of `jaxsgl.LLM` alone: what bounds clients of a server.
OFFLINE = {"--limit-mm-per-prompt": "a prompt may have as many media as its context has room for"}
_OF_WORDS = ("--lora-paths", "--lora-modules", *LISTS)
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
    "--limit-mm-per-prompt": "give --media-max-tokens and --media-max-bytes (docs/multimodal.md)",
    "--allowed-local-media-path": "files come as data: URLs, or from --allowed-media-domains",
    "--dtype-kv-cache": "give --kv-cache-dtype",
    "--task": "give --is-embedding, or nothing for a model that generates",
    "--runner": "give --is-embedding, or nothing for a model that generates",
    "--convert": "give --is-embedding, or nothing for a model that generates",
    "--ep-size": "give --ep, which spreads the experts over the devices of --tp",
    "--download-dir": "set HF_HUB_CACHE",
    "--hicache-ratio": "give --host-kv-gib",
    "--kv-cache-memory-bytes": "give --max-total-tokens",
    "--num-gpu-blocks-override": "give --max-total-tokens",
    "--kv-transfer-config": "give --disaggregation-mode, or --host-kv-gib (docs/scale-out.md)",
    "--scheduling-policy": "give --schedule-policy, or --enable-priority-scheduling (docs/scheduling.md)",
    "--override-generation-config": "edit the folder's generation_config.json",
    "--preferred-sampling-params": "edit the folder's generation_config.json",
    "--no-enable-chunked-prefill": "give --chunked-prefill-size -1",
    "--completion-template": "send the whole prompt to /v1/completions",
    "--default-chat-template-kwargs": "send chat_template_kwargs with each request",
    "--mm-processor-kwargs": "give --mm-max-patches (docs/multimodal.md)",
    "--skip-tokenizer-init": "send input_ids to /generate, which has output_ids in its answers",
}


def _without_other_values(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the words but the flags of `OTHER_VALUES`, and these, each as `flag value`. Raises `ConfigError`."""
    words: list[str] = []
    others: list[str] = []
    index = 0
    while index < len(argv):
        flag, equals, value = argv[index].partition("=")
        after = 1
        if not equals and flag in OTHER_VALUES and index + 1 < len(argv):
            value, after = argv[index + 1], 2
        if flag == "--ep" and value.isdigit() and value != "1":
            raise ConfigError(f"--ep takes no number: give --tp {value} --ep, and each device has whole experts")
        if value.lower() in OTHER_VALUES.get(flag, ()):
            others.append(f"{flag} {value.lower()}")
        else:
            words += argv[index : index + 1]
            after = 1
        index += after
    return words, others


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
    kinds: list[tuple[Iterable[str], dict[str, Any]]] = [
        (SWITCHES, {"action": _Ignored, "nargs": 0}), (SETTINGS, {"action": _Ignored}),
        (LISTS, {"action": _Ignored, "nargs": "+", "type": int}),  # a MODEL behind the numbers is no number
        (REFUSED, {"action": _Refused, "nargs": "?"}),
    ]  # fmt: skip
    hidden = argparse.SUPPRESS
    for flags, how in kinds:
        for name in flags:
            parser.add_argument(name, **how, dest=hidden, default=hidden, help=hidden)


def words_of(without_effect: Sequence[str]) -> list[str]:
    """Returns a line for each flag that has no effect."""
    reasons = {"--attention-backend": _KERNELS, "--ep": "each device has all experts without it"}
    reasons |= {"--grammar-backend": _GRAMMARS, "--load-format": "files are read as they are"}
    of_values = {f"{flag} {value}": reasons[flag] for flag, values in OTHER_VALUES.items() for value in values}
    why = SWITCHES | SETTINGS | LISTS | OFFLINE | of_values
    return [f"{name} changes nothing here: {why[name]}" for name in dict.fromkeys(without_effect)]


def own_arguments(config_type: type, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the arguments of `jaxsgl.LLM` that are for `config_type`, and those without effect, as `words_of` takes.

    Raises `ConfigError` for one that would change something, with the way out.
    """
    names = fields_by_name(config_type)
    own: dict[str, Any] = {}
    without_effect: list[str] = []
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        if value is False and f"no_{name}" in names:
            own[f"no_{name}"] = True
        elif isinstance(value, str) and value.lower() in OTHER_VALUES.get(flag, ()):
            without_effect.append(f"{flag} {value.lower()}")
        elif flag in SWITCHES | SETTINGS | LISTS | OFFLINE:
            without_effect.append(flag)
        elif flag not in REFUSED:
            own[name] = value
        elif value not in (None, False) and (value is True or value != 1):  # one of something is what there is
            raise ConfigError(f"{name} is no argument: {REFUSED[flag]}")
    return own, without_effect
