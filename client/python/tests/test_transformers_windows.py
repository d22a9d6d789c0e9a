"""RemoteCache: layers with windows, with and without them in one model, and what memory they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import SUPPORTED
from models import greedy, left_padded, prompt, tiny

import attnd
from attnd.transformers import RemoteCache

LOGIT_DIFFERENCE = 1e-4
BLOCK_TOKENS = 64
# Of one layer: 2 kv heads of 16 floats, K and V.
BLOCK_BYTES = BLOCK_TOKENS * 2 * 2 * 16 * 4


@pytest.fixture(scope="module")
def gemma3() -> Any:
    """Layers 0, 1 and 3 have a window of 8 tokens, layer 2 has none."""
    return tiny("Gemma3", **SUPPORTED["Gemma3"], max_position_embeddings=1024)


def test_layers_with_and_without_windows_share_a_session(client: attnd.Client, gemma3: Any) -> None:
    inputs = left_padded((300, 70))
    with RemoteCache(gemma3, client) as cache:
        local, remote = greedy(gemma3, inputs), greedy(gemma3, inputs, cache=cache)
        assert torch.equal(local[0], remote[0])
        assert (local[1] - remote[1]).abs().max() <= LOGIT_DIFFERENCE
        sessions = [client.get_session(session) for session in cache.session_ids]
        assert len(sessions) == len(list(client.list_sessions())) == 2
        for session, length in zip(sessions, (311, 81), strict=True):
            assert session.config.layer_windows == (8, 8, None, 8)
            assert session.layer_lengths == (length,) * 4
            # What the windows have passed is freed; the layer without one has all of its blocks.
            blocks = -(-length // BLOCK_TOKENS) + 3
            assert session.used_bytes <= blocks * BLOCK_BYTES
    assert client.server_info().kv_cache_used_bytes == 0


def test_a_reservation_is_made_once_for_all_layers(client: attnd.Client, gemma3: Any) -> None:
    with RemoteCache(gemma3, client, reserve_tokens=128) as cache, torch.no_grad():
        gemma3(prompt(1, 5), cache=cache)
        assert client.server_info().kv_cache_reserved_bytes == 4 * 2 * BLOCK_BYTES


def test_sinks_of_each_layer_need_no_session_of_their_own(client: attnd.Client) -> None:
    model = tiny("GptOss", **SUPPORTED["GptOss"])
    assert len({tuple(layer.self_attn.sinks.tolist()) for layer in model.model.layers}) == 3
    inputs = left_padded((14, 5))
    with RemoteCache(model, client) as cache:
        local, remote = greedy(model, inputs), greedy(model, inputs, cache=cache)
        assert (local[1] - remote[1]).abs().max() <= LOGIT_DIFFERENCE
        assert len(cache.session_ids) == 2
    # They matter: without them the logits would be others.
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(-1e4)
    assert (greedy(model, inputs)[1] - local[1]).abs().max() > 100 * LOGIT_DIFFERENCE


def test_a_window_that_the_configuration_does_not_tell(client: attnd.Client) -> None:
    """The layers' own answer counts: a layer with another window gets a session of its own."""
    model = tiny("Mistral", sliding_window=8)
    inputs = left_padded((14, 5))
    local = greedy(model, inputs)
    with RemoteCache(model, client) as cache:
        cache.state.sessions._windows = (8, None, 4)
        remote = greedy(model, inputs, cache=cache)
        assert len(cache.session_ids) == 4
        assert (local[1] - remote[1]).abs().max() <= LOGIT_DIFFERENCE


def test_a_crop_within_the_last_step(client: attnd.Client, gemma3: Any) -> None:
    """As after a draft was wrong: possible at any length, however long the windows have passed."""
    tokens = prompt(1, 240)
    with RemoteCache(gemma3, client) as cache, torch.no_grad():
        local = gemma3(tokens).logits
        gemma3(tokens[:, :190], cache=cache)
        for start in range(190, 240, 5):
            gemma3(prompt(1, 9, seed=start), cache=cache)  # wrong ones
            cache.crop(-9)
            logits = gemma3(tokens[:, start : start + 5], cache=cache).logits
            assert (local[:, start : start + 5] - logits).abs().max() <= LOGIT_DIFFERENCE


def test_a_crop_to_where_a_window_is_gone_is_refused(client: attnd.Client, gemma3: Any) -> None:
    tokens = prompt(1, 300)
    with RemoteCache(gemma3, client) as cache, torch.no_grad():
        for start in range(0, 300, 50):
            gemma3(tokens[:, start : start + 50], cache=cache)
        cache.crop(-200)
        with pytest.raises(attnd.TokensFreed, match="cropped to a place whose window is gone") as freed:
            gemma3(tokens[:, 100:110], cache=cache)
        assert freed.value.first_token is not None
        assert freed.value.first_token > 100
        # Again: the layers before the failing one have not kept what could mislead.
        with pytest.raises(attnd.TokensFreed):
            gemma3(tokens[:, 100:110], cache=cache)
        assert cache.get_seq_length() == 100
        cache.reset()
        local = gemma3(tokens[:, :110]).logits
        assert (gemma3(tokens[:, :110], cache=cache).logits - local).abs().max() <= LOGIT_DIFFERENCE


@pytest.mark.parametrize("name", ["Gemma3n", "Gemma4"])
def test_layers_that_share_k_and_v(client: attnd.Client, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last two of six layers send their queries alone, to the layers whose K and V they use."""
    model = tiny(name, **SUPPORTED[name])
    steps = []
    send = attnd.Client.send_step
    monkeypatch.setattr(
        attnd.Client, "send_step", lambda self, request, *a: steps.append(request) or send(self, request, *a)
    )
    inputs = left_padded((14, 9))
    local = greedy(model, inputs, new=2)
    with RemoteCache(model, client) as cache:
        remote = greedy(model, inputs, new=2, cache=cache)
        assert (local[1] - remote[1]).abs().max() <= LOGIT_DIFFERENCE
        for session in cache.session_ids:
            assert client.get_session(session).layer_lengths[4:] == (0, 0)
    assert [step.layer for step in steps] == [0, 1, 2, 3, 2, 3] * 2
    assert [step.HasField("k") for step in steps] == [True, True, True, True, False, False] * 2


@pytest.mark.parametrize(("name", "options"), [("Gemma3n", {}), ("Gemma4", {}), ("Gemma4", {"logits_to_keep": 1})])
def test_a_failed_shared_layer_can_be_repeated(
    client: attnd.Client, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    """Gemma 4's last layers ask for the slots only whose logits are kept."""
    model = tiny(name, **SUPPORTED[name])
    tokens = prompt(2, 12)
    send = attnd.Client.send_step

    def fail_without_keys(self: attnd.Client, request: Any, timeout: float | None = None) -> Any:
        if not request.HasField("k"):
            raise attnd.Unavailable("cut")
        return send(self, request, timeout)

    with RemoteCache(model, client) as cache, torch.no_grad():
        local = model(tokens).logits
        model(tokens[:, :7], cache=cache)
        monkeypatch.setattr(attnd.Client, "send_step", fail_without_keys)
        with pytest.raises(attnd.Unavailable):
            model(prompt(2, 3, seed=5), cache=cache, **options)  # other tokens than those that come now
        monkeypatch.undo()
        assert cache.get_seq_length() == 7
        assert (model(tokens[:, 7:], cache=cache).logits - local[:, 7:]).abs().max() <= LOGIT_DIFFERENCE
