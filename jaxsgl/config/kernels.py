"""What `--kernels` may say: the operations by short names, and the backends that have each of them.

Owns these names and their reading. Imports no kernels, since the front end reads flags too; a test compares the lists
with the kernels' own.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxsgl.errors import ConfigError

ATTENTION_BACKENDS = ("auto", "xla", "native", "triton", "mosaic_gpu", "mosaic_tpu", "reference")
OP_OF_NAME = {
    "decode": "paged_decode_attention",
    "extend": "paged_extend_attention",
    "store": "store_kv",
    "rotate": "rotate_and_store",
    "store_decode": "store_and_decode",
    "norm": "add_and_norm",
    "experts": "grouped_product",
    "quantized": "quantized_product",
    "float8": "float8_product",
    "states": "delta_decode",
    "chosen": "attend_to_chosen",
    "grouped": "attend_to_groups",
    "index": "score_tokens",
}
BACKENDS_OF_NAME = {
    "decode": ATTENTION_BACKENDS,
    "extend": ATTENTION_BACKENDS,
    "store": ("auto", "xla", "triton", "mosaic_tpu", "reference"),
    "rotate": ("auto", "xla", "triton", "reference"),
    "store_decode": ("auto", "xla", "mosaic_tpu", "reference"),
    "norm": ("auto", "xla", "triton"),
    "experts": ("auto", "xla", "native", "triton", "mosaic_gpu", "mosaic_tpu", "reference"),
    "quantized": ("auto", "xla", "triton", "mosaic_tpu", "reference"),
    "float8": ("auto", "xla", "triton", "mosaic_gpu", "reference"),
    "states": ("auto", "xla", "native", "triton"),
    "chosen": ("auto", "xla", "triton"),
    "grouped": ("auto", "xla", "triton"),
    "index": ("auto", "xla", "triton"),
}


def read_kernels(words: Sequence[str]) -> dict[str, str]:
    """The backends of operations, by their full names, from words as "decode=triton".

    Raises:
      ConfigError: a word of another form, an operation or a backend that doesn't exist, or an operation named twice.
    """
    chosen: dict[str, str] = {}
    for word in words:
        name, _, backend = word.partition("=")
        if not backend:
            raise ConfigError(f"--kernels holds {word!r}, but must hold pairs operation=backend, as decode=triton")
        if name not in OP_OF_NAME:
            raise ConfigError(f"--kernels names the operation {name!r}, but must name one of {', '.join(OP_OF_NAME)}")
        if backend not in BACKENDS_OF_NAME[name]:
            raise ConfigError(
                f"--kernels {word}: {name} has no backend {backend!r}; give one of {', '.join(BACKENDS_OF_NAME[name])}"
            )
        if OP_OF_NAME[name] in chosen:
            raise ConfigError(f"--kernels names {name} twice: give it one backend")
        chosen[OP_OF_NAME[name]] = backend
    return chosen
