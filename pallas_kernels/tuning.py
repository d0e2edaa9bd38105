"""Block sizes and backend preferences: one table per device kind, looked up when a kernel is traced.

Owns the reading of `tables/*.json`. Never knows what a size means: a kernel names its op and backend, describes
its shapes, and gets its own integers back. `scripts/tune_kernels.py` measures and writes the tables.

A table is `{"devices": [words of the device kind, ...], "backends": {op: [backend, ...]}, "blocks": [entry, ...]}`.
An entry is `{"op", "backend", "when": {field: value or list of values}, "blocks": {name: integer}, "source": text}`.
Of the entries whose `when` holds, the last one wins per name; the default table comes first, the device's after it.
"""

import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from importlib import resources
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.paged_kv import PagedKv
from pallas_kernels.target import target_device

_DEFAULT = "default.json"


@dataclasses.dataclass(frozen=True)
class ShapeClass:
    """The properties of a call that a table may distinguish.

    Counts are rounded up to powers of two, so that similar shapes share an entry.
    """

    head_dim: int
    """H."""
    num_groups: int
    """N / K."""
    page_size: int
    """Tokens."""
    kv_bits: int
    """Bits per element of the cache."""
    num_seqs: int
    """S."""
    num_tokens: int
    """T; equals S for a decode."""
    q_bits: int = 16
    """Bits per element of the queries: those of the cache, unless it is float8."""


def shape_class(q: jax.Array | jax.ShapeDtypeStruct, kv: PagedKv, num_seqs: int | None = None) -> ShapeClass:
    """The class of a call with q `[T, N, H]`, or with the k `[T, K, H]` of a store, whose num_seqs is T."""
    num_tokens, num_heads, head_dim = q.shape
    return ShapeClass(
        head_dim=head_dim,
        num_groups=_power_of_two(num_heads // kv.num_kv_heads),
        page_size=kv.page_size,
        kv_bits=jnp.dtype(kv.dtype).itemsize * 8,
        num_seqs=_power_of_two(kv.num_seqs if num_seqs is None else num_seqs),
        num_tokens=_power_of_two(num_tokens),
        q_bits=jnp.dtype(q.dtype).itemsize * 8,
    )


@dataclasses.dataclass(frozen=True)
class ProductClass:
    """The properties of a `quantized_product` that a table may distinguish."""

    num_rows: int
    """T, rounded up to a power of two."""
    group: int
    """Inputs that share a scale."""
    weight_bits: int
    """Bits per weight."""


def product_class(num_rows: int, group: int, weight_bits: int) -> ProductClass:
    """The class of a product of so many rows."""
    return ProductClass(_power_of_two(num_rows), group, weight_bits)


@dataclasses.dataclass(frozen=True)
class ExpertClass:
    """The properties of a product of experts' rows that a table may distinguish."""

    tile_rows: int
    """R, rows of one expert that a program multiplies."""
    weight_bits: int
    """Bits per weight."""


AnyClass = ShapeClass | ProductClass | ExpertClass


def blocks(op: str, backend: str, shape: AnyClass) -> dict[str, int]:
    """The block sizes of one kernel for the target device.

    Raises:
        LookupError: the default table has no entry for the op and backend.
    """
    found: dict[str, int] = {}
    fields = dataclasses.asdict(shape)
    for table in _tables(target_device().kind):
        for entry in table["blocks"]:
            if (entry["op"], entry["backend"]) == (op, backend) and _holds(entry["when"], fields):
                found |= entry["blocks"]
    forced = _override.get()
    if forced is not None and (forced.op, forced.backend) == (op, backend):
        forced.asked.append(shape)
        found |= forced.sizes
    if not found:
        raise LookupError(f"no block sizes for {op} on backend {backend!r}; add an entry to tables/{_DEFAULT}")
    return found


@dataclasses.dataclass(frozen=True)
class _Override:
    op: str
    backend: str
    sizes: Mapping[str, int]
    asked: list[AnyClass]


_override: ContextVar[_Override | None] = ContextVar("pallas_kernels.tuning.override", default=None)


@contextlib.contextmanager
def override(op: str, backend: str, sizes: Mapping[str, int]) -> Iterator[list[AnyClass]]:
    """Kernels of `op` on `backend` that are traced inside get these sizes, and the table's where a name is missing.

    Yields a list that fills with the shape classes which such kernels ask for; with no sizes it only watches. JAX
    remembers traces without knowing of sizes, so its caches are emptied on entry and on exit: for tuning and
    tests. Programs compiled ahead of time inside stay as they are.
    """
    asked: list[AnyClass] = []
    jax.clear_caches()
    token = _override.set(_Override(op, backend, sizes, asked))
    try:
        yield asked
    finally:
        _override.reset(token)
        jax.clear_caches()


def preferred_backends(op: str) -> list[str]:
    """Backends that "auto" should try for the target device, best first."""
    preferred: list[str] = []
    device = target_device()
    for table in _tables(device.kind):
        by_platform = table["backends"].get(op, {})
        preferred = by_platform.get(device.platform, preferred)
    return preferred


def _holds(when: Mapping[str, Any], fields: Mapping[str, int]) -> bool:
    return all(fields[name] in (wanted if isinstance(wanted, list) else [wanted]) for name, wanted in when.items())


@functools.cache
def _tables(device_kind: str) -> tuple[dict[str, Any], ...]:
    """The default table, then those whose device names occur in the kind as whole words: "A10" isn't in "A100"."""
    folder = resources.files("pallas_kernels") / "tables"
    tables = {path.name: json.loads(path.read_text()) for path in folder.iterdir() if path.name.endswith(".json")}
    default = tables.pop(_DEFAULT)
    mine = [table for _, table in sorted(tables.items()) if any(_names(name, device_kind) for name in table["devices"])]
    return (default, *mine)


def _names(name: str, device_kind: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", device_kind) is not None


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
