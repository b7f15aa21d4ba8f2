"""Test the Optuna view of a study: it can be rewritten at any time and feeds importances and the dashboard."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from toy_search import TIES, ToyModels, hand_written_ties, run_toy, toy_settings, toy_space

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.sweep.samplers import open_view, parameter_importances, serve_dashboard, view_storage
from mergegate.tasks.sweep.study import HandWritten, Study

optuna = pytest.importorskip("optuna")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return run_toy(ToyModels(), tmp_path_factory.mktemp("study"), toy_settings(budget={"trials": 60}))


def test_the_view_has_every_trial_once_after_repeated_writes(study: Study, tmp_path: Path) -> None:
    address = str(tmp_path / "deeper" / "study.log")
    first = open_view(address, "demo", study.coordinates, study.objective)
    assert first(study.trials[:20]) == 20
    again = open_view(address, "demo", study.coordinates, study.objective)
    assert again(study.trials) == 40
    assert again(study.trials) == 0
    read = optuna.load_study(study_name="demo", storage=view_storage(address))
    assert [trial.user_attrs["number"] for trial in read.trials] == list(range(60))
    for trial, ours in zip(read.trials, study.trials, strict=True):
        assert trial.params == dict(ours.point)
        assert trial.value == ours.scores[0]
        assert trial.user_attrs["dropped"] == ours.dropped


def test_a_view_of_a_mixed_space_with_problems_and_constraints(tmp_path: Path) -> None:
    settings = toy_settings(
        parameters={
            "math": {"low": 0.2, "high": 1.8, "start": 1.0},
            "code": {"type": "log", "low": 0.1, "high": 2.0, "start": 1.0},
            "density": {"type": "category", "choices": [0.5, 1, True], "start": 1},
        },
        constraints=[{"task": "copy", "max_drop": 1}],
        budget={"trials": 20},
    )
    mixed = run_toy(ToyModels(), tmp_path / "study", settings)
    assert open_view(str(tmp_path / "log"), "demo", mixed.coordinates, mixed.objective)(mixed.trials) == 20
    read = optuna.load_study(study_name="demo", storage=view_storage(str(tmp_path / "log")))
    assert [max(trial.constraints.values()) for trial in read.trials] == [trial.violation for trial in mixed.trials]


def test_a_stored_study_with_other_objectives_is_rejected(study: Study, tmp_path: Path) -> None:
    address = str(tmp_path / "log")
    optuna.create_study(study_name="demo", storage=view_storage(address), directions=["maximize", "maximize"])
    with pytest.raises(InvalidInput, match="2 objectives"):
        open_view(address, "demo", study.coordinates, study.objective)


def test_the_error_of_a_missing_database_hides_the_password(study: Study) -> None:
    with pytest.raises(InvalidInput, match="cannot use the database") as caught:
        open_view("postgresql+nodriver://me:secret@nowhere/studies", "demo", study.coordinates, study.objective)
    assert "secret" not in str(caught.value)


def test_the_decisive_parameter_has_the_largest_importance(study: Study) -> None:
    shares, _ = parameter_importances(study)
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["density"] < max(shares["math"], shares["code"])


def test_too_few_trials_have_no_importances(tmp_path: Path) -> None:
    few = run_toy(ToyModels(), tmp_path, toy_settings(budget={"trials": 5}))
    shares, reason = parameter_importances(few)
    assert (shares, bool(reason)) == ({}, True)


def test_the_dashboard_is_served_only_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna_dashboard", None)
    with pytest.raises(InvalidInput, match=r"pip install 'mergegate\[dashboard\]'"):
        serve_dashboard(str(tmp_path / "log"))
    served: list[tuple[str, int]] = []
    fake = SimpleNamespace(run_server=lambda storage, host, port: served.append((host, port)))
    monkeypatch.setitem(sys.modules, "optuna_dashboard", fake)
    serve_dashboard(str(tmp_path / "log"), port=8123)
    assert served == [("127.0.0.1", 8123)]


def test_other_hand_written_recipes_are_not_points(tmp_path: Path) -> None:
    linear = [{"model": name, "parameters": {"weight": 1, "density": 1}} for name in ("math", "code")]
    by_hand = (hand_written_ties(toy_space(toy_settings())), HandWritten("other", {**TIES, "models": linear}))
    study = run_toy(ToyModels(), tmp_path / "study", toy_settings(budget={"trials": 12}), hand_written=by_hand)
    assert open_view(str(tmp_path / "log"), "demo", study.coordinates, study.objective)(study.trials) == 11
