"""``profiles/demo-upcycled.yaml`` from the recipe to the release.

Dense models become a mixture of experts that is checked, evaluated, released, and reproduced from its provenance.
"""

from __future__ import annotations

import json

import pytest
from demo_project import Printed, Project, make_project
from sheet_sources import require_correct_sheet

pytestmark = pytest.mark.story


@pytest.fixture(scope="module")
def upcycled(tmp_path_factory: pytest.TempPathFactory, prefect_api: None) -> tuple[Project, Printed]:
    project = make_project(tmp_path_factory.mktemp("upcycled"))
    result = project.mergegate("run", "profiles/demo-upcycled.yaml")
    return project, Printed(result.exit_code, result.output)


Upcycled = tuple[Project, Printed]


def test_its_size_is_known_before(project: Project) -> None:
    result = project.mergegate("plan", "profiles/demo-upcycled.yaml", "--json")
    assert result.exit_code == 0, result.output
    assert "mixture of 4 experts" in project.mergegate("check", "profiles/demo-upcycled.yaml").output
    said = json.loads(result.stdout)
    dense = (project.root / "profiles/demo/models/reverser/model.safetensors").stat().st_size
    assert 2 * dense < said["needs"]["bytes_written"] < 4 * dense


def test_it_is_released(upcycled: Upcycled) -> None:
    project, printed = upcycled
    assert printed.exit_code == 0, printed.output
    assert "mixture of 4 experts over reverser" in printed.output
    latest = project.root / "releases" / "demo-upcycled" / "latest"
    config = json.loads((latest / "config.json").read_text())
    assert (config["model_type"], config["num_local_experts"], config["num_experts_per_tok"]) == ("mixtral", 4, 2)
    card = (latest / "README.md").read_text()
    assert "positive_prompts" in card
    assert "license: apache-2.0" in card


def test_its_compliance_sheet_agrees_with_its_sources(upcycled: Upcycled) -> None:
    project, _ = upcycled
    # 59 tensors of 779,232 parameters, a third of them with noise, and 24 prompts of about 20 tokens for 280,416.
    release = project.root / "releases" / "demo-upcycled" / "latest"
    require_correct_sheet(release, project.root / "profiles" / "demo-upcycled.yaml", (5e7, 1e10))
    assert "| texts that models read for it | 24 prompts of the recipe" in (release / "COMPLIANCE.md").read_text()


def test_a_second_run_uses_only_the_cache(upcycled: Upcycled) -> None:
    project, _ = upcycled
    before = {stage: project.artifacts(stage) for stage in ("gates", "merge", "evaluate")}
    assert all(before.values())
    result = project.mergegate("run", "profiles/demo-upcycled.yaml")
    assert result.exit_code == 0
    assert "nothing new" in result.output
    assert {stage: project.artifacts(stage) for stage in before} == before


def test_other_prompts_are_another_merge(upcycled: Upcycled) -> None:
    project, _ = upcycled
    before = project.artifacts("merge")
    text = (project.root / "profiles/demo/recipes/upcycled.yaml").read_text()
    models = project.root / "profiles" / "demo" / "models"
    (project.root / "other.yaml").write_text(
        text.replace("rev: abcd>dcb", "rev: abcd>dc").replace("../models", str(models))
    )
    profile = (project.root / "profiles/demo-upcycled.yaml").read_text()
    (project.root / "profiles/other.yaml").write_text(
        profile.replace("demo/recipes/upcycled.yaml", "../other.yaml").replace("../releases/", "../releases/other-")
    )
    assert project.mergegate("run", "profiles/other.yaml").exit_code == 0
    assert len(project.artifacts("merge") - before) == 1


def test_it_is_reproduced_from_its_provenance(upcycled: Upcycled) -> None:
    project, _ = upcycled
    parents = str(project.root / "profiles" / "demo" / "recipes")
    result = project.mergegate("reproduce", "releases/demo-upcycled/latest", "--parents", parents)
    assert result.exit_code == 0, result.output
