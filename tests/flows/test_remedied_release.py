"""Remedies: which recipes follow a refused merge, and which releases a better one must not replace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from demo_project import Project, expect

pytestmark = pytest.mark.story


@pytest.mark.proof
def test_a_remedy_turns_a_refused_merge_into_a_release_once(demo: Project) -> None:
    result = expect(demo.mergegate("run", "profiles/demo-remedied.yaml", "--json"), 0)
    outcome = json.loads(result.stdout)
    assert outcome["status"] == "released"
    tried = outcome["content"]["attempts"]
    expected = [("linear of 2", "fail"), ("ties of 2 over base", "pass")]
    assert [(one["recipe"], one["outcome"]) for one in tried] == expected
    assert "reverse" in tried[0]["reason"]
    assert yaml.safe_load((Path(outcome["location"]) / "recipe.yaml").read_text())["merge_method"] == "ties"
    page = Path(outcome["report"]).read_text()
    assert "linear of 2" in page
    assert "merge_method: ties" in page
    # Parents are not evaluated again for a remedy, and a second run finds the release.
    before = demo.artifacts("evaluate"), demo.artifacts("gate")
    values = [demo.home / "store" / "evaluate" / key / "value.json" for key in before[0]]
    names = [json.loads(value.read_text())["model"] for value in values]
    assert [names.count(name) for name in ("base", "reverser", "shifter")] == [3, 3, 3]
    expect(demo.mergegate("run", "profiles/demo-remedied.yaml"), 0, "nothing new")
    assert (demo.artifacts("evaluate"), demo.artifacts("gate")) == before


def test_a_misspelt_remedy_is_found_before_anything_is_merged(project: Project) -> None:
    profile = project.edit("demo-remedied.yaml", "density: 0.5", "densty: 0.5")
    expect(project.mergegate("run", profile), 2, "remedies[0]", "density")
    assert project.artifacts("merge") == set()


@pytest.mark.proof
def test_a_merge_is_compared_with_the_current_release(demo: Project) -> None:
    profile = demo.edit("demo.yaml", "guarded_by: reverser", "guarded_by: champion")
    expect(demo.mergegate("run", profile, "--json"), 0)
    again = demo.mergegate("run", profile, "--json")
    assert json.loads(again.stdout)["status"] == "nothing new"
    champion = (demo.root / "releases" / "edited-demo" / "latest").readlink()
    text = (demo.root / profile).read_text().replace("recipes/ties.yaml", "recipes/linear.yaml")
    text = text.replace("guarded_by: base", "guarded_by: shifter")
    (demo.root / profile).write_text(text)
    worse = expect(demo.mergegate("run", profile, "--json"), 3)
    guards = json.loads(worse.stdout)["content"]["verdict"]["guards"]
    judged = [(guard["reference"], guard["outcome"]) for guard in guards if guard["task"] == "reverse"]
    assert judged == [("champion", "fail")]
    assert (demo.root / "releases" / "edited-demo" / "latest").readlink() == champion
