"""`digest`: a name for a value by what it is, the same in every process: for what programs are made from.

Follows closures, dataclasses, trees and shapes down to plain values. Code counts by where it is defined, and functions
and classes by their names: who keeps something under a digest must name the versions and sources besides (`kept`). A
value that it doesn't know has no name, rather than one that may stand for another value. Knows no programs.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import msgspec
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef

MOST_BYTES = 1 << 20  # of an array whose numbers are part of a program
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, type(Ellipsis))


class Unnamed(Exception):
    """A value, or part of it, has no name."""


class Namer:
    """Digests values; keeps those of structures that many programs share, and these structures with them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, bytes]] = {}
        self._open: set[int] = set()

    def digest(self, value: Any) -> bytes:
        """The name of `value`. Raises `Unnamed`."""
        if isinstance(value, _PLAIN) and type(value) in _PLAIN:
            return _hash("plain", [type(value).__name__.encode(), repr(value).encode()])
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        if id(value) in self._open:
            raise Unnamed(f"a {type(value).__name__} holds itself")
        self._open.add(id(value))
        try:
            found = self._of_structure(value)
        finally:
            self._open.remove(id(value))
        self._known[id(value)] = value, found  # it lives on, so no other value gets its id
        return found

    def _of_structure(self, value: Any) -> bytes:
        for kinds, parts in _KINDS:
            if isinstance(value, kinds):
                return self._of_parts(value, parts(value))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._of_parts(value, [getattr(value, field.name) for field in dataclasses.fields(value)])
        if (name := _importable(value)) is not None:
            return _hash("importable", [name.encode()])
        raise Unnamed(f"a {type(value).__module__}.{type(value).__qualname__} has no name")

    def _of_parts(self, value: Any, parts: Iterable[Any]) -> bytes:
        kind = type(value)
        return _hash(f"{kind.__module__}.{kind.__qualname__}", [self.digest(part) for part in parts])


def _hash(kind: str, parts: Iterable[bytes]) -> bytes:
    found = hashlib.blake2b(kind.encode(), digest_size=20)
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.digest()


def _importable(value: Any) -> str | None:
    """The module and the name under which `value` is found there; None if it isn't."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    if module == "builtins" and isinstance(value, type):  # some, such as None's, are not found there
        return f"{module}.{name}"
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}.{name}" if found is value else None


def _of_function(function: types.FunctionType) -> list[Any]:
    name = _importable(function)
    if name is not None:
        return [name]
    code = function.__code__
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    place = function.__module__, function.__qualname__, code.co_firstlineno, code.co_code
    return [*place, function.__defaults__, function.__kwdefaults__, *cells]


def _of_array(array: Any) -> list[Any]:
    if array.nbytes > MOST_BYTES:
        raise Unnamed(f"an array of {array.nbytes} bytes has no name")
    return [array.dtype.name, array.shape, np.asarray(array).tobytes()]


def _of_shape(shape: jax.ShapeDtypeStruct) -> list[Any]:
    return [shape.shape, shape.dtype, shape.sharding, bool(shape.weak_type)]


def _of_mesh(mesh: Mesh) -> list[Any]:
    devices = [f"{device.platform} {device.id} {device.device_kind}" for device in mesh.devices.flat]
    return [mesh.axis_names, mesh.devices.shape, devices, str(mesh.axis_types)]


def _of_tree(tree: PyTreeDef) -> list[Any]:
    return [tree.num_leaves, tree.node_data(), tree.children()]


# What values of these types consist of.
_KINDS: tuple[tuple[Any, Callable[[Any], Iterable[Any]]], ...] = (
    (enum.Enum, lambda value: [value.name]),
    (np.dtype, lambda value: [value.name]),
    (np.generic, lambda value: [value.dtype.name, value.tobytes()]),
    ((np.ndarray, jax.Array), _of_array),
    (jax.ShapeDtypeStruct, _of_shape),
    (NamedSharding, lambda value: [value.mesh, value.spec, value.memory_kind]),
    (PartitionSpec, lambda value: [str(value)]),
    (Mesh, _of_mesh),
    (PyTreeDef, _of_tree),
    (types.FunctionType, _of_function),
    (types.MethodType, lambda value: [value.__func__, value.__self__]),
    (functools.partial, lambda value: [value.func, value.args, value.keywords]),
    (nnx.State, jax.tree.flatten),
    (msgspec.Struct, lambda value: [getattr(value, name) for name in value.__struct_fields__]),
    ((tuple, list), lambda value: value),
    ((set, frozenset), lambda value: sorted(map(repr, value))),
    (Mapping, lambda value: [part for pair in value.items() for part in pair]),
)
