"""Trains a tiny decoder through attnd, once per seed, and says how well it predicts documents that it never saw.

    attnd &
    pip install ./client/python -r client/python/examples/tiny_decoder/requirements.txt
    cd client/python/examples
    python -m tiny_decoder --server 127.0.0.1:50051

Writes results.json, results.md and loss.png into --out. Exit status 0 only when every seed's held-out loss is below
every baseline's and every control holds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

# Read when torch is imported: between two layers its threads would otherwise spin on the server's cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

import attnd

from . import plot, report
from .attention import LocalAttention
from .experiment import Material, Options, Result, prepare, run_seed
from .train import Diverged, Schedule

T = TypeVar("T")

LOGIT_DIFFERENCE = 1e-3  # of logits that two ways of summing float32 gave


def timed(what: str, action: Callable[[], T]) -> T:
    print(f"{what} ...", flush=True)
    start = time.perf_counter()
    result = action()
    print(f"  {time.perf_counter() - start:.1f} s", flush=True)
    return result


def failures(material: Material, results: Sequence[Result]) -> list[str]:
    """What is not as it should be."""
    baselines = {name: one.nats_per_token for name, one in report.baseline_scores(material).items()}
    found = []
    for result in results:
        loss, shuffle, future = result.score.nats_per_token, result.shuffle, result.future
        checks = [
            (loss < other, f"a loss of {loss:.3f} is not below {name}'s {other:.3f}")
            for name, other in baselines.items()
        ]
        checks += [
            (shuffle.shuffled > shuffle.ordered, "shuffling the context does not hurt"),
            (future.earlier == 0 and future.later > 0, "earlier logits depend on the future"),
            (future.earlier_gradient == 0 and future.own_gradient > 0, "an earlier loss has gradients by the future"),
        ]
        for what, difference in (("a session's", result.incremental), ("torch's", result.agreement.logits)):
            checks.append((difference <= LOGIT_DIFFERENCE, f"logits differ from {what} by {difference:.1e}"))
        found += [f"seed {result.seed}: {what}" for holds, what in checks if not holds]
    return found


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m tiny_decoder", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options = Options()
    result.add_argument("--server", default="127.0.0.1:50051", metavar="HOST:PORT")
    result.add_argument(
        "--attention",
        default="attnd",
        choices=("attnd", "local"),
        help="of training and scoring; generation goes through attnd's sessions with either",
    )
    result.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of weights and order")
    result.add_argument("--documents", type=int, default=options.documents, help="of the corpus, before it is split")
    result.add_argument("--vocabulary", type=int, default=options.vocabulary, help="tokens")
    result.add_argument("--steps", type=int, default=options.schedule.steps)
    result.add_argument("--rows", type=int, default=options.schedule.rows, help="documents of a step")
    result.add_argument("--rate", type=float, default=options.schedule.rate, help="highest learning rate")
    result.add_argument("--context", type=int, default=options.context, help="tokens")
    result.add_argument("--layers", type=int, default=options.layers)
    result.add_argument("--width", type=int, default=options.width)
    result.add_argument("--heads", type=int, default=options.heads)
    result.add_argument("--threads", type=int, default=1, help="of torch, for everything but attention in attnd")
    result.add_argument("--out", type=Path, default=Path("tiny_decoder_results"), metavar="FOLDER")
    return result


def write(out: Path, options: Options, material: Material, results: Sequence[Result], attention: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    values = report.as_json(options, material, results)
    (out / "results.json").write_text(json.dumps(values, indent=1, allow_nan=False) + "\n")
    (out / "results.md").write_text(report.as_page(options, material, results, attention))
    validation = {
        name: chosen["validation loss"] for name, chosen in material.chosen.items() if "validation loss" in chosen
    }
    plot.losses({result.seed: result.history for result in results}, validation, out / "loss.png")


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    torch.set_num_threads(given.threads)
    try:
        options = Options(
            documents=given.documents,
            vocabulary=given.vocabulary,
            context=given.context,
            layers=given.layers,
            width=given.width,
            heads=given.heads,
            schedule=Schedule(steps=given.steps, rows=given.rows, rate=given.rate),
        )
    except ValueError as error:
        parser().error(str(error))
    with attnd.Client(given.server) as client:
        try:
            info = client.server_info()
        except attnd.AttndError as error:
            print(f"no attnd at {given.server}: {error}", file=sys.stderr)
            return 1
        print(f"attnd {info.version} at {given.server}: {info.isa}, {info.compute_threads} compute threads")
        print(f"torch {torch.__version__}, {given.threads} threads")
        material = timed("Making the corpus, its parts and the baselines", lambda: prepare(options))
        local = LocalAttention() if given.attention == "local" else None
        try:
            results = [
                timed(f"Seed {seed}", lambda seed=seed: run_seed(material, options, client, seed, local))
                for seed in given.seeds
            ]
        except Diverged as error:
            print(error, file=sys.stderr)
            return 1
    write(given.out, options, material, results, given.attention)
    print((given.out / "results.md").read_text())
    print(f"written: {', '.join(str(given.out / name) for name in ('results.json', 'results.md', 'loss.png'))}")
    wrong = failures(material, results)
    for what in wrong:
        print(what, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
