"""`ServerConfig`: what `python -m jaxsgl.serve` takes beyond engine.py: ports, keys, limits.

Values and combinations that can't work fail in `__post_init__`. The engine process never sees it.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.features import MediaConfig
from jaxsgl.config.flags import check_choices, check_finite, flag, flag_name, require
from jaxsgl.errors import ConfigError

# The names that text/dialects.py knows; a test compares them, since flags import no text.
TOOL_CALL_PARSERS = (
    "auto", "none",
    "hermes", "longcat", "qwen3_coder", "seed_oss", "glm45", "llama3", "mistral", "mistral_v11", "kimi_k2",
    "deepseek_v31", "deepseek_v3", "minimax_m2", "deepseek_v32", "deepseek_v4", "granite", "phi4_mini", "functools",
    "hunyuan", "nemotron", "cohere", "olmo3", "lfm2", "pythonic", "gemma4", "json", "gpt-oss",
    "qwen", "qwen25", "smollm3", "granite4", "qwen3_xml", "glm", "glm47", "llama3_json", "llama4_json",
    "llama4_pythonic", "minimax-m2", "deepseek-v3", "deepseekv3", "deepseekv31", "deepseekv32", "deepseekv4",
    "phi4_mini_json", "hunyuan_a13b", "nemotron_json", "llama_nemotron_json", "openai", "mimo", "step3p5", "ernie45",
    "jamba", "cohere_command3", "cohere_command4",
)  # fmt: skip
REASONING_PARSERS = (
    "auto", "none",
    "think", "think_answer", "think_always", "mistral", "seed_oss", "granite", "cohere", "gemma4", "gpt-oss",
    "qwen3", "deepseek-v3", "deepseek_v3", "glm45", "interns1", "kimi_k2", "nano_v3", "nemotron_v3",
    "olmo3", "smollm3", "deepseek-r1", "deepseek_r1", "qwen3-thinking", "step3", "minimax", "minimax_m2",
    "hunyuan_a13b", "ernie45", "glm47", "mimo", "nemotron_3", "step3p5", "deepseek-v4", "deepseek_v4",
    "openai_gptoss", "cohere_command3", "cohere_command4",
)  # fmt: skip
SAMPLING_DEFAULTS = ("model", "openai", "auto", "vllm")
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
RESPONSES_STORE_MIB = 64
MAX_BODY_BYTES = 16 << 20  # a photo of a phone, in base64
MAX_MESSAGE_BYTES = 4 << 20
MAX_WORKERS = 64
MAX_REPLICAS = 64
API_KEY_VARIABLE = "JAXSGL_API_KEY"  # in the environment of servers and clients
ADMIN_API_KEY_VARIABLE = "JAXSGL_ADMIN_API_KEY"  # in the environment of servers
KEY_PATTERN = r"[!-~]+"
ANY_FOLDER = "*"  # for --lora-root and --weights-root
ANY_MODEL = "default"  # for clients that must name a model and don't care which


@dataclass(frozen=True)
class ServerConfig:
    """What `python -m jaxsgl.serve` needs: the engine's configuration and where to listen."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    host: str = flag("127.0.0.1", "address to listen on; 0.0.0.0 for all")
    port: int = flag(30000, "HTTP port; 0 takes a free one", alias="--http-port")
    grpc_port: int = flag(30001, "gRPC port; 0 takes a free one")
    tokenizer_worker_num: int = flag(
        1,
        "front-end processes that share both ports and the engine, one core each (docs/operations.md)",
        alias="--api-server-count",
    )
    served_model_name: str | None = flag(
        None, "the model's name in the APIs (default: its folder's name, or its hub id)"
    )
    chat_template: str | None = flag(
        None, "file of the chat template (Jinja), or the template itself, in place of the one in the model's folder"
    )
    sampling_defaults: str = flag(
        "model",
        "what requests that don't say so are sampled with, in the APIs of OpenAI, Anthropic and Ollama; model (vLLM: "
        "auto): temperature, top_p, top_k, min_p and repetition_penalty of the model's generation_config.json; openai "
        "(vLLM: vllm): OpenAI's",
        choices=SAMPLING_DEFAULTS,
        alias="--generation-config",
    )
    tool_call_parser: str = flag(
        "auto",
        "how the model writes tool calls; auto: as its chat template shows; none: calls stay text (docs/tools.md)",
        choices=TOOL_CALL_PARSERS,
    )
    reasoning_parser: str = flag(
        "auto",
        "how the model marks its reasoning; auto: as its chat template shows; none: it stays text (docs/tools.md)",
        choices=REASONING_PARSERS,
    )
    free_tool_calls: bool = flag(
        False,
        "hold calls to a grammar only where tool_choice demands them or a tool is strict; others may be malformed",
    )
    trust_request_chat_template: bool = flag(
        False,
        "let requests bring a chat_template of their own: it runs in a process of its own, for 2 s at most",
    )
    split_special_tokens: bool = flag(
        False,
        "names of special tokens in messages of chats are ordinary text: for strangers' texts in messages "
        "(prompts that are no chats keep them)",
    )
    api_key: str | None = flag(
        None,
        f"what clients must send as `Authorization: Bearer KEY`; better set in {API_KEY_VARIABLE}, which `ps` hides",
        secret=True,
    )
    api_key_file: str | None = flag(
        None, "file with further keys of clients, one per line; each key has a prefix cache of its own"
    )
    admin_api_key: str | None = flag(
        None,
        "the only key for orders (flush, pause, abort, profile) and for the server's state; better set in "
        f"{ADMIN_API_KEY_VARIABLE}",
        secret=True,
    )
    lora_root: str | None = flag(
        None,
        "folder below which adapters may be loaded while serving; *: any folder or hub id (default: any with the key "
        "of --admin-api-key or --api-key, none without a key)",
    )
    weights_root: str | None = flag(
        None, "folder below which /update_weights_from_disk may load weights; *, and the default, as of --lora-root"
    )
    allowed_hosts: tuple[str, ...] = flag(
        (), "more names under which clients may address the HTTP port, as llm.example.org,other.org; *: any name"
    )
    allowed_origins: tuple[str, ...] = flag(
        (), "web sites whose pages may call the HTTP port, as https://chat.example.org (default: none; *: all)"
    )
    batch_dir: str | None = flag(
        None, "folder for /v1/files and /v1/batches, which outlive the server; without it there are none"
    )
    allow_get_control: bool = flag(False, "accept SGLang's GET, too, where POST changes the server's state")
    ssl_certfile: str | None = flag(None, "TLS certificate (PEM) for HTTP and gRPC; needs --ssl-keyfile")
    ssl_keyfile: str | None = flag(None, "private key (PEM) of --ssl-certfile")
    max_connections: int | None = flag(
        None,
        "connections of each port at once; past them HTTP answers probes only (default: what the limit of open files "
        "allows, 16384 at most)",
    )
    max_request_bytes: int | None = flag(
        None,
        "size of one request's body or message at most (default: 16 MiB over HTTP, of which 4 MiB may be other than "
        "files in base64, and 4 MiB over gRPC)",
    )
    responses_store: int | None = flag(
        None,
        "MiB of memory for answers of /v1/responses, which previous_response_id may continue; the oldest make room. 0: "
        f"none (default: {RESPONSES_STORE_MIB}; 0 with --tokenizer-worker-num, whose processes share no memory)",
    )
    request_timeout_s: float = flag(3600.0, "seconds that a request may take, queue included")
    drain_s: float = flag(30.0, "seconds that open requests get to finish after Ctrl-C or SIGTERM")
    watchdog_s: float = flag(
        60.0,
        "seconds without a sign of life after which the engine counts as stuck and requests are refused; after five "
        "times as many the server ends with status 1, so that a supervisor starts it again",
    )
    keep_stuck_server: bool = flag(False, "do not end the server, however long the engine is stuck")
    profile_dir: str | None = flag(None, "local folder for profiles; without it none can be recorded")
    profile_max_s: float = flag(60.0, "seconds after which a profile ends by itself")
    profile_max_mb: int = flag(
        1024, "megabytes of memory that a profile may take, and of files that --profile-dir may hold"
    )
    log_level: str = flag("info", "least severe level that is logged", choices=LOG_LEVELS, alias="--uvicorn-log-level")
    access_log: bool = flag(False, "a line in the log for each HTTP request: its status, and seconds to its end")
    log_requests: bool = flag(
        False,
        "the line in which a request ends, with its tokens and times, at level info instead of debug",
        alias="--enable-log-requests",
    )
    otlp_traces_endpoint: str | None = flag(
        None,
        "collector that takes a span of each request, as http://localhost:4317; needs the extra otel "
        "(docs/operations.md)",
    )
    log_format: str = flag("text", "lines for people or JSON objects for machines", choices=LOG_FORMATS)

    def __post_init__(self) -> None:
        self._check_ports()
        self._check_processes()
        self._check_limits()
        self._check_keys()
        self._check_folders()
        self._check_sites()
        self._check_profiles()
        check_choices(self)
        self.engine.disaggregation.check_secret(self.host)

    def _check_ports(self) -> None:
        for name in ("port", "grpc_port"):
            require(0 <= getattr(self, name) <= 65535, flag_name(name), getattr(self, name), "0 to 65535")
        if self.port:
            require(self.port != self.grpc_port, "--grpc-port", self.grpc_port, "another than --port")

    def _check_processes(self) -> None:
        """Raises `ConfigError` for numbers of processes, and for what works with one process of a kind alone."""
        workers, replicas = self.tokenizer_worker_num, self.num_replicas
        require(1 <= workers <= MAX_WORKERS, "--tokenizer-worker-num", workers, f"1 to {MAX_WORKERS}")
        if workers > 1:
            check_finite(self)
        store = self.responses_store
        require(store is None or 0 <= store <= 1 << 20, "--responses-store", store, f"0 to {1 << 20}")
        if store and workers > 1:
            raise ConfigError(
                "--responses-store keeps answers in a front-end process, and --tokenizer-worker-num starts several, "
                "which would not find each other's: give one"
            )
        require(replicas <= MAX_REPLICAS, "--dp-size", replicas, f"1 to {MAX_REPLICAS}")
        if replicas > 1 and self.engine.disaggregation.disaggregation_mode == "prefill":
            raise ConfigError("--disaggregation-mode prefill goes with --dp-size 1: start one server per replica")
        if replicas > 1 and self.engine.device_ids:
            raise ConfigError("--dp-size gives each replica devices of its own, but --device-ids names some: give one")
        if self.engine.hosts.are_several:
            for name, value in (("--dp-size", replicas), ("--tokenizer-worker-num", workers)):
                require(value == 1, name, value, "1 with --nnodes; put several such servers behind a gateway")
        if self.batch_dir is not None and workers > 1:
            raise ConfigError("--batch-dir goes with --tokenizer-worker-num 1: one process runs the batches")

    def _check_limits(self) -> None:
        for name in ("request_timeout_s", "watchdog_s"):
            require(getattr(self, name) > 0, flag_name(name), getattr(self, name), "more than 0")
        most = self.max_connections
        require(most is None or most >= 1, "--max-connections", most, "1 and more")
        require(self.drain_s >= 0, "--drain-s", self.drain_s, "0 and more")
        most = self.max_request_bytes
        require(most is None or most >= 1024, "--max-request-bytes", most, "1024 and more")

    def _check_keys(self) -> None:
        """Raises `ConfigError`, which doesn't show a key, for keys that no header can carry and for half of TLS."""
        for name in ("api_key", "admin_api_key"):
            key = getattr(self, name)
            require(
                key is None or re.fullmatch(KEY_PATTERN, key) is not None,
                flag_name(name),
                "empty or holds other characters",
                "printable ASCII without spaces",
            )
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("only one of --ssl-certfile and --ssl-keyfile is given, but TLS needs both")

    def _check_folders(self) -> None:
        """Raises `ConfigError` for names and folders of adapters and weights that clients may ask for."""
        for name in (ANY_MODEL, self.model_name):
            require(name not in self.engine.lora.adapters, "--lora-paths", name, "names other than the model's")
        for name in ("lora_root", "weights_root"):
            root = getattr(self, name)
            require(
                root in (None, ANY_FOLDER) or Path(root).expanduser().is_dir(), flag_name(name), root, "a folder or *"
            )

    def _check_profiles(self) -> None:
        folder = self.profile_dir
        require(folder is None or (folder != "" and "://" not in folder), "--profile-dir", folder, "a local folder")
        require(0 < self.profile_max_s <= 3600, "--profile-max-s", self.profile_max_s, "above 0, up to 3600")
        require(self.profile_max_mb >= 1, "--profile-max-mb", self.profile_max_mb, "1 and more")

    def _check_sites(self) -> None:
        for host in self.allowed_hosts:
            require(re.fullmatch(r"\*|[\w.-]+", host) is not None, "--allowed-hosts", host, "names without ports, or *")
        for origin in self.allowed_origins:
            fits = re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+", origin) is not None
            require(fits, "--allowed-origins", origin, "as https://chat.example.org, null, or *")

    @property
    def needs_key(self) -> bool:
        """Whether clients must send a key."""
        return self.api_key is not None or self.api_key_file is not None

    def engine_of(self, rank: int) -> EngineConfig:
        """The configuration of the replica `rank`, which has devices of its own."""
        engine, flags = self.engine, self.engine.disaggregation
        if flags.is_on and flags.disaggregation_host is None:  # a prefill server listens where the HTTP port does
            engine = replace(engine, disaggregation=replace(flags, disaggregation_host=self.host))
        if self.num_replicas == 1:
            return engine
        first = rank * engine.num_devices
        kv = engine.host_kv
        if kv.kv_file is not None:  # replicas hold different prefixes, and would overwrite one file
            kv = replace(kv, kv_file=f"{kv.kv_file}/replica-{rank}")
        return replace(engine, dp_size=1, device_ids=tuple(range(first, first + engine.num_devices)), host_kv=kv)

    @property
    def num_replicas(self) -> int:
        """Engine processes."""
        return 1 if self.engine.enable_dp_attention else self.engine.dp_size

    @property
    def max_body_bytes(self) -> int:
        """Bytes of the body of one HTTP request at most."""
        return MAX_BODY_BYTES if self.max_request_bytes is None else self.max_request_bytes

    @property
    def max_message_bytes(self) -> int:
        """Bytes of one message over gRPC at most, and of a body besides files in base64."""
        return MAX_MESSAGE_BYTES if self.max_request_bytes is None else self.max_request_bytes

    @property
    def responses_store_bytes(self) -> int:
        """Bytes of memory for answers of /v1/responses."""
        default = RESPONSES_STORE_MIB if self.tokenizer_worker_num == 1 else 0
        return (default if self.responses_store is None else self.responses_store) << 20

    @property
    def samples_as_the_model_says(self) -> bool:
        """Whether the model's generation_config.json says how requests are sampled that don't say it."""
        return self.sampling_defaults in ("model", "auto")

    @functools.cached_property
    def model_name(self) -> str:
        """The model's name in the APIs: of a folder or GGUF file its own name, of one in the hub's cache the hub id."""
        given = self.engine.model
        folder = Path(given).expanduser()
        if not self.served_model_name and folder.suffix == ".gguf" and folder.is_file():
            return folder.stem
        if self.served_model_name or not folder.is_dir():
            return self.served_model_name or given
        folder = folder.resolve() if folder.name in ("", "..") else folder.absolute()
        of_cache = re.search(r"/models--([^/]+)/snapshots/[^/]+$", str(folder))
        return of_cache[1].replace("--", "/", 1) if of_cache else folder.name or given
