"""`mergegate export` on the released demo: it needs the release only, and refuses what it cannot export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from demo_project import Printed, Project
from forged_evidence import Evidence, flip_one_outcome
from typer.testing import CliRunner

from mergegate.flows.cli.app import app
from mergegate.tasks.publish.content import PROVENANCE

Released = tuple[Project, Printed]


@pytest.fixture
def release(released: Released, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the demo release, in the working directory, without a store."""
    version = released[0].latest.resolve()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MERGEGATE_HOME", str(tmp_path / "no-store"))
    return Path(shutil.copytree(version, tmp_path / version.name))


@pytest.mark.story
def test_scores_and_settings_are_those_of_the_run(release: Path) -> None:
    result = CliRunner().invoke(app, ["export", release.name, "--format", "inspect", "--output", "logs", "--json"])
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
        (["inspect", "--output", "there"], "it exists"),
        (["helm", "--output", "out"], "helm"),
        (["every-eval-ever", "--output", "out", "--organization", " Acme"], "--organization"),
    ],
)
def test_wrong_arguments_are_refused(release: Path, arguments: list[str], message: str) -> None:
    Path("there").mkdir()
    result = CliRunner().invoke(app, ["export", release.name, "--format", *arguments])
    assert (result.exit_code, message in result.output) == (2, True), result.output
    assert not Path("out").exists()


def test_an_altered_release_is_not_exported(release: Path) -> None:
    flip_one_outcome(Evidence(release))
    result = CliRunner().invoke(app, ["export", release.name, "--format", "inspect", "--output", "out"])
    assert result.exit_code == 3
    assert "sha256 is" in result.output
    assert not Path("out").exists()
