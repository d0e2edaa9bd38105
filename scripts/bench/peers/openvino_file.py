"""Writes a checkpoint in Hugging Face's layout as OpenVINO's, by Optimum Intel and NNCF, as its users do."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import nncf
import openvino
from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig

MODEL = "openvino_model.xml"
WHOLE = "float16"
# Optimum's own defaults: int8 with a zero point for each output; int4 of the layers, embedding and head in int8.
COMPRESSED = {
    "int8": {"mode": nncf.CompressWeightsMode.INT8_ASYM},
    "int4": {"mode": nncf.CompressWeightsMode.INT4_ASYM, "ratio": 1.0, "group_size": 64},
}


def write_openvino(model: Path, folder: Path, weights: str) -> Path:
    """Writes the folder `model` with `weights` of float16, int8 or int4; returns the folder, in `folder`.

    It is written once: contenders that share `folder` find what an earlier one made of a model with the same bytes.
    """
    path = folder / f"openvino-{weights}-{_digest(model)}"
    if path.exists():
        return path
    partial = Path(tempfile.mkdtemp(prefix=path.name, dir=folder))
    if weights == WHOLE:
        main_export(
            model_name_or_path=str(model),
            output=partial,
            task="text-generation-with-past",
            convert_tokenizer=False,
            local_files_only=True,
            library_name="transformers",
            ov_config=OVConfig(dtype="fp16"),
        )
    else:
        whole = write_openvino(model, folder, WHOLE)
        compressed = nncf.compress_weights(openvino.Core().read_model(whole / MODEL), **COMPRESSED[weights])
        openvino.save_model(compressed, partial / MODEL)
        for name in ("config.json", "generation_config.json"):
            (partial / name).write_bytes((whole / name).read_bytes())
    return partial.rename(path)


def _digest(model: Path) -> str:
    """A name for what a checkpoint holds."""
    digest = hashlib.sha256()
    for path in (model / "config.json", *sorted(model.glob("*.safetensors"))):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]
