"""Asks the decoder for the results of held-out sums: a probable continuation, beside what is true."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import attnd

from .data import Document
from .generate import generate
from .model import Decoder
from .tokenizer import Tokenizer

QUESTION = re.compile(r"(\d+) (plus|minus) (\d+) is")
MOST_TOKENS = 6  # of an answer: three digits and a full stop, and some more


@dataclass(frozen=True)
class Answers:
    """Attributes:
    asked, right: how many.
    sure: wrong answers that it gave more than half of the probability.
    mean_wrong: the mean probability of its wrong answers.
    examples: as text, with the probability of the answer; wrong ones first.
    """

    asked: int
    right: int
    sure: int
    mean_wrong: float
    examples: tuple[tuple[str, str, int, float], ...]


def questions(documents: Sequence[Document]) -> Iterator[tuple[str, int]]:
    """A held-out text up to the last result that it states, and that result: worked out here, not read there."""
    for document in documents:
        found = list(QUESTION.finditer(document.text))
        if found:
            left, sign, right = found[-1].groups()
            result = int(left) + int(right) if sign == "plus" else int(left) - int(right)
            yield document.text[: found[-1].end()], result


def ask(
    model: Decoder, client: attnd.Client, tokenizer: Tokenizer, documents: Sequence[Document], most: int = 40
) -> Answers:
    """Greedy answers to the first ``most`` questions that fit the context."""
    given: list[tuple[str, str, int, float]] = []
    for text, result in questions(documents):
        prompt = [tokenizer.boundary, *tokenizer.encode(text)]
        if len(prompt) + MOST_TOKENS > model.config.context or len(given) == most:
            continue
        generated = generate(model, client, prompt, MOST_TOKENS)
        # Its answer ends with the full stop, and so does its probability.
        answer, tokens = "", 0
        while tokens < len(generated.tokens) and "." not in answer:
            tokens += 1
            answer = tokenizer.decode(generated.tokens[:tokens])
        answer = answer.split(".")[0].strip()
        given.append((text, answer, result, math.prod(generated.probabilities[:tokens])))
    wrong = [entry for entry in given if entry[1] != str(entry[2])]
    return Answers(
        asked=len(given),
        right=len(given) - len(wrong),
        sure=sum(entry[3] > 0.5 for entry in wrong),
        mean_wrong=math.fsum(entry[3] for entry in wrong) / len(wrong) if wrong else 0.0,
        examples=tuple(sorted(wrong, key=lambda entry: -entry[3])[:3]),
    )
