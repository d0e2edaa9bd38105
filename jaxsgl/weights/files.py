"""Which files hold a model's weights, and how they are told from others without reading them.

Files may be replaced while a server starts or runs. So an engine notes them before it reads any (`opening.py`), and
wiring.py names what they have computed by that note.
"""

from __future__ import annotations

from pathlib import Path

from jaxsgl.weights.converted import PARAMS


def weight_files(folder: Path) -> list[Path]:
    """Those in safetensors, then those in GGUF, then those of a converted checkpoint; each in the order of names."""
    found = (folder.glob("*.safetensors"), folder.glob("*.gguf"), (folder / PARAMS).rglob("*"))
    return [path for paths in found for path in sorted(paths) if path.is_file()]


def note_of_files(folder: Path, draft_folder: Path | None = None) -> str:
    """What `folder` holds now: the text of config.json, and each file of weights by name, size and time of change.

    `draft_folder` holds the weights that draft, if they are others.
    """
    parts = [(folder / "config.json").read_text(encoding="utf-8", errors="replace")]
    for each in (folder,) if draft_folder is None else (folder, draft_folder):
        for file in weight_files(each):
            status = file.stat()
            parts.append(f"{file.relative_to(each)} {status.st_size} {status.st_mtime_ns}")
    return "\0".join(parts)
