"""Test the Optuna view of a study: it can be rewritten at any time and feeds importances and the dashboard."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from spaces import TIES
from toy_search import ToyModels, run_toy, toy_settings, toy_space

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.sweep.optuna_view import open_view, parameter_importances, serve_dashboard, view_storage
from mergegate.tasks.sweep.search import hand_written_recipes
from mergegate.tasks.sweep.study import HandWritten, Study

optuna = pytest.importorskip("optuna")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return run_toy(ToyModels(), tmp_path_factory.mktemp("study"), toy_settings(budget={"trials": 60}))


def test_the_view_has_every_trial_once_however_often_it_is_written(study: Study, tmp_path: Path) -> None:
    place = str(tmp_path / "deeper" / "study.log")
    first = open_view(place, "demo", study.coordinates, study.objective)
    assert first.record(study.trials[:20]) == 20
    again = open_view(place, "demo", study.coordinates, study.objective)
    assert again.record(study.trials) == 40
    assert again.record(study.trials) == 0
    read = optuna.load_study(study_name="demo", storage=view_storage(place))
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
    found = run_toy(ToyModels(), tmp_path / "study", settings)
    view = open_view(str(tmp_path / "log"), "demo", found.coordinates, found.objective)
    assert view.record(found.trials) == 20
    read = optuna.load_study(study_name="demo", storage=view_storage(str(tmp_path / "log")))
    assert [max(trial.constraints.values()) for trial in read.trials] == [trial.violation for trial in found.trials]


def test_another_kind_of_study_of_that_name_is_refused(study: Study, tmp_path: Path) -> None:
    place = str(tmp_path / "log")
    optuna.create_study(study_name="demo", storage=view_storage(place), directions=["maximize", "maximize"])
    with pytest.raises(InvalidInput, match="2 objectives"):
        open_view(place, "demo", study.coordinates, study.objective)


def test_a_database_that_is_not_there_is_said_without_its_password(study: Study) -> None:
    with pytest.raises(InvalidInput, match="cannot be used") as caught:
        open_view("postgresql+nodriver://me:secret@nowhere/studies", "demo", study.coordinates, study.objective)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("evaluator", ["ped_anova", "fanova"])
def test_what_decides_is_said_to_be_important(evaluator: str, study: Study) -> None:
    found = parameter_importances(study, evaluator)  # type: ignore[arg-type]
    assert sum(found.shares.values()) == pytest.approx(1)
    assert found.shares["density"] < max(found.shares["math"], found.shares["code"])
    assert found.trials == 60


def test_of_few_trials_nothing_is_said(tmp_path: Path) -> None:
    few = run_toy(ToyModels(), tmp_path, toy_settings(budget={"trials": 5}))
    assert parameter_importances(few).why_none
    assert not parameter_importances(few).shares


def test_the_dashboard_is_for_this_machine_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna_dashboard", None)
    with pytest.raises(InvalidInput, match=r"pip install mergegate\[dashboard\]"):
        serve_dashboard(str(tmp_path / "log"))
    served: list[tuple[str, int]] = []
    fake = SimpleNamespace(run_server=lambda storage, host, port: served.append((host, port)))
    monkeypatch.setitem(sys.modules, "optuna_dashboard", fake)
    serve_dashboard(str(tmp_path / "log"), port=8123)
    assert served == [("127.0.0.1", 8123)]


def test_recipes_that_were_written_otherwise_are_no_points(tmp_path: Path) -> None:

    linear = [{"model": name, "parameters": {"weight": 1, "density": 1}} for name in ("math", "code")]
    by_hand = (
        *hand_written_recipes(toy_space(toy_settings()), "ties"),
        HandWritten("other", {**TIES, "models": linear}),
    )
    study = run_toy(ToyModels(), tmp_path / "study", toy_settings(budget={"trials": 12}), hand_written=by_hand)
    assert open_view(str(tmp_path / "log"), "demo", study.coordinates, study.objective).record(study.trials) == 11
