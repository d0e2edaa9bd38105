"""The optimizer of the bundled model and of its head: Muon for the layers' matrices, Adam for all other weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import optax
from optax.contrib import MuonDimensionNumbers, muon

MATRICES = ("proj", "fc")  # parts of the names of the layers' matrices


def make_optimizer(
    names: Iterable[str], schedule: Callable[[float], optax.Schedule], matrix_rate: float, other_rate: float
) -> optax.GradientTransformation:
    """Of weights by `names`. `schedule` makes the rate at each step of its peak.

    Muon is orthogonalized momentum (Jordan et al. 2024): about a third fewer steps here.
    """
    axes = {
        name: MuonDimensionNumbers(reduction_axis=1, output_axis=0) if any(part in name for part in MATRICES) else None
        for name in names
    }
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        muon(
            schedule(matrix_rate),
            weight_decay=0.01,
            adam_b2=0.98,
            adam_learning_rate=schedule(other_rate),
            muon_weight_dimension_numbers=lambda _: axes,
        ),
    )
