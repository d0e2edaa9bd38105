"""The states of a request in the scheduler, and which may follow which.

   .----------------- retract ------+------------------------------------.
   v                                |                                    |
WAITING ---admit---> EXTENDING -----'--last chunk launched---> RUNNING --'--stop, length---> FINISHED
   |                     |                                        |                             ^
   '------ abort --------'------------------ abort ---------------'-----------------------------'
"""

from __future__ import annotations

import enum


class State(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"  # in the queue; holds nothing but what it has generated
    EXTENDING = "extending"  # admitted; holds row and pages; a chunk is still to launch
    RUNNING = "running"  # all that is known of it is launched; tokens come
    FINISHED = "finished"  # ended; holds nothing


TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.EXTENDING, State.FINISHED}),
    State.EXTENDING: frozenset({State.RUNNING, State.WAITING, State.FINISHED}),
    State.RUNNING: frozenset({State.WAITING, State.FINISHED}),
    State.FINISHED: frozenset(),
}
