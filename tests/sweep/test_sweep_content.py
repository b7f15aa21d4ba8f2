"""Test how a finished search becomes report content: parameters, trials, confirmation and cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml
from toy_search import ToyModels, run_toy

from mergegate.tasks.release.report import render_sweep, sweep_content, sweep_sentence, sweep_table, sweep_title
from mergegate.tasks.release.report.sweep import SweepContent, recipe_rows
from mergegate.tasks.release.report.sweep_page import set_rows
from mergegate.tasks.sweep import ConfirmationPower, Study
from mergegate.tasks.sweep.confirmation import Confirmation, confirm, reason_not_to_confirm
from mergegate.tasks.sweep.study import TrialRequest

SIZES = {"search": {"rev": 200, "copy": 200}, "confirmation": {"rev": 400, "copy": 400}}

FACTS = {"name": "toy", "method": "ties of 2"}
POWER = ConfirmationPower(documents=800, detectable=0.05, chances=(), confidence=0.95, correlation=0.6, in_points=True)


def confirmed_by_toy(study: Study, models: ToyModels) -> Confirmation:
    fresh = ToyModels(models._quality, documents=400, seed=1)
    winner, reference = (
        fresh.score_table(TrialRequest(study.recipes[one.number])) for one in (study.best, study.reference)
    )
    return confirm(study, winner, reference)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return run_toy(ToyModels(), tmp_path_factory.mktemp("ledger"))


@pytest.fixture(scope="module")
def content(study: Study) -> SweepContent:
    return sweep_content(study, confirmed_by_toy(study, ToyModels()), **FACTS, power=POWER, sizes=SIZES)


def test_the_content_has_every_parameter_trial_objective_and_set(study: Study, content: SweepContent) -> None:
    assert content.parameters == study.coordinates
    assert content.trials == study.trials
    assert set_rows(content) == (("rev", "200", "400", "all others"), ("copy", "200", "400", "all others"))
    assert content.budget.trials == 40
    assert content.seconds.keys() <= {"merge", "load", "score"}
    (objective,) = content.objectives
    assert (objective.title, objective.unit, objective.factor) == ("exact match", "points", 100)
    assert objective.terms == ("rev (weight 0.67)", "copy (weight 0.33)")
    forecast = "Forecast before the sweep: 800 held-out documents confirm a true lead of 5.0 points 80 % of the time"
    assert forecast in render_sweep(content)


def test_the_table_has_the_scores_of_search_and_confirmation(study: Study, content: SweepContent) -> None:
    test = confirmed_by_toy(study, ToyModels())
    rows = {row.role: row for row in recipe_rows(content, 0)}
    assert rows["winner"].search == study.best.scores[0]
    assert rows["winner"].held_out == pytest.approx(test.held_out)
    assert rows["reference"].held_out == pytest.approx(test.held_out_reference)
    assert rows["winner"].held_out - rows["reference"].held_out == pytest.approx(test.gain)


def test_the_change_penalty_is_subtracted_from_both_scores(study: Study) -> None:
    """Otherwise the difference between the two scores would be the penalty instead of the optimism."""
    test = confirmed_by_toy(study, ToyModels())
    penalised = tuple(replace(one, scores=(one.scores[0] - 0.25,)) for one in study.trials)
    best = penalised[study.best.number]
    shown = sweep_content(replace(study, trials=penalised, best=best), test, **FACTS)
    rows = {row.role: row for row in recipe_rows(shown, 0)}
    assert rows["winner"].optimism == pytest.approx(test.optimism)


def test_the_page_shows_the_recipe_of_a_confirmed_winner(study: Study, content: SweepContent) -> None:
    assert content.confirmation.confirmed
    assert yaml.safe_load(content.recipe) == study.recipes[study.best.number]
    page = render_sweep(content)
    assert "exact match" in page
    assert "all others" in page
    assert sweep_table(content).rows[-1].cells[-1] == "confirmed"


def test_the_page_shows_why_there_is_nothing_to_confirm(study: Study) -> None:
    level = replace(study, best=replace(study.reference, number=7, origin="sampler"))
    nothing = reason_not_to_confirm(level)
    shown = sweep_content(level, nothing, **FACTS)
    assert sweep_title(shown) == "No candidate confirmed"
    assert "No candidate scored above ties on the search documents." in sweep_sentence(shown)
    assert shown.recipe == ""


def test_the_page_shows_that_the_time_limit_ended_the_search(study: Study) -> None:
    test = confirmed_by_toy(study, ToyModels())
    shown = sweep_content(replace(study, stop_reason="hours"), test, **FACTS)
    assert shown.ending == "The time budget ended the search after 40 of 40 trials."
