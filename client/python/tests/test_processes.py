"""One client in several processes and threads."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import reference
from faults import finish_child

import attnd

ONES = np.ones((1, 1, 4), np.float32)


def step_in_child(session: attnd.Session, queue: Any) -> None:
    queue.put(session.step(0, ONES, ONES, ONES, timeout=20).length)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_use_their_parents_session(client: attnd.Client, method: str) -> None:
    """By fork it comes along, by the others it is pickled; either way the child connects by itself."""
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    with client.create_session(num_q_heads=1, head_dim=4) as session:
        assert session.step(0, ONES, ONES, ONES).length == 1
        child = context.Process(target=step_in_child, args=(session, queue), daemon=True)
        child.start()
        assert queue.get(timeout=60) == 2
        child.join(20)
        assert child.exitcode == 0
        assert session.step(0, ONES, ONES, ONES).length == 3


def test_forks_of_forks(client: attnd.Client) -> None:
    with client.create_session(num_q_heads=1, head_dim=4) as session:
        for _ in range(3):
            child = os.fork()
            if child == 0:

                def work() -> None:
                    assert client.server_info(timeout=20).version
                    grandchild = os.fork()
                    if grandchild == 0:
                        finish_child(lambda: session.step(0, None, ONES, ONES, timeout=20) and None)
                    assert os.waitpid(grandchild, 0)[1] == 0

                finish_child(work)
            assert os.waitpid(child, 0)[1] == 0
        assert session.info().length == 3


def test_a_pickled_client_keeps_its_token_and_timeout(client: attnd.Client) -> None:
    made = attnd.Client("127.0.0.1:1", token="secret-of-sixteen-bytes", timeout=3)
    copy = pickle.loads(pickle.dumps(made))
    assert (repr(copy), copy.timeout) == (repr(made), 3)
    assert copy._channel.endpoint.metadata == made._channel.endpoint.metadata
    assert pickle.loads(pickle.dumps(client)).server_info().version == client.server_info().version


def test_the_collector_may_close_clients_while_one_connects() -> None:
    """A finalizer of anything may run within a connection's making, and close a client: one lock, one thread."""
    program = """
import gc, weakref
import attnd

class Forgotten:
    pass

old, new = attnd.Client("127.0.0.1:1"), attnd.Client("127.0.0.1:1")
closed = []
make = new._channel.endpoint.open

def collects(library):
    forgotten = Forgotten()
    forgotten.itself = forgotten
    weakref.finalize(forgotten, lambda: (old.close(), closed.append(1)))
    del forgotten
    gc.collect()
    return make(library)

new._channel.endpoint.open = collects
try:
    new.server_info(timeout=5)
except attnd.Unavailable:
    print(closed)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "[1]\n"), ended.stderr


def test_threads_share_a_client(client: attnd.Client) -> None:
    """Each thread has a session: no answer is another's."""
    random = np.random.default_rng(0)
    q, k, v = random.standard_normal((3, 8, 40, 1, 16), dtype=np.float32)
    errors: dict[int, float] = {}

    def work(thread: int) -> None:
        with client.create_session(num_q_heads=1, head_dim=16) as session:
            outs = [
                session.step(0, q[thread, n : n + 1], k[thread, n : n + 1], v[thread, n : n + 1]).out for n in range(40)
            ]
            expected = reference.attend(q[thread], k[thread], v[thread], causal=True)[0]
            errors[thread] = reference.relative_error(np.concatenate(outs), expected)
            stateless = client.attend(q[thread], k[thread], v[thread], causal=True).out
            errors[thread] = max(errors[thread], reference.relative_error(stateless, expected))

    client.close()  # the first call of each thread finds no connection
    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(errors) == 8
    assert max(errors.values()) <= 1e-5
