"""What operators ask through SGLang's protocol besides requests: empty the cache, record a profile.

Knows how long to wait and what the protocol's fields mean; the engine does the work. service.py calls it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from smg_grpc_proto.generated import common_pb2

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.engine_client import EngineClient
from jaxsgl.messages import FlushCache, StartProfile, StopProfile

ANSWER_LIMIT_S = 60.0
PROFILE_LIMIT_S = 600.0  # a trace of many steps takes minutes to write
MAX_FLUSH_WAIT_S = 3600.0


async def flush_cache(engine: EngineClient, request: common_pb2.FlushCacheRequest) -> common_pb2.FlushCacheResponse:
    """Empties the prefix cache as soon as no request waits or runs, within `timeout_s`."""
    if not 0 <= request.timeout_s <= MAX_FLUSH_WAIT_S:
        raise InvalidRequest(f"timeout_s is {request.timeout_s}, but must be 0 to {MAX_FLUSH_WAIT_S:g} seconds")
    timeout_s = request.timeout_s
    answer = await engine.ask(lambda number: FlushCache(number, timeout_s), timeout_s + ANSWER_LIMIT_S)
    return common_pb2.FlushCacheResponse(success=answer.ok, message=answer.text)


async def start_profile(engine: EngineClient, request: common_pb2.StartProfileRequest) -> common_pb2.ProfileResponse:
    """Records from now on. What the trace holds can't be chosen: it has both the device and the host."""
    if request.start_step:
        raise InvalidRequest(f"start_step is {request.start_step}, but recording starts at once: leave it out")
    if request.profile_by_stage:
        raise InvalidRequest("profile_by_stage is set, but prefill and decode go into one trace: leave it out")
    num_steps = request.num_steps if request.HasField("num_steps") else None
    if num_steps is not None and num_steps < 1:
        raise InvalidRequest(f"num_steps is {num_steps}, but must be 1 and more")
    folder = request.output_dir or str(Path(tempfile.gettempdir()) / "jaxsgl-profile")
    answer = await engine.ask(lambda number: StartProfile(number, folder, num_steps), ANSWER_LIMIT_S)
    return common_pb2.ProfileResponse(success=answer.ok, message=answer.text)


async def stop_profile(engine: EngineClient) -> common_pb2.ProfileResponse:
    """Ends recording; the message tells the folder."""
    answer = await engine.ask(StopProfile, PROFILE_LIMIT_S)
    return common_pb2.ProfileResponse(success=answer.ok, message=answer.text)
