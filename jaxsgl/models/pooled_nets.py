"""What reads a pooled state: the classification head of an encoder, and matrices that sentence-transformers adds.

A decoder's classification head is one matrix without a bias, which `decoder` declares itself.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxsgl.models.arch import ModelArch
from jaxsgl.models.layers import vector
from jaxsgl.models.matrix import Matrices
from jaxsgl.models.precision import product
from jaxsgl.requests.outputs import DenseModule
from pallas_kernels.norm import centred, rms_norm


class ClassNet(Matrices):
    """Makes logits of pooled hidden states, as `Encoder.classifier` says."""

    def __init__(self, arch: ModelArch, dtype: jnp.dtype) -> None:
        d, num_classes, float32 = arch.hidden_size, len(arch.folder_pooling.labels), jnp.dtype(jnp.float32)
        assert arch.encoder is not None
        self.kind, self.eps = arch.encoder.classifier, arch.rms_norm_eps
        is_normed = self.kind == "normed gelu"
        self.declare("dense", (d, d), (None, None), dtype, None, fan_in=d)
        self.dense_bias = None if is_normed else vector((d,), (None,), float32, mean=0.0)
        self.norm = vector((d,), (None,), float32, mean=1.0) if is_normed else None
        self.declare("classes", (num_classes, d), (None, None), dtype, None, fan_in=d)
        self.classes_bias = vector((num_classes,), (None,), float32, mean=0.0)

    def __call__(self, pooled_RD: jax.Array) -> jax.Array:
        """Logits `[R, C]` float32 of `pooled [R, D]`."""
        made = product(pooled_RD, self.matrix("dense"), jnp.float32)
        if self.dense_bias is not None:
            made = made + self.dense_bias[...]
        if self.kind == "tanh":
            made = jnp.tanh(made)
        elif self.kind == "relu":
            made = jax.nn.relu(made)
        elif self.kind == "gelu":
            made = jax.nn.gelu(made, approximate=False)
        if self.norm is not None:
            wide = jax.nn.gelu(made, approximate=False)
            made = rms_norm(centred(wide, wide.dtype), self.norm[...], self.eps)
        return product(made.astype(pooled_RD.dtype), self.matrix("classes"), jnp.float32) + self.classes_bias[...]


class DenseNet(Matrices):
    """Makes an embedding of a pooled state: matrices one after the other, each with its activation."""

    def __init__(self, modules: tuple[DenseModule, ...], dtype: jnp.dtype) -> None:
        self.activations = tuple(module.activation for module in modules)
        for index, module in enumerate(modules):
            shape = module.num_outputs, module.num_inputs
            self.declare(f"matrix_{index}", shape, (None, None), dtype, None, fan_in=module.num_inputs)
            bias = vector(shape[:1], (None,), jnp.dtype(jnp.float32), mean=0.0) if module.has_bias else None
            setattr(self, f"bias_{index}", bias)

    def __call__(self, pooled_RD: jax.Array) -> jax.Array:
        """`[R, numbers of an embedding]` float32 of `pooled [R, D]` float32."""
        for index, activation in enumerate(self.activations):
            bias = getattr(self, f"bias_{index}")
            pooled_RD = product(pooled_RD, self.matrix(f"matrix_{index}"), jnp.float32)
            pooled_RD = pooled_RD if bias is None else pooled_RD + bias[...]
            pooled_RD = jnp.tanh(pooled_RD) if activation == "tanh" else pooled_RD
        return pooled_RD
