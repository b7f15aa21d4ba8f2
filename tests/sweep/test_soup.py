"""A greedy soup follows the rule of Wortsman et al., and keeps only models whose contribution is confirmed."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from benchmark_scripts import load_benchmark
from pydantic import ValidationError
from rich.console import Console
from scipy.stats import binom, ttest_rel

from mergegate.flows.operations.summary import sweep_summary
from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.merge_core.files import RecordJournal
from mergegate.merge_core.recipe import RunCheckpoint, Schedule, run_recipe
from mergegate.tasks import sweep
from mergegate.tasks.release.report import render_sweep, sweep_content

KEY = sweep.MetricKey("task", "entropy")  # a measure without a known range, tested with Student's t
OBJECTIVE = [{"task": "task", "measure": "entropy"}]
Truth = Callable[[frozenset[str]], float]


class DrawnSoups:
    """Scores of soups: a true mean for each set of models, plus noise that each set draws for itself."""

    def __init__(self, truth: Truth, noise: float = 0.0, documents: int = 50, seed: int = 0) -> None:
        self.truth, self.noise, self.documents, self.seed = truth, noise, documents, seed
        self.scored: list[tuple[frozenset[str], str]] = []

    def table(self, request: sweep.TrialRequest) -> dict[sweep.MetricKey, Any]:
        models = frozenset(entry["model"] for entry in request.recipe["models"])
        self.scored.append((models, request.document_set))
        rng = np.random.default_rng([self.seed, *sorted(map(ord, "".join(sorted(models)) + request.document_set))])
        return {KEY: self.truth(models) + self.noise * rng.standard_normal(self.documents)}

    def __call__(self, requests: Sequence[sweep.TrialRequest]) -> Iterator[tuple[int, sweep.TrialScores | Exception]]:
        for number, request in enumerate(requests):
            table = self.table(request)
            problem = "" if np.isfinite(table[KEY]).all() else "it has NaN"
            yield number, sweep.TrialScores({} if problem else table, problem=problem)


def recipe_of(*models: str, **more: Any) -> dict[str, Any]:
    entries = [{"model": name, "parameters": {"weight": 1.0}} for name in models]
    return {"merge_method": "linear", "models": entries, **more}


def problem_of(recipe: dict[str, Any], **settings: Any) -> sweep.SearchProblem:
    parsed = sweep.SweepSettings.model_validate({"soup": "greedy", "objective": OBJECTIVE, **settings})
    soup = sweep.read_soup_recipe(recipe, "r.yaml")
    hand_written = sweep.HandWritten("uniform soup", soup.soup_of(range(len(soup.names))))
    space = sweep.make_space(recipe, parsed, None, "r.yaml")
    return sweep.SearchProblem(
        space, parsed, sweep.make_objective(parsed, {"task": "task"}), (hand_written,), soup=soup
    )


def searched(scorer: DrawnSoups, *models: str, ledger: sweep.Ledger | None = None, **settings: Any) -> sweep.Study:
    problem = problem_of(recipe_of(*models), **settings)
    return sweep.search(problem, scorer, ledger or sweep.Ledger(RecordJournal(None), ""))


def confirmed(study: sweep.Study, scorer: DrawnSoups) -> sweep.Confirmation | sweep.NothingToConfirm:
    return sweep.confirm_soup(
        study, lambda trial: scorer.table(sweep.TrialRequest(study.recipes[trial.number], document_set="confirmation"))
    )


def outcomes(result: sweep.Confirmation | sweep.NothingToConfirm) -> dict[str, str]:
    return {ingredient.ingredient: ingredient.outcome for ingredient in result.soup.ingredients}


def of_sum(**values: float) -> Truth:
    """Return a truth in which each model adds its value to the score, so contributions do not depend on the order."""
    return lambda models: sum(values[model] for model in models)


@pytest.mark.parametrize("seed", range(8))
def test_the_search_follows_the_published_rule(seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = [f"m{i}" for i in range(7)]
    table: dict[frozenset[str], float] = {}
    scorer = DrawnSoups(lambda models: table.setdefault(models, float(rng.normal())))
    study = searched(scorer, *names)
    # Wortsman et al. 2022, recipe 1, written plainly.
    ordered = sorted(names, key=lambda name: -table[frozenset([name])])
    soup = {ordered[0]}
    for name in ordered[1:]:
        if table[frozenset(soup | {name})] >= table[frozenset(soup)]:
            soup.add(name)
    assert [item.ingredient for item in study.soup.ingredients] == ordered
    assert {ordered[position] for position in study.soup.positions} == soup
    assert len(study.trials) <= 1 + 2 * len(names) - 1
    recipe = study.recipes[study.soup_chain[-1]]
    assert recipe == recipe_of(*(name for name in names if name in soup))  # in the order of the user's recipe


def run_soup(
    truth: Truth, *models: str, held_out: Truth | None = None, noise: float = 0.1, **settings: Any
) -> tuple[sweep.Study, Any]:
    """Search and confirm a soup whose models may have other true scores on the held-out documents."""
    study = searched(DrawnSoups(truth, noise), *models, **settings)
    return study, confirmed(study, DrawnSoups(held_out or truth, noise))


def test_models_that_contribute_are_kept_and_the_soup_is_confirmed() -> None:
    truth = of_sum(a=3.0, b=2.0, c=1.0, d=-1.0)
    study, result = run_soup(truth, "d", "b", "a", "c")
    assert result.confirmed
    assert outcomes(result) == {"a": "first", "b": "kept", "c": "kept", "d": "not added"}
    assert study.recipes[result.winner] == recipe_of("b", "a", "c")
    # The contributions add up to the lead over the best model.
    requests = (sweep.TrialRequest(recipe_of(*models), "confirmation") for models in ("bac", "a"))
    soup, best = (DrawnSoups(truth, 0.1).table(request)[KEY].mean() for request in requests)
    contributions = [item.contribution for item in result.soup.ingredients if item.contribution is not None]
    assert math.isclose(sum(contributions), soup - best)


def test_the_tests_stop_at_the_first_model_that_fails() -> None:
    truth = of_sum(a=3.0, b=2.0, c=1.0, d=0.5)
    study = searched(DrawnSoups(truth, noise=0.01), "a", "b", "c", "d")
    # On the confirmation documents, c does not contribute.
    held_out = DrawnSoups(lambda models: truth(models - {"c"}), noise=0.01)
    result = confirmed(study, held_out)
    assert outcomes(result) == {"a": "first", "b": "kept", "c": "removed", "d": "not tested"}
    assert study.recipes[result.winner] == recipe_of("a", "b")
    assert frozenset("abcd") not in {models for models, _ in held_out.scored[:3]}


@pytest.mark.parametrize(("margin", "outcome"), [(0.0, "removed"), (30.0, "kept")])
def test_a_margin_allows_a_drop_of_that_many_points(margin: float, outcome: str) -> None:
    loses_10_points = of_sum(a=3.0, b=-0.1)
    _, result = run_soup(of_sum(a=3.0, b=1.0), "a", "b", held_out=loses_10_points, noise=0.01, margin=margin)
    assert outcomes(result) == {"a": "first", "b": outcome}
    assert not result.confirmed  # a soup that is worse than its best model is never released


def test_the_bound_of_a_contribution_is_that_of_students_test() -> None:
    scorer = DrawnSoups(of_sum(a=1.0, b=0.5), noise=0.3, documents=80)
    result = confirmed(searched(scorer, "a", "b", confidence=0.95), scorer)
    pairs = [scorer.table(sweep.TrialRequest(recipe_of(*models), "confirmation"))[KEY] for models in ("ab", "a")]
    bound = ttest_rel(*pairs).confidence_interval(0.90).low  # two-sided 90 % is one-sided 95 %
    assert math.isclose(result.soup.ingredients[1].low, bound, rel_tol=1e-6)


def test_a_soup_of_all_models_is_the_uniform_soup_and_can_be_confirmed() -> None:
    study, result = run_soup(of_sum(a=3.0, b=2.0), "a", "b")
    assert (result.confirmed, result.winner) == (True, 0)
    assert study.trials[result.reference].label == "a"
    page = render_sweep(sweep_content(study, result, name="soup", method="greedy soup of 2"))
    assert "soup" in page


def test_the_soup_must_beat_the_average_of_all_models() -> None:
    # c helps only on the documents that the search does not read.
    _, result = run_soup(of_sum(a=3.0, b=2.0, c=-1.0), *"abc", held_out=of_sum(a=3.0, b=2.0, c=1.0))
    assert (result.reference_label, result.confirmed) == ("uniform soup", False)


def test_the_uniform_rule_tests_the_average_against_the_best_model() -> None:
    study, result = run_soup(of_sum(a=3.0, b=2.0, c=-0.5), *"abc", soup="uniform")
    assert (result.confirmed, result.reference_label, set(outcomes(result).values())) == (True, "a", {"kept"})
    assert study.recipes[result.winner] == recipe_of("a", "b", "c")


def test_a_soup_that_no_model_improves_has_nothing_to_confirm() -> None:
    _, result = run_soup(of_sum(a=3.0, b=-2.0), "a", "b", noise=0.0)
    assert isinstance(result, sweep.NothingToConfirm)
    assert result.sentence() == "no candidate confirmed: no other model improves a on the search documents"


def test_a_model_without_a_score_is_left_out() -> None:
    _, result = run_soup(lambda models: math.nan if models == {"b"} else of_sum(a=3.0, b=1.0, c=1.0)(models), *"abc")
    assert outcomes(result)["b"] == "no score"
    with pytest.raises(Refused, match="no score for any of 2 models: it has NaN"):
        searched(DrawnSoups(lambda models: math.nan if len(models) == 1 else 0.0), "a", "b")


def test_a_killed_search_continues_and_a_finished_one_scores_nothing(tmp_path: Path) -> None:
    scorer = DrawnSoups(of_sum(a=3.0, b=2.0, c=1.0, d=-1.0), noise=0.5)

    def stopping(requests: Sequence[sweep.TrialRequest]) -> Iterator[tuple[int, sweep.TrialScores | Exception]]:
        for item in scorer(requests):
            if len(scorer.scored) == 7:
                raise KeyboardInterrupt
            yield item

    problem = problem_of(recipe_of("a", "b", "c", "d"))
    with pytest.raises(KeyboardInterrupt), sweep.open_ledger("0" * 64, "s", root=tmp_path) as ledger:
        sweep.search(problem, stopping, ledger)
    with sweep.open_ledger("0" * 64, "s", root=tmp_path) as ledger:
        resumed = sweep.search(problem, scorer, ledger)
    with sweep.open_ledger("0" * 64, "s", root=tmp_path) as ledger:
        again = sweep.search(problem, scorer, ledger)
    fresh = sweep.search(problem, DrawnSoups(scorer.truth, 0.5), sweep.Ledger(RecordJournal(None), ""))
    assert (again.new_count, resumed.soup, again.soup) == (0, fresh.soup, fresh.soup)
    assert len(scorer.scored) == 1 + len(fresh.trials)  # only the interrupted trial is scored twice


# Recipes and settings.


def test_the_window_of_a_training_run_is_a_soup_with_equal_weights() -> None:
    window = [RunCheckpoint(f"step-{step}", step) for step in (100, 200, 300)]
    document = run_recipe({"run": "runs", "dtype": "bfloat16"}, window, Schedule("cosine"), "r.yaml")
    soup = sweep.read_soup_recipe(document, "r.yaml")
    assert not soup.is_uniform
    assert soup.soup_of([0, 2]) == recipe_of("step-100", "step-300", dtype="bfloat16")
    assert sweep.read_soup_recipe(run_recipe({"run": "runs"}, window, Schedule("lawa"), "r.yaml"), "r.yaml").is_uniform


def test_a_soup_keeps_all_other_keys_of_its_recipe() -> None:
    recipe = recipe_of("x/a", "x/b", tokenizer={"source": "union"}, parameters={"normalize": False, "weight": 2.0})
    soup = sweep.read_soup_recipe(recipe, "r.yaml")
    assert (soup.labels, soup.is_uniform) == (("a", "b"), False)
    assert soup.soup_of({1}) == recipe_of("x/b", tokenizer={"source": "union"})


def test_an_ingredient_can_be_a_path_with_a_sign_of_references() -> None:
    window = [RunCheckpoint({"model": {"path": f"lr@1/step-{step}"}}, step) for step in (100, 200)]
    soup = sweep.read_soup_recipe(run_recipe({"run": "runs"}, window, Schedule("mean"), "r.yaml"), "r.yaml")
    assert soup.labels == ("step-100", "step-200")


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (recipe_of("a", "b", merge_method="ties"), "merge_method: 'ties' in the recipe of a soup"),
        (recipe_of("a"), "models: 1 models"),
        ({"merge_method": "linear", "models": 5}, "models: an entry without 'model'"),
        (recipe_of("a", "b", parameters=[1]), r"parameters: \[1\]"),
        ({"merge_method": "linear", "models": [{"model": "a", "parameters": 1}, {"model": "b"}]}, "parameters: 1"),
        (recipe_of("a", "b", "a"), "models: a twice"),
        ({"merge_method": "linear", "slices": []}, "models: 0 models"),
        (recipe_of("a", "$other"), r"the placeholder \$other in the recipe of a soup"),
        ({"merge_method": "linear", "models": ["a", "b"]}, "models: an entry without 'model'"),
        ({"merge_method": "linear", "models": "a"}, "models"),
    ],
)
def test_a_recipe_that_is_not_a_soup_is_refused(recipe: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        sweep.read_soup_recipe(recipe, "r.yaml")


def test_every_setting_of_a_search_over_parameters_is_refused_with_a_soup() -> None:
    values: dict[str, Any] = {"parameters": {"w": {"low": 0, "high": 1, "start": 0.5}}, "sum_to_one": [["a", "b"]]}
    values |= {"multi_objective": True, "change_penalty": 0.1, "constraints": [{"task": "t"}], "sampler": "random"}
    values |= {"seed": 3, "population": 4, "sigma": 0.5, "random_trials": 3, "budget": {"trials": 5}}
    values |= {"racing": {"rule": "none"}, "optuna_storage": "x"}
    others = {"soup", "margin", "objective", "documents", "confidence", "baselines"}
    assert values.keys() | others == sweep.SweepSettings.model_fields.keys()
    for name, value in values.items():
        with pytest.raises(ValidationError, match=f"'{name}' cannot be combined with 'soup'"):
            sweep.SweepSettings.model_validate({"soup": "greedy", "objective": OBJECTIVE, name: value})
    with pytest.raises(ValidationError, match="'margin' requires 'soup: greedy'"):
        sweep.SweepSettings.model_validate({"soup": "uniform", "objective": OBJECTIVE, "margin": 1})
    with pytest.raises(ValidationError, match="nothing to search"):
        sweep.SweepSettings.model_validate({"objective": OBJECTIVE})


# Error rate. ``benchmarks/soup_simulation.py`` has the full table.


@pytest.fixture(scope="module")
def simulation() -> ModuleType:
    return load_benchmark("soup_simulation")


@pytest.mark.proof
def test_false_inclusions_are_as_rare_as_stated(simulation: ModuleType) -> None:
    """At the confidence 0.9, at most one soup in ten has a false inclusion. Most plain greedy soups have one."""
    soups = 300
    found = simulation.run(simulation.SCENARIOS["useless, exact match"], soups, confidence=0.9)
    assert sum(bool(one.false) for one in found) <= binom.ppf(0.999, soups, 0.1)
    assert sum(bool(one.greedy_false) for one in found) > soups / 2
    assert sum(one.is_wrong for one in found) <= binom.ppf(0.999, soups, 0.1)


@pytest.mark.story
def test_useful_models_are_kept(simulation: ModuleType) -> None:
    found = simulation.run(simulation.SCENARIOS["mixed, log-likelihood"], 8)
    assert sum(one.is_confirmed for one in found) >= 5
    assert np.mean([one.lead for one in found]) > 0.7 * np.mean([one.greedy_lead for one in found])


# Terminal and page.


def shown(study: sweep.Study, result: sweep.Confirmation | sweep.NothingToConfirm, width: int) -> str:
    content = sweep_content(study, result, name="soup", method="greedy soup of 4")
    console = Console(file=io.StringIO(), width=width)
    for piece in sweep_summary(content):
        console.print(piece)
    text = str(console.file.getvalue())  # type: ignore[attr-defined]
    page = render_sweep(content)
    for ingredient, outcome in outcomes(result).items():
        assert ingredient in page
        assert outcome in page
        assert outcome in text
    assert not [word for word in ("CMA-ES", "Racing", "Parameter", "best hand-written") if word in page]
    return text


@pytest.mark.parametrize("width", [120, 80, 60])
def test_the_summary_names_every_model_and_its_result(width: int) -> None:
    truth = of_sum(alpha=3.0, beta=2.0, gamma=1.0, delta=-1.0)
    text = shown(*run_soup(truth, "alpha", "beta", "gamma", "delta"), width)
    assert "The soup has 3 of 4 models." in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


def test_the_summary_of_a_soup_that_is_not_confirmed_names_the_reason() -> None:
    text = shown(*run_soup(of_sum(a=3.0, b=1.0), "a", "b", held_out=of_sum(a=3.0, b=-1.0)), 80)
    assert "No other model is shown to improve a on the held-out documents." in " ".join(text.split())


def test_a_trial_of_the_confirmation_is_scored_once() -> None:
    scorer = DrawnSoups(of_sum(a=3.0, b=2.0, c=1.0), noise=0.1)
    study = searched(scorer, "a", "b", "c")
    calls: list[int] = []

    def score(trial: sweep.Trial) -> dict[sweep.MetricKey, Any]:
        calls.append(trial.number)
        return scorer.table(sweep.TrialRequest(study.recipes[trial.number], "confirmation"))

    sweep.confirm_soup(study, score)
    assert len(calls) == len(set(calls)) == 3
