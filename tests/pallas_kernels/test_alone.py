"""pallas_kernels runs where there are JAX, NumPy and what these two need, and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What JAX requires; absl-py is for Mosaic GPU of JAX 0.10.
ALLOWED = ("jax", "jaxlib", "numpy", "ml_dtypes", "opt_einsum", "scipy", "absl", "pallas_kernels")
GUARD = f"""
import sys
class Guarded:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        seen = top in {ALLOWED!r} or top in sys.stdlib_module_names or top.startswith(("_", "jax_"))
        return self.finder.find_spec(name, path, target) if seen else None
sys.meta_path[:] = map(Guarded, sys.meta_path)
"""


def test_the_example_of_the_documentation_runs_with_jax_and_numpy_alone() -> None:
    page = (ROOT / "docs" / "kernels.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```", page.partition("## Layout")[0], re.DOTALL | re.MULTILINE)
    command = [sys.executable, "-c", GUARD + example]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(2, 4, 64)\n"
