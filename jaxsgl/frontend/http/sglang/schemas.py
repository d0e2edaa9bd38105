"""Bodies of SGLang's endpoints. The OpenAPI description is made of them.

Holds types and limits, as openai/schemas.py does. As in SGLang, unknown fields of the body are ignored and unknown
sampling parameters are refused; generate.py refuses ignored fields that would change the answer.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import pydantic
from pydantic import ConfigDict, Field, model_validator

from jaxsgl.frontend.http.bodies import (
    MAX_INT,
    MAX_TEXTS,
    Body,
    CacheSalt,
    IdLists,
    LogitBias,
    LoraPaths,
    Priority,
    Speculative,
    Stop,
    StopRegex,
    StopTokenIds,
    TextList,
    TokenIds,
    TopLogprobs,
    one_error,
    within,
)
from jaxsgl.frontend.http.errors import UNION_TAG
from jaxsgl.frontend.http.grammars import GrammarText, Schema, Tag
from jaxsgl.requests.request import BOUNDS

MAX_FILES = 1024  # of a prompt; how many a model takes is known later
DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's
Flag = bool | None


class SamplingBody(Body):
    """Sampling parameters by SGLang's names; null is the same as absent."""

    model_config = ConfigDict(extra="forbid")

    max_new_tokens: Annotated[int, Field(ge=0, le=MAX_INT, description="0: nothing, to score the prompt alone")] = (
        DEFAULT_MAX_NEW_TOKENS
    )
    min_new_tokens: Annotated[int, within(BOUNDS["min_tokens"])] = 0
    n: Annotated[int, within(BOUNDS["n"])] = 1
    temperature: Annotated[float, within(BOUNDS["temperature"])] = 1.0
    top_p: Annotated[float, within(BOUNDS["top_p"])] = 1.0
    top_k: Annotated[int, within(BOUNDS["top_k"])] = -1
    min_p: Annotated[float, within(BOUNDS["min_p"])] = 0.0
    frequency_penalty: Annotated[float, within(BOUNDS["frequency_penalty"])] = 0.0
    presence_penalty: Annotated[float, within(BOUNDS["presence_penalty"])] = 0.0
    repetition_penalty: Annotated[float, within(BOUNDS["repetition_penalty"])] = 1.0
    logit_bias: LogitBias | None = None
    sampling_seed: Annotated[int, within(BOUNDS["seed"])] | None = None
    json_schema: Annotated[Schema, Field(description="of these four one at most")] | None = None
    regex: GrammarText | None = None
    ebnf: GrammarText | None = None
    structural_tag: Tag | None = None
    stop: Stop | None = None
    stop_regex: StopRegex | None = None
    stop_token_ids: StopTokenIds | None = None
    no_stop_trim: bool = False
    ignore_eos: bool = False
    skip_special_tokens: Annotated[bool, Field(description="false: their names are in the text")] = True
    spaces_between_special_tokens: Annotated[bool, Field(description="no spaces are added, either way")] = True

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, data: Any) -> Any:
        """SGLang's clients send null for what they don't set, constraints included."""
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


# Errors are those of the member that was meant, and leave out its tag.
SamplingOfPrompts = Annotated[
    Annotated[SamplingBody, pydantic.Tag(f"{UNION_TAG}one")]
    | Annotated[list[SamplingBody], Field(max_length=MAX_TEXTS, fail_fast=True), pydantic.Tag(f"{UNION_TAG}of each")],
    pydantic.Discriminator(lambda given: UNION_TAG + ("of each" if isinstance(given, list) else "one")),
]
Files = Annotated[list[str], Field(max_length=MAX_FILES, fail_fast=True)]
FilesOfPrompts = Annotated[
    str | Annotated[list[str | Files | None], Field(max_length=MAX_TEXTS, fail_fast=True)],
    one_error("must be a URL or base64, a list of these, or for several prompts a list with an entry for each"),
]
InputIds = Annotated[
    TokenIds | IdLists, one_error(f"must be a list of token ids, or a list of 1 to {MAX_TEXTS} such lists")
]


ValueT = TypeVar("ValueT")
OfEach: TypeAlias = Annotated[list[ValueT], Field(max_length=MAX_TEXTS, fail_fast=True)]
StartLen = Annotated[int, Field(ge=-1, le=MAX_INT)]
_ONE_OR_EACH = "must be {}, or a list with one for each prompt"


class GenerateBody(Body):
    """Body of /generate: one prompt or several, as text or as token ids."""

    text: Annotated[str | TextList, one_error(f"must be a text, or a list of 1 to {MAX_TEXTS} texts")] | None = None
    input_ids: InputIds | None = None
    sampling_params: SamplingOfPrompts | None = None
    image_data: Annotated[FilesOfPrompts, Field(description="pictures, each with a placeholder")] | None = None
    video_data: Annotated[FilesOfPrompts, Field(description="videos, likewise")] | None = None
    audio_data: Annotated[FilesOfPrompts, Field(description="sounds, likewise")] | None = None
    rid: (
        Annotated[
            str | list[str],
            one_error("must be a text, or a list with one for each prompt"),
            Field(description="names the request, for /abort_request"),
        ]
        | None
    ) = None
    stream: Flag = None
    return_logprob: Annotated[Flag | OfEach[bool], one_error(_ONE_OR_EACH.format("true or false"))] = None
    logprob_start_len: (
        Annotated[
            StartLen | OfEach[StartLen],
            one_error(_ONE_OR_EACH.format("-1 or more")),
            Field(description="with return_logprob: the first prompt token to score; -1: none"),
        ]
        | None
    ) = None
    top_logprobs_num: (
        Annotated[
            TopLogprobs | OfEach[TopLogprobs],
            one_error(_ONE_OR_EACH.format(f"0 to {BOUNDS['logprobs'].high:g}")),
            Field(description="with return_logprob"),
        ]
        | None
    ) = None
    token_ids_logprob: (
        Annotated[
            TokenIds | IdLists,
            one_error("must be a list of token ids, or a list with one such list for each prompt"),
            Field(description="with return_logprob: these tokens' log-probabilities at each output token"),
        ]
        | None
    ) = None
    return_text_in_logprobs: Flag = None
    return_hidden_states: Annotated[Flag, Field(description="of servers with --enable-return-hidden-states")] = None
    return_routed_experts: Annotated[Flag, Field(description="of servers with --enable-return-routed-experts")] = None
    priority: Priority | None = None
    data_parallel_rank: (
        Annotated[int, Field(ge=0, le=MAX_INT, description="the replica that must serve it, of --dp-size")] | None
    ) = None
    extra_key: CacheSalt | None = None
    cache_salt: Annotated[CacheSalt, Field(description="vLLM's word for extra_key")] | None = None
    lora_path: LoraPaths | None = None
    speculative: Speculative | None = None


class AbortBody(Body):
    """Body of /abort_request: which request, those whose rids begin alike, or all."""

    rid: str | None = None
    prefix: Annotated[Flag, Field(description="abort all requests whose rids begin with rid")] = None
    abort_all: Flag = None


class ProfileBody(Body):
    """Body of /start_profile. Other fields of SGLang's don't change what a trace holds, and are ignored."""

    output_dir: Annotated[str, Field(description="name of a new folder below --profile-dir")] | None = None
    num_steps: int | None = None
    start_step: Annotated[int, Field(description="not supported")] | None = None
    profile_by_stage: Annotated[Flag, Field(description="one trace of extend steps, one of decode steps")] = None


class PauseBody(Body):
    """Body of /pause_generation; the modes are SGLang's, and so is the default."""

    mode: Annotated[
        Literal["abort", "retract", "in_place"],
        Field(description="running requests end, go back to the queue without their KV, or stay as they are"),
    ] = "abort"


WeightVersion = Annotated[str, Field(min_length=1, max_length=256)]


class UpdateWeightsBody(Body):
    """Body of /update_weights_from_disk. SGLang's other fields don't change what is served, and are ignored."""

    model_path: Annotated[str, Field(min_length=1, max_length=4096, description="a model folder or hub id")]
    load_format: Annotated[Literal["auto", "safetensors"], Field(description="no other is supported")] | None = None
    weight_version: Annotated[WeightVersion, Field(description="default: the number of updates so far")] | None = None
    abort_all_requests: Annotated[Flag, Field(description="as mode abort")] = None
    mode: Annotated[
        Literal["wait", "retract", "abort", "in_place"] | None,
        Field(
            description="requests that have begun end first, go on after their KV is computed again, end at once, or "
            "go on with the KV of the old weights"
        ),
    ] = None


class WeightVersionBody(Body):
    """Body of /update_weight_version."""

    new_version: WeightVersion
    abort_all_requests: Annotated[Flag, Field(description="as in SGLang, true unless it is false")] = None


AdapterName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")]


class LoadAdapterBody(Body):
    """Body of /load_lora_adapter: SGLang's, with vLLM's load_inplace."""

    lora_name: AdapterName
    lora_path: Annotated[str, Field(min_length=1, max_length=4096, description="a folder or hub id")]
    pinned: Annotated[Flag, Field(description="keep it on the device once it is there")] = None
    load_inplace: Annotated[Flag, Field(description="take the place of one of the same name")] = None


class UnloadAdapterBody(Body):
    """Body of /unload_lora_adapter."""

    lora_name: AdapterName


class MemoryBody(Body):
    """Body of /release_memory_occupation and /resume_memory_occupation."""

    tags: (
        Annotated[
            list[Literal["weights", "kv_cache", "cuda_graph"]],
            Field(max_length=16, description="default: all; graphs take no memory of their own here"),
        ]
        | None
    ) = None
