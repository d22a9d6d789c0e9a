"""RemoteCache: a model generates the same tokens with its attention in attnd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import greedy, left_padded, prompt, tiny

import attnd
from attnd.transformers import RemoteCache, remote

LOGIT_DIFFERENCE = 1e-4


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("Llama")


def assert_same(local: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(local[0], other[0])
    assert (local[1] - other[1]).abs().max() <= LOGIT_DIFFERENCE


def test_greedy(client: attnd.Client, llama: Any) -> None:
    inputs = {"input_ids": prompt(1, 9)}
    with RemoteCache(llama, client) as cache:
        assert_same(greedy(llama, inputs), greedy(llama, inputs, cache=cache))
        assert cache.get_seq_length() == 9 + 12 - 1  # the last token has not been through the model
        assert [client.get_session(session).length for session in cache.session_ids] == [20]


def test_the_older_name_of_the_option(client: attnd.Client, llama: Any) -> None:
    inputs = {"input_ids": prompt(1, 9)}
    with RemoteCache(llama, client) as cache:
        assert_same(greedy(llama, inputs), greedy(llama, inputs, past_key_values=cache))


def test_a_server_by_address(server: Any, client: attnd.Client, llama: Any) -> None:
    inputs = {"input_ids": prompt(1, 9)}
    with RemoteCache(llama, server.target) as cache:
        assert_same(greedy(llama, inputs), greedy(llama, inputs, cache=cache))
        assert len(list(client.list_sessions())) == 1
    assert not list(client.list_sessions())


def test_sampling_with_the_same_seed(client: attnd.Client, llama: Any) -> None:
    options = {"do_sample": True, "max_new_tokens": 20, "temperature": 1.5}
    tokens = prompt(2, 6)
    torch.manual_seed(3)
    local = llama.generate(tokens, **options)
    torch.manual_seed(3)
    with RemoteCache(llama, client) as cache:
        assert torch.equal(local, llama.generate(tokens, cache=cache, **options))
    torch.manual_seed(3)
    local = llama.generate(tokens, num_return_sequences=3, **options)
    torch.manual_seed(3)
    with RemoteCache(llama, client) as cache:
        assert torch.equal(local, llama.generate(tokens, num_return_sequences=3, cache=cache, **options))


@pytest.mark.parametrize("lengths", [(9, 5, 2), (1, 8), (7,), (4, 4)])
def test_left_padded_rows_are_the_rows_alone(client: attnd.Client, llama: Any, lengths: tuple[int, ...]) -> None:
    """Scenario K27: padding is not sent, and does not move a row's tokens."""
    inputs = left_padded(lengths)
    with RemoteCache(llama, client) as cache:
        together = greedy(llama, inputs, cache=cache)
        assert_same(greedy(llama, inputs), together)
        assert [client.get_session(session).length for session in cache.session_ids] == [n + 11 for n in lengths]
        assert cache.get_seq_length() == max(lengths) + 11
    for row, length in enumerate(lengths):
        with RemoteCache(llama, client) as cache:
            alone = greedy(llama, {"input_ids": inputs["input_ids"][row : row + 1, -length:]}, cache=cache)
        assert torch.equal(alone[0][0], together[0][row, -(length + 12) :])
        assert (alone[1][:, 0] - together[1][:, row]).abs().max() <= LOGIT_DIFFERENCE


def test_generation_goes_on_with_the_same_cache(client: attnd.Client, llama: Any) -> None:
    first = left_padded((9, 4))
    with RemoteCache(llama, client) as cache:
        tokens, _ = greedy(llama, first, cache=cache)
        longer = torch.cat([tokens, prompt(2, 5, seed=4)], dim=1)
        mask = torch.cat([first["attention_mask"], torch.ones(2, 12 + 5, dtype=torch.int64)], dim=1)
        inputs = {"input_ids": longer, "attention_mask": mask}
        assert_same(greedy(llama, inputs), greedy(llama, inputs, cache=cache))


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_beam_search(client: attnd.Client, name: str) -> None:
    model = tiny(name, **({"sliding_window": 8, "head_dim": 16} if name == "Gemma2" else {}))
    options = {"num_beams": 4, "num_return_sequences": 2, "do_sample": False, "max_new_tokens": 30}
    inputs = left_padded((9, 5)) if name == "Llama" else {"input_ids": prompt(2, 9)}
    local = model.generate(**inputs, **options)
    with RemoteCache(model, client) as cache:
        orders = []
        reorder = cache.reorder_cache
        cache.reorder_cache = lambda rows: (orders.append(rows.tolist()), reorder(rows))[1]  # type: ignore[method-assign]
        assert torch.equal(local, model.generate(**inputs, cache=cache, **options))
        assert any(order != list(range(8)) for order in orders)
    assert client.server_info().kv_cache_used_bytes == 0


def test_a_lost_row_ends_a_beam_search(client: attnd.Client, llama: Any) -> None:
    with RemoteCache(llama, client) as cache, torch.no_grad():
        llama(prompt(2, 4), cache=cache)
        client.close_session(cache.session_ids[1])
        with pytest.raises(attnd.SessionLost, match="make a new cache"):
            cache.reorder_cache(torch.tensor([1, 0]))
        with pytest.raises(RuntimeError, match="closed"):
            llama(prompt(2, 1), cache=cache)


@pytest.mark.parametrize("new", [24, 25])
def test_assisted_generation_crops(client: attnd.Client, llama: Any, new: int) -> None:
    tokens = prompt(1, 4).repeat(1, 6)
    options = {"do_sample": False, "max_new_tokens": new, "prompt_lookup_num_tokens": 3}
    local = llama.generate(tokens, **options)
    with RemoteCache(llama, client) as cache:
        cropped = []
        crop = cache.crop
        cache.crop = lambda n: (cropped.append(n), crop(n))[1]  # type: ignore[method-assign]
        assert torch.equal(local, llama.generate(tokens, cache=cache, **options))
        assert any(cropped)


def test_crop_rewinds_with_the_next_step(client: attnd.Client, llama: Any) -> None:
    inputs = left_padded((9, 5))
    with RemoteCache(llama, client) as cache, torch.no_grad():
        llama(**inputs, cache=cache)
        cache.crop(-6)  # the second row keeps no token at all
        assert cache.get_seq_length() == 3
        other = prompt(2, 4, seed=7)
        mask = torch.cat([inputs["attention_mask"][:, :3], torch.ones(2, 4, dtype=torch.int64)], dim=1)
        positions = torch.tensor([[3, 4, 5, 6], [0, 1, 2, 3]])
        logits = llama(other, attention_mask=mask, position_ids=positions, cache=cache).logits
        for row, start in ((0, 3), (1, 0)):
            alone = llama(
                torch.cat([inputs["input_ids"][row : row + 1, 3 - start : 3], other[row : row + 1]], 1)
            ).logits
            assert (alone[0, -4:] - logits[row]).abs().max() <= LOGIT_DIFFERENCE
        for session, length in zip(cache.session_ids, (7, 4), strict=True):
            assert client.get_session(session).layer_lengths == (length,) * 3


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (9, 3), (7, 1)])
def test_group_sizes(client: attnd.Client, heads: int, kv_heads: int) -> None:
    model = tiny("Llama", num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=heads * 8)
    inputs = left_padded((7, 3))
    with RemoteCache(model, client) as cache:
        assert_same(greedy(model, inputs), greedy(model, inputs, cache=cache))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_half_precision_models(client: attnd.Client, dtype: torch.dtype, bound: float) -> None:
    model = tiny("Llama").to(dtype)
    inputs = left_padded((9, 4))
    real = inputs["attention_mask"].bool()
    with RemoteCache(model, client) as cache, torch.no_grad():
        local = model(**inputs).logits[real].float()
        logits = model(**inputs, cache=cache).logits
        assert logits.dtype == dtype
        assert (local - logits[real].float()).abs().max() <= bound * local.abs().max()


def test_bf16_storage(client: attnd.Client, llama: Any) -> None:
    inputs = {"input_ids": prompt(1, 100)}
    with RemoteCache(llama, client, kv_dtype="bf16") as cache, torch.no_grad():
        local, logits = llama(**inputs).logits, llama(**inputs, cache=cache).logits
        difference = (local - logits).abs().max()
        assert 1e-6 < difference <= 0.02 * local.abs().max()
        assert client.get_session(cache.session_ids[0]).config.kv_dtype == "bf16"


def test_long_prompts_go_in_several_steps(client: attnd.Client, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = left_padded((40, 3, 25))
    steps = []
    send = attnd.Client.send_step
    monkeypatch.setattr(
        attnd.Client, "send_step", lambda self, request, *a: steps.append(request) or send(self, request, *a)
    )
    monkeypatch.setattr(remote, "STEP_BYTES", 10 * 128 * 4)  # 10 tokens of 8 heads of 16 floats
    with RemoteCache(llama, client) as cache:
        assert_same(greedy(llama, inputs, new=2), greedy(llama, inputs, new=2, cache=cache))
    assert len(steps) == 3 * (7 + 1)
    assert max(sum(segment.num_tokens for segment in step.segments) for step in steps) == 10


def test_a_step_is_one_call_with_all_rows_and_their_positions(
    client: attnd.Client, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    send = attnd.Client.send_step
    monkeypatch.setattr(
        attnd.Client, "send_step", lambda self, request, *a: steps.append(request) or send(self, request, *a)
    )
    with RemoteCache(llama, client) as cache:
        greedy(llama, left_padded((6, 2)), new=2, cache=cache)
    assert [step.layer for step in steps] == [0, 1, 2, 0, 1, 2]
    for step, parts in zip(steps, [((0, 6), (0, 2))] * 3 + [((6, 1), (2, 1))] * 3, strict=True):
        assert all(segment.HasField("start_position") and not segment.rewind for segment in step.segments)
        assert tuple((segment.start_position, segment.num_tokens) for segment in step.segments) == parts


def test_rows_without_tokens(client: attnd.Client, llama: Any) -> None:
    """A row of padding only gets zeros, not NaN, and the other row is not disturbed."""
    inputs = left_padded((6, 4))
    inputs["attention_mask"][1] = 0
    with RemoteCache(llama, client) as cache, torch.no_grad():
        logits = llama(**inputs, cache=cache).logits
        assert logits.isfinite().all()
        alone = llama(inputs["input_ids"][:1]).logits
        assert (logits[:1] - alone).abs().max() <= LOGIT_DIFFERENCE


def test_right_padding_then_more_tokens(client: attnd.Client, llama: Any) -> None:
    tokens = prompt(2, 6)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    more = prompt(2, 2, seed=9)
    both = torch.cat([mask, torch.ones(2, 2, dtype=torch.int64)], 1)
    with RemoteCache(llama, client) as cache, torch.no_grad():
        llama(tokens, attention_mask=mask, position_ids=positions, cache=cache)
        logits = llama(more, attention_mask=both, position_ids=torch.tensor([[6, 7], [3, 4]]), cache=cache).logits
        for row, count in ((0, 6), (1, 3)):
            alone = llama(torch.cat([tokens[row : row + 1, :count], more[row : row + 1]], 1)).logits[0, -2:]
            assert (alone - logits[row]).abs().max() <= LOGIT_DIFFERENCE


def test_two_caches_on_one_model(client: attnd.Client, llama: Any) -> None:
    inputs = [{"input_ids": prompt(1, 5, seed=seed)} for seed in (1, 2)]
    with RemoteCache(llama, client) as first, RemoteCache(llama, client) as second, torch.no_grad():
        logits = [[], []]
        for _ in range(3):
            for number, cache in enumerate((first, second)):
                logits[number].append(llama(**inputs[number], cache=cache).logits)
        for number in range(2):
            local = llama(inputs[number]["input_ids"].repeat(1, 3)).logits
            assert (local - torch.cat(logits[number], 1)).abs().max() <= LOGIT_DIFFERENCE
    assert not list(client.list_sessions())
