"""Models that count: what a decoder has to beat to have learned anything from more than the last token.

uniform   1 / vocabulary
unigram   (count + alpha) / (all + alpha * vocabulary)
n-gram    absolute discounting, interpolated (Ney, Essen and Kneser 1994): of every count of a continuation of the
          last n - 1 tokens ``discount`` is taken, and given to the (n-1)-gram model:
          p(w | h) = max(c(h w) - discount, 0) / c(h) + discount * kinds(h) / c(h) * p(w | h without its first token)
          where kinds(h) is how many different tokens were seen after h. After an unseen h, the (n-1)-gram's p.

Counts are of the training part, alpha and discount are chosen on the validation part. A document's first token is
predicted from its boundary, as the decoder does, and no context reaches across it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol

Tokens = Sequence[int]

ALPHAS = (0.001, 0.01, 0.1, 1.0)
DISCOUNTS = (0.1, 0.25, 0.5, 0.75, 0.9)


class Baseline(Protocol):
    def probability(self, history: tuple[int, ...], token: int) -> float:
        """Of ``token`` after the document's tokens so far, the boundary first."""


class Uniform:
    def __init__(self, vocabulary: int) -> None:
        self._probability = 1 / vocabulary

    def probability(self, history: tuple[int, ...], token: int) -> float:
        return self._probability


class Unigram:
    def __init__(self, documents: Iterable[Tokens], vocabulary: int, alpha: float) -> None:
        # The first boundary is given, not predicted.
        self._counts = Counter(token for document in documents for token in document[1:])
        self._alpha = alpha
        self._all = self._counts.total() + alpha * vocabulary

    def probability(self, history: tuple[int, ...], token: int) -> float:
        return (self._counts[token] + self._alpha) / self._all


class Ngram:
    """Args:
    order: tokens that it counts together, 2 for a bigram.
    lower: the (order - 1)-gram model.
    """

    def __init__(self, documents: Iterable[Tokens], order: int, discount: float, lower: Baseline) -> None:
        if order < 2 or not 0 < discount < 1:
            raise ValueError(f"order {order} and discount {discount}: 2 or more, and between 0 and 1, are needed")
        self._order, self._discount, self._lower = order, discount, lower
        self._after: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for document in documents:
            for place in range(1, len(document)):
                self._after[tuple(document[max(0, place - order + 1) : place])][document[place]] += 1
        self._totals = {history: counts.total() for history, counts in self._after.items()}

    def probability(self, history: tuple[int, ...], token: int) -> float:
        history = history[-(self._order - 1) :]
        lower = self._lower.probability(history, token)
        counts = self._after.get(history)
        if counts is None:
            return lower
        total = self._totals[history]
        return max(counts[token] - self._discount, 0) / total + self._discount * len(counts) / total * lower


def nats(model: Baseline, document: Tokens) -> list[float]:
    """Minus the log probability of each token but the first."""
    history = tuple(document)
    return [-math.log(model.probability(history[:place], history[place])) for place in range(1, len(history))]


def loss(model: Baseline, documents: Iterable[Tokens]) -> float:
    """Nats per predicted token."""
    losses = [value for document in documents for value in nats(model, document)]
    return math.fsum(losses) / len(losses)


def fit(
    train: Sequence[Tokens], validation: Sequence[Tokens], vocabulary: int, highest: int = 3
) -> tuple[dict[str, Baseline], dict[str, dict[str, float]]]:
    """All baselines, counted on ``train``, smoothed as suits ``validation`` best.

    Returns:
        the models by name, and what was chosen for each.
    """
    models: dict[str, Baseline] = {"uniform": Uniform(vocabulary)}
    chosen: dict[str, dict[str, float]] = {"uniform": {}}

    def best(name: str, option: str, candidates: Iterable[tuple[float, Baseline]]) -> Baseline:
        tried = [(loss(model, validation), value, model) for value, model in candidates]
        found, value, model = min(tried, key=lambda entry: entry[0])
        models[name], chosen[name] = model, {option: value, "validation loss": found}
        return model

    lower = best("unigram", "alpha", ((alpha, Unigram(train, vocabulary, alpha)) for alpha in ALPHAS))
    for order, name in zip(itertools.count(2), ("bigram", "trigram", "4-gram", "5-gram")[: highest - 1], strict=False):
        candidates = [(discount, Ngram(train, order, discount, lower)) for discount in DISCOUNTS]
        lower = best(name, "discount", candidates)
    return models, chosen
