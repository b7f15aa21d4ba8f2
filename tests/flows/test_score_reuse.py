"""Scores are reused by later runs, even with other interim looks, and are announced before a run."""

from __future__ import annotations

import json
import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from demo_project import Project, expect

from mergegate.flows import preflight
from mergegate.tasks.release.report import RunRecord, RunScore


def scored(project: Project) -> set[str]:
    return project.artifacts("evaluate")


def run(project: Project, profile: str) -> tuple[int, dict[str, Any]]:
    result = project.mergegate("run", profile, "--json")
    found: dict[str, Any] = json.loads(result.stdout)
    return result.exit_code, found


def lopsided(project: Project, name: str, *weights: float) -> str:
    """Write a profile whose merge has no scores in the store: the lopsided demo with other weights."""
    models = [
        {"model": f"demo/models/{model}", "parameters": {"weight": weight}}
        for model, weight in zip(("reverser", "shifter"), weights, strict=True)
    ]
    recipe = json.dumps({"merge_method": "linear", "dtype": "bfloat16", "models": models})
    text = (project.root / "profiles" / "demo-lopsided.yaml").read_text()
    text = text.replace("name: demo-lopsided", f"name: {name}").replace("demo/recipes/lopsided.yaml", recipe)
    (project.root / "profiles" / f"{name}.yaml").write_text(text)
    return f"profiles/{name}.yaml"


@pytest.mark.story
def test_check_forecasts_the_power_of_each_guard(demo: Project) -> None:
    checked = json.loads(demo.mergegate("check", "profiles/demo.yaml", "--json").stdout)["summary"]
    lines = [line for line in checked if line.startswith("power: ")]
    assert "passes" in lines[0]
    assert [line.split()[1] for line in lines[1:4]] == ["copy:", "reverse:", "shift:"]
    basis = r"from how the (merge of the last run|merges of the last \d runs) differed on "
    assert all(re.search(basis, line) for line in lines[1:4])
    planned = expect(demo.mergegate("plan", "profiles/demo.yaml", "--no-probe", "--json"), 0)
    tasks = json.loads(planned.stdout)["power"]["tasks"]
    assert [task["documents"] for task in tasks] == [400, 400, 400]
    assert all("the merge" in task["basis"] for task in tasks)
    shown = " ".join(demo.mergegate("plan", "profiles/demo.yaml", "--no-probe").stdout.split())
    assert all(line in shown for line in lines)


@pytest.mark.story
def test_where_nothing_was_scored_the_guess_is_told_as_one(project: Project) -> None:
    planned = expect(project.mergegate("plan", "profiles/demo.yaml", "--no-probe"), 0)
    assert "have not been counted yet" in planned.stdout
    assert project.artifacts("documents") == set()
    checked = json.loads(project.mergegate("check", "profiles/demo.yaml", "--json").stdout)["summary"]
    assert sum("10 % of answers differ (assumed, see evaluate.discordance)" in line for line in checked) == 3


@pytest.mark.proof
def test_what_was_not_run_stands_in_the_table_and_on_the_page(demo: Project) -> None:
    profile = lopsided(demo, "early", 0.92, 0.08)
    file = demo.root / profile  # Decided before a drop of 4.
    file.write_text(file.read_text().replace("shift.yaml, guarded_by", "shift.yaml, margin: 9, guarded_by"))
    before = scored(demo)
    result = expect(demo.mergegate("run", profile), 3, "skipped: shift had already failed")
    assert len(scored(demo) - before) == 2  # The merge on copy and shift; no parent.
    assert "\nmean of 2 " in result.output
    page = (demo.home / "reports" / "early.html").read_text().replace("<wbr>", "")
    assert "skipped: shift had already failed" in page
    assert "mergegate evaluated 800 of 1,200 documents. Deciding early, and skipping 1 task, saved 33 %." in page


def words_of(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def dry_run(project: Project, *settings: str, profile: str = "profiles/demo.yaml") -> dict[str, Any]:
    result = project.mergegate("run", profile, "--dry-run", "--json", *words_of(*settings))
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["status"] == "ready", found
    return found


def missing(planned: dict[str, Any]) -> dict[str, int]:
    """Return the number of documents to evaluate for each model and task."""
    return {stage["subject"]: stage["missing"] for stage in planned["stages"] if stage["stage"] == "evaluate"}


@pytest.mark.story
def test_the_forecast_counts_the_documents_that_an_inconclusive_gate_adds(demo: Project) -> None:
    cached = dry_run(demo)
    assert set(missing(cached).values()) == {0}
    assert cached["further_documents"] == 0
    assert "has nothing to do" in cached["message"]
    sampled_anew = ("evaluate.seed=1", "evaluate.documents=50")
    planned = dry_run(demo, *sampled_anew)
    assert set(missing(planned).values()) == {50}
    assert planned["further_documents"] == 3 * 4 * 350
    assert "evaluates up to 4,200 more documents over all models" in planned["message"]
    assert dry_run(demo, *sampled_anew, "evaluate.extend=false")["further_documents"] == 0
    assert dry_run(demo, "evaluate.seed=1", "evaluate.documents=all")["further_documents"] == 0


# The change of the sample.

FIRST, SIZE = 100, 400  # documents of the first look, and of each task of the demo
SEED = 1  # the released demo has no scores in this order


def write_profile(project: Project, density: float, *settings: str) -> str:
    """Write a profile whose guard on ``copy`` compares with the champion, and return its path."""
    more = "".join(f"  {setting}\n" for setting in settings)
    text = f"""\
name: changing
recipe:
  merge_method: ties
  base_model: demo/models/base
  models:
    - {{model: demo/models/reverser, parameters: {{weight: 1.0, density: {density}}}}}
    - {{model: demo/models/shifter, parameters: {{weight: 1.0, density: 0.5}}}}
  dtype: bfloat16
checks: {{license: {{purpose: commercial, visibility: public}}}}
evaluate:
  documents: {FIRST}
  seed: {SEED}
{more}  tasks:
    - {{task: demo/tasks/copy.yaml, guarded_by: champion, max_drop: 8, margin: 12}}
    - {{task: demo/tasks/copy.yaml, guarded_by: base, max_drop: 8, margin: 12}}
    - {{task: demo/tasks/reverse.yaml, guarded_by: reverser, max_drop: 8, margin: 12}}
publish: {{to: directory, path: ../releases/changing}}
"""
    (project.root / "profiles" / "changing.yaml").write_text(text)
    return "profiles/changing.yaml"


def outcome_of(project: Project, density: float, *settings: str) -> dict[str, Any]:
    return run(project, write_profile(project, density, *settings))[1]


def guards(outcome: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(guard["task"], guard["reference"]): guard for guard in outcome["content"]["verdict"]["guards"]}


def evaluated(project: Project) -> list[tuple[str, str, int, int]]:
    """Return model, task and range of documents of every evaluation in the store."""
    found = []
    for path in sorted((project.home / "store" / "evaluate").iterdir()):
        if path.is_dir():
            value = json.loads((path / "value.json").read_text())
            if value["seed"] == SEED:
                part = value["part"]
                found.append((value["model"], value["tasks"][0]["task"], part["first"], part["last"]))
    return found


@pytest.mark.proof
def test_each_new_merge_is_judged_on_the_next_documents_and_a_repeated_one_on_its_own(demo: Project) -> None:
    first = outcome_of(demo, 0.5)
    assert first["status"] == "released", first
    copy = guards(first)["copy", "base"]
    assert copy["sample_start"] == 0  # no champion yet

    card = (demo.root / "releases" / "changing" / "latest" / "README.md").read_text()
    assert "The documents that measured these scores also selected this merge." in card
    checked = demo.mergegate("check", write_profile(demo, 0.45)).output
    assert f"copy: each new merge is judged on the next {FIRST} of {SIZE} documents" in checked

    before = evaluated(demo)
    assert outcome_of(demo, 0.5)["status"] == "nothing new"
    assert evaluated(demo) == before

    planned = json.loads(demo.mergegate("run", write_profile(demo, 0.45), "--dry-run", "--json").stdout)
    missing = {stage["subject"]: stage["missing"] for stage in planned["stages"] if stage["stage"] == "evaluate"}
    assert missing["base, copy"] == (FIRST if copy["n"] < SIZE else 0)  # the next documents
    assert missing["base, reverse"] == 0

    start = copy["n"] % SIZE
    outcomes = {}
    for density in (0.45, 0.4):
        outcomes[density] = outcome_of(demo, density)
        judged = guards(outcomes[density])
        assert judged["copy", "champion"]["sample_start"] == start
        assert judged["copy", "base"]["sample_start"] == start  # guards of one task share their scores
        assert judged["reverse", "reverser"]["sample_start"] == 0  # no guard against the champion
        if density == 0.45:  # the champion was selected on other documents
            (section,) = (one for one in outcomes[density]["content"]["sections"] if one["title"] == "Documents")
            wanted = rf"copy: the current release scores [\d.]+ on the {copy['n']} documents that selected it, and "
            assert re.match(wanted, section["sentences"][0])
        start = (start + judged["copy", "champion"]["n"]) % SIZE

    answers = [
        (model, task, position)
        for model, task, first, last in evaluated(demo)
        if model == "base"
        for position in range(first, last)
    ]
    assert max(Counter(answers).values()) == 1  # the reference answers each document once, however many samples use it
    before = evaluated(demo)
    if outcomes[0.4]["status"] == "refused":
        assert outcome_of(demo, 0.4)["content"] == outcomes[0.4]["content"]
    else:
        assert outcome_of(demo, 0.4)["status"] == "nothing new"
    assert evaluated(demo) == before

    kept = outcome_of(demo, 0.35, "resample: false")
    assert guards(kept)["copy", "champion"]["sample_start"] == 0


def test_further_runs_of_one_merge_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(merge: float, recipe: str = "ties") -> RunRecord:
        limits = {"low": -1, "high": 1, "max_drop": 1, "margin": 1, "outcome": "pass", "documents": 400, "differing": 8}
        score = RunScore.model_validate({"task": "copy", "reference": "base", "merge": merge, "drop": 0, **limits})
        fields = {"run": "r", "flow": "release", "profile": "demo", "ended": 0, "seconds": 0, "status": "released"}
        return RunRecord.model_validate({**fields, "message": "", "recipe": recipe, "scores": (score,)})

    runs = [run(70), run(70), run(71), run(70, "dare_ties"), run(70)]
    monkeypatch.setattr(preflight, "read_history", lambda _: SimpleNamespace(records=runs))
    assert [outcome.differing for outcome in preflight.past_guards("demo")] == [8, 8, 8]
