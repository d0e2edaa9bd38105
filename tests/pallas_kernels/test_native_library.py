"""Where the C++ can't be compiled or run, the reason is given and XLA runs; where it can, it's compiled once.

Compilers here are shell scripts, so that all of it holds on machines that could never run the library.
"""

from __future__ import annotations

import ctypes
import logging
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import BACKENDS, PagedKv, paged_decode_attention, paged_extend_attention
from pallas_kernels.native import attention, library, product
from pallas_kernels.native.grouped_product import refuse_grouped_product
from pallas_kernels.native.product import rows_product
from pallas_kernels.target import processor_flags, processor_maker
from tests.pallas_kernels.test_dispatch import on_an_h100

FLAGS = frozenset({"avx2", "fma"})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for compiled libraries, which doesn't exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(library, "processor_flags", lambda: FLAGS)
    return tmp_path / "cache" / "jaxsgl" / "native"


def write_compiler(tmp_path: Path, compiles: str, version: str = "compiler 1") -> str:
    """A compiler that says its version, else notes that it ran and does what `compiles` says; $1 is its output."""
    path = tmp_path / "compiler"
    path.write_text(
        f'#!/bin/sh\nif [ "$1" = --version ]; then echo "{version}"; exit; fi\n'
        f'echo ran >> "{tmp_path / "runs"}"\nwhile [ $# -gt 1 ]; do shift; done\n{compiles}\n'
    )
    path.chmod(0o700)
    return str(path)


def runs(tmp_path: Path) -> float:
    """The number of libraries that were made: each takes a run for each source, and one that links."""
    return len((tmp_path / "runs").read_text().splitlines()) / (len(library.COMMON.sources) + 1)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_library_is_compiled_once_and_named_after_all_that_it_depends_on(folder: Path, tmp_path: Path) -> None:
    compiler = write_compiler(tmp_path, 'echo library > "$1"')
    first = library._compiled(compiler, FLAGS, library.COMMON)
    assert first == library._compiled(compiler, FLAGS, library.COMMON) and runs(tmp_path) == 1
    assert first.read_text() == "library\n" and names(folder) == [first.name] and first.suffix == ".so"
    other_processor = library._compiled(compiler, FLAGS | {"amx_bf16"}, library.COMMON)
    other_compiler = library._compiled(
        write_compiler(tmp_path, 'echo library > "$1"', "compiler 2"), FLAGS, library.COMMON
    )
    assert len({first, other_processor, other_compiler}) == runs(tmp_path) == 3


def test_a_change_of_any_source_makes_another_library(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = write_compiler(tmp_path, 'echo library > "$1"')
    here = Path(library.__file__).parent
    sources = [path for path in sorted(here.iterdir()) if path.suffix in (".cc", ".h")]
    made = {library._compiled(compiler, FLAGS, library.COMMON)}
    read_text = Path.read_text
    for source in sources:

        def changed(path: Path, *args, source: Path = source, **kwargs) -> str:
            return read_text(path, *args, **kwargs) + "//" * (path == source)

        monkeypatch.setattr(Path, "read_text", changed)
        made.add(library._compiled(compiler, FLAGS, library.COMMON))
    assert len(made) == 1 + len(sources) > 2


def test_a_library_that_is_half_written_is_never_there_under_its_name(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        library._compiled(write_compiler(tmp_path, 'echo half > "$1"; exit 1'), FLAGS, library.COMMON)
    assert names(folder) == []
    (folder / "left.unfinished").write_text("half")  # by a process that was killed
    made = library._compiled(write_compiler(tmp_path, 'echo whole > "$1"'), FLAGS, library.COMMON)
    assert made.read_text() == "whole\n" and names(folder) == sorted([made.name, "left.unfinished"])


def test_of_several_that_start_at_once_one_compiles(folder: Path, tmp_path: Path) -> None:
    compiler = write_compiler(tmp_path, 'echo half > "$1"; sleep 0.3; echo whole > "$1"')
    with ThreadPoolExecutor(4) as pool:
        made = set(pool.map(lambda _: library._compiled(compiler, FLAGS, library.COMMON), range(4)))
    (path,) = made
    assert path.read_text() == "whole\n" and names(folder) == [path.name] and runs(tmp_path) == 1


def test_sources_are_compiled_at_the_same_time(folder: Path, tmp_path: Path) -> None:
    others = " ".join(f'"{tmp_path / Path(source).stem}"' for source in library.COMMON.sources)
    waits = f'for other in {others}; do until [ -e "$other" ]; do sleep 0.01; done; done'
    name = f'"{tmp_path}/$(basename "$1" .o)"'
    made = library._compiled(
        write_compiler(tmp_path, f'case "$1" in *.o) : > {name}; {waits};; esac; echo library > "$1"'),
        FLAGS,
        library.COMMON,
    )
    assert made.read_text() == "library\n", "each waited for all others to have begun"


def test_a_part_is_compiled_when_it_is_first_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[library.Part] = []
    monkeypatch.setattr(library, "_kernels", lambda part: asked.append(part))
    rows: Any = jax.ShapeDtypeStruct((1, 32), jnp.float32)
    scale: Any = jax.ShapeDtypeStruct((16, 1), jnp.float32)

    def weights(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct((*shape, 16, 32), dtype)

    groups: Any = None
    for refuse, part in (
        (lambda: product.refuse(rows, weights(jnp.bfloat16)), library.COMMON),
        (lambda: product.refuse_float(rows, weights(jnp.float32)), library.GROUPED),
        (lambda: product.refuse_int8(rows, weights(jnp.int8), scale, 32), library.INTEGERS),
        (lambda: refuse_grouped_product(rows, groups, weights(jnp.bfloat16, 2)), library.GROUPED),
        (lambda: refuse_grouped_product(rows, groups, weights(jnp.int8, 2)), library.INTEGERS),
    ):
        asked.clear()
        assert (refuse(), set(asked)) == (None, {library.COMMON, part})


def test_without_xdg_the_folder_is_in_the_home(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    made = library._compiled(write_compiler(tmp_path, 'echo library > "$1"'), FLAGS, library.COMMON)
    assert made.parent == tmp_path / "home/.cache/jaxsgl/native"


def test_a_library_that_others_could_have_written_is_not_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = write_compiler(tmp_path, 'echo library > "$1"')
    kept = library._compiled(compiler, FLAGS, library.COMMON)
    loaded: list[tuple[Path, str]] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda path: loaded.append((Path(path), Path(path).read_text())))
    library._library(compiler, FLAGS, library.COMMON)
    (tmp_path / "cache").chmod(0o777)
    library._library(compiler, FLAGS, library.COMMON)
    assert loaded[0] == (kept, "library\n")
    other, text = loaded[1]
    assert other.name == kept.name and other.parent != folder and text == "library\n" and runs(tmp_path) == 2
    assert not other.exists(), "it isn't kept"
    assert "compiled anew" in caplog.text and "can be written by all" in caplog.text


def test_each_lack_of_the_machine_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reason() -> str:
        text = library._kernels.__wrapped__(library.COMMON)
        assert isinstance(text, str)
        return text

    monkeypatch.setenv("PATH", str(tmp_path))
    assert reason() == "there is no C++ compiler (looked for $CXX, c++, g++, clang++)"
    monkeypatch.setenv("CXX", str(tmp_path / "nowhere"))
    assert "nowhere made no library: " in reason() and "No such file" in reason()
    monkeypatch.undo()
    monkeypatch.setattr(library, "processor_flags", lambda: FLAGS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", write_compiler(tmp_path, "echo 'attention.cc:1: not today' >&2; exit 1"))
    assert reason().endswith("made no library: attention.cc:1: not today")
    monkeypatch.setenv("CXX", write_compiler(tmp_path, 'echo "no library at all" > "$1"'))
    assert "made no library: " in reason()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "made no library: " in reason() and "Not a directory" in reason()
    monkeypatch.setattr(library, "processor_flags", lambda: frozenset({"avx2"}))
    assert reason() == "the processor has no fma"


def test_a_compiler_older_than_the_processor_is_named(native_runs_here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "COMPILER_OPTIONS", (*library.COMPILER_OPTIONS, "-mno-avx512f"))
    monkeypatch.setattr(library, "has_pairs", lambda: True)
    assert (
        library._kernels.__wrapped__(library.COMMON)
        == f"{library.compiler()} knows no avx512_bf16, which the processor has"
    )


def test_the_processors_flags_are_linuxs_list(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: avx2 avx512_bf16\n\nprocessor\t: 1\nflags\t\t: avx2\n")
    assert processor_flags(cpuinfo) == {"avx2", "avx512_bf16"}
    cpuinfo.write_text("processor\t: 0\nFeatures\t: asimd\n")
    assert processor_flags(cpuinfo) == processor_flags(tmp_path / "none") == frozenset()


@pytest.mark.parametrize(
    ("maker", "flags", "widened"),
    [
        ("GenuineIntel", FLAGS | {"avx512_bf16"}, True),
        ("AuthenticAMD", FLAGS | {"avx512_bf16"}, False),
        ("", FLAGS | {"avx512_bf16"}, False),
        ("AuthenticAMD", FLAGS, True),
    ],
)
def test_intels_processors_and_those_without_pairs_multiply_as_float32(
    a_library: None, monkeypatch: pytest.MonkeyPatch, maker: str, flags: frozenset[str], widened: bool
) -> None:
    monkeypatch.setattr(library, "processor_maker", lambda: maker)
    monkeypatch.setattr(library, "processor_flags", lambda: flags)
    monkeypatch.setattr(library, "has_pairs", library.has_pairs.__wrapped__)
    monkeypatch.setattr(library, "widens", library.widens.__wrapped__)
    monkeypatch.setattr(library, "refuse_tiles", library.refuse_tiles.__wrapped__)
    jax.clear_caches()  # the way is chosen while tracing
    way = f"('way', '{'widened' if widened else 'paired'}')"
    assert text_of(backend="native").count(way) == 2
    args = jax.ShapeDtypeStruct((4, 64), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.bfloat16)
    assert str(jax.make_jaxpr(rows_product)(*args)).count(way) == 1
    jax.clear_caches()


def test_the_processors_maker_is_linuxs_word(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nvendor_id\t: GenuineIntel\n\nprocessor\t: 1\nvendor_id\t: other\n")
    assert processor_maker(cpuinfo) == "GenuineIntel"
    cpuinfo.write_text("processor\t: 0\nCPU implementer\t: 0x41\n")
    assert processor_maker(cpuinfo) == processor_maker(tmp_path / "none") == ""


def arrays(
    head_dim: int = 64, group: int = 2, q_dtype: str = "float32", cache_dtype: str = "uint16"
) -> tuple[jax.Array, PagedKv]:
    """q and kv of a decode."""
    pages: Any = jax.ShapeDtypeStruct((5, 2, 16, head_dim), cache_dtype)
    table: Any = jax.ShapeDtypeStruct((3, 2), jnp.int32)
    lengths: Any = jax.ShapeDtypeStruct((3,), jnp.int32)
    q: Any = jax.ShapeDtypeStruct((3, 2 * group, head_dim), q_dtype)
    return q, PagedKv(pages, pages, table, lengths)


@pytest.fixture
def a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this machine look as if it had a library."""
    monkeypatch.setattr(library, "load", lambda: None)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (arrays(q_dtype="bfloat16"), "not bfloat16 and uint16"),
        (arrays(cache_dtype="float32"), "not float32 and float32"),
        (arrays(cache_dtype="bfloat16"), "not float32 and bfloat16"),
        (arrays(head_dim=80), "the head size is 80; it takes multiples of 32 up to 512"),
        (arrays(head_dim=544), "the head size is 544"),
        (arrays(group=129), "129 query heads share a kv head; it takes 128 at most"),
    ],
)
def test_shapes_that_the_native_kernels_do_not_take_are_named(a_library: None, args: tuple, reason: str) -> None:
    assert reason in (attention.refuse_attention(*args) or "")
    with pytest.raises(ValueError, match=f"backend 'native' is impossible here: .*{reason}"):
        jax.eval_shape(lambda *a: paged_decode_attention(*a, backend="native"), *args)
    jax.eval_shape(paged_decode_attention, *args)  # "auto" takes another


def test_a_gpu_is_refused_by_name(a_library: None) -> None:
    with on_an_h100(), pytest.raises(ValueError, match="it needs a cpu, this is a gpu; choose"):
        jax.eval_shape(lambda *a: paged_decode_attention(*a, backend="native"), *arrays())


def text_of(**options: Any) -> str:
    """The traced calls of both ops."""
    q, kv = arrays()
    offsets = jax.ShapeDtypeStruct((4,), jnp.int32)
    decode = jax.make_jaxpr(lambda *a: paged_decode_attention(*a, **options))(q, kv)
    extend = jax.make_jaxpr(lambda *a: paged_extend_attention(*a, **options))(q, offsets, kv)
    return f"{decode}\n{extend}"


def test_auto_takes_the_native_kernels_first_on_a_cpu(a_library: None) -> None:
    assert "native" in BACKENDS
    assert text_of().count(library.PAGED_ATTENTION) == text_of(backend="native").count(library.PAGED_ATTENTION) == 2


def test_without_a_compiler_xla_runs_and_the_log_says_why_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", write_compiler(tmp_path, "echo 'no space left in this test' >&2; exit 1"))
    monkeypatch.setattr(library, "_kernels", library._kernels.__wrapped__)
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        for _ in range(2):
            assert library.PAGED_ATTENTION not in text_of()
    because = f"not using native: {tmp_path / 'compiler'} made no library: no space left in this test"
    assert [r.message for r in caplog.records] == [
        f"paged_decode_attention: {because}",
        f"paged_extend_attention: {because}",
    ]
    with pytest.raises(ValueError, match="no space left in this test"):
        text_of(backend="native")
