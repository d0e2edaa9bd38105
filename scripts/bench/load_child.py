"""Large random checkpoints, and one load of them in a process of its own: seconds, CPU time, the most memory resident.

`bench loading` writes the checkpoint and starts `python -m bench.load_child KIND FOLDER` for each load.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from bench.models import SHAPES, tensor_shapes
from bench.output import write_json

FILE_BYTES = 2 << 30  # of one safetensors file, roughly
BLOCK_BYTES = 4 << 20


def write_random(folder: Path, shape: str, num_layers: int) -> int:
    """Writes a bfloat16 checkpoint of `shape` with that many layers; returns the bytes of its tensors.

    Numbers repeat after 32 MiB: what is measured moves them and looks at none. Needs little memory.
    """
    config = {**SHAPES[shape], "num_hidden_layers": num_layers}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    values = np.random.default_rng(0).standard_normal(16 << 20, np.float32) * 0.02
    block = memoryview(values.astype(ml_dtypes.bfloat16).tobytes())
    weight_map: dict[str, str] = {}
    for index, shapes in enumerate(_files(tensor_shapes(config))):
        path = folder / f"model-{index:05d}.safetensors"
        weight_map |= dict.fromkeys(shapes, path.name)
        _write_file(path, shapes, block)
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    return sum(2 * math.prod(dims) for dims in tensor_shapes(config).values())


def _files(shapes: dict[str, tuple[int, ...]]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Tensors by file, in their order."""
    file: dict[str, tuple[int, ...]] = {}
    for name, dims in shapes.items():
        file[name] = dims
        if sum(2 * math.prod(each) for each in file.values()) >= FILE_BYTES:
            yield file
            file = {}
    if file:
        yield file


def _write_file(path: Path, shapes: dict[str, tuple[int, ...]], block: memoryview) -> None:
    header, end = {}, 0
    for name, dims in shapes.items():
        first, end = end, end + 2 * math.prod(dims)
        header[name] = {"dtype": "BF16", "shape": dims, "data_offsets": [first, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for first in range(0, end, len(block)):
            file.write(block[: min(len(block), end - first)])
        file.flush()
        os.fsync(file.fileno())  # pages that are not on the disk yet can't be evicted


def evict(folder: Path) -> None:
    """Removes the folder's files from the system's cache, so that they are read from the disk."""
    for path in _all_files(folder):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_plainly(folder: Path, num_threads: int = 8) -> int:
    """Reads all files by several threads, in blocks that are overwritten; returns the number of bytes."""
    local = threading.local()

    def read(path: Path, first: int) -> int:
        if not hasattr(local, "block"):
            local.block = memoryview(bytearray(BLOCK_BYTES))
        with path.open("rb", buffering=0) as file:
            return os.preadv(file.fileno(), [local.block], first)

    blocks = [(path, first) for path in _all_files(folder) for first in range(0, path.stat().st_size, BLOCK_BYTES)]
    with ThreadPoolExecutor(num_threads) as pool:
        return sum(pool.map(read, *zip(*blocks, strict=True)))


def _all_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def resident_bytes(which: str) -> int:
    """VmRSS (now) or VmHWM (the most so far) of this process, mapped files included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))


def measure(kind: str, folder: Path) -> dict[str, Any]:
    """Reads `folder` "plain"ly, or loads its parameters, and tells what that took."""
    if kind != "plain":
        import jax

        from jaxsgl.models import arch_from_folder
        from jaxsgl.weights import load_params
        from jaxsgl.weights.sharding import make_mesh

        arch, mesh = arch_from_folder(folder), make_mesh()
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the most resident from here on
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    if kind == "plain":
        num_bytes = read_plainly(folder)
    else:
        params = jax.block_until_ready(load_params(folder, arch, jax.numpy.dtype("bfloat16"), mesh))
        num_bytes = sum(array.nbytes for array in jax.tree.leaves(params))
    return {
        "bytes": num_bytes,
        "seconds": time.monotonic() - start_s,
        "cpu_seconds": time.process_time() - start_cpu_s,
        "resident_before": before,
        "resident_most": resident_bytes("VmHWM"),
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]))))
