"""From the fields of a body to `SamplingParams`, and what is refused because ignoring it would give wrong answers."""

from __future__ import annotations

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.http.openai.schemas import Sampled
from jaxsgl.request import MAX_SEED, SamplingParams

# Fields that other servers know and that change the answer. Empty or false, they ask for nothing.
# fmt: off
NOT_BUILT = frozenset({
    "allowed_token_ids", "audio", "bad_words", "chat_template", "custom_logit_processor", "documents", "ebnf",
    "function_call", "functions", "guided_choice", "guided_grammar", "guided_json", "guided_regex", "input_embeds",
    "json_schema", "logits_processors", "lora_path", "prompt_embeds", "regex", "stop_regex", "structural_tag",
    "structured_outputs", "truncate_prompt_tokens", "use_beam_search",
})
_SAME = (
    "frequency_penalty", "ignore_eos", "min_p", "min_tokens", "n", "presence_penalty", "repetition_penalty",
    "temperature", "top_k", "top_p",
)
# fmt: on


def sampling_of(
    body: Sampled, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None = None
) -> SamplingParams:
    """What `body` asks for; null and absent fields have the defaults of `SamplingParams`. Raises `InvalidRequest`."""
    _refuse_what_is_not_built(body)
    same = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    stop = body.stop or ()
    return SamplingParams(
        **same,
        logit_bias={int(token_id): bias for token_id, bias in (body.logit_bias or {}).items()},
        seed=None if body.seed is None else body.seed & MAX_SEED,
        max_tokens=max_tokens,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        include_stop_str_in_output=bool(body.include_stop_str_in_output or body.no_stop_trim),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _refuse_what_is_not_built(body: Sampled) -> None:
    for name, value in (body.model_extra or {}).items():
        if name in NOT_BUILT and value:
            raise InvalidRequest(f"{name} isn't built yet: leave it out")
    if body.skip_special_tokens is False:
        raise InvalidRequest("skip_special_tokens is false, but special tokens have no text here: leave it out")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options are given, but stream is not true: leave them out, or set stream to true")
