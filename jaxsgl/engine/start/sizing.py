"""Decides every size at start-up: flags, the model and the free memory become a `Capacity`.

Where a flag is left out, the default depends on the platform: a CPU step is long, so it takes smaller batches. The
engine calls this after the weights are loaded and before the KV pool is allocated, a second time if what the compiled
steps need next to the pool turns out not to fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp

from jaxsgl.batch.buckets import Capacity
from jaxsgl.batch.patches import MIN_CALL_PATCHES, TowerCapacity, TowerShape, smallest_call
from jaxsgl.cache.pages import pages_for
from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.layer_state import LayerStates, layer_states
from jaxsgl.engine.start.memory import Memory
from jaxsgl.engine.tables import edit_table_bytes, page_table_bytes
from jaxsgl.errors import ConfigError
from jaxsgl.models import ModelArch
from jaxsgl.models.layer_spec import KvHeads
from jaxsgl.models.towers.arch import TowerArch
from jaxsgl.requests.media import TOKENS_OF_ITEM, MediaLimits
from jaxsgl.requests.outputs import StatesSpec
from pallas_kernels.kept_heads import KeptHeads

ROWS = {"cpu": 32}
OTHER_ROWS = 256
PAGE_SIZE = {"cpu": 16}
OTHER_PAGE_SIZE = 64  # docs/kernels.md says why
WIDEST_HEADS = 256  # that kernels for GPUs take
LANES = 128  # of a TPU's memory: numbers in a row
LONG_PAGES = (LANES, 2 * LANES)  # of which a TPU's columns are whole lanes
LEAST_HEADS = 4  # of a TPU's page of one token, so that they fill a tile in formats of 8 bits too
CHUNK_TOKENS = {"cpu": 512}
OTHER_CHUNK_TOKENS = 2048
UNLIMITED = -1
MAX_PATCHES = {"cpu": 4096}  # of an image, and of a call of the tower on a device
OTHER_MAX_PATCHES = 16384
SLICED_PATCHES = 4096  # an image in calls of this size or more may be encoded in parts
POOL_TOKENS = {"cpu": 4096}  # of images whose embeddings are kept
OTHER_POOL_TOKENS = 16384
MIN_ITEMS = 256  # images of a request, however few tokens all of them may have
HOST_MIB = {"cpu": 1024}  # for embeddings in host memory
OTHER_HOST_MIB = 4096
STEP_SHARE = 0.015  # of the memory, for a step before its programs are compiled
MIN_REQUEST_TOKENS = 2  # one of the prompt and one new
CPU_FRACTION = 0.25  # of free host memory: other programs use it too
STATE_PAGE_SIZE = 64  # at least, where prefixes end at states: these are made in blocks of so many tokens
SMALL_WEIGHTS = 64 << 20  # bytes; a program of the bundled model, of 4 MB, takes XLA a second or more
RUNNING_SHARE = 0.5  # of the memory for KV, at most, that states of running requests take by default
SNAPSHOTS_OF_ROW = 8  # at most


class PoolSize(NamedTuple):
    """Adapters that may be on the device, and the columns of their pool."""

    max_adapters: int
    num_columns: int


NO_ADAPTERS = PoolSize(0, 0)


def states_spec(config: EngineConfig, arch: ModelArch) -> StatesSpec | None:
    """What is returned of single tokens, as flags say. Raises `ConfigError` for experts of a model without."""
    hidden, experts = config.enable_return_hidden_states, config.enable_return_routed_experts
    if experts and arch.mixture is None:
        raise ConfigError(f"--enable-return-routed-experts: {arch.name} has no experts: leave it out")
    if not (hidden or experts):
        return None
    top_k = 0 if arch.mixture is None else arch.mixture.router.top_k
    return StatesSpec(hidden, experts, arch.hidden_size, arch.num_layers, top_k)


def choose_page_size(config: EngineConfig, platform: str, num_kv_heads: int, head_dim: int) -> int:
    """Tokens per page: what --page-size says, or the best for kernels on the platform ("cpu", "gpu", "tpu")."""
    if isinstance(config.page_size, int):
        return config.page_size
    if platform == "tpu" and _on_tpu(num_kv_heads, head_dim, LANES).width < LANES:
        return LANES
    return PAGE_SIZE.get(platform, OTHER_PAGE_SIZE)


def _as_they_are(num_kv_heads: int, head_dim: int, page_size: int) -> KeptHeads:
    return KeptHeads(num_kv_heads, num_kv_heads, head_dim)


def _on_gpu(num_kv_heads: int, head_dim: int, page_size: int) -> KeptHeads:
    """Powers of two: 128 for heads of 80 and 96; 16 at least."""
    width = max(16, 1 << (head_dim - 1).bit_length()) if head_dim <= WIDEST_HEADS else head_dim
    return KeptHeads(num_kv_heads, num_kv_heads, width)


def _on_tpu(num_kv_heads: int, head_dim: int, page_size: int) -> KeptHeads:
    """Whole lanes, filled by two heads of 64 where there are two; what would leave lanes empty lies in long pages."""
    together, least = 1, LEAST_HEADS if page_size == 1 else 1
    while (
        num_kv_heads % (2 * together) == 0
        and 2 * together * head_dim <= LANES
        and num_kv_heads // (2 * together) >= least
    ):
        together *= 2
    if head_dim % 8 == 0 and head_dim <= LANES // 2 and together * head_dim < LANES and page_size in LONG_PAGES:
        return _as_they_are(num_kv_heads, head_dim, page_size)
    return KeptHeads(num_kv_heads, num_kv_heads // together, -(-together * head_dim // LANES) * LANES)


# How a device keeps so many heads of that size, in pages of so many tokens; on CPUs as they are.
KEPT_HEADS: dict[str, Callable[[int, int, int], KeptHeads]] = {"gpu": _on_gpu, "tpu": _on_tpu}


def choose_pages(config: EngineConfig, arch: ModelArch, platform: str, num_devices: int) -> tuple[int, KeptHeads]:
    """Tokens per page, and how each device keeps its kv heads in them: as kernels on the platform like it best."""
    page_size = choose_page_size(config, platform, arch.num_kv_heads // num_devices, arch.head_dim)
    if not isinstance(config.page_size, int):
        if arch.recurrent_net is not None:
            page_size = max(page_size, STATE_PAGE_SIZE)
        page_size = math.gcd(page_size, *filter(None, (layer.chunk for layer in arch.layers)))
        page_size = math.lcm(page_size, *(groups.size for groups in arch.token_groups))
    return page_size, kept_heads(platform, arch.kv_heads, num_devices, page_size)


def kept_heads(platform: str, heads: KvHeads, num_devices: int, page_size: int) -> KeptHeads:
    """How each device keeps its part of such kv heads in pages of so many tokens."""
    return KEPT_HEADS.get(platform, _as_they_are)(heads.number // num_devices, heads.size, page_size)


def choose_states(
    config: EngineConfig, arch: ModelArch, platform: str, dtype: jnp.dtype, num_devices: int = 1
) -> LayerStates:
    """What layers keep on the platform, KV as `dtype`: in pages as long, and of heads as wide, as kernels like best."""
    page_size, _ = choose_pages(config, arch, platform, num_devices)
    kept = partial(kept_heads, platform, num_devices=num_devices, page_size=page_size)
    return layer_states(arch, page_size, dtype, num_devices, kept)


def plan_capacity(
    config: EngineConfig,
    arch: ModelArch,
    states: LayerStates,
    memory: Memory,
    step_bytes: int = 0,
    adapters: PoolSize = NO_ADAPTERS,
) -> Capacity:
    """All sizes of the engine, or of each of its ranks, whose largest step takes `step_bytes` next to the pool.

    `adapters` are in memory already. Raises `ConfigError` for flags that the model or the memory can't satisfy.
    """
    context_length = choose_context_length(config, arch)
    num_rows = _num_rows(config, states, memory)
    num_snapshots = _num_snapshots(config, states, memory, num_rows) if states.row_bytes else None
    tower = tower_capacity(config, arch, memory.platform)
    whole_prompts = arch.encoder is not None or config.chunked_prefill_size == UNLIMITED
    # An encoder's contexts are short, and its steps hold the prompts of many rows.
    longest = num_rows * context_length if arch.encoder is not None else context_length
    max_extend_tokens = _max_extend_tokens(config, memory.platform, num_rows, context_length, longest)
    if whole_prompts:
        max_extend_tokens = max(max_extend_tokens, context_length)
    if tower is not None and arch.tower is not None and arch.tower.tokens.sees_ahead:
        _check_whole_images(config, tower.image_tokens, max_extend_tokens, num_rows)
        _check_windows(arch, arch.tower, tower.image_tokens)
    rows_bytes = (
        edit_table_bytes(num_rows, arch.vocab_size)
        + page_table_bytes(num_rows, pages_for(context_length, states.page_size))
        + (num_rows + 1) * states.row_bytes
    )
    num_pages = choose_num_pages(
        states,
        memory,
        max_total_tokens=None if config.max_total_tokens is None else config.max_total_tokens // config.num_ranks,
        useful_tokens=num_rows * context_length,
        rows_bytes=rows_bytes,
        reserved_bytes=_embeddings_bytes(tower) + (num_snapshots or 0) * states.row_bytes + states.scratch_bytes,
        step_bytes=step_bytes,
    )
    return Capacity(
        page_size=states.page_size,
        num_pages=num_pages,
        num_rows=num_rows,
        context_length=context_length,
        max_extend_tokens=max_extend_tokens,
        vocab_size=arch.vocab_size,
        whole_prompts=whole_prompts,
        pooling=arch.pooling,
        states=states_spec(config, arch),
        generates=arch.generates,
        max_adapters=adapters.max_adapters,
        adapter_columns=adapters.num_columns,
        media=media_limits(config, arch, tower),
        tower=tower,
        has_axes=arch.has_axes and tower is not None,
        sees_ahead=arch.tower is not None and arch.tower.tokens.sees_ahead,
        num_snapshots=num_snapshots,
        index_covers=arch.index_covers,
    )


def few_sizes(platform: str, weight_bytes: int) -> bool:
    """Whether half as many sizes are compiled: of a small model, whose start is mostly compiling."""
    return platform == "cpu" and weight_bytes < SMALL_WEIGHTS


def choose_num_rows(config: EngineConfig, platform: str) -> int:
    """Requests that run at once in a rank, of a model whose running requests have pages alone."""
    return max((config.max_running_requests or ROWS.get(platform, OTHER_ROWS)) // config.num_ranks, 1)


def _num_rows(config: EngineConfig, states: LayerStates, memory: Memory) -> int:
    """Rows of running requests, fewer where their states would take more than their share of the memory."""
    rows = choose_num_rows(config, memory.platform)
    if config.max_running_requests or not states.row_bytes:
        return rows
    return max(min(rows, int(RUNNING_SHARE * memory.static_bytes) // states.row_bytes - 1), 1)


def _num_snapshots(config: EngineConfig, states: LayerStates, memory: Memory, num_rows: int) -> int:
    """States of prefixes that are kept: what --snapshot-share has room for, and some for each row at most."""
    if config.disable_radix_cache:
        return 0
    left = memory.static_bytes - (num_rows + 1) * states.row_bytes
    share = config.snapshot_share * (CPU_FRACTION if memory.platform == "cpu" else 1.0)
    return min(_steady(max(int(share * left) // states.row_bytes, 0)), SNAPSHOTS_OF_ROW * num_rows)


def tower_capacity(config: EngineConfig, arch: ModelArch, platform: str) -> TowerCapacity | None:
    """What the model's vision tower encodes and the pool of embeddings holds; None if it has no tower."""
    if arch.tower is None:
        return None
    flags, tower = config.vision, arch.tower
    shape = TowerShape(
        tower.merger.side, tower.positioning.side, tower.patch_len, tower.layers.count, tower.layers.window,
        len(tower.layers.taps), "square" if tower.positioning.learned == "none" else tower.positioning.learned,
        tower.positioning.image_side if tower.tokens.joins_tiles else 0, tower.sound,
    )  # fmt: skip
    num_rows = flags.mm_pool_tokens or POOL_TOKENS.get(platform, OTHER_POOL_TOKENS)
    max_patches = flags.mm_max_patches or MAX_PATCHES.get(platform, OTHER_MAX_PATCHES)
    if tower.tokens.joins_tiles and not flags.mm_max_patches:
        max_patches = min(max_patches, shape.patches_of(num_rows))
    square = shape.square
    if max_patches < (needed := tower.image_patches):
        each = "image" if tower.sound is None else "chunk of a sound"
        raise ConfigError(f"--mm-max-patches is {max_patches}, but each {each} has {needed}: raise it to that")
    max_patches -= max_patches % (needed or square)  # calls hold whole images, where these have one size
    if num_rows < shape.tokens_of(max_patches):
        raise ConfigError(
            f"--mm-pool-tokens is {num_rows}, but an image may have {shape.tokens_of(max_patches)} tokens: raise it to "
            f"that, or lower --mm-max-patches to {shape.patches_of(num_rows)}"
        )
    mode = config.disaggregation.disaggregation_mode
    if config.disaggregation.is_on and flags.mm_host_mib == 0:
        raise ConfigError(
            f"--mm-host-mib is 0, but with --disaggregation-mode {mode} embeddings of images pass through host memory: "
            "raise it, or serve text alone with --language-only"
        )
    largest = min(tower.tokens.most * square, max_patches)
    is_sliced = tower.has_tower and tower.layers.count > 0 and config.scheduling.max_itl_ms is not None
    host_mib = HOST_MIB.get(platform, OTHER_HOST_MIB) if flags.mm_host_mib is None else flags.mm_host_mib
    return TowerCapacity(
        shape,
        num_rows,
        max_patches,
        num_bins=config.tp if flags.mm_enable_dp_encoder else 1,
        host_bytes=host_mib << 20,
        row_bytes=_row_bytes(config, arch, platform),
        encodes=tower.has_tower,
        call_patches=-(-MIN_CALL_PATCHES // needed) * needed if needed else smallest_call(largest, square),
        max_image_tokens=tower.tokens.most or None,
        sliced_from=min(SLICED_PATCHES, largest or SLICED_PATCHES) if is_sliced else None,
    )


def slow_images(config: EngineConfig, tower: TowerCapacity | None) -> str | None:
    """Says that large images may exceed --max-itl-ms, where devices share images; None: they need not."""
    if tower is None or tower.sliced_from is None or tower.num_bins == 1:
        return None
    return (
        f"--max-itl-ms {config.scheduling.max_itl_ms:g} doesn't hold while a large image is encoded, since "
        "--mm-enable-dp-encoder encodes it in one piece; without that flag large images are encoded in parts"
    )


def media_limits(config: EngineConfig, arch: ModelArch, tower: TowerCapacity | None) -> MediaLimits | None:
    """What pictures and videos a request may have; None if the model has no tower.

    All of them are tokens of its context. Where a step extends whole prompts, it has the rows of all of them at once.
    """
    own = arch.tower
    if own is None or tower is None:
        return None
    most = config.vision.media_max_tokens
    at_once = tower.num_rows if config.chunked_prefill_size == UNLIMITED else most
    max_tokens = min(most, at_once, choose_context_length(config, arch))
    return MediaLimits(
        image_token_id=own.tokens.image_id,
        video_token_id=own.tokens.video_id,
        patch_size=own.patches.size,
        temporal_patch_size=own.patches.frames,
        merge_size=own.merger.side,
        has_lines=own.tokens.has_lines,
        image_side=own.positioning.image_side,
        max_items=max(MIN_ITEMS, most // TOKENS_OF_ITEM),
        joins_tiles=own.tokens.joins_tiles,
        sound=own.sound,
        max_patches=min(tower.image_tokens * tower.shape.square, tower.max_patches),
        max_request_patches=max_tokens * tower.shape.square,
        max_picture_patches=tower.max_patches,
        may_come_later=config.disaggregation.disaggregation_mode == "decode",
    )


def _embeddings_bytes(tower: TowerCapacity | None) -> int:
    """Bytes of the pool of embeddings, which every device has whole, and of an image on its way to the host."""
    if tower is None:
        return 0
    on_their_way = tower.image_tokens if tower.host_bytes else 0
    return (1 + tower.num_rows + on_their_way) * tower.row_bytes


def _row_bytes(config: EngineConfig, arch: ModelArch, platform: str) -> int:
    """Bytes of the embedding of an image's token."""
    assert arch.tower is not None
    dtype = "float32" if platform == "cpu" else arch.dtype if config.dtype == "auto" else config.dtype
    return arch.tower.row_len * jnp.dtype(dtype).itemsize


def _max_extend_tokens(config: EngineConfig, platform: str, num_rows: int, context_length: int, longest: int) -> int:
    """The most tokens of a step that extends prompts, next to which all other rows may decode in mixed steps.

    `longest` is a chunked step's limit besides --chunked-prefill-size.
    """
    scheduling = config.scheduling
    decodes = num_rows - 1 if config.mixes_steps else 0
    chunk = config.chunked_prefill_size or CHUNK_TOKENS.get(platform, OTHER_CHUNK_TOKENS)
    if chunk == UNLIMITED:
        return max(context_length, min(scheduling.max_prefill_tokens, num_rows * context_length)) + decodes
    least = 2 * num_rows if config.num_ranks > 1 else 1  # all rows of a rank may decode while it or another extends
    return max(min(chunk // config.num_ranks, longest, scheduling.max_prefill_tokens + decodes), least)


def _check_windows(arch: ModelArch, tower: TowerArch, image_tokens: int) -> None:
    """Raises `ConfigError` for windows that don't hold an image, whose tokens see all of it in all layers."""
    windows = [layer.window for layer in arch.layers if layer.window is not None]
    if tower.tokens.ahead == "everywhere" and windows and image_tokens > min(windows):
        raise ConfigError(
            f"an image may have {image_tokens} tokens, but windows have {min(windows)}: lower --mm-max-patches to "
            f"{min(windows) * tower.merger.side**2}, or serve text alone with --language-only"
        )


def _check_whole_images(config: EngineConfig, image_tokens: int, max_extend_tokens: int, num_rows: int) -> None:
    """Raises `ConfigError` unless an image fits into a step, next to all rows that may decode in it."""
    decodes = num_rows - 1 if config.mixes_steps else 0
    needed = decodes + image_tokens
    if max_extend_tokens < needed:
        besides = f", next to {decodes} that decode" if decodes else ""
        raise ConfigError(
            f"a step extends {max_extend_tokens} tokens, but all {needed - decodes} of an image are extended together"
            f"{besides}: raise --chunked-prefill-size and --context-length to {needed} at least, or serve text alone "
            "with --language-only"
        )


def choose_context_length(config: EngineConfig, arch: ModelArch) -> int:
    """The most tokens of one request: without the flag those that the model's folder says, of a model for embeddings
    alone those of its texts. Raises `ConfigError` if the flag asks for more than the model was made for.
    """
    asked = config.context_length
    if asked is None:
        of_texts = None if arch.generates or arch.pooling is None else arch.pooling.max_tokens
        return arch.max_context if of_texts is None else min(of_texts, arch.max_context)
    if asked > arch.max_context:
        raise ConfigError(
            f"--context-length is {asked}, but the model was made for {arch.max_context} tokens: lower it to that"
        )
    return asked


def choose_num_pages(
    states: LayerStates,
    memory: Memory,
    *,
    max_total_tokens: int | None,
    useful_tokens: int,
    rows_bytes: int,
    reserved_bytes: int,
    step_bytes: int,
) -> int:
    """Pages of the pool, the dummy page included.

    Args:
      states: what a page holds.
      memory: what the weights have left.
      max_total_tokens: tokens that the pool must hold; None: as many as fit.
      useful_tokens: tokens that fill all rows; bounds the pool on a CPU, whose memory other programs need too.
      rows_bytes: bytes that tables of running requests will take.
      reserved_bytes: bytes that other tables will take.
      step_bytes: bytes that a step takes at most next to the pool, for as long as it runs.

    Raises:
      ConfigError: pool and step don't fit into memory, or the pool can't hold one request of one prompt token.
    """
    static_bytes = memory.static_bytes - rows_bytes - reserved_bytes
    free_bytes = min(static_bytes, memory.all_bytes - rows_bytes - reserved_bytes - step_bytes)
    if max_total_tokens is not None:
        return _asked_pages(states, max_total_tokens, free_bytes, rows_bytes, step_bytes, memory)
    on_cpu = memory.platform == "cpu"
    num_pages = (min(free_bytes, int(static_bytes * CPU_FRACTION)) if on_cpu else free_bytes) // states.page_bytes
    if on_cpu:
        num_pages = min(_steady(num_pages), 1 + pages_for(useful_tokens, states.page_size))
    least = 1 + pages_for(MIN_REQUEST_TOKENS, states.page_size)
    if num_pages < least:
        way_out = "raise --mem-fraction-static" if free_bytes == static_bytes and not on_cpu else _SMALLER_STEPS
        if rows_bytes > max(step_bytes, least * states.page_bytes):
            way_out = _FEWER_ROWS
        page_mib = states.page_bytes / 2**20
        raise ConfigError(
            f"{max(free_bytes, 0) / 2**20:.0f} MiB are free for the KV pool{_beside(rows_bytes, step_bytes)}, but "
            f"{least} pages of {page_mib:.2f} MiB are the least{_account(memory)}: {way_out}, or use a smaller model "
            "or --page-size"
        )
    return num_pages


_SMALLER_STEPS = "lower --chunked-prefill-size or --max-running-requests, which make steps smaller"
_FEWER_ROWS = "lower --max-running-requests"


def _beside(rows_bytes: int, step_bytes: int) -> str:
    parts = [(rows_bytes, "tables of running requests take"), (step_bytes, "a step takes")]
    told = [f"the {part / 2**20:.0f} MiB that {what}" for part, what in parts if part >= 1 << 20]
    return f" beside {' and '.join(told)}" if told else ""


def _account(memory: Memory) -> str:
    return f" ({memory.account})" if memory.account else ""


def _steady(num_pages: int) -> int:
    """The next smaller 2^k or 3 x 2^k, so that restarts find their programs in the compilation cache.

    Programs are compiled for one number of pages and of states, and free memory differs a little at each start.
    """
    grain = 1 << max(num_pages.bit_length() - 2, 0)
    return num_pages // grain * grain


def _asked_pages(
    states: LayerStates, max_total_tokens: int, free_bytes: int, rows_bytes: int, step_bytes: int, memory: Memory
) -> int:
    if max_total_tokens < MIN_REQUEST_TOKENS:
        raise ConfigError(
            f"--max-total-tokens is {max_total_tokens}, but must be {MIN_REQUEST_TOKENS} and more: a prompt token "
            "and a new one"
        )
    num_pages = 1 + pages_for(max_total_tokens, states.page_size)
    needed_bytes = num_pages * states.page_bytes
    if needed_bytes > free_bytes:
        smaller = f"lower it, {_SMALLER_STEPS}" if step_bytes else "lower it"
        way_out = f"{smaller}, or leave it out to take what fits"
        if rows_bytes > max(step_bytes, needed_bytes):
            way_out = _FEWER_ROWS
        raise ConfigError(
            f"--max-total-tokens {max_total_tokens} needs {needed_bytes / 2**20:.0f} MiB, but "
            f"{max(free_bytes, 0) / 2**20:.0f} MiB are free{_beside(rows_bytes, step_bytes)}{_account(memory)}: "
            f"{way_out}"
        )
    return num_pages
