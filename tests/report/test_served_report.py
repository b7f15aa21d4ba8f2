"""Test the reports of served models, of quantized variants, and of a comparison."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import report_samples as samples
from builders.results import guard, suite, update
from pages import empty_plots, sketch_of, text_of
from rich.console import Console

from mergegate.flows.operations.summary import print_summary
from mergegate.flows.outcome import RunOutcome
from mergegate.flows.outcome.run_outcome import PublishedVariants
from mergegate.tasks.base.store.manifest import stage_key
from mergegate.tasks.quality.serve import Check
from mergegate.tasks.quality.serve.verdict import ServingCost
from mergegate.tasks.release.report.content import ReportContent, ReportedServing
from mergegate.tasks.release.report.plots import variants_plot
from mergegate.tasks.release.report.stage import write_report
from mergegate.tasks.release.report.table_rows import as_markdown, costs, variant_rows, variant_sentences
from mergegate.tasks.release.report.wording import MINUS, NONE, TIMES, recommended_action

LOST = "reversing lost 3.8 points against merge, and not by chance (at least 1.6); max_drop is 3"


def released_files(root: Path, content: ReportContent, other: ReportContent) -> tuple[str, dict[str, Any]]:
    """Require that two contents have the same key and files in a release, and return the page and the data."""
    assert stage_key("report", 1, {"content": other}) == stage_key("report", 1, {"content": content})
    files = []
    for name, value in (("a", content), ("b", other)):
        (root / name).mkdir()
        with empty_plots():
            write_report.work(root / name, value)
        files.append([(root / name / file).read_text() for file in ("report.html", "report.json")])
    assert files[0] == files[1]
    return files[0][0], json.loads(files[0][1])


def printed(width: int, outcome: RunOutcome) -> str:
    """Return what the summary of a run shows in a terminal of this width."""
    console = Console(record=True, width=width, quiet=False, highlight=False, file=io.StringIO())
    print_summary(console, outcome)
    return console.export_text()


# --- Served models


def another_day(content: ReportContent) -> ReportContent:
    """Return the same model on the same server, measured on another day when the machine was busier."""
    numbers = samples.measured(seconds_to_ready=99.0, tokens_per_second=55.5, when="2026-12-24", machine="1 core")
    checks = tuple(update(check, seen="something else") for check in content.served)
    return update(content, serving=(ReportedServing(name="merge", measured=numbers),), served=checks)


@pytest.fixture(scope="module")
def page() -> str:
    return text_of(sketch_of(samples.served()))


def test_serving_costs_list_the_merge_below_its_parents(page: str) -> None:
    assert "Model Ready after First token Tokens/s Memory" in page
    assert "sorter 19 s 12 ms 412 2.91 GB merge 18 s 12 ms 412 2.91 GB" in page
    assert "GPU memory" not in page, "there was no GPU"


def test_serving_costs_name_the_day_and_the_machine(page: str) -> None:
    assert "Measured 2026-11-20, 2 cores of AMD EPYC 9B14, unless a row shows another date or machine." in page
    assert "reverser 2026-11-02, 16 cores of Intel Xeon Platinum 8481C 18 s 12 ms 388" in page


def test_the_reason_for_an_unserved_parent_is_shown(page: str) -> None:
    assert "base not measured: tensors: lm_head.weight: missing" in page


def test_every_check_shows_the_observed_and_the_expected_value(page: str) -> None:
    assert "greedy twice ✓ pass 192 tokens after 4 prompts equal token ids both times" in page
    assert f"chat {NONE} not offered the checkpoint has no chat template" in page
    assert "“Not offered” means that the server or the checkpoint does not support this check." in page


def test_a_failed_check_shows_its_location_and_remedy() -> None:
    where = {"where": "model.norm.weight", "remedy": "merge again"}
    broken = Check(name="tensors", outcome="fail", seen="missing", expected="all", **where)
    content = update(samples.served(), served=(broken,), serving=())
    assert "tensors ✗ fail model.norm.weight: missing all merge again" in text_of(sketch_of(content))


def test_gpu_memory_has_a_column() -> None:
    on_gpu = ReportedServing(name="merge", measured=samples.measured(peak_gpu_memory=61_200_000_000))
    content = update(samples.served(), serving=(on_gpu,))
    assert costs(content).columns[-1] == "GPU memory"
    assert costs(content).rows[-1].cells[-1] == "61.2 GB"


def test_unmeasured_serving_costs_have_no_table() -> None:
    content = update(samples.served(), serving=(ReportedServing(name="merge", measured=ServingCost()),))
    assert costs(content).rows == ()
    assert "Ready after" not in text_of(sketch_of(content))


def test_a_release_contains_no_machine_dependent_values(tmp_path: Path) -> None:
    content = samples.served()
    html, data = released_files(tmp_path, content, another_day(content))
    assert "greedy twice ✓ pass equal token ids both times" in text_of(html)
    assert "2026-11-20" not in text_of(html)
    assert "412" not in text_of(html)
    assert data["served"][0]["name"] == "tensors"
    assert "serving" not in data


def test_the_terminal_summary_ends_with_serving_costs() -> None:
    text = printed(140, RunOutcome(status="passed", message="done", content=samples.served()))
    assert re.search(r"served +ready after +first token +tokens/s +memory", text)
    assert re.search(r"merge +18 s +12 ms +412 +2.91 GB", text)
    assert re.search(r"base .*not measured: tensors: lm_head.weight: missing", text)
    assert "measured 2026-11-20, 2 cores of AMD EPYC 9B14" in text


def test_a_comparison_mentions_no_recipe_and_no_license() -> None:
    text = text_of(sketch_of(samples.compared()))
    assert "Compared models" in text
    for absent in ("Merged models", "Recipe", "License", "license", "published"):
        assert absent not in text


# --- Quantized variants


@pytest.fixture(scope="module")
def variants_page() -> str:
    return text_of(sketch_of(samples.quantized()))


def test_the_top_of_the_page_says_which_variants_passed_and_why_the_others_did_not(variants_page: str) -> None:
    top = variants_page[: variants_page.index("Guards")]
    published = "2 quantized variants may be published with the merge: Q8_0 and FP8_DYNAMIC."
    assert f"The merge may be published. {published}" in top
    assert f"Q4_K_M is refused: {LOST}." in top
    assert "Q5_K_M is refused: chat template: none; expected that of the merge." in top


def test_each_variant_has_a_row_with_size_drop_perplexity_and_verdict(variants_page: str) -> None:
    first = f"0.4 [{MINUS}0.3, 1.1] reversing 1.006 [1.002, 1.010] ✓ pass"
    assert f"Q8_0 gguf llama.cpp 492 kB 54 % of the merge {first}" in variants_page
    assert "3.8 [1.6, 5.9] reversing 1.078 [1.065, 1.091] ✗ fail not published" in variants_page
    assert "FP8_DYNAMIC compressed-tensors transformers" in variants_page
    assert f"Q6_K gguf {NONE} {NONE} {NONE} {NONE} ✗ fail not published" in variants_page, "it was not built"


def test_the_details_show_guards_checks_tensor_types_and_versions(variants_page: str) -> None:
    assert "Tensors by type 5 F32, 12 Q4_K, 10 Q5_0, 2 Q6_K imatrix none llama.cpp 0.3.36" in variants_page
    assert "reversing acc,none 500 98.0 94.2 14, 3 3.8 [1.6, 5.9] ✗ fail max_drop 3, margin 3" in variants_page
    assert (
        "chat template tokenizer.chat_template ✗ fail none that of the merge convert the merge again" in variants_page
    )
    assert "differ from those of the merge by 0.0014 nats on average and by 0.0094 at most" in variants_page
    assert "Its tokenizer splits 2 of 567 texts differently from that of the merge." in variants_page


def test_the_plot_names_each_variant_and_its_limits() -> None:
    wide, narrow = variants_plot(samples.quantized())
    for plot in (wide, narrow):
        assert "Q4_K_M, reversing: 3.8 [1.6, 5.9], max_drop 3, margin 3, fail." in plot
    assert variants_plot(samples.released()) == ()


def with_first_variant(**fields: object) -> ReportContent:
    """Return the report of the first variant alone, with other values in the verdict of its gate."""
    content = samples.quantized()
    first = content.variants[0]
    return update(content, variants=(update(first, gate=update(first.gate, **fields)),))


def test_a_variant_with_many_guards_shows_its_largest_drops_in_the_plot() -> None:
    guards = tuple(guard(f"task{at}", "merge", (0.9, 0.9), (at / 10, -1, 2), "pass") for at in range(9))
    label = variants_plot(with_first_variant(guards=guards))[0].partition('aria-label="')[2]
    assert re.findall(r"task\d", label.partition('"')[0]) == ["task8", "task7", "task6", "task5"]


def test_a_failed_required_variant_refuses_the_release_and_the_page_says_what_to_do() -> None:
    content = samples.quantized(required=True)
    page = text_of(sketch_of(content))
    assert f"Refused variant Q4_K_M: {LOST}. The merge will not be published." in page
    assert "2 quantized variants would have been published: Q8_0 and FP8_DYNAMIC." in page
    assert "✗ fail refuses the release" in page
    assert recommended_action(content) == (
        "Replace Q4_K_M by a type with more bits, or set required: false to release the merge without it."
    )


def test_a_report_without_variants_does_not_mention_them() -> None:
    for content in (samples.released(), samples.explained(), samples.served()):
        assert "variant" not in sketch_of(content).lower().replace("font-variant", "")
        assert "variant" not in as_markdown(content).lower()
        assert "variants" not in content.model_dump_json()


@pytest.mark.story
def test_a_report_is_the_same_for_checks_that_saw_something_else(tmp_path: Path) -> None:
    content = samples.quantized()
    variants = tuple(
        update(variant, checks=tuple(update(check, seen="other") for check in variant.checks))
        for variant in content.variants
    )
    _, data = released_files(tmp_path, content, update(content, variants=variants))
    assert [variant["type"] for variant in data["variants"]] == [variant.type for variant in content.variants]


def test_markdown_has_a_table_of_variants_and_the_reasons() -> None:
    text = as_markdown(samples.quantized()).replace("\\", "")
    assert "| Q4_K_M | llama.cpp | 301 kB | 3.8 [1.6, 5.9] |" in text
    assert f"| {TIMES}1.078 [1.065, 1.091] | ✗ fail |" in text
    assert f"- Q4_K_M is refused: {LOST}." in text


def test_a_terminal_of_80_columns_shows_one_line_per_variant_and_every_place() -> None:
    url = "https://huggingface.co/a/b-GGUF"
    place = PublishedVariants(format="gguf", types=("Q8_0",), version="1", location=url, new=True)
    outcome = {"status": "released", "message": "released demo", "location": "x", "variants": (place,)}
    lines = printed(80, RunOutcome(**outcome, content=samples.quantized())).splitlines()
    words = [" ".join(line.split()) for line in lines]
    assert f"Q8_0 llama.cpp 492 kB 0.4 [{MINUS}0.3, 1.1] {TIMES}1.006 [1.002, 1.010] pass" in words
    assert "Q6_K fail" in words
    assert f"variants {url} (Q8_0)" in words


def test_rows_of_a_suite_show_its_mean() -> None:
    row = variant_rows(with_first_variant(suites=(suite("merge", (0.7, 0.1, 1.3)),)))[0]
    assert (row.drop, row.task) == ("0.7 [0.1, 1.3]", "")


def test_only_refused_variants_still_have_sentences() -> None:
    content = samples.quantized()
    refused = update(content, variants=content.variants[1:2])
    assert variant_sentences(refused) == (f"Q4_K_M is refused: {LOST}.",)
