"""The engine process of one of several hosts: joins the others; all but host 0 then play its calls.

engine_process.py calls it where --nnodes asks for several hosts. Knows no clients.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from typing import Any

import jax

import jaxsgl
from jaxsgl import wiring
from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.flags import public_flags
from jaxsgl.errors import StartupError, in_one_line
from jaxsgl.hosts.follower import Follower
from jaxsgl.hosts.group import Report
from jaxsgl.hosts.leader import Leader
from jaxsgl.ipc import EngineMailbox
from jaxsgl.messages.orders import Answer, Ping, Shutdown
from jaxsgl.shared_mailbox import SharedMailbox

# What may differ between hosts: where things lie, and which host it is.
OWN_FLAGS = ("model", "compilation_cache_dir", "auto_buckets", "node_rank", "dist_init_addr", "dist_secret_file")

logger = logging.getLogger(__name__)


def join(config: EngineConfig, report: Report) -> Leader | Follower:
    """Meets the other hosts. Raises `StartupError` if they don't come, or differ."""
    kind = Follower if config.hosts.rank else Leader
    return kind(config.hosts, facts_of(config), report)


def facts_of(config: EngineConfig) -> dict[str, str]:
    """What must be equal on all hosts, by name: versions, and the engine's flags as they are given."""
    facts = {"the version of jaxsgl": jaxsgl.__version__, "the version of JAX": jax.__version__}
    for name, value in _flat(public_flags(config)).items():
        if name not in OWN_FLAGS:
            facts["--" + name.replace("_", "-")] = str(value)
    return facts


def _flat(flags: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in flags.items():
        found |= _flat(value) if isinstance(value, dict) else {name: value}
    return found


def follow(config: EngineConfig, mailbox: EngineMailbox | SharedMailbox, hosts: Follower, report: Report) -> int:
    """Plays the calls of host 0; returns the exit status if the start fails, and else ends the process."""
    try:
        engine = wiring.build_engine(config, hosts)
    except Exception as error:
        expected = isinstance(error, StartupError)
        if not expected:
            logger.exception("the engine failed to start")
        text = str(error) if expected else f"the engine failed to start: {in_one_line(error)}"
        hosts.fail(text)
        mailbox.fail(text)
        return 1
    mailbox.announce(engine.info)
    threading.Thread(target=_take_orders, args=(mailbox, hosts), name="orders", daemon=True).start()
    try:
        hosts.play(engine)
    except Exception as error:
        logger.exception("the engine failed")
        text = f"the engine failed: {in_one_line(error)}"
        hosts.fail(text)
        report.fail(text)
        return 1
    hosts.end()
    logging.shutdown()
    os._exit(0)  # without closing the mailbox, at which the other thread waits


def _take_orders(mailbox: EngineMailbox | SharedMailbox, hosts: Follower) -> None:
    """Has all hosts stop if this one is asked to; says that the process lives."""
    while True:
        for order in mailbox.receive(math.inf):
            if isinstance(order, Shutdown):
                hosts.leave()
            elif isinstance(order, Ping):
                mailbox.send(Answer(order.number, True))
