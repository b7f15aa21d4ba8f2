"""``mergegate gate`` gives results of lm-eval and inspect_ai the verdict that the stages give to the same models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from demo_project import PROFILES, Project, make_project
from inspect_ai_runs import run_inspect
from lm_eval_runs import run_lm_eval

DEMO = PROFILES / "demo"
VALIDATORS = Path(__file__).resolve().parents[2] / ".venv-validators" / "bin" / "python"
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


@pytest.mark.story
@pytest.mark.parametrize(("merge", "code"), [pytest.param("merged", 0, marks=pytest.mark.story), ("base", 3)])
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


@pytest.fixture(scope="module")
def inspect_logs(judged: tuple[Project, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Evaluate the documents of lm-eval with inspect_ai, with answers that are right where lm-eval found them right."""
    if not VALIDATORS.exists():
        pytest.skip("make .venv-validators/ready first")
    root = tmp_path_factory.mktemp("inspect")
    tasks: list[Mapping[str, Any]] = []
    for name in ("base", "reverser", "merged"):
        for file in (judged[1] / name).rglob("samples_*.jsonl"):
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            samples = [
                {
                    "id": line["doc_id"],
                    "input": line["doc"]["prompt"],
                    "target": line["doc"]["answer"],
                    "answers": [line["doc"]["answer"] if line["acc"] else "another"],
                }
                for line in lines
            ]
            task = {"name": file.name.split("_")[1], "model": name, "scorer": "match", "samples": samples}
            tasks.append({**task, "log_dir": str(root / name), "format": "json" if name == "base" else "eval"})
    run_inspect(tasks, VALIDATORS)
    return root


@pytest.mark.story
@pytest.mark.parametrize(("merge", "code"), [("merged", 0), ("base", 3)])
def test_the_verdict_on_logs_of_inspect_ai_is_that_on_lm_eval_results(
    judged: tuple[Project, Path], inspect_logs: Path, merge: str, code: int
) -> None:
    project, out = judged
    sides = [gate(project, f"merge={root / merge}", f"reverser={root / 'reverser'}") for root in (out, inspect_logs)]
    assert [found for found, _ in sides] == [code, code]
    theirs, ours = (side["content"]["verdict"] for _, side in sides)
    assert {guard["metric"] for guard in ours["guards"]} == {"match/accuracy"}
    assert [guard["n"] for guard in ours["guards"]] == [400, 400]
    # Only the name of the metric differs.
    assert json.loads(json.dumps(ours).replace("match/accuracy", "acc,none")) == theirs
    assert sides[0][1]["message"] == sides[1][1]["message"]


@pytest.mark.story
def test_documents_of_two_formats_cannot_be_matched(judged: tuple[Project, Path], inspect_logs: Path) -> None:
    project, out = judged
    results = [f"merge={inspect_logs / 'merged'}", f"reverser={out / 'reverser'}"]
    done = project.mergegate("gate", *results, "--profile", "profiles/reverser.yaml")
    assert done.exit_code == 2
    assert "both in one format, because the documents of the two cannot be matched" in " ".join(done.output.split())


@pytest.mark.story
def test_an_exported_log_is_compared_with_lm_eval_by_its_hashes(judged: tuple[Project, Path], tmp_path: Path) -> None:
    project, out = judged
    for file in (out / "merged").rglob("samples_*.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        (tmp_path / f"{file.stem}.json").write_text(json.dumps(exported_log(file.name.split("_")[1], lines)))
    both = [gate(project, f"merge={merge}", f"reverser={out / 'reverser'}") for merge in (out / "merged", tmp_path)]
    verdicts = [side["content"]["verdict"] for _, side in both]
    assert [code for code, _ in both] == [0, 0]
    assert verdicts[0] == verdicts[1]
    # Another document is refused.
    for file in tmp_path.iterdir():
        log = json.loads(file.read_text())
        log["samples"][3]["metadata"]["doc_hash"] = "0" * 64
        file.write_text(json.dumps(log))
    results = [f"merge={tmp_path}", f"reverser={out / 'reverser'}"]
    done = project.mergegate("gate", *results, "--profile", "profiles/reverser.yaml")
    assert done.exit_code == 2
    assert "a different doc on each side" in " ".join(done.output.split())


def exported_log(task: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the log that ``mergegate export`` writes for samples of lm-eval, as far as a gate reads it."""
    from importlib.metadata import version

    samples = [
        {
            "id": line["doc_id"],
            "epoch": 1,
            "input": "withheld",
            "target": "withheld",
            "scores": {"acc,none": {"value": line["acc"]}},
            "metadata": {**{name: line[name] for name in ("doc_hash", "prompt_hash", "target_hash")}, "chance": 0.0},
        }
        for line in lines
    ]
    score = {"name": "acc,none", "scorer": "acc,none", "metadata": {"higher_is_better": True}}
    mean = sum(line["acc"] for line in lines) / len(lines)
    return {
        "version": 2,
        "status": "success",
        "eval": {
            "created": "2026-11-27T00:00:00+00:00",
            "task": task,
            "dataset": {"sample_ids": [line["doc_id"] for line in lines]},
            "model": "hf/merged",
            "config": {},
            "metadata": {"task": task, "lm_eval_version": version("lm_eval")},
        },
        "results": {
            "total_samples": len(lines),
            "completed_samples": len(lines),
            "scores": [{**score, "metrics": {"mean": {"value": mean}}}],
        },
        "samples": samples,
    }


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
