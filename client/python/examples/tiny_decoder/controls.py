"""Controls: that the context is used, and that nothing of the future leaks into a prediction."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from .attention import Attention
from .baselines import Baseline
from .batches import Row, Tokens, batch, by_length
from .evaluate import ROWS
from .model import Decoder

LEAST_SHUFFLED = 4  # tokens: fewer would often stay as they are
FUTURE_PLACE = 12  # of the future control; a context needs a token after it, and has what is shuffled then too


@dataclass(frozen=True)
class Target:
    """One token to predict.

    Attributes:
        context: the document's tokens before it, the boundary first.
        shuffled: the same ones, in another order but for the boundary and the last one: a bigram sees no difference.
    """

    context: list[int]
    shuffled: list[int]
    token: int


def targets(documents: Sequence[Tokens], context: int, per_document: int, seed: int) -> list[Target]:
    """Random tokens of each document that is long enough, the same for the same seed."""
    generator = random.Random(seed)
    drawn = []
    for document in documents:
        # Before the target: the boundary, what is shuffled, and the last token.
        places = range(LEAST_SHUFFLED + 2, min(len(document), context + 1))
        for place in sorted(generator.sample(places, min(per_document, len(places)))):
            first, *middle, last = document[:place]
            generator.shuffle(middle)
            drawn.append(Target(list(document[:place]), [first, *middle, last], document[place]))
    return drawn


def last_token_loss(
    model: Decoder, attention: Attention, contexts: Sequence[list[int]], tokens: Sequence[int]
) -> float:
    """Nats per token, each predicted from the end of its context."""
    # The number in a row's place says which token it is to predict, whatever the order of the batches.
    wanted = [Row(number, context, []) for number, context in enumerate(contexts)]
    total = 0.0
    with torch.no_grad():
        for chosen in by_length(wanted, ROWS):
            inputs, _ = batch(chosen)
            ends = torch.tensor([len(row.inputs) - 1 for row in chosen])
            logits = model(inputs, attention)[torch.arange(len(chosen)), ends]
            expected = torch.tensor([tokens[row.document] for row in chosen])
            total += cross_entropy(logits, expected, reduction="sum").item()
    return total / len(tokens)


@dataclass(frozen=True)
class ShuffleControl:
    """Nats per token of the same targets: from their context, from it shuffled, and a bigram's, which is the same."""

    targets: int
    ordered: float
    shuffled: float
    bigram: float


def shuffle_control(
    model: Decoder,
    attention: Attention,
    bigram: Baseline,
    documents: Sequence[Tokens],
    seed: int,
    per_document: int = 4,
) -> ShuffleControl:
    """What the order of all but the last token is worth."""
    drawn = targets(documents, model.config.context, per_document, seed)
    tokens = [target.token for target in drawn]
    counted = [-math.log(bigram.probability(tuple(target.shuffled), target.token)) for target in drawn]
    return ShuffleControl(
        targets=len(drawn),
        ordered=last_token_loss(model, attention, [target.context for target in drawn], tokens),
        shuffled=last_token_loss(model, attention, [target.shuffled for target in drawn], tokens),
        bigram=math.fsum(counted) / len(counted),
    )


@dataclass(frozen=True)
class FutureControl:
    """The largest absolute changes, when all tokens after one place become others.

    Attributes:
        earlier: of the logits up to that place: 0, or the future leaks.
        later: of those after it: not 0, or the control looked at nothing.
        earlier_gradient: of a loss up to that place by the embedded tokens after it: 0, or the backward leaks.
        own_gradient: of that loss by the embedded tokens up to that place: not 0.
    """

    earlier: float
    later: float
    earlier_gradient: float
    own_gradient: float


def future_control(
    model: Decoder, attention: Attention, documents: Sequence[Tokens], seed: int, place: int = FUTURE_PLACE
) -> FutureControl:
    """Changes the future of documents with more than ``place`` tokens, and looks at the past."""
    context = model.config.context
    chosen = [Row(0, list(document[:context]), []) for document in documents if len(document) > place + 2]
    if not chosen:
        raise ValueError(f"no document has more than {place + 2} tokens")
    inputs, _ = batch(chosen)
    offsets = torch.randint(
        1, model.config.vocabulary, inputs[:, place:].shape, generator=torch.Generator().manual_seed(seed)
    )
    other = inputs.clone()
    other[:, place:] = (inputs[:, place:] + offsets) % model.config.vocabulary
    with torch.no_grad():
        change = (model(other, attention) - model(inputs, attention)).abs()
    gradient = embedding_gradient(model, attention, inputs, place).abs()
    return FutureControl(
        earlier=change[:, :place].max().item(),
        later=change[:, place:].max().item(),
        earlier_gradient=gradient[:, place:].max().item(),
        own_gradient=gradient[:, :place].max().item(),
    )


def embedding_gradient(model: Decoder, attention: Attention, inputs: Tensor, place: int) -> Tensor:
    """Of the loss of predicting the tokens up to ``place``, by the embedded inputs: [rows, tokens, width]."""
    embedded = model.embed(inputs).detach().requires_grad_()
    logits = model.logits(embedded, attention)[:, : place - 1]
    loss = cross_entropy(logits.flatten(0, 1), inputs[:, 1:place].flatten())
    (gradient,) = torch.autograd.grad(loss, embedded)
    return gradient


@dataclass(frozen=True)
class Agreement:
    """attnd's attention beside torch's, the largest absolute differences.

    Attributes:
        logits, largest_logit: of a batch.
        gradient, largest_gradient: of its loss by all weights.
    """

    logits: float
    largest_logit: float
    gradient: float
    largest_gradient: float


def agreement(model: Decoder, one: Attention, other: Attention, chosen: Sequence[Row]) -> Agreement:
    """Of one model's logits and gradients, with two attentions."""
    inputs, expected = batch(chosen)
    found = []
    for attention in (one, other):
        logits = model(inputs, attention)
        loss = cross_entropy(logits.flatten(0, 1), expected.flatten())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        found.append((logits.detach(), torch.cat([gradient.flatten() for gradient in gradients])))
    (logits, gradient), (other_logits, other_gradient) = found
    return Agreement(
        logits=(logits - other_logits).abs().max().item(),
        largest_logit=other_logits.abs().max().item(),
        gradient=(gradient - other_gradient).abs().max().item(),
        largest_gradient=other_gradient.abs().max().item(),
    )
