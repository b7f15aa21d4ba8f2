"""Overrides for one run: ``--set`` parses them, refuses invalid ones, and records them with the run."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from demo_project import PROFILES, Project, expect, make_project
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegate.flows.profile import load_profile
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import with_overrides

PROFILE = {"name": "demo", "evaluate": {"documents": 400, "tasks": [{"task": "a", "max_drop": 3}, {"task": "b"}]}}


@pytest.mark.parametrize(
    ("said", "path", "value"),
    [
        (["evaluate.documents=200"], ("evaluate", "documents"), 200),
        (["evaluate.tasks[1].max_drop=1.5"], ("evaluate", "tasks", 1, "max_drop"), 1.5),
        (["evaluate.tasks[0]={task: c}"], ("evaluate", "tasks", 0), {"task": "c"}),
        (["limits.run=2 h"], ("limits", "run"), "2 h"),
        (["publish=null"], ("publish",), None),
        (["name=a=b"], ("name",), "a=b"),
        (["name=one", "name=two"], ("name",), "two"),
    ],
)
def test_a_path_has_the_value(said: list[str], path: tuple[Any, ...], value: object) -> None:
    before = json.dumps(PROFILE)
    found: Any = with_overrides(PROFILE, said)
    for step in path:
        found = found[step]
    assert found == value
    assert json.dumps(PROFILE) == before


KEYS = st.lists(st.from_regex(r"[a-z_][a-z0-9_-]{0,5}", fullmatch=True), min_size=1, max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("abc ", max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=2),
)


@settings(max_examples=25)
@given(KEYS, VALUES)
def test_whatever_yaml_says_stands_where_the_path_leads(keys: list[str], value: Any) -> None:
    found: Any = with_overrides({}, [f"{'.'.join(keys)}={yaml.safe_dump(value, default_flow_style=True)}"])
    for key in keys:
        (found,) = (inner for name, inner in found.items() if name == key)
    assert found == value


@pytest.mark.parametrize(
    ("said", "message"),
    [
        *((said, "KEY=VALUE") for said in ("evaluate", "=3", "[0]=3", "a..b=3", ".name=3", "a[x]=3")),
        ("name.x=3", "name is 'demo'"),
        ("evaluate.tasks[2].max_drop=3", "a list with more than 2 items"),
        ("evaluate.tasks.a=3", "a section"),
        ("evaluate[0]=3", "a list with more than 0 items"),
        ("name=[", "a value in YAML"),
        ("name=--- 1\n--- 2", "one value"),
    ],
)
def test_invalid_overrides_are_refused(said: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        with_overrides(PROFILE, [said])
    assert message in str(caught.value)
    assert "--set" in str(caught.value)


def test_an_unknown_key_is_refused_with_the_closest_key_and_overrides_in_a_file_are_refused(tmp_path: Any) -> None:
    project = make_project(tmp_path)
    result = project.mergegate("run", "profiles/demo.yaml", "--set", "evaluate.documnts=100")
    expect(result, 2, "did you mean 'documents'?", "--set evaluate.documnts=100")
    path = project.root / "profiles" / "demo.yaml"
    path.write_text(path.read_text() + "overrides: [name=x]\n")
    with pytest.raises(InvalidInput, match="--set"):
        load_profile(path)


@pytest.mark.parametrize("file", sorted(PROFILES.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_parsed_profile_can_be_overridden_like_its_file(file: Any) -> None:
    override = "merge.seed=7"
    from_value, from_file = load_profile(load_profile(file), [override]), load_profile(file, [override])
    assert from_value == from_file
    assert from_value.merge.seed == 7


@pytest.mark.proof
def test_a_run_records_its_overrides_and_no_publish_is_respected(demo: Project) -> None:
    before = sorted(path.name for path in (demo.root / "releases" / "demo").iterdir())
    told = ("--set", "evaluate.tasks[0].max_drop=2.5")
    done = expect(demo.mergegate("run", "profiles/demo.yaml", *told, "--no-publish", "--json"), 0)
    outcome = json.loads(done.output)
    assert (outcome["status"], outcome["overrides"]) == ("passed", ["evaluate.tasks[0].max_drop=2.5"])
    assert outcome["content"]["verdict"]["guards"][0]["max_drop"] == 2.5
    assert sorted(path.name for path in (demo.root / "releases" / "demo").iterdir()) == before
    page = (demo.home / "reports" / "demo.html").read_text(encoding="utf-8")
    assert "evaluate.tasks[0].max_drop=2.5" in page
    (newest, *_) = json.loads(demo.mergegate("history", "--json").output)["runs"]
    assert newest["overrides"] == ["evaluate.tasks[0].max_drop=2.5"]

    published = json.loads(demo.mergegate("run", "profiles/demo.yaml", *told, "--json").output)
    assert published["status"] == "released"
    said = json.loads((demo.latest / "provenance.json").read_text())
    parameters = said["predicate"]["buildDefinition"]["externalParameters"]
    assert parameters["overrides"] == ["evaluate.tasks[0].max_drop=2.5"]
    assert demo.mergegate("verify", "releases/demo/latest").exit_code == 0
