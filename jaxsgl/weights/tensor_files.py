"""The tensors of a folder's safetensors files, mapped into memory and read by slices.

Owns the files, their headers and the mapped pages. A tensor is a NumPy array over the mapped file: cutting, reshaping
and transposing it reads nothing, and copying a part of it reads that part alone. Mapped pages count as the process's
memory once they were read, until `release` gives them back. Never knows what parameters are made of: the loaders, which
call it, bring the names. `GivenTensors` takes the place of files where a trainer hands tensors over.

Tensors that are not read fail a load, but for scales of the KV cache, which `kv_scales.py` reads by themselves, and
those that may be left unread; their names are here too.

The format is 8 bytes of length, a JSON header, then the numbers of all tensors
(https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt

from jaxsgl.errors import CheckpointError
from jaxsgl.models import ModelArch
from jaxsgl.models.pooling import dense_folders
from jaxsgl.weights import stored_matrix
from jaxsgl.weights.encoder_names import UNREAD
from jaxsgl.weights.recipe import Piece, Recipe, Source, Tensor, axes_lengths
from jaxsgl.weights.stored_names import as_in_recipes, own_name, stored_name
from jaxsgl.weights.tower_names import is_unread

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DENSE_MODULE = "dense."  # what we call the tensors of sentence-transformers' Dense modules
ID_DTYPES = "I64", "I32"
DRAFT_HEAD = "mtp."  # what names of its tensors begin with
# And in these architectures' files.
DRAFT_HEADS = {
    "Ernie4_5_MoeForCausalLM": "model.mtp_",
    **dict.fromkeys(("LongcatFlashForCausalLM", "MiMoV2FlashForCausalLM"), "model.mtp."),
}
FLOAT_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # and their names in config.json
MAX_HEADER_BYTES = 100_000_000  # as safetensors itself
DTYPES: dict[str, npt.DTypeLike] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "BOOL": np.bool_,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8,
}  # fmt: skip


class StoredTensor(NamedTuple):
    """Where a tensor lies: its dtype as the header calls it, and the bytes of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class MappedBytes:
    """A file mapped into memory. Raises `OSError`, or `ValueError` for one that is empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.address: int = self._bytes.ctypes.data
        self.num_bytes = len(self._map)

    def part(self, start: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Bytes of the file; reads nothing."""
        return self._bytes[start : start + num_bytes]

    def release(self, first: int, end: int) -> None:
        """Gives back the memory of the pages that hold the bytes `first` to `end`; the numbers stay readable."""
        first -= first % mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED"):  # not everywhere
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)


class MappedFile(MappedBytes):
    """One safetensors file. Raises `CheckpointError` if it is truncated or something else."""

    def __init__(self, path: Path) -> None:
        try:
            super().__init__(path)
            self.tensors = _read_header(self._map)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is truncated or not a safetensors file ({error}); fetch it again") from error

    def array(self, name: str) -> npt.NDArray[Any]:
        """A tensor's numbers; reads nothing. Raises `CheckpointError` for a dtype that NumPy has no numbers of."""
        stored = self.tensors[name]
        if stored.dtype not in DTYPES:
            raise CheckpointError(
                f"{self.path}: tensor {name} is {stored.dtype}; supported are {', '.join(DTYPES)}: store numbers of 4 "
                "bits two in a byte, as U8"
            )
        return self.part(stored.start, stored.num_bytes).view(DTYPES[stored.dtype]).reshape(stored.shape)


class MappedFiles:
    """Files whose memory is given back by the numbers that lie in it."""

    def __init__(self, files: Iterable[MappedBytes]) -> None:
        self._by_address = sorted(files, key=lambda file: file.address)
        self._addresses = [file.address for file in self._by_address]

    def release(self, numbers: npt.NDArray[Any]) -> None:
        """Gives back the memory of mapped pages that hold `numbers`; does nothing for an array that isn't mapped."""
        first, end = np.lib.array_utils.byte_bounds(numbers)
        index = bisect_right(self._addresses, first) - 1
        if index >= 0:
            file = self._by_address[index]
            if end <= file.address + file.num_bytes:
                file.release(first - file.address, end - file.address)


class TensorFiles:
    """The tensors of a folder by name; remembers which were asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of: dict[str, MappedFile] = {}
        files = [MappedFile(path) for path in _listed_files(folder)]
        renamed = as_in_recipes(name for file in files for name in file.tensors)
        ours = {stored: name for name, stored in renamed.items()}
        for file in files:
            file.tensors = {ours[stored]: tensor for stored, tensor in file.tensors.items()}
        for index, path in enumerate(dense_folders(folder)):
            of_module = MappedFile(path / SINGLE_FILE)
            of_module.tensors = {
                name.replace("linear.", f"{DENSE_MODULE}{index}."): tensor for name, tensor in of_module.tensors.items()
            }
            files.append(of_module)
        for file in files:
            self._file_of.update(dict.fromkeys(file.tensors, file))
        self.release = MappedFiles(files).release
        self._unread = set(self._file_of)

    def tensor(self, source: Source, arch: ModelArch) -> npt.NDArray[Any]:
        """The tensor of `source` as it is stored, mapped. Raises `CheckpointError` if it is missing or misshapen."""
        if source.name not in self._file_of:
            raise CheckpointError(f"{self.folder}: tensor {source.name} is missing, but {arch.name} needs it")
        file = self._file_of[source.name]
        if source.axes is None:
            self._unread.discard(source.name)
            return file.array(source.name)
        stored, expected = file.tensors[source.name], axes_lengths(source, arch)
        if stored.shape != expected:
            raise CheckpointError(
                f"{file.path}: tensor {source.name} has shape {stored.shape}, but config.json asks for {expected}"
            )
        supported = ID_DTYPES if source.has_ids else tuple(FLOAT_DTYPES)
        if stored.dtype not in supported:
            raise CheckpointError(
                f"{file.path}: tensor {source.name} is {stored.dtype}; supported are {', '.join(supported)}"
            )
        self._unread.discard(source.name)
        return file.array(source.name)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor; None if there is none of that name."""
        return self._file_of[name].tensors[name].shape if name in self._file_of else None

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._file_of)

    def main_dtype(self) -> str | None:
        """The dtype of most numbers in matrices of floats, as config.json names it; None: there are none.

        Scales are left out. Of several dtypes the others are those of routers and the like.
        """
        counts = Counter[str]()
        for name, file in self._file_of.items():
            stored = file.tensors[name]
            if stored.dtype in FLOAT_DTYPES and len(stored.shape) > 1 and "scale" not in name:
                counts[FLOAT_DTYPES[stored.dtype]] += math.prod(stored.shape)
        return max(counts, key=lambda dtype: counts[dtype], default=None)

    def scale(self, name: str) -> npt.NDArray[np.float32]:
        """A small tensor of any float dtype and shape, in float32."""
        return self._file_of[name].array(name).astype(np.float32)

    def pieces(self, recipe: Recipe, arch: ModelArch, found: tuple[Tensor, ...]) -> Iterator[Piece]:
        """What `recipe` makes of its tensors."""
        return recipe.pieces(arch, found)

    def refuse_unread(self, arch: ModelArch) -> None:
        """Raises `CheckpointError` for tensors that nothing was made of, except harmless ones; logs draft heads."""
        unread = sorted(name for name in self._unread if not is_harmless(name, arch))
        start = DRAFT_HEADS.get(arch.name, DRAFT_HEAD)
        if num_drafting := sum(name.startswith(start) for name in self._unread):
            use = "--speculative-algorithm NEXTN drafts with it" if arch.draft_head else f"{arch.name} drafts with none"
            logger.info(
                "%s: %d tensors of a draft head (%s*) are no part of the model: %s",
                self.folder, num_drafting, start, use,
            )  # fmt: skip
        if unread:
            more = f" and {len(unread) - 3} more" if len(unread) > 3 else ""
            raise CheckpointError(
                f"{self.folder}: tensors that are not part of {arch.name} as config.json describes it: "
                f"{', '.join(unread[:3])}{more}; remove them from the files if the model does without"
            )


def _read_header(data: mmap.mmap) -> dict[str, StoredTensor]:
    """Where each tensor lies. Raises ValueError, KeyError, TypeError or AttributeError for anything but a header."""
    header_bytes = int.from_bytes(data[:8], "little")
    start = 8 + header_bytes
    if header_bytes > MAX_HEADER_BYTES or start > len(data):
        raise ValueError(f"a header of {header_bytes} bytes in a file of {len(data)}")
    tensors = {}
    for name, entry in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        (first, end), shape = entry["data_offsets"], tuple(entry["shape"])
        if not 0 <= first <= end <= len(data) - start:
            raise ValueError(f"tensor {name} ends at byte {start + end} of {len(data)}")
        dtype = entry["dtype"]
        if dtype in DTYPES and math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize != end - first:
            raise ValueError(f"tensor {name} has {end - first} bytes for shape {shape} of {dtype}")
        tensors[name] = StoredTensor(dtype, shape, start + first, end - first)
    return tensors


def _listed_files(folder: Path) -> list[Path]:
    """The single file, else the files of the index, else every safetensors file of the folder."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    if not index.is_file():
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise CheckpointError(
                f"{folder} has no *.safetensors files; other weight formats but GGUF are not supported: save a model "
                "of *.bin or *.pt files, which are pickles, anew with transformers' save_pretrained, or give a "
                "--revision of the hub's that has it in safetensors"
            )
        return found
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} can't be read as an index of safetensors files: {error!r}") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(names)} weight files are missing: {', '.join(missing)}"
        )
    return [folder / name for name in names]


class GivenTensors:
    """Tensors by name; remembers which were asked for. Arrays on other devices are copied to the host."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = {name: tensors[given] for name, given in as_in_recipes(tensors).items()}
        self._unread = set(self._tensors)

    def tensor(self, source: Source, arch: ModelArch) -> npt.NDArray[Any]:
        """The tensor of `source` as it is. Raises `CheckpointError` if it is missing, misshapen or deleted."""
        name = source.name
        if source.axes is None:
            raise CheckpointError(f"tensor {name} is of a quantized checkpoint; give {arch.name}'s weights as a folder")
        expected = axes_lengths(source, arch)
        if name not in self._tensors:
            raise CheckpointError(f"tensor {name} is missing, but {arch.name} needs it")
        given = self._tensors[name]
        if isinstance(given, jax.Array) and given.is_deleted():
            raise CheckpointError(f"tensor {name} is deleted; was it donated to a jitted function?")
        if given.shape != expected or not jnp.issubdtype(given.dtype, jnp.floating):
            raise CheckpointError(
                f"tensor {name} is {given.dtype} of shape {given.shape}, but must be floats of shape {expected}"
            )
        self._unread.discard(name)
        return np.asarray(given)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor; None if there is none of that name."""
        return tuple(self._tensors[name].shape) if name in self._tensors else None

    def pieces(self, recipe: Recipe, arch: ModelArch, found: tuple[Tensor, ...]) -> Iterator[Piece]:
        """What `recipe` makes of its tensors."""
        return recipe.pieces(arch, found)

    def release(self, numbers: npt.NDArray[Any]) -> None:
        """Nothing to give back: the tensors are the trainer's."""

    def refuse_unread(self, arch: ModelArch) -> None:
        """Raises `CheckpointError` for tensors that no parameter was made of, except harmless ones."""
        unread = sorted(name for name in self._unread if not is_harmless(name, arch))
        if unread:
            raise CheckpointError(f"{len(unread)} tensors are not part of {arch.name}, as {', '.join(unread[:3])}")
        embedding, head = stored_name(EMBEDDING, arch), stored_name(HEAD, arch)
        if head in self._unread and arch.head == "vocabulary" and not self._are_equal(embedding, head):
            raise CheckpointError(
                f"tensor {head} differs from {embedding}, which is the head of the model that is served: leave it out, "
                "or start a server with a folder of both"
            )

    def _are_equal(self, name: str, other: str) -> bool:
        one, two = (self._tensors.get(each) for each in (name, other))
        if one is None or two is None or one is two:
            return True
        if one.shape != two.shape:
            return False
        rows = range(0, len(one), ROWS)
        return all(np.array_equal(one[first : first + ROWS], two[first : first + ROWS]) for first in rows)


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROWS = 4096  # compared at a time

# What scales K, V or both of a layer's KV cache in float8, by the end of the tensor's name: compressed-tensors and its
# older form, ModelOpt, Quark. Scales of queries and probabilities belong to attention in float8, which ours is not.
_KV_SCALES = {
    "k_scale": "k", "attn.k_scale": "k", "k_proj.k_scale": "k", "qkv_proj.k_scale": "k", "k_proj.output_scale": "k",
    "v_scale": "v", "attn.v_scale": "v", "v_proj.v_scale": "v", "qkv_proj.v_scale": "v", "v_proj.output_scale": "v",
    "kv_scale": "kv", "attn.kv_scale": "kv",
}  # fmt: skip
_UNUSED_SCALES = ("q_scale", "q_proj.q_scale", "q_proj.output_scale", "prob_scale", "prob_output_scale")
_OF_ATTENTION = re.compile(
    r"(?:language_model\.model|model\.language_model|model)\.layers\.(\d+)\.(?:self_attn|mixer)\.(.+)"
)
_OF_KEYS = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:[kv]_proj|[kv]_norm)\..+")
_OF_MLPS = re.compile(r"model\.layers\.(\d+)\.post_mlp_layernorm\.weight")
_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_OF_EXPERT = re.compile(r"model\.layers\.\d+\.moe\.experts\.(\d+)\.")
# Architectures whose checkpoints have layers behind the last one, which predict further tokens.
_PREDICT_MORE = (
    "Glm4MoeForCausalLM",
    "Glm4vMoeForConditionalGeneration",
    "GlmOcrForConditionalGeneration",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "HYV3ForCausalLM",
    "Kimi_K25ForConditionalGeneration",
    "BailingMoeV2ForCausalLM",
)

_OF_LAST_STAGE = ("model.norm.", "model.final_layernorm.", "lm_head.")  # with a bias or scales, where there are some
# Rope's, xIELU's, and masks.
_CONSTANTS = (
    "rotary_emb.inv_freq",
    "act_fn.beta",
    "act_fn.eps",
    *(f".{kind}.{mask}" for kind in ("attention", "attn") for mask in ("bias", "masked_bias")),
)


def kv_scale_of(name: str) -> tuple[int, str] | None:
    """The layer, and "k", "v" or "kv" for both, whose cache a tensor of that name scales; None for any other tensor."""
    match = _OF_ATTENTION.fullmatch(name)
    return None if match is None or match[2] not in _KV_SCALES else (int(match[1]), _KV_SCALES[match[2]])


def is_harmless(name: str, arch: ModelArch) -> bool:
    """Whether a tensor may be left unread: constants, a head that nothing reads, what predicts further tokens,
    scales, what would make keys that another layer makes, norms of MLPs that have none, experts that compute nothing,
    the parts beside the decoder, and those of other pipeline stages.

    The scales of the KV cache are read by themselves (`kv_scales.py`), if it is float8.
    """
    own = own_name(name, arch)
    if own is None:
        return True
    name = own
    of_attention = _OF_ATTENTION.fullmatch(name)
    if of_attention is not None and (of_attention[2] in _KV_SCALES or of_attention[2].endswith(_UNUSED_SCALES)):
        return True
    of_keys = _OF_KEYS.match(name)
    if of_keys is not None and int(of_keys[1]) - arch.stage.layers_before in arch.reading_layers:
        return True
    of_mlp = _OF_MLPS.fullmatch(name)
    if of_mlp is not None and int(of_mlp[1]) - arch.stage.layers_before not in arch.normed["mlp_out_norm"]:
        return True
    of_expert, mixture = _OF_EXPERT.match(name), arch.mixture
    if of_expert is not None and mixture is not None and int(of_expert[1]) >= mixture.num_experts:
        return True
    if name.startswith(DENSE_MODULE) and (arch.pooling is None or arch.head == "labels"):
        return True
    if is_unread(name, arch) or (arch.encoder is not None and name.startswith(UNREAD)):
        return True
    if name.startswith(DRAFT_HEADS.get(arch.name, DRAFT_HEAD)) or name.endswith(_CONSTANTS):
        return True
    of_layer, before, after = _OF_LAYER.match(name), arch.stage.layers_before, arch.stage.layers_after
    if of_layer is not None:
        place = int(of_layer[1]) - before
        is_behind = arch.name in _PREDICT_MORE and place >= arch.num_layers
        if is_behind or -before <= place < 0 or 0 <= place - arch.num_layers < after:
            return True
    if name == "model.embed_tokens.weight" and not arch.has_embedding:
        return True  # another stage reads it, as the next ones
    if (name.startswith(_OF_LAST_STAGE) and after) or (name == "model.embed_positions.weight" and before):
        return True
    fmt = arch.weight_format
    if fmt is not None and fmt.storage is not None and stored_matrix.is_unused(name, fmt):
        return True
    return (arch.tie_embeddings or arch.head != "vocabulary") and name == "lm_head.weight"
