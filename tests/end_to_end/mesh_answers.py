"""Answers of models shared by virtual devices of a CPU. A program: JAX has one number of devices per process.

python -m tests.end_to_end.mesh_answers < cases.json > answers.json
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from typing import Any

import jax

from jaxsgl.batch.inputs import Bucket
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.config.features import SpeculationConfig
from jaxsgl.offline.llm import LLM, Completion
from jaxsgl.requests.request import SamplingParams
from jaxsgl.scheduler.speculation.pace import StepCosts
from jaxsgl.scheduler.speculation.speculation import Speculating
from jaxsgl.wiring import whole
from tests.scheduler.drafters import knowing

NUM_DEVICES = 8
COLLECTIVE = re.compile(r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\(")
FLAGS: dict[str, Any] = {
    "page_size": 4,
    "chunked_prefill_size": 16,
    "context_length": 128,
    "max_running_requests": 4,
    "max_total_tokens": 400,
    "decode_buckets": (4,),
    "extend_buckets": (20,),
    "compilation_cache_dir": "",  # the tests' own
}
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
# Every kind of step: chunks, more requests than rows, filters, edits, scores of outputs and of prompts.
REQUESTS: list[tuple[list[int], SamplingParams]] = [
    (list(range(3, 40)), GREEDY),
    ([9] * 7, GREEDY),
    (list(range(60, 45, -1)), GREEDY),
    ([50, 51, 52], SamplingParams(max_tokens=9, temperature=1.0, seed=1, ignore_eos=True)),
    ([7, 5, 3], SamplingParams(max_tokens=9, temperature=1.5, top_k=20, top_p=0.9, seed=2, ignore_eos=True)),
    (
        [11, 12, 13, 14],
        SamplingParams(max_tokens=8, temperature=0.5, frequency_penalty=0.7, seed=3, logprobs=2, ignore_eos=True),
    ),
    (list(range(100, 120)), SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=1, ignore_eos=True)),
]

ALLOWED = tuple(range(20, 60))
MASKED: list[tuple[list[int], SamplingParams]] = [
    ([5, 6], SamplingParams(max_tokens=9, temperature=0, allowed_token_ids=ALLOWED, ignore_eos=True)),
    (
        [7, 8, 9],
        SamplingParams(max_tokens=7, temperature=1.5, seed=4, logprobs=1, allowed_token_ids=ALLOWED, ignore_eos=True),
    ),
]


def main() -> None:
    """Answers the cases of standard input: each has a folder, flags and what `answers` takes."""
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    for case in json.load(sys.stdin):
        print(json.dumps(answers(**case)), flush=True)


def answers(
    folder: str, flags: dict[str, Any], other: str | None = None, only_greedy: bool = False, masked: bool = False
) -> dict[str, Any]:
    """Tokens and scores of `REQUESTS`, and what the programs exchange; then tokens with the weights of `other`.

    With `masked`, `MASKED` run among them; their answers come last. Then all run again with drafts.
    """
    speculation = SpeculationConfig(*(("NGRAM", 1) if masked else ()))
    in_ranks = flags.get("enable_dp_attention", False)
    if in_ranks:
        speculation = SpeculationConfig()
    scheduling = SchedulingConfig(enable_mixed_chunk=not in_ranks)
    llm = LLM(folder, **{**FLAGS, **flags}, scheduling=scheduling, speculation=speculation)
    assert all(rank.state.config.enable_mixed_chunk for rank in llm._scheduler.ranks), "ranks mix without a flag"
    requests = REQUESTS[:3] if only_greedy else [*REQUESTS, *(MASKED if masked else [])]
    prompts, params = (list(each) for each in zip(*requests, strict=True))
    found: dict[str, Any] = {
        "completions": [_public(each) for each in llm.generate(prompts, params, use_tqdm=False, speculative=False)],
        "collectives": {},
    }
    for key, done in whole(llm.engine).compiled.compilations.items():
        name = key.kind + (f" {key.shape.kind}" if isinstance(key.shape, Bucket) else "")
        if in_ranks and isinstance(key.shape, Bucket) and not key.shape.mlp_tokens:
            name += " in all places"  # where MLPs needn't know who is padding
        exchanged = Counter(COLLECTIVE.findall(done.compiled.as_text() or ""))
        assert found["collectives"].setdefault(name, exchanged) == exchanged, key
    pages = re.compile(rf"= \w+\[{llm.engine.capacity.num_pages},\d+,\d+,\d+\][^=]* (?:copy|transpose|convert)\(")
    found["kv_copies"] = sum(
        len(pages.findall(done.compiled.as_text() or ""))
        for key, done in whole(llm.engine).compiled.compilations.items()
        if key.kind == "forward"
    )
    if masked and not in_ranks:
        found["speculated"] = _speculated(llm, prompts, params, [each["token_ids"] for each in found["completions"]])
    if other is not None:
        llm.release_memory_occupation()
        llm.resume_memory_occupation()
        found["resumed"] = _tokens(llm)
        llm.update_weights(other)
        found["updated"] = _tokens(llm)
    found["recompiles"] = llm.engine.recompiles
    llm.close()
    return found


def _speculated(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], outputs: list[list[int]]
) -> dict[str, Any]:
    """Tokens of each request if half of its drafts are those that it yields, and how many drafts were accepted."""
    known = {tuple(prompt): list(output) for prompt, output in zip(prompts, outputs, strict=True)}
    speculation = llm._scheduler.ranks[0].state.speculation
    assert isinstance(speculation, Speculating)
    truth = lambda request: known[tuple(request.prompt_ids)]  # noqa: E731
    own = speculation._drafter_of
    speculation._drafter_of = knowing(truth, "half", llm.engine.capacity.vocab_size)
    speculation._costs = StepCosts()  # any number of drafts pays
    completions = llm.generate(prompts, params, use_tqdm=False)
    speculation._drafter_of = own
    accepted = sum(each.speculated.accepted_tokens for each in completions)
    return {"token_ids": [each.token_ids for each in completions], "accepted": accepted}


def _tokens(llm: LLM) -> list[list[int]]:
    prompts = [prompt for prompt, _ in REQUESTS[:3]]
    answers = llm.generate(prompts, GREEDY, use_tqdm=False, speculative=False)
    return [list(each.token_ids) for each in answers]


def _public(completion: Completion) -> dict[str, Any]:
    scores = (*completion.logprobs, *(completion.prompt_logprobs or ()))
    return {"token_ids": completion.token_ids, "logprobs": [each.logprob for each in scores]}


if __name__ == "__main__":
    main()
