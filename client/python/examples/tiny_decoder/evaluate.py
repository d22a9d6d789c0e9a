"""Held-out loss: of the same tokens for every model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from .attention import Attention
from .batches import Tokens, batch, by_length, rows
from .data import Document
from .model import Decoder

ROWS = 64  # of an evaluation batch: as many documents' heads are one call of attention

Losses = list[list[float]]  # per document, nats of each token but the first


@dataclass(frozen=True)
class Score:
    """Attributes:
    tokens: predicted, each document's end among them.
    nats_per_token: the mean loss.
    perplexity: its exponential.
    bits_per_byte: all the loss over all the text's UTF-8 bytes, which does not depend on the tokenizer.
    """

    tokens: int
    nats_per_token: float
    perplexity: float
    bits_per_byte: float


def decoder_losses(model: Decoder, attention: Attention, documents: Sequence[Tokens]) -> Losses:
    """Nats of each token but the first, per document, in order."""
    losses: Losses = [[] for _ in documents]
    with torch.no_grad():
        for chosen in by_length(rows(documents, model.config.context), ROWS):
            inputs, targets = batch(chosen)
            logits = model(inputs, attention)
            each = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
            for row, values in zip(chosen, each.tolist(), strict=True):
                start = sum(target < 0 for target in row.targets)
                losses[row.document] += values[start : len(row.targets)]
    for document, values in zip(documents, losses, strict=True):
        assert len(values) == len(document) - 1, "each token is predicted once"
    return losses


def score(losses: Losses, documents: Sequence[Document]) -> Score:
    """All of a part's losses as one."""
    if len(losses) != len(documents):
        raise ValueError(f"losses of {len(losses)} documents are not those of {len(documents)}")
    total = math.fsum(value for values in losses for value in values)
    return total_score(total, sum(map(len, losses)), documents)


def total_score(nats: float, tokens: int, documents: Sequence[Document]) -> Score:
    size = sum(len(document.text.encode()) for document in documents)
    mean = nats / tokens
    return Score(tokens, mean, math.exp(mean), nats / math.log(2) / size)


def by_kind(losses: Losses, documents: Sequence[Document]) -> dict[str, float]:
    """Nats per token of each kind of document."""
    kinds: dict[str, list[float]] = {}
    for values, document in zip(losses, documents, strict=True):
        kinds.setdefault(document.kind, []).extend(values)
    return {kind: math.fsum(values) / len(values) for kind, values in sorted(kinds.items())}


def advantage(losses: Losses, other: Losses, seed: int, samples: int = 2000) -> tuple[float, float]:
    """By how many nats per token the other's losses are higher: a 95 % interval, by bootstrap over documents.

    Tokens of one document are not independent, so documents are drawn, and both models are scored on the same ones.
    """
    counts = np.array([len(values) for values in losses])
    if counts.tolist() != [len(values) for values in other]:
        raise ValueError("the two models predicted other tokens")
    differences = np.array([math.fsum(b) - math.fsum(a) for a, b in zip(losses, other, strict=True)])
    drawn = np.random.default_rng(seed).integers(len(counts), size=(samples, len(counts)))
    means = differences[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)
