"""Rates of instructions follow from their times."""

from __future__ import annotations

from bench.figures.instructions import HEAD, figures, line


def test_rates_follow_from_times_and_the_numbers_in_a_register() -> None:
    ns = {"vfmadd231ps": 0.25, "vfmadd231ps_in_a_row": 1.0, "vpdpbusd": 0.5, "vpdpbusd_in_a_row": 1.5}
    wide, narrow = figures(ns, ["vfmadd231ps", "vpdpbusd"], register_bytes=64)
    assert (wide["products_per_ns"], wide["of_float32"]) == (64, 1)
    assert (narrow["products_per_ns"], narrow["of_float32"]) == (128, 2)
    assert line(narrow).split() == ["vpdpbusd", "0.500", "1.500", "128", "2.00"]
    assert len(line(narrow)) == len(HEAD)
