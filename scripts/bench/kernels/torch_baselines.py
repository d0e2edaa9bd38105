"""Baselines in PyTorch on the same unpaged shapes: SDPA's flash and cuDNN kernels, and `index_copy_`.

On a GPU the calls of all layers are one CUDA graph that is replayed, so launch gaps don't count here either. Without
torch there are no such baselines.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bench.kernels.cases import STORE
from bench.kernels.contenders import Unsupported, dense_cache, equal_shape, slot_major
from bench.kernels.inputs import Inputs, Layer


class TorchRunner:
    """Calls of torch, one for each layer; each writes its output to the same memory every time."""

    def __init__(self, calls: list[Callable[[], Any]], finish: Callable[[Any], Any], on_gpu: bool) -> None:
        """Runs each call once, and on a GPU records them as a graph."""
        import torch

        self.calls = len(calls)
        self._calls, self._finish, self._torch = calls, finish, torch
        self._graph = None
        if on_gpu:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for call in calls:
                    call()
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._outs = [call() for call in calls]

    def check(self) -> Any:
        """See `Runner`."""
        if self._graph is None:
            return self._finish(self._calls[0]())
        if not isinstance(self._outs[0], tuple):
            self._outs[0].fill_(float("nan"))
        self.run(1)
        return self._finish(self._outs[0])

    def run(self, passes: int) -> None:
        """See `Runner`."""
        for _ in range(passes):
            if self._graph is None:
                self._outs = [call() for call in self._calls]
            else:
                self._graph.replay()
        if self._graph is not None:
            self._torch.cuda.synchronize()


def torch_baselines(op: str, platform: str) -> dict[str, Callable[[Inputs], TorchRunner]]:
    """Baselines by name; none without torch, on a TPU, or if JAX has a GPU and torch has none."""
    if importlib.util.find_spec("torch") is None or platform == "tpu":
        return {}
    import torch

    on_gpu = platform == "gpu"
    if on_gpu and not torch.cuda.is_available():
        return {}
    if op == STORE:
        return {"torch index_copy_, slot-major": functools.partial(_index_copy, on_gpu)}
    kernels = ("flash", "cudnn") if on_gpu else ("any",)
    return {f"torch SDPA {kernel} (unpaged)": functools.partial(_sdpa, kernel, on_gpu) for kernel in kernels}


def _sdpa(kernel: str, on_gpu: bool, inputs: Inputs) -> TorchRunner:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    case = inputs.case
    if case.float8_cache or case.sliding_window or case.logit_soft_cap or case.sm_scale or case.has_sinks:
        raise Unsupported("no float8 cache, window, soft cap, scale or sinks")
    num_new, length = equal_shape(inputs)
    chosen = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}.get(kernel)
    options: dict[str, Any] = {"enable_gqa": True, "is_causal": num_new > 1 and num_new == length}
    if num_new > 1 and num_new != length:
        from torch.nn.attention.bias import causal_lower_right  # slow to import, seldom needed

        options["attn_mask"] = causal_lower_right(num_new, length)

    def call_for(layer: Layer) -> Callable[[], Any]:
        dense = dense_cache(inputs, layer)
        q = layer.q.astype(dense[0].dtype).reshape(len(case.new), num_new, *layer.q.shape[1:])
        q, k, v = (to_torch(jnp.swapaxes(a, 1, 2)) for a in (q, *dense))

        def call() -> Any:
            with sdpa_kernel(chosen) if chosen is not None else contextlib.nullcontext():
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

        return call

    shape = inputs.layers[0].q.shape
    return TorchRunner(
        [call_for(layer) for layer in inputs.layers],
        lambda out: from_torch(out.transpose(1, 2).contiguous()).reshape(shape),
        on_gpu,
    )


def _index_copy(on_gpu: bool, inputs: Inputs) -> TorchRunner:
    case = inputs.case
    if case.float8_cache or case.bits_cache:
        raise Unsupported("no float8 cache, no bits")
    slots = to_torch(jnp.asarray(inputs.slots)).long()

    def call_for(layer: Layer) -> Callable[[], Any]:
        cache = [to_torch(slot_major(pages)) for pages in (layer.k_pages, layer.v_pages)]
        new = [to_torch(a) for a in (layer.k, layer.v)]
        return lambda: tuple(pages.index_copy_(0, slots, a) for pages, a in zip(cache, new, strict=True))

    shape = (-1, case.page_size, case.num_kv_heads, case.head_dim)
    return TorchRunner(
        [call_for(layer) for layer in inputs.layers],
        lambda cache: tuple(jnp.swapaxes(from_torch(a).reshape(shape), 1, 2) for a in cache),
        on_gpu,
    )


def to_torch(array: jax.Array) -> Any:
    """A copy on the same device, in torch's own memory."""
    import torch

    copy = torch.utils.dlpack.from_dlpack(jax.block_until_ready(array)).clone()
    _wait(copy)  # else JAX may reuse the original's memory before it is read
    return copy


def from_torch(tensor: Any) -> jax.Array:
    """The memory of the tensor as a JAX array, without a copy."""
    _wait(tensor)
    return jnp.from_dlpack(tensor)


def _wait(tensor: Any) -> None:
    if tensor.is_cuda:
        import torch

        torch.cuda.synchronize()
