"""Train the EAGLE-3 head of the bundled model, or measure a trained one.

    python scripts/make head                 # minutes on 2 cores; writes jaxsgl/bundled_head
    python scripts/make head --evaluate      # how many drafts in a row are right, by skill, on unseen chats

Owns the recipe. The head learns the model's distribution of the next token on documents like those that trained the
model (`make/model.py`), with its own output in the place of the model's streams for the later drafts of a chain, as in
serving. All randomness is seeded. `--evaluate` follows expected texts without decoding, which greedy answers are where
the model is right. Needs optax and safetensors in addition to what jaxsgl needs.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from bench.output import figure_parser, write_figures
from safetensors.flax import load_file
from tiny import eagle, model
from tiny.optimizer import make_optimizer

from make.model import DRILL_FROM, FOLDER, SKILLS, Rows, encode, held_out, pack

OUT = FOLDER.parent / "bundled_head"
SEED = 34
STEPS = 400
FALL_UNTIL = 700  # the step at which the rates would be zero
PASSES = 4  # drafts in a row that it is trained on
LATER = 0.8  # weight of a draft's loss, as a part of that of the one before it
ROWS, LENGTH = 6, 256
MATRIX_RATE, OTHER_RATE = 0.02, 3e-3
RISE = 30  # steps
MEASURED = 7  # drafts in a row


def batch_loss(params: model.Params, target: model.Params, rows: Rows, places: np.ndarray) -> jax.Array:
    """Cross entropy against the model's own distribution, of all passes, where the model's answers stand."""
    ids, numbers, weights = rows
    streams = model.streams(target, ids, numbers)
    wanted = jax.nn.softmax(model.logits(target, streams[-1]), axis=-1)
    taps, embedding = eagle.taps(streams), target["model.embed_tokens.weight"]
    losses, total = jnp.float32(0), 0.0
    for j, logits in enumerate(eagle.unrolled(params, embedding, taps, ids, numbers, PASSES)):
        of_tokens = -jnp.sum(wanted * jax.nn.log_softmax(logits, axis=-1), axis=-1)
        counted = jnp.where(places > j, weights, 0.0)
        losses += LATER**j * jnp.sum(of_tokens * counted) / jnp.sum(counted)
        total += LATER**j
    return losses / total


def schedule(peak: float) -> optax.Schedule:
    """A rate by step."""
    rise = optax.linear_schedule(0.0, peak, RISE)
    return optax.join_schedules([rise, optax.linear_schedule(peak, 0.0, FALL_UNTIL - RISE)], [RISE])


def train(out: Path, steps: int, seed: int) -> dict[str, float]:
    """Trains, and writes the folder `out`. Returns steps, loss and seconds, of the processor too."""
    started, started_cpu = time.time(), time.process_time()
    target, tokenizer = model.load_folder(FOLDER)
    params = eagle.init_params(seed, target)
    optimizer = make_optimizer(params, schedule, MATRIX_RATE, OTHER_RATE)
    state: tuple[Any, Any] = (params, optimizer.init(params))

    @partial(jax.jit, donate_argnums=0)
    def update(state: tuple[Any, Any], rows: Rows, places: np.ndarray) -> tuple[tuple[Any, Any], jax.Array]:
        params, moments = state
        loss, gradients = jax.value_and_grad(batch_loss)(params, target, rows, places)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    recent: list[jax.Array] = []
    loss = float("nan")
    for step in range(steps):
        rows = pack(Random(f"{seed} head {step}"), tokenizer, DRILL_FROM, ROWS, LENGTH, long=False)
        state, step_loss = update(state, rows, eagle.places(rows[1]))
        recent.append(step_loss)
        if (step + 1) % 50 == 0:
            loss, recent = float(np.mean(recent)), []
            print(f"step {step + 1}/{steps} loss {loss:.4f} {time.time() - started:.0f} s", flush=True)
            eagle.save_folder(out, state[0])
    eagle.save_folder(out, state[0])
    seconds, of_cpu = time.time() - started, time.process_time() - started_cpu
    return {"steps": steps, "loss": loss, "seconds": round(seconds, 1), "cpu_seconds": round(of_cpu, 1)}


def evaluate(folder: Path, samples: int) -> dict[str, float]:
    """Tokens of a step that verifies `MEASURED` drafts, by skill: 1, and the drafts in a row that are right."""
    target, tokenizer = model.load_folder(FOLDER)
    head = {name: value.astype(jnp.float32) for name, value in load_file(folder / "model.safetensors").items()}

    @jax.jit
    def drafts(ids: jax.Array, numbers: jax.Array) -> jax.Array:
        taps = eagle.taps(model.streams(target, ids, numbers))
        embedding = target["model.embed_tokens.weight"]
        passes = eagle.unrolled(head, embedding, taps, ids, numbers, MEASURED)
        return jnp.stack([jnp.argmax(logits, axis=-1)[0] for logits in passes])

    result = {}
    for skill in SKILLS:
        steps = tokens = 0
        for sample in range(samples):
            ids, weights = encode(tokenizer, held_out(Random(f"held out {skill} {sample}"), skill))
            length = next(n for n in (128, 256, 512, 1024, 2048) if n >= len(ids))
            padded = np.zeros((1, length), np.int32)
            padded[0, : len(ids)] = ids
            chains = np.asarray(drafts(jnp.asarray(padded), jnp.zeros_like(padded)))
            answer = [place for place in range(1, len(ids)) if weights[place] > 0]
            at = 1  # the first token of an answer comes with the prompt
            while at < len(answer):
                right = 0
                while right < MEASURED and at + right < len(answer):
                    place = answer[at + right]
                    if place != answer[at] + right or chains[right, place - 1] != ids[place]:
                        break
                    right += 1
                steps, tokens = steps + 1, tokens + min(right + 1, len(answer) - at)
                at += right + 1
        result[skill] = tokens / max(steps, 1)
    return result


def main(arguments: list[str]) -> None:
    """Trains or measures, prints the figures and writes them."""
    parser = figure_parser(__doc__, __name__)
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="folder of the head to write or measure")
    parser.add_argument("--steps", type=int, default=STEPS, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=SEED, help="default %(default)s")
    parser.add_argument("--evaluate", action="store_true", help="measure the folder instead of training")
    parser.add_argument("--samples", type=int, default=20, help="documents per skill when measuring")
    args = parser.parse_args(arguments)
    if args.evaluate:
        figures = evaluate(args.out, args.samples)
        for skill, tokens in figures.items():
            print(f"{skill:24} {tokens:5.2f}")
    else:
        figures = train(args.out, args.steps, args.seed)
        print(figures)
    write_figures(args.json, **figures)
