"""SGLang's POST /encode: the embedding of a prompt, or the logits of its classes; of each of several.

app.py includes the router.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.adapters import adapters_of
from jaxsgl.frontend.generation import FrontEnd
from jaxsgl.frontend.http.bodies import (
    MAX_INT,
    Body,
    CacheSalt,
    LoraPaths,
    Priority,
    StrictJson,
    options_of,
    refuse_others,
)
from jaxsgl.frontend.http.calls import while_connected
from jaxsgl.frontend.http.openai.completions import prompts_of
from jaxsgl.frontend.http.openai.replies import encode, json_response
from jaxsgl.frontend.http.openai.schemas import Prompts
from jaxsgl.frontend.http.sglang.schemas import InputIds
from jaxsgl.frontend.pooling import PoolingAnswer, PoolingCall, pool, spec_of, vector_of
from jaxsgl.requests.outputs import check_dimensions

NOT_BUILT = frozenset({"audio_data", "image_data", "video_data"})


class EncodeBody(Body):
    """Body of /encode."""

    text: Prompts | None = None
    input_ids: InputIds | None = None
    rid: str | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    extra_key: CacheSalt | None = None
    lora_path: LoraPaths | None = None
    data_parallel_rank: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None


def router(front_end: FrontEnd) -> APIRouter:
    """Returns the endpoint, for `front_end`."""
    router = APIRouter(route_class=StrictJson, tags=["sglang"])

    @router.post("/encode")
    @while_connected
    async def encode_prompts(body: EncodeBody) -> Response:
        """An object for one prompt, a list for several."""
        refuse_others(body, NOT_BUILT)
        generator = front_end.generator
        spec = spec_of(generator)
        check_dimensions(spec, body.dimensions)
        given = body.text if body.text is not None else body.input_ids
        if given is None or (body.text is not None and body.input_ids is not None):
            raise InvalidRequest("the request needs either text or input_ids: send one of them")
        alone = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
        prompts, rank = prompts_of(given, True), body.data_parallel_rank
        options = options_of(body, adapters_of(front_end, None, body.lora_path, len(prompts)))
        call = PoolingCall(body.rid or uuid.uuid4().hex, options, rank)
        answers = await pool(generator, prompts, call)

        def one(answer: PoolingAnswer) -> dict[str, Any]:
            meta = {
                "id": call.request_id,
                "finish_reason": {"type": "length"},
                "prompt_tokens": answer.prompt_tokens,
                "cached_tokens": answer.cached_tokens,
            }
            return {"embedding": vector_of(answer, spec, body.dimensions), "meta_info": meta}

        def write() -> bytes:
            written = [one(answer) for answer in answers]
            return encode(written[0] if alone else written)

        return json_response(await generator.off_loop(len(answers) * spec.dimension, write))

    return router
