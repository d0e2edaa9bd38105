"""vLLM's names for what operators ask of a server: an empty prefix cache, and sleep.

    /reset_prefix_cache    /flush_cache
    /sleep, /wake_up       /release_memory_occupation, /resume_memory_occupation

The orders are the same as SGLang's (sglang/admin.py), and so is what they wait for. There is no /version: by it a
gateway tells vLLM, whose pages go other ways between servers. app.py includes the router.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.engines.link import ANSWER_LIMIT_S, UPDATE_LIMIT_S
from jaxsgl.frontend.generation import FrontEnd
from jaxsgl.frontend.http.bodies import StrictJson
from jaxsgl.frontend.http.calls import while_connected
from jaxsgl.messages.orders import Answer, FlushCache, MemoryTag, ReleaseMemory, ResumeMemory

_ALL = tuple(MemoryTag)


def router(front_end: FrontEnd) -> APIRouter:
    """Returns the endpoints, for `front_end`."""
    router = APIRouter(route_class=StrictJson, tags=["vllm"])
    engine = front_end.engine

    @router.post("/reset_prefix_cache")
    @while_connected
    async def reset_prefix_cache() -> dict[str, bool]:
        """Empties the prefix cache; refused while requests wait or run."""
        answer = await engine.ask(lambda number: FlushCache(number, 0.0), ANSWER_LIMIT_S)
        return _done(answer, "the cache was not emptied")

    @router.post("/sleep")
    @while_connected
    async def sleep(
        level: Annotated[int, Query(ge=1, le=2, description="has no effect: weights are read again either way")] = 1,
        mode: Annotated[
            Literal["abort", "wait"], Query(description="requests that have begun end at once, or by themselves")
        ] = "abort",
    ) -> dict[str, bool]:
        """Gives the memory of weights and KV cache back; generation is paused until all of it is woken up."""
        if mode == "abort":
            await engine.abort_prefix("")
        answer = await engine.ask(lambda number: ReleaseMemory(number, _ALL), UPDATE_LIMIT_S)
        return _done(answer, "the server stays awake")

    @router.post("/wake_up")
    @while_connected
    async def wake_up(tags: Annotated[list[Literal["weights", "kv_cache"]] | None, Query()] = None) -> dict[str, bool]:
        """Takes the memory again, or these parts of it, and fills the weights."""
        woken = tuple(map(MemoryTag, tags)) if tags else _ALL
        return _done(
            await engine.ask(lambda number: ResumeMemory(number, woken), UPDATE_LIMIT_S), "the server sleeps on"
        )

    @router.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        """Whether generation is paused, as it is until all memory is back."""
        return {"is_sleeping": engine.load.paused}

    return router


def _done(answer: Answer, failed: str) -> dict[str, bool]:
    if not answer.ok:
        raise InvalidRequest(f"{failed}: {answer.text}")
    return {"success": True}
