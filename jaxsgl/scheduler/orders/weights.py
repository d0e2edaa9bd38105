"""`WeightOrders`: operators' orders about weights and memory, one after the other: update, release, resume.

    update   load while steps run -> come to rest -> retract, retire the cache, swap -> go on
    rename   come to rest -> go on
    release  come to rest -> give memory back; generation stays paused
    resume   load -> swap; take the pool again; generation goes on once all is back

"At rest" means that no step is in flight and none was collected in this turn, so each `Load` names the version of the
weights that made the tokens sent with it. An order that fails changes nothing, except that one which was to abort
requests may have done so. Knows no files and no arrays: `WeightStore` does that work. Called by control.py.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from typing import Protocol, TypeAlias

import msgspec

from jaxsgl.errors import StartupError
from jaxsgl.messages.orders import (
    Answer,
    MemoryTag,
    ReleaseMemory,
    ResumeMemory,
    SetWeightVersion,
    UpdateMode,
    UpdateReport,
    UpdateWeights,
    WeightOrder,
)
from jaxsgl.scheduler.scheduler import PauseReason
from jaxsgl.scheduler.serving import Serving

IDLE_POLL_S = 0.05

Turns: TypeAlias = Generator[None, None, str]  # yields once a turn; returns the text of the answer

logger = logging.getLogger(__name__)


class WeightStore(Protocol):
    """What an engine keeps in the device's memory and operators may exchange or release: weights and the KV pool.

    All methods but `stage_weights` are called between steps, when none is in flight.

    Attributes:
      weight_version: what the weights are called.
      released: parts that are not in memory now; no step may be submitted unless it is empty.
    """

    weight_version: str
    released: frozenset[MemoryTag]

    def stage_weights(self, folder: str | None) -> object:
        """Reads weights of the same model, ready for `swap_weights`; may be called from a thread while steps run.

        Without a folder, those that were released. Raises `StartupError` if these weights can't be served; nothing has
        changed then.
        """
        ...

    def swap_weights(self, staged: object, version: str | None) -> None:
        """Serves what `stage_weights` returned from now on, as `version`; if None, as the number of updates so far."""
        ...

    def release_memory(self, tag: MemoryTag) -> None:
        """Gives a part of the device's memory back. What is released already stays so.

        Raises `StartupError` if this engine can't; nothing has changed then.
        """
        ...

    def resume_memory(self, tag: MemoryTag, staged: object) -> None:
        """Takes a released part again, the weights as `staged`. Of the KV pool nothing is left that was cached."""
        ...


class Refused(Exception):
    """The order can't be carried out; the text says why."""


class WeightOrders:
    """The orders that are not done yet; an `Order` while there are any.

    Args:
      serving: its scheduler is brought to rest.
      weight_store: does the work.
      answer: takes the answers.
      loader: reads weights while steps run; a thread does if it is None.
    """

    def __init__(
        self,
        serving: Serving,
        weight_store: WeightStore,
        answer: Callable[[Answer], None],
        loader: Executor | None = None,
    ) -> None:
        self._serving, self._scheduler = serving, serving.scheduler
        self._weight_store = weight_store
        self._answer = answer
        self._waiting: deque[WeightOrder] = deque()
        self._number: int | None = None  # of the order in progress
        self._turns: Turns | None = None
        self._collected = False
        self._loader = loader or ThreadPoolExecutor(1, "load-weights")  # starts its thread with the first order

    @property
    def is_active(self) -> bool:
        """Whether an order is in progress or waits, so that `after_turn` will have news."""
        return self._turns is not None or bool(self._waiting)

    @property
    def why_paused(self) -> str:
        """What memory is still released, so that generation stays paused; empty if it doesn't."""
        released = self._weight_store.released
        return f"generation stays paused until these are back: {_names(released)}" if released else ""

    def handle(self, order: WeightOrder) -> None:
        """Carries `order` out after those that came before."""
        self._waiting.append(order)

    def withdraw(self, number: int) -> None:
        """Drops the order `number`; what it has held up goes on. Weights that are being read are thrown away."""
        self._waiting = deque(order for order in self._waiting if order.number != number)
        if self._turns is not None and self._number == number:
            self._turns.close()
            self._turns = None

    def after_turn(self, collected: bool) -> bool:
        """Advances the order in progress, and answers it once it is done; False if none is left."""
        self._collected = collected
        if self._turns is None and self._waiting:
            order = self._waiting.popleft()
            self._number, self._turns = order.number, self._begin(order, self._weight_store)
        if self._turns is not None and self._number is not None:
            try:
                next(self._turns)
            except StopIteration as done:
                self._turns = None
                self._answer(Answer(self._number, True, done.value))
            except Refused as refused:
                self._turns = None
                self._answer(Answer(self._number, False, str(refused)))
        return self.is_active

    def _begin(self, order: WeightOrder, weight_store: WeightStore) -> Turns:
        match order:
            case UpdateWeights():
                return self._update(order, weight_store)
            case SetWeightVersion():
                return self._rename(order, weight_store)
            case ReleaseMemory():
                return self._release(order, weight_store)
            case ResumeMemory():
                return self._resume(order, weight_store)

    def _update(self, order: UpdateWeights, weight_store: WeightStore) -> Turns:
        """All reading comes first, while requests run; from the swap on nothing can fail."""
        staged = yield from self._staged(order.folder, weight_store)
        try:
            yield from self._come_to_rest(order.mode)
            num_continued = self._scheduler.num_begun
            if order.mode is UpdateMode.RETRACT:
                self._scheduler.retract_all()
            self._scheduler.retire_cache()  # before, as a swap that fails may have changed some of the weights
            weight_store.swap_weights(staged, order.version)
        finally:
            self._go_on(weight_store)
        logger.info("weights %r of %s are served", weight_store.weight_version, order.folder)
        return msgspec.json.encode(UpdateReport(weight_store.weight_version, num_continued)).decode()

    def _rename(self, order: SetWeightVersion, weight_store: WeightStore) -> Turns:
        try:
            yield from self._come_to_rest(UpdateMode.IN_PLACE)
            weight_store.weight_version = order.version
        finally:
            self._go_on(weight_store)
        return ""

    def _release(self, order: ReleaseMemory, weight_store: WeightStore) -> Turns:
        try:
            yield from self._come_to_rest(UpdateMode.WAIT)
            try:
                for tag in order.tags:
                    weight_store.release_memory(tag)
            except StartupError as error:
                raise Refused(str(error)) from error
            if MemoryTag.KV_CACHE in order.tags:
                self._scheduler.retire_cache()
            if weight_store.released:
                self._scheduler.pause(PauseReason.RELEASED)
        finally:
            self._go_on(weight_store)
        logger.info("released: %s", _names(weight_store.released))
        return ""

    def _resume(self, order: ResumeMemory, weight_store: WeightStore) -> Turns:
        """Nothing runs while anything is released, so the scheduler is at rest."""
        for tag in order.tags:
            if tag not in weight_store.released:
                continue
            staged = None
            if tag is MemoryTag.WEIGHTS:
                staged = yield from self._staged(None, weight_store)
            try:
                weight_store.resume_memory(tag, staged)
            except Exception as error:
                logger.exception("%s can't be taken into memory again", tag.value)
                raise Refused(_words(error)) from error
        self._go_on(weight_store)
        return self.why_paused

    def _staged(self, folder: str | None, weight_store: WeightStore) -> Generator[None, None, object]:
        """Loads weights in a thread, and waits for them turn by turn."""
        loading = self._loader.submit(weight_store.stage_weights, folder)
        while not wait([loading], IDLE_POLL_S if self._serving.is_idle else 0).done:
            yield
        try:
            return loading.result()
        except StartupError as error:
            raise Refused(str(error)) from error
        except Exception as error:
            logger.exception("weights can't be loaded")
            raise Refused(_words(error)) from error

    def _come_to_rest(self, mode: UpdateMode) -> Generator[None, None, None]:
        """Waits until no step is in flight, and in the mode "wait" until the requests that have begun have ended.

        Requests that were retracted by a pause hold no KV, and don't count while that pause lasts.
        """
        scheduler = self._scheduler
        if mode is UpdateMode.ABORT:
            self._serving.abort_all()
        if mode is UpdateMode.WAIT:
            scheduler.pause_admission(True)
        else:
            scheduler.pause(PauseReason.UPDATE)
        while self._collected or scheduler.steps_in_flight or (mode is UpdateMode.WAIT and self._must_wait()):
            yield

    def _must_wait(self) -> bool:
        scheduler = self._scheduler
        if not scheduler.is_paused:
            return scheduler.num_begun > 0
        if scheduler.num_running:
            raise Refused(
                f"generation is paused, and {scheduler.num_running} requests that hold KV can't end: pause in the mode "
                "retract or abort, or update in the mode retract, abort or in_place"
            )
        return False

    def _go_on(self, weight_store: WeightStore) -> None:
        self._scheduler.pause_admission(False)
        self._scheduler.resume(PauseReason.UPDATE)
        if not weight_store.released:
            self._scheduler.resume(PauseReason.RELEASED)


def _names(tags: frozenset[MemoryTag]) -> str:
    return ", ".join(tag.value for tag in MemoryTag if tag in tags) or "nothing"


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
