"""Serves requests with images on several virtual devices, in a process of its own; `test_vision.py` starts it.

Standard input holds `{"folder": ..., "kind": ..., "tp": ..., "shares": ..., "page_size": ...}`; prints the answers and
the counted recompiles as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.features import VisionConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.requests.media import Grid
from jaxsgl.requests.request import Request
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.testing.engine import ScriptedMailbox
from tests.end_to_end.offline import new_scheduler, outputs, serve
from tests.vision_models import (
    WHOLE_GRIDS,
    WITH_JOINED,
    WITH_LINES,
    WITH_TILES,
    request,
    request_in_lines,
    request_of_joined,
    request_of_whole_images,
)

OF_ONE_SIZE = (*WHOLE_GRIDS, *WITH_TILES)


def asked(kind: str, request_id: str, grids: list[Grid], seed: int) -> Request:
    """A request with images of `grids`, or with as many of the one size that the model takes."""
    if kind in WITH_JOINED:
        return request_of_joined(request_id, kind, len(grids), seed)
    if kind in OF_ONE_SIZE:
        return request_of_whole_images(request_id, len(grids), seed, kind)
    return request_in_lines(request_id, grids, seed) if kind in WITH_LINES else request(request_id, grids, seed)


def requests(kind: str) -> list[Request]:
    grids: list[list[Grid]] = [
        [(1, 4, 6), (1, 8, 4)], [(1, 12, 10)], [], [(1, 2, 2), (1, 2, 14), (1, 6, 6), (1, 4, 4)],
    ]  # fmt: skip
    return [asked(kind, str(number), each, number) for number, each in enumerate(grids)]


def main() -> None:
    case = json.load(sys.stdin)
    kind = case["kind"]
    pool_tokens = 48 if kind == "gemma4" else 100 if kind in WITH_JOINED else 80
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
        vision=VisionConfig(
            mm_max_patches=80 if kind in WITH_JOINED else 256,
            mm_pool_tokens=pool_tokens,
            mm_enable_dp_encoder=case["shares"],
        ),
    )
    engine = Engine(config, progress=False)
    given = requests(kind)
    answers = outputs(serve(engine, [given]), given)
    scheduler = new_scheduler(engine, radix=False)
    turns = []
    large: list[Grid] = [(1, 8, 8)] * 4 if kind in (*OF_ONE_SIZE, *WITH_JOINED) else [(1, 14, 16)]
    for number, seed in enumerate((41, 42, 41)):  # the pool holds the images of one of two requests
        mailbox = ScriptedMailbox([[asked(kind, str(number), large, seed)]])
        run_loop(scheduler, engine, mailbox, 1)
        turns.append(mailbox.output_ids(str(number)))
    restored = scheduler.state.totals.restored_images
    print(json.dumps({"answers": answers, "turns": turns, "restored": restored, "recompiles": engine.recompiles}))


if __name__ == "__main__":
    main()
