"""Test the report of an explained refusal: remedies tried, scores lost, conflicting weights and what to try next."""

from __future__ import annotations

import re

import pytest
import report_samples as samples
from builders.results import likelihoods, sha, update
from pages import sketch_of, text_of

from mergegate.merge_core.analysis.interference import Interference
from mergegate.tasks.merge import RepairedRouting, RouterDistance
from mergegate.tasks.quality.gate.sequential import InterimLook
from mergegate.tasks.release.explain import Remedy
from mergegate.tasks.release.explain.stage import Explanation
from mergegate.tasks.release.report import explanation_text
from mergegate.tasks.release.report.content import ReportContent
from mergegate.tasks.release.report.plots import heat_map_caption, interference_plot, layer_table
from mergegate.tasks.release.report.table_rows import as_markdown
from mergegate.tasks.release.report.wording import NONE


@pytest.fixture(scope="module")
def page() -> str:
    return text_of(sketch_of(samples.explained()))


@pytest.mark.story
def test_sections_follow_a_fixed_order() -> None:
    assert re.findall(r"<h2>(.*?)</h2>", sketch_of(samples.explained())) == [
        "Attempts", "Guards", "What to try", "Samples", "Scores", "Perplexity", "Judged answers", "Weights",
        "Merged models", "License", "Reproduce", "How to read this page",
    ]  # fmt: skip


def test_every_attempt_shows_its_change_and_its_worst_reason(page: str) -> None:
    assert "1. linear of 2 recipe of the profile ✗ fail reversing falls 31.2 points" in page
    assert "2. ties of 2 over base merge_method: ties, density: 0.3 ✗ fail reversing falls 14.4" in page


def test_lost_documents_are_shown_with_question_and_answer(page: str) -> None:
    assert "reversing 75 lost, 3 won against reverser Lost: 2 of 75" in page
    assert "reverse: kidnap > expected pandik reverser pandik merge <pandki> Document 17:" in page
    assert "reverser scores 1, the merge 0." in page
    assert "Document 231: reverser scores 1, the merge 0. Its text is no longer available." in page
    assert "Won: 1 of 3 reverse: otter > expected retto reverser rett merge rett o Document 4:" in page


def with_explanation(**fields: object) -> ReportContent:
    return update(samples.explained(), explanation=update(samples.explanation(), **fields))


def test_router_distances_of_mixtures_are_shown() -> None:
    one = RouterDistance(
        model="org/other", layers=24, experts=64, moved=3, diagonal=0.4, best=0.99, routers=0.412, distance=0.25
    )
    text = text_of(sketch_of(update(samples.explained(), experts=(one,))))
    assert "org/other: its experts have a mean cosine of 0.400 with the experts of the donor" in text
    assert "In the best order the cosine is 0.990, and that order differs in 3 of 24 layers." in text
    assert "Its merged routers have a cosine of 0.412 and differ by up to 25 %." in text


def test_the_effect_of_a_router_repair_is_shown() -> None:
    routing = RepairedRouting(layers=24, new_layers=23, divergence=(0.0251, 0.0073), agreement=(0.871, 0.94))
    text = text_of(sketch_of(update(samples.explained(), routers=routing)))
    assert "23 of 24 layers have a new router." in text
    assert "selected 87.1 % of the experts that the parents select, and now selects 94.0 %." in text
    assert "was 0.0251 nats and is now 0.0073 nats." in text
    assert "routers" not in samples.explained().model_dump()


def test_document_text_is_escaped() -> None:
    (lost,) = samples.explanation().lost
    hostile = update(lost.flips.examples[0], prompt="<script>alert(1)</script>", target="</pre><b>")
    html = sketch_of(with_explanation(lost=(update(lost, flips=update(lost.flips, examples=(hostile,))),)))
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html


def test_remedies_can_be_copied_into_a_profile(page: str) -> None:
    assert "44 % of the weights" in page
    assert "remedies: - {merge_method: ties, density: 0.3}" in page
    change = "+ parameters.lambda: 0.7 YAML for the profile remedies: - {lambda: 0.7}"
    assert f"Perplexity rose over the limit. {change}" in page


def test_advice_about_the_profile_is_not_shown_as_a_change_of_the_recipe() -> None:
    documents = Remedy(change={"evaluate": {"extend": True}}, reason="More documents would decide.", kind="profile")
    text = text_of(sketch_of(with_explanation(remedies=(documents,))))
    assert "Next: Set the change under “What to try” in the profile, then run again." in text
    assert "More documents would decide. YAML for the profile evaluate: extend: true" in text
    assert "+ evaluate" not in text
    assert "--remedy auto" not in text


def test_a_diff_of_recipes_has_only_the_changed_settings() -> None:
    before = {"merge_method": "linear", "models": [{"model": "a"}, {"model": "b"}], "dtype": "float32"}
    after = {**before, "merge_method": "ties", "parameters": {"lambda": 0.22}}
    assert explanation_text.recipe_diff(before, after) == (
        "- merge_method: linear",
        "+ merge_method: ties",
        "+ parameters.lambda: 0.22",
    )
    assert explanation_text.recipe_diff(before, before) == ()
    assert explanation_text.recipe_diff(None, after) == ()


def test_the_judge_is_reported_with_interval_consistency_and_length(page: str) -> None:
    assert "win rate 53.8 % [46.1, 61.4]" in page
    assert "Won, tied, lost 31, 24, 25" in page
    assert "Same judgment in both orders 84 %" in page
    assert "1.07 times reverser" in page


def test_the_ensemble_is_shown_with_the_kept_share_of_its_gain() -> None:
    content = samples.explained()
    html = sketch_of(content)
    # The share is ln(3.402 / 3.51) / ln(3.402 / 3.2), which is negative: the merge lost where the ensemble gained.
    assert "The merge keeps none of this gain" in text_of(html)
    assert "ensemble of the parents 3.200" in text_of(html)
    *parents, merge = content.models
    better = update(content, models=(*parents, update(merge, likelihoods=likelihoods(3.3))))
    assert "The merge keeps 50 % of this gain" in text_of(sketch_of(better))


def test_artifacts_are_named_by_their_keys(page: str) -> None:
    assert sha("key of the merge") in page.replace(" ", "")


def test_weights_are_explained_in_sentences() -> None:
    found = " ".join(explanation_text.why(samples.explanation()))
    assert found.startswith("The merge moved 0.68 times as far from base as sorter, the parent that moved farthest.")
    assert "Unrelated parents would have 50 %." in found
    share = r"\(\d\d %\)"
    assert re.search(f"It is highest in layers 3 {share}, 2 {share} and 1 {share} and lowest in layer 0", found)
    assert "2 tensors are not compared: of another shape in some model (model.extra.weight)." in found


def test_the_most_conflicting_pair_of_parents_is_named() -> None:
    found = " ".join(explanation_text.why(samples.explanation(names=("a", "b", "c"))))
    assert "b and c conflict most" in found


def test_layers_with_similar_conflicts_are_not_ranked() -> None:
    groups = samples.interference()
    even = update(groups, spots=tuple(update(spot, tally=samples.tally(0.4, 2, 0.01)) for spot in groups.spots))
    found = " ".join(explanation_text.why(update(samples.explanation(), interference=even)))
    assert "All 4 layers have about the same sign conflict." in found


def test_a_recipe_without_base_names_the_origin_of_task_vectors() -> None:
    plain = update(samples.explanation(names=("sorter",)), origin="reverser", origin_is_base=False)
    found = " ".join(explanation_text.why(plain))
    assert "The recipe has no base, so mergegate measures task vectors from its first model, reverser." in found
    assert "opposite" not in found
    assert heat_map_caption(plain).startswith("Distance between the parents")


def test_incomparable_weights_are_reported() -> None:
    found = text_of(sketch_of(with_explanation(interference=None)))
    assert "The weights of these models could not be compared." in found
    assert "Cosine with" not in found


def cells_of(svg: str) -> dict[float, list[float]]:
    """Return the opacities of each row's cells, by the row's distance from the top. The color scale comes first."""
    found: dict[float, list[float]] = {}
    for path, style in re.findall(r'<path d="M ([^"]*)"[^>]*style="([^"]*var\(--fail\)[^"]*)"', svg):
        top = min(float(y) for y in re.findall(r"[\d.]+ ([\d.]+)", path))
        opacity = re.search(r"(?<!fill-)opacity: ([\d.]+)", style)
        assert opacity is not None
        found.setdefault(top, []).append(float(opacity[1]))
    return dict(sorted(found.items()))


@pytest.mark.story
def test_the_heat_map_colors_each_layer_and_kind_by_conflict() -> None:
    wide, narrow = interference_plot(samples.explained())
    conflicts = [spot.tally.conflict for spot in samples.interference().spots]
    for svg in (wide, narrow):
        scale, *rows = cells_of(svg).values()
        assert scale == sorted(scale)
        assert [len(row) for row in rows] == [1, 8, 8, 8, 8, 1, 1]
        drawn = [opacity for row in rows for opacity in row]
        assert sorted(range(35), key=drawn.__getitem__) == sorted(range(35), key=conflicts.__getitem__)
    numbers = re.findall(r">(\d+)</text>", wide)
    assert numbers == [f"{100 * conflict:.0f}" for conflict in conflicts if conflict is not None]
    assert re.findall(r">(layer \d|embedding|final norm|head)</text>", wide) == [
        "embedding", "layer 0", "layer 1", "layer 2", "layer 3", "final norm", "head",
    ]  # fmt: skip


def test_the_heat_map_of_a_deep_network_groups_layers_and_a_table_has_them_all() -> None:
    explanation = samples.explanation(layers=80)
    wide, _ = interference_plot(update(samples.explained(), explanation=explanation))
    assert [len(row) for row in list(cells_of(wide).values())[1:]] == [1, *[8] * 8, 1, 1]
    assert re.findall(rf">layers (\d+){NONE}(\d+)</text>", wide) == [(str(at), str(at + 9)) for at in range(0, 80, 10)]
    assert explanation.interference is not None
    conflicts = [spot.tally.conflict or 0 for spot in explanation.interference.spots if spot.layer in range(10)]
    queries = conflicts[:: len(conflicts) // 10]
    assert f">{100 * sum(queries) / 10:.0f}</text>" in wide
    assert [label for label, _ in layer_table(explanation)[1]] == [f"layer {at}" for at in range(80)]
    assert layer_table(samples.explanation())[1] == ()


def test_a_passed_merge_has_no_explanation() -> None:
    found = text_of(sketch_of(samples.released()))
    for title in ("Attempts", "Samples", "Weights", "What to try", "Judged", "store"):
        assert title not in found


def test_a_sequential_verdict_names_its_interim_look() -> None:
    content = samples.refused()
    first, second = content.verdict.guards
    looked = update(first, look=InterimLook(number=2, of=3, documents=1000, confidence=0.98))
    notes = ("The reference is the best of three parents.",)
    found = text_of(sketch_of(update(content, verdict=update(content.verdict, guards=(looked, second), notes=notes))))
    assert "✗ fail max_drop 3, margin 3 look 2 of 3" in found
    assert "mergegate evaluated" not in found  # no documents were left out
    early = update(content.verdict, guards=(update(looked, documents_left=3000),))
    saved = "mergegate evaluated 1,000 of 4,000 documents. Deciding early saved 75 %."
    assert saved in text_of(sketch_of(update(content, verdict=early)))
    assert found.count("look 2 of 3") == 1
    assert notes[0] in found


def test_remedies_are_below_the_markdown_table() -> None:
    found = as_markdown(samples.explained())
    assert "What to try:\n\n- \\{merge\\_method: ties, density: 0.3\\}: 44 % of the weights" in found
    assert "What to try" not in as_markdown(samples.refused())


def test_explanations_survive_a_json_round_trip() -> None:
    content = samples.explained()
    again = ReportContent.model_validate_json(content.model_dump_json())
    assert again == content
    assert isinstance(again.explanation, Explanation)
    assert isinstance(again.explanation.interference, Interference)
