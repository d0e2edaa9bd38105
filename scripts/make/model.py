"""Train the bundled model from scratch on generated text, or measure a trained one.

    python scripts/make model                 # 40 minutes on 2 shared cores; writes jaxsgl/bundled_model
    python scripts/make model --evaluate      # exact-match accuracy of each skill on unseen documents

Owns the recipe: mixture of documents, their packing into rows, optimizer, schedule. All randomness is seeded, and batch
i depends on (seed, i) alone, so a killed run resumes with `--state` where it stopped. The first steps use rows of 256
tokens, where the skills form cheaply; later steps add rows of 1024 tokens, which teach to look far back. A token sees
only its own document. Near the end the rates start again, with more long rows. Needs optax and safetensors in addition
to what jaxsgl needs.
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
from bench.processes import ROOT
from safetensors.numpy import load_file, save_file
from tiny import documents, model
from tiny.corpus import SINGLE_TURN
from tiny.documents import Document
from tiny.optimizer import make_optimizer
from tiny.start_weights import init_params
from tokenizers import Tokenizer

FOLDER = ROOT / "jaxsgl" / "bundled_model"
SEED = 20
STEPS = 1950
DECAY_FROM = 1150  # from this step on the rates fall to zero
AGAIN_FROM = 1600  # at this step the rates are zero, and start again at a third
LONG_FROM = 500  # from this step on there are long rows
DRILL_FROM = 900  # from this step on the skills that take longest to learn get an extra share
DRILLED = ("sequence", "sequence", "story", "counting", "addition")
DRILLED_AGAIN = ("sequence", "sequence", "echo", "counting", "counting")
SHORT_ROWS, SHORT_LENGTH = 8, 256
LONG_ROWS, LONG_ROWS_AGAIN, LONG_LENGTH = 1, 2, 1024
MATRIX_RATE, OTHER_RATE = 0.01, 3e-3  # peaks: Muon's for the layers' matrices, Adam's for all other weights
Rows = tuple[np.ndarray, np.ndarray, np.ndarray]  # ids, document numbers, loss weights; each [rows, length]


# ---------------------------------------------------------------- documents to rows


def short_document(rng: Random, step: int) -> Document:
    """Draws a document, mostly of under 256 tokens."""
    if step >= DRILL_FROM and rng.random() < 0.2:
        skill = rng.choice(DRILLED if step < AGAIN_FROM else DRILLED_AGAIN)
        return documents.chat([SINGLE_TURN[skill][0](rng)])
    copying = 0.1 if step < 200 else 0.04
    kind = rng.random()
    if kind < copying:
        return documents.repeated_span(rng, rng.randint(4, 60), rng.randint(2, 4), model.VOCABULARY - 3)
    if kind < copying + 0.2:
        return documents.code_word(rng, rng.randint(0, 60 if step < 100 else 180))
    if kind < copying + 0.3:
        return documents.raw_text(rng)
    if kind < copying + 0.36:
        return documents.persona(rng)
    return documents.conversation(rng, rng.choice((1, 1, 2, 3)))


def long_document(rng: Random, step: int) -> Document:
    """Draws a document of up to 1024 tokens that needs looking far back."""
    kind = rng.random()
    if kind < 0.15:
        return documents.repeated_span(rng, rng.randint(100, 480), 2, model.VOCABULARY - 3)
    reach = rng.randint(50, 950 if step < AGAIN_FROM else 1150)
    if kind < 0.65:
        return documents.several_secrets(rng, reach)
    if kind < 0.9:
        return documents.code_word(rng, reach)
    return documents.conversation(rng, rng.randint(8, 20))


def encode(tokenizer: Tokenizer, document: Document) -> tuple[list[int], list[float]]:
    """The token ids of a document, and the loss weight of each token as a target."""
    ids: list[int] = []
    weights: list[float] = []
    for piece in document:
        content = piece.content
        new = tokenizer.encode(content).ids if isinstance(content, str) else list(content)
        ids += new
        weights += [piece.weight] * len(new)
    return ids, weights


def pack(rng: Random, tokenizer: Tokenizer, step: int, rows: int, length: int, long: bool) -> Rows:
    """Fills rows with documents, one after the other. `weights[t]` is the weight of predicting token t + 1."""
    ids = np.zeros((rows, length), np.int32)
    numbers = np.zeros((rows, length), np.int32)  # 0: padding
    weights = np.zeros((rows, length), np.float32)
    for row in range(rows):
        at, number, refused = 0, 1, 0
        while at < length and refused < 4:
            document = long_document(rng, step) if long and number == 1 else short_document(rng, step)
            new_ids, new_weights = encode(tokenizer, document)
            if at + len(new_ids) > length:
                refused += 1
                continue
            end = at + len(new_ids)
            ids[row, at:end], numbers[row, at:end] = new_ids, number
            weights[row, at : end - 1] = new_weights[1:]
            at, number = end, number + 1
    return ids, numbers, weights


def make_batch(tokenizer: Tokenizer, seed: int, step: int) -> list[Rows]:
    """The rows of one step: short rows, then long ones."""
    rng = Random(f"{seed} batch {step}")
    batch = [pack(rng, tokenizer, step, SHORT_ROWS, SHORT_LENGTH, long=False)]
    if step >= LONG_FROM:
        rows = LONG_ROWS if step < AGAIN_FROM else LONG_ROWS_AGAIN
        batch.append(pack(rng, tokenizer, step, rows, LONG_LENGTH, long=True))
    return batch


def tokenizer_texts(seed: int) -> list[str]:
    """Texts from which the tokenizer learns its merges: only Latin script, so that other scripts stay bytes."""
    rng = Random(f"{seed} tokenizer")
    drawn = [short_document(rng, LONG_FROM) for _ in range(6000)]
    texts = ["".join(p.content for p in document if isinstance(p.content, str)) for document in drawn]
    texts = ["".join(c for c in text if ord(c) < 256) for text in texts]
    for special in documents.SPECIAL_TOKENS:
        texts = [text.replace(special, "\n") for text in texts]
    return texts


# ---------------------------------------------------------------- training


def loss_sums(params: model.Params, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """Weighted sum of the next-token losses and the sum of the weights."""
    ids, numbers, weights = rows
    log_probs = jax.nn.log_softmax(model.forward(params, ids, numbers), axis=-1)
    targets = jnp.roll(ids, -1, axis=1)
    losses = -jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
    return jnp.sum(losses * weights), jnp.sum(weights)


def batch_loss(params: model.Params, batch: list[Rows]) -> jax.Array:
    """Mean loss of the batch, weighted."""
    sums = [loss_sums(params, rows) for rows in batch]
    losses, weights = (jnp.sum(jnp.stack(parts)) for parts in zip(*sums, strict=True))
    return losses / weights


def schedule(peak: float) -> optax.Schedule:
    """A rate by step."""
    rise = optax.linear_schedule(0.0, peak, 50)
    fall = optax.linear_schedule(peak, 0.0, AGAIN_FROM - DECAY_FROM)
    again = optax.linear_schedule(peak / 3, 0.0, STEPS - AGAIN_FROM)
    return optax.join_schedules([rise, fall, again], [DECAY_FROM, AGAIN_FROM])


def save_state(path: Path, step: int, state: object) -> None:
    """Writes the trainer's state; readers see the whole file or none."""
    leaves = {f"{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    save_file(leaves | {"step": np.asarray([step])}, f"{path}.new")
    Path(f"{path}.new").replace(path)


def train(out: Path, steps: int, seed: int, state_file: Path | None) -> dict[str, float]:
    """Trains, and writes the folder `out` every 250 steps and at the end. Returns steps, loss and seconds."""
    started = time.time()
    tokenizer = model.train_tokenizer(tokenizer_texts(seed))
    params = init_params(seed)
    optimizer = make_optimizer(params, schedule, MATRIX_RATE, OTHER_RATE)
    state = (params, optimizer.init(params))
    first = 0
    if state_file and state_file.exists():
        saved = load_file(state_file)
        first = int(saved["step"][0])
        leaves, tree = jax.tree.flatten(state)
        state = jax.tree.unflatten(tree, [jnp.asarray(saved[f"{i}"]) for i in range(len(leaves))])

    @partial(jax.jit, donate_argnums=0)
    def update(state: tuple[Any, Any], batch: list[Rows]) -> tuple[tuple[Any, Any], jax.Array]:
        params, moments = state
        loss, gradients = jax.value_and_grad(batch_loss)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    recent: list[jax.Array] = []
    loss = float("nan")
    for step in range(first, steps):
        state, step_loss = update(state, make_batch(tokenizer, seed, step))
        recent.append(step_loss)
        done = step + 1
        if done % 50 == 0:
            loss, recent = float(np.mean(recent)), []
            print(f"step {done}/{steps} loss {loss:.4f} {time.time() - started:.0f} s", flush=True)
        if state_file and done % 100 == 0:
            save_state(state_file, done, state)
        if done % 250 == 0 or done == steps:
            model.save_folder(out, state[0], tokenizer)
            for skill, accuracy in evaluate(out, 8).items():
                print(f"    {skill:24} {accuracy:6.1%}", flush=True)
    return {"steps": steps, "loss": loss, "seconds": round(time.time() - started, 1)}


# ---------------------------------------------------------------- measuring


def held_out(rng: Random, skill: str) -> Document:
    """A document of one skill, from a seed that training never uses."""
    if skill in SINGLE_TURN:
        return documents.chat([SINGLE_TURN[skill][0](rng)])
    if skill == "raw_text":
        return documents.raw_text(rng)
    if skill == "persona":
        return documents.persona(rng)
    if skill == "several_turns":
        return documents.conversation(rng, 4)
    low, high = (int(n) for n in skill.rsplit(" ", 1)[1].split("-"))
    if skill.startswith("several secrets"):
        return documents.several_secrets(rng, rng.randint(low, high))
    return documents.code_word(rng, rng.randint(low, high), raw="raw" in skill)


SKILLS = (*SINGLE_TURN, "raw_text", "persona", "several_turns", "code_word 0-50", "code_word 50-200",
          "code_word 200-500", "code_word 500-900", "code_word raw 50-900", "several secrets 50-900")  # fmt: skip


def evaluate(folder: Path, samples: int) -> dict[str, float]:
    """Share of `samples` documents per skill whose every expected token is the most likely one.

    That is the exact match of greedy decoding, without decoding: if each expected token is the arg max after
    the expected ones before it, then greedy decoding produces just these. Uses the stored, rounded weights.
    """
    params, tokenizer = model.load_folder(folder)
    best = jax.jit(lambda ids, numbers: jnp.argmax(model.forward(params, ids, numbers), axis=-1))
    result = {}
    for skill in SKILLS:
        right = 0
        for sample in range(samples):
            ids, weights = encode(tokenizer, held_out(Random(f"held out {skill} {sample}"), skill))
            length = next(n for n in (128, 256, 512, 1024, 2048) if n >= len(ids))
            padded = np.zeros((1, length), np.int32)
            padded[0, : len(ids)] = ids
            chosen = np.asarray(best(padded, np.zeros_like(padded)))[0]
            wanted = np.asarray(weights) > 0
            right += bool(np.all(chosen[:-1][: len(ids) - 1][wanted[1:]] == np.asarray(ids)[1:][wanted[1:]]))
        result[skill] = right / samples
    return result


def main(arguments: list[str]) -> None:
    """Trains or measures, prints the figures and writes them."""
    parser = figure_parser(__doc__, __name__)
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="DIR", help="model folder to write or measure")
    parser.add_argument("--steps", type=int, default=STEPS, help="stop after this many (default: all %(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, help="default %(default)s")
    parser.add_argument("--state", type=Path, metavar="FILE", help="keep the trainer's state here; resume from it")
    parser.add_argument("--evaluate", action="store_true", help="measure the folder instead of training")
    parser.add_argument("--samples", type=int, default=200, help="documents per skill when measuring")
    args = parser.parse_args(arguments)
    if args.evaluate:
        figures = evaluate(args.out, args.samples)
        for skill, accuracy in figures.items():
            print(f"{skill:24} {accuracy:6.1%}")
    else:
        figures = train(args.out, args.steps, args.seed, args.state)
    write_figures(args.json, **figures)
