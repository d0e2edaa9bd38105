"""What a model's folder says of its processor, understood: one reader for each kind of processor.

Reads config.json, and what next to it says of the processor. Never knows pictures.
"""

from jaxsgl.preprocess.processors.registry import load_settings

__all__ = ["load_settings"]
