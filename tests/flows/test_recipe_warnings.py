"""Every use of a recipe shows its warnings: check, plan, merge, a run and its report."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from demo_project import PROFILES, expect
from typer.testing import CliRunner, Result

from mergegate.flows.cli.app import app
from mergegate.flows.outcome.report_content import recipe_warnings
from mergegate.flows.preflight import Problems, preflight_profile
from mergegate.flows.profile import load_profile
from mergegate.merge_core import load_recipe
from mergegate.merge_core.errors import InvalidInput

RECIPE = {
    "merge_method": "linear",
    "dype": "float32",
    "models": [
        {"model": "demo/models/reverser", "parameters": {"weight": 0.5, "density": 0.5}},
        {"model": "demo/models/shifter", "parameters": {"weight": 0.5}, "revision": "v1"},
    ],
}
PLACES = ("dype", "models[0].parameters.density", "models[1].revision")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set up a recipe with three ignored keys, and its profile."""
    (tmp_path / "demo").symlink_to(PROFILES / "demo")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    (tmp_path / "profile.yaml").write_text(
        "name: p\nrecipe: recipe.yaml\nperplexity: {documents: demo/data/held-out.jsonl, max_increase: '5%'}\n"
        "publish: {to: directory, path: releases}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MERGEGATE_HOME", str(tmp_path / "home"))
    return tmp_path


def mergegate(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize(
    "line", ["check recipe.yaml", "check profile.yaml", "plan recipe.yaml --no-probe", "merge recipe.yaml out"]
)
def test_commands_print_recipe_warnings_and_continue(project: Path, line: str) -> None:
    result = expect(mergegate(*line.split()), 0)
    text = re.sub(r"\s+", "", result.output + result.stderr)
    assert all(f"recipe.yaml:{place}:" in text for place in PLACES)
    assert "didyoumean'dtype'?" in text


def test_json_lists_each_finding_separately(project: Path) -> None:
    warned = json.loads(mergegate("check", "recipe.yaml", "--json").stdout)
    assert {f"recipe.yaml: {place}" for place in PLACES} <= {one["where"] for one in warned["findings"]}
    (project / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "out_dtype": "x", "align_experts": 3}))
    refused = expect(mergegate("check", "recipe.yaml", "--json"), 2)
    found = {one["where"]: one["severity"] for one in json.loads(refused.stdout)["findings"]}
    assert found == {
        **{f"recipe.yaml: {place}": "warn" for place in PLACES},
        "recipe.yaml: out_dtype": "block",
        "recipe.yaml: align_experts": "block",
    }


def test_a_run_prints_recipe_warnings_first_and_its_report_has_them_without_paths(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced: list[str] = []
    monkeypatch.setattr("mergegate.flows.preflight.announce", announced.append)
    (project / "recipe.yaml").write_text(yaml.safe_dump(RECIPE).replace("demo/models/reverser", "./nowhere"))
    lines = recipe_warnings(load_recipe(project / "recipe.yaml"))
    assert [line.partition(": ")[0] for line in lines] == list(PLACES)
    assert not any(str(project) in line for line in lines)
    with pytest.raises(InvalidInput, match="no such directory"):
        preflight_profile(load_profile(Path("profile.yaml")), Problems(stop_at_once=True))
    assert len(announced) == len(PLACES)
    for line, place in zip(announced, PLACES, strict=True):
        assert re.match(rf"warning: \S*recipe.yaml: {re.escape(place)}: ", line)
