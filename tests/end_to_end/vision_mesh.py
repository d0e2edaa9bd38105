"""Serves requests with images on several virtual devices, in a process of its own; `test_vision.py` starts it.

Standard input holds `{"folder": ..., "tp": ..., "shares": ..., "page_size": ...}`; prints the answers and the counted
recompiles as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.features import VisionConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.requests.request import Request
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.testing.engine import ScriptedMailbox
from tests.end_to_end.offline import new_scheduler, outputs, serve
from tests.vision_models import request


def requests() -> list[Request]:
    grids = [[(1, 4, 6), (1, 8, 4)], [(1, 12, 10)], [], [(1, 2, 2), (1, 2, 14), (1, 6, 6), (1, 4, 4)]]
    return [request(str(number), each, number) for number, each in enumerate(grids)]


def main() -> None:
    case = json.load(sys.stdin)
    config = EngineConfig(
        model=str(Path(case["folder"])),
        tp=case["tp"],
        page_size=case["page_size"],
        max_total_tokens=640,
        context_length=128,
        max_running_requests=4,
        chunked_prefill_size=32,
        extend_buckets=(32,),
        decode_buckets=(4,),
        vision=VisionConfig(mm_max_patches=256, mm_pool_tokens=80, mm_enable_dp_encoder=case["shares"]),
    )
    engine = Engine(config, progress=False)
    asked = requests()
    answers = outputs(serve(engine, [asked]), asked)
    scheduler = new_scheduler(engine, radix=False)
    turns = []
    for number, seed in enumerate((41, 42, 41)):  # the pool holds one of the two images
        mailbox = ScriptedMailbox([[request(str(number), [(1, 14, 16)], seed)]])
        run_loop(scheduler, engine, mailbox, 1)
        turns.append(mailbox.output_ids(str(number)))
    restored = scheduler.state.totals.restored_images
    print(json.dumps({"answers": answers, "turns": turns, "restored": restored, "recompiles": engine.recompiles}))


if __name__ == "__main__":
    main()
