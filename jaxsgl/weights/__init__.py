"""Parameters: finds a model's folder, and makes sharded device arrays of its tensors. The engine calls it.

`resolve_model_folder` finds the folder, `load_params` reads it, `random_params` makes parameters without one.
`load_kv_scales` reads what a float8 KV cache is scaled by, `load_head` a head that drafts, `load_next_layer` the
checkpoint's own.
`save_converted` writes parameters as they were loaded.
"""

from jaxsgl.weights.converted import is_converted, make_output, save_converted
from jaxsgl.weights.eagle import load_head
from jaxsgl.weights.kv_scales import KvScales, load_kv_scales
from jaxsgl.weights.loading import (
    load_next_layer,
    load_params,
    random_next_layer,
    random_params,
    resolve_model_folder,
)

__all__ = [
    "KvScales",
    "is_converted",
    "load_head",
    "load_kv_scales",
    "load_next_layer",
    "load_params",
    "make_output",
    "random_next_layer",
    "random_params",
    "resolve_model_folder",
    "save_converted",
]
