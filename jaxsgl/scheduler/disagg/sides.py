"""`Side`: what stands between mailbox and scheduler in a server that computes one side of each request.

    mailbox --requests, aborts--> Side --requests whose time has come--> Scheduler
            <-----replies--------  |   <-----------replies-------------
                                   `--messages and pages, over a wire, with the servers of the other side

`PrefillSide` and `DecodeSide` put the state machine of their legs in front of a scheduler, which knows nothing of
them: a request with a room enters the scheduler when its two legs agree, and the answer of a prefill leg leaves when
decode has the pages. They carry out the machine's actions, on the wire and through the scheduler's queue of engine
operations. A request without a room is served whole. A server without --disaggregation-mode never imports this module.

`KvNames`: what the KV of a request's prompt is called, among servers and within this one.

    version             of weights and adapter: what computes the KV; its name is equal on servers that compute the
                        same, however often and under which names they have loaded an adapter
    ids and namespace   what the prefix cache of this server finds it by; that of an adapter is of one loading here

So KV of one adapter never comes to be used with another one: prefill and decode compare versions, and decode files what
it gets under its own loading. Sides ask for both each time, since adapters and weights may be exchanged.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import msgspec

from jaxsgl.batch.engine_api import PageLayout
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.cache.manager import CacheManager, namespace_of
from jaxsgl.cache.pages import IntArray
from jaxsgl.config.engine import DEFAULT_WEIGHT_VERSION
from jaxsgl.messages.orders import Abort
from jaxsgl.messages.replies import Load, Refusal, RefusalKind, Reply, TransferLoad
from jaxsgl.requests.media import hash_ids
from jaxsgl.requests.request import FinishReason, Request
from jaxsgl.scheduler.disagg.rooms import Action, Answer, Drop, Gather, Refuse, RoomLimits, Rooms, Send, Start, Version
from jaxsgl.scheduler.req import Adapter
from jaxsgl.scheduler.resources.adapters import AdapterTable
from jaxsgl.scheduler.scheduler import Scheduler
from jaxsgl.transfer.frames import Pages, Room, Rows, room_of
from jaxsgl.transfer.wire import Event, Wire

EXPIRE_S = 0.5  # between two looks for what has waited too long


class KvNames:
    """Names by the weights and adapters of this moment.

    Args:
      adapters: that are loaded.
      cache: knows how often weights were exchanged.
      weight_version: gives the name of the weights.
    """

    def __init__(self, adapters: AdapterTable, cache: CacheManager, weight_version: Callable[[], str]) -> None:
        self._adapters = adapters
        self._cache = cache
        self._weight_version = weight_version

    def version(self, request: Request) -> Version:
        """What would compute the prompt now. Under an adapter that is not loaded, the version of no KV."""
        name = self._weight_version()
        if request.adapter:
            adapter = self._adapter_of(request)
            name += f" with {'no adapter of that name' if adapter is None else f'adapter {adapter.digest}'}"
        return Version(name, self._cache.num_retired)

    def ids_and_namespace(self, request: Request) -> tuple[IntArray, bytes]:
        """What the prefix cache finds the prompt by; of an adapter that is not loaded, it finds nothing."""
        ids = hash_ids(request.prompt_ids, request.media)
        if not request.adapter:
            return ids, namespace_of(request.cache_salt, None, request.kv_source)
        adapter = self._adapter_of(request)
        identity = "" if adapter is None else adapter.identity
        return ids, namespace_of(request.cache_salt, identity, request.kv_source)

    def _adapter_of(self, request: Request) -> Adapter | None:
        return self._adapters.named(request.adapter)


class Side(ABC):
    """What both sides share; a `Serving`, which the loop calls as it calls the scheduler of another server.

    Args:
      scheduler: computes.
      wire: leads to the servers of the other side.
      layout: of pages on the host.
      limits: of rooms and their memory.
      weight_version: gives the version of the weights now.
      clock: gives seconds.

    Attributes:
      scheduler, wire: see above.
      rooms: the state machine.
    """

    rooms: Rooms

    def __init__(
        self,
        scheduler: Scheduler,
        wire: Wire,
        layout: PageLayout,
        limits: RoomLimits,
        weight_version: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.wire = wire
        self._layout = layout
        self._limits = limits
        self._kv_names = KvNames(scheduler.state.adapters, scheduler.cache, weight_version)
        self._clock = clock
        self._replies: list[Reply] = []  # that are not the scheduler's
        self._num_bytes = 0  # of pages moved so far
        self._expire_s = 0.0

    @property
    def wake_fd(self) -> int | None:
        """Is readable when the wire has news."""
        return self.wire.fileno()

    @property
    def is_idle(self) -> bool:
        """Whether nothing can happen before the next message, the next news of the wire, or within `due_in_s`."""
        return self.scheduler.is_idle and not self._replies

    @property
    def due_in_s(self) -> float:
        """The scheduler's: for what waits in rooms, the wire wakes the loop."""
        return self.scheduler.due_in_s

    def receive(self, messages: Sequence[Request | Abort]) -> None:
        """Takes requests and aborts; those with a room go to the state machine."""
        for message in messages:
            if isinstance(message, Abort):
                if not self._aborted(message):
                    self.scheduler.receive([message])
            elif message.room is None:
                self.scheduler.receive([message])
            elif (refusal := _of_front_end(message) or self.scheduler.refusal(message)) is not None:
                self._replies.append(Reply(message.request_id, refusal=refusal))
                self._carry_out(self._refused_at_arrival(message, refusal))
            else:
                self._carry_out(self._arrived(message))

    def take_replies(self) -> list[Reply]:
        """All replies since the last call."""
        replies = [reply for reply in self.scheduler.take_replies() if self._passes(reply)]
        replies += self._replies  # after the scheduler's: a request that the side ends may have yielded tokens before
        self._replies = []
        return replies

    def abort_all(self) -> None:
        """Ends every request."""
        self.scheduler.abort_all()
        for request_id in self.rooms.request_ids():
            self._carry_out(self.rooms.aborted(request_id))

    @abstractmethod
    def launch(self) -> StepInputs | None:
        """Takes what the wire has, and decides the next step; see `Scheduler.launch`."""

    @abstractmethod
    def load(self, recompiles: int, leaks: int = 0, weight_version: str = DEFAULT_WEIGHT_VERSION) -> Load:
        """The scheduler's, and that of the rooms."""

    def _hear(self) -> None:
        """Takes what the wire has, and ends what has waited for too long."""
        for event in self.wire.poll():
            self._carry_out(self._heard(event))
        if self._clock() >= self._expire_s:
            self._carry_out(self.rooms.expire())
            self._expire_s = self._clock() + EXPIRE_S

    def _carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Start(request, since_s):
                    self._start(request, since_s)
                case Send(peer, message, payload):
                    self.wire.send(peer, message, payload)
                    self._num_bytes += (
                        payload.nbytes if isinstance(message, Pages | Rows) and payload is not None else 0
                    )
                case Refuse(request_id, refusal):
                    self._end(request_id, [Reply(request_id, refusal=refusal)])
                case Drop(request_id, num_samples):
                    ends = (Reply(request_id, (), FinishReason.ABORT, index=index) for index in range(num_samples))
                    self._end(request_id, list(ends))
                case Gather() | Answer():
                    self._carry_out_other(action)

    def _end(self, request_id: str, replies: list[Reply]) -> None:
        """Ends a request wherever it is; `replies` go to its client."""
        self.scheduler.end(request_id)
        self._replies += replies

    @abstractmethod
    def _aborted(self, abort: Abort) -> bool:
        """Ends a request that has a room; False if it has none."""

    @abstractmethod
    def _arrived(self, request: Request) -> list[Action]: ...

    @abstractmethod
    def _refused_at_arrival(self, request: Request, refusal: Refusal) -> list[Action]:
        """The other side must not wait for a request that was refused here."""

    def _start(self, request: Request, since_s: float) -> None:
        """Gives a request to the scheduler, which may refuse it."""
        self.scheduler.receive([request], since_s)

    def _passes(self, reply: Reply) -> bool:
        """Whether a reply of the scheduler may leave now."""
        return True

    @abstractmethod
    def _heard(self, event: Event) -> list[Action]: ...

    def _carry_out_other(self, action: Gather | Answer) -> None:
        raise AssertionError(f"{action} is none of this side's")


def _of_front_end(request: Request) -> Refusal | None:
    """Why the front end has refused the request, or None if it has not."""
    return Refusal(RefusalKind.INVALID, request.refused) if request.refused else None


def room_of_request(request: Request) -> Room:
    """The room of a request that has one."""
    assert request.room is not None
    return room_of(request.room.number, request.prompt_ids)


def with_rooms(load: Load, num_waiting: int, num_tokens: int, transfer: TransferLoad) -> Load:
    """A scheduler's load, and that of requests that it hasn't got yet, and owes no step.

    `num_waiting` is how many they are, `num_tokens` how many tokens their prompts have.
    """
    return msgspec.structs.replace(
        load,
        num_waiting=load.num_waiting + num_waiting,
        waiting_tokens=load.waiting_tokens + num_tokens,
        num_blocked=load.num_blocked + num_waiting,
        transfer=transfer,
    )
