"""Which backend each operation shall run on: one value, chosen when an engine starts and given to all its programs.

Owns the names of the operations. Never knows which backends there are, nor which one "auto" takes: `dispatch` does.
Made by callers that serve or check models; read by models and steps, which give each call its backend.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

AUTO, XLA = "auto", "xla"
ON_GPUS = (AUTO, "triton", "mosaic_gpu")  # on a GPU these are kernels of ours


@dataclasses.dataclass(frozen=True)
class KernelChoice:
    """A backend for each operation of `pallas_kernels`: its name, or "auto"."""

    store_kv: str = AUTO
    """Of stores that `rotate_and_store` leaves to it."""
    rotate_and_store: str = AUTO
    paged_decode_attention: str = AUTO
    paged_extend_attention: str = AUTO
    add_and_norm: str = AUTO
    grouped_product: str = AUTO
    quantized_product: str = AUTO
    """Of weights in groups."""
    float8_product: str = AUTO
    """Of rows that are rounded to float8; with "xla" none are."""
    store_and_decode: str = AUTO
    """Of a decode whose kernel stores too; "xla": of the parts above, each on its own backend."""
    delta_decode: str = AUTO
    attend_to_chosen: str = AUTO
    attend_to_groups: str = AUTO
    score_tokens: str = AUTO

    @classmethod
    def of_attention(cls, backend: str) -> KernelChoice:
        """Attention on `backend`. With "xla" it also stores; else "auto" does, since not all that attend can store."""
        store = XLA if backend == XLA else AUTO
        others = dict.fromkeys(("attend_to_chosen", "attend_to_groups", "score_tokens"), store)
        return cls(store, store, backend, backend, **others)

    def with_backends(self, backends: Mapping[str, str]) -> KernelChoice:
        """The same choice, with other backends for some operations."""
        return dataclasses.replace(self, **backends)

    def of(self, op: str) -> str:
        """The backend of an operation, or "auto"."""
        return str(getattr(self, op))


AUTO_CHOICE = KernelChoice()
OPS = tuple(field.name for field in dataclasses.fields(KernelChoice))
