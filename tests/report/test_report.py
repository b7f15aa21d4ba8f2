"""Test the report page of a run: complete, self-contained, safe against hostile names and byte-reproducible."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest
import report_samples as samples
from builders.results import drift, task_score, update
from pages import HOSTILE, Page, page_of, sketch_of
from samples import sampled

from mergegate.tasks.base.stage import StageEnd
from mergegate.tasks.base.store.manifest import stage_key
from mergegate.tasks.quality.evaluation.document_order import DataSource, TaskData
from mergegate.tasks.quality.gate.verdicts import GateFinding, StratumDrift
from mergegate.tasks.release.report.content import ReportContent
from mergegate.tasks.release.report.page import add_stages, marked_answers, render
from mergegate.tasks.release.report.plots import guards_plot
from mergegate.tasks.release.report.stage import write_report
from mergegate.tasks.release.report.table_rows import as_markdown, final_table, task_rows
from mergegate.tasks.release.report.wording import MINUS, TIMES

SAMPLES = {
    **{make.__name__: make for make in (samples.released, samples.refused, samples.inconclusive, samples.large)},
    **{make.__name__: make for make in (samples.explained, samples.served, samples.quantized, samples.compared)},
    "not finite": samples.broken,
    "exploded": lambda: samples.broken(812.4),
    "variant refused": lambda: samples.quantized(required=True),
}


@pytest.fixture(params=sampled(SAMPLES, ["explained", "quantized"]))
def content(request: pytest.FixtureRequest) -> ReportContent:
    return SAMPLES[request.param]()


def with_hostile_names(content: ReportContent) -> ReportContent:
    """Replace every name that an outsider controls with a script that contains a dollar and a control character."""

    def poisoned(value: object) -> object:
        if isinstance(value, dict):
            return {key: HOSTILE if key in ("ref", "recipe", "method") else poisoned(at) for key, at in value.items()}
        if isinstance(value, list):
            return [poisoned(item) for item in value]
        if value in ("reversing", "reverser", "apache-2.0", "demo", "acc,none"):
            return HOSTILE
        return value

    return ReportContent.model_validate(poisoned(json.loads(content.model_dump_json())))


def test_the_page_is_well_formed_and_all_references_resolve(content: ReportContent) -> None:
    page = Page(page_of(content))
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    styles = " ".join(page.attributes("clip-path") + page.attributes("style"))
    targets = page.inner_links + re.findall(r"url\(#([^)]+)\)", styles)
    assert set(targets) <= set(ids)
    assert len(targets) > 0


def test_the_report_page_has_no_scripts_or_external_resources(content: ReportContent) -> None:
    html = page_of(content)
    page = Page(html)
    assert page.tags.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "image"})
    assert page.attributes("src") == []
    assert all(href.startswith(("#", "https://huggingface.co/")) for href in page.attributes("href"))
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert "http://" not in html
    # The page may link to the Hub, but it loads nothing from there.
    assert "https://" not in re.sub(r'href="https://huggingface\.co/[\w./-]+"', "", html)
    assert re.search(r"@import|url\((?!#)", html) is None


def test_the_verdict_comes_first_with_its_reason() -> None:
    for content, word in ((samples.released(), "Passed"), (samples.refused(), "Refused")):
        page = Page(sketch_of(content))
        assert word in "".join(page.texts["h1"])
        assert page.text.index(word) < page.text.index("Guards")
        assert all(reason in page.text for reason in content.verdict.reasons)


def test_all_numbers_of_a_guard_are_in_the_table_and_the_plot() -> None:
    content = samples.refused()
    page = Page(page_of(content))
    plot = " ".join(page.texts["text"])
    cells = " ".join(page.texts["td"] + page.texts["small"])
    for drop, low, high in (("14.4", "11.7", "17.1"), ("2.4", "0.9", "3.9")):
        assert f"{drop} [{low}, {high}]" in plot
        assert drop in cells
        assert f"[{low}, {high}]" in cells
    for score in ("98.6", "84.2", "99.6", "97.2"):
        assert score in " ".join(page.texts["span"])
    assert "max_drop 3, margin 2" in cells
    assert "1.032 [1.024, 1.040]" in plot
    assert "8.4" in page.text
    assert "[6.8, 10.0]" in page.text


def test_plots_name_their_rows_outcomes_and_limits_in_both_widths() -> None:
    page = Page(page_of(samples.refused()))
    words = [text.strip() for text in page.texts["text"]]
    for expected in ("reversing", "against reverser", "✗ fail", "? inconclusive", "max_drop", "margin", "✓ pass"):
        assert words.count(expected) >= 2, expected
    labels = "\n".join(page.attributes("aria-label"))
    assert "reversing against reverser: 14.4 [11.7, 17.1], max_drop 3, margin 3, fail." in labels
    assert "warning above 1.02, limit 1.05" in labels
    assert "3.510" in page.texts["td"]


def test_an_interval_is_drawn_between_its_bounds_on_the_scale_of_the_ticks() -> None:
    """The position of a marker between two labeled ticks gives the drop, as a reader would estimate it."""
    html = page_of(samples.released())
    svg = html[html.index('<svg class="plot guards-wide"') :]
    svg = svg[: svg.index("</svg>")]
    ticks = {
        float(label.replace(MINUS, "-")): float(x)
        for x, label in re.findall(r'<text [^>]*text-anchor: middle[^>]* x="([\d.]+)"[^>]*>([^<]*\d)</text>', svg)
    }
    assert len(ticks) >= 4
    per_point = (ticks[2.0] - ticks[0.0]) / 2
    bars = re.findall(r'd="M ([\d.]+) ([\d.]+) *\n?L ([\d.]+) \2 *\n?"', svg)
    spans = {tuple(round((float(x) - ticks[0.0]) / per_point, 2) for x in (left, right)) for left, _, right in bars}
    assert (-0.42, 1.63) in spans
    assert (-0.97, 0.31) in spans


@pytest.mark.story
def test_equal_content_gives_equal_bytes(content: ReportContent) -> None:
    again = ReportContent.model_validate_json(content.model_dump_json())
    assert page_of(content) == render(again)


@pytest.mark.story
def test_bytes_do_not_depend_on_process_hash_seed_or_matplotlib_settings(tmp_path: Path) -> None:
    (tmp_path / "matplotlibrc").write_text("font.size: 30\naxes.grid: true\nsvg.fonttype: path\nfigure.dpi: 300\n")
    code = "import sys, report_samples as samples; from tasks.release import report; "
    code += "sys.stdout.write(report.render(samples.refused()))"
    here = Path(__file__).parent
    environment = {"PYTHONPATH": os.pathsep.join(map(str, (here.parents[1], here.parent, here))), "PYTHONHASHSEED": "7"}
    environment |= {"MATPLOTLIBRC": str(tmp_path / "matplotlibrc"), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, check=True)
    assert done.stdout.decode() == page_of(samples.refused())


def test_drawing_does_not_change_matplotlib_settings() -> None:
    before = dict(matplotlib.rcParams)
    guards_plot(samples.released())
    assert dict(matplotlib.rcParams) == before


def test_hostile_names_are_escaped() -> None:
    page = Page(page_of(with_hostile_names(samples.refused())))
    assert "script" not in page.tags
    shown = HOSTILE.replace("\x1b", r"\x1b")
    assert shown in page.text
    assert shown in page.texts["text"]


def test_hostile_names_stay_inside_their_markdown_cell() -> None:
    hostile, honest = as_markdown(with_hostile_names(samples.refused())), as_markdown(samples.refused())
    assert re.search(r"(?<!\\)<", hostile) is None
    columns = [len(re.findall(r"(?<!\\)\|", line)) for line in hostile.splitlines()]
    assert columns == [line.count("|") for line in honest.splitlines()]


def test_a_skipped_evaluation_is_reported_without_an_empty_table() -> None:
    page = Page(sketch_of(samples.broken()))
    assert "evaluation was skipped" in page.text
    assert "Scores" not in page.text
    assert "not finite" in page.text
    assert "nan" not in page.text.lower()


def test_long_names_are_shortened_only_in_the_plot() -> None:
    texts = Page("".join(guards_plot(samples.large()))).texts["text"]
    assert not any("mmlu_professional_medicine_continuation" in text for text in texts)
    assert any("…" in text for text in texts)
    assert "mmlu_professional_medicine_continuation" in Page(sketch_of(samples.large())).text


def test_stage_writes_page_and_data_that_follow_from_the_key_alone(tmp_path: Path) -> None:
    content = samples.released()
    models = tuple(update(one, scores=update(one.scores, model="another run's name")) for one in content.models)
    renamed = update(content, models=models)
    assert stage_key("report", 1, {"content": renamed}) == stage_key("report", 1, {"content": content})
    for name, value in (("a", content), ("b", renamed)):
        (tmp_path / name).mkdir()
        report = write_report.work(tmp_path / name, value)
        assert "\n" not in report.summary()
        assert report.headline.startswith("passed: Both guards passed.")
        assert report.summary() == "report.html: passed"
    for file in ("report.html", "report.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    data = json.loads((tmp_path / "a" / "report.json").read_text(encoding="utf-8"))
    assert data["verdict"]["guards"][0]["drop"] == 0.6
    assert data["models"][1]["scores"]["tasks"][0]["score"] == 0.986


def test_renaming_a_model_changes_the_report() -> None:
    content = samples.released()
    base, first, *others = content.models
    renamed = update(content, models=(base, update(first, name="inverter"), *others))
    assert stage_key("report", 1, {"content": renamed}) != stage_key("report", 1, {"content": content})


def test_final_table_has_a_cell_for_each_column_and_the_outcome_of_each_guard(content: ReportContent) -> None:
    table = final_table(content)
    assert all(len(row.cells) == len(table.columns) for row in table.rows)
    outcomes = [row.outcome for row in table.rows if row.outcome is not None]
    drift = [content.verdict.drift.outcome] if content.verdict.drift else []
    assert outcomes == [guard.outcome for guard in content.verdict.guards] + drift
    assert len(table.rows) == len({(row.task, row.metric) for row in task_rows(content)}) + (
        2 if len(content.verdict.guards) > 1 else 1
    )


def test_the_final_table_shows_the_order_of_the_run() -> None:
    rows = {row.cells[0]: row.cells for row in final_table(samples.refused()).rows}
    scores = ("2.0", "98.6 *", "2.4", "84.2")
    assert rows["reversing"] == ("reversing", *scores, "reverser", "14.4 [11.7, 17.1]", "3", "3", "fail")
    assert rows["copying"] == ("copying", "99.0 *", "98.4", "98.0", "98.6", "", "", "", "", "")
    assert rows["perplexity"][5:] == (
        "reverser", f"{TIMES}1.032 [1.024, 1.040]", f"{TIMES}1.05", f"{TIMES}1.05", f"pass: warning above {TIMES}1.02",
    )  # fmt: skip


def test_the_lowest_parent_is_best_if_less_is_better() -> None:
    content, models = samples.released(), []
    for at, model in enumerate(content.models):
        lower = task_score("word_perplexity", 0.5, score=20.0 - at, higher_is_better=False, stderr=math.nan)
        models.append(update(model, scores=update(model.scores, tasks=(lower,))))
    (row, *_) = task_rows(update(content, models=tuple(models)))
    assert [cell.text for cell in row.cells] == ["20.000", "19.000", "18.000", "17.000"]
    assert [cell.best for cell in row.cells] == [False, False, True, False]
    assert {cell.stderr for cell in row.cells} == {""}


def test_models_with_different_tokenizers_compare_in_bits_per_byte() -> None:
    content = samples.released()
    per_byte = update(content.verdict, drift=update(content.verdict.drift, unit="byte"))
    page = Page(sketch_of(update(content, verdict=per_byte)))
    assert "Bits per byte" in page.texts["th"]
    assert "0.442" in page.texts["td"]  # log2(3.41) / 4 bytes per token


def test_a_language_that_fails_and_broken_documents_are_shown_wherever_perplexity_is() -> None:
    content, names = samples.refused(), ("en", "<b>de")
    strata = tuple(
        StratumDrift(name=name, documents=8, ratio=1 + i, low=0.99 + 0.2 * i, high=1.02 + i, failed=bool(i))
        for i, name in enumerate(names)
    )
    findings = (
        GateFinding(kind="stratum", outcome="fail", reason="perplexity of <b>de is 2.000 times that of reverser"),
        GateFinding(kind="duplicates", outcome="pass", reason="30 held-out documents repeat another one"),
    )
    told = {"strata": strata, "findings": findings, "outcome": "fail", "reason": findings[0].reason}
    failed = update(drift(1.0024, 0.9981, 1.0067), **told)
    content = update(content, verdict=update(content.verdict, drift=failed))
    rows = {row.cells[0]: row for row in final_table(content).rows}
    ratio, limit = f"{TIMES}2.000 [1.190, 2.020]", f"{TIMES}1.05"
    assert rows["perplexity: <b>de"].cells[-5:] == ("reverser", ratio, limit, limit, "fail")
    assert rows["perplexity"].outcome == "fail"
    assert "perplexity: en" not in rows
    page = render(content)
    assert "<b>de" not in page
    assert "30 held-out documents repeat another one." in page
    assert "No document loses more than 0.5 nats per token, so at most 0.4 % of such documents do (limit 1 %)." in page
    over_all_tokens = "Over all tokens of the text, where long documents count more, the ratio is 1.002"
    assert f"{over_all_tokens}; it does not decide." in page
    assert "2.000 [1.190, 2.020], fail." in page  # the label of the plot
    assert "<b>de" not in as_markdown(content)


def test_the_page_names_the_evaluation_data() -> None:
    content = samples.released()
    sources = (DataSource(path="acme/sorting", revision="c" * 40), DataSource(path="acme/local"))
    data = TaskData(digest="d" * 64, sources=sources)
    first, second = content.verdict.guards
    page = sketch_of(update(content, verdict=update(content.verdict, guards=(first, update(second, data=data)))))
    assert f"sorting {'d' * 12} (acme/sorting at {'c' * 12})" in page
    assert "Digests of the evaluated data" not in sketch_of(content)


def test_a_guard_with_metrics_of_its_own_shows_the_scores_that_it_compared() -> None:
    content = samples.released()
    leaves = {"a": "acc,none", "b": "exact_match,none"}
    guard = update(content.verdict.guards[0], metric="acc,none + exact_match,none", leaf_metrics=leaves)
    mixed = update(content, verdict=update(content.verdict, guards=(guard,)))
    (row,) = [row for row in task_rows(mixed) if row.guard is not None]
    names = [model.name for model in content.models if model.scores]
    cells = dict(zip(names, (cell.text for cell in row.cells), strict=True))
    assert (cells["reverser"], cells["merge"], cells["sorter"]) == ("98.6", "98.0", "")


def test_a_refused_merge_is_never_described_as_publishable() -> None:
    for content in (samples.refused(), samples.broken(), samples.explained()):
        assert "may be published" not in Page(sketch_of(content)).text
    assert "may be published under" in " ".join(Page(sketch_of(samples.released())).text.split())


def test_the_table_of_contents_links_to_every_section(content: ReportContent) -> None:
    html = page_of(content)
    links = re.findall(r'<li><a href="#([\w-]+)">', html)
    assert links == re.findall(r'<section id="([\w-]+)">', html)
    assert {"guards", "reading"} <= set(links)


def test_the_lead_says_what_to_do_next() -> None:
    def lead(content: ReportContent) -> str:
        html = sketch_of(content)
        return " ".join(Page(html[html.index("<header") : html.index("</header>") + 9]).text.split())

    assert "Next: Read the samples that the merge lost" in lead(samples.refused())
    assert "Next: Apply the first change under “What to try”" in lead(samples.explained())
    assert "Next: Check the recipe" in lead(samples.broken())
    assert "Next" not in lead(samples.released())


def test_stages_and_their_times_are_added_to_a_finished_page() -> None:
    stages = (
        StageEnd("merge", "", "made", 4.2, "29 <tensors>"),
        StageEnd("evaluate", "base", "cached", 0.0, "copy 100.0"),
        StageEnd("evaluate", "merge", "made", 8.0, "copy 99.0"),
    )
    html = add_stages(sketch_of(samples.released()), stages)
    page = Page(html)
    assert "Stages of this run" in page.text
    assert "✓ built" in " ".join(page.text.split())
    assert "29 &lt;tensors&gt;" in html
    assert {"evaluate", "2 calls, 1 cached", "8.0 s"} <= {*page.texts["th"], *page.texts["td"]}
    assert '<li><a href="#stages">Stages of this run</a></li>' in html
    assert add_stages("<p>page of an older version</p>", stages) == "<p>page of an older version</p>"


@pytest.mark.parametrize(
    ("reference", "merge", "left", "right"),
    [
        ("pandik", "pandki", "pandi<mark>k</mark>", "pand<mark>k</mark>i"),
        ("It is 42.", "It is 41.", "It is <mark>42</mark>.", "It is <mark>41</mark>."),
        ("<b>", "", "<mark>&lt;b&gt;</mark>", ""),
        ("same", "same", "same", "same"),
    ],
)
def test_differences_between_answers_are_marked_and_escaped(reference: str, merge: str, left: str, right: str) -> None:
    assert tuple(map(str, marked_answers(reference, merge))) == (left, right)


def test_warnings_about_the_recipe_are_below_it() -> None:
    content = samples.released()
    page = sketch_of(update(content, recipe_warnings=("dype: unknown key <dype>; remove it",)))
    assert "unknown key &lt;dype&gt;" in page[page.index("<h3>Recipe</h3>") :]
    assert "Warnings about this recipe" not in sketch_of(content)
