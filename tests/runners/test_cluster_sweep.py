"""A sweep gives identical trials and the same winner in one process and on a cluster that loses a worker."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmark_scripts import load_benchmark
from clusters import KINDS

TRIALS = 8


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """Import ``benchmarks/sweep_kills.py``."""
    return load_benchmark("sweep_kills")


@pytest.fixture(scope="module")
def here(bench: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the sweep as one undisturbed process runs it."""
    return bench.undisturbed(tmp_path_factory.mktemp("here") / "project", trials=TRIALS)


@pytest.mark.proof
def test_a_sweep_that_is_killed_twice_has_the_same_trials_and_winner(
    bench: ModuleType, here: Any, tmp_path: Path
) -> None:
    killed, kills = bench.disturbed(tmp_path / "killed", kills=2, seed=3, trials=TRIALS)
    assert len(kills) == 2
    rows, fine = bench.compared(here, killed, kills)
    assert fine, rows


@pytest.mark.proof
@pytest.mark.parametrize("kind", KINDS)
def test_a_sweep_with_a_dying_worker_has_the_same_trials_and_winner(
    kind: str, bench: ModuleType, here: Any, tmp_path: Path
) -> None:
    there = bench.undisturbed(tmp_path / kind, kind, TRIALS, deaths=1)
    assert there.trials() == here.trials()
    assert there.winner() == here.winner() != b""
    assert {one["scored"]: one for one in there.ledger()} == {one["scored"]: one for one in here.ledger()}
    assert len(there.ledger()) == len(here.ledger())
    ended = [note.key for note in there.notes("end")]
    assert set(ended) == {one["scored"] for one in there.ledger()}
    # One trial may be scored twice, if its worker died before it could report the score.
    assert len(ended) - len(set(ended)) <= 1
    assert len(there.notes("dies")) == 1
    assert {note.process for note in there.notes("dies")}.isdisjoint({note.process for note in here.notes("begin")})
    assert len({note.process for note in there.notes("begin")}) >= 2  # At least two processes have worked.
    assert there.wait_until_gone() < bench.GONE_WITHIN_S
