"""Random histories of all resources at once: whatever a request has taken is given back, whatever its end.

Adapters, images, the host tier, states with snapshots, drafts, grammars and priorities in several mixtures, each
scarce; requests that finish, are aborted, retracted, preempted, late, or fail by a fault of ours; replaced adapters,
other weights, flushes. The oracle is the hash chain of each request's tokens, images and adapter. After every event the
accounts of each resource are those of the requests that there are (`Resource.check`, which `CheckedScheduler` asks
for); when all have ended, nothing is held.
"""

from __future__ import annotations

import copy
import itertools
import logging
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as changed

from jaxsgl.batch.buckets import Capacity
from jaxsgl.batch.build import BatchBuilder, Work
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.batch.patches import TowerCapacity, TowerShape
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.messages.orders import Abort, LoadAdapter
from jaxsgl.messages.replies import Refusal, RefusalKind
from jaxsgl.requests.grammar import Grammar
from jaxsgl.requests.media import MediaLimits
from jaxsgl.requests.request import FinishReason, Request
from jaxsgl.scheduler.latency import Latency
from jaxsgl.scheduler.orders.adapters import load
from jaxsgl.scheduler.req import Adapter, Req
from jaxsgl.scheduler.resources.adapters import AdapterDraft
from jaxsgl.scheduler.resources.host_tier import HostDraft
from jaxsgl.scheduler.resources.images import ImageDraft
from jaxsgl.scheduler.resources.resource import Resource, ResourceDraft
from jaxsgl.scheduler.scheduler import Scheduler
from jaxsgl.scheduler.speculation.drafter import drafts_nothing
from jaxsgl.testing.engine import RetractEvery
from tests.checked import CheckedApplier, CheckedScheduler
from tests.choices import Choices, check_histories
from tests.grids import count
from tests.scheduler.drafters import Asking
from tests.scheduler.grammars import GrammarsInTurn
from tests.scheduler.image_requests import PATCH_LEN, PLACEHOLDER, asked, expected
from tests.scheduler.serving import VOCAB
from tests.scheduler.tiered import Stepper, tier_of

NUM_BYTES = 80
MUTABLE = (
    "_used", "_removed", "_placements", "_keeps_places", "_begun", "_ahead", "_coming", "_taken", "_left", "seconds",
)  # fmt: skip
NAMES = ("one", "two", "three")
GRAMMARS = ("0 5", "2 40", "0 9 fails", "none")  # tests/scheduler/grammars.py
MASKS: list[dict[str, Any]] = [{"grammar": Grammar.regex(text)} for text in GRAMMARS] + [{"bad_word_ids": ((7,),)}]
POISON = 997  # a chunk that has it can't be built
KINDS = (  # what a history has
    "images adapters tier", "images tier", "adapters tier", "images states", "images adapters tier drafts",
    "images tier priorities", "images states priorities", "images adapters tier drafts priorities late",
    "images adapters tier drafts grammars", "adapters states drafts grammars priorities late",
)  # fmt: skip


class FailingBuilder(BatchBuilder):
    """Fails at chunks with a certain token."""

    def extend(self, works: Sequence[Work]) -> StepInputs:
        if any(POISON in work.token_ids for work in works):
            raise ValueError("poison")
        return super().extend(works)


class FailingStepper(Stepper):
    """Lets requests fail.

    Attributes:
      refused: why, by request id.
    """

    refused: dict[str, Refusal]

    def settle(self) -> None:
        for reply in self.scheduler.take_replies():
            self.outputs.setdefault(reply.request_id, []).extend(reply.token_ids)
            if reply.refusal is not None:
                self.refused[reply.request_id] = reply.refusal
            elif reply.finish_reason is not None:
                self.ended[reply.request_id] = reply.finish_reason


def held(scheduler: Scheduler) -> Iterator[str]:
    """What requests hold of any resource, in words."""
    state, tier = scheduler.state, scheduler.tier
    if state.images is not None:
        if state.images.pool.num_locked:
            yield f"{state.images.pool.num_locked} rows of images"
        if state.images.sliced is not None:
            yield "an image that is encoded in parts"
    for adapter in {*state.adapters.by_name.values(), *state.adapters.on_device.values()}:
        if adapter.num_requests or adapter.num_admitted:
            yield f"{adapter.name} by {adapter.num_requests} requests, {adapter.num_admitted} of them admitted"
    if state.adapters.rows.number_of_row.any():
        yield "adapters on rows of no request"
    if tier is not None:
        if any(entry.num_loads for entry in tier.host.all()):
            yield "host pages that are pinned"
        if tier.is_writing:
            yield "host pages that are written"
    if scheduler.cache.num_available != scheduler.cache.num_pages - 1:
        yield "pages"
    if scheduler.cache.table.num_free_rows != state.capacity.num_rows:
        yield "rows"


class History:
    """A scheduler with some resources, and what may happen to its requests."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        one_of = choices.one_of
        kind = one_of(KINDS).split()
        self.has_images, self.has_adapters, has_tier = ("images" in kind, "adapters" in kind, "tier" in kind)
        self.has_priorities, self.are_late = "priorities" in kind, "late" in kind
        self.has_grammars = "grammars" in kind
        sizes = Capacity(4, one_of((18, 26, 40)), one_of((3, 2, 5)), 64, one_of((64, 9, 24, 6)), VOCAB)
        max_itl_ms = one_of((None, 1000.0))
        if self.has_images:
            limits = MediaLimits(PLACEHOLDER, PLACEHOLDER - 1, patch_size=1)
            sliced_from = None if max_itl_ms is None else 16
            shape = TowerShape(2, 4, PATCH_LEN, num_layers=3)
            host_bytes = 4 * one_of((20, 0))
            tower = TowerCapacity(shape, one_of((12, 18)), 64, 1, host_bytes=host_bytes, sliced_from=sliced_from)
            sees_ahead = sizes.max_extend_tokens >= 24 and one_of((False, True))  # room for an image and all rows
            sizes = replace(sizes, media=limits, tower=tower, has_axes=True, sees_ahead=sees_ahead)
        if self.has_adapters:
            sizes = replace(sizes, max_adapters=2, adapter_columns=8)
        if "states" in kind:
            sizes = replace(sizes, num_snapshots=one_of((8, 1, 3)))
        every = one_of((None, 5, 2))
        config = SchedulingConfig(
            enable_mixed_chunk=one_of((False, True)),
            max_itl_ms=max_itl_ms,
            enable_priority_scheduling=self.has_priorities,
            priority_scheduling_preemption_threshold=0,
            queue_timeout_s=8.0 if self.are_late else None,
            running_timeout_s=10.0 if self.are_late else None,
        )
        self.stepper = FailingStepper(
            sizes,
            tier_of(sizes, one_of((40, 6)), most_pages=2) if has_tier else None,
            timeout_s=5.0,
            max_drafts=4 if "drafts" in kind else 0,
            drafter_of=(lambda request: Asking()) if "drafts" in kind else drafts_nothing,
            checked=CheckedScheduler,
            config=config,
            retract_also=None if every is None else RetractEvery(every),
            make_builder=FailingBuilder,
            grammars=GrammarsInTurn(VOCAB, lambda: self.stepper.now_s),
        )
        self.stepper.refused = {}
        self.scheduler = self.stepper.scheduler
        self.requests: dict[str, Request] = {}
        self.weights: dict[str, tuple[int, int]] = {}  # of the model and each request's adapter, at its arrival
        self.aborted: set[str] = set()
        self.base = 0  # weights of the model
        self.mixed: set[str] = set()  # requests that ran with several weights
        self.weights_of: dict[str, int] = {}
        self.replaced: list[Adapter] = []
        for name in NAMES if self.has_adapters else ():
            self.load_adapter(name)
        timing = self.scheduler.state.timing
        if isinstance(timing, Latency):
            bucket = self.scheduler.state.buckets.extend(6, 1)
            timing.launched(bucket, 0.0, 0.0)
            timing.collected(0.0)
            timing.launched(bucket, 0.0, 0.0, num_patches=64)
            timing.collected(one_of((0.6, 64.0, 3.0)))

    def play(self) -> None:
        """Plays the whole history."""
        events = (
            self.turns, self.arrive, self.arrive_and_turn, self.arrive_and_turn, self.arrive_and_turn, self.arrive,
            self.abort, self.hold_gathers, self.operate, self.replace_adapter, self.wait,
            self.interrupt, self.interrupt,
        )  # fmt: skip
        while not self.choices.are_over:
            self.choices.one_of(events)()
        self.end()

    def load_adapter(self, name: str) -> None:
        weights = len(self.weights_of) + 1 + len(self.replaced)
        table, store = self.scheduler.state.adapters, self.stepper.engine.adapters
        folder = f"{weights}r{1 + weights % 4}"
        load(table, store, LoadAdapter(0, name, folder), store.stage(folder), self.replaced.append)
        self.weights_of[name] = weights

    def arrive(self) -> None:
        """A request of text or images, with or without an adapter; some are doomed to fail."""
        one_of = self.choices.one_of
        texts: list[list[int | tuple[int, int]]] = [[3], [41], [30]]
        images: list[list[int | tuple[int, int]]] = [[2, (1, 9), 3], [9, (2, 12), 1, (1, 9)], [(3, 11), 12]]
        parts = one_of([*texts, *images] if self.has_images else texts)
        request_id = f"r{len(self.requests)}"
        request = asked(request_id, parts, one_of((6, 1, 20)))
        base = one_of((0, 0, 1))
        ids = [token if token == PLACEHOLDER else token + base for token in request.prompt_ids]
        request = changed(request, prompt_ids=ids)
        if self.has_adapters:
            request = changed(request, adapter=one_of(("", "", *NAMES)))
        if self.has_priorities:
            request = changed(request, priority=one_of((0, 0, 5)))
        doom = one_of((None, None, None, None, None, "first", "last"))
        if doom == "first":
            media = tuple(changed(item, offset=item.offset + 1) for item in request.media)
            request = changed(request, prompt_ids=[POISON, *request.prompt_ids], media=media)
        elif doom == "last":
            request = changed(request, prompt_ids=[*request.prompt_ids, POISON])
        masks: dict[str, Any] = one_of(({}, {}, *MASKS)) if self.has_grammars else {}
        request = changed(request, sampling=changed(request.sampling, n=one_of((1, 1, 2)), **masks))
        self.requests[request_id] = request
        self.weights[request_id] = self.base, 1000 * self.weights_of.get(request.adapter, 0)
        self.stepper.receive(request)

    def arrive_and_turn(self) -> None:
        self.arrive()
        for _ in range(12):
            self.turn()

    def turns(self) -> None:
        for _ in range(self.choices.one_of(range(1, 7))):
            self.turn()

    def turn(self) -> None:
        if not self.scheduler.is_idle or self.stepper.num_in_flight:
            self.stepper.turn(collects=bool(self.stepper.num_in_flight))

    def interrupt(self) -> None:
        """Requests are amid their prompts as an operator does something."""
        self.arrive()
        self.arrive()
        for _ in range(self.choices.one_of((2, 3, 4, 5, 1))):
            self.turn()
        self.operate()

    def abort(self) -> None:
        if self.requests:
            self.aborted.add(request_id := self.choices.one_of(list(self.requests)))
            self.scheduler.receive([Abort(request_id, self.choices.one_of((None, None, 0, 1)))])
            for reply in self.scheduler.take_replies():
                assert reply.finish_reason is FinishReason.ABORT

    def hold_gathers(self) -> None:
        """Copies to the host take long, or end at last."""
        self.stepper.holds_gathers = self.choices.one_of((False, False, True))

    def wait(self) -> None:
        self.stepper.now_s += 6.0

    def operate(self) -> None:
        """Retracts all, drops what is cached, or takes other weights."""
        scheduler = self.scheduler
        act = self.choices.one_of((scheduler.retract_all, scheduler.flush_cache, self.exchange, self.exchange))
        scheduler.pause()
        while self.stepper.num_in_flight:
            self.stepper.turn()
        act()
        scheduler.check()
        self.stepper.settle()
        scheduler.resume()

    def exchange(self) -> None:
        """Other weights, which compute all that comes now; in the mode "retract" or "in_place"."""
        self.base += 1
        self.stepper.engine.swap_weights(self.base, None)
        if self.choices.one_of((False, True)):
            self.scheduler.retract_all()
        self.scheduler.retire_cache()
        self.mixed |= {req.request_id for req in self.scheduler.state.requests.all()}

    def replace_adapter(self) -> None:
        if self.has_adapters:
            self.load_adapter(self.choices.one_of(NAMES))

    def end(self) -> None:
        """Copies end, and all is served."""
        stepper = self.stepper
        stepper.holds_gathers = False
        stepper.run()
        assert list(held(self.scheduler)) == []
        for request_id, request in self.requests.items():
            if request_id not in self.aborted:
                self.check_end(request, stepper.outputs.get(request_id, []), stepper.refused.get(request_id))
        for adapter in self.replaced:
            self.scheduler.state.adapters.forget(adapter)  # asserts that no request has it
        self.scheduler.check()

    def check_end(self, request: Request, outputs: list[int], refused: Refusal | None) -> None:
        if refused is not None and refused.kind is RefusalKind.FAILED:
            assert POISON in (*request.prompt_ids, *outputs)
        elif refused is not None and refused.kind is RefusalKind.INVALID:
            grammar = request.sampling.grammar
            assert grammar is not None and grammar.text in ("0 9 fails", "none")
        elif refused is not None:
            assert self.are_late and refused.kind in (RefusalKind.WAITED, RefusalKind.RAN)
        elif POISON in request.prompt_ids:
            raise AssertionError(f"{request.request_id} was to fail")
        elif request.request_id in self.mixed:
            assert request.sampling.masked or len(outputs) == (request.sampling.max_tokens or 0) * request.sampling.n
        else:
            whole = expected(request, *self.weights[request.request_id])
            assert outputs == whole if request.sampling.n == 1 else sorted(outputs) == sorted(2 * whole)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Requests that fail by our fault are logged with their traceback, thousands of them here."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(count(1, 2)))
def test_what_was_taken_of_any_resource_is_given_back_in_every_end(part: int) -> None:
    """By night 3,000 histories, in parts that are drawn anew."""
    check_histories(lambda choices: History(choices).play(), count(25, 1_500), NUM_BYTES)


def test_a_question_to_a_draft_changes_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    num_asked: Counter[tuple[type[ResourceDraft], str]] = Counter()

    def watched(kind: type[ResourceDraft], name: str) -> Any:
        ask = getattr(kind, name)

        def asked_of(draft: ResourceDraft, *args: Any) -> Any:
            before = {field: copy.copy(value) for field, value in vars(draft).items() if field in MUTABLE}
            answer = ask(draft, *args)
            assert {field: value for field, value in vars(draft).items() if field in MUTABLE} == before
            num_asked[kind, name] += 1
            return answer

        return asked_of

    questions = tuple(itertools.product((AdapterDraft, HostDraft, ImageDraft), ("may_admit", "defers", "longest")))
    for kind, name in questions:
        monkeypatch.setattr(kind, name, watched(kind, name))
    rng = random.Random(1)
    for _ in range(12):
        History(Choices(rng.randbytes(NUM_BYTES))).play()
    assert min(num_asked[question] for question in questions) > 50


class Forgetful(Resource):
    """A resource that counts its requests and forgets one kind of end."""

    def __init__(self, forgets_ends: bool) -> None:
        self._forgets_ends = forgets_ends
        self._holders: set[Req] = set()

    def admitted(self, req: Req) -> None:
        self._holders.add(req)

    def left(self, req: Req, ends: bool) -> None:
        if ends is not self._forgets_ends:
            self._holders.discard(req)

    def check(self, requests: Any) -> None:
        assert self._holders == set(requests.admitted.values()), "held for a request that has left"


@pytest.mark.parametrize("forgets_ends", [False, True])
def test_a_resource_that_gives_nothing_back_is_caught(forgets_ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A retraction or an end that is forgotten fails the check after the event."""

    def play(choices: Choices) -> None:
        history = History(choices)
        state = history.scheduler.state
        state.resources = (*state.resources, Forgetful(forgets_ends))
        applier = history.scheduler._applier
        assert isinstance(applier, CheckedApplier)
        applier._resources = history.scheduler._resources = state.resources
        history.arrive()
        history.turns()
        history.turns()
        if not forgets_ends:
            history.operate()
        history.end()

    with pytest.raises(AssertionError, match="held for a request that has left"):
        play(Choices(bytes(NUM_BYTES)))
