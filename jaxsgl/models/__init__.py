"""Decoder models in Flax NNX: token-flat, without any notion of pages, batches or buckets. The engine calls them.

An engine needs three things from here: `ModelArch.from_folder` (what the model is), `resolve_precision`, and
`abstract_model`, whose graphdef it merges with the parameters inside its jitted step.
"""

from jaxsgl.models.arch import ModelArch
from jaxsgl.models.dense import Attend, Decoder, abstract_model
from jaxsgl.models.precision import Precision, cpu_multiplies_bfloat16, resolve_precision
from jaxsgl.models.rope import RopeParams

__all__ = [
    "Attend",
    "Decoder",
    "ModelArch",
    "Precision",
    "RopeParams",
    "abstract_model",
    "cpu_multiplies_bfloat16",
    "resolve_precision",
]
