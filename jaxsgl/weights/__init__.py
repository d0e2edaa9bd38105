"""Parameters: finds a model's folder, and makes sharded device arrays of its tensors. The engine calls it.

`resolve_model_folder` finds the folder, `load_params` reads it, `random_params` makes parameters without one.
"""

from jaxsgl.weights.loading import load_params, random_params, resolve_model_folder

__all__ = ["load_params", "random_params", "resolve_model_folder"]
