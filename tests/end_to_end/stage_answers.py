"""Answers of models in pipeline stages, on virtual devices of a CPU. A program: JAX has one number of them per process.

python -m tests.end_to_end.stage_answers < cases.json > answers.json
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax

from jaxsgl.config.engine import EngineConfig, SchedulingConfig
from jaxsgl.messages.orders import Abort, ToEngine
from jaxsgl.requests.grammar import Grammar
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.scheduler.grammars.queue import GrammarQueue
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.request_table import AllAtOnce, InTurns
from jaxsgl.testing.engine import RetractEvery, ScriptedMailbox
from jaxsgl.testing.grammars import compile_fake
from jaxsgl.wiring import build_engine
from tests.checked import CheckedScheduler
from tests.scheduler.staged import OneAtATime

NUM_DEVICES = 8
FLAGS: dict[str, Any] = {
    "page_size": 4,
    "chunked_prefill_size": 16,
    "context_length": 96,
    "max_running_requests": 6,
    "max_total_tokens": 240,
    "decode_buckets": (6,),
    "extend_buckets": (21,),
    "compilation_cache_dir": "",
    "grammar_backend": "llguidance",
}


def requests() -> list[Request]:
    """Of every kind: greedy and seeded, filtered and edited, scored, held to grammars; longer than a chunk; one prompt
    twice, of which the second finds the first one's pages."""

    def params(max_tokens: int, **values: Any) -> SamplingParams:
        return SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, "ignore_eos": True, **values})

    long = list(range(3, 50))
    asked = {
        "greedy": (long, params(12)),
        "short": ([9] * 7, params(20)),
        "again": ([*long[:40], 7, 8], params(9)),
        "seeded": ([50, 51, 52], params(14, temperature=1.0, seed=1)),
        "filtered": ([7, 5, 3], params(14, temperature=1.5, top_k=20, top_p=0.9, seed=2)),
        "edited": ([11, 12, 13, 14], params(12, temperature=0.5, frequency_penalty=0.7, seed=3, logprobs=2)),
        "scored": (list(range(60, 80)), params(5, prompt_logprobs=1)),
        "held": ([5, 6], params(12, grammar=Grammar.regex("1 40"))),
        "held and scored": ([5, 6, 8], params(9, temperature=1.0, seed=4, logprobs=1, grammar=Grammar.regex("2 40"))),
        "bounded": ([21, 22], params(9, allowed_token_ids=tuple(range(20, 60)))),
    }
    return [Request(name, prompt, sampling) for name, (prompt, sampling) in asked.items()]


def aborted() -> list[Request]:
    """Two of each length, whose clients leave at different times."""
    sampling = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    return [Request(f"left {i}", list(range(i, i + 3 + 9 * (i % 3))), sampling) for i in range(6)]


def script() -> list[list[ToEngine]]:
    """All at once; clients leave one after the other, and some come later."""
    first, later = requests()[:6], requests()[6:]
    turns: list[list[ToEngine]] = [[*first, *aborted()]]
    for i, left in enumerate(aborted()):
        turns += [[]] * (2 + i) + [[Abort(left.request_id)]]
    for request in later:
        turns.append([request])
    return turns


def answers(folder: str, flags: dict[str, Any], retract_every: int | None) -> dict[str, Any]:
    """What each request yields, and what an engine with `flags` holds."""
    config = EngineConfig(model=folder, **FLAGS, **flags)
    engine = build_engine(config)
    vocab_size = engine.capacity.vocab_size
    found: dict[str, Any] = {"sizes": [engine.info.weight_bytes, engine.info.kv_bytes, engine.capacity.num_pages]}
    for mixed in (False, True):
        kind = OneAtATime if config.has_stages else CheckedScheduler
        scheduler = kind(
            engine.capacity,
            engine.buckets,
            (),
            SchedulingConfig(enable_mixed_chunk=mixed),
            retract_also=None if retract_every is None else RetractEvery(retract_every),
            grammars=GrammarQueue(lambda grammar: compile_fake(grammar, vocab_size), 30.0),
            turns=InTurns(config.unread_steps + 1) if config.has_stages else AllAtOnce(),
        )
        mailbox = ScriptedMailbox(script())
        run_loop(scheduler, engine, mailbox, config.unread_steps, check_every_step=True)
        assert scheduler.is_idle and scheduler.cache.num_available == engine.capacity.num_pages - 1
        found["mixed" if mixed else "apart"] = {
            request.request_id: _of(mailbox, request.request_id) for request in (*requests(), *aborted())
        }
    found["recompiles"] = engine.recompiles
    engine.close()
    return found


def _of(mailbox: ScriptedMailbox, request_id: str) -> dict[str, Any]:
    replies = [reply for reply in mailbox.replies if reply.request_id == request_id]
    scores = [reply.logprob.logprob for reply in replies if reply.logprob is not None]
    scores += [each.logprob for reply in replies for each in reply.prompt_logprobs or ()]
    refusals = [reply.refusal.text for reply in replies if reply.refusal is not None]
    return {"token_ids": mailbox.output_ids(request_id), "scores": scores, "refusals": refusals}


def main() -> None:
    """Answers the cases of standard input, each the arguments of `answers`."""
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    for case in json.load(sys.stdin):
        print(json.dumps(answers(**case)), flush=True)


if __name__ == "__main__":
    main()
