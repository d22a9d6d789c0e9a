"""attnd is killed while it moves sessions to disk and while it saves them. The next process serves each session as its
client knows it, or says that it is gone; never another state, and nothing that was closed."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import attnd
import grpc
import numpy as np
import pytest
from running_server import Server

ROUNDS = int(os.environ.get("ATTND_KILL_ROUNDS", "14"))
SEED = int(os.environ.get("ATTND_KILL_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
DIM = 32  # a block of 64 tokens is 16 KiB, and the cache has 64 of them
SESSIONS, CLIENTS, MAX_TOKENS = 160, 4, 250
ROUND_SECONDS = 0.6


class Known:
    """What the client knows of one session: its tokens' values, and what an unanswered call may have made of them."""

    def __init__(self, session: attnd.Session) -> None:
        self.session_id = session.session_id
        self.values: list[float] = []
        self.perhaps: list[float] | None = None
        self.closing = False

    def states(self) -> list[list[float]]:
        return [self.values] if self.perhaps is None else [self.values, self.perhaps]


def rows(values: list[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shape = (len(values), 1, DIM)
    v = np.broadcast_to(np.array(values, np.float32)[:, None, None], shape)
    return np.ones(shape, np.float32), np.zeros(shape, np.float32), np.ascontiguousarray(v)


class Traffic:
    """Clients that step, rewind, fork and close sessions until the server goes away."""

    def __init__(self, server: Server, sessions: list[Known], rng: random.Random) -> None:
        self.sessions, self.closed = sessions, []
        self._target = server.target
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.failures: list[Exception] = []
        self.counts: Counter[str] = Counter()
        shares = [sessions[i::CLIENTS] for i in range(CLIENTS)]
        self._threads = [
            threading.Thread(target=self._run, args=(share, random.Random(rng.random()))) for share in shares
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a client hangs"
        assert not self.failures, self.failures

    def _run(self, mine: list[Known], rng: random.Random) -> None:
        try:
            with attnd.Client(self._target, timeout=20) as client:
                while not self._stop.is_set() and self._call(client, mine, rng):
                    pass
        except Exception as failure:  # noqa: BLE001 - the test raises it
            self.failures.append(failure)

    def _call(self, client: attnd.Client, mine: list[Known], rng: random.Random) -> bool:
        """One call; False when the server has gone."""
        known = rng.choice(mine) if len(mine) >= SESSIONS // CLIENTS else None
        try:
            if known is None:
                known = Known(client.create_session(num_layers=1, num_q_heads=1, num_kv_heads=1, head_dim=DIM))
                self._add(known, mine)
            what = rng.random()
            if what < 0.02:
                known.closing = True
                client.close_session(known.session_id)
                self._remove(known, mine)
                self.closed.append(known.session_id)
            elif what < 0.05 and known.values:
                fork = Known(client.fork(known.session_id))
                fork.values = list(known.values)
                self._add(fork, mine)
                if len(mine) > SESSIONS // CLIENTS:
                    mine.remove(fork)  # it idles from now on
            elif len(known.values) > MAX_TOKENS or what < 0.1:
                self._change(known, known.values[: rng.randrange(len(known.values) // 2 + 1)])
                client.rewind(known.session_id, len(known.perhaps or []))
                self._changed(known)
            else:
                self._step(client, known, [float(rng.randrange(16)) for _ in range(rng.choice([1, 1, 1, 3, 40, 70]))])
        except attnd.CacheFull:
            known.perhaps, known.closing = None, False
        except attnd.AttndError as error:
            if error.code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN):
                raise
            return False
        return True

    def _step(self, client: attnd.Client, known: Known, values: list[float]) -> None:
        self._change(known, known.values + values)
        # Without a start_position: a lost answer is not asked for again.
        result = client.step(0, [attnd.Segment(known.session_id, len(values))], *rows(values))[0]
        if result.error is not None:
            raise result.error
        self._changed(known)
        assert_mean(result.out[-1], known.values)

    def _change(self, known: Known, values: list[float]) -> None:
        known.perhaps = values

    def _changed(self, known: Known) -> None:
        assert known.perhaps is not None
        known.values, known.perhaps = known.perhaps, None
        self.counts["changes"] += 1

    def _add(self, known: Known, mine: list[Known]) -> None:
        mine.append(known)
        with self._lock:
            self.sessions.append(known)

    def _remove(self, known: Known, mine: list[Known]) -> None:
        if known in mine:
            mine.remove(known)
        with self._lock:
            self.sessions.remove(known)


def assert_mean(row: np.ndarray, values: list[float]) -> None:
    np.testing.assert_allclose(np.asarray(row).reshape(-1), np.full(DIM, np.mean(values)), rtol=1e-5)


class Life:
    """The same directories, one process after the other."""

    def __init__(self, folder: Path) -> None:
        self.rng = random.Random(SEED)
        self.spill, self.saved = folder / "spill", folder / "saved"
        self.sessions: list[Known] = []
        self.closed: list[str] = []
        self.counts: Counter[str] = Counter()

    def start(self) -> Server:
        return Server(
            "--kv_cache_bytes=1MiB",
            "--compute_threads=1",
            "--eviction=lru",
            f"--spill_dir={self.spill}",
            f"--snapshot_on_drain={self.saved}",
            f"--restore={self.saved}",
            "--session_idle_ttl=1h",
        )

    def files(self) -> set[str]:
        return {path.stem for folder in (self.spill, self.saved) for path in folder.glob("*.attnd")}

    def round(self, drains: bool) -> None:
        on_disk = self.files()
        server = self.start()
        try:
            self.check(server, on_disk)
            traffic = Traffic(server, self.sessions, self.rng)
            time.sleep(self.rng.uniform(0.05, ROUND_SECONDS))
            ended = False
            if drains:
                server.process.send_signal(signal.SIGTERM)
                time.sleep(self.rng.choice([0.02, 0.1, 0.4, 1.0]) * self.rng.random())
                ended = server.process.poll() is not None
            server.process.kill()
            server.process.wait()
            traffic.join()
            self.closed += traffic.closed
            self.counts["changes"] += traffic.counts["changes"]
            if drains and not ended and any(self.saved.glob("*.attnd")):
                self.counts["killed while saving"] += 1
            if ended:
                self.counts["drains that ended"] += 1
                assert server.process.returncode == 0, "".join(server.output)
                missing = {known.session_id for known in self.sessions if not known.closing} - self.files()
                assert not missing, f"{len(missing)} sessions were not saved"
        finally:
            server.kill()

    def check(self, server: Server, on_disk: set[str]) -> None:
        """Every session that the clients know is as it was, or gone; what has a file is not gone."""
        with attnd.Client(server.target, timeout=20) as client:
            for known in list(self.sessions):
                try:
                    info = client.get_session(known.session_id)
                except attnd.SessionLost as error:
                    assert error.reason == "NEVER_EXISTED", error
                    assert known.session_id not in on_disk, f"{error}, but there was a file"
                    self.counts["lost with the process"] += 1
                    self.sessions.remove(known)
                    continue
                states = [values for values in known.states() if len(values) == info.length]
                assert states, f"has {info.length} tokens, may have {[len(values) for values in known.states()]}"
                known.values, known.perhaps, known.closing = states[0], None, False
                self.counts["there"] += 1
                # The others stay on disk, perhaps for several rounds.
                if self.rng.random() < 0.5 and known.values:
                    self.ask(client, known)
            for session_id in self.closed:
                with pytest.raises(attnd.SessionLost):
                    client.get_session(session_id)
        self.closed.clear()

    def ask(self, client: attnd.Client, known: Known) -> None:
        q = rows(known.values[-1:])[0]
        try:
            result = client.step(0, [attnd.Segment(known.session_id, 1)], q, None, None)[0]
        except attnd.CacheFull:
            return
        except attnd.SessionLost as error:
            assert error.code == grpc.StatusCode.DATA_LOSS, error
            self.counts["found damaged"] += 1
            self.sessions.remove(known)
            return
        self.counts["asked"] += 1
        assert_mean(result.out[-1], known.values)


def test_killed_while_sessions_go_to_disk_and_while_they_are_saved(tmp_path: Path) -> None:
    print(f"ATTND_KILL_SEED={SEED}")
    life = Life(tmp_path)
    for i in range(ROUNDS):
        life.round(drains=i % 2 == 1)
    server = life.start()
    life.check(server, set())
    server.kill()
    print(f"{ROUNDS} kills: {dict(life.counts)}")
    assert life.counts["there"] > 0 and life.counts["asked"] > 0
    assert life.counts["found damaged"] == 0  # a file takes its name when it is whole
