"""The README's Python runs, in its order, and prints what its comments say."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import left_padded, tiny
from running_server import ROOT, Server

README = (ROOT / "client/python/README.md").read_text()
ADDRESS = "127.0.0.1:50051"


def test_every_block_runs(start_server: Callable[..., Server], capsys: pytest.CaptureFixture[str]) -> None:
    server = start_server()
    names: dict[str, Any] = {"model": tiny("Llama"), "inputs": left_padded((9, 4))}
    names |= {name: torch.randn(2, 4, 7, 16, requires_grad=True) for name in ("query", "key", "value")}
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    for block in blocks:
        exec(compile(block.replace(ADDRESS, server.target), "README.md", "exec"), names)
        printed = " ".join(capsys.readouterr().out.split())
        said = re.findall(r"\bprint\(.*\) +# (.*)$", block, re.MULTILINE)
        assert printed == " ".join(said)
    assert names["tokens"].shape == (2, 9 + 64)
    assert [result.length for result in names["results"]] == [1, 2, 3, 4]
    assert all(names[name].grad.isfinite().all() for name in ("query", "key", "value"))
    names["session"].close()
    names["client"].close()
