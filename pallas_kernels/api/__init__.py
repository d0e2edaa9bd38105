"""The public functions, by what they compute: `stores` into the paged cache, `attention` over it, `norms`, `experts`,
`products`.

Each module owns the checks of its functions' arguments, and what holds for every backend. None knows how a backend
computes: it asks `dispatch` for one and calls it. `pallas_kernels` has all their names. Those of gated delta-nets are
in `pallas_kernels.delta`, with what XLA computes of them.
"""
