"""Trains a decoder on the training part."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import attnd

from .attention import Attention
from .batches import IGNORED, Tokens, batch, rows, shuffled
from .evaluate import decoder_losses
from .model import Config, Decoder

OVERFLOWS = ("NOT_FINITE", "SCORE_OVERFLOW", "GRADIENT_OVERFLOW")  # attnd's reasons


class Diverged(ArithmeticError):
    """A loss is not finite, or what attention is given or gives is not: no later step would make it so."""


@contextlib.contextmanager
def finite(what: str) -> Iterator[None]:
    """Raises Diverged where attnd refuses what is not finite; torch's own attention makes a loss of it."""
    try:
        yield
    except attnd.InvalidArgument as error:
        if error.reason not in OVERFLOWS:
            raise
        raise Diverged(f"{what} diverged: {error.message}; lower the rate") from error


def check_loss(what: str, loss: float) -> float:
    if not math.isfinite(loss):
        raise Diverged(f"{what} diverged: the loss is {loss}; lower the rate")
    return loss


@dataclass(frozen=True)
class Schedule:
    """Attributes:
    steps: batches.
    rows: of a batch, documents or parts of long ones.
    rate: of learning, at its highest: after a tenth of the steps; then it falls to a tenth along a cosine.
    look_every: steps between two looks at the validation loss.
    """

    steps: int = 1200
    rows: int = 16
    rate: float = 6e-3
    look_every: int = 100

    def rate_at(self, step: int) -> float:
        warm = max(1, self.steps // 10)
        if step < warm:
            return self.rate * (step + 1) / warm
        done = (step - warm) / max(1, self.steps - warm)
        return self.rate * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


@dataclass
class History:
    """Attributes:
    train: nats per token of each step's batch, before the step.
    validation: (steps done, nats per token).
    """

    train: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)


def train(
    config: Config,
    schedule: Schedule,
    attention: Attention,
    documents: Sequence[Tokens],
    validation: Sequence[Tokens],
    seed: int,
    show_progress: bool = True,
) -> tuple[Decoder, History]:
    """A decoder from random weights; ``seed`` draws those and the order of the documents.

    The last weights are the result: the validation loss is looked at, and chooses nothing.

    Raises:
        Diverged: naming the step.
    """
    torch.manual_seed(seed)
    model = Decoder(config)
    # Decay is for matrices: it would pull the norms' gains to zero.
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    history = History()
    batches = shuffled(rows(documents, config.context), schedule.rows, schedule.steps, seed)
    progress = tqdm(batches, f"seed {seed}", schedule.steps, unit="step", disable=None if show_progress else True)
    for step, chosen in enumerate(progress):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate_at(step)
        inputs, targets = batch(chosen)
        at = f"step {step + 1} of seed {seed}"
        with finite(at):
            logits = model(inputs, attention)
            loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
            history.train.append(check_loss(at, loss.item()))
            optimizer.zero_grad()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % schedule.look_every == 0 or step + 1 == schedule.steps:
            with finite(f"the validation after {at}"):
                losses = [value for values in decoder_losses(model, attention, validation) for value in values]
            mean = check_loss(f"the validation after {at}", math.fsum(losses) / len(losses))
            history.validation.append((step + 1, mean))
            progress.set_postfix(validation=f"{history.validation[-1][1]:.3f}")
    return model, history
