"""Decoder models in Flax NNX: token-flat, without any notion of pages, batches or buckets. The engine calls them.

The engine uses three things: `arch_from_folder` (the model's shape), `resolve_precision` (number formats), and
`abstract_model`, whose graphdef it merges with the parameters inside its jitted step.
"""

from jaxsgl.models.arch import ModelArch
from jaxsgl.models.arch_file import arch_from_folder
from jaxsgl.models.decoder import Decoder, Params, abstract_model
from jaxsgl.models.layer_spec import DenseMlp, LayerSpec
from jaxsgl.models.layers import Attend, Qkv
from jaxsgl.models.precision import Precision, cpu_multiplies_bfloat16, kv_cache_flag, resolve_precision
from jaxsgl.models.rope import RopeParams
from jaxsgl.models.step_context import ImageTokens, StepContext

__all__ = [
    "Attend",
    "Decoder",
    "DenseMlp",
    "ImageTokens",
    "LayerSpec",
    "ModelArch",
    "Params",
    "Precision",
    "Qkv",
    "RopeParams",
    "StepContext",
    "abstract_model",
    "arch_from_folder",
    "cpu_multiplies_bfloat16",
    "kv_cache_flag",
    "resolve_precision",
]
