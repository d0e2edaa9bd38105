"""The Triton kernels as a backend, for `dispatch`."""

from typing import Any

from pallas_kernels.backend import Backend, Kernel, refuse_nothing
from pallas_kernels.lazily import imported


def _kernel(module: str, run: str, refuse: str | None = None) -> Kernel[Any]:
    """The function `run` of a module of this package, and `refuse` of the same one."""
    refusal = refuse_nothing if refuse is None else imported(f"triton.{module}", refuse)
    return Kernel(imported(f"triton.{module}", run), refusal)


_REFUSE_ATTENTION = imported("triton.common", "refuse_attention")
_REFUSE_STATES = imported("triton.delta_decode", "refuse_delta_decode")

BACKEND = Backend(
    "triton",
    Kernel(imported("triton.decode", "decode_attention"), _REFUSE_ATTENTION),
    Kernel(imported("triton.extend", "extend_attention"), _REFUSE_ATTENTION),
    _kernel("store", "store_kv", "refuse_store"),
    _kernel("rotate_and_store", "rotate_and_store", "refuse_rotate_and_store"),
    _kernel("add_and_norm", "add_and_norm", "refuse_add_and_norm"),
    _kernel("grouped_product", "grouped_product", "refuse_grouped_product"),
    _kernel("quantized_product", "quantized_product", "refuse_quantized_product"),
    _kernel("grouped_product", "gated_product", "refuse_gated_product"),
    _kernel("choose_experts", "choose_experts", "refuse_choose_experts"),
    _kernel("group_by_expert", "group_by_expert"),
    _kernel("float8_rows", "float8_rows"),
    _kernel("float8_product", "float8_product", "refuse_float8_product"),
    Kernel(
        imported("triton.grouped_float8_product", "grouped_float8_product"),
        imported("triton.float8_product", "refuse_float8_product"),
    ),
    products_with_shared=_kernel("grouped_product", "products_with_shared", "refuse_products_with_shared"),
    ordered_product=_kernel("ordered_product", "ordered_product", "refuse_ordered_product"),
    grouped_packed_product=_kernel("grouped_packed_product", "grouped_packed_product", "refuse"),
    gated_packed_product=_kernel("grouped_packed_product", "gated_packed_product", "refuse_gated"),
    extend_ahead=Kernel(imported("triton.extend", "extend_attention"), _REFUSE_ATTENTION),
    extend_biased=Kernel(imported("triton.extend", "extend_attention"), _REFUSE_ATTENTION),
    delta_decode=Kernel(imported("triton.delta_decode", "delta_decode"), _REFUSE_STATES),
    delta_blocks=Kernel(imported("triton.delta_blocks", "delta_blocks"), _REFUSE_STATES),
    delta_step=Kernel(imported("triton.delta_decode", "delta_step"), _REFUSE_STATES),
    delta_run=Kernel(imported("triton.delta_run", "delta_run"), _REFUSE_STATES),
    absorb_and_store=_kernel("absorb_and_store", "absorb_and_store", "refuse_absorb_and_store"),
    decode_latents=_kernel("decode", "decode_latents", "refuse_decode_latents"),
    attend_to_chosen=_kernel("chosen", "attend_to_chosen", "refuse_attend_to_chosen"),
    attend_to_groups=_kernel("grouped", "attend_to_groups", "refuse_attend_to_groups"),
    score_tokens=_kernel("index_scores", "score_tokens", "refuse_score_tokens"),
    cuts_entries=True,
    platform="gpu",
    has_interpreter=True,
)
