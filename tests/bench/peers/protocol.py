"""A side of the comparison, seen from the driver: a process that computes one timed call on demand.

Lines of words go each way; every answer begins with `ok`, `skip` (the side does not do this, and why) or `error`:

    (at the start)                                                             -> ok VERSION | skip REASON
    prepare Q_HEADS KV_HEADS HEAD_DIM BATCH TOKENS QUERIES DTYPE LAYERS DATA   -> ok | skip REASON
    threads N                                                                  -> ok FORM...
    output FORM FILE    layer 0's answer, f32 [batch, queries, q_heads, head_dim]   -> ok
    run FORM            one timed call on the next layer                       -> ok MICROSECONDS [APPEND_MICROSECONDS]

DATA.q, DATA.k and DATA.v hold f32 [batch, queries | tokens, heads, head_dim]. A form is one way of asking the side for
the same answer. Nothing but the standard library is used here: the smoke test speaks the protocol too.
"""

import glob
import subprocess
import time
import typing

ASLEEP_LIMIT_S = 2.0


class Skipped(Exception):
    """The side cannot do what it was asked, and says why."""


class Failed(Exception):
    """The side broke."""


class Case(typing.NamedTuple):
    """The attention of one layer: the last `queries` of `tokens` tokens attend, causally, in `batch` sessions."""

    q_heads: int
    kv_heads: int
    head_dim: int
    batch: int
    tokens: int
    queries: int
    dtype: str  # f32 or bf16
    layers: int  # equal ones that take turns

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def layer_bytes(self) -> int:
        return 2 * self.batch * self.tokens * self.kv_heads * self.head_dim * (4 if self.dtype == "f32" else 2)


class Side:
    """One process. It is asked again, or another one is, only when all its threads sleep: most thread pools spin for
    some milliseconds after a call, and whoever came next would have fewer cores."""

    def __init__(self, name: str, command: list[str]):
        self.name = name
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.version = " ".join(self._answer())

    def ask(self, *words: object) -> list[str]:
        try:
            self._process.stdin.write(" ".join(str(word) for word in words) + "\n")
        except BrokenPipeError:
            raise Failed(f"{self.name}: has ended") from None
        return self._answer()

    def _answer(self) -> list[str]:
        line = self._process.stdout.readline()
        self._wait_until_asleep()
        status, _, rest = line.strip().partition(" ")
        if status == "ok":
            return rest.split()
        if status == "skip":
            raise Skipped(rest)
        raise Failed(f"{self.name}: {rest or line.strip() or 'ended without an answer'}")

    def _wait_until_asleep(self) -> None:
        deadline = time.monotonic() + ASLEEP_LIMIT_S
        quiet = 0
        while quiet < 2:  # a thread may be seen between two naps
            quiet = quiet + 1 if not self._any_running() else 0
            if time.monotonic() > deadline:
                raise Failed(f"{self.name}: its threads still run {ASLEEP_LIMIT_S} s after a call")
            time.sleep(0.0005)

    def _any_running(self) -> bool:
        for path in glob.glob(f"/proc/{self._process.pid}/task/*/stat"):
            try:
                with open(path, encoding="ascii", errors="replace") as file:
                    if file.read().rpartition(") ")[2].startswith("R"):
                        return True
            except OSError:
                pass  # the thread has ended
        return False

    def prepare(self, case: Case, data: str) -> None:
        self.ask("prepare", *case, data)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
