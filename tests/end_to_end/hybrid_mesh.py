"""Tokens of a hybrid on one device and on two, of a CPU. A program: JAX has one number of devices per process.

python -m tests.end_to_end.hybrid_mesh FOLDER > tokens.json
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np

from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.testing.engine import ScriptedMailbox
from tests.end_to_end.offline import ends, new_scheduler, outputs, serve

CHUNK = 96  # longer than a page, so that chunks end within pages, too
LENGTHS = (1, 63, 64, 65, 97, 130, 200)


def main() -> None:
    """Prints what one device yields, and what two do."""
    jax.config.update("jax_num_cpu_devices", 2)
    print(json.dumps([answers(sys.argv[1], tp) for tp in (1, 2)]))


def answers(folder: str, tp: int) -> dict[str, Any]:
    """Tokens of prompts in chunks, without and with retraction, and of three turns with a shared beginning."""
    engine = Engine(
        EngineConfig(
            model=folder,
            tp=tp,
            dtype="float32",
            chunked_prefill_size=CHUNK,
            context_length=384,
            max_running_requests=8,
            max_total_tokens=4096,
            decode_buckets=(8,),
            extend_buckets=(CHUNK,),
            decode_steps=1,
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
        "tokens": outputs(serve(engine, [requests]), requests),
        "retracted": outputs(serve(engine, [requests], retract_every=3), requests),
    }
    shared = rng.integers(3, vocab, 2 * page + 5).tolist()
    turns = [Request(f"turn {i}", [*shared, *rng.integers(3, vocab, 70).tolist()], greedy) for i in range(4)]
    script: list[list[Any]] = [each for turn in turns for each in ([turn], *[[]] * 20)]
    mailbox = ScriptedMailbox(script)
    run_loop(new_scheduler(engine, radix=True), engine, mailbox, depth=1)
    found["turns"] = outputs(mailbox, turns)
    found["cached"] = [ends(mailbox)[turn.request_id].cached_tokens for turn in turns]
    states = engine._runner.state.running
    assert states is not None
    found["shards"] = [list(array.addressable_shards[0].data.shape) for array in (states.matrices[0], states.inputs[0])]
    found["recompiles"] = engine.recompiles
    engine.close()
    return found


if __name__ == "__main__":
    main()
