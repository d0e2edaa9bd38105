"""Runs requests through real scheduler and engine, without processes or tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxsgl.config.engine import EngineConfig, SchedulingConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.messages.orders import ToEngine
from jaxsgl.messages.replies import Reply
from jaxsgl.requests.grammar import Grammar
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.scheduler.grammars.constraint import Matcher
from jaxsgl.scheduler.grammars.queue import GrammarQueue, NoGrammars
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.speculation.drafter import DrafterOf, drafts_nothing
from jaxsgl.testing.engine import RetractEvery, ScriptedMailbox
from tests.checked import CheckedScheduler


def small_pool(
    folder: Path, *, decode_buckets: tuple[int, ...] = (6,), extend_buckets: tuple[int, ...] = (48,)
) -> Engine:
    """An engine with a pool so small that admission, eviction and waiting happen all the time."""
    return Engine(
        EngineConfig(
            model=str(folder),
            page_size=4,
            chunked_prefill_size=48,
            context_length=160,
            max_running_requests=6,
            max_total_tokens=600,
            decode_buckets=decode_buckets,
            extend_buckets=extend_buckets,
            compilation_cache_dir="",
        ),
        progress=False,
    )


def new_scheduler(
    engine: Engine,
    radix: bool,
    eos_token_ids: Iterable[int] = (),
    config: SchedulingConfig = SchedulingConfig(),
    retract_every: int | None = None,
    decode_steps: int | None = None,
    drafter_of: DrafterOf = drafts_nothing,
    compile: Callable[[Grammar], Matcher] | None = None,
) -> CheckedScheduler:
    buckets = engine.buckets if decode_steps is None else replace(engine.buckets, decode_steps=decode_steps)
    return CheckedScheduler(
        engine.capacity,
        buckets,
        eos_token_ids,
        config,
        radix_cache=radix,
        retract_also=None if retract_every is None else RetractEvery(retract_every),
        drafter_of=drafter_of,
        grammars=NoGrammars() if compile is None else GrammarQueue(compile, 30.0),
    )


def serve(
    engine: Engine,
    script: Sequence[Sequence[ToEngine]],
    *,
    radix: bool = True,
    overlap: bool = True,
    eos_token_ids: Iterable[int] = (),
    config: SchedulingConfig = SchedulingConfig(),
    retract_every: int | None = None,
    decode_steps: int | None = None,
    drafter_of: DrafterOf = drafts_nothing,
    compile: Callable[[Grammar], Matcher] | None = None,
) -> ScriptedMailbox:
    """Serves `script` (messages by turn of the loop) to the end with an empty cache.

    With `decode_steps` 1, an engine that has programs of several steps doesn't use them.
    """
    scheduler = new_scheduler(engine, radix, eos_token_ids, config, retract_every, decode_steps, drafter_of, compile)
    mailbox = ScriptedMailbox(script)
    run_loop(scheduler, engine, mailbox, int(overlap))
    assert scheduler.is_idle
    assert scheduler.cache.num_available == engine.capacity.num_pages - 1
    return mailbox


def outputs(mailbox: ScriptedMailbox, requests: Sequence[Request]) -> list[list[int]]:
    return [mailbox.output_ids(request.request_id) for request in requests]


def ends(mailbox: ScriptedMailbox) -> dict[str, Reply]:
    """The last reply of every request that ended."""
    return {reply.request_id: reply for reply in mailbox.replies if reply.finish_reason or reply.refusal}


def first_logits(engine: Engine, prompt: list[int]) -> np.ndarray:
    """Logits `[V]` of the first new token, through scheduler, buckets and paged KV, chunk by chunk."""
    scheduler = new_scheduler(engine, radix=True)
    scheduler.receive([Request("r", prompt, SamplingParams(temperature=0.0, max_tokens=1))])
    while (inputs := scheduler.launch()) is not None:
        (forward,) = engine.programs.of(inputs.bucket)
        out = engine._runner.forward(forward, inputs)
    return np.asarray(out.logits)[0]
