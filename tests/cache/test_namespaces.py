"""Namespaces of prefixes: a request's salt reaches neither an adapter's prefixes nor those of weights that are gone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxsgl.cache.host_pages import extend_names
from jaxsgl.cache.manager import namespace_of, retired
from jaxsgl.cache.radix import RadixCache

PAGES = np.arange(8, dtype=np.int32).reshape(2, 4)
TEXTS = st.one_of(st.sampled_from(["", "x", "\ud800", "\x00" * 16]), st.text(max_size=24))


def page_names(namespace: bytes) -> list[bytes]:
    names: list[bytes] = []
    extend_names(names, PAGES, namespace)
    return names


NAMES = st.tuples(TEXTS, st.none() | TEXTS, TEXTS)


@given(one=NAMES, other=NAMES)
def test_different_salts_loads_of_adapters_or_sources_share_no_prefix_and_no_name(
    one: tuple[str, str | None, str], other: tuple[str, str | None, str]
) -> None:
    namespaces = namespace_of(*one), namespace_of(*other)
    assert (namespaces[0] == namespaces[1]) == (one == other)
    tree = RadixCache(page_size=4)
    tree.insert(PAGES, np.array([5, 6], np.int32), salt=namespaces[0])
    assert len(tree.match(PAGES, namespaces[1]).pages) == (2 if one == other else 0)
    assert (page_names(namespaces[0]) == page_names(namespaces[1])) == (one == other)


@given(text=NAMES, crafted=TEXTS)
def test_no_request_reaches_what_was_retired(text: tuple[str, str | None, str], crafted: str) -> None:
    gone = retired(1) + namespace_of(*text)
    assert gone != namespace_of(crafted)
    assert gone != namespace_of("", crafted)
    assert gone != namespace_of(*text)
