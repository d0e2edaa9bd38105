from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

import jaxsgl
from jaxsgl.cache.pages import PageAllocator, as_pages, full_pages, pages_for, slots_at, slots_of


@pytest.mark.parametrize("page_size", [1, 3, 16, 256])
def test_slots_name_the_page_and_the_place_in_it(page_size: int) -> None:
    table = np.array([7, 3, 9], dtype=np.int32)
    slots = slots_of(table, 0, 3 * page_size, page_size)
    assert (slots // page_size == np.repeat(table, page_size)).all()
    assert (slots % page_size == np.tile(np.arange(page_size), 3)).all()
    tables, rows = np.stack([table, table + 1]), np.array([1, 0], dtype=np.int32)
    positions = np.array([[0, page_size], [2 * page_size, 0]], dtype=np.int32)
    assert (slots_at(tables, rows, positions, page_size) == np.array([[8, 3], [10, 7]]) * page_size).all()


def test_counting_pages_rounds_up_for_room_and_down_for_sharing() -> None:
    assert [pages_for(n, 16) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert [full_pages(n, 16) for n in (0, 15, 16, 31)] == [0, 0, 1, 1]
    assert as_pages(np.arange(7, dtype=np.int32), 3).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_the_allocator_hands_out_every_page_but_the_dummy_once() -> None:
    allocator = PageAllocator(6)
    pages = allocator.allocate(5)
    assert sorted(pages.tolist()) == [1, 2, 3, 4, 5]
    assert allocator.num_free == 0
    allocator.free(pages[:2])
    assert sorted(allocator.allocate(2).tolist()) == sorted(pages[:2].tolist())


def test_freeing_more_pages_than_are_out_is_caught() -> None:
    allocator = PageAllocator(4)
    with pytest.raises(AssertionError, match="1 pages freed"):
        allocator.free(np.array([1], dtype=np.int32))


def page_arithmetic(source: str) -> list[str]:
    """Products, quotients and remainders of a name that ends in `page_size`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.BinOp(left, ast.Mult() | ast.FloorDiv() | ast.Mod() | ast.Div(), right):
                operands = [left, right]
            case ast.AugAssign(target, ast.Mult() | ast.FloorDiv() | ast.Mod() | ast.Div(), value):
                operands = [target, value]
            case ast.Call(ast.Name("divmod"), arguments):
                operands = arguments
            case _:
                continue
        names = [getattr(operand, "attr", getattr(operand, "id", "")) for operand in operands]
        if any(name.endswith("page_size") for name in names):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize(
    "source",
    ["n // page_size", "n % self._page_size", "config.page_size * 2", "n /= page_size", "divmod(n, cache.page_size)"],
)
def test_page_arithmetic_is_found_in_every_form(source: str) -> None:
    assert page_arithmetic(source)


def test_only_pages_py_multiplies_or_divides_by_the_page_size() -> None:
    root = Path(jaxsgl.__file__).parent
    offenders = {
        str(path.relative_to(root)): found
        for path in root.rglob("*.py")
        if path != root / "cache/pages.py" and (found := page_arithmetic(path.read_text()))
    }
    assert not offenders
