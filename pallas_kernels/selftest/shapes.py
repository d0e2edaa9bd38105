"""The shapes with which a model calls the kernels on one device, as values that become JSON and come back.

Owns no arrays. Made by whoever knows the model, read by `cases`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pallas_kernels.options import AttentionOptions
from pallas_kernels.paged_kv import FLOAT8
from pallas_kernels.routing import Router
from pallas_kernels.scaled import ROW_GROUP


@dataclasses.dataclass(frozen=True)
class ExpertShape:
    """Stacked weights `[num_experts, outputs, inputs]` of one product of a mixture."""

    num_experts: int
    outputs: int
    inputs: int
    dtype: str
    router: Router
    """Of all devices' experts. Those that it says are shared have weights in an array of their own."""
    num_routed: int
    """How many there are to choose from, on all devices."""
    of_tokens: bool
    """Whether its rows are tokens' or places'."""
    float8_group: int | None = None
    """Inputs that share a scale, of weights that are kept in float8; None: of no others."""
    packing: str = ""
    """One of `packed.ON_ACCELERATORS`, or "" for weights of `dtype`, or of `numbers`."""
    numbers: str = ""
    """dtype of numbers with scales of groups that a `grouped_scaled_product` takes; "" for others."""
    group: int = 0
    """Inputs that share a scale, of packed weights and of numbers."""
    has_zeros: bool = False
    """Whether their groups have zero points."""
    block_outputs: int = 1
    """Outputs that share scales, of weights that are kept in float8."""
    activation: str = "silu"
    """Of the units, one of `UNITS`."""

    @property
    def may_be_in_float8(self) -> bool:
        """Whether it takes a `grouped_float8_product`."""
        return self.float8_group is not None and not (self.inputs % ROW_GROUP or self.float8_group % ROW_GROUP)


@dataclasses.dataclass(frozen=True)
class MatrixShape:
    """Quantized weights `[outputs, inputs]`, of which `group` inputs share a scale."""

    outputs: int
    inputs: int
    numbers: str
    """dtype of the numbers."""
    group: int
    has_zeros: bool = False
    packing: str = ""
    """One of `packed.ON_ACCELERATORS`, or "" for numbers as they are."""
    block_outputs: int = 1
    """Outputs that share scales."""

    @property
    def is_in_groups(self) -> bool:
        """Whether it takes a `quantized_product`: one scale per output is multiplied into the sums of any product."""
        return self.group < self.inputs or self.has_zeros or bool(self.packing)

    @property
    def may_be_in_float8(self) -> bool:
        """Whether it takes a `float8_product` where its rows are many."""
        return self.numbers == FLOAT8.dtype.name and not (self.inputs % ROW_GROUP or self.group % ROW_GROUP)


RULES = ("delta rule", "delta rule by channel", "Mamba-2", "Mamba")


@dataclasses.dataclass(frozen=True)
class StateShape:
    """The state of a layer that mixes tokens by one of `RULES`."""

    key_heads: int
    """K."""
    group: int
    """r: value heads of each."""
    key_size: int
    """h."""
    value_size: int
    """v."""
    taps: int
    """Tokens that its convolution reads."""
    rule: str = "delta rule"
    """One of `RULES`."""
    rank: int = 0
    """Numbers that steps are made of, of Mamba."""


@dataclasses.dataclass(frozen=True)
class LatentShape:
    """The matrices of a head in a layer with a latent."""

    num_absorbing: int
    """Rows that absorb its queries."""
    num_outputs: int
    """Rows that make its output."""
    key_size: int | None = None
    """How many of an entry's numbers queries meet, where the key of an index follows; None: all."""
    num_chosen: int = 0
    """Tokens that an index chooses for a query; 0: the model has no index."""
    index_heads: int = 0
    """Heads of its queries."""
    index_size: int = 0
    """I, numbers of its keys."""


@dataclasses.dataclass(frozen=True)
class GroupedShape:
    """The groups of tokens of a layer that attends to a window and to entries of these."""

    size: int = 0
    """m, tokens of a group; 0: the layer attends to the window alone."""
    width: int = 0
    """W, numbers of an entry."""
    num_chosen: int = 0
    """Entries that an index chooses for a query; 0: all are attended to."""
    index_heads: int = 0
    """Heads of the index's queries."""

    def index_shapes(self, shapes: KernelShapes) -> KernelShapes:
        """Those of a model with latents whose tokens are these entries, for its index."""
        latent = LatentShape(0, 0, shapes.head_dim, self.num_chosen, self.index_heads, self.width - shapes.head_dim)
        options = AttentionOptions(value_dim=shapes.head_dim)
        return dataclasses.replace(
            shapes, page_size=shapes.page_size // self.size, head_dim=self.width, latents=(latent,), grouped=(),
            attention=(options,),
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class KernelShapes:
    """The kernels' arguments but for their numbers of sequences and tokens. Letters as in the ops' docstrings."""

    num_kv_heads: int
    """K."""
    num_groups: int
    """G: query heads per kv head."""
    head_dim: int
    """H."""
    page_size: int
    hidden_size: int
    """D."""
    dtype: str
    """Of queries and of the residual stream."""
    kv_dtype: str
    """Of the cache, as it is kept."""
    norm_dtype: str
    """Of the scales of norms."""
    attention: tuple[AttentionOptions, ...] = (AttentionOptions(),)
    """Those that differ between layers."""
    has_sinks: bool = False
    has_bias: bool = False
    """Whether queries, keys and values have biases that the kernel adds."""
    has_out_bias: bool = False
    """Whether products that go back to the residual stream have biases."""
    has_out_norms: bool = False
    """Whether what these yield is normalized before it is added."""
    is_centred: bool = False
    """Whether its mean is taken off."""
    residual_scale: float | None = None
    """What it is multiplied by; None: nothing."""
    has_stream_factors: bool = False
    """Whether the residual stream is multiplied by a number of its layer's after that."""
    has_norm_bias: bool = False
    has_head_norms: bool = False
    """Whether queries and keys are normalized head by head."""
    rotates_first: bool = False
    """Whether that comes after the rotation."""
    normalizes_values: bool = False
    """Whether values are normalized, too, without scales."""
    experts: tuple[ExpertShape, ...] = ()
    matrices: tuple[MatrixShape, ...] = ()
    """Those that are quantized, but for experts'."""
    states: tuple[StateShape, ...] = ()
    latents: tuple[LatentShape, ...] = ()
    grouped: tuple[GroupedShape, ...] = ()
    """Of layers over windows and groups of tokens, which call no other attention."""
    in_fixed_order: bool = False
    """Whether sums have one order (`order`), those of products and norms too."""

    @property
    def has_latents(self) -> bool:
        """Whether the cache keeps entries of which a part is the value."""
        return any(each.value_dim is not None for each in self.attention)

    @property
    def query_dim(self) -> int:
        """The H of queries."""
        return next((each.key_size for each in self.latents if each.key_size is not None), self.head_dim)

    def as_json(self) -> dict[str, Any]:
        """What `from_json` takes."""
        values = dataclasses.asdict(self)
        return {**values, **{name: list(values[name]) for name in _TUPLES}}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> KernelShapes:
        """The shapes that `as_json` wrote."""
        attention = tuple(AttentionOptions(**each) for each in values["attention"])
        experts = tuple(ExpertShape(**{**each, "router": Router(**each["router"])}) for each in values["experts"])
        matrices = tuple(MatrixShape(**each) for each in values["matrices"])
        states = tuple(StateShape(**each) for each in values.get("states", ()))
        latents = tuple(LatentShape(**each) for each in values.get("latents", ()))
        grouped = tuple(GroupedShape(**each) for each in values.get("grouped", ()))
        tuples = (attention, experts, matrices, states, latents, grouped)
        return cls(**{**values, **dict(zip(_TUPLES, tuples, strict=True))})


_TUPLES = ("attention", "experts", "matrices", "states", "latents", "grouped")
