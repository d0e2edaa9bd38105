"""The calls that the serving loop makes of its engine, as values: what host 0 sends, and the others play in that order.

A call that launches work on the devices of all hosts is a value here, and nothing else launches any: so all hosts run
the same programs in the same order. What is not here can't be served over hosts, and flags refuse it. Arrays travel as
they are: `encode` returns them next to the MessagePack of everything else, and `decode` makes views of what has come.
Knows no sockets (line.py) and no JAX.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from jaxsgl.batch.inputs import Bucket, StepFeatures, StepInputs

_ALIGNMENT = 8  # bytes of an array's place in what comes


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """`StepEngine.submit` of `StepInputs` with these fields; images are refused."""

    bucket: Bucket
    packed: npt.NDArray[np.int32]
    num_seqs: int
    num_tokens: int
    features: StepFeatures | None
    table_changes: tuple[npt.NDArray[np.int32], ...]
    masked: bool
    drafts: bool = False

    @classmethod
    def of(cls, inputs: StepInputs) -> Step:
        """The call that submits `inputs`."""
        assert not inputs.encodes, "flags refuse images over several hosts"
        return cls(
            inputs.bucket,
            inputs.packed,
            inputs.num_seqs,
            inputs.num_tokens,
            inputs.features,
            inputs.table_changes,
            inputs.masked,
            drafts=inputs.drafts,
        )

    @property
    def inputs(self) -> StepInputs:
        """What is submitted."""
        return StepInputs(
            self.bucket,
            self.packed,
            self.num_seqs,
            self.num_tokens,
            self.features,
            self.table_changes,
            self.masked,
            drafts=self.drafts,
        )


class Choose(msgspec.Struct, frozen=True, array_like=True, tag="choose"):
    """`MaskedHandle.choose` of the step before, with `masks [C, ceil(V / 32)]`."""

    masks: npt.NDArray[np.uint32]


Call: TypeAlias = Step | Choose


class Encoding:
    """Encodes and decodes messages of one type, a union of structs. Used by one thread at a time.

    Args:
      kind: the type of messages.
    """

    def __init__(self, kind: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._put)
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=self._take)
        self._arrays: list[npt.NDArray[Any]] = []
        self._payload = memoryview(b"")
        self._at = 0

    def encode(self, message: Any) -> tuple[bytes, list[memoryview]]:
        """The message without its arrays, and their bytes, each a multiple of `_ALIGNMENT` long with its padding."""
        self._arrays = []
        body = self._encoder.encode(message)
        parts: list[memoryview] = []
        for array in self._arrays:
            parts.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            if padding := -array.nbytes % _ALIGNMENT:
                parts.append(memoryview(bytes(padding)))
        return body, parts

    def decode(self, body: bytes | bytearray, payload: bytearray) -> Any:
        """The message of `body`, whose arrays are read-only views of `payload`.

        Raises msgspec.DecodeError, which ValidationError is, for anything that `encode` doesn't make.
        """
        self._payload, self._at = memoryview(payload).toreadonly(), 0
        try:
            return self._decoder.decode(body)
        finally:
            self._payload = memoryview(b"")

    def _put(self, array: Any) -> tuple[str, tuple[int, ...]]:
        assert isinstance(array, np.ndarray)
        self._arrays.append(array)
        return array.dtype.str, array.shape

    def _take(self, _: type, described: Any) -> npt.NDArray[Any]:
        name, shape = described
        dtype = np.dtype(name)
        if dtype.kind not in "iuf":
            raise ValueError(f"an array of {name}")
        count = int(np.prod(shape, dtype=np.int64))
        start, self._at = self._at, self._at + count * dtype.itemsize + -count * dtype.itemsize % _ALIGNMENT
        if count < 0 or self._at > len(self._payload):
            raise ValueError(f"an array of {shape} goes beyond the {len(self._payload)} bytes that came")
        return np.frombuffer(self._payload, dtype, count, start).reshape(shape)
