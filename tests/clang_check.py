"""Compiles the server's files with clang for its diagnostics alone: -Wthread-safety checks the lock annotations.

usage: clang_check.py COMPILE_COMMANDS JOBS

CMake's compile_commands.json says how GCC compiles each file; clang takes the same definitions and folders.
"""

import concurrent.futures
import json
import shlex
import subprocess
import sys

# What clang needs of GCC's command line; the rest (code generation, outputs) does not concern diagnostics.
KEPT_FLAGS = ("-D", "-I", "-std=")


def clang_command(entry: dict) -> list[str]:
    words = shlex.split(entry["command"])
    command = ["clang++-19", "-fsyntax-only", "-Werror", "-Wthread-safety"]
    for i, word in enumerate(words):
        if word.startswith(KEPT_FLAGS):
            command.append(word)
        elif word == "-isystem":
            command += [word, words[i + 1]]
    return command + [entry["file"]]


def check(entry: dict) -> bool:
    result = subprocess.run(
        clang_command(entry), cwd=entry["directory"], capture_output=True, text=True, check=False
    )
    print(f"{'ok' if result.returncode == 0 else 'FAILED'}: {entry['file']}\n{result.stderr}", end="", flush=True)
    return result.returncode == 0


def main() -> int:
    compile_commands, jobs = sys.argv[1], int(sys.argv[2])
    with open(compile_commands, encoding="utf-8") as file:
        entries = [entry for entry in json.load(file) if "/server/" in entry["file"] and "/tests/" not in entry["file"]]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(check, entries))
    print(f"{results.count(True)} files passed, {results.count(False)} failed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
