"""The gRPC service `sglang.grpc.scheduler.SglangScheduler`: what gateways call. Tokens in, tokens out.

Each method only leads to the file that does its work; errors become statuses in `answers_errors`. Knows no text but
stop strings. The asyncio gRPC server calls it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from pathlib import Path

import grpc
from smg_grpc_proto import sglang_scheduler_pb2 as pb
from smg_grpc_proto import sglang_scheduler_pb2_grpc as pb_grpc
from smg_grpc_proto.generated import common_pb2

from jaxsgl.errors import EngineUnavailable, NotFound, Unsupported
from jaxsgl.frontend.front_end import FrontEnd
from jaxsgl.frontend.grpc.errors import answers_errors, write
from jaxsgl.frontend.grpc.sglang import admin
from jaxsgl.frontend.grpc.sglang.generate import Responses
from jaxsgl.frontend.grpc.sglang.infos import model_info, server_info
from jaxsgl.frontend.grpc.sglang.kv_log import KvLog
from jaxsgl.frontend.grpc.sglang.kv_stream import KvStream
from jaxsgl.frontend.grpc.sglang.loads import Busy, check_loads_request, loads_response
from jaxsgl.frontend.grpc.sglang.sampling import wish_of
from jaxsgl.frontend.grpc.sglang.tokenizer_files import chunks, zip_tokenizer
from jaxsgl.text.prompts import IdsPrompt

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["SglangScheduler"].full_name
HEALTH_LIMIT_S = 4.0  # gateways wait 5 s
_NO_LORA = "LoRA adapters are not supported: merge them into the weights and serve those"


class SglangService(pb_grpc.SglangSchedulerServicer):
    """The servicer."""

    def __init__(self, front_end: FrontEnd) -> None:
        self._config = front_end.config
        self._engine = front_end.engine
        self._generator = front_end.generator
        self._throughput = front_end.throughput
        self._kv_log = KvLog(front_end.engine, last=time.time_ns() // 1000)  # beyond those of servers before this one
        self._start_s = time.time()

    @answers_errors
    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Streams chunks and completions. A cancelled call aborts the request; so does Abort, and then it completes."""
        request_id = request.request_id or uuid.uuid4().hex
        wish = wish_of(request)
        prepared = await self._generator.prepare(IdsPrompt(request.tokenized.input_ids), wish.sampling, request_id)
        responses = Responses(request_id, wish, prepared.prompt_ids)
        with self._generator.start(prepared, text=bool(wish.sampling.stop)) as generation:
            async for piece in generation:
                for response in responses.of(piece):
                    await write(context, response)

    @answers_errors
    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        """Ends a running request by its id."""
        if self._engine.abort(request.request_id):
            return pb.AbortResponse(success=True)
        return pb.AbortResponse(success=False, message=f"no request with id {request.request_id!r} is running")

    @answers_errors
    async def HealthCheck(
        self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> pb.HealthCheckResponse:
        """Healthy if the engine's loop turns; otherwise says why not, as an answer and not as an error.

        While the engine starts, it is an error (`EngineUnavailable`): a gateway takes the first answer for its cue to
        ask for the model, once.
        """
        _ = self._generator.model
        try:
            await self._engine.check_alive(HEALTH_LIMIT_S)
        except EngineUnavailable as error:
            return pb.HealthCheckResponse(healthy=False, message=str(error))
        return pb.HealthCheckResponse(healthy=True)

    @answers_errors
    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        """Tells what is served."""
        return await asyncio.to_thread(model_info, self._generator.model, self._config)

    @answers_errors
    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        """Tells how the server was started."""
        engine = self._engine
        heard_s = time.time() - (time.monotonic() - engine.heard_s)
        paused = engine.load.paused
        return server_info(self._generator.model, self._config, self._start_s, engine.num_open, heard_s, paused)

    @answers_errors
    async def GetLoads(self, request: pb.GetLoadsRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadsResponse:
        """Tells how busy the engine is."""
        check_loads_request(request)
        return loads_response(self._busy(), request.include)

    @answers_errors
    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.FlushCacheResponse:
        """Empties the prefix cache."""
        return await admin.flush_cache(self._engine, request)

    @answers_errors
    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.ProfileResponse:
        """Starts to record a trace."""
        return await admin.start_profile(self._engine, request)

    @answers_errors
    async def StopProfile(
        self, request: common_pb2.StopProfileRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.ProfileResponse:
        """Writes the trace."""
        return await admin.stop_profile(self._engine)

    @answers_errors
    async def GetTokenizer(self, request: common_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext) -> None:
        """Streams the tokenizer's files as a zip."""
        model = self._generator.model
        if not model.tokenizer.exists:
            raise NotFound(f"the model {model.info.model_path} has no tokenizer: give the gateway a tokenizer path")
        for chunk in chunks(await asyncio.to_thread(zip_tokenizer, Path(model.info.model_path))):
            await write(context, chunk)

    @answers_errors
    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Streams what happens to the prefix cache, and the load, until the client leaves."""
        self._busy()  # refuses while the engine starts
        start = request.start_sequence_number
        if start:
            self._kv_log.after(start)  # gateways start anew if they are refused here, but not behind the metadata
        stream = KvStream(self._kv_log, self._engine, self._busy, request.load_records_before_first_batch)
        await context.send_initial_metadata(())  # a client waits for it, and events may be long in coming
        async with contextlib.aclosing(stream.batches(start)) as batches:
            async for batch in batches:
                await write(context, batch)

    @answers_errors
    async def Embed(self, request: pb.EmbedRequest, context: grpc.aio.ServicerContext) -> pb.EmbedResponse:
        """Refuses."""
        raise Unsupported("embeddings are not supported: the model served generates text")

    @answers_errors
    async def LoadLoRAAdapter(
        self, request: pb.LoadLoRAAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.LoadLoRAAdapterResponse:
        """Refuses."""
        raise Unsupported(_NO_LORA)

    @answers_errors
    async def UnloadLoRAAdapter(
        self, request: pb.UnloadLoRAAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.UnloadLoRAAdapterResponse:
        """Refuses."""
        raise Unsupported(_NO_LORA)

    @answers_errors
    async def ListLoadedLoRAAdapters(
        self, request: pb.ListLoadedLoRAAdaptersRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListLoadedLoRAAdaptersResponse:
        """Refuses."""
        raise Unsupported(_NO_LORA)

    def _busy(self) -> Busy:
        return Busy(self._generator.model.info, self._engine.load, self._throughput.rates())
