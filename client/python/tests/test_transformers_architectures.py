"""Every architecture of the table: its tokens are the local ones, or it is refused by name. Writes the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import architectures
import pytest
import torch
import transformers
from architectures import REFUSED, SUPPORTED, Finding
from models import greedy, left_padded, prompt, tiny
from running_server import ROOT

import attnd
from attnd.transformers import RemoteCache

LOGIT_DIFFERENCE = 1e-4
CHECKED_IN = Path(__file__).parents[1] / "ARCHITECTURES.md"
WRITTEN = ROOT / "build/ARCHITECTURES.md"
BEAMS: dict[str, Any] = {"num_beams": 3, "do_sample": False, "max_new_tokens": 12}

_findings: dict[str, Finding] = {}
_refusals: dict[str, str] = {}


def finding(client: attnd.Client, name: str) -> Finding:
    if name not in _findings:
        _findings[name] = find(client, name)
    return _findings[name]


def find(client: attnd.Client, name: str) -> Finding:
    """Generates in three ways, locally and through the server."""
    model = tiny(name, **SUPPORTED[name])
    row, rows = {"input_ids": prompt(1, 17)}, left_padded((14, 9, 2))
    local = greedy(model, row)
    local_rows = greedy(model, rows)
    local_beams = model.generate(**rows, **BEAMS)
    with RemoteCache(model, client) as cache:
        remote = greedy(model, row, cache=cache)
        assert client.get_session(cache.session_ids[0]).length == 17 + 11
        shows = describe(client, cache)
    with RemoteCache(model, client) as cache:
        remote_rows = greedy(model, rows, cache=cache)
    with RemoteCache(model, client) as cache:
        remote_beams = model.generate(**rows, **BEAMS, cache=cache)
    pairs = {"greedy": (local, remote), "left-padded": (local_rows, remote_rows)}
    return Finding(
        name,
        {
            **{way: torch.equal(one[0], other[0]) for way, (one, other) in pairs.items()},
            "beam search": torch.equal(local_beams, remote_beams),
        },
        max(float((one[1] - other[1]).abs().max()) for one, other in pairs.values()),
        shows,
    )


def describe(client: attnd.Client, cache: RemoteCache) -> str:
    """What the sessions, and what was asked of them, say that this model has."""
    configs = [client.get_session(session).config for session in cache.session_ids]
    kinds = [kind for kind in cache.state._kinds if kind is not None]
    parts = [f"{config.num_q_heads}/{config.num_kv_heads} heads of {config.head_dim}" for config in configs]
    windows = [kind.window for kind in kinds]
    if any(windows):
        parts.append("windows" if all(windows) else "windows on some layers")
    parts.extend(f"softcap {config.softcap:g}" for config in configs if config.softcap)
    if any(kind.sinks for kind in kinds):
        parts.append("sinks")
    if any(abs(config.scale * config.head_dim**0.5 - 1) > 1e-6 for config in configs):
        parts.append("scale " + ", ".join(f"{config.scale:.3g}" for config in configs))
    if len(kinds) < len(cache.layers):
        parts.append("layers that share K and V")
    return ", ".join(parts)


def refusal(client: attnd.Client, name: str) -> str:
    if name not in _refusals:
        if name == "T5":
            model: Any = transformers.T5ForConditionalGeneration(transformers.T5Config(**REFUSED[name])).eval()
        else:
            model = tiny(name, **REFUSED[name])
        own = model.config._attn_implementation
        with pytest.raises(NotImplementedError) as refused, RemoteCache(model, client) as cache:
            greedy(model, {"input_ids": prompt(1, 4)}, cache=cache)
        _refusals[name] = str(refused.value)
        assert model.config._attn_implementation == own
    return _refusals[name]


@pytest.mark.parametrize("name", SUPPORTED)
def test_tokens_are_the_local_ones(client: attnd.Client, name: str) -> None:
    found = finding(client, name)
    assert all(found.equal.values()), found
    assert found.difference <= LOGIT_DIFFERENCE
    assert client.server_info().kv_cache_used_bytes == 0


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_are_refused_by_name(client: attnd.Client, name: str) -> None:
    assert refusal(client, name)
    assert not list(client.list_sessions())


def test_the_checked_in_table_says_what_was_found(client: attnd.Client) -> None:
    found = [finding(client, name) for name in SUPPORTED]
    refusals = {name: refusal(client, name) for name in REFUSED}
    versions = f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}"
    page = architectures.page(found, refusals, versions)
    WRITTEN.parent.mkdir(exist_ok=True)
    WRITTEN.write_text(page)
    checked_in = CHECKED_IN.read_text()
    assert architectures.verdicts(checked_in) == architectures.verdicts(page), f"take it from {WRITTEN}"
    assert len(architectures.numbers(checked_in)) == len(SUPPORTED)
    assert max(architectures.numbers(checked_in)) <= LOGIT_DIFFERENCE
