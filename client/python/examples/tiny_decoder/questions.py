"""Asks the decoder what held-out documents say next, where that follows from what they said: probable, beside true."""

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

SUM = re.compile(r"(\d+) (plus|minus) (\d+) is")
OWNER = re.compile(r"(\w+) has a|to (\w+)\.")
MOST_TOKENS = 8  # of an answer and what ends it


@dataclass(frozen=True)
class Question:
    """Attributes:
    kind: of document.
    text: up to the answer.
    truth: the answer, worked out from the text, not read in what follows.
    end: what comes after an answer.
    """

    kind: str
    text: str
    truth: str
    end: str


@dataclass(frozen=True)
class Answer:
    """Attributes:
    text: the decoder's.
    probability: the decoder's, of this answer and its end.
    """

    question: Question
    text: str
    probability: float

    @property
    def right(self) -> bool:
        return self.text == self.question.truth


def questions(documents: Sequence[Document]) -> Iterator[Question]:
    """The last result of each document with sums, and who has the thing at the end of each story."""
    for document in documents:
        text = document.text
        sums = list(SUM.finditer(text))
        if sums:
            left, sign, right = sums[-1].groups()
            result = int(left) + int(right) if sign == "plus" else int(left) - int(right)
            yield Question("sums", text[: sums[-1].end()], str(result), ".")
        elif " Now " in text:
            told = text[: text.rindex(" Now ")]
            first, later = OWNER.findall(told)[-1]
            yield Question("story", told + " Now", first or later, " has")


def ask(
    model: Decoder, client: attnd.Client, tokenizer: Tokenizer, documents: Sequence[Document], most: int = 40
) -> list[Answer]:
    """Greedy answers to the first ``most`` questions of each kind that fit the context."""
    given: dict[str, list[Answer]] = {}
    for question in questions(documents):
        prompt = [tokenizer.boundary, *tokenizer.encode(question.text)]
        answers = given.setdefault(question.kind, [])
        if len(prompt) + MOST_TOKENS <= model.config.context and len(answers) < most:
            generated = generate(model, client, prompt, MOST_TOKENS)
            tokens, text = 0, ""
            while tokens < len(generated.tokens) and question.end not in text:
                tokens += 1
                text = tokenizer.decode(generated.tokens[:tokens])
            taken = tokens if question.end in text else len(generated.probabilities)
            probability = math.prod(generated.probabilities[:taken])
            answers.append(Answer(question, text.split(question.end)[0].strip(), probability))
    return [answer for answers in given.values() for answer in answers]
