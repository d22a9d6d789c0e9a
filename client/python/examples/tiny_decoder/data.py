"""A corpus made by a seeded grammar: short documents where what comes next depends on what came long before.

Every random choice is counted, so that each document has a known price: what somebody pays who knows the grammar.
As in collected text, some documents are copies of others, exact or edited; see ``split`` for what becomes of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

EXACT_COPIES = 0.03
EDITED_COPIES = 0.05

COLOURS = ("red", "blue", "green", "black", "white", "yellow")
THINGS = ("lamp", "drum", "coat", "clock", "kite", "basket", "violin", "hammer")
PLACES = ("the harbour", "the old mill", "a stone house", "the valley", "a quiet town")
ANIMALS = ("dog", "horse", "bird", "cat", "hen", "goat")
NEAR = ("near the", "behind the", "beside the", "far from the")
SIGHTS = ("gate", "river", "tree", "wall", "tower")
VERBS = ("run", "sleep", "wait", "sing", "eat", "jump")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
FOOD = ("bread", "cheese", "apples", "honey", "salt", "pears", "milk", "rice", "beans", "plums")
BRACKETS = (("(", ")"), ("[", "]"), ("{", "}"))
ONSETS = ("b", "d", "f", "g", "k", "l", "m", "n", "r", "s", "t", "v")
VOWELS = ("a", "e", "i", "o", "u")
ENDINGS = ("", "", "", "n", "r", "s")
# Rare letters, so that some held-out text has what the training part may never show.
RARE_ENDINGS = ("é", "ø", "ş", "ž", "ł", "ñ")


@dataclass(frozen=True)
class Document:
    """Attributes:
    number: its place in the corpus.
    kind: the name of its rule.
    nats: minus the log probability of the choices that made it: at least what its text needs under the grammar, for
        different choices may give one text.
    """

    number: int
    kind: str
    text: str
    nats: float


class Choices:
    """Random choices, with what they cost.

    Attributes:
        nats: minus the sum of the log probabilities of the choices made since ``nats`` was last set to 0.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.nats = 0.0

    def pick(self, options: Sequence[T]) -> T:
        """One of equally likely options; what is listed twice is twice as likely."""
        chosen = options[self._random.randrange(len(options))]
        self.nats += math.log(len(options) / options.count(chosen))
        return chosen

    def between(self, low: int, high: int) -> int:
        """Both ends are possible."""
        return self.pick(range(low, high + 1))

    def chance(self, probability: float) -> bool:
        happens = self._random.random() < probability
        self.nats -= math.log(probability if happens else 1 - probability)
        return happens

    def distinct(self, options: Sequence[T], count: int) -> list[T]:
        """Ordered, each option at most once."""
        left, taken = list(options), []
        for _ in range(count):
            taken.append(self.pick(left))
            left.remove(taken[-1])
        return taken


def name(choices: Choices) -> str:
    """One of thousands, made of syllables: a held-out document's names are mostly new, and recur."""
    syllables = [choices.pick(ONSETS) + choices.pick(VOWELS) for _ in range(2)]
    ending = choices.pick(RARE_ENDINGS) if choices.chance(0.01) else choices.pick(ENDINGS)
    return "".join((*syllables, ending)).capitalize()


def story(choices: Choices) -> str:
    """A thing changes hands; who has it at the end follows from all that happened."""
    people = [name(choices) for _ in range(choices.between(2, 3))]
    thing = f"{choices.pick(COLOURS)} {choices.pick(THINGS)}"
    holder = choices.pick(people)
    sentences = [
        f"{', '.join(people[:-1])} and {people[-1]} live in {choices.pick(PLACES)}.",
        f"{holder} has a {thing}.",
    ]
    for _ in range(choices.between(1, 3)):
        receiver = choices.pick([person for person in people if person != holder] or people)
        how = choices.pick(("gives", "sells", "lends"))
        sentences.append(f"{holder} {how} the {thing} to {receiver}.")
        holder = receiver
    sentences.append(f"Now {holder} has the {thing}.")
    return " ".join(sentences)


def agreement(choices: Choices) -> str:
    """The verb agrees with a noun that other nouns, of either number, stand between."""
    sentences = []
    for _ in range(choices.between(2, 4)):
        plural = choices.chance(0.5)
        subject = choices.pick(ANIMALS) + ("s" if plural else "")
        between = []
        for _ in range(choices.between(1, 2)):
            between.append(f"{choices.pick(NEAR)} {choices.pick(SIGHTS)}{'s' if choices.chance(0.5) else ''}")
        verb = choices.pick(VERBS) + ("" if plural else "s")
        sentences.append(f"The {choices.pick(COLOURS)} {subject} {' '.join(between)} {verb}.")
    return " ".join(sentences)


def brackets(choices: Choices) -> str:
    """Three kinds of brackets, each closed by its own, in the reverse order."""

    def group(depth: int) -> str:
        opening, closing = choices.pick(BRACKETS)
        inside = []
        for _ in range(choices.between(1, 3)):
            deeper = depth < 3 and choices.chance(0.5)
            inside.append(group(depth + 1) if deeper else choices.pick(FOOD))
        return f"{opening} {' '.join(inside)} {closing}"

    return f"{choices.pick(('Order', 'Store', 'Recipe'))}: {group(1)} {group(1)} end."


def sums(choices: Choices) -> str:
    """Each line goes on with the result of the one before, which follows from its two numbers."""
    value = choices.between(10, 99)
    lines = []
    for _ in range(choices.between(2, 5)):
        amount = choices.between(2, 49)
        plus = value - amount < 0 or choices.chance(0.5)
        result = value + amount if plus else value - amount
        lines.append(f"{value} {'plus' if plus else 'minus'} {amount} is {result}.")
        value = result
    return " ".join(lines)


def letter(choices: Choices) -> str:
    """Names, a thing and a day that come back at its end."""
    to, friend, sender = (name(choices) for _ in range(3))
    thing = f"{choices.pick(COLOURS)} {choices.pick(THINGS)}"
    day, place = choices.pick(DAYS), choices.pick(PLACES)
    return (
        f"Dear {to}, thank you for the {thing}. {friend} and I come to {place} on {day}. "
        f"Will you be there on {day}, {to}? {friend} will bring the {thing}. Yours, {sender}."
    )


def packing(choices: Choices) -> str:
    """A list, once more in the same or in the reverse order."""
    things = choices.distinct(FOOD, choices.between(3, 6))
    backwards = choices.chance(0.5)
    again = list(reversed(things)) if backwards else things
    order = "From the last to the first" if backwards else "From the first to the last"
    return f"{name(choices)} buys {', '.join(things)}. {order}: {', '.join(again)}."


RULES: dict[str, Callable[[Choices], str]] = {
    rule.__name__: rule for rule in (story, agreement, brackets, sums, letter, packing)
}


def edited(text: str, choices: Choices) -> str:
    """A copy as people make them: shouted, wrapped anew, or with one word changed."""
    how = choices.pick(("case", "spaces", "word"))
    if how == "case":
        return text.upper()
    if how == "spaces":
        return text.replace(". ", ".\n")
    words = text.split(" ")
    words[choices.between(0, len(words) - 1)] = choices.pick(FOOD)
    return " ".join(words)


def corpus(count: int, seed: int) -> list[Document]:
    """``count`` documents; the same for the same seed."""
    choices = Choices(seed)
    documents: list[Document] = []
    for number in range(count):
        choices.nats = 0.0
        if documents and choices.chance(EXACT_COPIES + EDITED_COPIES):
            original = choices.pick(documents)
            exact = choices.chance(EXACT_COPIES / (EXACT_COPIES + EDITED_COPIES))
            kind, text = original.kind, original.text if exact else edited(original.text, choices)
        else:
            kind = choices.pick(list(RULES))
            text = RULES[kind](choices)
        documents.append(Document(number, kind, text, choices.nats))
    return documents
