"""Which flags don't go with which models, once config.json is read. Called by `opening`.

Models whose layers keep states instead of keys and values (`models/mixers.py`), which are not in pages. Models whose
layers differ in what a page holds of them, or lack projections. Models that data-parallel attention gains nothing for,
or that see images, which are not divided among ranks yet. Models, and folders, that pipeline stages can't share. What
flags say of each other `EngineConfig` checks.
"""

from __future__ import annotations

import math
from pathlib import Path

from jaxsgl.cache.pages import ends_page
from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.start.sizing import STATE_PAGE_SIZE
from jaxsgl.errors import ConfigError
from jaxsgl.models import ModelArch
from jaxsgl.models.layer_spec import Latent
from jaxsgl.weights import is_converted

_WAY_OUT = "leave --enable-dp-attention out: --dp-size alone means whole replicas"


def check_folder(config: EngineConfig, folder: Path) -> None:
    """Raises `ConfigError` if the weights of `folder` are stored so that a flag can't be followed."""
    if config.has_stages and is_converted(folder):
        raise ConfigError(
            f"--pp-size does not work with {folder}, a converted checkpoint, which is read whole: serve the one it was "
            "made of, or leave --pp-size out"
        )


def check_flags(config: EngineConfig, arch: ModelArch) -> None:
    """Raises `ConfigError` if a flag, or the checkpoint, doesn't go with `arch`."""
    if config.has_stages:
        check_stages(config, arch)
    _check_states(config, arch)
    _check_encoder(config, arch)
    _check_groups(config, arch)
    _check_pages(config, arch)
    _check_adapters(config, arch)
    _check_ranks(config, arch)


def _check_states(config: EngineConfig, arch: ModelArch) -> None:
    if arch.recurrent_net is None:
        return
    refused = (
        (config.host_kv.is_on, "--host-kv-gib or --enable-hierarchical-cache", "host memory holds pages, not states"),
        (config.disaggregation.is_on, "--disaggregation-mode", "pages travel between servers, not states"),
        (config.lora.is_on, "--lora-paths or --enable-lora", "adapters of its layers are not served"),
    )
    for is_on, flags, reason in refused:
        if is_on:
            raise ConfigError(f"{flags} does not go with {arch.name}, which keeps states: {reason}: leave it out")
    page_size = config.page_size
    if not config.disable_radix_cache and isinstance(page_size, int) and not ends_page(page_size, STATE_PAGE_SIZE):
        raise ConfigError(
            f"--page-size is {page_size}, but cached prefixes of {arch.name} end at states, which are made every "
            f"{STATE_PAGE_SIZE} tokens: give 64, 128, 192 or 256, leave it out, or add --disable-radix-cache"
        )


def _check_encoder(config: EngineConfig, arch: ModelArch) -> None:
    if arch.encoder is None:
        return
    refused = (
        (config.host_kv.is_on, "--host-kv-gib or --enable-hierarchical-cache", "no prefix is kept"),
        (config.disaggregation.is_on, "--disaggregation-mode", "nothing is decoded"),
        (config.lora.is_on, "--lora-paths or --enable-lora", "adapters of encoders are not served"),
        (config.speculation.is_on, "--speculative-algorithm", "nothing is generated"),
    )
    for is_on, flags, reason in refused:
        if is_on:
            raise ConfigError(
                f"{flags} does not go with {arch.name}, whose tokens see the whole prompt: {reason}: leave it out"
            )


def _check_groups(config: EngineConfig, arch: ModelArch) -> None:
    """Raises `ConfigError` for what windows and groups of tokens don't go with."""
    if arch.grouped is None:
        return
    speculation = config.speculation
    refused = (
        (config.has_stages, "--pp-size", "several residual streams are not passed on between stages"),
        (config.host_kv.is_on, "--host-kv-gib, --enable-hierarchical-cache or --kv-file", "its layers' pages differ"),
        (config.disaggregation.is_on, "--disaggregation-mode", "its layers' pages differ"),
        (speculation.is_on, f"--speculative-algorithm {speculation.speculative_algorithm}", "sums of groups of tokens "
         "can't be taken back"),
        (config.lora.is_on, "--lora-paths or --enable-lora", "adapters of its layers are not served"),
    )  # fmt: skip
    for is_on, flags, reason in refused:
        if is_on:
            raise ConfigError(f"{flags} does not go with {arch.name} yet: {reason}: leave it out")
    page_size, size = config.page_size, math.lcm(*(groups.size for groups in arch.token_groups))
    if isinstance(page_size, int) and not ends_page(page_size, size):
        raise ConfigError(
            f"--page-size is {page_size}, but pages of {arch.name} hold whole groups of tokens: give a multiple of "
            f"{size}, or leave it out"
        )


def _check_pages(config: EngineConfig, arch: ModelArch) -> None:
    """Raises `ConfigError` for pages that chunks don't begin with, and what takes pages that all layers have a like
    part of.
    """
    page_size = config.page_size
    for chunk in filter(None, (layer.chunk for layer in arch.layers)):
        if isinstance(page_size, int) and not ends_page(chunk, page_size):
            raise ConfigError(
                f"--page-size is {page_size}, but layers of {arch.name} attend within chunks of {chunk} tokens, which "
                "must be whole pages: give a size that divides it, or leave it out"
            )
    in_pages = dict.fromkeys((heads.stored, heads.size) for heads in arch.all_heads)
    if len(in_pages) == 1:
        return
    refused = (
        (config.host_kv.is_on, "--host-kv-gib, --enable-hierarchical-cache or --kv-file"),
        (config.disaggregation.is_on, "--disaggregation-mode"),
        (config.speculation.is_from_weights, f"--speculative-algorithm {config.speculation.speculative_algorithm}"),
    )
    for is_on, flags in refused:
        if is_on:
            sizes = " and ".join(f"{number} kv heads of {size}" for number, size in in_pages)
            instead = ", or give NGRAM" if "algorithm" in flags else ""
            raise ConfigError(
                f"{flags} does not go with {arch.name} yet, whose layers have {sizes}: it takes pages that all layers "
                f"have a like part of: leave it out{instead}"
            )


def _check_adapters(config: EngineConfig, arch: ModelArch) -> None:
    differs = any(
        layer.heads is not None or layer.keys_from is not None or layer.values_are_keys or layer.experts is not None
        for layer in arch.layers
    )
    if config.lora.is_on and (differs or arch.value_dim is not None):
        raise ConfigError(
            f"--lora-paths or --enable-lora does not go with {arch.name} yet, whose layers have projections of several "
            "shapes, or lack some: leave it out, or merge the adapter into the weights"
        )


def _check_ranks(config: EngineConfig, arch: ModelArch) -> None:
    """Raises `ConfigError` if ranks can't serve `arch`, or would gain nothing over heads that devices share."""
    if config.num_ranks == 1:
        return
    if arch.tower is not None:
        raise ConfigError(
            f"--enable-dp-attention does not go with {arch.name}, which sees images, yet: serve text alone with "
            f"--language-only, or {_WAY_OUT}"
        )
    divided = {"kv heads": min(heads.stored for heads in arch.all_heads)}
    if arch.recurrent_net is not None:
        divided[arch.recurrent_net.shared] = arch.recurrent_net.key_heads
    if arch.mixture is None and min(divided.values()) >= config.tp:
        heads = " and ".join(f"{number} {what}" for what, number in divided.items())
        raise ConfigError(
            f"--enable-dp-attention gains nothing: {config.tp} devices can share the {heads} of {arch.name}, and it "
            f"has no experts: {_WAY_OUT}"
        )


def check_stages(config: EngineConfig, arch: ModelArch) -> None:
    """Raises `ConfigError` for models whose layers can't be shared out."""
    way_out = "leave --pp-size out"
    if arch.num_layers < config.pp_size:
        raise ConfigError(
            f"--pp-size is {config.pp_size}, but {arch.name} has {arch.num_layers} layers: give that or less"
        )
    if arch.tower is not None:
        raise ConfigError(f"--pp-size does not work with images for now: give --language-only, or {way_out}")
    if arch.recurrent_net is not None:
        raise ConfigError(f"--pp-size does not work with the {arch.recurrent_net.plural} of {arch.name}: {way_out}")
    if any(each.shortcut for each in arch.layers):
        raise ConfigError(f"--pp-size does not work for now with experts of {arch.name} across layers: {way_out}")
    if any(isinstance(each.mixer, Latent) and each.mixer.index != each.mixer.own_index for each in arch.layers):
        raise ConfigError(
            f"--pp-size does not work for now with the layers of {arch.name}, which attend to the tokens that the "
            f"index of an earlier layer chose: {way_out}"
        )
    if arch.reading_layers or arch.embedding_size:
        raise ConfigError(
            f"--pp-size does not work for now with the layers of {arch.name}, which read keys of other layers or have "
            f"embeddings of each token: {way_out}"
        )
    if arch.pooling is not None:
        raise ConfigError(f"--pp-size does not work with embeddings and scores for now: {way_out}")
