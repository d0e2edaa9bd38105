"""The documents that the bundled model is trained on and measured with: turns in chat markup, and plain completions.

A `Document` is a list of pieces; the model must produce the pieces with a positive loss weight. Owns the markup and the
loss weights. Never knows models or training. Called by `make/model.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tiny import facts
from tiny.corpus import SINGLE_TURN, Turn, filler, made_up_word, sequence_items, small_talk

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)


@dataclass(frozen=True)
class Piece:
    """A part of a document: text or token ids, and the loss weight of each of its tokens."""

    content: str | tuple[int, ...]
    weight: float


Document = list[Piece]


def chat(turns: list[Turn], system: str | None = None) -> Document:
    """Turns in the markup of the chat template, with loss on the answers and on the token that ends each answer."""
    pieces = []
    if system is not None:
        pieces.append(Piece(f"{TURN_START}system\n{system}{TURN_END}\n", 0.0))
    for user, answer in turns:
        pieces.append(Piece(f"{TURN_START}user\n{user}{TURN_END}\n{TURN_START}assistant\n", 0.0))
        pieces.append(Piece(f"{answer}{TURN_END}", 1.0))
        pieces.append(Piece("\n", 0.0))
    return pieces


def completion(prompt: str, rest: str, ends: bool) -> Document:
    """Plain text. The model learns to stop after it only if it `ends`."""
    return [Piece(prompt, 0.0), Piece(rest + (END_OF_TEXT if ends else ""), 1.0)]


def conversation(rng: Random, num_turns: int) -> Document:
    """A conversation over several skills, sometimes with a system prompt that has an effect."""
    names = rng.choices(list(SINGLE_TURN), [share for _, share in SINGLE_TURN.values()], k=num_turns)
    turns = [SINGLE_TURN[name][0](rng) for name in names]
    system = None
    if rng.random() < 0.25:
        system = rng.choice(facts.SYSTEM_PROMPTS)
    return chat(turns, system)


def persona(rng: Random) -> Document:
    """A conversation whose system prompt changes the answers, or whose user gives a name and asks for it later."""
    if rng.random() < 0.5:
        system, form = rng.choice(list(facts.PERSONAS.items()))
        turns = [small_talk(rng) for _ in range(rng.randint(1, 3))]
        return chat([(user, form.format(answer)) for user, answer in turns], system)
    name = rng.choice(facts.NAMES)
    told = rng.choice(("My name is {}.", "Hi, my name is {}.", "Hello, I am {}.")).format(name)
    turns = [small_talk(rng) for _ in range(rng.randint(0, 3))]
    asked = rng.choice(("What is my name?", "What's my name?", "Do you know my name?"))
    return chat([(told, f"Nice to meet you, {name}!"), *turns, (asked, f"Your name is {name}.")])


_SECRETS = ("code word", "code word", "code word", "password", "secret word", "magic word", "secret number")
_TELLING = ("The {} is {}.", "The {} is {}.", "Remember: the {} is {}.", "Remember this {}: {}.", "My {} is {}.",
            "Remember the {} {}.")  # fmt: skip


def code_word(rng: Random, num_filler: int, raw: bool | None = None) -> Document:
    """A word to remember, about `num_filler` tokens of other text, then the question for the word."""
    secret = rng.choice(_SECRETS)
    word = made_up_word(rng) if secret != "secret number" else str(rng.randint(10, 99999))
    told = rng.choice(_TELLING).format(secret, word)
    answer = f"The {secret} is {word}."
    if raw or (raw is None and rng.random() < 0.2):
        return completion(f"The {secret} is {word}. {filler(rng, num_filler)} The {secret} is", f" {word}.", ends=True)
    asked = rng.choice(("What is the {}?", "What was the {}?", "Tell me the {}.")).format(secret)
    before = filler(rng, rng.randint(5, 30)) + " " if rng.random() < 0.3 else ""
    place = rng.random()
    if place < 0.5:
        return chat([(f"{before}{told} {filler(rng, num_filler)} {asked}", answer)])
    if place < 0.65:
        return chat([(f"{filler(rng, num_filler)} {asked}", answer)], system=before + told)
    turns = [(before + told, "OK, I will remember it.")]
    if num_filler > 60 and rng.random() < 0.6:
        turns.append((f"Read this: {filler(rng, num_filler)}", "OK, I have read it."))
    else:
        turns += [small_talk(rng) for _ in range(num_filler // 30)]
    return chat([*turns, (asked, answer)])


def several_secrets(rng: Random, num_filler: int) -> Document:
    """Two or three words to remember, then the questions for them one after the other."""
    secrets = rng.sample(sorted(set(_SECRETS)), rng.randint(2, 3))
    pairs = [(secret, made_up_word(rng)) for secret in secrets]
    told = f" {filler(rng, rng.randint(1, 30))} ".join(f"The {secret} is {word}." for secret, word in pairs)
    rng.shuffle(pairs)
    turns = [(f"What is the {secret}?", f"The {secret} is {word}.") for secret, word in pairs]
    turns[0] = (f"{told} {filler(rng, num_filler)} {turns[0][0]}", turns[0][1])
    return chat(turns)


def repeated_span(rng: Random, span: int, times: int, num_ids: int) -> Document:
    """Random token ids, repeated. Only looking back predicts them, which makes copying heads form early."""
    ids = tuple(rng.randrange(num_ids) for _ in range(span))
    return [Piece(ids, 0.0), *[Piece(ids, 0.3)] * (times - 1)]


def raw_text(rng: Random) -> Document:
    """Plain completions: sequences, sums, facts, stories."""
    kind = rng.choice(("sequence", "sequence", "sum", "fact", "story"))
    if kind == "sum":
        a, b = rng.randint(0, 9), rng.randint(0, 9)
        prompt, gap = rng.choice(((f"{a} + {b} =", " "), (f"{a}+{b}=", ""), (f"What is {a} + {b}?", " ")))
        return completion(prompt, f"{gap}{a + b}", ends=True)
    if kind == "fact":
        country, city = rng.choice(list(facts.CAPITALS.items()))
        return completion(f"The capital of {country} is", f" {city}.", ends=True)
    if kind == "story":
        animal, start = rng.choice(facts.STORY_ANIMALS), "Once upon a time"
        animal, start = rng.choice((("fox", start), (animal, f"{start} there was a little {animal}")))
        text = facts.story(animal)
        return completion(start, text[len(start) :], ends=True)
    items, shown = sequence_items(rng, rng.randint(10, 50))
    separator = rng.choice((" ", " ", ", "))
    return completion(separator.join(items[:shown]), separator + separator.join(items[shown:]), ends=False)
