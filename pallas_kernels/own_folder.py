"""Folders of compiled code, which runs in this process as it is: only this user may be able to write there.

Knows no compiler. native/library.py keeps its libraries in such a folder, and jaxsgl's engine XLA's programs.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

PRIVATE = 0o700


def own_folder(path: Path, tighten: bool = True) -> Path:
    """Return `path`, a folder that is made if it is missing and that no other user can write to.

    Args:
        path: of the folder.
        tighten: take the rights of others on a folder of this user's away; otherwise a folder with such is refused.

    Raises:
        PermissionError: other users can change what is in the folder, or own some of it. The message says which.
        OSError: it can't be made.
    """
    path.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    me, status = os.geteuid(), path.stat()
    if status.st_uid != me:
        raise PermissionError(f"{path} belongs to user {status.st_uid}, and this process runs as user {me}")
    if _others_may_write(status):
        if not tighten:
            raise PermissionError(f"{path} can be written by other users (chmod go-w would change that)")
        path.chmod(PRIVATE)
    for parent in path.resolve().parents:
        if parent.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
            raise PermissionError(f"every user can replace {path}, since {parent} can be written by all")
    with os.scandir(path) as entries:
        for entry in entries:
            owner = _owner(entry)
            if owner not in (me, None):
                raise PermissionError(f"{entry.path} belongs to user {owner}, and this process runs as user {me}")
    return path


def _owner(entry: os.DirEntry[str]) -> int | None:
    """The user who owns a file; None if another process has moved it meanwhile."""
    try:
        return entry.stat(follow_symlinks=False).st_uid
    except FileNotFoundError:
        return None


def _others_may_write(status: os.stat_result) -> bool:
    return bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
