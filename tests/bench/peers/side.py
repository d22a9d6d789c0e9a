"""The other end of protocol.py, for the peers that are called from Python: memory, tensors and the loop of turns."""

import mmap
import os
import sys
import time
import typing

import numpy as np

import protocol

Call = typing.Callable[[int], object]  # computes a layer; returns whatever `result` understands

HUGE_PAGE = 2 << 20

# Of untimed calls before each timed one, on other layers: the driver let all threads fall asleep, and they wake up one
# after the other, now and then on the same core at first. After this they are as inside a running model.
WARM_UP_US = 3e3


def huge_array(shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
    """Memory as attnd's own: transparent huge pages where the kernel grants them. Lives as long as the array."""
    count = int(np.prod(shape))
    size = count * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, size + HUGE_PAGE)
    memory.madvise(mmap.MADV_HUGEPAGE)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    return np.frombuffer(memory, dtype, count, offset=-address % HUGE_PAGE).reshape(shape)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """The upper halves: the driver's numbers are all bf16 numbers."""
    return (np.ascontiguousarray(x).view(np.uint32) >> 16).astype(np.uint16)


def from_bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


CONVERT = {"f32": lambda x: x, "f16": lambda x: x.astype(np.float16), "bf16": to_bf16}


class Data:
    """A case's tensors as the driver wrote them, f32 [batch, queries | tokens, heads, head_dim]."""

    def __init__(self, case: protocol.Case, path: str):
        def read(name: str, tokens: int, heads: int) -> np.ndarray:
            shape = (case.batch, tokens, heads, case.head_dim)
            return np.fromfile(f"{path}.{name}", np.float32).reshape(shape)

        self.q = read("q", case.queries, case.q_heads)
        self.k = read("k", case.tokens, case.kv_heads)
        self.v = read("v", case.tokens, case.kv_heads)
        self._case = case

    def layers_by_head(self, dtype: str) -> list[tuple[np.ndarray, np.ndarray]]:
        """K and V of every layer, each [batch, kv_heads, tokens, head_dim] in memory of its own."""

        def copies(x: np.ndarray) -> list[np.ndarray]:
            source = CONVERT[dtype](np.ascontiguousarray(x.transpose(0, 2, 1, 3)))
            # K and V of all layers in one range, so that pages and cache sets are used as evenly as attnd uses them.
            memory = huge_array((self._case.layers, *source.shape), source.dtype)
            memory[:] = source
            return list(memory)

        return list(zip(copies(self.k), copies(self.v)))


class Peer:
    """What a peer's file implements."""

    def version(self) -> str:
        """Raises Skipped where the peer is not installed."""
        raise NotImplementedError

    def prepare(self, case: protocol.Case, data: Data) -> None:
        """Raises Skipped for what the peer does not compute."""
        raise NotImplementedError

    def forms(self, threads: int) -> dict[str, Call]:
        raise NotImplementedError

    def result(self, form: str, value: object) -> np.ndarray:
        """A call's value as f32 [batch, queries, q_heads, head_dim]."""
        raise NotImplementedError


class _Turns:
    def __init__(self, peer: Peer):
        self._peer = peer
        self._case: protocol.Case | None = None
        self._calls: dict[str, Call] = {}
        self._layer = 0

    def _next_layer(self) -> int:
        self._layer = (self._layer + 1) % self._case.layers
        return self._layer

    def prepare(self, words: list[str]) -> str:
        *numbers, dtype, layers, path = words
        self._calls = {}
        self._case = protocol.Case(*(int(number) for number in numbers), dtype, int(layers))
        self._peer.prepare(self._case, Data(self._case, path))
        return ""

    def threads(self, words: list[str]) -> str:
        self._calls = self._peer.forms(int(words[0]))
        return " ".join(self._calls)

    def output(self, words: list[str]) -> str:
        form, path = words
        self._peer.result(form, self._calls[form](0)).astype(np.float32).tofile(path)
        return ""

    def run(self, words: list[str]) -> str:
        call = self._calls[words[0]]
        warm_up_end = time.perf_counter_ns() + WARM_UP_US * 1e3
        while time.perf_counter_ns() < warm_up_end:
            call(self._next_layer())
        layer = self._next_layer()
        start = time.perf_counter_ns()
        call(layer)
        return f"{(time.perf_counter_ns() - start) / 1e3:.3f}"


def serve(peer: Peer) -> None:
    # Libraries that print to standard output must not disturb the protocol.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    turns = _Turns(peer)
    try:
        print("ok", peer.version(), file=answers)
    except protocol.Skipped as reason:
        print("skip", reason, file=answers)
        return
    for line in sys.stdin:
        command, *words = line.split()
        try:
            print("ok", getattr(turns, command)(words), file=answers)
        except protocol.Skipped as reason:
            print("skip", reason, file=answers)
        except Exception as error:  # whatever a peer raises is the driver's to report
            print("error", " ".join(f"{type(error).__name__}: {error}".split())[:500], file=answers)
