"""Sessions from server to server by attnctl, and what is on the disk when either side is killed in the middle."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from running_server import Server, binary

import attnd

ATTNCTL = str(binary().parent / "attnctl")
DIM = 256
TOKENS = 8192
KILLS = 60


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    running: list[Server] = []

    def start_one(*flags: str) -> Server:
        running.append(Server("--kv_cache_bytes=96MiB", "--compute_threads=1", *flags))
        return running[-1]

    yield start_one
    for server in running:
        server.kill()


def attnctl(server: Server, *arguments: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    command = [ATTNCTL, *arguments, f"--server={server.target}"]
    return subprocess.run(command, capture_output=True, timeout=60, check=False, **options)  # type: ignore[call-overload]


def fill(client: attnd.Client, tokens: int) -> attnd.Session:
    """A session of 2 KiB a token. Its keys are zero and value i is i % 4: attention to all of it is their mean."""
    session = client.create_session(num_q_heads=1, head_dim=DIM)
    k = np.zeros((tokens, 1, DIM), np.float32)
    session.step(0, None, k, k + (np.arange(tokens, dtype=np.float32) % 4)[:, None, None])
    return session


def check(client: attnd.Client, session_id: str, tokens: int) -> None:
    """The values are those of fill(), by their mean and by their number."""
    assert client.get_session(session_id).length == tokens
    zero = np.zeros((1, 1, DIM), np.float32)
    for value, mean in ((1.5, 1.5), (1.5 + tokens + 2, 1.5 + (tokens + 2) / (tokens + 2))):
        out = client.step(0, [attnd.Segment(session_id, 1)], zero, zero, zero + np.float32(value))[0].out
        np.testing.assert_allclose(out, mean, rtol=1e-5)


def test_a_pipe_from_server_to_server(start: Callable[..., Server]) -> None:
    here, there = start(), start("--compute_threads=2")
    with attnd.Client(here.target) as client, attnd.Client(there.target) as other:
        session = fill(client, 1000)
        command = (
            f"set -o pipefail; {ATTNCTL} session export {session.session_id} --output=- --server={here.target}"
            f" | {ATTNCTL} session import - --server={there.target}"
        )
        run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
        check(other, run.stdout.strip(), 1000)
        check(client, session.session_id, 1000)
        # What is cut off on the way is no session, and the pipe says so.
        cut = command.replace("| ", "| head -c 500000 | ")
        run = subprocess.run(["bash", "-c", cut], capture_output=True, text=True, timeout=60, check=False)
        assert run.returncode != 0
        assert "BAD_SNAPSHOT" in run.stderr
        assert run.stdout == ""
        assert other.server_info().sessions_active == 1


def test_what_cannot_be_done_is_said_and_changes_nothing(start: Callable[..., Server], tmp_path: Path) -> None:
    server = start()
    with attnd.Client(server.target) as client:
        session_id = fill(client, 100).session_id
        path = tmp_path / "snapshot"
        for arguments, status, words in (
            (["export", "0" * 32, f"--output={path}"], 1, "NEVER_EXISTED"),
            (["export", session_id, f"--output={tmp_path}/none/file"], 1, "No such file"),
            (["export", session_id, "--output=/dev/full"], 1, "no plain file"),
            (["export", session_id], 2, "--output=FILE"),
            (["import", str(path)], 1, "No such file"),
            (["import"], 2, "takes one FILE"),
        ):
            run = attnctl(server, "session", *arguments)
            assert (run.returncode, words in run.stderr.decode()) == (status, True), run
            assert list(tmp_path.iterdir()) == []
        path.write_bytes(b"no snapshot")
        run = attnctl(server, "session", "import", str(path))
        assert run.returncode == 1
        assert b"BAD_SNAPSHOT" in run.stderr
        assert run.stdout == b""
        # A disk that is full, as far as this process may write.
        limited = f"ulimit -f 50; trap '' XFSZ; exec {ATTNCTL} session export {session_id} --output={path}"
        run = subprocess.run(
            ["bash", "-c", f"{limited} --server={server.target}"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert run.returncode == 1
        assert "File too large" in run.stderr
        assert path.read_bytes() == b"no snapshot"
        assert list(tmp_path.iterdir()) == [path]
        assert client.server_info().sessions_active == 1


def test_s17_exports_that_are_killed_leave_the_old_file_or_the_new_one(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    seed = int(os.environ.get("ATTND_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
    print(f"seed {seed} (ATTND_TEST_SEED)")
    dice = random.Random(seed)
    server = start()
    client = attnd.Client(server.target)
    session_id = fill(client, TOKENS).session_id
    path, reference = tmp_path / "snapshot", tmp_path / "reference"
    begin = time.monotonic()
    assert attnctl(server, "session", "export", session_id, f"--output={reference}").returncode == 0
    duration = time.monotonic() - begin
    new = reference.read_bytes()
    outcomes = {"old": 0, "new": 0, "absent": 0}
    for kill in range(KILLS):
        old = dice.choice([None, b"old", new[:-1]])
        path.unlink(missing_ok=True)
        if old is not None:
            path.write_bytes(old)
        victim = "server" if kill % 3 == 0 else "client"
        command = [ATTNCTL, "session", "export", session_id, f"--output={path}", f"--server={server.target}"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        pause = dice.uniform(0, 1.3 * duration)
        time.sleep(pause)
        (server.process if victim == "server" else process).send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        there = path.read_bytes() if path.exists() else None
        what = f"kill {kill} of the {victim} after {pause:.3f} s of {duration:.3f}, seed {seed}"
        assert there in (old, new), f"{what}: {None if there is None else len(there)} bytes"
        assert process.returncode != 0 or there == new, f"{what}: done, but the file is the old one"
        outcomes["new" if there == new else "absent" if there is None else "old"] += 1
        if victim == "server":
            server.kill()
            client.close()
            server = start()
            client = attnd.Client(server.target)
            session_id = client.import_session(reference).session_id
        if there == new:
            copy = attnctl(server, "session", "import", str(path))
            assert copy.returncode == 0, f"{what}: {copy.stderr!r}"
            copy_id = copy.stdout.decode().strip()
            check(client, copy_id, TOKENS)
            client.close_session(copy_id)
        assert client.server_info().sessions_active == 1, what
    print(f"{KILLS} kills: {outcomes}")
    # What a kill leaves behind is in nobody's way.
    assert attnctl(server, "session", "export", session_id, f"--output={path}").returncode == 0
    assert path.read_bytes() == new
    assert sorted(tmp_path.iterdir()) == [reference, path]
    client.close()
