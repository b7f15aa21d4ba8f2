"""Files that are swapped, linked or touched during a real release, at each of its stages."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from demo_project import PROFILES, Project, expect
from optional_stages import run_with_everything
from tampering import CHANGES

from mergegate.tasks.base.stage.input_guard import PinnedInput, pinned_inputs
from mergegate.tasks.base.stage.stages import DeclaredStage, StageCall
from mergegate.tasks.models.checkpoints import Model

pytestmark = pytest.mark.story

WEIGHTS = "model.safetensors"
READING = {"merge", "copies", "weights", "perplexity", "ensemble", "evaluate", "explain", "answer", "serve", "measure"}


@dataclass(frozen=True)
class Release:
    """A released project with its own model family, and the calls of all stages that read models, by stage."""

    project: Project
    calls: dict[str, tuple[DeclaredStage[Any, Any, Any], StageCall]]


def own_family(project: Project) -> None:
    """Replace the link to the shared demo models by a copy."""
    demo = project.root / "profiles" / "demo"
    demo.unlink()
    shutil.copytree(PROFILES / "demo", demo)


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory, released_with_everything: Path) -> Release:
    root = tmp_path_factory.mktemp("swapped") / "project"
    shutil.copytree(released_with_everything, root, symlinks=True)
    project = Project(root)
    own_family(project)
    calls: dict[str, tuple[DeclaredStage[Any, Any, Any], StageCall]] = {}
    bind = DeclaredStage._bind

    def noted(stage: DeclaredStage[Any, Any, Any], args: Any, kwargs: Any) -> StageCall:
        call = bind(stage, args, kwargs)
        if any(isinstance(one, Model) for one in pinned_inputs(call.inputs.arguments.values())):
            calls[stage.name] = (stage, call)  # The last call wins: if there are several, it is for the merge.
        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeclaredStage, "_bind", noted)
        result = run_with_everything(project)  # Every stage is called, and all results come from the store.
    assert result.exit_code == 0, result.output
    return Release(project, calls)


def test_every_stage_that_reads_a_model_is_given_one_that_is_pinned(release: Release) -> None:
    assert set(release.calls) == READING
    for _, call in release.calls.values():
        for one in pinned_inputs(call.inputs.arguments.values()):
            assert isinstance(one, PinnedInput)
            assert any(path.name == WEIGHTS for path in one.pinned_files()) or not isinstance(one, Model)


@contextmanager
def put_back(directory: Path) -> Iterator[None]:
    """Restore ``directory`` on exit."""
    kept = directory.with_name(f"{directory.name}.kept")
    shutil.copytree(directory, kept, symlinks=True)
    try:
        yield
    finally:
        shutil.rmtree(directory)
        kept.rename(directory)


@pytest.mark.parametrize("share", [[], ["--share"]], ids=["alone", "shared"])
def test_the_command_merge_takes_no_tokenizer_that_came_later(
    project: Project, monkeypatch: pytest.MonkeyPatch, share: list[str]
) -> None:
    from mergegate.merge_core.engine import blocks

    own_family(project)
    original, one = blocks.read_into, threading.Lock()
    tokenizer = project.root / "profiles" / "demo" / "models" / "base" / "tokenizer.json"

    def reading(fd: int, buffer: memoryview, offset: int, path: Path) -> None:
        original(fd, buffer, offset, path)
        with one:
            if path.parent == tokenizer.parent and not tokenizer.with_name("other.bin").exists():
                CHANGES["replaced"](tokenizer)
                tokenizer.with_name("other.bin").touch()

    monkeypatch.setattr(blocks, "read_into", reading)
    out = project.root / "out"
    result = project.mergegate("merge", "profiles/demo/recipes/ties.yaml", str(out), *share)
    expect(result, 3, "the file changed or was replaced while it was merged")
    assert not (out / "config.json").exists()


@pytest.mark.proof
def test_a_merge_that_changes_before_its_release_is_not_published(
    tmp_path: Path, release: Release, prefect_api: None
) -> None:
    """The change is undone before the next run, which continues from the store and gives the undisturbed release."""
    from mergegate.tasks.release.publish import stage as publishing

    undisturbed = release.project.latest.resolve()
    project = Project(tmp_path / "project")
    shutil.copytree(release.project.root, project.root, symlinks=True)
    shutil.rmtree(project.root / "releases")
    merged = next(place for place in (project.home / "store" / "merge").iterdir() if place.is_dir())
    original = publishing._release_files

    def swapped(*args: Any, **kwargs: Any) -> Any:
        files = original(*args, **kwargs)
        CHANGES["overwritten, time put back"](merged / WEIGHTS)
        return files

    with put_back(merged), pytest.MonkeyPatch.context() as patch:
        patch.setattr(publishing, "_release_files", swapped)
        result = project.mergegate("run", "profiles/demo.yaml")
    assert result.exit_code == 3, result.output
    assert not project.latest.exists()
    expect(project.mergegate("run", "profiles/demo.yaml"), 0)
    assert project.latest.resolve().name == undisturbed.name
