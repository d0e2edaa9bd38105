"""The op `paged_extend_attention`: `api` checks, `reference` defines what is right, the rest are backends."""

from pallas_kernels.extend_attention.api import paged_extend_attention

__all__ = ["paged_extend_attention"]
