"""Parameters: finds a model's folder, and makes sharded device arrays of its tensors. The engine calls it.

`resolve_model_folder` finds the folder, `note_of_files` tells its files from others without reading them, `load_params`
reads it, `random_params` makes parameters without one. `load_kv_scales` reads what a float8 KV cache is scaled by,
`load_head` a head that drafts, `load_next_layer` the checkpoint's own.
`save_converted` writes parameters as they were loaded. `as_stored` says what tensors show of a model that its
configuration doesn't.
"""

from jaxsgl.weights.as_stored import as_stored
from jaxsgl.weights.converted import is_converted, make_output, save_converted
from jaxsgl.weights.eagle import load_head
from jaxsgl.weights.files import note_of_files, weight_files
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
    "as_stored",
    "is_converted",
    "load_head",
    "load_kv_scales",
    "load_next_layer",
    "load_params",
    "make_output",
    "note_of_files",
    "random_next_layer",
    "random_params",
    "resolve_model_folder",
    "save_converted",
    "weight_files",
]
