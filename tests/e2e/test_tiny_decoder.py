"""A small decoder that is trained through attnd, forward and backward, learns what documents it never saw are like."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from running_server import Server
from tiny_decoder import __main__ as command
from tiny_decoder import evaluate
from tiny_decoder.experiment import Material, Options, Result, prepare, run_seed
from tiny_decoder.train import Schedule

import attnd

torch.set_num_threads(1)

SEEDS = (0, 1, 2)
OPTIONS = Options(documents=2500, schedule=Schedule(steps=240, look_every=80))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server("--kv_cache_bytes=128MiB")
    yield running
    running.kill()


@pytest.fixture(scope="module")
def material() -> Material:
    return prepare(OPTIONS)


@pytest.fixture(scope="module")
def results(server: Server, material: Material) -> list[Result]:
    with attnd.Client(server.target) as client:
        return [run_seed(material, OPTIONS, client, seed, show_progress=False) for seed in SEEDS]


def test_heldout_loss_is_below_every_baselines(material: Material, results: list[Result]) -> None:
    assert set(material.losses) == {"uniform", "unigram", "bigram", "trigram"}
    predicted = sum(len(document) - 1 for document in material.heldout)
    for name, losses in material.losses.items():
        baseline = evaluate.score(losses, material.parts.heldout)
        for result in results:
            print(f"seed {result.seed}: {result.score.nats_per_token:.3f}, {name} {baseline.nats_per_token:.3f}")
            assert baseline.tokens == result.score.tokens == predicted
            assert result.score.nats_per_token < baseline.nats_per_token
            assert result.score.bits_per_byte < baseline.bits_per_byte
            # Not by the luck of which documents were held out.
            assert result.advantage[name][0] > 0
    # What the grammar itself needs is close to the least that is possible: a lower loss would be a leak.
    assert all(result.score.nats_per_token > material.grammar.nats_per_token for result in results)


def test_seeds_are_different_decoders(results: list[Result]) -> None:
    assert len({result.score.nats_per_token for result in results}) == len(SEEDS)
    assert len({result.sample for result in results}) == len(SEEDS)


def test_shuffled_context_is_worse(results: list[Result]) -> None:
    for result in results:
        print(result.shuffle)
        assert result.shuffle.targets > 500
        assert result.shuffle.shuffled > result.shuffle.ordered + 0.02
        assert result.shuffle.ordered < result.shuffle.bigram


def test_nothing_leaks_from_the_future(results: list[Result]) -> None:
    for result in results:
        assert (result.future.earlier, result.future.earlier_gradient) == (0, 0)
        assert result.future.later > 0.1
        assert result.future.own_gradient > 0


def test_trained_decoders_agree_with_torch_and_with_their_sessions(results: list[Result]) -> None:
    for result in results:
        print(result.agreement, result.incremental)
        assert result.agreement.logits <= 1e-5 * result.agreement.largest_logit
        assert result.agreement.gradient <= 1e-4 * result.agreement.largest_gradient
        assert result.incremental <= 1e-4
        assert {answer.question.kind for answer in result.answers} == {"sums", "story"}


def test_the_command_fails_when_a_result_is_not_as_it_should_be(material: Material, results: list[Result]) -> None:
    assert command.failures(material, results) == []
    losses = {
        name: evaluate.score(losses, material.parts.heldout).nats_per_token for name, losses in material.losses.items()
    }
    worse = dataclasses.replace(
        results[0],
        score=dataclasses.replace(results[0].score, nats_per_token=3.0),
        future=dataclasses.replace(results[0].future, earlier=1e-3),
    )
    assert command.failures(material, [worse, *results[1:]]) == [
        f"seed 0: a loss of 3.000 is not below bigram's {losses['bigram']:.3f}",
        f"seed 0: a loss of 3.000 is not below trigram's {losses['trigram']:.3f}",
        "seed 0: earlier logits depend on the future",
    ]


def test_the_command_writes_its_results(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The shortest context that the controls leave room for: most documents are longer.
    few = ["--seeds", "3", "--documents", "300", "--steps", "4", "--context", "13", "--out", str(tmp_path / "out")]
    assert command.main(["--server", server.target, *few]) == 1
    printed = capsys.readouterr()
    assert "seed 3: a loss of" in printed.err
    assert (tmp_path / "out/loss.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "out/results.md").read_text()
    assert page in printed.out
    found = json.loads((tmp_path / "out/results.json").read_text())
    assert len(found["decoder"][0]["history"]["train"]) == 4
    assert f"| {found['decoder'][0]['score']['nats_per_token']:.3f} |" in page
    assert found["documents"]["train"] == 240


@pytest.mark.parametrize("attention", ["attnd", "local"])
def test_the_command_says_that_a_decoder_diverged(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], attention: str
) -> None:
    few = ["--documents", "100", "--steps", "3", "--rate", "1e30", "--attention", attention, "--out", str(tmp_path)]
    assert command.main(["--server", server.target, *few]) == 1
    assert re.search(r"of seed 0 diverged: .*; lower the rate\n$", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_the_command_refuses_a_context_that_is_too_short(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--context", "12"])
    assert "a context of 12 is too short for the controls; 13 are needed" in capsys.readouterr().err


def test_the_command_says_when_there_is_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--server", "127.0.0.1:1"]) == 1
    assert "no attnd at 127.0.0.1:1" in capsys.readouterr().err
