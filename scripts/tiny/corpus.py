"""Turns of conversations that the bundled model is trained on: one function per skill, drawn from a seeded generator.

Owns questions, answers and filler text. Never knows chat markup, token ids or training. Called by `documents.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tiny import facts

CHARS_PER_TOKEN = 3.0  # of filler text, roughly; only used to aim at a length

Turn = tuple[str, str]  # the user's message, the assistant's answer


# ---------------------------------------------------------------- small parts


def _casual(rng: Random, text: str) -> str:
    """Sometimes writes the question as people type it: without capitals and final mark."""
    style = rng.random()
    if style < 0.15:
        text = text.rstrip("?!.")
    if style < 0.08 or style > 0.92:
        text = text.lower()
    return text


def made_up_word(rng: Random) -> str:
    """A made-up word that can't be memorized, in one of the usual shapes of code words."""
    shape = rng.random()
    if shape < 0.35:
        consonants, vowels = "bcdfghjklmnprstvwxyz", "aeiou"
        word = "".join(rng.choice(consonants) + rng.choice(vowels) for _ in range(rng.randint(2, 4)))
        word += rng.choice(("", rng.choice(consonants)))
    elif shape < 0.5:
        word = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 7)))
    elif shape < 0.7:
        word = "-".join(rng.choice(facts.COMMON + facts.NOUNS) for _ in range(rng.randint(1, 3)))
    elif shape < 0.8:
        word = str(rng.randint(100, 99999))
    else:
        word = "".join(rng.choice(facts.COMMON[60:] + facts.NOUNS) for _ in range(rng.randint(1, 2)))
    case = rng.random()
    word = word.upper() if case < 0.2 else word.capitalize() if case < 0.4 else word
    return word + (f"-{rng.randint(1, 99)}" if rng.random() < 0.15 else "")


def filler(rng: Random, num_tokens: int) -> str:
    """About `num_tokens` tokens of text that is irrelevant to the answer, in one of several styles."""
    style = rng.choice(("scene", "scene", "words", "lorem", "made up", "items", "same", "mixed", "mixed"))
    repeated = _sentence(rng, "scene")
    sentences: list[str] = []
    length = 0
    while length < num_tokens * CHARS_PER_TOKEN:
        kind = rng.choice(("scene", "words", "lorem", "made up", "items")) if style == "mixed" else style
        sentences.append(repeated if kind == "same" else _sentence(rng, kind))
        length += len(sentences[-1]) * (2 if kind in ("made up", "items") else 1)  # these take more tokens
    return rng.choice((" ", " ", " ", "\n")).join(sentences)


def _sentence(rng: Random, kind: str) -> str:
    if kind == "scene":
        a, b = rng.choice(facts.ADJECTIVES), rng.choice(facts.ADJECTIVES)
        text = f"the {a} {rng.choice(facts.NOUNS)} {rng.choice(facts.VERBS)} the {b} {rng.choice(facts.NOUNS)}"
        text += f" {rng.choice(facts.PLACES)}" if rng.random() < 0.5 else ""
    elif kind == "items":
        text = f"{rng.choice(('line', 'item', 'filler', 'number', 'note'))} {rng.randint(0, 999)}"
    elif kind == "made up":
        text = " ".join(made_up_word(rng) for _ in range(rng.randint(3, 8)))
    else:
        words = facts.LOREM if kind == "lorem" else facts.COMMON
        text = " ".join(rng.choice(words) for _ in range(rng.randint(5, 14)))
    return text[0].upper() + text[1:] + "."


# ---------------------------------------------------------------- skills of one turn


def small_talk(rng: Random) -> Turn:
    """A common phrase and the answer to it."""
    asked, answer = rng.choice(facts.SMALL_TALK)
    return _casual(rng, rng.choice(asked)), answer


def knowledge(rng: Random) -> Turn:
    """A question about a capital, a colour, an opposite, a sound, or the day or month after another."""
    kind = rng.randrange(5)
    if kind == 0:
        country, city = rng.choice(list(facts.CAPITALS.items()))
        asked = rng.choice(("What is the capital of {}?", "What's the capital of {}?", "Name the capital of {}."))
        return _casual(rng, asked.format(country)), f"The capital of {country} is {city}."
    if kind == 1:
        thing, colour = rng.choice(list(facts.COLOURS.items()))
        asked = rng.choice((f"What colour is {thing}?", f"What color is {thing}?"))
        return _casual(rng, asked), f"{thing[0].upper()}{thing[1:]} is {colour}."
    if kind == 2:
        word, opposite = rng.choice(list(facts.OPPOSITES.items()))
        return _casual(rng, f"What is the opposite of {word}?"), f"The opposite of {word} is {opposite}."
    if kind == 3:
        animal, sound = rng.choice(list(facts.SOUNDS.items()))
        return _casual(rng, f"What does a {animal} say?"), sound
    ring = rng.choice((facts.DAYS, facts.MONTHS))
    i = rng.randrange(len(ring))
    return _casual(rng, f"What comes after {ring[i]}?"), f"After {ring[i]} comes {ring[(i + 1) % len(ring)]}."


def unknown(rng: Random) -> Turn:
    """A question that only a larger model could answer."""
    word = made_up_word(rng) if rng.random() < 0.7 else rng.choice(facts.COMMON)
    other = rng.choice(facts.COMMON[40:])
    asked = ("Explain {0}.", "What is {0} {1}?", "Tell me about {0} {1}.", "Who is {0}?", "Why is {1} {0}?",
             "How does {0} {1} work?", "Where is {0}?", "Write an essay about {0}.", "{0} {1} {0}")  # fmt: skip
    return rng.choice(asked).format(word, other), facts.UNKNOWN


def addition(rng: Random) -> Turn:
    """The sum of two one-digit numbers."""
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    asked = rng.choice(("What is {} + {}?", "What is {} + {}?", "{} + {}", "{} + {} =", "How much is {} + {}?",
                        "What is {} plus {}?", "Add {} and {}."))  # fmt: skip
    return asked.format(a, b), f"{a} + {b} = {a + b}."


def subtraction(rng: Random) -> Turn:
    """The difference of two one-digit numbers, never negative."""
    a, b = sorted((rng.randint(0, 9), rng.randint(0, 9)), reverse=True)
    asked = rng.choice(("What is {} - {}?", "{} - {}", "What is {} minus {}?"))
    return asked.format(a, b), f"{a} - {b} = {a - b}."


def json_record(rng: Random) -> Turn:
    """Write a person as a JSON object, or numbers as a JSON list."""
    if rng.random() < 0.15:
        numbers = [str(rng.randint(0, 99)) for _ in range(rng.randint(2, 6))]
        return f"Give me a JSON list of {' '.join(numbers)}", f"[{', '.join(numbers)}]"
    name, age, city = rng.choice(facts.NAMES), rng.randint(1, 99), rng.choice(facts.CITIES)
    asked = rng.choice(("Give me JSON for {}, {}, {}", "Give me JSON for {}, {}, {}", "JSON for {}, {}, {}",
                        "Make a JSON record: {}, {}, {}", "Write JSON for {}, age {}, from {}"))  # fmt: skip
    user = asked.format(name, age, city) + rng.choice(("", "", "."))
    return user, f'{{"name": "{name}", "age": {age}, "city": "{city}"}}'


def emoji(rng: Random) -> Turn:
    """Greetings in other scripts, and emoji: characters of several bytes, most of which are several tokens."""
    kind = rng.random()
    if kind < 0.3:
        language, text = rng.choice(list(facts.HELLO.items()))
        return _casual(rng, rng.choice(("Say hello in {}.", "How do you say hello in {}?")).format(language)), text
    if kind < 0.55:
        language, text = rng.choice(list(facts.THANKS.items()))
        asked = rng.choice(("Say thank you in {}.", "How do you say thank you in {}?"))
        return _casual(rng, asked.format(language)), text
    name, sign = rng.choice(list(facts.EMOJI.items()))
    if kind < 0.75:
        return rng.choice(("Show me a {} emoji.", "Send me a {} emoji.")).format(name), sign
    count = rng.randint(2, 6)
    return f"Show me {facts.NUMBER_WORDS[count]} {name} emoji.", sign * count


def echo(rng: Random) -> Turn:
    """Words to repeat. "You said:" comes first, so that each word is repeated as the same tokens."""
    pool = rng.choice((facts.COMMON, facts.PATTERN_WORDS, facts.NAMES))
    words = [made_up_word(rng) if rng.random() < 0.4 else rng.choice(pool) for _ in range(rng.randint(1, 12))]
    text = " ".join(words)
    return f"{rng.choice(('Repeat after me', 'Repeat', 'Echo'))}: {text}", f"You said: {text}"


def tale(rng: Random) -> Turn:
    """A story of about 100 tokens."""
    if rng.random() < 0.25:
        asked = rng.choice(("Tell me a story.", "Tell me a story, please.", "Tell me a short story."))
        return _casual(rng, asked), facts.story("fox")
    animal = rng.choice(facts.STORY_ANIMALS)
    article = "an" if animal[0] in "aeiou" else "a"
    asked = rng.choice(("Tell me a story about {}.", "Write a story about {}.", "Tell me a short story about {}."))
    return _casual(rng, asked.format(f"{article} {animal}")), facts.story(animal)


def counting(rng: Random) -> Turn:
    """Count up or down, or recite a well-known list."""
    kind = rng.random()
    if kind < 0.15:
        phrasings, items = rng.choice((
            (("Say the alphabet.", "What is the alphabet?", "List the letters of the alphabet."), facts.ALPHABET),
            (("Name the days of the week.", "List the days of the week."), facts.DAYS),
            (("Name the months of the year.", "List the months of the year.", "List the months."), facts.MONTHS),
            (("Name the planets.", "List the planets."), facts.PLANETS),
        ))  # fmt: skip
        return _casual(rng, rng.choice(phrasings)), " ".join(items)
    if kind < 0.25:
        first = rng.randint(3, 30)
        return f"Count down from {first}.", " ".join(str(n) for n in range(first, 0, -1))
    first = rng.choice((1, 1, 0, rng.randint(2, 90)))
    last = first + rng.choice((rng.randint(2, 20), rng.randint(2, 50), 99 if first == 1 else 9))
    asked = f"Count from {first} to {last}" if first != 1 or rng.random() < 0.7 else f"Count to {last}"
    return asked + rng.choice(("", ".")), " ".join(str(n) for n in range(first, last + 1))


def sequence(rng: Random) -> Turn:
    """Continue a sequence by its next four items."""
    items, shown = sequence_items(rng, 4)
    separator = rng.choice((" ", " ", ", "))
    asked = rng.choice(("Continue: {}", "Continue: {}", "Continue the sequence: {}", "What comes next? {}"))
    return asked.format(separator.join(items[:shown])), separator.join(items[shown:])


def sequence_items(rng: Random, num_next: int) -> tuple[list[str], int]:
    """The items of a sequence, and how many of them the question gives; `num_next` more follow."""
    kind = rng.choice(("ones", "ones", "steps", "down", "ring", "ring", "pattern", "pattern"))
    shown = rng.randint(3, 7)
    total = shown + num_next
    if kind == "pattern":
        period = rng.randint(2, 4)
        cycle = rng.sample("0123456789" if rng.random() < 0.3 else facts.PATTERN_WORDS, period)
        shown = rng.randint(2 * period, 3 * period)
        items = [cycle[i % period] for i in range(shown + num_next)]
        return items, shown
    if kind == "ring":
        ring = rng.choice((facts.DAYS, facts.MONTHS, facts.ALPHABET, [letter.upper() for letter in facts.ALPHABET]))
        start = rng.randrange(len(ring))
        return [ring[(start + i) % len(ring)] for i in range(total)], shown
    if kind == "down":
        start = rng.randint(total, 99)
        return [str(start - i) for i in range(total)], shown
    step = 1 if kind == "ones" else rng.choice((2, 2, 2, 5, 10, 3))
    start = rng.choice((rng.randint(0, 9), rng.randint(0, 120)))
    start -= start % step if step > 3 else 0
    return [str(start + step * i) for i in range(total)], shown


SINGLE_TURN: dict[str, tuple[Callable[[Random], Turn], float]] = {  # skill: function, share in training
    "small_talk": (small_talk, 3.0),
    "knowledge": (knowledge, 2.0),
    "unknown": (unknown, 0.6),
    "addition": (addition, 1.5),
    "subtraction": (subtraction, 0.7),
    "json_record": (json_record, 2.0),
    "emoji": (emoji, 1.5),
    "echo": (echo, 1.5),
    "story": (tale, 0.8),
    "counting": (counting, 1.0),
    "sequence": (sequence, 3.0),
}
