"""Each new merge is judged on other documents than the last one, and nothing is evaluated twice."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
from demo_project import Printed, Project

Released = tuple[Project, Printed]
FIRST, SIZE = 100, 400  # documents of the first look, and of each task of the demo
SEED = 1  # the released demo has no scores in this order


def write_profile(project: Project, density: float, *settings: str) -> str:
    """Write a profile whose guard on ``copy`` compares with the champion, and return its path."""
    lines = [
        "name: changing",
        "recipe:",
        "  merge_method: ties",
        "  base_model: demo/models/base",
        "  models:",
        f"    - {{model: demo/models/reverser, parameters: {{weight: 1.0, density: {density}}}}}",
        "    - {model: demo/models/shifter, parameters: {weight: 1.0, density: 0.5}}",
        "  dtype: bfloat16",
        "checks: {license: {purpose: commercial, visibility: public}}",
        "evaluate:",
        f"  documents: {FIRST}",
        f"  seed: {SEED}",
        *(f"  {setting}" for setting in settings),
        "  tasks:",
        "    - {task: demo/tasks/copy.yaml, guarded_by: champion, max_drop: 8, margin: 12}",
        "    - {task: demo/tasks/copy.yaml, guarded_by: base, max_drop: 8, margin: 12}",
        "    - {task: demo/tasks/reverse.yaml, guarded_by: reverser, max_drop: 8, margin: 12}",
        "publish: {to: directory, path: ../releases/changing}",
    ]
    (project.root / "profiles" / "changing.yaml").write_text("\n".join(lines) + "\n")
    return "profiles/changing.yaml"


def run(project: Project, profile: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(project.mergegate("run", profile, "--json").stdout)
    return found


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


@pytest.mark.story
def test_each_new_merge_is_judged_on_the_next_documents_and_a_repeated_one_on_its_own(released: Released) -> None:
    project, _ = released
    first = run(project, write_profile(project, 0.5))
    assert first["status"] == "released", first
    copy = guards(first)["copy", "base"]
    assert copy["sample_start"] == 0  # no champion yet

    card = (project.root / "releases" / "changing" / "latest" / "README.md").read_text()
    assert "The documents that measured these scores also selected this merge." in card
    checked = project.mergegate("check", write_profile(project, 0.45)).output
    assert f"copy: each new merge is judged on the next {FIRST} of {SIZE} documents" in checked

    before = evaluated(project)
    assert run(project, write_profile(project, 0.5))["status"] == "nothing new"
    assert evaluated(project) == before

    planned = json.loads(project.mergegate("run", write_profile(project, 0.45), "--dry-run", "--json").stdout)
    missing = {stage["subject"]: stage["missing"] for stage in planned["stages"] if stage["stage"] == "evaluate"}
    assert missing["base, copy"] == (FIRST if copy["n"] < SIZE else 0)  # the next documents
    assert missing["base, reverse"] == 0

    start = copy["n"] % SIZE
    outcomes = {}
    for density in (0.45, 0.4):
        outcomes[density] = run(project, write_profile(project, density))
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
        for model, task, first, last in evaluated(project)
        if model == "base"
        for position in range(first, last)
    ]
    assert max(Counter(answers).values()) == 1  # the reference answers each document once, however many samples use it
    before = evaluated(project)
    if outcomes[0.4]["status"] == "refused":
        assert run(project, write_profile(project, 0.4))["content"] == outcomes[0.4]["content"]
    else:
        assert run(project, write_profile(project, 0.4))["status"] == "nothing new"
    assert evaluated(project) == before

    kept = run(project, write_profile(project, 0.35, "resample: false"))
    assert guards(kept)["copy", "champion"]["sample_start"] == 0
