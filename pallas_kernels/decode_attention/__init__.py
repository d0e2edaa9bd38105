"""The op `paged_decode_attention`: `api` checks, `reference` defines what is right, the rest are backends."""

from pallas_kernels.decode_attention.api import paged_decode_attention

__all__ = ["paged_decode_attention"]
