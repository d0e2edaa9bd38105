"""The gRPC service `sglang.grpc.scheduler.SglangScheduler`: what gateways call. Tokens in, tokens out.

Each method only leads to the file that does its work; errors become statuses in `answers_errors`. Knows no text but
stop strings. The asyncio gRPC server calls it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from pathlib import Path

import grpc
from smg_grpc_proto import sglang_scheduler_pb2 as pb
from smg_grpc_proto import sglang_scheduler_pb2_grpc as pb_grpc
from smg_grpc_proto.generated import common_pb2

from jaxsgl.errors import EngineUnavailable, NotFound
from jaxsgl.frontend.front_end import FrontEnd
from jaxsgl.frontend.grpc_api.errors import answers_errors
from jaxsgl.frontend.grpc_api.sglang.generate import Responses
from jaxsgl.frontend.grpc_api.sglang.infos import model_info, server_info
from jaxsgl.frontend.grpc_api.sglang.sampling import wish_of
from jaxsgl.frontend.grpc_api.sglang.tokenizer_files import chunks, zip_tokenizer
from jaxsgl.frontend.prompts import IdsPrompt

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["SglangScheduler"].full_name
HEALTH_LIMIT_S = 4.0  # gateways wait 5 s


class SglangService(pb_grpc.SglangSchedulerServicer):
    """The servicer."""

    def __init__(self, front_end: FrontEnd) -> None:
        self._config = front_end.config
        self._engine = front_end.engine
        self._generator = front_end.generator
        self._start_s = time.time()

    @answers_errors
    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Streams chunks and completions. A cancelled call aborts the request; so does Abort, and then it completes."""
        request_id = request.request_id or uuid.uuid4().hex
        wish = wish_of(request)
        prepared = await self._generator.prepare(IdsPrompt(request.tokenized.input_ids), wish.sampling, request_id)
        responses = Responses(request_id, wish, prepared.prompt_ids)
        with self._generator.start(prepared) as generation:
            async for piece in generation:
                for response in responses.of(piece):
                    await context.write(response)

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
        return server_info(self._generator.model, self._config, self._start_s, engine.num_open, heard_s)

    @answers_errors
    async def GetTokenizer(self, request: common_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext) -> None:
        """Streams the tokenizer's files as a zip."""
        model = self._generator.model
        if not model.tokenizer.exists:
            raise NotFound(f"the model {model.info.model_path} has no tokenizer: give the gateway a tokenizer path")
        for chunk in chunks(await asyncio.to_thread(zip_tokenizer, Path(model.info.model_path))):
            await context.write(chunk)
