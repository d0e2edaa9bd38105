"""The commands about LoRA adapters, as msgspec structs: some of those of orders.py."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter"):
    """Load an adapter, so that requests may name it. The `Answer.text` is empty, or says why it can't be served.

    Attributes:
      name: what requests and lists of models call it.
      folder: a folder in PEFT's layout, or a hub id.
      pinned: keep it on the device once it is there.
      replace: take the place of one of the same name, for requests that come from then on.
      alias: another name for requests, if there is one: gateways number adapters.
    """

    number: int
    name: str
    folder: str
    pinned: bool = False
    replace: bool = False
    alias: str = ""


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter"):
    """Forget an adapter: requests that come from now on can't name it. Answered when those that have it have ended."""

    number: int
    name: str


class ListAdapters(msgspec.Struct, frozen=True, tag="list_adapters"):
    """Tell the adapters that requests may name; the `Answer.text` is JSON, a list of `LoadedAdapter`."""

    number: int


class LoadedAdapter(msgspec.Struct, frozen=True):
    """An adapter that requests may name.

    Attributes:
      name, folder, pinned, alias: see `LoadAdapter`.
      rank: its highest one.
      on_device: whether it is on the device now, so that a request for it needn't wait for room.
      num_requests: samples that have it and have not ended.
    """

    name: str
    folder: str
    rank: int
    pinned: bool
    on_device: bool
    num_requests: int
    alias: str = ""


AdapterOrder: TypeAlias = LoadAdapter | UnloadAdapter | ListAdapters
