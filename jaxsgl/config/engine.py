"""`EngineConfig`: one frozen dataclass per concern, composed; flags.py derives command-line flags from the fields.

Values and combinations that can't work fail in `__post_init__`, before anything is loaded. Every part may import this
module.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from jaxsgl.config.features import (
    DRAFTING_FROM_OTHER_WEIGHTS,
    DisaggregationConfig,
    HostKvConfig,
    LoraConfig,
    SpeculationConfig,
    VisionConfig,
)
from jaxsgl.config.flags import check_choices, check_finite, flag, flag_name, require
from jaxsgl.config.hosts import HostsConfig
from jaxsgl.config.kernels import ATTENTION_BACKENDS, read_kernels
from jaxsgl.errors import ConfigError
from jaxsgl.requests.media import MediaLimits
from jaxsgl.requests.outputs import PoolingSpec, StatesSpec

BUNDLED_MODEL = str(Path(__file__).parents[1] / "bundled_model")
BUNDLED_HEAD = str(Path(__file__).parents[1] / "bundled_head")  # of EAGLE-3
AUTO = "auto"
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "bfloat16", "fp8_e4m3")
QUANTIZATIONS = ("int8", "int4", "fp8", "awq", "gptq", "auto-round", "compressed-tensors", "modelopt")
DEFAULT_WEIGHT_VERSION = "default"  # SGLang's
LOAD_FORMATS = ("auto", "dummy")
GRAMMAR_BACKENDS = ("llguidance", "none")
POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random")
PRIORITY_POLICIES = ("fcfs", "lof")
MAX_SIZE = 1 << 20  # rows, or tokens of a step: far more than any device computes at once


@dataclass(frozen=True)
class SchedulingConfig:
    """Which request runs when. docs/scheduling.md says for each default why it is what it is."""

    schedule_policy: str | None = flag(
        None,
        "which waiting request goes first, see docs/scheduling.md (default: lpm, or fcfs if priorities are on)",
        choices=POLICIES,
    )
    enable_priority_scheduling: bool = flag(False, "requests of higher priority go first, and may preempt others")
    schedule_low_priority_values_first: bool = flag(False, "a lower number is the higher priority")
    priority_scheduling_preemption_threshold: int = flag(
        10, "a waiting request preempts running ones whose priority is lower by more than this"
    )
    schedule_conservativeness: float = flag(
        1.0, "how much of their max_tokens running requests are expected to use; lower admits more and retracts more"
    )
    max_prefill_tokens: int = flag(
        16384, "prompt tokens of one step at most; with --chunked-prefill-size -1 a longer prompt has its own step"
    )
    prefill_max_requests: int | None = flag(
        None, "requests of one step at most whose prompts it extends (default: no limit)"
    )
    enable_mixed_chunk: bool = flag(
        False, "decode in the same steps that extend prompts; ranks of --enable-dp-attention always do"
    )
    decode_first: bool = flag(False, "a decode step between any two steps that extend prompts")
    max_itl_ms: float | None = flag(
        None, "milliseconds between two tokens of a running request at most: chunks are sized by measured step times"
    )
    grammar_timeout: float = flag(
        30.0,
        "seconds of processor time that a grammar may take to compile, and seconds that it may wait for others before; "
        "then it is refused (docs/structured.md)",
    )
    queue_timeout_s: float | None = flag(
        None, "seconds that a request may wait for admission; then it is refused (default: no limit)"
    )
    running_timeout_s: float | None = flag(
        None, "seconds that a request may take from its admission on; then it is ended (default: no limit)"
    )

    @property
    def policy(self) -> str:
        """Which waiting request goes first: `schedule_policy`, or what holds if that is None."""
        return self.schedule_policy or ("fcfs" if self.enable_priority_scheduling else "lpm")

    def __post_init__(self) -> None:
        check_choices(self)
        if self.enable_priority_scheduling and self.policy not in PRIORITY_POLICIES:
            raise ConfigError(
                f"--enable-priority-scheduling goes with --schedule-policy {' or '.join(PRIORITY_POLICIES)}, "
                f"but that is {self.schedule_policy}"
            )
        require(
            self.schedule_conservativeness > 0, "--schedule-conservativeness", self.schedule_conservativeness, "above 0"
        )
        require(self.max_itl_ms is None or self.max_itl_ms > 0, "--max-itl-ms", self.max_itl_ms, "more than 0")
        require(self.max_prefill_tokens >= 1, "--max-prefill-tokens", self.max_prefill_tokens, "1 and more")
        most = self.prefill_max_requests
        require(most is None or most >= 1, "--prefill-max-requests", most, "1 and more")
        require(self.grammar_timeout > 0, "--grammar-timeout", self.grammar_timeout, "more than 0")
        for name in ("queue_timeout_s", "running_timeout_s"):
            value = getattr(self, name)
            require(value is None or value > 0, flag_name(name), value, "more than 0")


@dataclass(frozen=True)
class EngineConfig:
    """What the engine process needs: the model, the KV cache, the scheduler and the compiled shapes."""

    model: str = flag(
        BUNDLED_MODEL, "local folder, GGUF file or hub id (default: the bundled model)", alias="--model-path"
    )
    revision: str | None = flag(
        None, "branch, tag or commit of the hub id: of its configuration, weights and tokenizer (default: main)"
    )
    dtype: str = flag(
        "auto",
        "weights and products; auto: the checkpoint's, but float32 on a CPU that can't multiply it",
        choices=DTYPES,
        same={"half": "float16", "float": "float32"},  # vLLM's
    )
    kv_cache_dtype: str = flag(
        "auto",
        "KV cache; fp8_e4m3: half of bfloat16's memory, scaled by the checkpoint's static scales or 1 "
        "(docs/engine.md); auto: what the checkpoint was calibrated for, else the format of the weights",
        choices=KV_CACHE_DTYPES,
        same={"fp8": "fp8_e4m3"},  # vLLM's
    )
    quantization: str | None = flag(
        None,
        "quantize the weights of an unquantized checkpoint as they are loaded, with a scale for each output channel: "
        "int8 also the embedding and the output head, fp8 (e4m3) the layers only; int4 the layers in groups of 64 "
        "inputs, and the rest in int8; quantized checkpoints need no flag, and any other value must be their method "
        "(docs/quantization.md)",
        choices=QUANTIZATIONS,
        same={  # vLLM's and SGLang's
            "awq_marlin": "awq",
            "gptq_marlin": "gptq",
            "modelopt_fp4": "modelopt",
            "modelopt_fp8": "modelopt",
            "modelopt_mixed": "modelopt",
        },
        alias="-q",
    )
    weight_only: bool = flag(
        False,
        "multiply quantized weights with activations as they are; without it, processors with AVX512-VNNI or AVX-VNNI "
        "round each token's activations to int8 for products with int8 and int4 weights (W8A8), unless --dtype is "
        "float32, and GPUs round those of many tokens to float8 for float8 weights: faster, less exact "
        "(docs/quantization.md)",
    )
    weight_version: str = flag(
        DEFAULT_WEIGHT_VERSION, "what the weights are called in answers until they are updated (docs/weight-updates.md)"
    )
    enable_weights_cpu_backup: bool = flag(
        False,
        "copy weights to host memory when /release_memory_occupation releases them, instead of reading them from their "
        "folder again",
    )
    is_embedding: bool = flag(
        False,
        "serve embeddings, scores and ranks only: no program that generates is compiled. Models made for it are served "
        "so without the flag (docs/embeddings.md)",
    )
    enable_embeddings: bool = flag(False, "serve embeddings, scores and ranks beside generation, with the same weights")
    matryoshka: bool = flag(
        False, "embeddings may be cut to fewer `dimensions`, though the model's config.json does not say so"
    )
    enable_return_hidden_states: bool = flag(
        False, "requests may ask for the hidden states of their tokens; twice as many programs are compiled"
    )
    enable_return_routed_experts: bool = flag(
        False, "the same for the experts that each token was sent to, of models with a mixture of them"
    )
    load_format: str = flag("auto", "dummy: random weights, for benchmarks", choices=LOAD_FORMATS)
    tp: int = flag(
        1,
        "devices that share the model: each has a part of every layer, the vocabulary and the KV cache "
        "(docs/scale-out.md); on a CPU so many virtual ones",
        alias=("--tp-size", "--tensor-parallel-size", "-tp"),
    )
    dp_size: int = flag(
        1,
        "replicas of the model behind this address, each an engine process with --tp devices of its own; a request "
        "goes to the one that has most of its prompt cached; or the ranks of --enable-dp-attention "
        "(docs/scale-out.md)",
        alias=("--dp", "--data-parallel-size", "-dp"),
    )
    enable_dp_attention: bool = flag(
        False,
        "one engine, whose --tp devices are --dp-size ranks: each rank has requests, attention and KV cache of its "
        "own, and all devices share MLPs and experts. For models with fewer kv heads than --tp, whose KV would be "
        "copied (docs/scale-out.md)",
    )
    ep: bool = flag(
        False, "the devices of --tp have whole experts instead of a part of each one", alias="--enable-expert-parallel"
    )
    pp_size: int = flag(
        1,
        "pipeline stages of --tp devices each: a stage has some of the layers, and passes on to the next one what it "
        "computes; with --nnodes each host has an equal number of them (docs/scale-out.md)",
        alias=("--pp", "--pipeline-parallel-size", "-pp"),
    )
    pp_async_batch_depth: int = flag(
        0, "steps that are launched besides one for each stage, so that the first stage never waits for the host"
    )
    device_ids: tuple[int, ...] = flag(
        (),
        "the devices of --tp by their numbers on this machine, as 2,3, those of the first stage first (default: the "
        "first ones)",
    )
    context_length: int | None = flag(
        None, "tokens of prompt and output together (default: the model's)", alias="--max-model-len"
    )
    page_size: int | Literal["auto"] = flag(
        "auto",
        "tokens per page of the KV cache, 1 to 256; prefixes are shared in whole pages. auto: 64 on GPUs and TPUs (128 "
        "on TPUs for heads of 64), 16 on a CPU",
        alias="--block-size",
    )
    max_total_tokens: int | None = flag(None, "tokens in the KV pool (default: from free memory)")
    mem_fraction_static: float = flag(
        0.85,
        "share of the device's memory for weights and KV pool together; lower it if other programs use the device, or "
        "if a start runs out of memory",
        alias="--gpu-memory-utilization",
    )
    max_running_requests: int | None = flag(
        None, "rows: requests running at once (default: 32 on CPU, else 256)", alias="--max-num-seqs"
    )
    snapshot_share: float = flag(
        0.3,
        "share of the memory for KV that holds states of prefixes instead, in models with states (hybrids): requests "
        "begin at such a state (docs/models.md)",
    )
    chunked_prefill_size: int | None = flag(
        None,
        "prompt tokens extended in one step; -1: a prompt is never cut into chunks (default: 512 on CPU, else 2048)",
        alias="--max-num-batched-tokens",
    )
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    hosts: HostsConfig = field(default_factory=HostsConfig)
    disaggregation: DisaggregationConfig = field(default_factory=DisaggregationConfig)
    host_kv: HostKvConfig = field(default_factory=HostKvConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    grammar_backend: str = flag(
        "llguidance",
        "what holds output to grammars (response_format, regex, ...); none: requests with grammars are refused",
        choices=GRAMMAR_BACKENDS,
    )
    vision: VisionConfig = field(default_factory=VisionConfig)
    disable_radix_cache: bool = flag(
        False, "do not share prefixes between requests", alias="--no-enable-prefix-caching"
    )
    disable_overlap_schedule: bool = flag(
        False, "read each step's tokens before launching the next", alias="--no-async-scheduling"
    )
    attention_backend: str = flag(
        "auto", "kernels of attention, and with xla of the KV store too", choices=ATTENTION_BACKENDS
    )
    kernels: tuple[str, ...] = flag(
        (),
        "kernels of single operations, whatever --attention-backend says, as decode=triton,norm=xla; operations are "
        "decode and extend (attention), store (of keys and values), rotate (rotation and store in one), store_decode "
        "(store and decode in one, on TPUs; xla: one after the other), norm (add and normalize), experts, states (of "
        "recurrent layers that decode), index (what chooses tokens), chosen (attention to those), grouped (attention "
        "to windows and groups of tokens), quantized (products with weights in groups) and float8 (products that round "
        "activations to float8: xla for none) (docs/kernels.md); auto: the best that runs here and passes its test",
    )
    enable_deterministic_inference: bool = flag(
        False,
        "a request's tokens and log-probabilities have the same bits whatever else is served: on a GPU by slower "
        "kernels; on a CPU they have without it, and it refuses what would change that (docs/determinism.md)",
    )
    skip_kernel_test: bool = flag(
        False,
        "on a GPU or TPU, start without testing kernels against XLA: one that is wrong or hangs then serves "
        "(docs/operations.md)",
    )
    decode_buckets: tuple[int, ...] = flag(
        (), "compiled decode batch sizes, as 1,2,4, and the largest batch (default: derived)"
    )
    extend_buckets: tuple[int, ...] = flag(
        (), "compiled extend sizes in tokens, as 64,512, and the largest step (default: derived)"
    )
    auto_buckets: str | None = flag(
        None, "take both lists from this file, which scripts/bench_buckets.py --json wrote (default: derived)"
    )
    decode_steps: int = flag(
        1,
        "tokens that one program decodes for each running request while no other is admitted and no logits are edited",
    )
    compilation_cache_dir: str | None = flag(
        None, "where compiled programs are kept between starts; '': nowhere (default: jaxsgl/xla in ~/.cache)"
    )
    check_every_step: bool = flag(False, "account for all pages after every step, and fail if one is lost; for tests")
    random_seed: int | None = flag(
        None,
        "seed of dummy weights, and of requests that bring none (default: 0, but another one of a server's requests at "
        "each start)",
        alias="--seed",
    )
    max_queued_requests: int = flag(
        8192, "requests that may wait for admission, each of n samples counted; more are refused at once"
    )
    max_queued_tokens: int = flag(
        16777216,
        "prompt tokens of the requests that may wait for admission; further requests are refused at once",
    )

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_device_ids()
        self._check_chunks()
        self._check_prefix_cache()
        if self.speculation.is_on:
            self._check_speculation()
        if self.hosts.are_several:
            self._check_hosts()
        if self.has_stages:
            self._check_stages()
        elif self.pp_async_batch_depth:
            raise ConfigError("--pp-async-batch-depth is for pipeline stages: give --pp-size, or leave it out")
        if self.num_ranks > 1:
            self._check_ranks()
        self._check_buckets()
        check_choices(self)
        check_finite(self)
        read_kernels(self.kernels)

    def _check_numbers(self) -> None:
        """Raises `ConfigError` for a number that is out of its own bounds."""
        fits = self.page_size == AUTO if isinstance(self.page_size, str) else 1 <= self.page_size <= 256
        require(fits, "--page-size", self.page_size, "auto, or 1 to 256")
        require(0.0 < self.mem_fraction_static < 1.0, "--mem-fraction-static", self.mem_fraction_static, "in (0, 1)")
        require(0.0 < self.snapshot_share < 1.0, "--snapshot-share", self.snapshot_share, "in (0, 1)")
        for name in (
            "context_length",
            "max_total_tokens",
            "max_running_requests",
            "max_queued_requests",
            "max_queued_tokens",
            "tp",
            "pp_size",
            "dp_size",
        ):
            value = getattr(self, name)
            require(value is None or value >= 1, flag_name(name), value, "1 and more")
        rows = self.max_running_requests
        require(rows is None or rows <= MAX_SIZE, "--max-running-requests", rows, f"1 to {MAX_SIZE}")
        require(0 <= self.pp_async_batch_depth <= 16, "--pp-async-batch-depth", self.pp_async_batch_depth, "0 to 16")
        require(1 <= self.decode_steps <= 64, "--decode-steps", self.decode_steps, "1 to 64")
        require(abs(self.random_seed or 0) < 1 << 63, "--random-seed", self.random_seed, "an integer of 64 bits")

    def _check_device_ids(self) -> None:
        """Raises `ConfigError` unless they name each device once, and all that are needed."""
        ids, number = self.device_ids, self.num_devices
        if ids and (len(set(ids)) != number or len(ids) != number or min(ids) < 0):
            of_stages = f" x --pp-size {self.pp_size} = {number}" if self.has_stages else ""
            raise ConfigError(
                f"--device-ids are {ids}, but must be --tp {self.tp}{of_stages} different devices, from 0 on"
            )

    def _check_chunks(self) -> None:
        """Raises `ConfigError` for sizes of chunks that can't be, and where whole prompts would break a promise."""
        chunk = self.chunked_prefill_size
        require(chunk is None or chunk == -1 or chunk >= 1, "--chunked-prefill-size", chunk, "-1, or 1 and more")
        if chunk == -1 and self.scheduling.max_itl_ms is not None:
            raise ConfigError(
                "--max-itl-ms cuts prompts into chunks, which --chunked-prefill-size -1 forbids: give one"
            )

    def _check_prefix_cache(self) -> None:
        """Raises `ConfigError` where the prefix cache is switched off and something needs it."""
        if not self.disable_radix_cache:
            return
        if self.disaggregation.disaggregation_mode == "decode":
            raise ConfigError(
                "--disaggregation-mode decode takes prompts into the prefix cache, which --disable-radix-cache "
                "switches off: leave that out"
            )
        if self.host_kv.is_on:
            raise ConfigError(
                "--host-kv-gib or --enable-hierarchical-cache keeps prefixes, which --disable-radix-cache does not "
                "share: give one"
            )

    def _check_buckets(self) -> None:
        """Raises `ConfigError` for sizes that can't be, and for two flags that say which there are."""
        for name in ("decode_buckets", "extend_buckets"):
            sizes = getattr(self, name)
            require(all(1 <= size <= MAX_SIZE for size in sizes), flag_name(name), sizes, f"sizes of 1 to {MAX_SIZE}")
            if sizes and self.auto_buckets is not None:
                raise ConfigError(f"{flag_name(name)} and --auto-buckets both say which sizes to compile: give one")

    def _check_hosts(self) -> None:
        """Raises `ConfigError` for flags that need more of other hosts than that they play calls of the engine."""
        number = self.hosts.num_hosts
        shared, name, parts = (self.pp_size, "--pp-size", "stages") if self.has_stages else (self.tp, "--tp", "devices")
        if shared % number:
            fitting = -(-shared // number) * number
            raise ConfigError(
                f"{name} is {shared}, but {number} hosts (--nnodes) have equal parts of the {parts}: give {name} "
                f"{fitting}"
            )
        for is_on, name in (
            (bool(self.device_ids), "--device-ids"),
            (self.disaggregation.is_on, "--disaggregation-mode"),
            (self.host_kv.is_on, "--host-kv-gib"),
            (self.lora.is_on, "--enable-lora"),
            (self.enable_weights_cpu_backup, "--enable-weights-cpu-backup"),
            (self.speculation.is_from_weights, f"--speculative-algorithm {self.speculation.speculative_algorithm}"),
        ):
            if is_on:
                raise ConfigError(f"{name} works on one host only for now: leave it out, or --nnodes")

    def _check_stages(self) -> None:
        """Raises `ConfigError` for flags that need all layers in one place, or more of a step than one stage knows."""
        for is_on, name in (
            (self.disaggregation.is_on, "--disaggregation-mode"),
            (self.host_kv.is_on, "--host-kv-gib or --enable-hierarchical-cache"),
            (self.lora.is_on, "--lora-paths or --enable-lora"),
            (self.speculation.is_on, "--speculative-algorithm"),
            (self.decode_steps > 1, "--decode-steps"),
            (self.scheduling.max_itl_ms is not None, "--max-itl-ms"),
            (self.enable_return_hidden_states, "--enable-return-hidden-states"),
            (self.enable_return_routed_experts, "--enable-return-routed-experts"),
            (self.enable_weights_cpu_backup, "--enable-weights-cpu-backup"),
        ):
            if is_on:
                raise ConfigError(f"{name} does not work with pipeline stages for now: leave it out, or --pp-size")

    @property
    def has_stages(self) -> bool:
        """Whether the layers are shared out among pipeline stages."""
        return self.pp_size > 1

    @property
    def made_up_seed(self) -> int:
        """Seed of what isn't asked for by a client: dummy weights, and what benchmarks make up."""
        return self.random_seed or 0

    @property
    def num_devices(self) -> int:
        """Devices of the engine, over all stages."""
        return self.tp * self.pp_size

    @property
    def num_own_devices(self) -> int:
        """Those of this host among `num_devices`."""
        return self.num_devices // self.hosts.num_hosts

    @property
    def own_stages(self) -> range:
        """The stages of this host. Host 0 has the last ones, so that tokens are chosen where they are read."""
        each = self.pp_size // self.hosts.num_hosts
        first = each * ((self.hosts.rank - 1) % self.hosts.num_hosts)
        return range(first, first + each)

    @property
    def unread_steps(self) -> int:
        """Steps that may be in flight unread while the next one is planned: of all stages, the last one's is read."""
        if self.disable_overlap_schedule:
            return 0
        return self.pp_size - 1 + self.pp_async_batch_depth if self.has_stages else 1

    @property
    def num_ranks(self) -> int:
        """R, ranks with attention of their own that the devices are divided into; 1 without data-parallel attention."""
        return self.dp_size if self.enable_dp_attention else 1

    @property
    def mixes_steps(self) -> bool:
        """Whether requests decode in the steps that extend prompts; in ranks, since the step waits for no decode."""
        return self.scheduling.enable_mixed_chunk or self.num_ranks > 1

    def _check_ranks(self) -> None:
        """Raises `ConfigError` for devices that ranks can't divide, and for what needs one rank."""
        if self.tp % self.num_ranks:
            raise ConfigError(
                f"--enable-dp-attention divides the devices of --tp {self.tp} into --dp-size {self.dp_size} equal "
                f"ranks: give --tp {-(-self.tp // self.num_ranks) * self.num_ranks}, or another --dp-size"
            )
        rows = self.max_running_requests
        if rows is not None and rows < self.num_ranks:
            raise ConfigError(
                f"--max-running-requests {rows} leaves some of the {self.num_ranks} ranks of --enable-dp-attention "
                f"without a row: give {self.num_ranks} or more"
            )
        if self.scheduling.decode_first:
            raise ConfigError(
                "--decode-first changes nothing with --enable-dp-attention, which decodes in every step: leave it out"
            )
        for is_on, name in (
            (self.disaggregation.is_on, "--disaggregation-mode"),
            (self.host_kv.is_on, "--host-kv-gib"),
            (self.lora.is_on, "--enable-lora"),
            (self.speculation.is_on, "--speculative-algorithm"),
            (self.decode_steps > 1, "--decode-steps"),
            (self.scheduling.max_itl_ms is not None, "--max-itl-ms"),
            (self.has_stages, "--pp-size"),
            (self.hosts.are_several, "--nnodes"),
        ):
            if is_on:
                raise ConfigError(
                    f"{name} does not go with --enable-dp-attention yet: leave it out, or leave out "
                    "--enable-dp-attention, so that --dp-size means whole replicas"
                )

    @property
    def draft_model(self) -> str | None:
        """The folder or hub id of weights besides the model's that draft; None: none do."""
        if self.speculation.speculative_algorithm not in DRAFTING_FROM_OTHER_WEIGHTS:
            return None
        return self.speculation.speculative_draft_model_path or BUNDLED_HEAD

    def _check_speculation(self) -> None:
        """Raises `ConfigError` for flags that leave no token to guess, or guess it in another way."""
        speculation = self.speculation
        algorithm = speculation.speculative_algorithm
        if algorithm in DRAFTING_FROM_OTHER_WEIGHTS:
            has_default = algorithm == "EAGLE3" and self.model == BUNDLED_MODEL
            if speculation.speculative_draft_model_path is None and not has_default:
                raise ConfigError(
                    f"--speculative-algorithm {algorithm} drafts with weights of its own: name their folder or hub id "
                    "with --speculative-draft-model-path"
                )
        if self.decode_steps > 1:
            raise ConfigError(
                f"--decode-steps {self.decode_steps} decodes several tokens before one is read, and "
                "--speculative-algorithm reads each step's: give one of them"
            )
        if self.disaggregation.disaggregation_mode == "prefill" and not speculation.is_from_weights:
            raise ConfigError(
                f"--speculative-algorithm {algorithm} guesses tokens of answers, of which a prefill server generates "
                "none: give it to the decode servers"
            )
        if self.is_embedding:
            raise ConfigError("--speculative-algorithm guesses tokens, but --is-embedding generates none: give one")


class Limits(msgspec.Struct, frozen=True):
    """What a request is checked against.

    Attributes:
      vocab_size: token ids go from 0 to vocab_size - 1.
      context_length: largest number of prompt and output tokens of one request.
      pool_tokens: tokens that the KV pool holds, without the dummy page.
      media: what images and video frames it may bring, or None if the model has no vision tower.
      pooling: how embeddings and scores are made, or None if the server gives none.
      generates: whether it gives tokens.
      states: what is returned of single tokens, or None if nothing is.
    """

    vocab_size: int
    context_length: int
    pool_tokens: int
    media: MediaLimits | None = None
    pooling: PoolingSpec | None = None
    generates: bool = True
    states: StatesSpec | None = None
