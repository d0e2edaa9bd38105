"""Offline use: the server's scheduler and engine in one process, without IPC.

llm = jaxsgl.LLM()
for completion in llm.generate(["3 + 4 =", "3 6 9 12"], jaxsgl.SamplingParams(temperature=0, max_tokens=16)):
    print(completion.text)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from jaxsgl.config.engine import DEFAULT_WEIGHT_VERSION
from jaxsgl.engine.weight_store import Tree
from jaxsgl.errors import CheckpointError, ConfigError, InvalidRequest
from jaxsgl.messages.orders import (
    FlushCache,
    LoadAdapter,
    MemoryTag,
    ReleaseMemory,
    ResumeMemory,
    UnloadAdapter,
    UpdateWeights,
)
from jaxsgl.messages.replies import TokenLogprob
from jaxsgl.models import Params
from jaxsgl.offline.chat import Conversation, conversations_of, read_chat
from jaxsgl.offline.pooling import PoolingLLM
from jaxsgl.offline.run import Encoded, Prompt, UseTqdm, as_list, encode_each, per_prompt, text_of
from jaxsgl.requests.outputs import StatesSpec, hidden_states, routed_experts
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.text.prompts import encode_prediction, with_bad_word_ids
from jaxsgl.text.sample import Piece, Speculated, join
from jaxsgl.text.tokenizer import TemplateOptions
from jaxsgl.wiring import keep_prefixes, whole

MEMORY_TAGS = tuple(tag.value for tag in MemoryTag)


@dataclass(frozen=True)
class Completion:
    """One sample of one prompt. It is its own `outputs[0]`, where programs for vLLM look for text and ids.

    Attributes:
      prompt, prompt_token_ids: the prompt as text, if it was given as one, and as the model read it.
      text: the output as text, without a stop token's and up to a stop string; empty if the model has no tokenizer.
      token_ids: the output, including a stop token or the token that completes a stop string.
      finish_reason: "stop" or "length".
      cached_tokens: how many of the prompt's tokens were in the prefix cache.
      index: which of the prompt's n samples.
      matched_stop: the EOS or stop token, or the stop string, that ended it.
      stop_reason: the same, but None at the model's EOS tokens, as in vLLM.
      logprobs: of each of `token_ids`, if asked for.
      prompt_logprobs: of the prompt's tokens except the first, if asked for; with sample 0.
      weight_version: of the weights that computed it.
      speculated: what became of its drafts, if the engine speculates.
      hidden_states, routed_experts: of all its tokens but the last, the prompt's first, if asked for:
        `[tokens, hidden_size]` and `[tokens, layers, k]`.
    """

    prompt: str | None
    prompt_token_ids: Sequence[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    cached_tokens: int
    index: int = 0
    matched_stop: int | str | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    weight_version: str = DEFAULT_WEIGHT_VERSION
    speculated: Speculated = field(default_factory=Speculated)
    hidden_states: npt.NDArray[np.float32] | None = None
    routed_experts: npt.NDArray[np.int32] | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of its tokens' log-probabilities, as in vLLM; None: they were not asked for."""
        return sum(each.logprob for each in self.logprobs) if self.logprobs else None

    @property
    def outputs(self) -> list[Completion]:
        """This sample alone, as in vLLM: the n samples of a prompt are n answers here."""
        return [self]


class LLM(PoolingLLM):
    """A model with its KV cache, ready for batches of prompts. Calls of several threads run one after the other.

    Args:
      model: local folder or hub id; default the bundled model.
      flags: any other field of `EngineConfig`, such as `page_size` or `max_total_tokens`, also by the names of flags
        that vLLM and SGLang have. `max_queued_requests`, `max_queued_tokens` and the timeouts limit servers only: a
        call may bring any number of prompts, and waits for all of them.
    """

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        cache_salt: str | Sequence[str] = "",
        adapter: str | Sequence[str] = "",
        speculative: bool | Sequence[bool] = True,
        prediction: str | Sequence[str] = "",
        use_tqdm: UseTqdm = True,
    ) -> list[Completion]:
        """Completes all prompts (texts or lists of token ids) together; answers in their order, n for each.

        Args:
          prompts: one prompt or many. One with pictures or videos is `{"prompt": ..., "multi_modal_data": {"image":
            [...], "video": [...]}}`: PIL images, paths, files' contents or data: URLs; a video may be a list of frames.
          sampling_params: for all prompts, or one for each; default `SamplingParams()`.
          priority: of all prompts, or one for each; counts with `enable_priority_scheduling`.
          cache_salt: of all prompts, or one for each: cached prefixes are shared among prompts of an equal salt alone.
          adapter: the name of a LoRA adapter for all prompts, or one for each; "" is none (docs/lora.md).
          speculative: of all prompts, or one for each: false guesses no tokens, if the engine does; the answers are the
            same (docs/speculation.md).
          prediction: of all prompts, or one for each: a text that the answer is expected to be; "" is none.
          use_tqdm: show a progress bar on standard error; or what makes one, in place of tqdm's class.

        Raises:
          InvalidRequest: a prompt can never be served; no prompt has run then, unless its grammar is at fault.
          RequestFailed: our own bug in the work for one prompt; the answers of the others are lost.
        """
        several = as_list(prompts)
        encoded = encode_each(self._encode, several)
        given = Given(list(map(text_of, several)), priority, cache_salt, adapter, speculative, prediction)
        return self._run(encoded, sampling_params, given, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        cache_salt: str | Sequence[str] = "",
        adapter: str | Sequence[str] = "",
        speculative: bool | Sequence[bool] = True,
        prediction: str | Sequence[str] = "",
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: UseTqdm = True,
    ) -> list[Completion]:
        """Like `generate`, for the messages of one conversation or of many, each a list of turns as in OpenAI's API.

        A content with pictures is a list of parts: `{"type": "text", "text": ...}`, `{"type": "image", "image": ...}`.
        Other keys of OpenAI's messages are `tool_calls`, `tool_call_id`, `name` and `reasoning_content`.

        Args:
          tools: descriptions of functions in OpenAI's form, which the template shows to the model.
          add_generation_prompt: begin the assistant's turn.
          continue_final_message: the model goes on with the last message; with add_generation_prompt=False.
          chat_template: takes the place of the model's.
          chat_template_kwargs: variables of the template, such as {"enable_thinking": False}.
        """
        many = conversations_of(messages)
        if add_generation_prompt and continue_final_message:
            raise InvalidRequest("continue_final_message is true, and so is add_generation_prompt: set that to false")
        options = TemplateOptions(
            tools or (), add_generation_prompt, continue_final_message, chat_template_kwargs or {}, chat_template or ""
        )
        encoded = encode_each(lambda turns: self._encode_chat(turns, options), many)
        given = Given([None] * len(encoded), priority, cache_salt, adapter, speculative, prediction)
        return self._run(encoded, sampling_params, given, use_tqdm)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer as transformers made it, as in vLLM; `tokenizer` is what the engine uses of it."""
        return self.tokenizer.of_transformers

    def load_lora_adapter(self, name: str, folder: str | Path, *, pinned: bool = False, replace: bool = False) -> None:
        """Lets prompts name the adapter in `folder`, in the layout of PEFT; needs a `LoraConfig` (docs/lora.md).

        Args:
          pinned: keep it on the device once it is there.
          replace: take the place of one of the same name.

        Raises:
          ConfigError: there is no room for it, or it has a name that is taken.
          CheckpointError: it can't be read, or is of a kind that is not supported.
        """
        if self.engine.adapters is None:
            raise ConfigError("no adapters can be loaded: pass lora=LoraConfig(enable_lora=True)")
        self._order(LoadAdapter(0, name, str(folder), pinned, replace))

    def unload_lora_adapter(self, name: str) -> None:
        """Forgets an adapter. Raises `InvalidRequest` if none of that name is loaded."""
        if name not in self.lora_adapters:
            raise InvalidRequest(f"no adapter named {name} is loaded: loaded are {self.lora_adapters}")
        self._order(UnloadAdapter(0, name))

    def flush_cache(self) -> None:
        """Drops all cached prefixes: later prompts are computed in full."""
        self._order(FlushCache(0))

    @property
    def params(self) -> Params:
        """The model's parameters, a tree as `update_weights` takes it. An update doesn't change what was returned.

        Don't donate these arrays to a jitted function, nor delete them: the model is served from them. Raises
        `ConfigError` with pipeline stages, which have a tree each.
        """
        return whole(self.engine).weight_store.params

    @property
    def weight_version(self) -> str:
        """What the weights are called: `EngineConfig.weight_version` until the first update."""
        return self.engine.weight_store.weight_version

    def update_weights(self, weights: str | Path | Tree, weight_version: str | None = None) -> None:
        """Serves other weights of the same model from now on; nothing that was cached is used again.

        Needs memory for a second copy of the weights, unless they were released before (docs/weight-updates.md).

        Args:
          weights: a model folder, a hub id, a tree like `params`, or tensors by the names of a checkpoint (as
            model.norm.weight), of any float dtype. Arrays are copied.
          weight_version: what to call them; if None, the number of updates so far.

        Raises:
          CheckpointError: they can't be read, or are those of another model. The old weights are served still.
        """
        given: Any = weights
        if given is None:  # as of a trainer that returns nothing
            raise CheckpointError("the weights are None: give a folder, or arrays by the names of a checkpoint")
        self._order(UpdateWeights(0, "", version=weight_version), read=weights)

    def release_memory_occupation(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Gives the memory of the weights ("weights") and of the KV cache ("kv_cache") back, until it is resumed."""
        self._order(ReleaseMemory(0, _memory_tags(tags)))

    def resume_memory_occupation(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Takes memory that was released again; weights are read from their folder, or their copy on the host.

        Raises `CheckpointError` if the weights can't be read: update them then.
        """
        self._order(ResumeMemory(0, _memory_tags(tags)))

    def close(self) -> None:
        """Gives the model's and the cache's memory back; the object can't be used afterwards.

        With `kv_file` in `host_kv`, keeps what is cached there before.
        """
        with self._lock:
            if not self._is_closed:
                keep_prefixes(self.config, self.engine, self._scheduler)
                self.engine.close()
                self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _encode_chat(self, turns: Conversation, options: TemplateOptions) -> Encoded:
        said, files = read_chat(turns)
        if files:
            return self._media.prepare_chat(said, files, options)
        return self.tokenizer.encode_rendered(self.tokenizer.render_chat(said, options)), ()

    def _encode_prediction(self, text: str) -> list[int]:
        if not text or not self.config.speculation.is_on:
            return []
        return encode_prediction(text, self.tokenizer, self.engine.capacity.limits.context_length)

    def _run(
        self,
        prompts: list[Encoded],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        given: Given,
        use_tqdm: UseTqdm,
    ) -> list[Completion]:
        params = sampling_params if sampling_params is not None else SamplingParams()
        of_prompts: list[tuple[str, Any, Any]] = [
            ("sampling_params", params, SamplingParams), ("priorities", given.priority, int),
            ("salts", given.cache_salt, str), ("values of speculative", given.speculative, bool),
            ("predictions", given.prediction, str),
        ]  # fmt: skip
        columns: list[Sequence[Any]] = [per_prompt(what, value, kind, len(prompts)) for what, value, kind in of_prompts]
        columns[0] = with_bad_word_ids(columns[0], self.tokenizer)
        columns[4] = [self._encode_prediction(text) for text in columns[4]]
        adapters = self._adapters(given.adapter, len(prompts))
        requests = [
            Request(
                str(i),
                ids,
                sampling,
                order,
                salt,
                media=media,
                adapter=name,
                speculative=speculative,
                prediction_ids=expected,
            )
            for i, ((ids, media), sampling, order, salt, speculative, expected, name) in enumerate(
                zip(prompts, *columns, adapters, strict=True)
            )
        ]
        pieces = self._serve(requests, use_tqdm).pieces.values()
        version, spec = self.weight_version, self.engine.capacity.states
        asked = zip(requests, given.texts, strict=True)
        of_samples = [(request, text) for request, text in asked for _ in range(request.sampling.n)]
        return [
            _completion(request, text, join(of_sample), version, spec)
            for (request, text), of_sample in zip(of_samples, pieces, strict=True)
        ]


@dataclass(frozen=True)
class Given:
    """What a call says of all its prompts, or of each; `texts` are those prompts that are given as such, or None."""

    texts: Sequence[str | None]
    priority: int | Sequence[int]
    cache_salt: str | Sequence[str]
    adapter: str | Sequence[str]
    speculative: bool | Sequence[bool]
    prediction: str | Sequence[str]


def _memory_tags(given: Sequence[str]) -> tuple[MemoryTag, ...]:
    wrong = [given] if isinstance(given, str) else [tag for tag in given if tag not in MEMORY_TAGS]
    if wrong:
        raise InvalidRequest(f"tags are {given!r:.200}, but must be a list of some of {', '.join(MEMORY_TAGS)}")
    return tuple(map(MemoryTag, given))


def _completion(
    request: Request, prompt: str | None, answer: Piece, weight_version: str, spec: StatesSpec | None
) -> Completion:
    assert answer.end is not None
    sampling = request.sampling
    hidden = experts = None
    if spec is not None:
        hidden = hidden_states(answer.states, spec) if sampling.return_hidden_states else None
        experts = routed_experts(answer.states, spec) if sampling.return_routed_experts else None
    return Completion(
        prompt=prompt,
        prompt_token_ids=request.prompt_ids,
        text=answer.text,
        token_ids=answer.token_ids,
        finish_reason=answer.end.reason.value,
        cached_tokens=answer.end.cached_tokens,
        index=answer.index,
        matched_stop=answer.end.matched_stop,
        stop_reason=answer.end.stop_reason(sampling),
        logprobs=answer.logprobs,
        prompt_logprobs=answer.prompt_logprobs,
        weight_version=weight_version,
        speculated=answer.end.speculated,
        hidden_states=hidden,
        routed_experts=experts,
    )
