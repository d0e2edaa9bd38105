"""Tokens of a hybrid on one device, on two and in two ranks, of a CPU. A program: JAX has one number of devices per
process.

python -m tests.end_to_end.hybrid_mesh FOLDER [ranks alone] > tokens.json
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxsgl.batch.inputs import Bucket
from jaxsgl.config.engine import EngineConfig, SchedulingConfig
from jaxsgl.config.features import SpeculationConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.messages.orders import ToEngine
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.ranks import RankedScheduler
from jaxsgl.testing.engine import ScriptedMailbox
from tests.end_to_end.offline import ends, new_scheduler, outputs
from tests.scheduler.drafters import knowing

CHUNK = 96  # longer than a page, so that chunks end within pages, too
LENGTHS = (1, 63, 64, 65, 97, 130, 200)


def main() -> None:
    """Prints what one device yields, what two do that share the heads, unless ranks are meant alone, and what two
    ranks do.
    """
    jax.config.update("jax_num_cpu_devices", 2)
    layouts = ((1, 1), (2, 2)) if sys.argv[2:] else ((1, 1), (2, 1), (2, 2))
    print(json.dumps([answers(sys.argv[1], *layout) for layout in layouts]))


def answers(folder: str, tp: int, ranks: int) -> dict[str, Any]:
    """Tokens of prompts in chunks, without and with retraction and drafts, and of four turns with a shared beginning.

    In ranks the prompts are shared out, and the turns are all the last one's.
    """
    engine = Engine(
        EngineConfig(
            model=folder,
            tp=tp,
            dp_size=ranks,
            enable_dp_attention=ranks > 1,
            dtype="float32",
            chunked_prefill_size=CHUNK * ranks,
            context_length=384,
            max_running_requests=8 * ranks,
            max_total_tokens=4096 * ranks,
            decode_buckets=(8,),
            extend_buckets=(CHUNK,),
            decode_steps=1,
            speculation=SpeculationConfig("NGRAM", 3) if ranks == 1 else SpeculationConfig(),
            grammar_backend="none",
            compilation_cache_dir="",
        ),
        progress=False,
    )
    page, vocab = engine.capacity.page_size, engine.capacity.vocab_size
    rng = np.random.default_rng(11)
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    requests = [Request(str(i), rng.integers(3, vocab, length).tolist(), greedy) for i, length in enumerate(LENGTHS)]
    found: dict[str, Any] = {
        "tokens": outputs(served(engine, ranks, [requests]), requests),
        "retracted": outputs(served(engine, ranks, [requests], retract_every=3), requests),
    }
    found["drafted"] = found["tokens"]
    if ranks == 1:
        known = {request.request_id: tokens for request, tokens in zip(requests, found["tokens"], strict=True)}
        drafter_of = knowing(lambda request: known[request.request_id], "half", vocab)
        mailbox = served(engine, ranks, [requests], drafter_of=drafter_of)
        found["drafted"] = outputs(mailbox, requests)
        assert mailbox.loads[-1].speculation.accepted_tokens > 5
    shared = rng.integers(3, vocab, 2 * page + 5).tolist()
    last = ranks - 1 if ranks > 1 else None
    turns = [Request(f"turn {i}", [*shared, *rng.integers(3, vocab, 70).tolist()], greedy, rank=last) for i in range(4)]
    script: list[list[Any]] = [each for turn in turns for each in ([turn], *[[]] * 20)]
    mailbox = served(engine, ranks, script)
    found["turns"] = outputs(mailbox, turns)
    found["cached"] = [ends(mailbox)[turn.request_id].cached_tokens for turn in turns]
    states = engine._runner.state.running
    assert states is not None
    found["shards"] = [list(array.addressable_shards[0].data.shape) for kept in states for array in kept[:1]]
    parts = {",".join(map(str, array.addressable_shards[0].data.shape)) for array in jax.tree.leaves(states)}
    is_copy = re.compile(rf"= f32\[(?:{'|'.join(parts)})\]\S* (?:copy|copy-start)\(")
    keys = [key for key in engine.compiled.compilations if isinstance(key.shape, Bucket) or key.kind == "settled"]
    programs = [engine.compiled[key] for key in keys]
    found["copies"] = sum(len(is_copy.findall(program.as_text() or "")) for program in programs)
    found["recompiles"] = engine.recompiles
    engine.close()
    return found


def served(engine: Engine, ranks: int, script: Sequence[Sequence[ToEngine]], **changes: Any) -> ScriptedMailbox:
    """Serves `script` to the end, by a scheduler for each rank with these `changes`."""
    config = SchedulingConfig(enable_mixed_chunk=ranks > 1)
    each = [new_scheduler(engine, True, config=config, **changes) for _ in range(ranks)]
    scheduler = RankedScheduler(each) if ranks > 1 else each[0]
    mailbox = ScriptedMailbox(script)
    run_loop(scheduler, engine, mailbox, depth=1)
    assert scheduler.is_idle and not scheduler.leaks()
    assert len(script) > 1 or all(rank.state.totals.output_tokens for rank in each), "a rank had nothing to do"
    return mailbox


if __name__ == "__main__":
    main()
