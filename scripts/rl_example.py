"""Reinforcement learning in one process: sample with jaxsgl, learn with flax and optax, give the weights back, repeat.

    python scripts/rl_example.py --steps 20

The bundled model is asked to go on with a few beginnings of sentences, and is rewarded for the vowels that it writes. A
step of REINFORCE makes tokens of answers better than the average more likely. The server's weights then are the
trainer's: nothing is compiled again, nothing that was cached with old weights is used, and each answer names the
version that made it. Needs optax in addition to what jaxsgl needs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from bench.output import command_line, command_parser, write_json
from flax import nnx
from tiny import model
from tiny.model import load_folder

import jaxsgl
from jaxsgl.config.engine import BUNDLED_MODEL
from jaxsgl.offline.llm import Completion

PROMPTS = ("The code is", "Once upon a time", "My number is", "We counted")
MAX_TOKENS = 16


class Policy(nnx.Module):
    """The trainer's model: the checkpoint's tensors by name, in float32."""

    def __init__(self, tensors: dict[str, jax.Array]) -> None:
        self.tensors = nnx.Dict({name.replace(".", "__"): nnx.Param(tensor) for name, tensor in tensors.items()})

    def named(self) -> dict[str, jax.Array]:
        """The tensors by the names of the checkpoint."""
        return {name.replace("__", "."): param[...] for name, param in self.tensors.items()}

    def logprobs(self, ids_BT: jax.Array) -> jax.Array:
        """The log-probability of each token of `ids_BT` but the first, `[B, T - 1]`."""
        logits = model.forward(self.named(), ids_BT, jnp.zeros_like(ids_BT))
        scores = jax.nn.log_softmax(logits[:, :-1])
        return jnp.take_along_axis(scores, ids_BT[:, 1:, None], axis=-1)[..., 0]


@nnx.jit
def learn(policy: Policy, optimizer: nnx.Optimizer[Policy], ids_BT: jax.Array, weights_BT: jax.Array) -> None:
    """One step: `weights_BT` are the advantages of generated tokens, 0 for prompts and padding."""

    def loss(policy: Policy) -> jax.Array:
        return -(policy.logprobs(ids_BT) * weights_BT[:, 1:]).sum() / ids_BT.size

    optimizer.update(policy, nnx.grad(loss)(policy))


def reward(text: str) -> float:
    """Vowels per character."""
    return sum(char in "aeiou" for char in text) / max(len(text), 1)


def batch(prompts: Sequence[Sequence[int]], answers: Sequence[Completion]) -> tuple[np.ndarray, np.ndarray]:
    """Ids and advantages `[B, T]` of the answers, padded to equal lengths."""
    rewards = np.array([reward(answer.text) for answer in answers])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    length = max(map(len, prompts)) + MAX_TOKENS
    ids, weights = np.zeros((len(answers), length), np.int32), np.zeros((len(answers), length), np.float32)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer.token_ids)
        ids[row, :end] = [*prompt, *answer.token_ids]
        weights[row, len(prompt) : end] = advantages[row]
    return ids, weights


def main() -> int:
    """Runs the loop; prints the mean reward of each step."""
    parser = command_parser(__doc__)
    parser.add_argument("--steps", type=int, default=20, help="updates of the weights (20)")
    parser.add_argument("--samples", type=int, default=8, help="answers to each prompt in each step (8)")
    parser.add_argument("--rate", type=float, default=2e-4, help="of Adam (2e-4)")
    parser.add_argument("--json", metavar="FILE", help="write the mean reward of each step to FILE")
    args = parser.parse_args()

    llm = jaxsgl.LLM(decode_buckets=(32,), extend_buckets=(64,), chunked_prefill_size=64)
    policy = Policy(load_folder(Path(BUNDLED_MODEL))[0])
    optimizer = nnx.Optimizer(policy, optax.adam(args.rate), wrt=nnx.Param)
    prompts = [llm.tokenizer.encode(text) for text in PROMPTS for _ in range(args.samples)]
    rewards: list[float] = []
    for step in range(args.steps + 1):
        params = [jaxsgl.SamplingParams(max_tokens=MAX_TOKENS, seed=1000 * step + i) for i in range(len(prompts))]
        answers = llm.generate(prompts, params, use_tqdm=False)
        rewards.append(float(np.mean([reward(answer.text) for answer in answers])))
        print(f"weights {answers[0].weight_version:>8}: reward {rewards[-1]:.3f}   {answers[0].text!r}", flush=True)
        if step < args.steps:
            learn(policy, optimizer, *map(jnp.asarray, batch(prompts, answers)))
            llm.update_weights(policy.named())
    llm.close()
    if args.json:
        write_json(args.json, {"command": command_line(), "rewards": rewards})
    return 0


if __name__ == "__main__":
    sys.exit(main())
