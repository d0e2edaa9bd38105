from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxsgl.engine.start import warmup
from jaxsgl.engine.start.warmup import CompileCounter, compile_all, use_compilation_cache
from jaxsgl.errors import ConfigError


@pytest.fixture
def events() -> Iterator[list[str]]:
    """JAX's events while the test runs."""
    seen: list[str] = []

    def listen(event: str, **_: object) -> None:
        seen.append(event)

    jax.monitoring.register_event_listener(listen)
    yield seen
    jax.monitoring.unregister_event_listener(listen)


@pytest.fixture
def restored_cache_settings() -> Iterator[None]:
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)  # the tests have one in their environment
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def lowering(factor: int):
    return lambda: jax.jit(lambda x: jnp.sin(x) * factor).lower(jax.ShapeDtypeStruct((4,), jnp.float32))


def test_every_program_is_compiled_under_its_key() -> None:
    programs = compile_all({factor: lowering(factor) for factor in (2, 3, 5)}, progress=False)
    x = jnp.full(4, jnp.pi / 2)
    assert {factor: float(made.compiled(x)[0]) for factor, made in programs.items()} == {2: 2.0, 3: 3.0, 5: 5.0}
    assert all(made.lower_s > 0 and made.compile_s > 0 for made in programs.values())


def test_a_progress_bar_counts_programs_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    compile_all({1: lowering(7), 2: lowering(8)}, progress=True)
    assert "2/2" in capsys.readouterr().err


def test_without_bars_the_log_gets_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("TQDM_DISABLE", "1")
    compile_all({1: lowering(7), 2: lowering(8)}, progress=True)
    assert caplog.messages == []
    monkeypatch.setattr(warmup, "REPORT_S", 0)
    compile_all({1: lowering(7), 2: lowering(8)}, progress=True)
    assert caplog.messages == ["compiling: 1 of 2 programs", "compiling: 2 of 2 programs"]
    assert capsys.readouterr().err == ""


def test_a_program_that_cannot_be_lowered_ends_warm_up_with_its_error() -> None:
    def fail() -> jax.stages.Lowered:
        raise ValueError("no such shape")

    with pytest.raises(ValueError, match="no such shape"):
        compile_all({1: lowering(2), 2: fail}, progress=False)


def test_a_second_start_takes_programs_from_the_cache(
    tmp_path: Path, events: list[str], restored_cache_settings: None
) -> None:
    jax.jit(lambda x: x + 41)(1.0)  # something was compiled before the cache was asked for
    use_compilation_cache(str(tmp_path / "xla"))
    for hits in (0, 1):
        events.clear()
        compile_all({1: lowering(17)}, progress=False)
        assert events.count("/jax/compilation_cache/cache_hits") == hits
    assert any((tmp_path / "xla").iterdir())


def test_programs_of_another_compiler_are_not_taken_from_the_cache(
    tmp_path: Path, events: list[str], restored_cache_settings: None
) -> None:
    """JAX's key of a program doesn't have the version of ptxas."""
    for compilers, hits in (("ptxas-13.0.88", 0), ("ptxas-13.5.37", 0), ("ptxas-13.0.88", 1)):
        use_compilation_cache(str(tmp_path / "xla"), compilers)
        events.clear()
        compile_all({1: lowering(37)}, progress=False)
        assert events.count("/jax/compilation_cache/cache_hits") == hits
    assert {path.name for path in (tmp_path / "xla").iterdir()} == {"ptxas-13.0.88", "ptxas-13.5.37"}


def test_a_directory_that_others_can_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, restored_cache_settings: None
) -> None:
    """By default none is used then; a named one fails the start."""
    settings: Any = jax.config
    before = settings.jax_compilation_cache_dir
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match=r"--compilation-cache-dir .*open: .* can be written by other users"):
        use_compilation_cache(str(tmp_path / "open"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "open"))
    use_compilation_cache(None)
    assert "not kept between starts" in caplog.text
    assert settings.jax_compilation_cache_dir == before


def test_an_empty_directory_name_means_no_cache(events: list[str], restored_cache_settings: None) -> None:
    use_compilation_cache("")
    compile_all({1: lowering(19)}, progress=False)
    assert "/jax/compilation_cache/cache_misses" not in events


def test_compilations_are_counted_from_any_thread_until_closed() -> None:
    counter = CompileCounter()
    thread = threading.Thread(target=lambda: lowering(23)().compile())
    thread.start()
    thread.join()
    counted = counter.count
    counter.close()
    lowering(29)().compile()
    assert counted == counter.count == 1


def test_programs_that_the_tests_keep_are_found_in_the_next_run_whose_folder_has_another_name(
    tmp_path: Path, events: list[str], restored_cache_settings: None
) -> None:
    use_compilation_cache(str(tmp_path / "first"))
    compile_all({1: lowering(31)}, progress=False)
    (tmp_path / "first").rename(tmp_path / "second")
    use_compilation_cache(str(tmp_path / "second"))
    events.clear()
    compile_all({1: lowering(31)}, progress=False)
    assert events.count("/jax/compilation_cache/cache_hits") == 1
