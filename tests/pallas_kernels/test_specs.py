"""The grid of shapes that is lowered and compiled covers what the kernels promise."""

import itertools

import jax.numpy as jnp

from pallas_kernels.specs import GRID_SPECS, HOPPER_PRODUCT_SPECS, PRODUCT_SPECS, ArgSpec

AXES = {
    "head_dim": (64, 128, 256),
    "num_groups": (1, 2, 4, 7, 8, 16),
    "page_size": (1, 16, 64, 128),
    "dtype": (jnp.bfloat16, jnp.float16, jnp.float32),
    "float8_cache": (False, True),
    "sliding_window": (None, 1024),
    "logit_soft_cap": (None, 50.0),
}


def test_any_two_values_of_two_axes_meet_in_some_spec() -> None:
    def pairs(values: tuple) -> set:
        return set(itertools.combinations(zip(AXES, values, strict=True), 2))

    def values_of(spec: ArgSpec) -> tuple:
        return tuple(getattr(spec, axis) for axis in AXES)

    wanted = set().union(*map(pairs, itertools.product(*AXES.values())))
    assert wanted <= set().union(*(pairs(values_of(spec)) for spec in GRID_SPECS))


def test_names_are_unique() -> None:
    for specs in (GRID_SPECS, PRODUCT_SPECS, HOPPER_PRODUCT_SPECS):
        assert len({spec.name for spec in specs}) == len(specs)
