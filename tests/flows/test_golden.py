"""Golden files of every stage: a change of meaning without a new ``version`` fails these tests.

For the demo, the golden files contain each stage's value and file names, with floats rounded so that all machines
agree. After you bump a version, ``UPDATE_GOLDEN=1 make test`` writes the new golden file and deletes the old one.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from demo_project import Project

from mergegate.tasks.base.stage.stages import DeclaredStage
from mergegate.tasks.merge import merge
from mergegate.tasks.preflight.compatibility import check_compatibility
from mergegate.tasks.preflight.licenses.check import check_licenses
from mergegate.tasks.quality.evaluation.stage import evaluate, excerpt
from mergegate.tasks.quality.gate.stage import gate
from mergegate.tasks.quality.gate.verdict_record import record_evidence
from mergegate.tasks.quality.judge.answers import answer
from mergegate.tasks.quality.judge.stage import judge
from mergegate.tasks.quality.perplexity.stage import ensemble_likelihoods, perplexity
from mergegate.tasks.quality.serve.stage import measure_parent, serve
from mergegate.tasks.release.explain.stage import explain, flips
from mergegate.tasks.release.report.stage import write_report

GOLDEN = Path(__file__).parent / "golden"
STAGES = (
    *(check_licenses, check_compatibility, merge, perplexity, evaluate, gate, explain, write_report, record_evidence),
)
OPTIONAL = (excerpt, flips, ensemble_likelihoods, answer, judge, serve, measure_parent)


# Keys that are not compared: durations, versions, and values that depend on single documents. Another processor may
# answer one of 400 documents differently.
PASSING = (
    {"seconds", "lm_eval_version", "reason", "headline", "lost", "won", "drop", "low", "high", "stderr"}
    | {"overall_drop", "overall_low", "overall_high", "detectable_drop", "loglik", "pooled", "chance_left"}
    | {"moved", "opposed", "pair_moved", "pair_opposed"}
    | {"measured", "seen", "when", "machine", "url", "examples", "won_examples", "characters", "identical"}
)


def rounded(value: object) -> object:
    """Round floats to one decimal, which reveals a change of meaning but hides differences between machines."""
    if isinstance(value, float):
        return round(value, 1)
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items() if key not in PASSING}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return value


def check(stage: DeclaredStage, home: Path) -> None:  # type: ignore[type-arg]
    """Compare all artifacts of ``stage`` in the store of ``home`` with the golden file of its version."""
    made = []
    for artifact in (home / "store" / stage.name).iterdir():
        if artifact.is_file():  # the stage returns a value and writes no files
            files, value = ["value.json"], json.loads(artifact.read_text())["value"]
        else:
            files = sorted(json.loads((artifact / "manifest.json").read_text())["files"])
            value = json.loads((artifact / "value.json").read_text())
        made.append({"files": files, "value": rounded(value)})
    made.sort(key=lambda entry: json.dumps(entry, sort_keys=True))
    text = json.dumps(made, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    golden = GOLDEN / f"{stage.name}-v{stage.version}.json"
    if os.environ.get("UPDATE_GOLDEN"):
        for old in GOLDEN.glob(f"{stage.name}-v*.json"):
            old.unlink()
        golden.write_text(text)
    assert golden.is_file(), f"no golden file for version {stage.version}: run with UPDATE_GOLDEN=1 and look at it"
    assert text == golden.read_text(), f"{stage.name} means something else now: bump its version"


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_stage_makes_what_its_version_promises(stage: DeclaredStage, demo: Project) -> None:  # type: ignore[type-arg]
    check(stage, demo.home)


@pytest.fixture(scope="module")
def with_everything(tmp_path_factory: pytest.TempPathFactory, released_with_everything: Path) -> Project:
    """Return a project with the demo released with every optional stage, and a merge that lost a skill."""
    root = tmp_path_factory.mktemp("everything") / "project"
    shutil.copytree(released_with_everything, root, symlinks=True)
    project = Project(root)
    assert project.mergegate("run", "profiles/demo-refused.yaml").exit_code == 3
    few = project.edit(
        "demo.yaml", "evaluate:\n", "evaluate:\n  documents: 100\n  extend: false\n  on_inconclusive: pass\n"
    )
    assert project.mergegate("run", few).exit_code == 0
    return project


@pytest.mark.proof
@pytest.mark.parametrize("stage", OPTIONAL, ids=lambda stage: stage.name)
def test_an_optional_stage_makes_what_its_version_promises(stage: DeclaredStage, with_everything: Project) -> None:  # type: ignore[type-arg]
    check(stage, with_everything.home)
