"""Sessions: steps, positions, many sessions in one step."""

from __future__ import annotations

import time

import ml_dtypes
import numpy as np
import pytest
import reference

import attnd

F32_ERROR = 1e-5
SHAPE = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": 16, "value_dim": 24}


def tensors(tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    q = random.standard_normal((tokens, 6, 16), dtype=np.float32)
    k = random.standard_normal((tokens, 2, 16), dtype=np.float32)
    v = random.standard_normal((tokens, 2, 24), dtype=np.float32)
    return q, k, v


def test_chunks_and_single_tokens_are_one_sequence(client: attnd.Client) -> None:
    q, k, v = tensors(90)
    expected, lse, _ = reference.attend(q, k, v, causal=True)
    with client.create_session(num_layers=2, **SHAPE) as session:
        start = 0
        for count in (1, 1, 60, 5, 1, 22):
            part = slice(start, start + count)
            result = session.step(1, q[part], k[part], v[part], return_lse=True)
            assert (result.start_position, result.length) == (start, start + count)
            assert reference.relative_error(result.out, expected[part]) <= F32_ERROR
            np.testing.assert_allclose(result.lse, lse[part], rtol=1e-5, atol=1e-5)
            assert result.compute_seconds > 0
            start += count
        assert session.info().layer_lengths == (0, 90)


def test_all_options_of_a_session(client: attnd.Client) -> None:
    options = {
        "scale": 0.2,
        "window": 30,
        "softcap": 3.0,
        "sinks": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6),
        "alibi_slopes": (0.02,) * 6,
    }
    q, k, v = tensors(80)
    with client.create_session(**SHAPE, **options) as session:
        assert (
            reference.relative_error(session.step(0, q, k, v).out, reference.attend(q, k, v, causal=True, **options)[0])
            <= F32_ERROR
        )
    with client.create_session(**SHAPE, causal=False) as session:
        session.step(0, q[:70], k[:70], v[:70])
        out = session.step(0, q[70:], k[70:], v[70:]).out
        assert reference.relative_error(out, reference.attend(q[70:], k, v)[0]) <= F32_ERROR


def test_windows_per_layer(client: attnd.Client) -> None:
    q, k, v = tensors(40)
    with client.create_session(num_layers=2, layer_windows=(None, 5), **SHAPE) as session:
        for layer, window in enumerate((None, 5)):
            out = session.step(layer, q, k, v).out
            expected = reference.attend(q, k, v, causal=True, window=window)[0]
            assert reference.relative_error(out, expected) <= F32_ERROR


def test_the_config_comes_back(client: attnd.Client) -> None:
    config = attnd.SessionConfig(
        num_q_heads=6,
        head_dim=16,
        num_layers=3,
        num_kv_heads=2,
        value_dim=24,
        kv_dtype="bf16",
        scale=0.5,
        softcap=30.0,
        causal=True,
        layer_windows=(None, 4, None),
        max_tokens=500,
        ttl=12.5,
        reserve_tokens=10,
    )
    with client.create_session(config) as session:
        assert session.config == config
        info = session.info()
        assert (info.session_id, info.length, info.layer_lengths) == (session.session_id, 0, (0, 0, 0))
        assert info.reserved_bytes > 0
        assert 0 < info.time_to_live <= 12.5
    with pytest.raises(TypeError, match="both given"):
        client.create_session(config, num_layers=4)
    with pytest.raises(ValueError, match="kv_dtype is 'f64'"):
        client.create_session(num_q_heads=1, head_dim=1, kv_dtype="f64")


def test_append_only_and_attend_only(client: attnd.Client) -> None:
    q, k, v = tensors(20)
    expected = reference.attend(q, k, v, causal=True)[0]
    with client.create_session(**SHAPE) as session:
        appended = session.step(0, None, k, v)
        assert appended.length == 20
        with pytest.raises(ValueError, match="no out"):
            _ = appended.out
        attended = session.step(0, q[15:], None, None)
        assert reference.relative_error(attended.out, expected[15:]) <= F32_ERROR
        assert session.info().length == 20
        with pytest.raises(ValueError, match="no lse"):
            _ = attended.lse


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_types(client: attnd.Client, dtype: type) -> None:
    q, k, v = (x.astype(dtype) for x in tensors(10))
    with client.create_session(**SHAPE) as session:
        out = session.step(0, q, k, v).out
        assert out.dtype == dtype
        assert reference.relative_error(out, reference.attend(q, k, v, causal=True)[0]) <= 1e-2
        assert session.step(0, q, k, v, out_dtype="f32").out.dtype == np.float32


def test_a_replay_answers_the_same_bits(client: attnd.Client) -> None:
    q, k, v = tensors(10)
    with client.create_session(**SHAPE) as session:
        session.step(0, q, k, v, start_position=0)
        first = session.step(0, q, k, v, start_position=10)
        again = session.step(0, q, k, v, start_position=10)
        assert first.out.tobytes() == again.out.tobytes()
        assert (again.start_position, again.length) == (10, 20)


def test_positions_that_are_neither_append_replay_nor_rewind(client: attnd.Client) -> None:
    q, k, v = tensors(10)
    with client.create_session(**SHAPE) as session:
        session.step(0, q, k, v)
        for start in (11, 3):
            with pytest.raises(attnd.BadPosition) as caught:
                session.step(0, q[:2], k[:2], v[:2], start_position=start)
            assert (caught.value.reason, caught.value.length) == ("BAD_POSITION", 10)
        assert session.info().length == 10


def test_rewind_with_a_step_and_alone(client: attnd.Client) -> None:
    q, k, v = tensors(12)
    other = tensors(3, seed=1)
    joined = [np.concatenate([old[:5], new]) for old, new in zip((q, k, v), other, strict=True)]
    expected = reference.attend(*joined, causal=True)[0][5:]
    with client.create_session(num_layers=2, **SHAPE) as session:
        for layer in range(2):
            session.step(layer, q, k, v)
        rewound = session.step(0, *other, start_position=5, rewind=True)
        assert rewound.length == 8
        assert reference.relative_error(rewound.out, expected) <= F32_ERROR
        assert session.rewind(5).layer_lengths == (5, 5)
        assert reference.relative_error(session.step(1, *other).out, expected) <= F32_ERROR
        with pytest.raises(attnd.InvalidArgument, match="9"):
            session.rewind(9)


def test_a_fork_and_its_parent_go_their_own_ways(client: attnd.Client) -> None:
    q, k, v = tensors(80)
    other = tensors(3, seed=1)

    def expected(length: int) -> np.ndarray:
        joined = [np.concatenate([old[:length], new]) for old, new in zip((q, k, v), other, strict=True)]
        return reference.attend(*joined, causal=True)[0][length:]

    with client.create_session(**SHAPE) as parent:
        parent.step(0, q, k, v)
        with parent.fork() as whole, client.fork(parent.session_id, 37) as part, part.fork(0) as empty:
            assert [s.info().length for s in (whole, part, empty)] == [80, 37, 0]
            assert whole.config == parent.config
            for session, length in ((whole, 80), (part, 37), (empty, 0), (parent, 80)):
                assert reference.relative_error(session.step(0, *other).out, expected(length)) <= F32_ERROR
            parent.close()
            assert whole.info().length == 83
            with pytest.raises(attnd.InvalidArgument, match="84") as caught:
                whole.fork(84)
            assert caught.value.reason == "BAD_POSITION"
            with pytest.raises(attnd.SessionLost):
                parent.fork()


def test_reorder_gives_rows_the_tokens_of_others(client: attnd.Client) -> None:
    q, k, v = tensors(5)
    rows = [client.create_session(**SHAPE) for _ in range(3)]
    for count, row in enumerate(rows, start=1):
        row.step(0, q[:count], k[:count], v[:count])
    assert client.reorder(rows, [2, 2, 0]) == [3, 3, 1]
    for row, length in zip(rows, (3, 3, 1), strict=True):
        part = slice(length, length + 1)
        expected = reference.attend(q[: length + 1], k[: length + 1], v[: length + 1], causal=True)[0][part]
        assert reference.relative_error(row.step(0, q[part], k[part], v[part]).out, expected) <= F32_ERROR
    for bad, sources, reason in (
        (rows, [0, 1], "BAD_SHAPE"),
        (rows, [0, 1, 3], "BAD_SHAPE"),
        ([rows[0], rows[0].session_id], [0, 1], "DUPLICATE_SESSION"),
    ):
        with pytest.raises(attnd.InvalidArgument) as caught:
            client.reorder(bad, sources)
        assert caught.value.reason == reason
    with client.create_session(max_tokens=1, **SHAPE) as short, pytest.raises(attnd.TooLong, match="max_tokens"):
        client.reorder([rows[0], short], [0, 0])
    rows[1].close()
    with pytest.raises(attnd.SessionLost):
        client.reorder(rows, [0, 0, 0])
    assert [row.info().length for row in (rows[0], rows[2])] == [4, 2]
    for row in rows:
        row.close()
    assert not list(client.list_sessions())


def test_what_a_window_has_passed_is_freed(client: attnd.Client) -> None:
    q, k, v = tensors(300)
    with client.create_session(window=10, **SHAPE) as session:
        for start in range(0, 300, 100):
            session.step(0, *(tensor[start : start + 100] for tensor in (q, k, v)))
        assert session.info().layer_first_tokens == (128,)
        with pytest.raises(attnd.TokensFreed) as caught:
            session.rewind(136)
        assert (caught.value.reason, caught.value.first_token) == ("TOKENS_FREED", 128)
        with pytest.raises(attnd.TokensFreed):
            session.fork(100)
        assert session.rewind(137).length == 137
        out = session.step(0, q[137:], k[137:], v[137:]).out
        expected = reference.attend(q, k, v, causal=True, window=10)[0][137:]
        assert reference.relative_error(out, expected) <= F32_ERROR


def test_a_mask_among_the_new_tokens(client: attnd.Client) -> None:
    q, k, v = tensors(8)
    tree = np.tril(np.ones((4, 4), bool))
    tree[3, 1:3] = False  # the last token is another branch from the first
    full = np.ones((4, 8), bool)
    full[:, 4:] = tree
    with client.create_session(**SHAPE) as session:
        session.step(0, q[:4], k[:4], v[:4])
        out = session.step(0, q[4:], k[4:], v[4:], mask=tree).out
        expected = reference.attend(q[4:], k, v, causal=True, offset=4, mask=full)[0]
        assert reference.relative_error(out, expected) <= F32_ERROR
        with pytest.raises(ValueError, match=r"mask has shape \[4, 4\]; \[2, 2\]"):
            session.step(0, q[:2], k[:2], v[:2], mask=tree)


def test_many_sessions_in_one_step(client: attnd.Client) -> None:
    counts = (3, 1, 7)
    q, k, v = tensors(sum(counts))
    sessions = [client.create_session(**SHAPE) for _ in counts]
    results = client.step(0, [attnd.Segment(s, n) for s, n in zip(sessions, counts, strict=True)], q, k, v)
    start = 0
    for session, count, result in zip(sessions, counts, results, strict=True):
        part = slice(start, start + count)
        expected = reference.attend(q[part], k[part], v[part], causal=True)[0]
        assert reference.relative_error(result.out, expected) <= F32_ERROR
        assert session.info().length == count
        start += count
        session.close()


def test_one_segment_of_many_fails_alone(client: attnd.Client) -> None:
    q, k, v = tensors(3)
    first, closed, last = (client.create_session(**SHAPE) for _ in range(3))
    with first, closed, last:
        closed.close()
        segments = [attnd.Segment(first, 1), attnd.Segment(closed, 1), attnd.Segment(last.session_id, 1)]
        results = client.step(0, segments, q, k, v, return_lse=True)
        assert [result.length for result in results if result.error is None] == [1, 1]
        np.testing.assert_allclose(results[2].out, v[2:].repeat(3, axis=1), rtol=1e-5)
        assert isinstance(results[1].error, attnd.SessionLost)
        assert results[1].error.reason == "CLOSED"
        for field in ("out", "lse"):
            with pytest.raises(attnd.SessionLost):
                getattr(results[1], field)


def test_shapes_are_checked_against_the_session(client: attnd.Client) -> None:
    q, k, v = tensors(2)
    with client.create_session(**SHAPE) as session:
        with pytest.raises(ValueError, match=r"q has shape \[6, 2, 16\]; the session needs \[tokens, 6, 16\]"):
            session.step(0, q.transpose(1, 0, 2), np.zeros((6, 2, 16), np.float32), np.zeros((6, 2, 24), np.float32))
        with pytest.raises(ValueError, match="q has 2 tokens; k has 1 tokens"):
            session.step(0, q, k[:1], v)
        with pytest.raises(ValueError, match=r"k has shape \[2, 32\]"):
            session.step(0, q, k.reshape(2, 32), v)
        with pytest.raises(ValueError, match="k and v come together"):
            session.step(0, q, k, None)
        with pytest.raises(ValueError, match="a step has q"):
            session.step(0, None, None, None)
        with pytest.raises(ValueError, match="the segments have 3 tokens and the tensors 2"):
            client.step(0, [attnd.Segment(session, 3)], q, k, v)
        with pytest.raises(ValueError, match="at least one segment"):
            client.step(0, [], q, k, v)
        assert session.info().length == 0


def test_a_failed_step_leaves_the_session_as_it_was(client: attnd.Client) -> None:
    """Scenario S08: v = 1, 2, 3, then a chunk with a NaN, then v = 6 gives 3."""
    with client.create_session(num_q_heads=1, head_dim=1) as session:
        zeros = np.zeros((4, 1, 1), np.float32)
        session.step(0, zeros[:3], zeros[:3], np.array([1, 2, 3], np.float32).reshape(3, 1, 1))
        with pytest.raises(attnd.InvalidArgument) as caught:
            session.step(0, zeros, zeros, np.array([50, 50, np.nan, 50], np.float32).reshape(4, 1, 1))
        assert caught.value.reason == "NOT_FINITE"
        assert session.info().length == 3
        assert session.step(0, zeros[:1], zeros[:1], zeros[:1] + 6).out.ravel().tolist() == [3.0]


def test_errors_of_sessions(client: attnd.Client) -> None:
    for fields in ({"num_q_heads": 6, "num_kv_heads": 4}, {"num_q_heads": 2, "window": 0}):
        with pytest.raises(attnd.InvalidArgument) as invalid:
            client.create_session(head_dim=8, **fields)
        assert invalid.value.reason == "BAD_CONFIG"
    with pytest.raises(attnd.SessionLost) as lost:
        client.get_session("0" * 32)
    assert lost.value.reason == "NEVER_EXISTED"
    with pytest.raises(attnd.SessionLost):
        client.close_session("0" * 32)
    session = client.create_session(num_q_heads=1, head_dim=8)
    assert client.close_session(session.session_id)
    assert not client.close_session(session.session_id)
    session.close()
    with pytest.raises(attnd.SessionLost) as lost:
        session.info()
    assert lost.value.reason == "CLOSED"


def test_full_caches_have_their_own_errors(client: attnd.Client) -> None:
    with client.create_session(num_q_heads=1, head_dim=8, max_tokens=5) as session:
        ones = np.ones((6, 1, 8), np.float32)
        with pytest.raises(attnd.TooManyTokens) as too_many:
            session.step(0, ones, ones, ones)
        assert too_many.value.retry_delay is None
        assert isinstance(too_many.value, attnd.ResourceExhausted)
        assert session.step(0, ones[:5], ones[:5], ones[:5]).length == 5
    info = client.server_info(attnd.SessionConfig(num_q_heads=32, num_layers=32, head_dim=128))
    with pytest.raises(attnd.ResourceExhausted) as full:
        client.create_session(num_q_heads=32, num_layers=32, head_dim=128, reserve_tokens=info.tokens_capacity + 64)
    assert full.value.reason in ("CACHE_FULL", "TOO_MANY_TOKENS")


def test_an_idle_session_expires(client: attnd.Client) -> None:
    session = client.create_session(num_q_heads=1, head_dim=8, ttl=0.05)
    with pytest.raises(attnd.SessionLost) as lost:
        for _ in range(200):
            session.info(timeout=1)
            time.sleep(0.05)
    assert lost.value.reason == "EXPIRED"


def test_sessions_are_listed_by_pages(client: attnd.Client) -> None:
    before = {info.session_id for info in client.list_sessions()}
    sessions = [client.create_session(num_q_heads=1, head_dim=8) for _ in range(5)]
    listed = [info.session_id for info in client.list_sessions(page_size=2) if info.session_id not in before]
    assert listed == [session.session_id for session in sessions]
    for session in sessions:
        session.close()


def test_server_info(client: attnd.Client) -> None:
    info = client.server_info()
    assert info.version
    assert info.block_tokens == 64
    assert info.kv_cache_capacity_bytes == 256 << 20
    assert (info.bytes_per_token, info.draining) == (0, False)
    asked = client.server_info(attnd.SessionConfig(num_q_heads=32, num_kv_heads=8, head_dim=128, num_layers=32))
    assert asked.bytes_per_token >= 32 * 8 * 128 * 2 * 4
    assert 0 < asked.tokens_available <= asked.tokens_capacity


def test_messages_above_4_mib(client: attnd.Client) -> None:
    """Scenario G01: gRPC's default limit, in both directions."""
    tokens = 1100
    ones = np.ones((tokens, 8, 128), np.float32)
    with client.create_session(num_q_heads=8, head_dim=128) as session:
        out = session.step(0, ones, ones, ones).out
        assert out.nbytes > 4 << 20
        np.testing.assert_allclose(out, 1, rtol=1e-5)
