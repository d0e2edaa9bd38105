"""What `--enable-deterministic-inference` asks of an engine: that a request's bits don't depend on its company.

Owns the list of what keeps an engine from that, for each platform (docs/determinism.md). On a CPU the C++ kernels add
in one order without being asked, so that only what they don't compute is refused; on a GPU programs are traced in fixed
order (`pallas_kernels.order`). Called by `engine`, at start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax.numpy as jnp

from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.start.sizing import WIDEST_HEADS
from jaxsgl.errors import ConfigError
from jaxsgl.models import ModelArch
from pallas_kernels.choice import XLA
from pallas_kernels.native import library
from pallas_kernels.native.attention import refuse_heads
from pallas_kernels.selftest.report import Verdict

FLAG = "--enable-deterministic-inference"
OPS = ("ordered_product", "paged_decode_attention", "paged_extend_attention", "rotate_and_store", "add_and_norm")


def asks_for_fixed_order(config: EngineConfig, arch: ModelArch, platform: str, dtype: jnp.dtype) -> bool:
    """Whether programs must be traced in fixed order. Raises `ConfigError` where that would not be enough."""
    if not config.enable_deterministic_inference:
        return False
    found = next(_obstacles(config, arch, platform, dtype), None)
    if found is not None:
        raise ConfigError(f"{FLAG}: {found}")
    return platform == "gpu"


def _obstacles(config: EngineConfig, arch: ModelArch, platform: str, dtype: jnp.dtype) -> Iterator[str]:
    """What depends on a request's company, with the way out."""
    if platform == "tpu":
        yield "XLA chooses the tiles of a TPU's products by the batch: leave it out"
    if arch.latent is not None:
        yield f"products around the latents of {arch.name} are XLA's, whose order depends on the batch: leave it out"
    if arch.grouped is not None:
        yield f"sums of groups of tokens of {arch.name} are XLA's, whose order depends on the batch: leave it out"
    if arch.recurrent_net is not None:
        layers = f"the {arch.recurrent_net.plural} of {arch.name}"
        yield f"{layers} are XLA's, whose order depends on the batch: leave it out"
    if arch.tower is not None:
        yield "the vision tower is XLA's, whose order depends on the batch: give --language-only, or leave it out"
    if config.lora.is_on:
        yield "XLA adds adapters up by their places in the pool: leave it out, or --enable-lora and --lora-paths"
    if config.attention_backend == XLA or any(each.endswith(f"={XLA}") for each in config.kernels):
        yield "XLA's order depends on the batch: take xla out of --attention-backend and --kernels"
    if arch.encoder is not None:
        yield f"what {arch.name} makes of pooled states is XLA's, whose order depends on the batch: leave it out"
    elif arch.pooling is not None and arch.pooling.kind == "mean":
        yield "means of prompts are XLA's, whose order depends on the batch: leave it out"
    if platform == "cpu":
        problem = library.load()
        if problem is not None:
            yield f"it takes the C++ kernels, and {problem}: leave it out"
        if dtype != jnp.bfloat16:
            yield f"{dtype} is XLA's, whose order depends on the batch: give --dtype bfloat16, or leave it out"
        for heads in arch.all_heads:
            if reason := refuse_heads(heads.size, (heads.queries or arch.num_heads) // heads.number):
                yield f"it takes the C++ kernels, but {reason}: leave it out"
        return
    widest = max(heads.size for heads in arch.all_heads)
    if platform == "gpu" and widest > WIDEST_HEADS and arch.latent is None:
        yield f"attention over heads of {widest} is XLA's, whose order depends on the batch: leave it out"
    if arch.weight_format is not None:
        numbers = arch.weight_format.numbers
        yield f"products with weights in {numbers} take tiles by the batch: serve 16 bits, or leave it out"
    if arch.mixture is not None:
        yield f"the experts of {arch.name} take tiles by the batch: leave it out"
    if config.mixes_steps:
        flags = "--enable-dp-attention" if config.num_ranks > 1 else "--enable-mixed-chunk"
        yield f"a decode in a mixed step is added up as an extend is: leave it or {flags} out"
    if config.speculation.is_on:
        yield "a verified token is added up as an extend is: leave it or --speculative-algorithm out"


def check_kernels(verdicts: Sequence[Verdict]) -> None:
    """Raises `ConfigError` if a kernel failed its test whose place XLA takes, which adds as it likes."""
    for each in verdicts:
        if each.failed and each.op in OPS and not _has_other(each.op, verdicts):
            raise ConfigError(
                f"{FLAG}: the kernel of {each.op} on {each.backend} failed its test ({each.verdict}: {each.note}), and "
                "XLA's order depends on the batch: leave it out"
            )


def _has_other(op: str, verdicts: Sequence[Verdict]) -> bool:
    return any(each.op == op and not each.failed and each.backend != XLA for each in verdicts)
