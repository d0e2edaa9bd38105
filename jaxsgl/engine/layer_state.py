"""What each layer keeps between steps, as values: from them follow all that is done with its arrays.

    layer_states            from the model's layers: which arrays, of which shapes, formats and axes
    KvBuffers, shardings    state.py allocates and places what the specs say
    page_bytes, row_bytes   sizing.py divides the memory by them
    page_layout             the host form of a page: the host tier, KV files and other servers know pages by it

An array by page has a part for each page of the pool, an array by row one for each row of running requests. Attention
keeps K and V by page, whatever its window, and nothing by row; nothing at all if it reads another layer's. A gated
delta-net, a layer of Mamba-2 or a short convolution keeps its state by row and nothing by page. Groups of tokens have
their entries and sums by page. A mixer that keeps
something else is a row of `layer_states` and, if `KvBuffers` or `StateBuffers` has no field of that name yet, a field
there; a latent cache is a "k" without a "v". Knows no requests and no programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxsgl.batch.engine_api import PageLayout
from jaxsgl.cache.pages import groups_of
from jaxsgl.models import ModelArch, kv_cache_flag
from jaxsgl.models.layer_spec import GroupedAttention, KvHeads, LayerSpec, RecurrentNet
from jaxsgl.models.tensor_parallel import DATA_AXIS, MESH_AXES_OF, mesh_axes
from jaxsgl.weights.sharding import replicated
from pallas_kernels.grouped_tokens import num_sums
from pallas_kernels.kept_heads import KeptHeads


@dataclass(frozen=True)
class StateArray:
    """One array that a layer keeps.

    Attributes:
      name: of the field that holds it, in `KvBuffers` if it is by page, else in `StateBuffers`.
      shape: of one page's or one row's part, of all devices together: `[K, page_size, H]` of keys and values.
      dtype: of its numbers.
      axes: for each dimension of `shape` a logical axis as parameters have them, which devices may split, or None.
      scratch: parts besides those of the pool's pages, after them, that no request owns.
    """

    name: str
    shape: tuple[int, ...]
    dtype: jnp.dtype
    axes: tuple[str | None, ...]
    scratch: int = 0

    def num_bytes(self, num_devices: int) -> int:
        """Bytes of one part on each of `num_devices`, those of a rank."""
        parts = num_devices if any(axis in MESH_AXES_OF for axis in self.axes) else 1
        return math.prod(self.shape) * self.dtype.itemsize // parts

    def sharding(self, mesh: Mesh, num_before: int = 1) -> NamedSharding:
        """The places of an array whose last dimensions are `shape`, after `num_before`: the first has ranks' parts."""
        before = DATA_AXIS if mesh.shape[DATA_AXIS] > 1 else None, *(None,) * (num_before - 1)
        return NamedSharding(mesh, PartitionSpec(*before, *(mesh_axes(axis, mesh) for axis in self.axes)))


@dataclass(frozen=True)
class LayerState:
    """What one layer keeps.

    Attributes:
      by_page: arrays with a part for each page.
      by_row: arrays with a part for each row of running requests, and one for the dummy row.
    """

    by_page: tuple[StateArray, ...]
    by_row: tuple[StateArray, ...] = ()

    def with_scratch(self, num_pages: int) -> LayerState:
        """The same with so many scratch pages."""
        return replace(self, by_page=tuple(replace(array, scratch=num_pages) for array in self.by_page))


@dataclass(frozen=True)
class LayerStates:
    """What all layers keep.

    Attributes:
      layers: of each layer.
      page_size: tokens per page.
      num_devices: that share the arrays, those of a rank.
      kv_copies: so many consecutive kv heads are equal: one of them is enough for the host.
    """

    layers: tuple[LayerState, ...]
    page_size: int
    num_devices: int = 1
    kv_copies: int = 1

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on each device, over all layers."""
        return sum(array.num_bytes(self.num_devices) for layer in self.layers for array in layer.by_page)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row on each device, over all layers."""
        return sum(array.num_bytes(self.num_devices) for layer in self.layers for array in layer.by_row)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of all scratch pages on each device."""
        arrays = (array for layer in self.layers for array in layer.by_page)
        return sum(array.scratch * array.num_bytes(self.num_devices) for array in arrays)

    def by_page(self, name: str) -> tuple[StateArray, ...]:
        """The arrays of that name by page, in the order of the layers that have one."""
        return tuple(array for layer in self.layers for array in layer.by_page if array.name == name)

    def by_row(self, name: str) -> tuple[StateArray, ...]:
        """Likewise by row."""
        return tuple(array for layer in self.layers for array in layer.by_row if array.name == name)

    @cached_property
    def page_layout(self) -> PageLayout:
        """The host form of a page: the arrays of each layer that keeps any, which are alike, one of equal heads."""
        kept = [layer.by_page for layer in self.layers if layer.by_page]
        heads, *others = self._page_array.shape
        shape = len(kept), len(kept[0]), heads // self.kv_copies, *others
        dtype = self._page_array.dtype
        return PageLayout(self.page_size, shape, kv_cache_flag(dtype), dtype.itemsize)

    def host_sharding(self, mesh: Mesh) -> NamedSharding:
        """The places of pages in their host form `[num_pages, layers, arrays, K, page_size, H]`.

        Each device gathers and inserts its own heads; the host's array holds all of them. Where heads are copies of
        each other, each device has the whole.
        """
        return self._page_array.sharding(mesh, num_before=3) if self.kv_copies == 1 else replicated(mesh)

    @cached_property
    def _page_array(self) -> StateArray:
        """What all arrays by page are but for their names; the host form needs them so."""
        first, *others = (array for layer in self.layers for array in layer.by_page)
        alike = {(array.shape, array.dtype, array.axes) for array in (first, *others)}
        counts = {len(layer.by_page) for layer in self.layers if layer.by_page}
        assert len(alike) == len(counts) == 1, f"the host form has no place for pages of {alike}, {counts} in a layer"
        return first


NOTHING = LayerState(())


def attention_state(num_kv_heads: int, page_size: int, head_dim: int, dtype: jnp.dtype) -> LayerState:
    """What a layer of attention keeps: K and V."""
    shape, axes = (num_kv_heads, page_size, head_dim), ("kv_heads", None, None)
    return LayerState((StateArray("k", shape, dtype, axes), StateArray("v", shape, dtype, axes)))


def latent_state(num_copies: int, page_size: int, entry_dim: int, dtype: jnp.dtype) -> LayerState:
    """What a layer with a latent keeps: a key of it for each token, on each device its own copy."""
    return LayerState(attention_state(num_copies, page_size, entry_dim, dtype).by_page[:1])


def grouped_state(mixer: GroupedAttention, page_size: int, head_dim: int, dtype: jnp.dtype) -> LayerState:
    """What a layer over windows and groups of tokens keeps: an entry of each token, and of each group."""
    entries = StateArray("k", (1, page_size, head_dim), dtype, (None, None, None))
    if mixer.groups is None:
        return LayerState((entries,))
    width, shared = mixer.groups.entry_size(head_dim), (None, None, None)
    of_groups = StateArray("groups", (1, groups_of(page_size, mixer.groups.size), width), dtype, shared)
    sums = StateArray("sums", (num_sums(mixer.groups.parts), width), jnp.dtype(jnp.float32), shared[1:])
    return LayerState((entries, of_groups, sums))


def recurrent_state(net: RecurrentNet) -> LayerState:
    """What a net that recurs keeps: a matrix for each value head, if it has any, and what its convolution read of the
    last tokens.
    """
    float32 = jnp.dtype(jnp.float32)
    inputs = net.taps, net.key_heads, net.channels
    kept = [StateArray("inputs", inputs, float32, (None, "key_heads", None))]
    if net.key_size:
        matrices = net.key_heads, net.group, net.key_size, net.value_size
        kept.insert(0, StateArray("matrices", matrices, float32, ("key_heads", None, None, None)))
    return LayerState((), tuple(kept))


def layer_states(
    arch: ModelArch,
    page_size: int,
    dtype: jnp.dtype,
    num_devices: int = 1,
    kept: Callable[[KvHeads], KeptHeads] | None = None,
) -> LayerStates:
    """What the layers of `arch` keep on `num_devices` that share it, with KV as `dtype`.

    `kept` says how each device keeps its part of a layer's kv heads; None: as they are.
    """
    state_of = latent_state if arch.latent is not None else attention_state

    def state(layer: LayerSpec) -> LayerState:
        by_row: tuple[StateArray, ...] = ()
        if isinstance(layer.mixer, RecurrentNet):
            if not layer.also_attends:
                return recurrent_state(layer.mixer)
            by_row = recurrent_state(layer.mixer).by_row
        if layer.mixer is None or layer.keys_from is not None:
            return NOTHING
        heads = layer.heads or arch.kv_heads
        if isinstance(layer.mixer, GroupedAttention):
            return grouped_state(layer.mixer, page_size, heads.size, dtype)
        number, width = heads.number, heads.size
        if kept is not None:
            number, width = kept(heads).kept_heads * num_devices, kept(heads).width
        return replace(state_of(number, page_size, width, dtype), by_row=by_row)

    return LayerStates(tuple(map(state, arch.layers)), page_size, num_devices, arch.kv_copies)
