"""The loss of training as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import mean

import matplotlib

matplotlib.use("Agg")  # a file, on machines without a display too
import matplotlib.pyplot as plt

from .train import History

SMOOTHED = 20  # steps


def losses(histories: Mapping[int, History], validation: Mapping[str, float], path: Path) -> None:
    """Training and validation loss of each seed, beside the baselines' validation losses, as PNG."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for number, (seed, history) in enumerate(histories.items()):
        colour = f"C{number}"
        smooth = [mean(history.train[max(0, step - SMOOTHED) : step + 1]) for step in range(len(history.train))]
        axes.plot(range(1, len(smooth) + 1), smooth, color=colour, alpha=0.4, linewidth=1)
        axes.plot(*zip(*history.validation, strict=True), color=colour, marker=".", label=f"decoder, seed {seed}")
    for name, loss in validation.items():
        axes.axhline(loss, color="0.4", linestyle=":", linewidth=1)
        axes.annotate(name, (1, loss), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)
    axes.set_xlabel("steps")
    axes.set_ylabel("nats per token")
    axes.set_title(f"Validation loss (points) and training loss (pale, mean of {SMOOTHED} steps)", fontsize=10)
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=100)
    plt.close(figure)
