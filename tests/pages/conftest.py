"""The browser, and servers of the tests' own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client/python/tests"), str(ROOT / "tests/pages")]

pytest.register_assert_rewrite("looks")  # so that its assertions, too, show what they compared

import chromium  # noqa: E402


@pytest.fixture(scope="session")
def browser() -> Iterator[chromium.Browser]:
    program = chromium.find()
    if program is None:
        pytest.fail("there is no Chromium: deploy/setup --tests installs it where the system has it")
    with chromium.Browser(program) as running:
        yield running
