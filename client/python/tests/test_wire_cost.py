"""The bytes and round trips that examples/wire_cost.py counts are those of the arithmetic, and of the messages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from running_server import Server

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import wire_cost
from wire_cost import SHAPES, CountingClient, Shape

torch.set_num_threads(1)

PROMPT, TOKENS = 24, 3
# Of one message beside its tensors: the session's id, position, layer, lengths, timing.
MESSAGE_BYTES = 128

THIN_SMOLLM2 = Shape("thin", 30, 9, 3, 64, torch.float32, "f32", 1e-4, True, hidden=144)


@pytest.mark.parametrize("shape", [THIN_SMOLLM2, SHAPES[1]], ids=["f32", "bf16"])
def test_counted_bytes_are_the_arithmetic(server: Server, shape: Shape) -> None:
    with CountingClient(server.target) as client:
        measured = wire_cost.measure(shape, client, PROMPT, TOKENS)
    assert measured.difference() <= shape.difference
    for trips, tokens, count in ((measured.prompt, PROMPT, 1), (measured.tokens, 1, TOKENS)):
        assert len(trips) == count * shape.layers
        for trip in trips:
            assert 0 < trip.sent - shape.sent_per_token() * tokens // shape.layers < MESSAGE_BYTES
            assert 0 < trip.received - shape.received_per_token() * tokens // shape.layers < MESSAGE_BYTES
            assert 0 < trip.attention_seconds < trip.seconds


def test_the_arithmetic_of_known_models() -> None:
    """Per layer and token e * d * (Hq + 2 Hkv) up and e * d * Hq down."""
    smollm2, llama3 = SHAPES
    assert (smollm2.sent_per_token(), smollm2.received_per_token()) == (30 * 4 * 64 * 15, 30 * 4 * 64 * 9)
    assert (llama3.sent_per_token(), llama3.received_per_token()) == (384 << 10, 256 << 10)
    assert llama3.cache_per_token() == 128 << 10


def test_a_run_as_people_make_it(server: Server, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_cost, "SHAPES", (THIN_SMOLLM2,))
    assert wire_cost.main([f"--server={server.target}", "--prompt=8", "--tokens=2"]) == 0
    printed = capsys.readouterr().out
    assert "| round trips per token | 30 |" in printed
    monkeypatch.setattr(wire_cost.Measurement, "difference", lambda _: 1.0)
    assert wire_cost.main([f"--server={server.target}", "--prompt=8", "--tokens=2"]) == 1
    assert wire_cost.main(["--server=127.0.0.1:9"]) == 1
