"""``profiles/demo-regmean.yaml`` from the recipe to the release. Each model reads its own text before the merge."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml
from demo_project import PROFILES, Project, expect, make_project

from mergegate.merge_core import load_recipe
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.preflight import collect_calibration_texts
from mergegate.tasks.quality.evaluation import CountLimit, find_contaminated_documents, pin_data, pin_task

PROFILE = "profiles/demo-regmean.yaml"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, prefect_api: None) -> Project:
    """Return a project in which the demo of RegMean has been released."""
    project = make_project(tmp_path_factory.mktemp("regmean"))
    expect(project.mergegate("run", PROFILE), 0, "statistics")
    return project


def own_profile(project: Project, name: str, **changes: object) -> str:
    """Write the profile next to the demo, with the recipe inline and changed as given; return its path."""
    profile = yaml.safe_load((project.root / PROFILE).read_text())
    recipe = yaml.safe_load((PROFILES / "demo/recipes/regmean.yaml").read_text())
    for entry in recipe["models"]:
        entry.update({key: entry[key].replace("../", "demo/") for key in ("model", "text")})
    profile |= {"name": name, "recipe": {**recipe, **changes}, "publish": {"to": "directory", "path": f"../{name}"}}
    (project.root / f"profiles/{name}.yaml").write_text(yaml.safe_dump(profile))
    return f"profiles/{name}.yaml"


@pytest.mark.proof
def test_it_is_released_with_both_skills_and_names_its_texts(project: Project) -> None:
    latest = project.root / "releases/demo-regmean/latest"
    predicate = json.loads((latest / "provenance.json").read_text())["predicate"]
    scores = {guard["task"]: guard["merge_score"] for guard in predicate["mergegate_verdict"]["guards"]}
    assert scores["copy"] >= 0.99
    assert scores["reverse"] >= 0.96
    assert scores["shift"] >= 0.99
    assert "text: ../data/texts/reverser.jsonl" in (latest / "README.md").read_text()
    dependencies = predicate["buildDefinition"]["resolvedDependencies"]
    texts = [one for one in dependencies if one["annotations"]["role"] == "text"]
    hashes = HashMemo(project.root / "hashes.db")
    assert {one["name"]: one["digest"]["sha256"] for one in texts} == {
        f"../data/texts/{name}.jsonl": hashes.sha256(PROFILES / f"demo/data/texts/{name}.jsonl")
        for name in ("reverser", "shifter")
    }
    assert project.mergegate("verify", "releases/demo-regmean/latest").exit_code == 0


@pytest.mark.proof
def test_a_second_run_reads_nothing_and_other_off_diagonals_only_merge_anew(project: Project) -> None:
    before = {stage: project.artifacts(stage) for stage in ("statistics", "overlap", "merge", "evaluate")}
    assert len(before["statistics"]) == 2
    expect(project.mergegate("run", PROFILE), 0, "nothing new")
    assert {stage: project.artifacts(stage) for stage in before} == before
    assert "are cached" in project.mergegate("run", PROFILE, "--dry-run").output
    name = own_profile(project, "more", parameters={"off_diagonals": 0.95})
    assert project.mergegate("run", name).exit_code == 0
    assert project.artifacts("statistics") == before["statistics"]
    assert len(project.artifacts("merge") - before["merge"]) == 1


@pytest.mark.proof
def test_it_is_reproduced_from_its_texts_or_says_which_is_another(project: Project) -> None:
    recipes = str(project.root / "profiles/demo/recipes")
    expect(project.mergegate("reproduce", "releases/demo-regmean/latest", "--parents", recipes), 0)
    elsewhere = project.root / "elsewhere"
    for place in ("models", "data/texts"):
        shutil.copytree(PROFILES / "demo" / place, elsewhere / place)
    (elsewhere / "recipes").mkdir()
    text = elsewhere / "data/texts/shifter.jsonl"
    text.write_text(text.read_text() + '{"text": "shift: ab>bc"}\n')
    result = project.mergegate("reproduce", "releases/demo-regmean/latest", "--parents", str(elsewhere / "recipes"))
    assert result.exit_code != 0
    assert "shifter.jsonl" in result.output
    assert "a text that differs from the one in the provenance" in result.output


@pytest.mark.story
def test_what_a_task_asks_is_found_in_a_text(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Exactly the documents that a text contains are found in it, in any case and with any punctuation."""
    monkeypatch.setenv("MERGEGATE_HOME", str(tmp_path / "home"))
    hashes, limit = HashMemo(tmp_path / "hashes.db"), CountLimit()
    task = pin_data(pin_task("tasks/reverse.yaml", PROFILES / "demo", hashes))
    rows = [json.loads(line) for line in (PROFILES / "demo/data/reverse.jsonl").read_text().splitlines()]

    def read(*texts: str) -> int:
        (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
        recipe = load_recipe(
            {"merge_method": "regmean", "models": [{"model": "a", "text": str(tmp_path / "text.jsonl")}]}
        )
        found = collect_calibration_texts(recipe, hashes)
        assert found is not None
        value = find_contaminated_documents.build(task, found, limit).value
        assert value.documents == len(rows)
        return value.read

    assert read(*(row["prompt"] + row["answer"] for row in rows[:7])) == 7
    assert read("Question:\n " + rows[3]["prompt"] + "\n\nAnswer: " + rows[3]["answer"]) == 1
    assert read(rows[0]["prompt"], rows[0]["answer"]) == 0  # The answer is in another text.
    assert read(rows[0]["answer"] + " " + rows[0]["prompt"]) == 0  # The answer comes before the prompt.
    assert read("rev: nothing>of this") == 0
    assert read("REV  " + rows[5]["prompt"].removeprefix("rev:").upper() + " -- " + rows[5]["answer"].title()) == 1
