"""Test how the report, the terminal and Markdown show quantized variants, and that nothing else changes for them."""

from __future__ import annotations

import io
import json
import re
from html import unescape
from pathlib import Path

import pytest
import report_samples as samples
from pages import page_of
from rich.console import Console

from mergegate.flows.cli.run_summary import print_summary
from mergegate.flows.outcome import RunOutcome
from mergegate.flows.outcome.run_outcome import PublishedVariants
from mergegate.tasks.report.content import ReportContent
from mergegate.tasks.report.plots import variants_plot
from mergegate.tasks.report.stage import write_report
from mergegate.tasks.report.table import as_markdown
from mergegate.tasks.report.variants import variant_rows, variant_sentences
from mergegate.tasks.report.wording import MINUS, NONE, TIMES, recommended_action
from mergegate.tasks.store.keys import stage_key

LOST = "reversing lost 3.8 points against merge, and not by chance (at least 1.6); max_drop is 3"


def text_of(html: str) -> str:
    """Return the visible text of a page on one line."""
    shown = re.sub(r"<wbr>", "", re.sub(r"<style>.*?</style>|<svg.*?</svg>", " ", html, flags=re.DOTALL))
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", shown)).split())


@pytest.fixture(scope="module")
def page() -> str:
    return text_of(page_of(samples.quantized()))


def test_the_top_of_the_page_says_which_variants_passed_and_why_the_others_did_not(page: str) -> None:
    top = page[: page.index("Guards")]
    assert (
        "The merge may be published. 2 quantized variants may be published with the merge: Q8_0 and FP8_DYNAMIC." in top
    )
    assert f"Q4_K_M is refused: {LOST}." in top
    assert "Q5_K_M is refused: chat template: none; expected that of the merge." in top


def test_each_variant_has_a_row_with_size_drop_perplexity_and_verdict(page: str) -> None:
    assert (
        f"Q8_0 gguf llama.cpp 492 kB 54 % of the merge 0.4 [{MINUS}0.3, 1.1] reversing 1.006 [1.002, 1.010] ✓ pass"
        in page
    )
    assert "3.8 [1.6, 5.9] reversing 1.078 [1.065, 1.091] ✗ fail not published" in page
    assert "FP8_DYNAMIC compressed-tensors transformers" in page
    assert f"Q6_K gguf {NONE} {NONE} {NONE} {NONE} ✗ fail not published" in page, "it was not built"


def test_the_details_show_guards_checks_tensor_types_and_versions(page: str) -> None:
    assert "Tensors by type 5 F32, 12 Q4_K, 10 Q5_0, 2 Q6_K imatrix none llama.cpp 0.3.36" in page
    assert "reversing acc,none 500 98.0 94.2 14, 3 3.8 [1.6, 5.9] ✗ fail max_drop 3, margin 3" in page
    assert "chat template tokenizer.chat_template ✗ fail none that of the merge convert the merge again" in page
    assert "differ from those of the merge by 0.0014 nats on average and by 0.0094 at most" in page
    assert "Its tokenizer splits 2 of 567 texts differently from that of the merge." in page


def test_the_plot_names_each_variant_and_its_limits() -> None:
    wide, narrow = variants_plot(samples.quantized())
    for plot in (wide, narrow):
        assert "Q4_K_M, reversing: 3.8 [1.6, 5.9], max_drop 3, margin 3, fail." in plot
    assert variants_plot(samples.released()) == ()


def test_a_variant_with_many_guards_shows_its_largest_drops_in_the_plot() -> None:
    content = samples.quantized()
    first = content.variants[0]
    assert first.gate is not None
    guards = tuple(samples.guard(f"task{at}", "merge", (0.9, 0.9), (at / 10, -1, 2), "pass") for at in range(9))
    many = first.model_copy(update={"gate": first.gate.model_copy(update={"guards": guards})})
    label = variants_plot(content.model_copy(update={"variants": (many,)}))[0].partition('aria-label="')[2]
    assert re.findall(r"task\d", label.partition('"')[0]) == ["task8", "task7", "task6", "task5"]


def test_a_failed_required_variant_refuses_the_release_and_the_page_says_what_to_do() -> None:
    content = samples.quantized(required=True)
    page = text_of(page_of(content))
    assert f"Failed variant Q4_K_M: {LOST}. The merge will not be published." in page
    assert "2 quantized variants would have been published: Q8_0 and FP8_DYNAMIC." in page
    assert "✗ fail refuses the release" in page
    assert recommended_action(content) == (
        "Replace Q4_K_M by a type with more bits, or set required: false to release the merge without it."
    )


def test_a_report_without_variants_does_not_mention_them() -> None:
    for content in (samples.released(), samples.explained(), samples.served()):
        assert "variant" not in page_of(content).lower().replace("font-variant", "")
        assert "variant" not in as_markdown(content).lower()
        assert "variants" not in content.model_dump_json()


@pytest.mark.story
def test_a_report_is_the_same_for_checks_that_saw_something_else(tmp_path: Path) -> None:
    content = samples.quantized()
    other = with_other_observations(content)
    assert stage_key("report", 1, {"content": other}) == stage_key("report", 1, {"content": content})
    for name, one in (("a", content), ("b", other)):
        (tmp_path / name).mkdir()
        write_report.work(tmp_path / name, one)
    for file in ("report.html", "report.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    released = json.loads((tmp_path / "a" / "report.json").read_text())
    assert [variant["type"] for variant in released["variants"]] == [variant.type for variant in content.variants]


def with_other_observations(content: ReportContent) -> ReportContent:
    variants = tuple(
        variant.model_copy(
            update={"checks": tuple(check.model_copy(update={"seen": "other"}) for check in variant.checks)}
        )
        for variant in content.variants
    )
    return content.model_copy(update={"variants": variants})


def test_markdown_has_a_table_of_variants_and_the_reasons() -> None:
    text = as_markdown(samples.quantized()).replace("\\", "")
    assert "| Q4_K_M | llama.cpp | 301 kB | 3.8 [1.6, 5.9] |" in text
    assert f"| {TIMES}1.078 [1.065, 1.091] | ✗ fail |" in text
    assert f"- Q4_K_M is refused: {LOST}." in text


def test_a_terminal_of_80_columns_shows_one_line_per_variant_and_every_place() -> None:
    console = Console(record=True, width=80, highlight=False, file=io.StringIO())
    place = PublishedVariants(
        format="gguf", types=("Q8_0",), version="1", location="https://huggingface.co/a/b-GGUF", new=True
    )
    print_summary(
        console,
        RunOutcome(
            status="released", message="released demo", location="x", content=samples.quantized(), variants=(place,)
        ),
    )
    lines = [line.split() for line in console.export_text().splitlines()]
    assert [
        "Q8_0",
        "llama.cpp",
        "492",
        "kB",
        "0.4",
        f"[{MINUS}0.3,",
        "1.1]",
        f"{TIMES}1.006",
        "[1.002,",
        "1.010]",
        "pass",
    ] in lines
    assert ["Q6_K", "fail"] in lines
    assert ["variants", "https://huggingface.co/a/b-GGUF", "(Q8_0)"] in lines


def test_rows_of_a_suite_show_its_mean() -> None:
    content = samples.quantized()
    first = content.variants[0]
    assert first.gate is not None
    suite = samples.suite("merge", (0.7, 0.1, 1.3))
    judged = first.model_copy(update={"gate": first.gate.model_copy(update={"suites": (suite,)})})
    row = variant_rows(content.model_copy(update={"variants": (judged,)}))[0]
    assert (row.drop, row.task) == ("0.7 [0.1, 1.3]", "")


def test_only_refused_variants_still_have_sentences() -> None:
    content = samples.quantized()
    refused = content.model_copy(update={"variants": content.variants[1:2]})
    assert variant_sentences(refused) == (f"Q4_K_M is refused: {LOST}.",)
