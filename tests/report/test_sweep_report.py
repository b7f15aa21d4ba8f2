"""Test the report of a sweep: the page states the verdict first, shows every trial and guesses nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import sweep_samples as samples
from builders.results import update
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import HOSTILE, Page, empty_plots, text_of
from samples import sampled

from mergegate.tasks.release.report import render_sweep, search_line, sweep_table
from mergegate.tasks.release.report import sweep as facts
from mergegate.tasks.release.report import sweep_page as wording
from mergegate.tasks.release.report.sweep import SweepContent
from mergegate.tasks.release.report.sweep_plots import score_axis, share_of
from mergegate.tasks.sweep import Coordinate, SearchProgress, Trial

MINUS = "\N{MINUS SIGN}"
LEAD = "over the hand-written recipe ties.yaml"


@cache
def page_of_sweep(name: str) -> str:
    return render_sweep(samples.EVERY[name]())


@cache
def text_of_sweep(name: str) -> str:
    with empty_plots():
        return text_of(render_sweep(samples.EVERY[name]()))


@pytest.fixture(params=sampled(samples.EVERY, ["confirmed", "lonely"]))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.story
def test_the_sweep_page_is_well_formed_and_all_references_resolve(name: str) -> None:
    page = Page(page_of_sweep(name))
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    styles = " ".join(page.attributes("clip-path") + page.attributes("style"))
    assert all(href.startswith("#") for href in page.attributes("href"))
    targets = page.inner_links + re.findall(r"url\(#([^)]+)\)", styles)
    assert set(targets) <= set(ids)


def test_the_sweep_page_has_no_scripts_or_external_resources(name: str) -> None:
    html = page_of_sweep(name)
    assert Page(html).tags.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "image"})
    assert "http://" not in html
    assert "https://" not in html
    assert re.search(r"@import|url\((?!#)", html) is None


def test_plots_use_only_colors_of_the_page(name: str) -> None:
    """Plots use only the page's color variables, so they are readable in light mode, in dark mode and on paper."""
    plots = " ".join(re.findall(r"<svg.*?</svg>", page_of_sweep(name), re.DOTALL))
    assert re.findall(r"#[0-9a-f]{6}", plots) == []
    style = re.search(r"<style>(.*?)</style>", page_of_sweep(name), re.DOTALL)
    assert style is not None
    for variable in set(re.findall(r"var\(--([a-z]+)\)", plots)):
        assert style[1].count(f"--{variable}:") == 3, variable


@pytest.mark.story
def test_the_same_sweep_gives_the_same_bytes() -> None:
    assert render_sweep(samples.unconfirmed()) == page_of_sweep("not confirmed")


@pytest.mark.parametrize("make", [samples.several, samples.failing], ids=["front", "with NaN"])
def test_a_sweep_survives_json(make: Callable[[], SweepContent]) -> None:
    text = make().model_dump_json()
    assert "NaN" not in re.sub(r'"[^"]*"', "", text)  # outside strings, NaN is not valid JSON
    assert SweepContent.model_validate_json(text).model_dump_json() == text


@pytest.mark.story
def test_untrusted_names_are_escaped() -> None:
    content = samples.stopped()
    parameters = tuple(replace(one, parameter=f"{one.name}{HOSTILE}") for one in content.parameters)
    trials = tuple(
        replace(one, label=HOSTILE, problem=HOSTILE if one.number == 3 else "", point={HOSTILE: 1.0})
        for one in content.trials
    )
    names = dict.fromkeys(("name", "method", "recipe"), HOSTILE)
    page = Page(render_sweep(update(content, parameters=parameters, trials=trials, **names)))
    assert "script" not in page.tags
    assert "<script>" in page.text


@pytest.mark.parametrize(
    ("name", "title", "told"),
    [
        ("confirmed", "Confirmed", f"{LEAD} is 0.0016 nats per token [0.0010, 0.0022], p < 1e{MINUS}6."),
        ("not confirmed", "No candidate confirmed", f"is 0.2 points [{MINUS}1.0, 1.5]"),
        ("stopped", "Not finished", "It was stopped after 7 of 62 trials."),
        ("lonely", "No candidate confirmed", "1 candidate was tried. It has no score."),
    ],
)
def test_the_verdict_comes_first_in_one_sentence_with_numbers(name: str, title: str, told: str) -> None:
    text = text_of_sweep(name)
    assert text.index(title) < text.index(told)
    assert text.index(told) < text.index("Scores on search and held-out documents")


def test_a_winner_that_is_worse_on_fresh_documents_has_a_negative_lead() -> None:
    content = samples.unconfirmed()
    turned = samples.confirmation(-0.01, -0.022, 0.002, 0.93, 400)
    assert f"is {MINUS}1.0 points [{MINUS}2.2, 0.2]" in wording.sweep_sentence(update(content, confirmation=turned))


def test_each_recipe_row_has_both_scores_and_their_difference() -> None:
    drawn = sweep_table(samples.confirmed())
    assert drawn.columns == ("recipe", "search", "held-out", "optimism", "result")
    by_name = {row.cells[0]: row.cells[1:] for row in drawn.rows}
    assert by_name["ties.yaml"] == (f"{MINUS}0.0072", f"{MINUS}0.0071", f"{MINUS}0.0001", "best hand-written")
    winner = by_name["winner, trial 59"]
    assert winner == (f"{MINUS}0.0053", f"{MINUS}0.0055", "+0.0002", "confirmed")
    assert [row.cells[0] for row in drawn.rows] == ["ties.yaml", "linear.yaml", "random search", "winner, trial 59"]


def test_an_unmeasured_score_is_a_dash() -> None:
    (best,) = (row.cells for row in sweep_table(samples.by_layer()).rows if row.cells[0] == "random search")
    assert best[2:4] == ("\N{EN DASH}", "\N{EN DASH}")


@pytest.mark.parametrize(
    ("held_out", "said"),
    [
        (0.955, "None of the lead on the search documents is optimism."),
        (0.935, "67 % of the lead on the search documents is optimism."),
        (0.9, "All of the lead on the search documents is optimism."),
    ],
)
def test_the_share_of_optimism_in_the_lead_is_shown(held_out: float, said: str) -> None:
    """The reference scores 92.5 on both the search set and the held-out set. The winner leads by 3 points in search."""
    content = samples.unconfirmed()
    scores = {0: 0.925, content.winner: 0.955}
    trials = tuple(replace(one, scores=(scores.get(one.number, 0.9),)) for one in content.trials)
    unseen = samples.held_out({0: 0.925, content.winner: held_out})
    told = wording.optimism_sentence(update(content, held_out=unseen, trials=trials), 0)
    assert said in told
    assert "+3.0 points" in told


def test_failed_dropped_and_infeasible_trials_are_counted_and_named() -> None:
    text = text_of_sweep("failing")
    assert "3 violate a constraint, 4 have no score" in text
    assert "trials 9, 17 and 33: the merge has NaN in model.layers.0.mlp" in text
    assert "trial 21: density 0 keeps nothing of reverser" in text


def test_the_risk_and_the_saving_of_racing_are_shown() -> None:
    text = text_of_sweep("confirmed")
    assert "after 12.5, 25, 50 % of the documents if a paired test shows" in text
    assert "The chance that this drops a candidate that is not worse is at most 5 %." in text
    asked = [one.documents for one in samples.confirmed().trials if one.origin != "hand-written"]
    assert f"On average, a candidate was scored on {100 * sum(asked) / len(asked):.0f} % of the documents." in text


def test_a_trial_without_a_score_cannot_win_or_raise_the_best() -> None:
    failed = Trial(1, 0, "sampler", "", {}, (math.nan,), problem="NaN")
    infeasible = Trial(2, 0, "sampler", "", {}, (0.99,), violation=0.5)
    dropped = Trial(3, 0, "sampler", "", {}, (0.98,), dropped=True, documents=0.25)
    good = Trial(4, 0, "sampler", "", {}, (0.5,))
    best = facts.best_so_far((failed, infeasible, dropped, good), 0)
    assert [math.isnan(score) for score in best] == [True, True, True, False]
    assert best[-1] == 0.5
    baseline = tuple(replace(trial, origin="baseline") for trial in (failed, infeasible, dropped, good))
    content = update(samples.confirmed(), trials=baseline, winner=None)
    assert [row.trial for row in facts.recipe_rows(content, 0)] == [good.number]


@given(st.lists(st.floats(-10, 10) | st.just(math.nan), max_size=30))
def test_the_best_so_far_is_the_running_maximum(scores: list[float]) -> None:
    trials = tuple(Trial(at, 0, "sampler", "", {}, (score,)) for at, score in enumerate(scores))
    for at, best in enumerate(facts.best_so_far(trials, 0), start=1):
        seen = [score for score in scores[:at] if not math.isnan(score)]
        assert best == max(seen) if seen else math.isnan(best)


@pytest.mark.story
def test_equal_scores_still_give_a_page() -> None:
    content = samples.unconfirmed()
    trials = tuple(replace(trial, scores=tuple(1.0 for _ in trial.scores)) for trial in content.trials)
    page = render_sweep(update(content, trials=trials, held_out={}, confirmation=None))
    assert "no candidate confirmed" in text_of(page)


@pytest.mark.story
def test_many_parameters_are_lines_instead_of_slices() -> None:
    page = Page(page_of_sweep("by layer"))
    classes = " ".join(page.attributes("class"))
    assert "parallel-0-wide" in classes
    assert "slices-0-wide" not in classes
    for parameter in samples.by_layer().parameters:
        assert parameter.name in page.text


def test_missing_parts_are_reported() -> None:
    assert "There are no importances: optuna is not installed" in text_of_sweep("by layer")
    lonely = text_of_sweep("lonely")
    assert "The chart needs at least two candidates." in lonely
    assert "No recipe has a score yet." in lonely
    assert "rough estimate" in text_of_sweep("confirmed")


@pytest.mark.story
def test_a_front_is_drawn_and_sorted_by_the_first_objective() -> None:
    content = samples.several()
    html = page_of_sweep("front")
    assert "front-wide" in " ".join(Page(html).attributes("class"))
    table = html.partition('<table class="front">')[2].partition("</table>")[0]
    listed = [int(number) for number in re.findall(r'<th scope="row">(\d+)', table)]
    assert sorted(listed) == sorted(content.front)
    first = [content.trials[number].scores[0] for number in listed]
    assert first == sorted(first, reverse=True)


def test_document_sets_recipe_and_commands_are_on_the_page() -> None:
    text, cells = text_of_sweep("confirmed"), " ".join(Page(page_of_sweep("confirmed")).texts["td"])
    assert "100 400 1,000" in cells
    assert "base_model: ../models/base" in text
    assert "mergegate sweep profiles/demo-sweep.yaml" in text
    assert "10.1 s 30 m 00 s" in cells
    assert "0.0034 2.00" in cells


def test_outliers_do_not_compress_the_axis_and_the_reference_stays_visible() -> None:
    axis = score_axis(samples.failing(), 0)
    assert axis.low > -0.05  # one trial scores -3.2
    assert axis.low < -0.0072 < axis.high


@pytest.mark.parametrize(
    ("parameter", "value", "share"),
    [
        (samples.parameter("a", 0.5, 1.5), 1.0, 0.5),
        (samples.parameter("a", 0.01, 1.0, type="log"), 0.1, 0.5),
        (samples.parameter("a", 1, 5, type="integer"), 2, 0.25),
        (samples.parameter("a", type="category", choices=("x", "y")), "y", 0.75),
        (samples.parameter("a", type="category", choices=("x", "y")), "z", math.nan),
        (samples.parameter("a", type="category", choices=(1, True)), True, 0.75),
        (samples.parameter("a", 1, 1), 1.0, 0.5),
        (samples.parameter("a"), None, math.nan),
    ],
)
def test_a_value_has_a_position_in_its_range(
    parameter: Coordinate, value: bool | float | str | None, share: float
) -> None:
    assert share_of(parameter, value) == pytest.approx(share, nan_ok=True)


@pytest.mark.parametrize(
    ("p", "text"), [(0.42, "p = 0.42"), (0.0312, "p = 0.031"), (3.2e-5, f"p = 3e{MINUS}5"), (1e-6, f"p < 1e{MINUS}6")]
)
def test_a_p_value_has_sensible_digits(p: float, text: str) -> None:
    assert wording.p_text(p) == text


@given(st.floats(1e-7, 0.3), st.floats(-0.3, 0.3), st.sampled_from([1.0, 100.0]))
@settings(max_examples=60)
def test_an_interval_beside_zero_is_never_rounded_onto_zero(half: float, gain: float, factor: float) -> None:
    """This holds for every bound that is not too small to show with the most decimals allowed."""
    content = samples.lonely()
    test = samples.confirmation(gain, gain - half, gain + half, 0.01, 1200)
    objective = update(content.objectives[0], factor=factor)
    decimals = facts.decimals_for(update(content, confirmation=test, objectives=(objective,)), 0)
    most = 3 if factor == 100 else 6
    assert 1 <= decimals <= most
    for end in (factor * test.low, factor * test.high):
        if abs(end) > 10.0**-most:
            assert float(f"{end:.{decimals}f}") != 0


def test_the_progress_line_of_a_search() -> None:
    progress = SearchProgress(37, 60, generation=4, best=-0.00491, hand_written=-0.0072, seconds_left=41)
    line = f"trial 37 of 60 · best {MINUS}0.0049 (hand-written {MINUS}0.0072) · about 40 s left"
    assert search_line(progress) == line
    assert search_line(progress, len(line)) == line
    assert search_line(progress, len(line) - 1) == line.removesuffix(" · about 40 s left")
    assert search_line(progress, 30) == f"37/60 · best {MINUS}0.0049"
    assert search_line(SearchProgress(0, 60, generation=0)) == "trial 0 of 60"


@given(st.integers(1, 140), st.floats(-5, 5) | st.just(math.nan) | st.none(), st.floats(-5, 5) | st.none())
def test_the_progress_line_fits_any_width(width: int, best: float | None, other: float | None) -> None:
    progress = SearchProgress(37, 60, generation=4, best=best, hand_written=other, seconds_left=4000)
    line = search_line(progress, width)
    assert len(line) <= width
    assert line.startswith("trial 37 of 60"[:width]) or line.startswith("37/60"[:width])
