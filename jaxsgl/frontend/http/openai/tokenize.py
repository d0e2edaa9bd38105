"""/tokenize and /detokenize, as vLLM and SGLang have them."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.front_end import FrontEnd
from jaxsgl.frontend.http.openai.logprobs import name_of
from jaxsgl.frontend.http.openai.messages import chat_prompt
from jaxsgl.frontend.http.openai.models import check_model
from jaxsgl.frontend.http.openai.replies import encode, json_response
from jaxsgl.frontend.http.openai.schemas import DetokenizeRequest, TokenizeRequest
from jaxsgl.request import check_token_ids
from jaxsgl.text.prompts import Prompt, TextPrompt


def add_routes(router: APIRouter, front_end: FrontEnd) -> None:
    """The endpoints, each also below /v1."""
    generator = front_end.generator

    @router.post("/tokenize")
    @router.post("/v1/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a text, of each of several texts, or of messages in the chat template."""
        check_model(front_end, body.model)
        model = generator.model
        several = isinstance(body.prompt, list)
        of_each = [await generator.tokenize(prompt) for prompt in _prompts(body, front_end)]
        answer: dict[str, object] = {
            "tokens": of_each if several else of_each[0],
            "count": [len(ids) for ids in of_each] if several else len(of_each[0]),
            "max_model_len": model.info.limits.context_length,
        }
        if body.return_token_strs:
            names = [[name_of(model.tokenizer, token_id) for token_id in ids] for ids in of_each]
            answer["token_strs"] = names if several else names[0]
        return json_response(encode(answer))

    @router.post("/detokenize")
    @router.post("/v1/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids, under vLLM's name and SGLang's."""
        check_model(front_end, body.model)
        model = generator.model
        limits = model.info.limits
        if len(body.tokens) > limits.context_length:
            raise InvalidRequest(
                f"{len(body.tokens)} tokens are given, but the context holds {limits.context_length}: send fewer"
            )
        if not model.tokenizer.exists:
            raise InvalidRequest("the model folder has no tokenizer: ids can't be turned into text")
        check_token_ids("tokens", body.tokens, limits.vocab_size)
        text = await generator.decode(body.tokens)
        return json_response(encode({"prompt": text, "text": text}))


def _prompts(body: TokenizeRequest, front_end: FrontEnd) -> list[Prompt]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("either prompt or messages must be given: send one of them")
    if body.messages is not None:
        return [chat_prompt(body, front_end.generator.model.tokenizer)]
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt or []
    return [TextPrompt(text, body.add_special_tokens is not False) for text in texts]
