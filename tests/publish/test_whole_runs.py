"""Test whole runs as a user starts them: release to a bucket and find the release again, even from an empty disk."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bucket import BUCKET, S3OnLoopback, s3_on_loopback

from mergegate.tasks.publish.targets.s3 import S3Target
from mergegate.tasks.stage.project import shared_store

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "flows"))
from demo_project import Project, make_project

sys.path.pop(0)

PROFILE = "profiles/demo.yaml"
URL = f"s3://{BUCKET}/releases/demo"
SHARED = f"s3://{BUCKET}/store"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3OnLoopback]:
    """Yield an empty bucket and set up the environment so that releases and the shared store use it."""
    with s3_on_loopback() as s3, s3.found_by_clients(monkeypatch):
        monkeypatch.setenv("MERGEGATE_SHARED_STORE", SHARED)
        yield s3


def machine(root: Path, *, guarded_by: str = "base", density: str | None = None) -> Project:
    """Set up a machine without earlier runs: a task, held-out text and a profile that releases to the bucket."""
    project = make_project(root)
    recipe = "demo/recipes/ties.yaml"
    if density is not None:
        shutil.copytree((root / "profiles" / "demo").resolve(), root / "own", dirs_exist_ok=True)
        (root / "profiles" / "demo").unlink()
        (root / "own").rename(root / "profiles" / "demo")
        text = (root / "profiles" / recipe).read_text()
        assert "density: 0.5" in text
        (root / "profiles" / recipe).write_text(text.replace("density: 0.5", f"density: {density}"))
    (root / PROFILE).write_text(
        json.dumps(
            {
                "name": "demo",
                "recipe": recipe,
                "perplexity": {"documents": "demo/data/held-out.jsonl"},
                "evaluate": {
                    "tasks": [
                        {"task": "demo/tasks/reverse.yaml", "guarded_by": "reverser", "max_drop": 3},
                        {"task": "demo/tasks/copy.yaml", "guarded_by": guarded_by, "max_drop": 3},
                    ]
                },
                "publish": {"to": "s3", "url": URL},
            }
        )
    )
    return project


def run(project: Project) -> str:
    """Run the profile successfully, wait until all uploads finish and return the output."""
    result = project.mergegate("run", PROFILE)
    assert result.exit_code == 0, result.output
    store = shared_store(project.home / "store")
    assert store is not None
    store.settle()
    return result.output


def marks(printed: str) -> dict[str, str]:
    """Return the mark of each stage: ``✓`` for computed, ``=`` for cached, ``✗`` for failed."""
    rows = [line.split() for line in printed.splitlines()]
    return {row[1]: row[0] for row in rows if len(row) > 1 and row[0] in ("✓", "=", "✗")}


def current(s3: S3OnLoopback) -> Any:
    return json.loads(s3.read("releases/demo/latest.json"))


@pytest.mark.proof
@pytest.mark.story
def test_a_release_in_a_bucket_from_the_first_check_to_another_machine_with_an_empty_disk(
    bucket: S3OnLoopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefect_api: None
) -> None:
    one = machine(tmp_path / "one")
    assert one.mergegate("check", PROFILE).exit_code == 0
    assert [key for key in bucket.objects() if key.startswith("releases/")] == [], "a check leaves nothing"
    printed = run(one)
    version = current(bucket)["current"]
    assert f"released demo {version}" in printed
    assert f"{URL}@{version}" in printed
    assert "fetched from" not in printed
    bucket.proxy.begin()
    there = bucket.objects()
    assert f"nothing new: {version} is released" in run(one)
    assert bucket.proxy.written("PUT") == []
    assert (bucket.objects(), bucket.uploads()) == (there, [])
    verified = one.mergegate("verify", URL)
    assert (verified.exit_code, "all as published" in verified.output) == (0, True)

    # A second machine with an empty disk computes and sends nothing, and says why.
    two = machine(tmp_path / "two")
    printed = run(two)
    assert f"nothing new: {version} is released" in printed
    assert set(marks(printed).values()) == {"="}
    assert f"fetched from {SHARED} instead of built: " in printed
    for stage in ("evaluate", "perplexity", "merge"):
        assert two.artifacts(stage) == one.artifacts(stage) != set()
    assert bucket.objects() == there

    # A third machine gates another merge against the champion in the bucket. No parent is evaluated again. The champion
    # is evaluated once, because it was cached as the merge of a recipe and is now identified as a published release.
    three = machine(tmp_path / "three", guarded_by="champion", density="0.6")
    printed = run(three)
    assert (marks(printed)["merge"], marks(printed)["publish"]) == ("✓", "✓")
    for stage, each in (("perplexity", 1), ("evaluate", 2 + 1)):
        assert len(three.artifacts(stage) - one.artifacts(stage)) == each, (
            "the merge on both tasks, the champion on its own"
        )
    newer = current(bucket)
    assert newer["current"] != version
    assert [entry["version"] for entry in newer["versions"]] == [version, newer["current"]]

    # A fourth machine finds that its merge is the champion and names it by its address in the bucket.
    four = machine(tmp_path / "four", guarded_by="champion", density="0.6")
    printed = run(four)
    assert f"nothing new: {newer['current']} is released" in printed
    assert f"{URL}@{newer['current']}" in printed
    assert "publish" not in marks(printed)
    assert current(bucket) == newer

    # After an incomplete publication, the same merge is published again. Its report now names another champion, so the
    # release is a new version.
    look = S3Target.current_release
    monkeypatch.setattr(S3Target, "current_release", lambda self, root: replace(look(self, root), complete=False))  # type: ignore[type-var]
    assert marks(run(four))["publish"] == "✓"
