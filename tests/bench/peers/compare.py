"""The same attention through attnd's kernels and through its peers, in turns. README.md says what and how."""

import argparse
import glob
import json
import os
import re
import statistics
import sys
import tempfile
import time
import typing

import numpy as np

import cases
import protocol

FOLDER = os.path.dirname(os.path.abspath(__file__))
PEERS = ("torch", "flex", "onnxruntime", "ggml")

# Against float64, what attnd promises; against attnd, the peers: they sum in other orders, and ggml's sum over an f16 V
# is f16 itself, which at 32768 tokens is 3e-2 away. What is not the same attention is away by 1 or so.
OWN_ERROR = {"f32": 1e-5, "bf16": 1e-2}
PEER_ERROR = {"f32": 1e-4, "bf16": 6e-2}

CALIBRATION_ROUNDS = 3
CLOSE_FORMS = 1.5  # forms within this factor of a side's fastest are timed to the end
MIN_ROUNDS = 5


class Timing(typing.NamedTuple):
    us: float
    append_us: float = 0.0


class Contender:
    """A side with the forms that are still in the race for one subject and number of threads."""

    def __init__(self, side: protocol.Side, forms: list[str]):
        self.side = side
        self.errors: dict[str, float] = {}
        self.times: dict[str, list[Timing]] = {form: [] for form in forms}

    def output(self, form: str, case: protocol.Case) -> np.ndarray:
        with tempfile.NamedTemporaryFile() as file:
            self.side.ask("output", form, file.name)
            shape = (case.batch, case.queries, case.q_heads, case.head_dim)
            return np.fromfile(file.name, np.float32).reshape(shape)

    def turn(self, form: str) -> None:
        self.times[form].append(Timing(*(float(word) for word in self.side.ask("run", form))))

    def median(self, form: str) -> Timing:
        return Timing(*(statistics.median(values) for values in zip(*self.times[form])))

    def best_form(self) -> str:
        return min(self.times, key=lambda form: self.median(form).us)

    def drop_slow_forms(self) -> None:
        limit = CLOSE_FORMS * self.median(self.best_form()).us
        self.times = {form: [] for form in self.times if self.median(form).us <= limit}


class Comparison:
    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.reasons: dict[str, None] = {}  # what is skipped and why, in order, each once
        self.failures: list[str] = []
        self.sides: list[protocol.Side] = []
        self.rows: list[dict] = []

    # ---- processes ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.sides.append(protocol.Side("attnd", [self.options.attnd]))
        commands = {
            "torch": ["peer_torch.py"],
            "flex": ["peer_torch.py", "flex"],
            "onnxruntime": ["peer_onnxruntime.py"],
            "ggml": ["peer_ggml.py", self.options.ggml or find_ggml()],
        }
        for name in self.options.peers:
            script, *arguments = commands[name]
            try:
                command = [sys.executable, os.path.join(FOLDER, script), *arguments]
                self.sides.append(protocol.Side(name, command))
            except protocol.Skipped as reason:
                self.skip(name, reason)
        for side in self.sides:
            self.say(f"{side.name}: {side.version}")

    def close(self) -> None:
        for side in self.sides:
            side.close()

    def say(self, text: str) -> None:
        print(text, file=sys.stderr if self.options.json else sys.stdout, flush=True)

    def skip(self, name: str, reason: object) -> None:
        self.reasons[f"{name}: {reason}"] = None

    def fail(self, text: str) -> None:
        self.failures.append(text)
        self.say(f"FAILED {text}")

    # ---- one subject -------------------------------------------------------------------------------------------------

    def compare(self, subject: cases.Subject) -> None:
        tensors = cases.random_tensors(subject.case)
        with tempfile.TemporaryDirectory() as folder:
            for name, array in tensors._asdict().items():
                array.tofile(f"{folder}/data.{name}")
            ready = [side for side in self.sides if self.attempt(side, subject, "prepare", folder + "/data")]
        for threads in self.options.threads:
            contenders = self.contenders(ready, subject, threads)
            if contenders and contenders[0].side.name == "attnd" and self.agree(contenders, subject, tensors, threads):
                self.race(contenders)
                self.report(subject, threads, contenders)

    def attempt(self, side: protocol.Side, subject: cases.Subject, command: str, argument: object) -> list[str] | bool:
        try:
            if command == "prepare":
                side.prepare(subject.case, str(argument))
                return True
            return side.ask(command, argument)
        except protocol.Skipped as reason:
            self.skip(f"{side.name}, {subject.phase} {subject.case.dtype}", reason)
        except protocol.Failed as failure:
            self.fail(f"{subject.name} {subject.case.dtype}: {failure}")
        return False

    def contenders(self, ready: list[protocol.Side], subject: cases.Subject, threads: int) -> list[Contender]:
        found = []
        for side in ready:
            forms = self.attempt(side, subject, "threads", threads)
            if not forms:
                continue
            names = typing.cast(list[str], forms)
            # attnd's own side comes first, and has one form.
            wanted = names if not found else [name for name in names if re.fullmatch(self.options.forms, name)]
            if wanted:
                found.append(Contender(side, wanted))
        return found

    def agree(
        self, contenders: list[Contender], subject: cases.Subject, tensors: cases.Tensors, threads: int
    ) -> bool:
        """Whether all sides compute the same thing: attnd against float64, the peers against attnd."""
        case, dtype = subject.case, subject.case.dtype
        own = contenders[0].output(next(iter(contenders[0].times)), case)
        own_error = cases.reference_error(case, tensors, own)
        if not own_error <= OWN_ERROR[dtype]:
            self.fail(f"{subject.name} {dtype}, {threads} threads: attnd differs from float64 by {own_error:.1e}")
            return False
        contenders[0].errors = dict.fromkeys(contenders[0].times, own_error)
        for peer in contenders[1:]:
            for form in list(peer.times):
                error = cases.relative_error(peer.output(form, case), own)
                peer.errors[form] = error
                if not error <= PEER_ERROR[dtype]:
                    self.fail(
                        f"{subject.name} {dtype}, {threads} threads: {peer.side.name} ({form}) differs from attnd "
                        f"by {error:.1e}"
                    )
                    del peer.times[form]
        contenders[:] = [c for c in contenders if c.times]
        return True

    def race(self, contenders: list[Contender]) -> None:
        for _ in range(CALIBRATION_ROUNDS):
            for contender in contenders:
                for form in contender.times:
                    contender.turn(form)
        for contender in contenders:
            contender.drop_slow_forms()
        turns = [(contender, form) for contender in contenders for form in contender.times]
        start = time.monotonic()
        rounds = 0
        while rounds < MIN_ROUNDS or time.monotonic() - start < self.options.seconds:
            # Another side begins each round, so that nobody always follows the same one.
            first = rounds % len(turns)
            for contender, form in turns[first:] + turns[:first]:
                contender.turn(form)
            rounds += 1

    # ---- output ------------------------------------------------------------------------------------------------------

    def report(self, subject: cases.Subject, threads: int, contenders: list[Contender]) -> None:
        own = contenders[0].median(contenders[0].best_form())
        # A prefill's peers take K and V as they come; attnd's blocks have to be written first.
        own_us = own.us + own.append_us if subject.phase == "prefill" else own.us
        peers = {}
        for peer in contenders[1:]:
            form = peer.best_form()
            us = peer.median(form).us
            peers[peer.side.name] = {
                "us": round(us, 2),
                "ratio": round(us / own_us, 3),
                "form": form,
                "difference": peer.errors[form],
            }
        case = subject.case
        row = {
            "name": subject.name,
            "model": subject.model,
            "phase": subject.phase,
            "place": subject.place,
            "tokens": case.tokens,
            "batch": case.batch,
            "dtype": case.dtype,
            "threads": threads,
            "rounds": len(next(iter(contenders[0].times.values()))),
            "attnd_us": round(own_us, 2),
            "attnd_append_us": round(own.append_us, 2),
            "attnd_error": contenders[0].errors["blocks"],
            "peers": peers,
        }
        self.rows.append(row)
        if self.options.json:
            print(json.dumps(row), flush=True)
        else:
            self.print_row(row)

    def print_header(self) -> None:
        columns = "".join(f" | {name:<25}" for name in self.options.peers)
        self.say(f"\n{'attention':<35} {'dtype':<5} {'threads':>7} {'attnd us':>10} {'append':>8}{columns}")

    def print_row(self, row: dict) -> None:
        cells = ""
        for name in self.options.peers:
            peer = row["peers"].get(name)
            cell = "-" if peer is None else f"{peer['us']:>10.1f} {peer['ratio']:>5.2f} {peer['form']:<8}"
            cells += f" | {cell:<25}"
        self.say(
            f"{row['name']:<35} {row['dtype']:<5} {row['threads']:>7} {row['attnd_us']:>10.1f} "
            f"{row['attnd_append_us']:>8.1f}{cells}"
        )

    def finish(self) -> int:
        if self.reasons:
            self.say("\nSkipped:\n" + "\n".join(f"  {reason}" for reason in self.reasons))
        if self.failures:
            self.say("\nFailed:\n" + "\n".join(f"  {failure}" for failure in self.failures))
        if not self.rows:
            self.say("nothing was compared")
        return 0 if self.rows and not self.failures else 1


def find_ggml() -> str:
    """The folder of ggml's shared libraries in an installed llama_cpp package, or nothing."""
    for folder in sys.path:
        if glob.glob(os.path.join(folder, "llama_cpp", "lib", "libggml-cpu.so")):
            return os.path.join(folder, "llama_cpp", "lib")
    return ""


def parse(arguments: list[str]) -> argparse.Namespace:
    all_threads = len(os.sched_getaffinity(0))

    def threads(text: str) -> list[int]:
        numbers = [all_threads if word == "all" else int(word) for word in text.split(",")]
        return list(dict.fromkeys(numbers))

    def peers(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        if not set(names) <= set(PEERS):
            raise ValueError
        return names

    parser = argparse.ArgumentParser(prog="tests/bench/peers/run", description=__doc__)
    parser.add_argument("--threads", type=threads, default="1,all", help="of each side, e.g. 1,4,all (1,all)")
    parser.add_argument("--only", choices=("decode", "prefill"), help="one phase")
    parser.add_argument("--match", default="", help="regular expression over the names and dtypes in the table")
    parser.add_argument("--forms", default=".*", help="regular expression: only such forms of the peers (all)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of timing for each row (3)")
    parser.add_argument("--peers", type=peers, default=",".join(PEERS), help="some of " + ",".join(PEERS))
    parser.add_argument("--ggml", default="", help="folder of ggml's shared libraries (that of an installed llama_cpp)")
    parser.add_argument("--json", action="store_true", help="one object a row on standard output, the rest on error")
    parser.add_argument("--attnd", required=True, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    options = parse(sys.argv[1:])
    comparison = Comparison(options)
    try:
        comparison.start()
        if not options.json:
            comparison.print_header()
        for subject in cases.subjects():
            wanted = options.only in (None, subject.phase)
            if wanted and re.search(options.match, f"{subject.name} {subject.case.dtype}"):
                comparison.compare(subject)
    finally:
        comparison.close()
    return comparison.finish()


if __name__ == "__main__":
    sys.exit(main())
