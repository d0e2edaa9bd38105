"""Compiled code is loaded only from a folder that no other user can write to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pallas_kernels.own_folder import own_folder


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_missing_folder_is_made_for_its_user_alone(tmp_path: Path) -> None:
    assert mode(own_folder(tmp_path / "a" / "b")) == 0o700
    (tmp_path / "a" / "b" / "file").touch()
    assert own_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b"


@pytest.mark.parametrize("rights", [0o777, 0o775, 0o720])
def test_the_rights_of_others_are_taken_away_or_refused(tmp_path: Path, rights: int) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(rights)
    with pytest.raises(PermissionError, match="can be written by other users"):
        own_folder(folder, tighten=False)
    assert mode(folder) == rights
    assert mode(own_folder(folder)) == 0o700
    folder.chmod(0o755)
    assert mode(own_folder(folder, tighten=False)) == 0o755, "reading is no harm"


def test_what_belongs_to_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = own_folder(tmp_path / "folder")
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(PermissionError, match=f"folder belongs to user {me}, and this process runs as user {me + 1}"):
        own_folder(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused_by_name(tmp_path: Path) -> None:
    folder = own_folder(tmp_path / "folder")
    (folder / "kernels.so").touch()
    os.chown(folder / "kernels.so", 12345, 12345)
    with pytest.raises(PermissionError, match=r"kernels\.so belongs to user 12345"):
        own_folder(folder)


def test_a_folder_that_anyone_can_replace_is_refused(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(PermissionError, match="open can be written by all"):
        own_folder(open_to_all / "folder")
    open_to_all.chmod(0o1777)  # as /tmp: only its owner can replace what is in it
    own_folder(open_to_all / "folder")
