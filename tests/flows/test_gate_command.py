"""``mergegate gate`` gives lm-eval results the same verdict that the stages give to the same models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from demo_project import PROFILES, Project, make_project
from lm_eval_runs import run_lm_eval

DEMO = PROFILES / "demo"
TASKS = [DEMO / "tasks" / f"{task}.yaml" for task in ("copy", "reverse")]
PROFILE = """name: kept-skills
recipe: demo/recipes/ties.yaml
perplexity: {documents: demo/data/held-out.jsonl, max_documents: 50}
evaluate:
  dtype: bfloat16  # as lm-eval takes it from the checkpoints, on whatever processor
  tasks:
    - {task: demo/tasks/copy.yaml, guarded_by: reverser, max_drop: 3}
    - {task: demo/tasks/reverse.yaml, guarded_by: reverser, max_drop: 3}
"""


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory, prefect_api: None) -> tuple[Project, Path]:
    """Return a project with a merged checkpoint, and the directory with lm-eval's results for three models by name."""
    project = make_project(tmp_path_factory.mktemp("project"))
    (project.root / "profiles" / "reverser.yaml").write_text(PROFILE)
    merged = project.mergegate("merge", "profiles/demo/recipes/ties.yaml", "merged")
    assert merged.exit_code == 0, merged.output
    out = tmp_path_factory.mktemp("lm-eval")
    for name, model in models(project).items():
        run_lm_eval(out / name, model, TASKS, out / "scratch")
    return project, out


def models(project: Project) -> dict[str, Path]:
    return {"base": DEMO / "models/base", "reverser": DEMO / "models/reverser", "merged": project.root / "merged"}


def gate(project: Project, *results: str, profile: str = "profiles/reverser.yaml") -> tuple[int, dict[str, Any]]:
    done = project.mergegate("gate", *results, "--profile", profile, "--json")
    return done.exit_code, json.loads(done.stdout)


@pytest.mark.parametrize(("merge", "code"), [pytest.param("merged", 0, marks=pytest.mark.slow), ("base", 3)])
def test_the_verdict_is_that_of_the_stages(judged: tuple[Project, Path], merge: str, code: int) -> None:
    project, out = judged
    found, ours = gate(project, f"merge={out / merge}", f"reverser={out / 'reverser'}")
    checkpoints = [str(models(project)[name]) for name in ("reverser", merge)]
    done = project.mergegate("compare", *checkpoints, "--profile", "profiles/reverser.yaml", "--json")
    theirs = json.loads(done.stdout)
    assert found == code
    assert ours["status"] == ("refused" if code else "passed")
    assert [guard["n"] for guard in ours["content"]["verdict"]["guards"]] == [400, 400]
    sides = [{guard["task"]: guard for guard in side["content"]["verdict"]["guards"]} for side in (ours, theirs)]
    data = [[guard.pop("data") for guard in side.values()] for side in sides]
    # The order of the tasks depends on their duration on this machine. If the first one fails, the other is not run.
    assert "reverse" in sides[1]
    assert sides[1] == {task: guard for task, guard in sides[0].items() if code == 0 or task in sides[1]}
    assert data[0] == [None, None]  # lm-eval's files do not name their data, so mergegate compares document hashes
    assert all(found["digest"] for found in data[1])


def test_compare_reports_a_lost_skill(judged: tuple[Project, Path]) -> None:
    project, out = judged
    _, refused = gate(project, f"merge={out / 'base'}", f"reverser={out / 'reverser'}")
    assert "reverse lost " in refused["message"]
    assert "points against reverser" in refused["message"]


def test_one_reference_stands_for_every_model_that_a_guard_names(judged: tuple[Project, Path]) -> None:
    project, out = judged
    named = gate(project, f"merge={out / 'base'}", f"reverser={out / 'reverser'}")
    code, alone = gate(project, f"merge={out / 'base'}", f"reference={out / 'reverser'}")
    assert code == 3
    assert alone["message"] == named[1]["message"].replace("reverser", "reference")


def test_the_best_of_the_given_parents_can_be_the_reference(judged: tuple[Project, Path]) -> None:
    project, out = judged
    text = PROFILE.replace("guarded_by: reverser", "guarded_by: best parent")
    (project.root / "profiles" / "best.yaml").write_text(text)
    results = [
        f"{name}={out / place}" for name, place in (("merge", "merged"), ("base", "base"), ("reverser", "reverser"))
    ]
    code, passed = gate(project, *results, profile="profiles/best.yaml")
    assert code == 0
    assert [guard["reference"] for guard in passed["content"]["verdict"]["guards"]] == ["base", "reverser"]


def test_the_output_shows_a_table_and_the_evidence_that_was_not_judged(judged: tuple[Project, Path]) -> None:
    project, out = judged
    results = [f"merge={out / 'merged'}", f"reverser={out / 'reverser'}"]
    done = project.mergegate("gate", *results, "--profile", "profiles/reverser.yaml")
    assert done.exit_code == 0
    assert "perplexity is not judged" in done.stdout
    assert "kept-skills passed the gate" in done.stdout
    worded = [line.split()[0] for line in done.stdout.splitlines() if line.rstrip().endswith("pass")]
    assert worded == ["copy", "reverse", "mean"]


@pytest.mark.parametrize(
    ("results", "words"),
    [
        (["merge"], "NAME=DIRECTORY"),
        (["merge=a", "merge=b"], "a second directory for merge"),
        (["mege=a", "base=b"], "did you mean 'mege'"),
        (["merge=a"], "only results of the merge"),
        (["merge=a", "bsae=b"], "did you mean 'bsae'"),
        (["merge=nowhere", "reference=nowhere"], "no such directory"),
    ],
)
def test_results_that_cannot_be_judged_are_refused(project: Project, results: list[str], words: str) -> None:
    done = project.mergegate("gate", *results, "--profile", "profiles/demo.yaml")
    assert done.exit_code == 2
    assert words in done.output


def test_a_profile_without_guards_cannot_judge(project: Project) -> None:
    (project.root / "bare.yaml").write_text("name: bare\nrecipe: none.yaml\n")
    done = project.mergegate("gate", "merge=a", "reference=b", "--profile", "bare.yaml")
    assert done.exit_code == 2
    assert "there are no guards" in done.output
