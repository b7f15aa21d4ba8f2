"""Exchange with lm-eval and inspect_ai: ``gate`` judges their results like the stages, and ``export`` writes logs."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from demo_project import PROFILES, Project, expect, make_project
from forged_evidence import Evidence, flip_one_outcome
from lm_eval_runs import run_lm_eval
from typer.testing import CliRunner, Result

from mergegate.flows.cli.app import app
from mergegate.tasks.release.publish.content import PROVENANCE

DEMO = PROFILES / "demo"
TASKS = [DEMO / "tasks" / f"{task}.yaml" for task in ("copy", "reverse")]
PROFILE = """# Only evidence: neither gate nor compare reads a name or a recipe.
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
    (project.root / "profiles" / "kept-skills.yaml").write_text(PROFILE)
    expect(project.mergegate("merge", "profiles/demo/recipes/ties.yaml", "merged"), 0)
    out = tmp_path_factory.mktemp("lm-eval")
    for name, model in models(project).items():
        run_lm_eval(out / name, model, TASKS, out / "scratch")
    return project, out


def json_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def models(project: Project) -> dict[str, Path]:
    return {"base": DEMO / "models/base", "reverser": DEMO / "models/reverser", "merged": project.root / "merged"}


def call(project: Project, merge: Path, reverser: Path, *options: str) -> Result:
    arguments = (f"merge={merge}", f"reverser={reverser}", "--profile", "profiles/kept-skills.yaml")
    return project.mergegate("gate", *arguments, *options)


def gate(project: Project, merge: Path, reverser: Path) -> tuple[int, dict[str, Any]]:
    done = call(project, merge, reverser, "--json")
    return done.exit_code, json.loads(done.stdout)


@pytest.mark.story
@pytest.mark.parametrize(("merge", "code"), [pytest.param("merged", 0, marks=pytest.mark.proof), ("base", 3)])
def test_the_verdict_is_that_of_the_stages(judged: tuple[Project, Path], merge: str, code: int) -> None:
    project, out = judged
    found, ours = gate(project, out / merge, out / "reverser")
    checkpoints = [str(models(project)[name]) for name in ("reverser", merge)]
    done = project.mergegate("compare", *checkpoints, "--profile", "profiles/kept-skills.yaml", "--json")
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


@pytest.mark.story
def test_an_exported_log_is_compared_with_lm_eval_by_its_hashes(judged: tuple[Project, Path], tmp_path: Path) -> None:
    project, out = judged
    for file in (out / "merged").rglob("samples_*.jsonl"):
        lines = json_lines(file)
        (tmp_path / f"{file.stem}.json").write_text(json.dumps(exported_log(file.name.split("_")[1], lines)))
    both = [gate(project, merge, out / "reverser") for merge in (out / "merged", tmp_path)]
    verdicts = [side["content"]["verdict"] for _, side in both]
    assert [code for code, _ in both] == [0, 0]
    assert verdicts[0] == verdicts[1]
    # Another document is refused.
    for file in tmp_path.iterdir():
        log = json.loads(file.read_text())
        log["samples"][3]["metadata"]["doc_hash"] = "0" * 64
        file.write_text(json.dumps(log))
    done = expect(call(project, tmp_path, out / "reverser"), 2)
    assert "a different doc on each side" in " ".join(done.output.split())


def exported_log(task: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the log that ``mergegate export`` writes for samples of lm-eval, as far as a gate reads it."""
    samples = [
        {
            **{"id": line["doc_id"], "epoch": 1, "input": "withheld", "target": "withheld"},
            "scores": {"acc,none": {"value": line["acc"]}},
            "metadata": {**{name: line[name] for name in ("doc_hash", "prompt_hash", "target_hash")}, "chance": 0.0},
        }
        for line in lines
    ]
    score = {"name": "acc,none", "scorer": "acc,none", "metadata": {"higher_is_better": True}}
    mean = {"mean": {"value": sum(line["acc"] for line in lines) / len(lines)}}
    counts = {"total_samples": len(lines), "completed_samples": len(lines)}
    spec = {
        "created": "2026-11-27T00:00:00+00:00",
        **{"task": task, "model": "hf/merged", "config": {}},
        "dataset": {"sample_ids": [line["doc_id"] for line in lines]},
        "metadata": {"task": task, "lm_eval_version": version("lm_eval")},
    }
    results = {**counts, "scores": [{**score, "metrics": mean}]}
    return {"version": 2, "status": "success", "eval": spec, "results": results, "samples": samples}


@pytest.mark.story
def test_one_reference_stands_for_every_model_that_a_guard_names(judged: tuple[Project, Path]) -> None:
    project, out = judged
    code, named = gate(project, out / "base", out / "reverser")
    results = (f"merge={out / 'base'}", f"reference={out / 'reverser'}")
    alone = project.mergegate("gate", *results, "--profile", "profiles/kept-skills.yaml", "--json")
    assert code == alone.exit_code == 3
    assert "reverse lost " in named["message"]
    assert "points against reverser" in named["message"]
    assert json.loads(alone.stdout)["message"] == named["message"].replace("reverser", "reference")


@pytest.mark.story
def test_the_best_of_the_given_parents_can_be_the_reference(judged: tuple[Project, Path]) -> None:
    project, out = judged
    text = PROFILE.replace("guarded_by: reverser", "guarded_by: best parent")
    (project.root / "profiles" / "best.yaml").write_text(text)
    places = {"merge": "merged", "base": "base", "reverser": "reverser"}
    results = [f"{name}={out / place}" for name, place in places.items()]
    passed = expect(project.mergegate("gate", *results, "--profile", "profiles/best.yaml", "--json"), 0)
    guards = json.loads(passed.stdout)["content"]["verdict"]["guards"]
    assert [guard["reference"] for guard in guards] == ["base", "reverser"]


@pytest.mark.story
def test_the_output_shows_a_table_and_the_evidence_that_was_not_judged(judged: tuple[Project, Path]) -> None:
    project, out = judged
    done = expect(call(project, out / "merged", out / "reverser"), 0)
    assert "perplexity is not judged" in done.stdout
    assert "kept-skills passed the gate" in done.stdout
    worded = [line.split()[0] for line in done.stdout.splitlines() if line.rstrip().endswith("pass")]
    assert worded == ["copy", "reverse", "mean"]


@pytest.mark.parametrize(
    ("results", "profile", "words"),
    [
        ("merge", "profiles/demo.yaml", "NAME=DIRECTORY"),
        ("merge=a merge=b", "profiles/demo.yaml", "a second directory for merge"),
        ("mege=a base=b", "profiles/demo.yaml", "did you mean 'mege'"),
        ("merge=a", "profiles/demo.yaml", "only results of the merge"),
        ("merge=a bsae=b", "profiles/demo.yaml", "did you mean 'bsae'"),
        ("merge=nowhere reference=nowhere", "profiles/demo.yaml", "no such directory"),
        ("merge=a reference=b", "bare.yaml", "there are no guards"),
    ],
)
def test_results_that_cannot_be_judged_are_refused(project: Project, results: str, profile: str, words: str) -> None:
    (project.root / "bare.yaml").write_text("name: bare\nrecipe: none.yaml\n")
    expect(project.mergegate("gate", *results.split(), "--profile", profile), 2, words)


# --- export ---


@pytest.fixture
def release(demo: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the demo release, in the working directory, without a store."""
    version = demo.latest.resolve()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MERGEGATE_HOME", str(tmp_path / "no-store"))
    return Path(shutil.copytree(version, tmp_path / version.name))


@pytest.mark.story
def test_scores_and_settings_are_those_of_the_run(release: Path) -> None:
    result = CliRunner().invoke(app, ["export", release.name, "--output", "logs", "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    logs = [json.loads(path.read_text()) for path in Path("logs").rglob("*.json")]
    assert (answer["status"], answer["files"], answer["models"]) == ("made", len(logs), 4)
    assert not Path("no-store").exists()
    predicate = json.loads((release / PROVENANCE).read_text())["predicate"]
    means = {
        (log["eval"]["metadata"]["mergegate"]["model"], log["eval"]["task"], score["name"]): score["metrics"]["mean"]
        for log in logs
        if log["eval"]["task"] != "perplexity"
        for score in log["results"]["scores"]
    }
    for guard in predicate["mergegate_verdict"]["guards"]:
        assert means["merge", guard["task"], guard["metric"]]["value"] == guard["merge_score"]
        assert means[guard["reference"], guard["task"], guard["metric"]]["value"] == guard["reference_score"]
    scoring = predicate["mergegate_evaluation"]["scoring"]
    for log in logs:
        spec = log["eval"]
        namespace = "mergegate-demo" if spec["metadata"]["mergegate"]["role"] == "release" else "local"
        assert spec["model"].startswith(f"hf/{namespace}/")
        assert spec["task_args"] == {name: value for name, value in scoring.items() if value is not None}
    sources = {log["eval"]["metadata"]["mergegate"]["reference"] for log in logs}
    parents = {item["name"] for item in predicate["buildDefinition"]["resolvedDependencies"]}
    assert sources == {"demo", *parents}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "there"], "it exists"),
        (["--format", "helm", "--output", "out"], "helm"),
        (["--output", "out", "--organization", " Acme"], "--organization"),
    ],
)
def test_wrong_arguments_are_refused(release: Path, arguments: list[str], message: str) -> None:
    Path("there").mkdir()
    result = CliRunner().invoke(app, ["export", release.name, *arguments])
    assert (result.exit_code, message in result.output) == (2, True), result.output
    assert not Path("out").exists()


def test_an_altered_release_is_not_exported(release: Path) -> None:
    flip_one_outcome(Evidence(release))
    result = CliRunner().invoke(app, ["export", release.name, "--format", "inspect", "--output", "out"])
    assert result.exit_code == 3
    assert "sha256 is" in result.output
    assert not Path("out").exists()
