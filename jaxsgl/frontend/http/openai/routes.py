"""All endpoints of OpenAI's API, and the tokenizer's endpoints of vLLM and SGLang; app.py includes the router.

Checks the model that a body names. chat.py and completions.py answer their endpoints; the small ones are answered here.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, cast

from fastapi import APIRouter, Depends
from starlette.responses import Response

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.adapters import adapter_of, loaded
from jaxsgl.frontend.generation import FrontEnd
from jaxsgl.frontend.http.bodies import StrictJson
from jaxsgl.frontend.http.calls import while_connected
from jaxsgl.frontend.http.openai.chat import answer_chat, chat_prompt
from jaxsgl.frontend.http.openai.completions import answer_completions
from jaxsgl.frontend.http.openai.conversation import ResponsesRequest
from jaxsgl.frontend.http.openai.embeddings import EmbeddingRequest, answer_embeddings
from jaxsgl.frontend.http.openai.logprobs import name_of
from jaxsgl.frontend.http.openai.ranking import (
    ClassifyRequest,
    RerankRequest,
    ScoreRequest,
    answer_classify,
    answer_rerank,
    answer_score,
)
from jaxsgl.frontend.http.openai.replies import encode, json_response
from jaxsgl.frontend.http.openai.responses import ResponseStore, answer_responses, count_input_tokens
from jaxsgl.frontend.http.openai.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from jaxsgl.frontend.http.openai.speech import Speech, answer_speech, form_schema, speech_of
from jaxsgl.messages.orders import LoadedAdapter
from jaxsgl.requests.request import check_token_ids
from jaxsgl.text.prompts import Prompt, TextPrompt


def router(front_end: FrontEnd) -> APIRouter:
    """Returns the endpoints, for `front_end`."""
    router = APIRouter(route_class=StrictJson)
    store = ResponseStore(front_end.config.responses_store_bytes)

    @router.post("/v1/chat/completions")
    @while_connected
    async def chat_completions(body: ChatRequest) -> Response:
        """The assistant's next turn, whole or streamed."""
        return await answer_chat(front_end, body, adapter_of(front_end, body.model, body.lora_path))

    @router.post("/v1/completions")
    @while_connected
    async def completions(body: CompletionRequest) -> Response:
        """Continues each prompt n times; choices are numbered prompt by prompt. Whole or streamed."""
        return await answer_completions(front_end, body, adapter_of(front_end, body.model, body.lora_path))

    @router.post("/v1/responses")
    @while_connected
    async def responses(body: ResponsesRequest) -> Response:
        """The assistant's next turn as OpenAI's Responses API has it; kept for a while, for previous_response_id."""
        return await answer_responses(front_end, store, body, adapter_of(front_end, body.model, body.lora_path))

    @router.post("/v1/responses/input_tokens")
    async def count_tokens(body: ResponsesRequest) -> Response:
        """How many tokens the prompt of such a body has."""
        adapter_of(front_end, body.model, body.lora_path)
        return await count_input_tokens(front_end, store, body)

    @router.get("/v1/responses/{response_id}")
    async def get_response(response_id: str, stream: bool = False) -> Response:
        """An answer that is kept; only whole."""
        if stream:
            raise InvalidRequest("stream is true, but an answer that is kept comes whole: leave it out")
        return json_response(store.get(response_id).answer)

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str) -> Response:
        """Forgets an answer."""
        store.delete(response_id)
        return json_response(encode({"id": response_id, "object": "response", "deleted": True}))

    _add_speech(router, front_end)
    _add_pooling(router, front_end)
    _add_models(router, front_end)
    _add_tokenizer(router, front_end)
    return router


def _add_speech(router: APIRouter, front_end: FrontEnd) -> None:
    """Adds what answers with the words of a file of sound."""

    @router.post("/v1/audio/transcriptions", openapi_extra=form_schema())
    @while_connected
    async def transcriptions(speech: Annotated[Speech, Depends(speech_of)]) -> Response:
        """What is said in a file, which comes in a form: whole or streamed."""
        return await answer_speech(front_end, speech, adapter_of(front_end, speech.body.model))

    @router.post("/v1/audio/translations", openapi_extra=form_schema())
    @while_connected
    async def translations(speech: Annotated[Speech, Depends(speech_of)]) -> Response:
        """What is said in a file, in English."""
        return await answer_speech(front_end, speech, adapter_of(front_end, speech.body.model), translates=True)


def _add_pooling(router: APIRouter, front_end: FrontEnd) -> None:
    """Adds what answers with vectors and scores; each path as OpenAI, vLLM, SGLang, Jina or Cohere have it."""

    @router.post("/v1/embeddings")
    @while_connected
    async def embeddings(body: EmbeddingRequest) -> Response:
        """The vector of each input."""
        return await answer_embeddings(front_end, body)

    @router.post("/score")
    @router.post("/v1/score")
    @while_connected
    async def score(body: ScoreRequest) -> Response:
        """Scores of pairs of texts, or of label tokens after items."""
        return await answer_score(front_end, body)

    @router.post("/rerank")
    @router.post("/v1/rerank")
    @router.post("/v2/rerank")
    @while_connected
    async def rerank(body: RerankRequest) -> Response:
        """The documents that answer the query, best first."""
        return await answer_rerank(front_end, body)

    @router.post("/classify")
    @router.post("/v1/classify")
    @while_connected
    async def classify(body: ClassifyRequest) -> Response:
        """The class of each input, by a classification head."""
        return await answer_classify(front_end, body)


def _add_models(router: APIRouter, front_end: FrontEnd) -> None:
    started_s = int(time.time())
    started_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started_s))

    def card(adapter: LoadedAdapter | None = None) -> dict[str, object]:
        config = front_end.config
        name = config.model_name if adapter is None else adapter.name
        of_anthropic = {"type": "model", "display_name": name, "created_at": started_at}
        return of_anthropic | {
            "id": name,
            "object": "model",
            "created": started_s,
            "owned_by": "jaxsgl",
            "root": config.engine.model if adapter is None else adapter.folder,
            "parent": None if adapter is None else config.model_name,
            "max_model_len": front_end.generator.model.info.limits.context_length,
        }

    @router.get("/v1/models")
    @router.get("/v1/models/", include_in_schema=False)  # otherwise a model without a name
    async def list_models() -> Response:
        """What is served: the model, and its LoRA adapters as models of their own."""
        of_adapters = map(card, await loaded(front_end.engine))
        return json_response(encode({"object": "list", "data": [card(), *of_adapters]}))

    @router.get("/v1/models/{model:path}")
    async def get_model(model: str) -> Response:
        """The model of this name, or the adapter; names may hold slashes."""
        name = adapter_of(front_end, model)
        found = await loaded(front_end.engine) if name else []
        return json_response(encode(card(next((each for each in found if each.name == name), None))))


def _add_tokenizer(router: APIRouter, front_end: FrontEnd) -> None:
    """Adds /tokenize and /detokenize, each also below /v1."""
    generator = front_end.generator

    @router.post("/tokenize")
    @router.post("/v1/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a text, of each of several texts, or of messages in the chat template."""
        adapter_of(front_end, body.model)
        model = generator.model
        several = isinstance(body.prompt, list)
        of_each = await _tokenized(body, front_end)

        def write() -> bytes:
            answer: dict[str, object] = {
                "tokens": of_each if several else of_each[0],
                "count": [len(ids) for ids in of_each] if several else len(of_each[0]),
                "max_model_len": model.info.limits.context_length,
            }
            if body.return_token_strs:
                names = [[name_of(model.tokenizer, token_id) for token_id in ids] for ids in of_each]
                answer["token_strs"] = names if several else names[0]
            return encode(answer)

        return json_response(await generator.off_loop(sum(map(len, of_each)), write))

    @router.post("/detokenize")
    @router.post("/v1/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids, or of each of several lists: vLLM's `prompt`, and SGLang's `text`."""
        adapter_of(front_end, body.model)
        if not generator.model.tokenizer.exists:
            raise InvalidRequest("the model folder has no tokenizer: ids can't be turned into text")
        several = bool(body.tokens) and isinstance(body.tokens[0], list)
        lists = cast(list[list[int]], body.tokens if several else [body.tokens])
        limits = generator.model.info.limits
        for ids in lists:
            if len(ids) > limits.context_length:
                raise InvalidRequest(
                    f"{len(ids)} tokens are given, but the context holds {limits.context_length}: send fewer"
                )
            check_token_ids("tokens", ids, limits.vocab_size)
        answer: dict[str, object] = {}
        for name, skips in (("prompt", False), ("text", True)):
            skips = skips if body.skip_special_tokens is None else body.skip_special_tokens
            texts = [await generator.decode(ids, not skips) for ids in lists]
            answer[name] = texts if several else texts[0]
        return json_response(encode(answer))


async def _tokenized(body: TokenizeRequest, front_end: FrontEnd) -> list[list[int]]:
    """Returns the ids of each text, or of the messages. A text may be empty here, as no prompt may."""
    prompts = _prompts_to_tokenize(body, front_end)
    ids = iter(await front_end.generator.tokenize_all([prompt for prompt in prompts if not _is_empty(prompt)]))
    tokenizer = front_end.generator.model.tokenizer
    around = body.add_special_tokens is not False and any(map(_is_empty, prompts))
    of_nothing = tokenizer.ids_of_nothing() if around else []
    return [of_nothing if _is_empty(prompt) else next(ids) for prompt in prompts]


def _is_empty(prompt: Prompt) -> bool:
    return isinstance(prompt, TextPrompt) and not prompt.text


def _prompts_to_tokenize(body: TokenizeRequest, front_end: FrontEnd) -> list[Prompt]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("either prompt or messages must be given: send one of them")
    if body.messages is not None:
        trusts = front_end.config.trust_request_chat_template
        tools: list[dict[str, Any]] | None = [] if body.tool_choice == "none" else None
        return [chat_prompt(body, front_end.generator.model.tokenizer, tools, trusts_template=trusts)]
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt or []
    return [TextPrompt(text, body.add_special_tokens is not False) for text in texts]
