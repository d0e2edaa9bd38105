"""Which package may import which. The layout shows the data flow only while the imports follow it."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest
from bench.imports import circles, import_graph, parsed

ROOT = Path(__file__).parent.parent
CONFIG = ("engine", "features", "flags", "hosts", "kernels")
COMMON = {
    "requests",
    "errors",
    "json_file",
    "logs",
    "mask_mark",
    "parent",
    "shared_secret",
    "sandbox",
    "stacks",
    *(f"config.{name}" for name in CONFIG),
}
ALLOWED = {
    "config": set(),
    "text": {"messages", "preprocess.sources"},
    "frontend": {
        "config.server",
        "messages",
        "ipc",
        "text",
        "preprocess",
    },
    "scheduler": {
        "cache",
        "batch",
        "messages",
        "transfer.frames",
        "transfer.wire",
    },
    "preprocess": set(),
    "transfer": set(),
    "hosts": {"batch", "messages"},
    "constraints": set(),
    "cache": set(),
    "batch": {"cache.pages"},
    "engine": {"batch", "models", "weights", "messages", "cache.pages", "hosts.group", "pallas_kernels"},
    "models": {"pallas_kernels"},
    "weights": {"models", "pallas_kernels"},
}
THIRD_PARTY_FREE_OF_JAX = (
    "constraints",
    "scheduler",
    "transfer",
    "hosts",
    "cache",
    "batch",
    "text",
    "preprocess",
    "frontend",
)


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Modules that a file imports, TYPE_CHECKING blocks and functions included."""
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_the_data_flow_allows(package: str) -> None:
    allowed = ALLOWED[package] | COMMON | {package}
    for path in (ROOT / "jaxsgl" / package).rglob("*.py"):
        for name in imports_of(path):
            if name.startswith("jaxsgl."):
                name = name.removeprefix("jaxsgl.")
            elif not name.startswith("pallas_kernels"):
                continue
            ok = any(name == prefix or name.startswith(prefix + ".") for prefix in allowed)
            assert ok, f"{path.relative_to(ROOT)} imports {name}; {package} may import {sorted(allowed)}"


def test_no_module_imports_itself_through_others() -> None:
    """Also under TYPE_CHECKING."""
    assert not circles(import_graph(ROOT))


def test_pallas_kernels_stand_alone() -> None:
    for path in (ROOT / "pallas_kernels").rglob("*.py"):
        assert not any(name.split(".")[0] == "jaxsgl" for name in imports_of(path)), path


def test_one_file_uses_what_jax_keeps_to_itself() -> None:
    paths = [path for package in ("jaxsgl", "pallas_kernels") for path in (ROOT / package).rglob("*.py")]
    assert [path.name for path in paths if "jax._src" in path.read_text()] == ["jax_internals.py"]


@pytest.mark.parametrize("package", THIRD_PARTY_FREE_OF_JAX)
def test_no_file_names_jax_where_no_device_is_known(package: str) -> None:
    for path in (ROOT / "jaxsgl" / package).rglob("*.py"):
        assert not {name.split(".")[0] for name in imports_of(path)} & {"jax", "jaxlib", "flax"}, path


def test_only_the_switch_for_tests_loads_the_fakes() -> None:
    users = [path.name for path in (ROOT / "jaxsgl").rglob("*.py") if "jaxsgl.testing.engine" in imports_of(path)]
    assert users == ["wiring.py"]
    wiring = ast.parse((ROOT / "jaxsgl" / "wiring.py").read_text())
    assert not any(
        isinstance(node, ast.ImportFrom) and node.module == "jaxsgl.testing.engine" for node in wiring.body
    ), "imported at every start"


def test_scheduler_and_cache_work_in_a_process_without_jax() -> None:
    program = """
import sys
sys.modules["jax"] = sys.modules["jaxlib"] = sys.modules["flax"] = None  # importing them raises
from tests.scheduler.serving import capacity, expected, request, serve
mailbox, _ = serve(capacity(), [[request("a", range(30), 5)]])
assert mailbox.output_ids("a") == expected(range(30), 5)
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_only_prefill_and_decode_servers_load_what_moves_pages_between_servers() -> None:
    packages = ("jaxsgl.transfer", "jaxsgl.scheduler.disagg")
    users = {
        path.relative_to(ROOT / "jaxsgl").as_posix()
        for path in (ROOT / "jaxsgl").rglob("*.py")
        if any(name.startswith(packages) for name in imports_of(path))
    }
    outside = {user for user in users if not user.startswith(("transfer/", "scheduler/disagg/"))}
    assert outside == {"wiring.py"}
    wiring = ast.parse((ROOT / "jaxsgl" / "wiring.py").read_text())
    at_every_start = [str(node.module) for node in wiring.body if isinstance(node, ast.ImportFrom)]
    assert not [name for name in at_every_start if name.startswith(packages)]


def test_servers_of_text_load_no_decoder_of_pictures() -> None:
    program = """
import sys
sys.modules["PIL"] = None  # importing it raises
import jaxsgl.frontend.server, jaxsgl.frontend.http.app, jaxsgl.frontend.grpc.server, jaxsgl.offline.media
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
