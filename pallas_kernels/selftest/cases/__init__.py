"""The calls by which each operation is tested.

    attention, chosen, grouped, stores, norms, experts, products, states   the cases of an operation each
    arguments                                                              what several of them call with

Owns the list of operations and their order. The batches have ragged lengths around pages and tiles, a last page that is
cut, splits, extends whose sequences begin at odd tokens and follow cached ones, NaN wherever no sequence has a token.
Called by `selftest.__main__`.
"""

from collections.abc import Callable, Iterator, Mapping

from pallas_kernels.selftest.case import Case
from pallas_kernels.selftest.cases import experts
from pallas_kernels.selftest.cases.attention import decode_cases, extend_cases, store_and_decode_cases
from pallas_kernels.selftest.cases.chosen import choice_cases, chosen_cases
from pallas_kernels.selftest.cases.experts import product_cases
from pallas_kernels.selftest.cases.grouped import grouped_cases
from pallas_kernels.selftest.cases.norms import norm_cases
from pallas_kernels.selftest.cases.products import float8_cases, ordered_cases, quantized_cases
from pallas_kernels.selftest.cases.states import state_cases
from pallas_kernels.selftest.cases.stores import rotate_cases, store_cases
from pallas_kernels.selftest.shapes import KernelShapes


def all_float8_cases(shapes: KernelShapes) -> Iterator[Case]:
    """Products in float8 with layers' matrices, then with experts'."""
    yield from float8_cases(shapes)
    yield from experts.float8_cases(shapes)


CASES_OF: Mapping[str, Callable[[KernelShapes], Iterator[Case]]] = {
    "rotate_and_store": rotate_cases,
    "store_kv": store_cases,  # after the one that may do without it
    "store_and_decode": store_and_decode_cases,
    "paged_decode_attention": decode_cases,
    "paged_extend_attention": extend_cases,
    "add_and_norm": norm_cases,
    "grouped_product": product_cases,
    "quantized_product": quantized_cases,
    "float8_product": all_float8_cases,
    "ordered_product": ordered_cases,
    "delta_decode": state_cases,
    "attend_to_chosen": chosen_cases,
    "attend_to_groups": grouped_cases,
    "score_tokens": choice_cases,
}
