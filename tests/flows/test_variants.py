"""Quantized variants in a run: each has its own verdict, and the release of the merge does not depend on them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from demo_project import Project, expect
from test_killed_run import files_of

pytestmark = [pytest.mark.story, pytest.mark.usefixtures("rounded")]

GOOD, BAD = "{format: rounded, bits: [8, 6]}", "{format: rounded, bits: 7, suffix: Bad, fault: scales}"
# Stages that a variant needs.
STAGES = ("agreement", "variant", "perplexity", "evaluate")
ALL = (*STAGES, "merge", "gate", "report", "evidence")
Gained = tuple[Project, dict[str, Any], dict[str, set[str]]]


def with_variants(project: Project, *variants: str, name: str = "demo", old: str = "", new: str = "") -> str:
    """Write a profile like the demo with ``variants``, and return its path."""
    text = (project.root / "profiles" / "demo.yaml").read_text()
    assert old in text
    lines = "".join(f"  - {variant}\n" for variant in variants)
    text = text.replace(old, new).replace("name: demo\n", f"name: {name}\n")
    text = text.replace("path: ../releases/demo", f"path: ../releases/{name}")
    text += f"variants:\n{lines}" if lines else ""
    (project.root / "profiles" / f"{name}-variants.yaml").write_text(text)
    return f"profiles/{name}-variants.yaml"


def run(project: Project, profile: str, code: int = 0) -> dict[str, Any]:
    result = project.mergegate("run", profile, "--json")
    assert result.exit_code == code, result.output
    outcome: dict[str, Any] = json.loads(result.stdout)
    return outcome


def built(project: Project) -> dict[str, set[str]]:
    return {stage: project.artifacts(stage) for stage in ALL}


def verdicts(outcome: dict[str, Any]) -> dict[str, Any]:
    return {variant["type"]: variant for variant in outcome["content"]["variants"]}


@pytest.fixture(scope="module")
def gained(demo: Project, rounded: None) -> Gained:
    """Add variants to the profile of the released demo, and run it.

    Return the demo, the outcome and the keys of the artifacts that this run built, by stage.
    """
    before = built(demo)
    outcome = run(demo, with_variants(demo, GOOD, BAD))
    return demo, outcome, {stage: keys - before[stage] for stage, keys in built(demo).items()}


@pytest.mark.proof
def test_each_variant_has_a_verdict_against_the_merge_and_a_failed_optional_one_refuses_nothing(gained: Gained) -> None:
    _, outcome, _ = gained
    judged = verdicts(outcome)
    expected = {"R8": ("pass", True), "R6": ("pass", True), "R7": ("fail", False)}
    assert {name: (each["outcome"], each["publishable"]) for name, each in judged.items()} == expected
    gate = judged["R8"]["gate"]
    assert {guard["reference"] for guard in gate["guards"]} == {"merge"} == {gate["drift"]["reference"]}
    assert [guard["task"] for guard in gate["guards"]] == ["copy", "reverse", "shift"]
    assert judged["R8"]["conversion"]["texts"] == 4 * 200  # held-out documents and prompts of three tasks
    assert judged["R8"]["record"]["tensor_types"]["R8"] > 0
    assert [check["name"] for check in judged["R8"]["checks"]] == ["tokenizer", "chat template", "weights", "text"]
    assert outcome["content"]["verdict"]["publishable"]
    (reason, *_) = judged["R7"]["reasons"]
    assert "perplexity" in reason
    assert "of merge" in reason
    assert "text" not in [check["name"] for check in judged["R7"]["checks"]]  # a bad one is not served


@pytest.mark.proof
def test_a_released_merge_that_gains_variants_is_not_merged_evaluated_or_released_again(gained: Gained) -> None:
    project, outcome, new = gained
    assert new["merge"] == set()
    assert outcome["version"] == project.latest.resolve().name
    releases = [path.name for path in project.latest.parent.iterdir() if path.is_dir() and not path.is_symlink()]
    assert releases == [outcome["version"]]
    values = [project.home / "store" / "evaluate" / key / "value.json" for key in new["evaluate"]]
    assert {json.loads(value.read_text())["model"] for value in values} == {"R8", "R6", "R7"}


@pytest.mark.proof
def test_a_required_variant_that_fails_refuses_the_release(gained: Gained) -> None:
    project, _, _ = gained
    profile = with_variants(project, GOOD, BAD.replace("}", ", required: true}"), name="strict")
    expect(project.mergegate("run", profile), 3, "refused: strict is not released", "variant R7: perplexity is 1.3")
    assert not (project.root / "releases" / "strict").exists()


@pytest.mark.proof
def test_every_fault_is_a_reason_and_none_ends_the_run(gained: Gained) -> None:
    project, _, _ = gained
    faults = ("conversion", "build", "template", "tokenizer", "truncated", "answers", "swapped")
    variants = [
        f"{{format: rounded, bits: {9 + at}, suffix: {fault}, fault: {fault}}}" for at, fault in enumerate(faults)
    ]
    outcome = run(project, with_variants(project, *variants, name="faulty"))
    assert outcome["status"] == "released"
    judged = dict(zip(faults, verdicts(outcome).values(), strict=True))
    reasons = {fault: verdict["reasons"][0] for fault, verdict in judged.items() if verdict["outcome"] == "fail"}
    assert reasons.keys() == set(faults)
    assert "differs from the merge by 3.25 nats" in reasons["conversion"]
    assert judged["conversion"]["record"] is None
    assert "expected: a multiple of 32" in reasons["build"]
    assert reasons["tokenizer"].startswith("tokenizer: ")
    assert reasons["truncated"].startswith("weights: ")
    assert judged["truncated"]["gate"] is None
    assert reasons["answers"].startswith("text: ")
    assert judged["answers"]["gate"]["outcome"] == "pass"


def test_check_names_the_quantizer_and_every_problem_of_the_variants(gained: Gained) -> None:
    project, _, _ = gained
    profile = with_variants(
        project,
        "{format: rounded, bits: 8, fault: environment}",
        "{format: rounded, bits: 6, suffix: A, guards: [{task: copi}]}",
        "{format: rounded, bits: 7, suffix: B, margin: 1}",
        "{format: rounded, bits: 5, suffix: C, guards: [{task: demo/tasks/copy.yaml, max_drop: 1}], required: true}",
        name="wrong",
    )
    output = project.mergegate("check", profile).output
    assert "the rounder is not installed" in output
    assert "variants: R6: guards: 'copi', which the release does not evaluate" in output
    assert "did you mean 'copy'?" in output.lower()
    assert "variants: R7: guard on copy: a margin of 1 points" in output
    assert "variants: R5 with rounder 1.0" in output
    assert "margins against the merge in points: copy 2; perplexity at most 5 % higher; a failure refuses" in output


def test_a_dry_run_lists_the_stages_of_each_variant(gained: Gained) -> None:
    project, _, _ = gained
    profile = with_variants(project, GOOD, "{format: rounded, bits: 5, suffix: New, max_drop: 0.1, margin: 0.2}")
    result = project.mergegate("run", "--dry-run", "--json", profile)
    planned = json.loads(result.stdout)
    states = {(stage["stage"], stage["subject"]): stage["missing"] for stage in planned["stages"]}
    cached = {"R8", "R6"}
    for name in ("R8", "R6", "R5"):
        assert states["variant", name] == states["perplexity", name] == int(name not in cached)
        assert states["evaluate", f"{name}, copy"] == (0 if name in cached else 400)
    warning = next(finding for finding in planned["findings"] if finding["where"] == "variants: R5")
    assert "as good as the merge passes" in warning["found"]
    with_variants(project, GOOD, BAD)


@pytest.mark.proof
def test_a_champion_that_gains_a_variant_publishes_only_that(demo_release: Path, tmp_path: Path) -> None:
    shutil.copytree(demo_release, tmp_path / "project", symlinks=True)
    project = Project(tmp_path / "project")
    change = {"name": "champ", "old": "guarded_by: base", "new": "guarded_by: champion"}
    first = run(project, with_variants(project, **change))
    before = built(project)
    gained = run(project, with_variants(project, GOOD, **change))
    assert gained["version"] == first["version"]
    after = built(project)
    assert after["merge"] == before["merge"]
    assert len(after["variant"]) == 2
    again = run(project, with_variants(project, GOOD, **change))
    assert again["status"] == "nothing new"
    assert {stage: built(project)[stage] for stage in STAGES} == {stage: after[stage] for stage in STAGES}
    refused = run(project, with_variants(project, GOOD, BAD.replace("}", ", required: true}"), **change), code=3)
    assert f"champ {first['version']} is released without a variant that is required" in refused["message"]
    assert "variant R7: perplexity" in refused["message"]


# Publication.


@pytest.mark.proof
def test_each_place_is_published_once_and_one_that_fails_leaves_the_others_until_the_next_run(
    published_variants: Project, demo_release: Path
) -> None:
    outcome = json.loads((published_variants.root / "outcome.json").read_text())
    assert outcome["status"] == "released"
    assert outcome["message"].startswith("released R8, R6, R7 of demo ")
    assert [(each["types"], each["new"]) for each in outcome["variants"]] == [(["R8", "R6"], True), (["R7"], True)]
    # The release of the merge does not depend on its variants.
    assert files_of(published_variants.latest) == files_of(Project(demo_release).latest)
    again = run(published_variants, "profiles/demo.yaml")
    assert again["status"] == "nothing new"
    assert [each["new"] for each in again["variants"]] == [False, False]
    second = published_variants.root / "releases" / "demo-Second"
    version = (second / "latest").resolve()
    genuine = (version / "README.md").read_bytes()
    (version / "README.md").write_bytes(genuine + b"edited")
    shutil.rmtree(second.with_name("demo-Rounded"))
    failed = run(published_variants, "profiles/demo.yaml", code=3)
    for words in (
        "was released before, but not all of its variants",
        "demo-Second is not published: ",
        "other content",
        "Run again to publish the missing variants.",
    ):
        assert words in failed["message"]
    assert [(each["types"], each["new"]) for each in failed["variants"]] == [(["R8", "R6"], True)]
    (version / "README.md").write_bytes(genuine)
    again = run(published_variants, "profiles/demo.yaml")
    assert [each["new"] for each in again["variants"]] == [False, False]
    # A place without a new variant keeps its release, and the run says so.
    before = files_of(second)
    profile = published_variants.root / "profiles" / "demo.yaml"
    profile.write_text(profile.read_text().replace("suffix: Second", "suffix: Second, fault: scales"))
    outcome = run(published_variants, "profiles/demo.yaml")
    profile.write_text(profile.read_text().replace(", fault: scales", ""))
    assert "demo-Second keeps its earlier release, because no variant of" in outcome["message"]
    assert files_of(second) == before
