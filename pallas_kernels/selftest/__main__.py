"""The process that tests kernels: reads a request, says what it is about to run, runs it, says what came of it.

It ends after a failure, since a device or a driver may not recover from one, and leaves the rest to the next process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping

from pallas_kernels import tuning
from pallas_kernels.choice import AUTO, XLA
from pallas_kernels.dispatch import ImpossibleBackend
from pallas_kernels.selftest import cases
from pallas_kernels.selftest.case import Case
from pallas_kernels.selftest.process import answer
from pallas_kernels.selftest.report import (
    PASSED,
    RAISED,
    UNTESTED,
    WRONG,
    Begun,
    Ended,
    News,
    Request,
    Verdict,
)
from pallas_kernels.selftest.shapes import KernelShapes
from pallas_kernels.target import target_device

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"  # begins XLA's message
MAX_NOTE = 300  # characters
_OF_HEADS = ("rotate_and_store", "store_kv", "store_and_decode", "paged_decode_attention", "paged_extend_attention")
Cases = Mapping[str, Callable[[KernelShapes], Iterator[Case]]]


def main() -> None:
    """Tests the kernels that standard input asks for."""
    answer(lambda request, say: test(request, say, cases.CASES_OF))


def test(request: Request, say: Callable[[News], None], cases_of: Cases) -> None:
    """Tests the operations of a request of which nothing is known, up to the first failure, and says so."""
    try:
        device = target_device()
    except RuntimeError as error:
        say(Ended(f"JAX finds no device: {_short(error)}"))
        return
    if device.platform != request.platform:
        say(Ended(f"JAX found a {device.platform} ({device.kind}) in place of a {request.platform}"))
        return
    known = list(request.known)
    done = {each.op for each in known if not each.failed}
    for op, make in cases_of.items():
        if op in done or not _is_used(op, request, known):
            continue
        verdict = _verdict_of(op, make, request, say)
        known.append(verdict)
        say(verdict)
        if verdict.failed:
            return
    say(Ended())


def _is_used(op: str, request: Request, known: list[Verdict]) -> bool:
    """Whether the model uses it.

    A kernel that rotates stores too, only some devices store in a decode, where it doesn't XLA stores latents, only
    mixtures have experts, and few models states, an index, or weights in groups or of float8. Windows and groups of
    tokens have attention of their own.
    """
    shapes = KernelShapes.from_json(request.shapes)
    if op == "attend_to_groups":
        return bool(shapes.grouped)
    if op in _OF_HEADS and shapes.grouped:
        return False
    if op in ("store_kv", "store_and_decode") and shapes.has_latents:
        return False
    if op == "grouped_product":
        return bool(shapes.experts)
    if op == "quantized_product":
        return any(each.is_in_groups for each in shapes.matrices)
    if op == "float8_product":
        of_matrices = any(each.may_be_in_float8 for each in shapes.matrices)
        return of_matrices or any(each.may_be_in_float8 for each in shapes.experts)
    if op == "delta_decode":
        return bool(shapes.states)
    if op == "attend_to_chosen":
        return any(each.num_chosen for each in shapes.latents)
    if op == "score_tokens":
        has_chosen = any(each.num_chosen for each in shapes.latents)
        return has_chosen or any(each.num_chosen for each in shapes.grouped)
    if op == "ordered_product":
        return shapes.in_fixed_order
    if op == "store_and_decode":  # else a store and a decode follow each other, which have tests of their own
        parts = {request.choice["store_kv"], request.choice["paged_decode_attention"]}
        return request.choice[op] not in (AUTO, XLA) or (bool(tuning.preferred_backends(op)) and parts == {AUTO})
    on_xla = any(each.op == "rotate_and_store" and each.backend == XLA for each in known)
    return op != "store_kv" or on_xla


def _verdict_of(
    op: str, make: Callable[[KernelShapes], Iterator[Case]], request: Request, say: Callable[[News], None]
) -> Verdict:
    """Of the first backend that can run the operation."""
    shapes = KernelShapes.from_json(request.shapes)
    for backend in _backends(op, request):
        if backend == XLA:
            return Verdict(op, XLA, UNTESTED, "what others are compared with")
        calls = _said(make(shapes), functools.partial(_say_begun, say, op, backend))
        try:
            return Verdict(op, backend, *_outcome(calls, backend, request.interpret))
        except ImpossibleBackend as error:
            if _asked(op, request) != AUTO:
                return Verdict(op, backend, RAISED, _short(error))
    raise AssertionError("xla comes last")


def _say_begun(say: Callable[[News], None], op: str, backend: str, case: str) -> None:
    say(Begun(op, backend, case))


def _said(calls: Iterable[Case], say: Callable[[str], None]) -> Iterator[Case]:
    """The cases, each with a word before its arrays are made, and before it is handed out."""
    say("arrays")
    for case in calls:
        say(case.name)
        yield case
        say("arrays")


def _asked(op: str, request: Request) -> str:
    """The backend that a flag names, or "auto". No flag does for `ordered_product`, which has one kernel."""
    return request.choice.get(op, AUTO)


def _backends(op: str, request: Request) -> list[str]:
    """The backend that is asked for; or those that "auto" takes, without any that failed, and XLA."""
    if _asked(op, request) != AUTO:
        return [_asked(op, request)]
    failed = {each.backend for each in request.known if each.op == op and each.failed}
    return [each for each in tuning.preferred_backends(op) if each not in failed] + [XLA]


def _outcome(calls: Iterable[Case], backend: str, interpret: bool) -> tuple[str, str]:
    """The verdict on a backend and a note. Raises `ImpossibleBackend` if it can run none of the cases."""
    refusal: ImpossibleBackend | None = None
    ran, name = False, "arrays"
    try:
        for case in calls:
            name = case.name
            try:
                error = case.error(backend, interpret)
            except ImpossibleBackend as impossible:
                refusal = impossible
                continue
            ran = True
            if not error <= case.tolerance:
                found = f"{name}: error {error:.1e} of a row's norm, allowed {case.tolerance:.0e}"
                return WRONG, found + case.second_opinion()
    except Exception as problem:  # compilers and drivers raise errors of any class
        verdict = UNTESTED if OUT_OF_MEMORY in str(problem) else RAISED
        return verdict, f"{name}: {_short(problem)}"
    if refusal is not None and not ran:
        raise refusal
    return PASSED, ""


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_NOTE]


if __name__ == "__main__":
    main()
