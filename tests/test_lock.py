"""The lock file fits pyproject.toml, and the script that writes it finds what doesn't."""

from __future__ import annotations

from make.lock import LOCK, direct_requirements, lines_of, problems_of
from packaging.requirements import Requirement


def test_the_lock_file_has_every_direct_requirement_in_an_allowed_version() -> None:
    assert list(problems_of(LOCK.read_text(), direct_requirements())) == []


def test_missing_and_forbidden_versions_are_found() -> None:
    lock = '# head\nnumpy==2.4.0\njax==0.10.2 ; python_version == "3.11"\njax==0.13.0 ; python_version == "3.12"\n'
    wanted = [Requirement(text) for text in ("numpy>=2.0", "jax>=0.10,<0.13", "flax>=0.12")]
    found = list(problems_of(lock, wanted))
    assert len(found) == 2
    assert found[0].startswith('jax==0.13.0; python_version == "3.12" is not what pyproject.toml allows')
    assert found[1] == "flax is missing: run scripts/make lock"


def test_a_version_that_differs_between_pythons_has_a_line_for_each() -> None:
    found = {11: {"a": "1", "b": "1"}, 12: {"a": "1", "b": "2"}, 13: {"a": "1", "b": "2", "c": "3"}}
    assert list(lines_of(found)) == [
        "a==1",
        'b==1 ; python_version == "3.11"',
        'b==2 ; python_version == "3.12" or python_version == "3.13"',
        'c==3 ; python_version == "3.13"',
    ]
