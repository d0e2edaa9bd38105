"""Attention over a latent: the cache has one vector a token, of which keys and values of all heads are made (MLA).

The matrices that make keys and values change sides, which is exact but for rounding: queries become what multiplies the
latent itself, and of the weighted sum of latents each head makes its output. So this is attention with one kv head,
C + R numbers of a key, and values that are the first C of them. docs/notes/2026-11-mla.md has the arithmetic.

Source: DeepSeek-V2 (arXiv 2405.04434). Never knows pages or checkpoints; `dense.DecoderLayer` builds it where a layer's
mixer is a `Latent`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxsgl.models.arch import ModelArch
from jaxsgl.models.layer_spec import Latent, LayerSpec
from jaxsgl.models.layers import Attend, LatentQkv, LayerRows, LayerVectors, last_product, vector
from jaxsgl.models.lora import LayerAdapters
from jaxsgl.models.matrix import Matrices, Rows, Weights
from jaxsgl.models.precision import product
from pallas_kernels import KernelChoice
from pallas_kernels.choice import AUTO_CHOICE
from pallas_kernels.norm import Update, rms_norm

NORM_EPS = 1e-6  # of the norms of latents, whatever the model's others have


class LatentAttention(Matrices):
    """The projections around `Attend` of a layer with a latent.

    Devices that share the model have some of the heads each, and make the latent each for itself.
    """

    def __init__(self, arch: ModelArch, spec: LayerSpec, dtype: jnp.dtype) -> None:
        mixer = spec.mixer
        assert isinstance(mixer, Latent)
        d, n, c, r = arch.hidden_size, arch.num_heads, mixer.kv_rank, mixer.rotated
        self.mixer = mixer
        by_head = ("kv_heads", None, None)
        query = n, mixer.unrotated + r
        if mixer.q_rank is None:
            self.declare("q", (*query, d), by_head, dtype, arch.format_of(spec, "q"), fan_in=d)
        else:
            self.declare("q_a", (mixer.q_rank, d), (None, None), dtype, arch.format_of(spec, "q_a"), fan_in=d)
            self.q_a_norm = vector((mixer.q_rank,), (None,), dtype, mean=1.0)
            of_rank = arch.format_of(spec, "q_b")
            self.declare("q_b", (*query, mixer.q_rank), by_head, dtype, of_rank, fan_in=mixer.q_rank)
        self.declare("kv_a", (c + r, d), (None, None), dtype, arch.format_of(spec, "kv_a"), fan_in=d)
        self.kv_a_norm = vector((c,), (None,), dtype, mean=1.0)
        # Multiplied from both sides, so it is never kept quantized.
        self.declare("kv_b", (n, mixer.unrotated + mixer.value, c), by_head, dtype, None, fan_in=c)
        out = n * mixer.value
        self.declare("o", (d, out), (None, "kv_heads"), dtype, arch.format_of(spec, "o"), fan_in=out)

    def reader(self, kernels: KernelChoice) -> Weights | None:
        """Several matrices multiply x."""
        return None

    def __call__(
        self,
        x_TD: Rows,
        vectors: LayerVectors,
        rows: LayerRows,
        tables: tuple[jax.Array, jax.Array],
        place: int,
        attend: Attend,
        adapters: LayerAdapters | None = None,
        kernels: KernelChoice = AUTO_CHOICE,
    ) -> Update:
        """`x [T, D]` to `[T, D]`, or parts of it as `add_and_norm` takes them; `tables` are those of R numbers."""
        assert adapters is None, "adapters are refused for models with a latent"
        assert isinstance(x_TD, jax.Array), "several matrices read rows as they are"
        mixer, dtype = self.mixer, x_TD.dtype
        q_TNH = self._queries(x_TD, kernels)
        latent_TH = product(x_TD, self.matrix("kv_a", kernels))
        own = rms_norm(latent_TH[:, : mixer.kv_rank], self.kv_a_norm[...], NORM_EPS)
        turned = _turned(latent_TH[:, None, mixer.kv_rank :], tables)
        kv_b = self.matrix("kv_b")
        assert isinstance(kv_b, jax.Array)
        keys, values = kv_b[:, : mixer.unrotated], kv_b[:, mixer.unrotated :]
        absorbed = _by_head("tnd,ndc->tnc", q_TNH[..., : mixer.unrotated], keys)
        queries = jnp.concatenate([absorbed, _turned(q_TNH[..., mixer.unrotated :], tables)], axis=-1)
        entries = jnp.concatenate([own[:, None], turned], axis=-1)
        out_TNC = attend(place, LatentQkv(queries.astype(dtype), entries.astype(dtype), mixer.kv_rank), None)
        out = _by_head("tnc,nvc->tnv", out_TNC, values).astype(dtype)
        return last_product(out.reshape(len(x_TD), -1), self.matrix("o", kernels), None)

    def _queries(self, x_TD: jax.Array, kernels: KernelChoice) -> jax.Array:
        """`[T, N, D_n + R]`."""
        if self.mixer.q_rank is None:
            return product(x_TD, self.matrix("q", kernels))
        low = rms_norm(product(x_TD, self.matrix("q_a", kernels)), self.q_a_norm[...], NORM_EPS)
        return product(low, self.matrix("q_b", kernels))


def _by_head(axes: str, x: jax.Array, weights: jax.Array) -> jax.Array:
    """A product for each head, multiplied in the weights' format and added up in float32."""
    precision = "highest" if weights.dtype == jnp.float32 else None
    return jnp.einsum(
        axes, x.astype(weights.dtype), weights, precision=precision, preferred_element_type=jnp.float32
    ).astype(x.dtype)


def _turned(heads: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Heads `[T, N, R]` turned by the angles of `tables`, each `[T, 1, R / 2]`."""
    cos, sin = tables
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(heads.dtype)
