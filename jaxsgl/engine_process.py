"""Entry point of the engine process: builds engine and scheduler, announces that they are ready, and runs the loop.

Started by the front end (frontend/engines/owned.py) as `python -m jaxsgl.engine_process`; its standard input carries
an `EngineLaunch` as one line of JSON, then stays open for as long as the parent lives. Knows nothing of clients.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import BinaryIO

import msgspec

from jaxsgl import logs, stacks
from jaxsgl.errors import StartupError, in_one_line
from jaxsgl.hosts.group import Alone, Hosts
from jaxsgl.hosts.leader import Leader
from jaxsgl.hosts.playing import LeadEngine, LeadStages
from jaxsgl.ipc import EngineLaunch, EngineMailbox, HostReport, open_mailbox
from jaxsgl.logs import StartParts
from jaxsgl.messages.replies import Replies
from jaxsgl.parent import be_killed_with_parent, follow_parent
from jaxsgl.shared_mailbox import SharedMailbox

SHARED_BY_HOSTS = "while several hosts share a model (--nnodes): start all hosts anew"

logger = logging.getLogger(__name__)


def main() -> int:
    """Runs the engine process; returns its exit status."""
    set_signals()
    be_killed_with_parent()
    launch = read_launch(sys.stdin.buffer)
    follow_parent(sys.stdin.fileno(), launch.endpoints.remove)
    logs.configure(launch.log_style, launch.name)
    with open_mailbox(launch.endpoints) as mailbox:
        if not launch.config.hosts.are_several:
            return serve(launch, mailbox, Alone())
        status = _serve_with_others(launch, mailbox)
    logging.shutdown()
    os._exit(status)  # at once: JAX would wait for hosts that have ended


def _serve_with_others(launch: EngineLaunch, mailbox: EngineMailbox | SharedMailbox) -> int:
    from jaxsgl import host_process  # one host needs none of it

    report = HostReport(launch.endpoints)
    try:
        hosts = host_process.join(launch.config, report)
    except StartupError as error:
        mailbox.fail(str(error))
        return 1
    if isinstance(hosts, Leader):
        return serve(launch, mailbox, hosts)
    return host_process.follow(launch.config, mailbox, hosts, report)


def serve(launch: EngineLaunch, mailbox: EngineMailbox | SharedMailbox, hosts: Hosts) -> int:
    """Serves with the engine of this host, and as host 0 of several with those of all `hosts`; returns the status."""
    parts = StartParts()
    try:
        # Imported here, so that a broken JAX installation is reported like any other failure to start.
        from jaxsgl import wiring
        from jaxsgl.scheduler.loop import run_loop
        from jaxsgl.scheduler.served_engine import FixedWeights, ServedEngine, StepsOnly

        parts.end("imports")
        engine, scheduler = wiring.build(launch.config, mark=launch.endpoints.mask_mark(), hosts=hosts)
        serving = wiring.serving_of(launch.config, engine, scheduler)
        parts.end("engine and scheduler")
        logger.debug("the process's start: %s", parts)
    except StartupError as error:
        hosts.fail(str(error))
        mailbox.fail(str(error))
        return 1
    except Exception as error:
        logger.exception("the engine failed to start")
        message = f"the engine failed to start: {in_one_line(error)}"
        hosts.fail(message)
        mailbox.fail(message)
        return 1
    if serving.wake_fd is not None:
        mailbox.wake_at(serving.wake_fd)
    # The loop tells its load after a turn; a front end must know before the first one what requests may name.
    mailbox.send(Replies([], serving.load(engine.recompiles, weight_version=engine.weight_store.weight_version)))
    mailbox.announce(engine.info)
    try:
        served: ServedEngine = engine
        if isinstance(hosts, Leader):
            weights = FixedWeights(SHARED_BY_HOSTS, launch.config.weight_version)
            lead = LeadStages if launch.config.has_stages else LeadEngine
            served = StepsOnly(lead(engine, hosts.call), weights)
        run_loop(serving, served, mailbox, launch.config.unread_steps, launch.config.check_every_step)
        wiring.keep_prefixes(launch.config, engine, scheduler)
    except Exception as error:
        logger.exception("the engine failed")
        message = f"the engine failed ({type(error).__name__}); the server's log says more"  # clients read this
        hosts.fail(message)
        mailbox.fail(message)
        return 1
    hosts.end()
    return 0


def set_signals() -> None:
    """Leaves Ctrl-C and SIGTERM to the parent, and shows the stacks when the parent asks for them.

    Terminals and service managers signal both processes at once, but the parent still needs the engine to finish
    short calls. The parent ends the engine itself, and the engine ends when the parent dies.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stacks.dump_at_signals()


def read_launch(stdin: BinaryIO) -> EngineLaunch:
    """Reads the parent's `EngineLaunch` from the first line of `stdin`."""
    return msgspec.json.decode(stdin.readline(), type=EngineLaunch)


if __name__ == "__main__":
    sys.exit(main())
