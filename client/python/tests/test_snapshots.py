"""Sessions to files and back."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from faults import stopped
from running_server import Server

import attnd

TINY = attnd.SessionConfig(num_q_heads=1, head_dim=1)


def mean(session: attnd.Session, *values: float) -> float:
    """The mean of all values so far: keys and queries are zero."""
    v = np.array(values, np.float32).reshape(-1, 1, 1)
    return float(session.step(0, np.zeros_like(v), np.zeros_like(v), v).out[-1, 0, 0])


def test_a_session_comes_back_from_a_path_and_from_a_file_object(
    client: attnd.Client, start_server: Callable[..., Server], tmp_path: Path
) -> None:
    with client.create_session(TINY) as session:
        mean(session, 1, 2, 3)
        path, buffer = tmp_path / "snapshot", io.BytesIO()
        assert session.export(path) == path.stat().st_size
        assert session.export(buffer) == len(buffer.getvalue())
        assert path.read_bytes() == buffer.getvalue()
        assert sorted(tmp_path.iterdir()) == [path]
        assert path.stat().st_mode & 0o777 == 0o600
        buffer.seek(0)
        with attnd.Client(start_server("--compute_threads=2").target) as other:
            for source in (path, buffer):
                with other.import_session(source, expected=TINY) as copy:
                    assert copy.session_id != session.session_id
                    assert mean(copy, 6) == 3
        assert mean(session, 6) == 3


def test_s17_bad_snapshots_raise_and_change_nothing(client: attnd.Client, tmp_path: Path) -> None:
    with client.create_session(TINY) as session:
        mean(session, 1, 2, 3)
        buffer = io.BytesIO()
        session.export(buffer)
        good = buffer.getvalue()
        before = client.server_info()
        for bad in (b"", good[:-1], good[:100] + b"\x55" + good[101:], good + b"x"):
            with pytest.raises(attnd.InvalidArgument) as failure:
                client.import_session(io.BytesIO(bad))
            assert failure.value.reason == "BAD_SNAPSHOT"
        with pytest.raises(attnd.InvalidArgument, match="head_dim 1, expected was 2") as failure:
            client.import_session(io.BytesIO(good), expected=attnd.SessionConfig(num_q_heads=1, head_dim=2))
        assert failure.value.reason == "BAD_CONFIG"
        with pytest.raises(FileNotFoundError):
            client.import_session(tmp_path / "missing")
        after = client.server_info()
        assert (after.sessions_active, after.kv_cache_used_bytes) == (
            before.sessions_active,
            before.kv_cache_used_bytes,
        )
        assert mean(session, 6) == 3


def test_a_failed_export_leaves_what_was_there(client: attnd.Client, tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    path.write_bytes(b"before")
    with pytest.raises(attnd.SessionLost):
        client.export_session("0" * 32, path)
    assert path.read_bytes() == b"before"
    assert sorted(tmp_path.iterdir()) == [path]


class Broken(io.RawIOBase):
    """A file whose disk fails."""

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def read(self, _: int = -1) -> bytes:
        raise OSError("the disk is gone")

    def write(self, _: object) -> int:
        raise OSError("the disk is gone")


def test_what_the_file_raises_ends_the_transfer(client: attnd.Client) -> None:
    with client.create_session(TINY) as session:
        mean(session, 1)
        with pytest.raises(OSError, match="the disk is gone"):
            session.export(Broken())
        with pytest.raises(OSError, match="the disk is gone"):
            client.import_session(Broken())
        assert mean(session, 3) == 2


def test_a_server_that_stands_still_is_a_deadline(start_server: Callable[..., Server]) -> None:
    server = start_server()
    with attnd.Client(server.target) as client:
        session = client.create_session(TINY)
        mean(session, 1, 2, 3)
        buffer = io.BytesIO()
        session.export(buffer)
        with stopped(server):
            with pytest.raises(attnd.DeadlineExceeded):
                session.export(io.BytesIO(), timeout=0.5)
            with pytest.raises(attnd.DeadlineExceeded):
                client.import_session(io.BytesIO(buffer.getvalue()), timeout=0.5)
        assert mean(client.import_session(io.BytesIO(buffer.getvalue())), 6) == 3
