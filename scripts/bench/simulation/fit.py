"""Coefficients of `cost.py` from measured steps, by least squares.

The formula is linear once it is known which steps are bound by memory and which by compute: products switch at a number
of tokens, attention at a number of pairs per KV token. All switches between measured values are tried; for each the
linear problem is solved without negative coefficients, and the best fit of the whole formula is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from bench.simulation.cost import StepCost, equal_pairs

MAX_SWITCHES = 12  # of each kind that are tried
Floats = npt.NDArray[np.float64]


def fit(steps: Sequence[Mapping[str, Any]]) -> tuple[dict[str, StepCost], dict[str, float]]:
    """Costs by kind, and by kind the mean relative error of the fit (0.05: predictions are off by 5% on average).

    Raises:
      ValueError: there are no steps of kind "decode", or none of kind "extend".
    """
    costs, errors = {}, {}
    for kind in ("decode", "extend"):
        mine = [step for step in steps if step["kind"] == kind]
        if not mine:
            raise ValueError(f"no measured step is of kind {kind!r}, but costs of both decode and extend are needed")
        tokens, kv, seconds = (np.array([float(s[key]) for s in mine]) for key in ("tokens", "kv_tokens", "seconds"))
        pairs = np.array([s.get("pairs") or equal_pairs(s["tokens"], s["seqs"], s["kv_tokens"]) for s in mine])
        costs[kind], errors[kind] = _fit_kind(tokens, kv, pairs if kind == "extend" else np.zeros_like(kv), seconds)
    return costs, errors


def _fit_kind(tokens: Floats, kv: Floats, pairs: Floats, seconds: Floats) -> tuple[StepCost, float]:
    per_kv = pairs / np.maximum(kv, 1)
    best: tuple[float, StepCost] | None = None
    for tokens_switch in _switches(tokens):
        computing = tokens >= tokens_switch
        for pairs_switch in _switches(per_kv):
            attending = per_kv >= pairs_switch
            columns = (np.ones_like(kv), ~computing, computing * tokens, ~attending * kv, attending * pairs)
            cost = StepCost(*_least_squares(np.stack(columns, axis=1), seconds))
            predicted = np.array([cost.seconds(*step) for step in zip(tokens, kv, pairs, strict=True)])
            error = float(np.square(predicted / seconds - 1).mean())
            if best is None or error < best[0]:
                best = error, cost, float(np.abs(predicted / seconds - 1).mean())
    assert best is not None
    return best[1:]


def _switches(values: Floats) -> list[float]:
    """Values from which on compute may be the bound; the last one: it never is."""
    distinct = np.unique(values)
    if len(distinct) > MAX_SWITCHES:
        distinct = np.quantile(distinct, np.linspace(0, 1, MAX_SWITCHES), method="nearest")
    return [*distinct.tolist(), np.inf]


def _least_squares(columns: Floats, seconds: Floats) -> list[float]:
    """Least squares of relative errors, so that short steps count as much as long ones; nothing is below 0."""
    weighted = columns / seconds[:, None]
    scale = np.maximum(np.linalg.norm(weighted, axis=0), 1e-300)
    solution, _ = nnls(weighted / scale, np.ones(len(seconds)))
    return (solution / scale).tolist()
