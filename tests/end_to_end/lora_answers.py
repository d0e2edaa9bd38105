"""Answers with LoRA adapters of a model that virtual devices of a CPU share. A program, as `mesh_answers`.

python -m tests.end_to_end.lora_answers < cases.json > answers.json
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import msgspec

from jaxsgl.batch.inputs import Bucket
from jaxsgl.config.features import LoraConfig
from jaxsgl.offline.llm import LLM
from jaxsgl.requests.request import SamplingParams
from jaxsgl.wiring import whole
from tests.end_to_end.mesh_answers import COLLECTIVE, FLAGS

SCORED = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0, prompt_logprobs=0)

ALLOWED = tuple(range(20, 60))
HELD = msgspec.structs.replace(SCORED, allowed_token_ids=ALLOWED)


def main() -> None:
    """Answers the cases of standard input."""
    jax.config.update("jax_num_cpu_devices", 4)
    for case in json.load(sys.stdin):
        print(json.dumps(answers(**case)), flush=True)


def answers(folder: str, adapters: dict[str, str], prompts: list[list[int]], flags: dict[str, Any]) -> dict[str, Any]:
    """Tokens and scores of each prompt with no adapter and with each, and the sums over devices in programs.

    Of each there are two: free, and held to the tokens `ALLOWED`.
    """
    paths = tuple(f"{name}={path}" for name, path in adapters.items())
    llm = LLM(folder, **FLAGS, lora=LoraConfig(lora_paths=paths, max_loras_per_batch=2), **flags)
    names = ["", *adapters]
    of_each = [name for name in names for _ in prompts]
    samplings = [SCORED, HELD] * len(of_each)
    completions = llm.generate(
        [prompt for prompt in prompts * len(names) for _ in range(2)],
        samplings,
        adapter=[name for name in of_each for _ in range(2)],
        use_tqdm=False,
    )
    sums: dict[bool, list[int]] = {False: [], True: []}
    for key, done in whole(llm.engine).compiled.compilations.items():
        if isinstance(key.shape, Bucket):
            found = COLLECTIVE.findall(done.compiled.as_text() or "")
            sums[key.shape.adapter_columns > 0].append(found.count("all-reduce"))
    recompiles = llm.engine.recompiles
    llm.close()
    return {
        "tokens": [each.token_ids for each in completions],
        "scores": [[one.logprob for one in (*(each.prompt_logprobs or ()), *each.logprobs)] for each in completions],
        "sums": sorted({*sums[False]}),
        "sums_with_adapters": sorted({*sums[True]}),
        "recompiles": recompiles,
    }


if __name__ == "__main__":
    main()
