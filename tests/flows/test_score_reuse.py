"""Scores are reused by later runs, even with other interim looks, and are announced before a run.

A merge that has already failed is not evaluated further.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from demo_project import Printed, Project
from samples import sampled

Released = tuple[Project, Printed]


def scored(project: Project) -> set[str]:
    return project.artifacts("evaluate")


def run(project: Project, profile: str) -> tuple[int, dict[str, Any]]:
    result = project.mergegate("run", profile, "--json")
    found: dict[str, Any] = json.loads(result.stdout)
    return result.exit_code, found


@pytest.mark.proof
@pytest.mark.story
def test_other_interim_looks_reuse_all_scores(released: Released) -> None:
    project, _ = released
    before = scored(project)
    for documents in (50, 130, 300):
        profile = project.edit("demo.yaml", "evaluate:\n", f"evaluate:\n  documents: {documents}\n")
        code, found = run(project, profile)
        assert code == 0, found
        ends = {documents * 2**look for look in range(4)} | {400}
        assert {guard["n"] for guard in found["content"]["verdict"]["guards"]} <= ends
        assert scored(project) == before


@pytest.mark.story
def test_check_forecasts_the_power_of_each_guard(released: Released) -> None:
    project, _ = released
    checked = json.loads(project.mergegate("check", "profiles/demo.yaml", "--json").stdout)["summary"]
    lines = [line for line in checked if line.startswith("power: ")]
    assert "passes" in lines[0]
    assert [line.split()[1] for line in lines[1:4]] == ["copy:", "reverse:", "shift:"]
    assert all(
        re.search(r"from how the (merge of the last run|merges of the last \d runs) differed on ", line)
        for line in lines[1:4]
    )
    planned = project.mergegate("plan", "profiles/demo.yaml", "--no-probe", "--json")
    assert planned.exit_code == 0, planned.output
    power = json.loads(planned.stdout)["power"]
    assert [task["documents"] for task in power["tasks"]] == [400, 400, 400]
    assert all("the merge" in task["basis"] for task in power["tasks"])
    shown = " ".join(project.mergegate("plan", "profiles/demo.yaml", "--no-probe").stdout.split())
    assert all(line in shown for line in lines)


def test_where_nothing_was_scored_the_guess_is_told_as_one(project: Project) -> None:
    planned = project.mergegate("plan", "profiles/demo.yaml", "--no-probe")
    assert planned.exit_code == 0, planned.output
    assert "have not been counted yet" in planned.stdout
    assert project.artifacts("documents") == set()
    checked = json.loads(project.mergegate("check", "profiles/demo.yaml", "--json").stdout)["summary"]
    assert sum("10 % of answers differ (assumed, see evaluate.discordance)" in line for line in checked) == 3


@pytest.mark.story
@pytest.mark.parametrize(
    "profile", sampled(["demo-lopsided.yaml", "demo-refused.yaml"], ["demo-refused.yaml"], pytest.mark.proof)
)
def test_a_lost_skill_ends_the_tasks(released: Released, profile: str) -> None:
    project, _ = released
    code, found = run(project, f"profiles/{profile}")
    verdict = found["content"]["verdict"]
    assert code == 3
    assert verdict["outcome"] == "fail"
    lost = {guard["task"] for guard in verdict["guards"] if guard["outcome"] == "fail"}
    assert lost
    assert {one["decided_by"] for one in verdict["not_run"]} <= lost
    assert {one["task"] for one in (*verdict["guards"], *verdict["not_run"])} == {"copy", "reverse", "shift"}
    before = scored(project)
    assert run(project, f"profiles/{profile}") == (code, found)  # A repeated run gives the same result, to the letter.
    assert scored(project) == before


@pytest.mark.story
def test_what_was_not_run_stands_in_the_table_and_on_the_page(released: Released) -> None:
    project, _ = released
    models = [
        {"model": f"demo/models/{name}", "parameters": {"weight": weight}}
        for name, weight in (("reverser", 0.92), ("shifter", 0.08))  # A merge without scores in the store.
    ]
    text = (project.root / "profiles" / "demo-lopsided.yaml").read_text().replace("name: demo-lopsided", "name: early")
    text = text.replace("shift.yaml, guarded_by", "shift.yaml, margin: 9, guarded_by")  # Decided before a drop of 4.
    recipe = json.dumps({"merge_method": "linear", "dtype": "bfloat16", "models": models})
    (project.root / "profiles" / "early.yaml").write_text(text.replace("demo/recipes/lopsided.yaml", recipe))
    before = scored(project)
    result = project.mergegate("run", "profiles/early.yaml")
    assert result.exit_code == 3, result.output
    assert "skipped: shift had already failed" in result.output
    assert len(scored(project) - before) == 2  # The merge on copy and shift; no parent.
    assert "\nmean of 2 " in result.output
    page = (project.home / "reports" / "early.html").read_text().replace("<wbr>", "")
    assert "skipped: shift had already failed" in page
    assert "mergegate evaluated 800 of 1,200 documents. Deciding early, and skipping 1 task, saved 33 %." in page


def dry_run(project: Project, *settings: str, profile: str = "profiles/demo.yaml") -> dict[str, Any]:
    words = [word for setting in settings for word in ("--set", setting)]
    found: dict[str, Any] = json.loads(project.mergegate("run", profile, "--dry-run", "--json", *words).stdout)
    assert found["status"] == "ready", found
    return found


def missing(planned: dict[str, Any]) -> dict[str, int]:
    """Return the number of documents to evaluate for each model and task."""
    return {stage["subject"]: stage["missing"] for stage in planned["stages"] if stage["stage"] == "evaluate"}


@pytest.mark.story
def test_the_forecast_counts_the_documents_that_an_inconclusive_gate_adds(released: Released) -> None:
    project, _ = released
    cached = dry_run(project)
    assert set(missing(cached).values()) == {0}
    assert cached["further_documents"] == 0
    assert "has nothing to do" in cached["message"]
    sampled_anew = ("evaluate.seed=1", "evaluate.documents=50")
    planned = dry_run(project, *sampled_anew)
    assert set(missing(planned).values()) == {50}
    assert planned["further_documents"] == 3 * 4 * 350
    assert "evaluates up to 4,200 more documents over all models" in planned["message"]
    assert dry_run(project, *sampled_anew, "evaluate.extend=false")["further_documents"] == 0
    assert dry_run(project, "evaluate.seed=1", "evaluate.documents=all")["further_documents"] == 0


@pytest.mark.story
def test_a_guard_has_its_own_number_of_documents(released: Released) -> None:
    project, _ = released
    guard = "task: demo/tasks/copy.yaml,"
    for documents, first in (("100", 100), ("all", 400)):
        profile = project.edit("demo.yaml", guard, f"{guard} documents: {documents},")
        planned = dry_run(project, "evaluate.seed=1", "evaluate.documents=50", profile=profile)
        looked_at = missing(planned)
        assert {count for subject, count in looked_at.items() if subject.endswith("copy")} == {first}
        assert {count for subject, count in looked_at.items() if not subject.endswith("copy")} == {50}
        assert planned["further_documents"] == 4 * ((400 - first) + 2 * 350)
    # Scores of the same documents are reused, so another sample size does not change a key.
    assert set(missing(dry_run(project, profile=profile)).values()) == {0}


@pytest.mark.proof
def test_the_forecast_uses_the_keys_of_the_evaluation(released: Released) -> None:
    project, _ = released
    guard = "task: demo/tasks/copy.yaml,"
    profile = project.edit("demo.yaml", guard, f"{guard} documents: 20, system_instruction: Copy the word.,")
    settings = ("evaluate.extend=false", "evaluate.on_inconclusive=pass", "publish=null")
    looked_at = missing(dry_run(project, *settings, profile=profile))
    assert {subject.split(", ")[1] for subject, count in looked_at.items() if count} == {"copy"}
    words = [word for setting in settings for word in ("--set", setting)]
    assert project.mergegate("run", profile, *words).exit_code == 0
    assert set(missing(dry_run(project, *settings, profile=profile)).values()) == {0}
