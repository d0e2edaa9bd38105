"""The gRPC service `sglang.grpc.scheduler.SglangScheduler`, which gateways call: tokens in, tokens out.

Each method leads to the part that does its work: the generator, the engine link, or this package's conversions. Errors
become statuses in `answers_errors`. Never handles text, except that stop strings are found in it. The asyncio gRPC
server calls it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
from smg_grpc_proto import sglang_scheduler_pb2 as pb
from smg_grpc_proto import sglang_scheduler_pb2_grpc as pb_grpc
from smg_grpc_proto.generated import common_pb2

from jaxsgl.errors import EngineUnavailable, InvalidRequest, NotFound
from jaxsgl.frontend import adapters
from jaxsgl.frontend.engines.link import ANSWER_LIMIT_S, MAX_FLUSH_WAIT_S
from jaxsgl.frontend.generation import TEXT_ALONE, FrontEnd, Prompted
from jaxsgl.frontend.grpc.interceptors import answers_errors, counts_errors, write
from jaxsgl.frontend.grpc.sglang.convert import Responses, options_of
from jaxsgl.frontend.grpc.sglang.info import chunks, model_info, server_info, zip_tokenizer
from jaxsgl.frontend.grpc.sglang.kv_events import KvLog, KvStream
from jaxsgl.frontend.grpc.sglang.loads import Busy, check_loads_request, loads_response
from jaxsgl.frontend.pooling import PoolingCall, pool, spec_of, vector_of
from jaxsgl.messages.orders import FlushCache
from jaxsgl.text.prompts import IdsPrompt

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["SglangScheduler"].full_name
HEALTH_LIMIT_S = 4.0  # gateways wait 5 s


class SglangService(pb_grpc.SglangSchedulerServicer):
    """The servicer."""

    def __init__(self, front_end: FrontEnd) -> None:
        self._config = front_end.config
        self._is_prefill = front_end.config.engine.disaggregation.disaggregation_mode == "prefill"
        self._engine = front_end.engine
        self._generator = front_end.generator
        self._metrics = front_end.metrics
        self._profiles = front_end.profiles
        self._num_open = front_end.num_open
        # Beyond the numbers of servers before this one, and of other processes: a subscriber may come from any of them.
        self._kv_log = KvLog(front_end.engine, last=(front_end.engine.line % 1024 << 52) + time.time_ns() // 1000)
        self._start_s = time.time()

    @answers_errors
    @counts_errors
    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Streams chunks and completions. A cancelled call aborts the request; so does Abort, and then it completes."""
        request_id = request.request_id or uuid.uuid4().hex
        options = options_of(request)
        prompt = IdsPrompt(request.tokenized.input_ids)
        if request.mm_inputs.ByteSize():
            prompt = await self._with_media(prompt, request.mm_inputs)
        prepared = await self._generator.prepare(Prompted(prompt, options.sampling, request_id, options.of_request))
        is_leg = options.of_request.room is not None
        if is_leg:
            options = replace(options, sampling=prepared.sampling)
        responses = Responses(request_id, options, prepared.prompt_ids, self._generator.model.info.limits.states)
        scored = options.sampling.logprobs is not None or options.sampling.wants_states
        with self._generator.start(prepared, text=bool(options.sampling.stop), rank=options.rank) as generation:
            if is_leg:  # a gateway hears of the other leg's end only once it has heard of both
                await (write(context, responses.begun()) if self._is_prefill else context.send_initial_metadata(()))
            async for piece in generation:
                ready = responses.of(piece)
                if scored:
                    ready = iter(await self._generator.off_loop(responses.num_scores(piece), partial(list, ready)))
                for response in ready:
                    await write(context, response)

    @answers_errors
    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        """Ends a running request by its id."""
        if await self._engine.abort(request.request_id):
            return pb.AbortResponse(success=True)
        return pb.AbortResponse(success=False, message=f"no request with id {request.request_id!r} is running")

    @answers_errors
    async def HealthCheck(
        self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> pb.HealthCheckResponse:
        """Returns healthy if an engine's loop turns, and otherwise why not: as an answer, not as an error.

        The message names the replicas that don't serve while others do.

        While the engine starts, the answer is an error (`EngineUnavailable`): at the first other answer a gateway asks
        for the model, once.
        """
        _ = self._generator.model
        try:
            await self._engine.check_alive(HEALTH_LIMIT_S)
        except EngineUnavailable as error:
            return pb.HealthCheckResponse(healthy=False, message=str(error))
        return pb.HealthCheckResponse(healthy=True, message="; ".join(self._engine.problems))

    @answers_errors
    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        """Returns what is served."""
        version = self._engine.load.weight_version
        return await asyncio.to_thread(model_info, self._generator.model, self._config, version)

    @answers_errors
    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        """Returns how the server was started."""
        engine = self._engine
        heard_s = time.time() - (time.monotonic() - engine.heard_s)
        paused = engine.load.paused
        return server_info(self._generator.model, self._config, self._start_s, await self._num_open(), heard_s, paused)

    @answers_errors
    async def GetLoads(self, request: pb.GetLoadsRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadsResponse:
        """Returns how busy each replica is, or each rank."""
        ranks = range(len(self._engine.places))
        check_loads_request(request, len(ranks))
        rank = request.dp_rank if request.HasField("dp_rank") else None
        return loads_response([self._busy(rank) for rank in ranks], request.include, rank)

    @answers_errors
    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.FlushCacheResponse:
        """Empties the prefix cache as soon as no request waits or runs, within `timeout_s`."""
        timeout_s = request.timeout_s
        if not 0 <= timeout_s <= MAX_FLUSH_WAIT_S:
            raise InvalidRequest(f"timeout_s is {timeout_s}, but must be 0 to {MAX_FLUSH_WAIT_S:g} seconds")
        answer = await self._engine.ask(lambda number: FlushCache(number, timeout_s), timeout_s + ANSWER_LIMIT_S)
        return common_pb2.FlushCacheResponse(success=answer.ok, message=answer.text)

    @answers_errors
    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.ProfileResponse:
        """Records a trace from now on. What it holds can't be chosen: it has both the device and the host."""
        if request.start_step:
            raise InvalidRequest(f"start_step is {request.start_step}, but recording starts at once: leave it out")
        num_steps = request.num_steps if request.HasField("num_steps") else None
        answer = await self._profiles.start(request.output_dir, num_steps, request.profile_by_stage)
        return common_pb2.ProfileResponse(success=answer.ok, message=answer.text)

    @answers_errors
    async def StopProfile(
        self, request: common_pb2.StopProfileRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.ProfileResponse:
        """Ends recording and writes the trace; the message names its folder."""
        answer = await self._profiles.stop()
        return common_pb2.ProfileResponse(success=answer.ok, message=answer.text)

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
        _ = self._generator.model  # raises while the engine starts
        start = request.start_sequence_number
        if start:
            self._kv_log.after(start)  # gateways start over if they are refused here, but not after the metadata
        stream = KvStream(self._kv_log, self._engine, self._busy, request.load_records_before_first_batch)
        await context.send_initial_metadata(())  # a client waits for it, and events may be long in coming
        async with contextlib.aclosing(stream.batches(start)) as batches:
            async for batch in batches:
                await write(context, batch)

    @answers_errors
    @counts_errors
    async def Embed(self, request: pb.EmbedRequest, context: grpc.aio.ServicerContext) -> pb.EmbedResponse:
        """Returns the embedding of token ids, or the logits of a classification head's classes in its place."""
        if request.HasField("mm_inputs") and request.mm_inputs.ByteSize():
            raise InvalidRequest("mm_inputs are given, but only texts are embedded: leave them out")
        if request.is_cross_encoder or request.texts:
            raise InvalidRequest("is_cross_encoder needs texts, which this service does not tokenize: call /v1/rerank")
        spec = spec_of(self._generator)
        prompt = IdsPrompt(request.tokenized.input_ids)
        (answer,) = await pool(self._generator, [prompt], PoolingCall(request.request_id or uuid.uuid4().hex))
        vector = vector_of(answer, spec)
        return pb.EmbedResponse(embedding_dim=len(vector), embedding=vector, prompt_tokens=answer.prompt_tokens)

    @answers_errors
    async def LoadLoRAAdapter(
        self, request: pb.LoadLoRAAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.LoadLoRAAdapterResponse:
        """Loads an adapter, which requests name by `lora_id` or `lora_name`."""
        name, alias = request.lora_name, request.lora_id
        if not name or not request.lora_path:
            raise InvalidRequest("lora_name and lora_path must be given")
        asked = adapters.load(self._engine, self._config, name, request.lora_path, pinned=request.pinned, alias=alias)
        answer = await asked
        return pb.LoadLoRAAdapterResponse(
            success=answer.ok, message=answer.text, loaded_lora_ids=await self._adapter_ids()
        )

    @answers_errors
    async def UnloadLoRAAdapter(
        self, request: pb.UnloadLoRAAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.UnloadLoRAAdapterResponse:
        """Forgets an adapter, once the requests that have it have ended."""
        answer = await adapters.unload(self._engine, request.lora_name or request.lora_id)
        return pb.UnloadLoRAAdapterResponse(
            success=answer.ok, message=answer.text, loaded_lora_ids=await self._adapter_ids()
        )

    @answers_errors
    async def ListLoadedLoRAAdapters(
        self, request: pb.ListLoadedLoRAAdaptersRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListLoadedLoRAAdaptersResponse:
        """The adapters that requests may name."""
        return pb.ListLoadedLoRAAdaptersResponse(
            loaded_adapters=[
                pb.LoadedLoRAAdapter(
                    lora_id=each.alias or each.name, lora_name=each.name, lora_path=each.folder, pinned=each.pinned
                )
                for each in await adapters.loaded(self._engine)
            ]
        )

    async def _adapter_ids(self) -> list[str]:
        return [each.alias or each.name for each in await adapters.loaded(self._engine)]

    async def _with_media(self, prompt: IdsPrompt, inputs: pb.MultimodalInputs) -> IdsPrompt:
        """Returns the prompt with the pictures of `inputs`. Raises `InvalidRequest`."""
        loader = self._generator.model.media
        if loader is None:
            raise InvalidRequest(TEXT_ALONE)
        from jaxsgl.frontend.grpc.sglang.media import media_of, sources_of

        sglang_ids = self._config.media.mm_hash_ids == "sglang"
        read = partial(media_of, inputs, loader.settings, loader.limits, sglang_ids)
        items = await self._generator.off_loop(len(inputs.pixel_values.data), read)
        return replace(prompt, media=sources_of(inputs), items=items)

    def _busy(self, rank: int) -> Busy:
        link, of_engine = self._engine.places[rank]
        rates = self._metrics.of_replicas[self._engine.links.index(link)].rates()
        return Busy(link.info or self._generator.model.info, link.load, rates).of_rank(of_engine)
