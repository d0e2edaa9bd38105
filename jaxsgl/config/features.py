"""Flags of optional features, one frozen dataclass each: images, media, host tier, adapters, drafts, disaggregation.

`EngineConfig` (engine.py) composes all of them but `MediaConfig`, which is part of `ServerConfig` (server.py). Every
part may import this module.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from jaxsgl.config.flags import check_choices, flag, flag_name, require
from jaxsgl.errors import ConfigError
from jaxsgl.shared_secret import MIN_SECRET_BYTES, is_this_machine, read_secret

HASH_IDS = ("digest", "sglang")
_DOMAIN = re.compile(r"\*|(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?(:[0-9]{1,5})?")

WRITE_POLICIES = ("write_through", "write_through_selective")  # SGLang's names
HOST_POOLS = 2.0  # with --enable-hierarchical-cache alone, host memory holds so many pools, as in SGLang
KEEP_KV_S = 600.0

ALL_MODULES = "all"
MAX_ADAPTER_NAME_CHARS = 256
MAX_ADAPTERS = 1024
_ADAPTER_FORMS = 'name=folder, or {"name": "...", "path": "..."}'
_WITHOUT_EFFECT = ("base_model_name",)  # of such objects, vLLM's: the parent in lists of models

DRAFTING_FROM_TEXT = ("NGRAM", "SUFFIX")
DRAFTING_FROM_OTHER_WEIGHTS = ("EAGLE3", "STANDALONE")
DRAFTING_FROM_WEIGHTS = (*DRAFTING_FROM_OTHER_WEIGHTS, "NEXTN")
DRAFTING = (*DRAFTING_FROM_TEXT, *DRAFTING_FROM_WEIGHTS)
DRAFTING_LATER = ("EAGLE",)  # SGLang's
NUM_DRAFT_TOKENS = 7
NUM_TOKENS_OF_CHAIN = 5  # each one is a step of the drafting model
NUM_TOKENS_OF_NEXT = 3  # the layer was trained for the first one
MAX_DRAFT_TOKENS = 31
MATCH_WINDOW = (2, 4)
MAX_MATCH_WINDOW = 32

ALL_IN_ONE = "null"  # SGLang's word for a worker that computes both prefill and decode
DISAGGREGATION_MODES = (ALL_IN_ONE, "prefill", "decode")
BOOTSTRAP_PORT = 8998  # SGLang's
TRANSFER_BACKENDS = ("tcp", "nixl")
_MIB = 1 << 20
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class VisionConfig:
    """The tower that sees or hears, and the embeddings that it makes."""

    language_only: bool = flag(
        False,
        "leave the tower of a model that sees or hears out, and refuse requests with images or sounds",
        alias="--language-model-only",
    )
    mm_enable_dp_encoder: bool = flag(
        False, "the devices of --tp share the images of a step, each encodes whole ones; else each encodes all"
    )
    mm_pool_tokens: int | None = flag(
        None,
        "tokens of images whose embeddings stay on the device, so that an image is encoded once "
        "(default: 4096 on a CPU, else 16384)",
    )
    mm_host_mib: int | None = flag(
        None,
        "MiB of host memory for embeddings of images that the device has let go, so that they come back instead of "
        "being encoded again; 0: none (default: 1024 on a CPU, else 4096)",
    )
    mm_max_patches: int | None = flag(
        None,
        "patches of one image at most, of all its tiles, 4 of which are a token (of Gemma 9 or 16; default: 4096 on a "
        "CPU, else 16384)",
    )
    media_max_tokens: int = flag(
        32_768,
        "tokens of all media of a request at most, each of which takes some 6 KiB of host memory while the request "
        "waits; one picture, pair of frames or chunk of a sound for each 32 of them",
    )

    def __post_init__(self) -> None:
        for name, value in (("--mm-pool-tokens", self.mm_pool_tokens), ("--mm-max-patches", self.mm_max_patches)):
            require(value is None or value >= 16, name, value, "16 and more")
        require(self.mm_host_mib is None or self.mm_host_mib >= 0, "--mm-host-mib", self.mm_host_mib, "0 and more")
        in_bounds = 256 <= self.media_max_tokens <= 1 << 20
        require(in_bounds, "--media-max-tokens", self.media_max_tokens, "256 to 2**20")


@dataclass(frozen=True)
class MediaConfig:
    """Pictures, videos and sounds in requests (docs/multimodal.md)."""

    allowed_media_domains: tuple[str, ...] = flag(
        (),
        "hosts from which media are fetched, as images.example.org,*.example.com,cdn.example.net:8443; "
        "only at global addresses (default: none, requests bring their pictures as data: URLs)",
    )
    media_max_bytes: int = flag(
        64 << 20, "bytes of all media of a request at most, as files; see --max-request-bytes, too"
    )
    media_max_pixels: int = flag(1 << 25, "pixels of a picture at most, by its header, before it is decoded")
    media_max_decode_bytes: int = flag(
        192 << 20,
        "memory for decoding pictures, in bytes, of each front-end process; a picture that takes more by its header is "
        "refused, and one that finds too little left waits (JPEG and PNG take 4 to 6 bytes a pixel, WebP 16)",
    )
    media_max_cpu_s: float = flag(20.0, "seconds of processor time that decoding all media of a request may take")
    media_timeout_s: float = flag(10.0, "seconds that fetching a file may take, redirects included")
    mm_hash_ids: str = flag(
        "digest",
        "what stands for pictures in the prefix cache and in KV events; digest: numbers drawn from their SHA-256; "
        "sglang: one number of 30 bits for each, by SGLang's formula, for routers that know it",
        choices=HASH_IDS,
    )

    def __post_init__(self) -> None:
        check_choices(self)
        for domain in self.allowed_media_domains:
            fits = _DOMAIN.fullmatch(domain) is not None
            require(fits, "--allowed-media-domains", domain, "names as example.org, *.example.org or example.org:8443")
        require(self.media_max_bytes >= 1024, "--media-max-bytes", self.media_max_bytes, "1024 and more")
        require(1024 <= self.media_max_pixels <= 1 << 28, "--media-max-pixels", self.media_max_pixels, "1024 to 2**28")
        least = self.media_max_decode_bytes >= 1 << 20
        require(least, "--media-max-decode-bytes", self.media_max_decode_bytes, "2**20 and more")
        cpu_s = self.media_max_cpu_s
        require(0 < cpu_s <= 3600, "--media-max-cpu-s", cpu_s, "above 0, up to 3600")
        require(0 < self.media_timeout_s <= 600, "--media-timeout-s", self.media_timeout_s, "above 0, up to 600")


@dataclass(frozen=True)
class HostKvConfig:
    """Prefixes that outlive the pool in host memory (docs/prefix-cache.md)."""

    enable_hierarchical_cache: bool = flag(
        False, f"keep prefixes in host memory: {HOST_POOLS:g} times the pool, unless --host-kv-gib says how much"
    )
    host_kv_gib: float = flag(
        0.0,
        "GiB of host memory for prefixes, which are loaded back when they have left the pool; 0: none",
        alias="--hicache-size",
    )
    host_kv_write_policy: str = flag(
        "write_through_selective",
        "which pages are copied to host memory: write_through: all, once computed; write_through_selective: those that "
        "are needed a second time, and what follows them first",
        choices=WRITE_POLICIES,
        alias="--hicache-write-policy",
    )
    host_kv_load_timeout_s: float = flag(
        5.0, "seconds that a request waits for its prefix from host memory; then it computes the rest"
    )

    kv_file: str | None = flag(
        None,
        "folder where the prefixes of host memory are kept between starts, by model and format; needs --host-kv-gib",
    )

    @property
    def keep_s(self) -> float:
        """Seconds that the engine may take at its end to write the file."""
        return 0.0 if self.kv_file is None else KEEP_KV_S

    @property
    def is_on(self) -> bool:
        """Whether there is a host tier."""
        return self.enable_hierarchical_cache or self.host_kv_gib > 0

    def __post_init__(self) -> None:
        require(self.host_kv_gib >= 0, "--host-kv-gib", self.host_kv_gib, "0 and more")
        if self.kv_file is not None and not self.is_on:
            raise ConfigError("--kv-file keeps what is in host memory, but there is none for it: give --host-kv-gib")
        require(self.host_kv_load_timeout_s > 0, "--host-kv-load-timeout-s", self.host_kv_load_timeout_s, "more than 0")
        check_choices(self)


@dataclass(frozen=True)
class LoraConfig:
    """LoRA adapters of the model (docs/lora.md). Names and defaults of flags are SGLang's."""

    enable_lora: bool = flag(False, "let adapters be loaded while serving; --lora-paths implies it")
    lora_paths: tuple[str, ...] = flag(
        (),
        "adapters to load at the start, as name=folder other=folder, or as vLLM's and SGLang's JSON objects; a folder "
        "alone is its own name",
        words=True,
        alias="--lora-modules",
    )
    max_loras_per_batch: int = flag(
        8, "adapters that run at the same time; requests for further ones wait", alias="--max-loras"
    )
    max_lora_rank: int | None = flag(
        None, "the highest rank of an adapter (default: that of the adapters at the start, or 16)"
    )
    lora_target_modules: tuple[str, ...] = flag(
        (),
        "modules that adapters may change, as q_proj,v_proj, or all (default: those of the adapters at the start, or "
        "all)",
    )
    max_loaded_loras: int | None = flag(
        None,
        "adapters in host memory at once; more are refused until one is unloaded (default: no limit)",
        alias="--max-cpu-loras",
    )

    @property
    def is_on(self) -> bool:
        """Whether requests may have adapters."""
        return self.enable_lora or bool(self.lora_paths)

    @property
    def adapters(self) -> dict[str, str]:
        """The folders of the adapters at the start, by name."""
        return {name: str(Path(folder).expanduser()) for name, folder in map(_name_and_folder, self.lora_paths)}

    def __post_init__(self) -> None:
        given: Any = self.lora_paths
        if not isinstance(given, list | tuple) or not all(isinstance(entry, str) for entry in given):
            raise ConfigError(f"lora_paths is {given!r:.200}, but must be a list of texts: write ['name=folder']")
        names = [name for name, _ in map(_name_and_folder, self.lora_paths)]
        allowed = f"names of 1 to {MAX_ADAPTER_NAME_CHARS} characters"
        for name in names:
            require(1 <= len(name) <= MAX_ADAPTER_NAME_CHARS, "--lora-paths", repr(name), allowed)
        if len(set(names)) < len(names):
            raise ConfigError(f"--lora-paths name an adapter twice: {', '.join(names)}")
        most = self.max_loras_per_batch
        require(1 <= most <= MAX_ADAPTERS, "--max-loras-per-batch", most, f"1 to {MAX_ADAPTERS}")
        rank = self.max_lora_rank
        require(rank is None or 1 <= rank <= 1024, "--max-lora-rank", rank, "1 to 1024")
        loaded = self.max_loaded_loras
        if loaded is not None and loaded < max(len(names), 1):
            raise ConfigError(f"--max-loaded-loras is {loaded}, but --lora-paths has {len(names)}: raise it")


def _name_and_folder(entry: str) -> tuple[str, str]:
    """Of an entry of --lora-paths. Raises `ConfigError`."""
    if not entry.startswith("{"):
        name, equals, folder = entry.partition("=")
        if equals and not folder:
            raise ConfigError(f"--lora-paths {entry:.200} names no folder: write {_ADAPTER_FORMS}")
        return name, folder or name
    try:
        keys = json.loads(entry)
    except ValueError as error:
        raise ConfigError(f"--lora-paths {entry:.200} is no JSON ({error}): write {_ADAPTER_FORMS}") from None
    name, folder = (keys.pop(f"lora_{key}", None) or keys.pop(key, None) for key in ("name", "path"))
    if not (isinstance(name, str) and isinstance(folder, str) and name and folder):
        raise ConfigError(f"--lora-paths {entry:.200} needs a name and a path: write {_ADAPTER_FORMS}")
    for key, value in keys.items():
        if value and key not in _WITHOUT_EFFECT:
            raise ConfigError(
                f"--lora-paths {entry:.200} holds {key}, which isn't taken at the start: leave it out, or load the "
                "adapter by /load_lora_adapter"
            )
    return name, folder


@dataclass(frozen=True)
class SpeculationConfig:
    """Drafts of tokens that one step verifies together (docs/speculation.md). Names are SGLang's, SUFFIX is vLLM's."""

    speculative_algorithm: str | None = flag(
        None,
        "how the next tokens are guessed, which one step then verifies together; answers stay the same. NGRAM: what "
        "followed the same tokens earlier in prompt and output; SUFFIX: likewise, by how often it did, and in earlier "
        "answers with --speculative-suffix-cache-mib; EAGLE3: what a head says that was trained for the model; "
        "STANDALONE: what a smaller model says; NEXTN: what the checkpoint's own layer after the last one says "
        "(default: not at all; docs/speculation.md)",
        choices=(*DRAFTING, *DRAFTING_LATER),
    )
    speculative_num_draft_tokens: int | None = flag(
        None,
        f"tokens of a request that one step verifies at most (default: {NUM_DRAFT_TOKENS}; EAGLE3 "
        f"and STANDALONE: {NUM_TOKENS_OF_CHAIN}, NEXTN: {NUM_TOKENS_OF_NEXT})",
    )
    speculative_ngram_min_match_window_size: int | None = flag(
        None, f"NGRAM: tokens that must have stood earlier, at least (default: {MATCH_WINDOW[0]})"
    )
    speculative_ngram_max_match_window_size: int | None = flag(
        None, f"NGRAM: tokens that are compared; the longest match wins (default: {MATCH_WINDOW[1]})"
    )
    speculative_suffix_cache_mib: int = flag(
        0,
        "SUFFIX: MiB of host memory for past answers, in which tokens are looked up too; only among requests of an "
        "equal cache_salt and adapter. 0: none is kept",
    )
    speculative_draft_model_path: str | None = flag(
        None,
        "local folder or hub id; EAGLE3: of the head, in SpecForge's format or speculators' (default: the bundled "
        "model's, for the bundled model); STANDALONE: of a model with the same tokenizer",
    )

    @property
    def is_on(self) -> bool:
        """Whether requests may have drafts."""
        return self.speculative_algorithm is not None

    @property
    def is_from_weights(self) -> bool:
        """Whether a model drafts."""
        return self.speculative_algorithm in DRAFTING_FROM_WEIGHTS

    @property
    def num_draft_tokens(self) -> int:
        """Tokens of a request that one step verifies at most; 0 if none is."""
        default = NUM_TOKENS_OF_CHAIN if self.is_from_weights else NUM_DRAFT_TOKENS
        if self.speculative_algorithm == "NEXTN":
            default = NUM_TOKENS_OF_NEXT
        return (self.speculative_num_draft_tokens or default) if self.is_on else 0

    @property
    def match_window(self) -> tuple[int, int]:
        """Tokens of a match of NGRAM, at least and at most."""
        least = self.speculative_ngram_min_match_window_size or MATCH_WINDOW[0]
        return least, self.speculative_ngram_max_match_window_size or max(MATCH_WINDOW[1], least)

    def __post_init__(self) -> None:
        check_choices(self)
        algorithm = self.speculative_algorithm
        if algorithm in DRAFTING_LATER:
            raise ConfigError(
                f"--speculative-algorithm {algorithm} is not built yet: give {', '.join(DRAFTING_FROM_TEXT)}, which "
                f"guess from texts alone, or {' or '.join(DRAFTING_FROM_WEIGHTS)}"
            )
        for name, algorithms in (
            ("speculative_draft_model_path", DRAFTING_FROM_OTHER_WEIGHTS),
            ("speculative_num_draft_tokens", DRAFTING),
            ("speculative_ngram_min_match_window_size", ("NGRAM",)),
            ("speculative_ngram_max_match_window_size", ("NGRAM",)),
            ("speculative_suffix_cache_mib", ("SUFFIX",)),
        ):
            if getattr(self, name) and algorithm not in algorithms:
                raise ConfigError(
                    f"{flag_name(name)} goes with --speculative-algorithm {' or '.join(algorithms)}: give that, or "
                    "leave it out"
                )
        drafts = self.speculative_num_draft_tokens
        name = "--speculative-num-draft-tokens"
        require(drafts is None or 1 <= drafts <= MAX_DRAFT_TOKENS, name, drafts, f"1 to {MAX_DRAFT_TOKENS}")
        for name in ("speculative_ngram_min_match_window_size", "speculative_ngram_max_match_window_size"):
            size = getattr(self, name)
            require(size is None or 1 <= size <= MAX_MATCH_WINDOW, flag_name(name), size, f"1 to {MAX_MATCH_WINDOW}")
        least, most = self.match_window
        require(least <= most, flag_name("speculative_ngram_min_match_window_size"), least, f"{most} at most, the max")
        mib = self.speculative_suffix_cache_mib
        require(0 <= mib <= 1 << 20, "--speculative-suffix-cache-mib", mib, f"0 to {1 << 20}")


@dataclass(frozen=True)
class DisaggregationConfig:
    """Which leg of each request this server computes, and what may wait on its way (docs/scale-out.md)."""

    disaggregation_mode: str = flag(
        ALL_IN_ONE,
        "prefill: compute prompts and send their KV pages to decode servers; decode: get them and generate; behind a "
        "gateway that sends each request to one of each (docs/scale-out.md)",
        choices=DISAGGREGATION_MODES,
    )
    disaggregation_transfer_backend: str = flag(
        "tcp",
        "how KV pages travel, the same on all prefill and decode servers: tcp, which needs nothing installed, or nixl, "
        "over RDMA or shared memory, after pip install --no-deps nixl-cu12 (docs/scale-out.md)",
        choices=TRANSFER_BACKENDS,
    )
    disaggregation_bootstrap_port: int = flag(
        BOOTSTRAP_PORT, "where a prefill server listens for decode servers, at --host; 0 takes a free one"
    )
    disaggregation_host: str | None = flag(
        None, "address at which a prefill server listens for decode servers; keep it private (default: --host)"
    )
    disaggregation_prefill_hosts: tuple[str, ...] = flag(
        (),
        "addresses, networks and names of the prefill servers to which requests may send a decode server, as "
        "10.0.0.0/24,prefill-0; *: any (default: this machine's loopback addresses)",
    )
    disaggregation_secret_file: str | None = flag(
        None,
        f"file of {MIN_SECRET_BYTES} bytes and more, the same on all prefill and decode servers, by which they know "
        "each other; other users may not read it. Needed once they are on several machines",
    )
    disaggregation_staging_mib: int = flag(
        4096,
        "MiB of host memory for KV pages on their way; requests wait for it, and of a prompt that is larger decode "
        "computes the rest",
    )
    disaggregation_bootstrap_timeout_s: float = flag(
        30.0, "seconds that a request waits for a sign of its other side; then it is refused"
    )
    disaggregation_peer_timeout_s: float = flag(
        5.0, "seconds of silence after which a prefill or decode server counts as dead; it says every second it lives"
    )

    @property
    def is_on(self) -> bool:
        """Whether this server computes one leg of requests only."""
        return self.disaggregation_mode != ALL_IN_ONE

    @property
    def staging_bytes(self) -> int:
        """Host memory for KV pages on their way."""
        return self.disaggregation_staging_mib * _MIB

    def __post_init__(self) -> None:
        check_choices(self)
        port = self.disaggregation_bootstrap_port
        require(0 <= port <= 65535, flag_name("disaggregation_bootstrap_port"), port, "0 to 65535")
        for name in ("disaggregation_staging_mib", "disaggregation_peer_timeout_s"):
            require(getattr(self, name) >= 1, flag_name(name), getattr(self, name), "1 and more")
        timeout_s = self.disaggregation_bootstrap_timeout_s
        require(timeout_s > 0, flag_name("disaggregation_bootstrap_timeout_s"), timeout_s, "more than 0")
        networks_and_names(self.disaggregation_prefill_hosts)

    def check_secret(self, host: str) -> None:
        """Checks what a server whose `--host` is `host` needs of a secret.

        Raises:
          ConfigError: the file can't be used, or there is none and other machines may take part.
        """
        self.read_secret()
        if self.disaggregation_secret_file is not None or not self.is_on:
            return
        if self.disaggregation_mode == "prefill":
            at = self.disaggregation_host or host
            opened, way_out = f"decode servers may connect to {at}", "--disaggregation-host 127.0.0.1"
            is_open = not is_this_machine(at)
        else:
            hosts = self.disaggregation_prefill_hosts
            opened, way_out = f"--disaggregation-prefill-hosts is {','.join(hosts)}", "loopback addresses alone"
            is_open = bool(hosts) and not _is_loopback(hosts)
        if is_open:
            raise ConfigError(
                f"{opened}, but there is no secret by which prefill and decode servers know each other: give all the "
                f"same --disaggregation-secret-file (openssl rand -hex 32 makes one), or {way_out}"
            )

    def read_secret(self) -> bytes:
        """Returns what --disaggregation-secret-file holds, without white space at the end; b"" if it isn't given.

        Raises:
          ConfigError: it can't be read, others may use it, or its size is wrong.
        """
        path = self.disaggregation_secret_file
        return b"" if path is None else read_secret(path, "--disaggregation-secret-file")


def networks_and_names(hosts: Sequence[str]) -> tuple[list[Network], set[str]]:
    """Returns the networks among `hosts`, addresses included, and the names in lower case, "*" among them.

    Raises:
      ConfigError: one is neither.
    """
    networks, names = list[Network](), set[str]()
    for host in hosts:
        try:
            networks.append(ipaddress.ip_network(host, strict=False))
        except ValueError:
            is_name = re.fullmatch(r"\*|[\w.-]*[A-Za-z][\w.-]*", host) is not None
            wanted = "addresses, networks as 10.0.0.0/24, names without ports, or *"
            require(is_name, flag_name("disaggregation_prefill_hosts"), host, wanted)
            names.add(host.lower())
    return networks, names


def _is_loopback(hosts: Sequence[str]) -> bool:
    networks, names = networks_and_names(hosts)
    return names <= {"localhost"} and all(network.is_loopback for network in networks)
