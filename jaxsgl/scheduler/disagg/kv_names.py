"""`KvNames`: what the KV of a request's prompt is called, among servers and within this one.

    version             of weights and adapter: what computes the KV; equal on servers that compute the same, however
                        often and under which names they have loaded an adapter
    ids and namespace   what the prefix cache of this server finds it by; that of an adapter is of one loading here

So KV of one adapter never comes to be used with another one: prefill and decode compare versions, and decode files what
it gets under its own loading. legs.py asks for both each time, since adapters and weights may be exchanged.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxsgl.cache.namespaces import namespace_of
from jaxsgl.cache.pages import IntArray
from jaxsgl.requests.media import hash_ids
from jaxsgl.requests.request import Request
from jaxsgl.scheduler.adapter import Adapter
from jaxsgl.scheduler.resources.adapters import AdapterTable


class KvNames:
    """Names by the weights and adapters of this moment.

    Args:
      adapters: that are loaded.
      weight_version: gives the version of the weights.
    """

    def __init__(self, adapters: AdapterTable, weight_version: Callable[[], str]) -> None:
        self._adapters = adapters
        self._weight_version = weight_version

    def version(self, request: Request) -> str:
        """What would compute the prompt now. Under an adapter that is not loaded, the version of no KV."""
        weights = self._weight_version()
        if not request.adapter:
            return weights
        adapter = self._adapter_of(request)
        return f"{weights} with {'no adapter of that name' if adapter is None else f'adapter {adapter.digest}'}"

    def ids_and_namespace(self, request: Request) -> tuple[IntArray, bytes]:
        """What the prefix cache finds the prompt by; of an adapter that is not loaded, it finds nothing."""
        ids = hash_ids(request.prompt_ids, request.media)
        if not request.adapter:
            return ids, namespace_of(request.cache_salt, None, request.kv_source)
        adapter = self._adapter_of(request)
        loading = "" if adapter is None else adapter.loading
        return ids, namespace_of(request.cache_salt, loading, request.kv_source)

    def _adapter_of(self, request: Request) -> Adapter | None:
        return self._adapters.named(request.adapter)
