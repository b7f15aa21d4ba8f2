"""A thinking model goes through ``init``, ``check`` and ``run``, and its scores are those of lm-eval."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from demo_project import PROFILES, Project, expect
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval_runs import prepare, simple_evaluate
from typer.testing import Result

from mergegate.tasks.quality.evaluation.scoring.document_scores import SCORES_FILE, read_document_scores

MODELS = ("profiles/demo/models/base", "profiles/demo/models/thinker")
TASK = "tasks/reverse-written.yaml"
DOCUMENTS = 48


def write_task(project: Project) -> None:
    """Write a task with the first words of the demo, which a model reverses in its answer."""
    (project.root / "data").mkdir()
    (project.root / "tasks").mkdir()
    lines = (PROFILES / "demo/data/reverse.jsonl").read_text().splitlines(keepends=True)
    (project.root / "data/reverse.jsonl").write_text("".join(lines[:DOCUMENTS]))
    shutil.copy(PROFILES / "demo/tasks/reverse-written.yaml", project.root / TASK)


def lm_evals_scores(model: Path, task: Path, scratch: Path, budget: int) -> Mapping[int, tuple[float, str]]:
    """Return score and answer of each document, as lm-eval computes them with the settings of the profile."""
    settings = {"dtype": "float32", "batch_size": 16, "think_end_token": "z", "enable_thinking": True}
    lm = HFLM(pretrained=str(model), device="cpu", **settings)
    manager = TaskManager(include_path=str(prepare([task], scratch)), include_defaults=False)
    results = simple_evaluate(
        lm,
        tasks=["reverse-written"],
        apply_chat_template=True,
        gen_kwargs=f"max_gen_toks={budget}",
        log_samples=True,
        bootstrap_iters=0,
        task_manager=manager,
    )
    samples = results["samples"]["reverse-written"]
    return {sample["doc_id"]: (sample["exact_match"], sample["filtered_resps"][0]) for sample in samples}


@pytest.mark.proof
def test_a_thinking_model_is_recognized_checked_and_released(project: Project, tmp_path: Path) -> None:
    write_task(project)
    tasks = ("--task", f"{TASK}:thinker", "--task", "profiles/demo/tasks/shift.yaml:base")
    text = ("--data", "profiles/demo/data/held-out.jsonl")
    result = project.mergegate("init", *MODELS, *tasks, *text, "--yes", "--name", "thinks")
    expect(result, 0, "thinking thinker: its thoughts end with z")
    file = project.root / "thinks.yaml"
    profile = yaml.safe_load(file.read_text())
    settings = {"chat_template": True, "enable_thinking": True, "think_end_token": "z"}
    assert settings.items() <= profile["evaluate"].items()
    written, shift = profile["evaluate"]["tasks"]
    assert written["gen_kwargs"] == {"max_gen_toks": 64}  # half of the context of the demo family
    assert shift["apply_chat_template"] is False  # the task scores given answers
    checked = json.loads(project.mergegate("check", "thinks.yaml", "--json").stdout)
    assert not [finding for finding in checked["findings"] if "think" in finding["found"]]

    # The mean of both models does not think. Most of the thinker does.
    profile["evaluate"]["tasks"] = [{**written, "max_drop": 8}]
    profile["evaluate"]["dtype"] = "float32"  # as lm-eval below; "auto" depends on the units of the processor
    file.write_text(yaml.safe_dump(profile))
    recipe = yaml.safe_load((project.root / "thinks.recipe.yaml").read_text())
    for model, weight in zip(recipe["models"], (0.04, 0.96), strict=True):
        model["parameters"]["weight"] = weight
    (project.root / "thinks.recipe.yaml").write_text(yaml.safe_dump(recipe))
    run = expect(project.mergegate("run", "thinks.yaml"), 0)
    assert {"tokens", "answer,", "thoughts"} <= set(run.output.split()), run.output  # the line wraps

    stored = []
    for directory in (project.home / "store/evaluate").iterdir():
        rows = read_document_scores(directory / SCORES_FILE)
        assert {row.prompt_cut for row in rows} == {0}
        stored.append({row.doc_id: (row.outcome, row.answer) for row in rows})
    release = (project.root / "releases/thinks/latest").resolve()
    references = {project.root / model for model in MODELS} | {release}
    for number, model in enumerate(sorted(references)):
        assert lm_evals_scores(model, project.root / TASK, tmp_path / f"scratch{number}", 64) in stored

    # Without the settings, thoughts are scored as answers, and check says so.
    for name in ("enable_thinking", "think_end_token"):
        del profile["evaluate"][name]
    file.write_text(yaml.safe_dump(profile))
    unaware = json.loads(project.mergegate("check", "thinks.yaml", "--json").stdout)
    assert [finding["found"] for finding in unaware["findings"] if "thinking model" in finding["found"]] == [
        "thinker is a thinking model, but think_end_token is not set: its thoughts are scored as answers"
    ]


def check_given(project: Project, task: str, **evaluate: object) -> Result:
    """Check a profile with a chat template and one task."""
    write_task(project)
    tasks = [{"task": task, "guarded_by": "base"}]
    profile = {
        "name": "given",
        "recipe": "profiles/demo/recipes/ties.yaml",
        "checks": {"license": {"purpose": "commercial", "visibility": "public"}},
        "evaluate": {"chat_template": True, "tasks": tasks, **evaluate},
    }
    (project.root / "given.yaml").write_text(yaml.safe_dump(profile))
    return project.mergegate("check", "given.yaml", "--json")


def test_check_refuses_to_let_a_model_think_before_given_answers(project: Project) -> None:
    result = check_given(project, "profiles/demo/tasks/reverse.yaml", enable_thinking=True, think_end_token="z")
    expect(result, 2, "before which no model thinks", "set enable_thinking: false for this task")


@pytest.mark.story
def test_check_says_when_no_template_reads_a_setting(project: Project) -> None:
    checked = check_given(project, TASK, chat_template_args={"reasoning_effort": "low"})
    found = [finding["found"] for finding in json.loads(checked.stdout)["findings"]]
    assert any(text.startswith("reasoning_effort has no effect: the chat template of") for text in found)
