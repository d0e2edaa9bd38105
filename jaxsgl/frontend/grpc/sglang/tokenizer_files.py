"""The tokenizer's files as a zip in chunks: a gateway that can't read the model folder builds its tokenizer from them.

The same files give the same bytes, so that gateways can tell by the hash whether two workers have the same tokenizer.
Knows nothing of requests; service.py calls it.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from smg_grpc_proto.generated import common_pb2

from jaxsgl.errors import NotFound

CHUNK_BYTES = 64 << 10
_FILES = (
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "config.json", "generation_config.json",
    "merges.txt", "preprocessor_config.json", "processor_config.json", "special_tokens_map.json", "spiece.model",
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "video_preprocessor_config.json", "vocab.json",
    "vocab.txt",
)  # fmt: skip
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first date that a zip knows


def zip_tokenizer(folder: Path) -> bytes:
    """The archive of the folder's tokenizer files. Raises `NotFound` if it holds none of them."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as files:
        for name in _FILES:
            if (folder / name).is_file():
                entry = zipfile.ZipInfo(name, _EPOCH)
                entry.compress_type = zipfile.ZIP_DEFLATED
                files.writestr(entry, (folder / name).read_bytes())
        if not files.namelist():
            raise NotFound(f"the model folder {folder} has no tokenizer files: give the gateway a tokenizer path")
    return archive.getvalue()


def chunks(archive: bytes) -> Iterator[common_pb2.GetTokenizerChunk]:
    """`archive` in messages; the last one holds the SHA-256 of all, in hexadecimal digits."""
    for start in range(0, len(archive), CHUNK_BYTES):
        is_last = start + CHUNK_BYTES >= len(archive)
        yield common_pb2.GetTokenizerChunk(
            data=archive[start : start + CHUNK_BYTES], sha256=hashlib.sha256(archive).hexdigest() if is_last else ""
        )
