"""What goes wrong between client and server: restarts, silence, lost answers, forks."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import reference
from faults import stopped
from lossy_proxy import LossyProxy
from running_server import Server

import attnd

StartServer = Callable[..., Server]
ONES = np.ones((1, 1, 4), np.float32)


def test_a_silent_server_ends_in_a_deadline(start_server: StartServer) -> None:
    """Scenario P06."""
    server = start_server()
    with attnd.Client(server.target, timeout=1) as client:
        session = client.create_session(num_q_heads=1, head_dim=4)
        session.step(0, ONES, ONES, ONES)
        with stopped(server):
            start = time.monotonic()
            with pytest.raises(attnd.DeadlineExceeded) as caught:
                session.step(0, ONES, ONES, ONES)
            assert 0.9 < time.monotonic() - start < 5
            assert isinstance(caught.value, TimeoutError)
        assert session.info(timeout=20).length in (1, 2)


def test_the_default_timeout_is_documented() -> None:
    assert attnd.Client("127.0.0.1:1").timeout == 30
    with pytest.raises(ValueError, match="timeout is 0"):
        attnd.Client("127.0.0.1:1", timeout=0)


def test_a_restart_loses_sessions_by_name(start_server: StartServer) -> None:
    """Scenario P07: never a session that is silently new."""
    server = start_server()
    with attnd.Client(server.target) as client:
        session = client.create_session(num_q_heads=1, head_dim=4)
        for _ in range(3):
            session.step(0, ONES, ONES, ONES)
        server.kill()
        with pytest.raises(attnd.Unavailable):
            session.step(0, ONES, ONES, ONES)
        start_server(listen=server.target)
        # What may be repeated waits for the new server by itself.
        assert client.server_info().sessions_active == 0
        with pytest.raises(attnd.SessionLost) as lost:
            session.step(0, ONES, ONES, ONES, start_position=3)
        assert lost.value.reason == "NEVER_EXISTED"
        assert client.server_info().sessions_active == 0
        session.close()


def test_nobody_there() -> None:
    start = time.monotonic()
    with attnd.Client("127.0.0.1:1") as client, pytest.raises(attnd.Unavailable):
        client.server_info()
    assert time.monotonic() - start < 20


def test_a_lost_answer_is_asked_for_again(start_server: StartServer) -> None:
    """Scenario S09: the server did the step, the client never heard of it."""
    server = start_server()
    proxy = LossyProxy(server.target)
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, 100, 4, 64), dtype=np.float32) for _ in range(3))
    expected = reference.attend(*(x.reshape(200, 4, 64) for x in (q, k, v)), causal=True)[0]
    with attnd.Client(proxy.target) as client, client.create_session(num_q_heads=4, head_dim=64) as session:
        session.step(0, q[0], k[0], v[0], start_position=0)
        proxy.lose_answer_of(50_000)
        result = session.step(0, q[1], k[1], v[1], start_position=100)
        assert proxy.lost == 1
        assert (result.start_position, result.length) == (100, 200)
        assert reference.relative_error(result.out, expected[100:]) <= 1e-5
        assert session.info().length == 200

        # Without a position a second step would be another one: the client says so instead of guessing.
        proxy.lose_answer_of(50_000)
        with pytest.raises(attnd.Unavailable):
            session.step(0, q[1], k[1], v[1])
        assert session.info().length == 300
    proxy.close()


def test_a_fork_whose_answer_is_lost_is_not_made_again(start_server: StartServer) -> None:
    server = start_server()
    proxy = LossyProxy(server.target)
    with attnd.Client(proxy.target) as client, client.create_session(num_q_heads=1, head_dim=1) as session:
        proxy.lose_answer_of(100)
        with pytest.raises(attnd.Unavailable):
            session.fork()
        assert proxy.lost == 1
        assert len(list(client.list_sessions())) == 2
    proxy.close()


def test_a_closed_client_connects_again(client: attnd.Client) -> None:
    client.close()
    assert client.server_info().version


def test_leaving_a_session_keeps_the_first_error(start_server: StartServer) -> None:
    server = start_server()
    client = attnd.Client(server.target, timeout=2)
    with pytest.raises(KeyError), client.create_session(num_q_heads=1, head_dim=4):
        server.kill()
        raise KeyError("the first")


def test_tokens(start_server: StartServer, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("correct-horse-battery-staple\n")
    tokens.chmod(0o600)
    server = start_server(f"--auth_tokens_file={tokens}")
    with attnd.Client(server.target, token="correct-horse-battery-staple") as client:
        assert client.server_info().version
    for token in (None, "wrong-horse-battery-staple"):
        with attnd.Client(server.target, token=token) as client, pytest.raises(attnd.AttndError) as caught:
            client.server_info()
        assert isinstance(caught.value, attnd.Unauthenticated | attnd.PermissionDenied)


def test_tls(start_server: StartServer, tmp_path: Path) -> None:
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    server = start_server(f"--tls_cert={certificate}", f"--tls_key={key}")
    for roots in (certificate, str(certificate), certificate.read_bytes()):
        with attnd.Client(server.target, tls_roots=roots) as client:
            assert client.server_info().version
    for roots in (None, True):
        with attnd.Client(server.target, tls_roots=roots, timeout=5) as client, pytest.raises(attnd.Unavailable):
            client.server_info()
