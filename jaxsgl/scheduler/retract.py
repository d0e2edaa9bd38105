"""Who goes back to the queue when pages run out (SGLang's retraction). A decision; the scheduler carries it out."""

from __future__ import annotations

from collections.abc import Collection

from jaxsgl.scheduler.req import Req


def in_order_of_loss(reqs: Collection[Req]) -> list[Req]:
    """`reqs` (in order of admission), first whom to retract first.

    That is who loses least: fewest tokens generated, then the longest input, since it frees most; among equals who came
    last. So the oldest request with most output goes on, and the whole makes progress.
    """
    newest_first = reversed(list(reqs))
    return sorted(newest_first, key=lambda req: (len(req.output_ids), -req.prompt_len))
