"""Kernels that a compiled program launches, in order, with bytes and FLOPs of each: read from its optimized HLO.

Counts bytes as XLA's own cost analysis does: all operands and results, but of an operand that a fusion only slices or
gathers what it takes. Our Pallas kernels are counted without the pages of the KV cache and the page table, of which
they touch a part that no compiler knows; `predict_gpu.py` adds it. On a TPU bytes are those of its HBM: what lies in
the chip's own memory counts when it is copied there or back, a matrix that a step fetches for the next one there.

Of the branches of a condition those on its largest side are launched: that with the most kernels, then bytes, of all
branches together that it decides, so that the launches are those of one possible step. Imports no JAX. Called by
`compile_for`.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from bench.targets.collectives import kind_of, num_peers

FREE = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "partition-id")
)
READS_PART = frozenset(("slice", "dynamic-slice", "gather"))  # of operand 0
WRITES_PART = {"dynamic-update-slice": 1, "scatter": 2}  # number of the operand that is written into operand 0
CONTAINERS = frozenset(("call", "while", "async-start"))
PALLAS_TARGETS = ("mosaic_gpu", "xla.gpu.triton", "tpu_custom_call")
STARTS = {"copy-start": (1, 0), "slice-start": (0, 1), "dynamic-slice-start": (0, 1)}  # source and copy in its type
OUTPUTS_OF_WORDS = 16  # `pallas_kernels.fragments.OUTPUTS`, which needs JAX
# Our kernels by their sources.
KERNELS = {
    "attention": r"\b(paged_\w*attention|attend_to_(chosen|groups))/",
    "merge": r"\bmerge_(splits|latents)/",
    "states": r"\bdelta_(step|decode|run|scan)/",
    "experts": r"\b(grouped|gated|grouped_scaled)_product\b",
    "float8 experts": r"\bgrouped_float8_product\b",
    "packed experts": r"\b(grouped|gated)_packed_product\b",
    "quantized": r"\bquantized_product\b",
    "float8": r"\bfloat8_product\b",
    "experts of many": r"\b(grouped|gated)_product_of_many\b",
    "float8 of many": r"\bfloat8_product_of_many\b",
    "float8 experts of many": r"\bgrouped_float8_product_of_many\b",
}
# Whose FLOPs follow from shapes.
COUNTED = ("quantized", "float8", "experts of many", "float8 of many", "float8 experts of many")
WITH_SHARED = "products_with_shared"  # in the source of products whose last operand is the weights of shared experts
_SHAPE = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](?!\{[^}]*S\(1\))")  # S(1) is a TPU's own memory
_ANY_SHAPE = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
# Custom calls that only name memory or say what is known of a value.
_FREE_TARGETS = frozenset(("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "Sharding"))
WEIGHT_BYTES = 1 << 20
KNOWN_TURNS = r'"known_trip_count":\{"n":"(\d+)"'  # of a loop, which then has no condition to run
BY_KERNELS = {"ONE_SHOT": "one-shot", "TWO_SHOT": "two-shot"}  # of all-reduces
RECURS = 3  # inputs of one type are taken for those of layers
_BITS = {"pred": 8, "token": 0, "opaque": 0}


@dataclass(frozen=True)
class Launch:
    """One kernel or copy.

    Attributes:
      name: of the HLO instruction.
      kind: "attention", "merge" (of its splits), "states" (of gated delta-nets), "experts" (products with experts, all
        of them counted), "float8 experts" and "packed experts" (the same of rows in float8, and of weights of 4 bits),
        "quantized" (products with weights that our kernel converts), "float8" (of rows in float8 with such weights),
        "experts of many", "float8 of many" and "float8 experts of many" (by Hopper's kernels for many rows),
        "pallas" (our other kernels), "product" (of matrices), "prefetch" (a TPU copies beside its kernels), a
        collective's own name such as "all-reduce", or "small" (all else).
      source: the JAX operation that it was made for.
      bytes_read, bytes_written, flops: of one run; see the module.
      matrix_bytes: what of bytes_read is of inputs that recur, as the matrices of layers do.
      shared_bytes: what of bytes_read is weights of shared experts, in products with experts.
      is_branched: whether another side of a condition lacks it.
      times: how often it runs in one call of the program, more than once inside a loop; 0 if that is unknown.
      peers: the devices that take part in a collective.
      by: what carries a collective out: "one-shot" and "two-shot" kernels of XLA's, or a library if empty.
    """

    name: str
    kind: str
    source: str
    bytes_read: int
    bytes_written: int
    flops: int
    times: int
    matrix_bytes: int = 0
    peers: int = 0
    shared_bytes: int = 0
    is_branched: bool = False
    by: str = ""


@dataclass(frozen=True)
class _Instruction:
    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    rest: str  # the attributes
    is_root: bool

    def attribute(self, pattern: str) -> str:
        found = re.search(pattern, self.rest)
        return found[1] if found else ""


def launches(text: str, uncounted: Collection[tuple[int, ...]] = ()) -> list[Launch]:
    """The launches of a program in the order of its schedule; Pallas calls don't count arrays of `uncounted` shapes."""
    return list(_Module(text, uncounted).launches())


class _Module:
    def __init__(self, text: str, uncounted: Collection[tuple[int, ...]]) -> None:
        self._uncounted = {",".join(map(str, dims)) for dims in uncounted}
        self._computations: dict[str, list[_Instruction]] = {}
        self._entry = ""
        for line in text.splitlines():
            if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
                current = self._computations.setdefault(header[2], [])
                self._entry = header[2] if header[1] else self._entry
            elif " = " in line and line[:1] == " ":
                current.append(_parse(line))
        inputs = Counter(i.type for i in self._computations.get(self._entry, []) if i.opcode == "parameter")
        self._recurring = {type_ for type_, count in inputs.items() if count >= RECURS}

    def launches(self) -> Iterator[Launch]:
        yield from self._in(self._entry, 1)

    def _in(self, computation: str, times: int) -> Iterator[Launch]:
        by_name = {each.name: each for each in self._computations[computation]}
        copies = Counter(each.operands[0] for each in by_name.values() if each.opcode == "copy-start")
        sides = self._sides(by_name)
        for each in by_name.values():
            if each.opcode in FREE or each.opcode.endswith("-done"):
                continue
            if each.attribute(r'custom_call_target="([^"]*)"') in _FREE_TARGETS:
                continue
            if each.opcode in STARTS:
                if "cross_program_prefetch_index" in each.rest and copies[each.operands[0]] > 1:
                    continue  # the step before has fetched it, with the other copy
                copied = _copied(each, times)
                yield replace(copied, matrix_bytes=copied.bytes_read * self._recurs(each.operands[0], by_name))
                continue
            if each.opcode == "conditional":
                inside = self._in(_branches(each)[sides[_named(each.operands[0], by_name)]], times)
                yield from (replace(launch, is_branched=True) for launch in inside)
                continue
            count = int(each.attribute(KNOWN_TURNS) or 0) if each.opcode == "while" else 1
            parts = "body" if each.opcode == "while" and count else "calls|to_apply|body|condition"
            called = re.findall(rf"\b(?:{parts})=\{{?%?([\w.\-]+)", each.rest)
            if each.opcode in CONTAINERS and called:
                for name in called:
                    yield from self._in(name, times * count)
            else:
                yield self._launch(each, by_name, times)

    def _sides(self, by_name: dict[str, _Instruction]) -> dict[str, int]:
        """The number of the largest side of each condition, by the name of what decides it."""
        sizes: dict[str, dict[int, tuple[int, int]]] = {}
        for each in by_name.values():
            if each.opcode == "conditional":
                of_sides = sizes.setdefault(_named(each.operands[0], by_name), {})
                for side, branch in enumerate(_branches(each)):
                    inside = list(self._in(branch, 1))
                    kernels, moved = of_sides.get(side, (0, 0))
                    kernels += sum(launch.times for launch in inside)
                    of_sides[side] = kernels, moved + sum(i.bytes_read + i.bytes_written for i in inside)
        return {name: max(of_sides, key=lambda side: of_sides[side]) for name, of_sides in sizes.items()}

    def _launch(self, each: _Instruction, by_name: dict[str, _Instruction], times: int) -> Launch:
        inside = list(self._with_scope(each, by_name))
        types = [_type_of(operand, by_name) for operand in each.operands]
        for call, scope in inside:
            if collective := kind_of(call.opcode):  # on a TPU it may be fused with what follows
                return _exchange(each, collective, call, scope, times)
            if any(part in call.attribute(r'custom_call_target="([^"]*)"') for part in PALLAS_TARGETS):
                kind = next((kind for kind, pattern in KERNELS.items() if re.search(pattern, _source(call))), "pallas")
                read = sum(self._counted(_type_of(operand, scope)) for operand in call.operands)
                flops = _quantized_flops(call, scope) if kind in COUNTED else 0
                shared = self._counted(_type_of(call.operands[-1], scope)) if WITH_SHARED in _source(call) else 0
                written = self._counted(call.type)
                recurring = [operand for operand in call.operands if self._recurs(operand, scope)]
                matrix = sum(self._counted(_type_of(operand, scope)) for operand in recurring)
                return Launch(each.name, kind, _source(call), read, written, flops, times, matrix, shared_bytes=shared)
        flops = sum(self._flops(i, scope) for i, scope in inside)
        reads = [self._read_of(each, number, num_bytes(type_)) for number, type_ in enumerate(types)]
        matrix = sum(n for n, operand in zip(reads, each.operands, strict=True) if self._recurs(operand, by_name))
        is_product = flops or "cublas" in each.rest or any(i.opcode == "convolution" for i, _ in inside)
        if sum(reads) >= WEIGHT_BYTES and any(_is_weight(operand, by_name) for operand in each.operands):
            is_product = True
        if any(i.opcode == "reduce" and _source(i).endswith("dot_general") for i, _ in inside):
            is_product = is_product or any(_is_fetched(type_) for type_ in types)
        kind = "product" if is_product else "small"
        return Launch(each.name, kind, _source(each), sum(reads), self._written(each), flops, times, matrix)

    def _recurs(self, operand: str, scope: dict[str, _Instruction]) -> bool:
        found = _input_of(operand, scope)
        return found is not None and found.type in self._recurring

    def _counted(self, type_: str) -> int:
        return sum(_bytes(dtype, dims) for dtype, dims in _SHAPE.findall(type_) if dims not in self._uncounted)

    def _with_scope(
        self, each: _Instruction, scope: dict[str, _Instruction]
    ) -> Iterator[tuple[_Instruction, dict[str, _Instruction]]]:
        yield each, scope
        for name in re.findall(r"\bcalls=%?([\w.\-]+)", each.rest):
            inside = {inner.name: inner for inner in self._computations.get(name, [])}
            for inner in inside.values():
                yield from self._with_scope(inner, inside)

    def _flops(self, each: _Instruction, scope: dict[str, _Instruction]) -> int:
        if each.opcode == "convolution":
            return _convolution_flops(each, scope)
        if each.opcode == "dot":
            contracted = each.attribute(r"lhs_contracting_dims=\{([\d,]*)\}")
        elif "cublas" in each.rest and each.opcode == "custom-call":
            contracted = re.sub(r'"', "", each.attribute(r'"lhs_contracting_dimensions":\[([^\]]*)\]'))
        else:
            return 0
        left = _ANY_SHAPE.search(_type_of(each.operands[0], scope))
        out = _ANY_SHAPE.search(each.type)
        if left is None or out is None or not contracted:
            return 0
        dims = _dims(left[2])
        return 2 * math.prod(_dims(out[2])) * math.prod(dims[int(axis)] for axis in contracted.split(","))

    def _read_of(self, each: _Instruction, number: int, whole: int) -> int:
        """Bytes read of the operand of that number."""
        if each.opcode in READS_PART:
            return num_bytes(each.type) if number == 0 else whole
        if each.opcode in WRITES_PART:
            return 0 if number == 0 else whole
        if each.opcode != "fusion":
            return whole
        return min(whole, self._read_inside(each.attribute(r"\bcalls=%?([\w.\-]+)"), number, whole))

    def _read_inside(self, computation: str, number: int, whole: int) -> int:
        body = self._computations[computation]
        names = self._views(body, number)
        if any(i.is_root and i.name in names for i in body):
            return whole
        read = 0
        for i in body:
            places = [place for place, operand in enumerate(i.operands) if operand in names]
            if i.name not in names:
                read += sum(self._read_of(i, place, whole) for place in places)
        return read

    def _views(self, body: list[_Instruction], number: int) -> set[str]:
        """Names of the parameter of that number: its own, and those of bitcasts of it, which may be fusions inside."""
        names = {i.name for i in body if i.opcode == "parameter" and i.operands == (str(number),)}
        for i in body:
            if len(i.operands) == 1 and i.operands[0] in names and (i.opcode == "bitcast" or self._is_bitcast(i)):
                names.add(i.name)
        return names

    def _is_bitcast(self, each: _Instruction) -> bool:
        """Whether it is a fusion of nothing but bitcasts, as a TPU's weights pass into products."""
        called = self._computations.get(each.attribute(r"\bcalls=%?([\w.\-]+)"), []) if each.opcode == "fusion" else []
        return bool(called) and all(i.opcode in ("parameter", "bitcast") for i in called)

    def _written(self, each: _Instruction) -> int:
        root = each
        while root.opcode == "fusion":
            root = next(i for i in self._computations[root.attribute(r"\bcalls=%?([\w.\-]+)")] if i.is_root)
        if root.opcode in WRITES_PART and root is not each:
            body = next(b for b in self._computations.values() if root in b)
            scope = {i.name: i for i in body}
            return num_bytes(_type_of(root.operands[WRITES_PART[root.opcode]], scope))
        if "cublas" in each.rest:  # beside the product it has room to work in
            return num_bytes(_elements(each.type)[0]) if each.type.startswith("(") else num_bytes(each.type)
        return num_bytes(each.type)


def _branches(conditional: _Instruction) -> list[str]:
    """The computations of a condition's sides; of a truth's the one for true comes first."""
    if numbered := conditional.attribute(r"\bbranch_computations=\{([^}]*)\}"):
        return re.findall(r"[\w.\-]+", numbered)
    return [conditional.attribute(rf"\b{side}_computation=%?([\w.\-]+)") for side in ("true", "false")]


def _named(operand: str, scope: dict[str, _Instruction]) -> str:
    """The name of what an operand is, or is a bitcast or a copy of."""
    while (found := scope.get(operand)) is not None and found.opcode in ("bitcast", "copy"):
        operand = found.operands[0]
    return operand


def _exchange(each: _Instruction, kind: str, call: _Instruction, scope: dict[str, _Instruction], times: int) -> Launch:
    """A collective, with the bytes of its arrays wherever they lie."""
    read = sum(_bytes(*shape) for name in call.operands for shape in _ANY_SHAPE.findall(_type_of(name, scope)))
    results = call.type
    parts = _elements(call.type) if call.opcode.endswith("-start") and call.type.startswith("(") else []
    if parts and (parts[0].startswith("(") or call.opcode != "all-reduce-start"):  # the operands stand before them
        results = parts[1]
    if "AllReduceScatterFusion" in each.rest:  # a TPU's: it sums over a ring that leaves each device its part
        kind, results = "reduce-scatter", each.type
    written = sum(_bytes(*shape) for shape in _ANY_SHAPE.findall(results))
    by = BY_KERNELS.get(call.attribute(r'"kernel_strategy":"KERNEL_STRATEGY_TRITON_(\w+)"'), "")
    return Launch(each.name, kind, _source(call), read, written, 0, times, peers=num_peers(call.rest), by=by)


def _quantized_flops(call: _Instruction, scope: dict[str, _Instruction]) -> int:
    """Of rows `[T, I]` times weights `[O, ..]`, which are its first operands; int4 comes in words of 16 outputs.

    Of a stack `[E, O, I]` each row has one matrix.
    """
    rows, weights = (_ANY_SHAPE.search(_type_of(name, scope)) for name in call.operands[:2])
    assert rows is not None and weights is not None
    side = OUTPUTS_OF_WORDS if weights[1] == "u32" else 1
    is_stack = re.search(r"_product_of_many\b", _source(call)) and weights[2].count(",") == 2
    return 2 * math.prod(_dims(rows[2])) * _dims(weights[2])[1 if is_stack else 0] * side


def _convolution_flops(each: _Instruction, scope: dict[str, _Instruction]) -> int:
    """A product as XLA writes it for TPUs: weights of several axes are a window over an input of one place."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->", each.rest)
    shapes = [_ANY_SHAPE.search(type_) for type_ in (each.type, *(_type_of(name, scope) for name in each.operands))]
    if labels is None or None in shapes:
        return 0
    out, left, weights = (_dims(shape[2]) for shape in shapes if shape is not None)
    inputs, window = dict(zip(labels[1], left, strict=True)), dict(zip(labels[2], weights, strict=True))
    places = (min(size, inputs[axis]) for axis, size in window.items() if axis.isdigit())
    return 2 * math.prod(out) * window["i"] * math.prod(places)


def _copied(each: _Instruction, times: int) -> Launch:
    """A copy that runs beside the kernels, between a TPU's HBM and its own memory."""
    source, copy = (_elements(each.type)[place] for place in STARTS[each.opcode])
    moved = max(
        (_bytes(*shape) for shape in _ANY_SHAPE.findall(_elements(each.type)[STARTS[each.opcode][1]])), default=0
    )
    read, written = (moved if _SHAPE.search(type_) else 0 for type_ in (source, copy))
    return Launch(each.name, "prefetch", _source(each), read, written, 0, times)


def _parse(line: str) -> _Instruction:
    name, rest = line.split(" = ", 1)
    type_, rest = _first_word(rest)
    opcode, rest = rest.split("(", 1)
    inside, rest = _until_closed(rest)
    names = re.findall(r"%([\w.\-]+(?:#\d+)?)", inside) if opcode != "parameter" else [inside]
    is_root = name.lstrip().startswith("ROOT")
    return _Instruction(name.split("%")[-1].strip(), opcode, type_, tuple(names), rest, is_root)


def _first_word(text: str) -> tuple[str, str]:
    """The type at the beginning, and what follows it; blanks inside parentheses don't end it."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter in "({[") - (letter in ")}]")
        if letter == " " and depth == 0:
            return text[:place], text[place + 1 :]
    return text, ""


def _until_closed(text: str) -> tuple[str, str]:
    """What stands before the parenthesis that closes, and after it."""
    depth = 1
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[:place], text[place + 1 :]
    return text, ""


def _type_of(operand: str, scope: dict[str, _Instruction]) -> str:
    name, _, element = operand.partition("#")
    found = scope.get(name)
    if found is None:
        return ""
    if found.opcode == "get-tuple-element":
        return found.type
    return _elements(found.type)[int(element)] if element else found.type


@functools.cache
def _elements(type_: str) -> list[str]:
    """The types of a tuple's elements."""
    found, begin, depth = [], 1, 0
    for place, letter in enumerate(type_):
        depth += (letter in "({[") - (letter in ")}]")
        if (letter == "," and depth == 1) or depth == 0:
            found.append(type_[begin:place].strip())
            begin = place + 1
            if depth == 0:
                break
    return found


def _is_weight(operand: str, scope: dict[str, _Instruction]) -> bool:
    """Whether it is a large input in a format of weights: XLA multiplies one row by it as a sum, without a dot."""
    found = _input_of(operand, scope)
    is_format = found is not None and found.type.startswith(("bf16", "f16", "f8"))
    return is_format and found is not None and num_bytes(found.type) >= WEIGHT_BYTES


def _is_fetched(type_: str) -> bool:
    """Whether it is a large array in a TPU's own memory, where its matrices are fetched to."""
    return not num_bytes(type_) and sum(_bytes(*shape) for shape in _ANY_SHAPE.findall(type_)) >= WEIGHT_BYTES


def _input_of(operand: str, scope: dict[str, _Instruction]) -> _Instruction | None:
    """The parameter that an operand is, or is a bitcast of."""
    found = scope.get(operand.partition("#")[0])
    while found is not None and found.opcode == "bitcast":
        found = scope.get(found.operands[0])
    return found if found is not None and found.opcode == "parameter" else None


def _source(each: _Instruction) -> str:
    return each.attribute(r'op_name="([^"]*)"')


def num_bytes(type_: str) -> int:
    """Bytes of an HLO type such as `bf16[64,128]{1,0}`, or of all elements of a tuple."""
    return sum(_bytes(dtype, dims) for dtype, dims in _SHAPE.findall(type_))


def _bytes(dtype: str, dims: str) -> int:
    digits = re.search(r"\d+", dtype)
    bits = _BITS.get(dtype, int(digits[0]) if digits else 8)
    return math.prod(_dims(dims)) * bits // 8


def _dims(dims: str) -> list[int]:
    return [int(size) for size in dims.split(",") if size]
