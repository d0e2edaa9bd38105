"""The op `store_kv`: `api` checks, `reference` defines what is right, the rest are backends."""

from pallas_kernels.store_kv.api import STORE_BACKENDS, store_kv

__all__ = ["STORE_BACKENDS", "store_kv"]
