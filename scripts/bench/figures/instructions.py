"""Nanoseconds of the processor's multiplying instructions, which bound the products of pallas_kernels' C++.

    python scripts/bench instructions

A loop of each instruction that the processor has, compiled by the kernels' compiler with their options, on one core:
"ns" with a dozen sums that don't wait for each other, "in a row" with one sum. Instructions take turns, the time is the
thread's processor time, and the least of the repeats counts; on a busy machine the clock rate may be lower than alone,
so compare within a run. An instruction multiplies as many numbers as a register holds: float32 (vfmadd231ps), bfloat16
(vdpbf16ps), words (vpdpwssd) or bytes (vpdpbusd).
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.output import figure_parser, write_figures
from pallas_kernels.native.library import COMPILER_OPTIONS, compiler

SOURCE = Path(__file__).parents[1] / "instructions.cc"
NUMBER_BYTES = {"vfmadd231ps": 4, "vdpbf16ps": 2, "vpdpwssd": 2, "vpdpbusd": 1}
CHAINS = 12  # instructions of a round, as in the source
ROUNDS = 1_000_000
HEAD = f"{'instruction':<14}{'ns':>8}{'in a row':>10}{'products/ns':>13}{'of float32':>12}"


def main(arguments: list[str]) -> None:
    """Measures and prints. Fails without a C++ compiler."""
    parser = figure_parser(__doc__, __name__)
    parser.add_argument("--repeats", type=int, default=20, help="of each, the least counts (default 20)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-instructions-") as folder:
        rows = measure(compiled(Path(folder)), options.repeats)
    print("\n".join([HEAD, *map(line, rows)]))
    write_figures(options.json, rows=rows)


def compiled(folder: Path) -> ctypes.CDLL:
    """The loops, compiled into `folder`."""
    command, path = compiler(), folder / "instructions.so"
    if command is None:
        raise SystemExit("there is no C++ compiler: set $CXX")
    subprocess.run([command, *COMPILER_OPTIONS, "-shared", SOURCE, "-o", path], check=True)
    return ctypes.CDLL(str(path))


def measure(library: ctypes.CDLL, repeats: int) -> list[dict[str, Any]]:
    """Times all instructions that `library` has, in turns."""
    calls: dict[str, Callable[[int], float]] = {}
    for name in NUMBER_BYTES:
        for suffix in ("", "_in_a_row"):
            if hasattr(library, name + suffix):
                call = getattr(library, name + suffix)
                call.restype, call.argtypes = ctypes.c_double, [ctypes.c_long]
                calls[name + suffix] = call
    rounds = [{name: call(ROUNDS) for name, call in calls.items()} for _ in range(repeats)]
    ns = {name: 1e9 * min(took_s[name] for took_s in rounds) / (ROUNDS * CHAINS) for name in calls}
    names = [name for name in NUMBER_BYTES if name in ns]
    return figures(ns, names, library.register_bytes())


def figures(ns: dict[str, float], names: list[str], register_bytes: int) -> list[dict[str, Any]]:
    """Products a nanosecond of each of `names`, and how many times float32's that is."""
    rate = {name: register_bytes // NUMBER_BYTES[name] / ns[name] for name in names}
    return [
        {
            "instruction": name,
            "ns": ns[name],
            "ns_in_a_row": ns[f"{name}_in_a_row"],
            "products_per_ns": rate[name],
            "of_float32": rate[name] / rate["vfmadd231ps"],
        }
        for name in names
    ]


def line(row: dict[str, Any]) -> str:
    """A row as text, as wide as the head."""
    return (
        f"{row['instruction']:<14}{row['ns']:>8.3f}{row['ns_in_a_row']:>10.3f}"
        f"{row['products_per_ns']:>13.0f}{row['of_float32']:>12.2f}"
    )
