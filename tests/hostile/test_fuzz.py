"""A short version of `make fuzz` in every test run, and checks that the fuzzer detects tracebacks and hangs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fuzz import Target, fuzz, targets

from mergegate.merge_core.errors import InvalidInput

SECONDS = 6


@pytest.mark.story
def test_every_parser_ends_in_a_value_or_a_message(tmp_path: Path) -> None:
    found = fuzz(targets(tmp_path, None), executions=1_000_000, seconds=SECONDS, seed=0)
    assert [(name, data[:200], said) for name, data, said in found.failures] == []
    assert min(found.by_target.values()) >= 5
    assert found.values > 0


def refuses(data: bytes) -> object:
    raise InvalidInput("x", found="no")


def never_ends(data: bytes) -> object:
    while True:
        pass


@pytest.mark.parametrize(
    ("parse", "failures"), [(refuses, 0), (len, 0), (lambda data: data.decode("ascii")[99], 3), (never_ends, 1)]
)
def test_the_fuzzer_notices_tracebacks_and_hangs(
    parse: Callable[[bytes], object], failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fuzz.SLOW", 0.1)
    found = fuzz({"it": Target(parse, (b"{}",))}, executions=max(1, failures), seconds=60, seed=1)
    assert len(found.failures) == failures
