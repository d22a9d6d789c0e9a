"""attnd's side alone, against a plain loop over a small case: what the comparison starts is right, and speaks its
protocol. Needs the standard library only. Argument: the program attnd_peer."""

import array
import math
import operator
import os
import random
import sys
import tempfile
import typing

import protocol


def dot(a: typing.Iterable[float], b: typing.Iterable[float]) -> float:
    return sum(map(operator.mul, a, b))


def plain_loop(case: protocol.Case, q: array.array, k: array.array, v: array.array) -> list[list[float]]:
    """Rows in the order [batch, queries, q_heads]."""

    def row(x: array.array, heads: int, token: int, head: int) -> array.array:
        start = (token * heads + head) * case.head_dim
        return x[start : start + case.head_dim]

    out = []
    for b in range(case.batch):
        for i in range(case.queries):
            for h in range(case.q_heads):
                q_row = row(q, case.q_heads, b * case.queries + i, h)
                keys = range(b * case.tokens, b * case.tokens + case.tokens - case.queries + i + 1)
                kv_head = h // case.group
                scores = [dot(q_row, row(k, case.kv_heads, j, kv_head)) for j in keys]
                weights = [math.exp(score / math.sqrt(case.head_dim)) for score in scores]
                columns = zip(*(row(v, case.kv_heads, j, kv_head) for j in keys))
                out.append([dot(weights, column) / sum(weights) for column in columns])
    return out


def check(side: protocol.Side, case: protocol.Case, threads: int, bound: float) -> None:
    dice = random.Random(1)

    def tensor(tokens: int, heads: int) -> array.array:
        count = case.batch * tokens * heads * case.head_dim
        return array.array("f", (dice.randint(-128, 128) / 64 for _ in range(count)))  # bf16 holds these too

    q, k, v = tensor(case.queries, case.q_heads), tensor(case.tokens, case.kv_heads), tensor(case.tokens, case.kv_heads)
    with tempfile.TemporaryDirectory() as folder:
        for name, numbers in (("q", q), ("k", k), ("v", v)):
            with open(f"{folder}/data.{name}", "wb") as file:
                numbers.tofile(file)
        side.prepare(case, f"{folder}/data")
        (form,) = side.ask("threads", threads)
        side.ask("output", form, f"{folder}/out")
        got = array.array("f")
        with open(f"{folder}/out", "rb") as file:
            got.fromfile(file, os.path.getsize(f"{folder}/out") // 4)
    for i, expected in enumerate(plain_loop(case, q, k, v)):
        row = got[i * case.head_dim : (i + 1) * case.head_dim]
        error = math.dist(row, expected) / math.hypot(*expected)
        assert error <= bound, f"{case}, {threads} threads, row {i}: relative error {error:.1e}"
    us, append_us = (float(word) for word in side.ask("run", form))
    assert us > 0 and append_us > 0, f"{case}: {us} us, {append_us} us"


def main() -> None:
    side = protocol.Side("attnd", [sys.argv[1]])
    try:
        for dtype, bound in (("f32", 1e-5), ("bf16", 1e-2)):
            check(side, protocol.Case(4, 2, 16, 2, 70, 1, dtype, layers=3), threads=1, bound=bound)
            check(side, protocol.Case(4, 2, 16, 1, 70, 70, dtype, layers=1), threads=2, bound=bound)
    finally:
        side.close()


if __name__ == "__main__":
    main()
