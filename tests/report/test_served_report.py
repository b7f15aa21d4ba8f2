"""Test the report of a served model, which serving numbers stay out of a release, and the report of a comparison."""

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
from mergegate.tasks.report.content import ReportContent, ReportedCheck, ReportedServing
from mergegate.tasks.report.stage import write_report
from mergegate.tasks.report.table import costs
from mergegate.tasks.report.wording import NONE
from mergegate.tasks.serve.measurements import ServingCost
from mergegate.tasks.store.keys import stage_key


def text_of(html: str) -> str:
    """Return the visible text of a page on one line."""
    shown = re.sub(r"<wbr>", "", re.sub(r"<style>.*?</style>|<svg.*?</svg>", " ", html, flags=re.DOTALL))
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", shown)).split())


def another_day(content: ReportContent) -> ReportContent:
    """Return the same model on the same server, measured on another day when the machine was busier."""
    numbers = samples.measured(seconds_to_ready=99.0, tokens_per_second=55.5, when="2026-12-24", machine="1 core")
    checks = tuple(check.model_copy(update={"seen": "something else"}) for check in content.served)
    update = {"serving": (ReportedServing(name="merge", measured=numbers),), "served": checks}
    return content.model_copy(update=update)


@pytest.fixture(scope="module")
def page() -> str:
    return text_of(page_of(samples.served()))


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
    broken = ReportedCheck(
        name="tensors", outcome="fail", where="model.norm.weight", seen="missing", expected="all", remedy="merge again"
    )
    content = samples.served().model_copy(update={"served": (broken,), "serving": ()})
    assert "tensors ✗ fail model.norm.weight: missing all merge again" in text_of(page_of(content))


def test_gpu_memory_has_a_column() -> None:
    on_gpu = ReportedServing(name="merge", measured=samples.measured(peak_gpu_memory=61_200_000_000))
    content = samples.served().model_copy(update={"serving": (on_gpu,)})
    assert costs(content).columns[-1] == "GPU memory"
    assert costs(content).rows[-1].cells[-1] == "61.2 GB"


def test_unmeasured_serving_costs_have_no_table() -> None:
    content = samples.served().model_copy(update={"serving": (ReportedServing(name="merge", measured=ServingCost()),)})
    assert costs(content).rows == ()
    assert "Ready after" not in text_of(page_of(content))


def test_a_release_contains_no_machine_dependent_values(tmp_path: Path) -> None:
    content = samples.served()
    assert stage_key("report", 1, {"content": another_day(content)}) == stage_key("report", 1, {"content": content})
    for name, one in (("a", content), ("b", another_day(content))):
        (tmp_path / name).mkdir()
        write_report.work(tmp_path / name, one)
    for file in ("report.html", "report.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    released = text_of((tmp_path / "a" / "report.html").read_text())
    assert "greedy twice ✓ pass equal token ids both times" in released
    assert "2026-11-20" not in released
    assert "412" not in released
    data = json.loads((tmp_path / "a" / "report.json").read_text())
    assert data["served"][0]["name"] == "tensors"
    assert "serving" not in data


def test_the_terminal_summary_ends_with_serving_costs() -> None:
    console = Console(record=True, width=140, quiet=False, highlight=False, file=io.StringIO())
    print_summary(console, RunOutcome(status="passed", message="done", content=samples.served()))
    said = console.export_text()
    assert re.search(r"served +ready after +first token +tokens/s +memory", said)
    assert re.search(r"merge +18 s +12 ms +412 +2.91 GB", said)
    assert re.search(r"base .*not measured: tensors: lm_head.weight: missing", said)
    assert "measured 2026-11-20, 2 cores of AMD EPYC 9B14" in said


def test_a_comparison_mentions_no_recipe_and_no_license() -> None:
    said = text_of(page_of(samples.compared()))
    assert "Compared models" in said
    for absent in ("Merged models", "Recipe", "License", "license", "published"):
        assert absent not in said
