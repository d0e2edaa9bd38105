from __future__ import annotations

import pytest

from jaxsgl.config.engine import EngineConfig
from jaxsgl.errors import ConfigError
from jaxsgl.wiring import RETRACT_VARIABLE, build, retract_every

pytestmark = pytest.mark.device


@pytest.mark.parametrize(("text", "steps"), [(None, None), ("", None), ("1", 1), ("250", 250)])
def test_the_test_switch_names_a_number_of_steps(
    monkeypatch: pytest.MonkeyPatch, text: str | None, steps: int | None
) -> None:
    monkeypatch.delenv(RETRACT_VARIABLE, raising=False)
    if text is not None:
        monkeypatch.setenv(RETRACT_VARIABLE, text)
    assert retract_every() == steps


@pytest.mark.parametrize("text", ["0", "-1", "x", "1.5", "٣", " 3"])
def test_a_bad_test_switch_fails_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(RETRACT_VARIABLE, text)
    with pytest.raises(ConfigError, match=f"{RETRACT_VARIABLE} is .* but must be a number of steps"):
        build(EngineConfig(model="/nowhere"))
