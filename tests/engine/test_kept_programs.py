"""Programs that are kept between starts: found under the same name only, and compiled anew where anything is wrong."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxsgl.engine.engine import Engine
from jaxsgl.engine.programs import Program, ProgramKey, ProgramSet
from jaxsgl.engine.start import kept
from jaxsgl.engine.start.kept import KeptPrograms, NothingKept, kept_programs
from jaxsgl.engine.start.naming import Namer, Unnamed
from jaxsgl.weights.sharding import make_mesh, replicated
from pallas_kernels.native import library
from tests.engine.conftest import ConfigMaker
from tests.engine.driving import Driver, greedy_programs

MESH = make_mesh(jax.devices()[:1])
KEY = ProgramKey("times", 4)


@pytest.fixture(autouse=True)
def no_cache_of_jax(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a user's environment, which names none."""
    monkeypatch.delenv(kept.JAX_CACHE_VARIABLE, raising=False)
    before: str | None = jax.config.values["jax_compilation_cache_dir"]
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def program(factor: Any = 3.0, length: int = 4, donated: tuple[int, ...] = ()) -> Program:
    """Sorts, as what JAX loads from its own cache can't be written down then."""

    def times(x: jax.Array) -> jax.Array:
        return jnp.sort(x) * factor

    shape = jax.ShapeDtypeStruct((length,), jnp.float32, sharding=replicated(MESH))
    return Program(KEY, times, (shape,), replicated(MESH), donated, MESH)


def started(folder: Path, made: Program, fixed: bool = False) -> ProgramSet:
    programs = ProgramSet(kept=kept_programs(folder), in_fixed_order=fixed)
    programs.add([made])
    assert programs[made.key](np.array([2, 1, 4, 3], np.float32)).tolist() == [3, 6, 9, 12]
    return programs


def files_in(folder: Path) -> list[Path]:
    return [path for path in (folder / kept.FOLDER).rglob("*") if path.is_file()]


def test_a_second_start_of_an_engine_traces_no_program(
    tmp_path: Path, tiny_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy_programs(monkeypatch)
    config = tiny_config(compilation_cache_dir=str(tmp_path / "xla"), grammar_backend="none")
    engine = Engine(config, progress=False)
    expected = Driver(engine).generate({0: [5, 7, 9]}, 6)
    count = len(engine.compiled)
    assert engine.compiled.num_compiled == count
    engine.close()
    assert len(files_in(tmp_path / "xla")) == count

    def fail(self: Program, **_: Any) -> Any:
        raise AssertionError(f"{self.key} is traced")

    monkeypatch.setattr(Program, "trace", fail)
    engine = Engine(config, progress=False)
    assert engine.compiled.num_compiled == 0 and len(engine.compiled) == count
    assert Driver(engine).generate({0: [5, 7, 9]}, 6) == expected
    assert engine.recompiles == 0
    engine.close()


def test_what_a_program_is_made_from_names_it(tmp_path: Path) -> None:
    assert started(tmp_path, program()).num_compiled == 1
    assert started(tmp_path, program()).num_compiled == 0
    assert started(tmp_path, program(), fixed=True).num_compiled == 1
    namer = Namer()
    others = [program(), program(2.0), program(3), program(length=5), program(donated=(0,)), program(np.float32(3))]
    assert len({namer.digest(each.made_from) for each in others}) == len(others)


@pytest.mark.parametrize("change", [lambda whole: whole[:-9], lambda whole: b"", lambda whole: whole[:40] + b"x" * 99])
def test_a_damaged_file_is_compiled_anew_and_replaced(
    tmp_path: Path, change: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    started(tmp_path, program())
    (file,) = files_in(tmp_path)
    file.write_bytes(change(file.read_bytes()))
    assert started(tmp_path, program()).num_compiled == 1
    assert f"{file} is damaged: its program is compiled anew" in caplog.text
    assert started(tmp_path, program()).num_compiled == 0


def test_a_file_that_holds_something_else_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    started(tmp_path, program())
    (file,) = files_in(tmp_path)
    file.write_bytes(hashlib.blake2b(b"no program", digest_size=32).digest() + b"no program")
    assert started(tmp_path, program()).num_compiled == 1
    assert "can't be loaded" in caplog.text
    assert started(tmp_path, program()).num_compiled == 0


def test_other_libraries_than_a_program_was_compiled_with_have_it_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(tmp_path, program())
    monkeypatch.setattr(library, "loaded", lambda names=None: {"common": False})
    assert started(tmp_path, program()).num_compiled == 1


def test_settings_sources_and_libraries_have_folders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [kept._surroundings()]
    with monkeypatch.context() as changed:
        changed.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
        found.append(kept._surroundings())
    with monkeypatch.context() as changed:
        changed.setattr(kept, "_sources", lambda: "edited")
        found.append(kept._surroundings())
    with monkeypatch.context() as changed:
        changed.setattr(kept, "_processor", lambda: ["flags: avx2"])
        found.append(kept._surroundings())
    with monkeypatch.context() as changed:
        changed.setattr(library, "load", lambda: "there is no compiler")
        found.append(kept._surroundings())
    with jax.default_matmul_precision("float32"):
        found.append(kept._surroundings())
    assert len(set(found)) == len(found)
    monkeypatch.setenv("JAXSGL_API_KEY", "secret")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    assert kept._surroundings() == found[0]


def test_an_edit_of_a_source_changes_their_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "__file__", str(tmp_path / "jaxsgl" / "engine" / "start" / "kept.py"))
    (tmp_path / "jaxsgl").mkdir()
    source = tmp_path / "jaxsgl" / "step.py"
    source.write_text("x = 1")
    before = kept._sources()
    source.write_text("x = 2")
    assert kept._sources() != before


class _Point(NamedTuple):
    x: int


VALUES: tuple[Any, ...] = (
    {"a": 1, "b": (2.0, None)}, frozenset("abc"), jnp.float32, jax.nn.silu, _Point(3), make_mesh, jnp.dtype("bfloat16"),
    jax.tree.structure({"a": [1, _Point(2)]}), replicated(MESH), program().function,
)  # fmt: skip


def test_names_are_the_same_in_another_process() -> None:
    here = [Namer().digest(value).hex() for value in VALUES]
    code = (
        "from tests.engine import test_kept_programs as t; print(*(t.Namer().digest(each).hex() for each in t.VALUES))"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    there = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert there.split() == here and len(set(here)) == len(here)


def test_a_program_of_unknown_values_is_compiled_but_not_kept(tmp_path: Path) -> None:
    with pytest.raises(Unnamed):
        Namer().digest(object())

    class Three:
        def __rmul__(self, x: jax.Array) -> jax.Array:
            return x * 3.0

        __jax_array__ = None

    def times(x: jax.Array, three: Any = Three()) -> jax.Array:
        return three.__rmul__(jnp.sort(x))

    made = program()
    made = Program(KEY, times, made.arguments, made.shardings, (), MESH)
    assert started(tmp_path, made).num_compiled == 1
    assert started(tmp_path, made).num_compiled == 1
    assert not files_in(tmp_path)


def test_nothing_is_kept_where_others_can_write(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert type(kept_programs(None)) is NothingKept
    assert isinstance(kept_programs(tmp_path / "own"), KeptPrograms)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert type(kept_programs(tmp_path / "open")) is NothingKept
    assert "programs are not kept between starts" in caplog.text


def test_a_cache_of_jax_that_the_environment_names_or_turns_off_is_heeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as changed:
        changed.setenv(kept.JAX_CACHE_VARIABLE, str(tmp_path))
        assert type(kept_programs(tmp_path)) is NothingKept
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert type(kept_programs(tmp_path)) is NothingKept
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert isinstance(kept_programs(tmp_path), KeptPrograms)


def test_folders_that_no_start_has_used_for_long_go(tmp_path: Path) -> None:
    started(tmp_path, program())
    (used,) = (tmp_path / kept.FOLDER).iterdir()
    for name, age_s in (("old", kept.UNUSED_S + 9), ("new", 9)):
        (tmp_path / kept.FOLDER / name).mkdir()
        os.utime(tmp_path / kept.FOLDER / name, times=(time.time() - age_s,) * 2)
    kept_programs(tmp_path)
    assert (tmp_path / kept.FOLDER / "old").exists()  # this start's folder was there
    used.rename(tmp_path / "elsewhere")
    kept_programs(tmp_path)
    assert not (tmp_path / kept.FOLDER / "old").exists() and (tmp_path / kept.FOLDER / "new").exists()
