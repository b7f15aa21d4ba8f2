"""A run that is killed during a batch resumes there and gives the same bits, and each model is loaded once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmark_scripts import load_benchmark

pytestmark = pytest.mark.story

KILLS = 3


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """Import ``benchmarks/kills.py``."""
    return load_benchmark("kills")


@pytest.fixture(scope="module")
def reference(bench: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return bench.undisturbed(tmp_path_factory.mktemp("undisturbed") / "project")


@pytest.mark.proof
def test_a_whole_release_loads_each_model_once(reference: Any) -> None:
    """One process loads each model for its perplexity and all of its tasks."""
    loads = [note for note in reference.notes() if note.what == "load"]
    assert Counter(note.model for note in loads) == {"base": 1, "reverser": 1, "shifter": 1, "merge": 1}
    assert len({note.process for note in loads}) == 1


@pytest.mark.proof
def test_killed_while_it_measures_it_repeats_a_batch_a_kill_and_changes_no_bit(
    bench: ModuleType, reference: Any, tmp_path: Path
) -> None:
    project, kills = bench.disturbed(tmp_path / "project", kills=KILLS, batches=len(reference.batches()), seed=3)
    assert {kill.whom for kill in kills} == {"the flow", "the models' process"}
    assert project.measured() == reference.measured()
    assert len(bench.repeated(project, reference)) <= len(kills) == KILLS
    assert not list((project.root / ".mergegate" / "store").glob("**/*.journal"))
    assert not list((project.root / ".mergegate" / "store").glob("*/*.partial"))
