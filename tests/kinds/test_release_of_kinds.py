"""Two tiny models of each kind are released as what they are, or refused by ``check`` with reason and remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_kinds
import torch
from kind_projects import GUARDS, Project, average, load, make_project, outputs
from samples import sampled, sampled_rows

from mergegate.merge_core.architecture import TaskForm
from mergegate.tasks.models.checkpoints import end_model_process

RELEASED = (
    *("text generator", "bert embedding", "modernbert embedding", "qwen3 embedding", "sparse encoder", "cross-encoder"),
    *("older cross-encoder", "reranker without modules", *tiny_kinds.VISION_LANGUAGE, "whisper", "wav2vec2"),
    *("audio language model", "t5", "bart"),
)
# A run takes some seconds. Embedding models and speech models have stories of their own.
SAMPLE = ("llava",)
REFUSED = ("sequence classifier", "token classifier", "masked language model", "bare encoder", "clip")
# A kind, and a form of task that cannot judge it.
UNSUITABLE: tuple[tuple[str, TaskForm], ...] = (
    ("bert embedding", "text"), ("cross-encoder", "transcription"), ("whisper", "text"), ("t5", "retrieval"),
    ("llava", "transcription"),
)  # fmt: skip


def test_every_tiny_kind_is_released_or_refused_by_a_guard_of_every_form() -> None:
    assert {*RELEASED, *REFUSED} == set(tiny_kinds.KINDS)
    assert {*GUARDS} == {"text", "retrieval", "transcription"}


@pytest.fixture
def begin(tmp_path: Path, prefect_api: None, begin_records: Callable[[Path], None]) -> Iterator[Callable[..., Project]]:
    """Return a function that creates the project of a kind with a new state."""

    def make(name: str, form: TaskForm | None = None) -> Project:
        project = make_project(name, tmp_path / "project", form=form)
        begin_records(project.home)
        return project

    yield make
    end_model_process()  # It is confined to the directories that existed at its start.


@pytest.mark.story
@pytest.mark.parametrize("name", sampled(RELEASED, SAMPLE, pytest.mark.proof))
def test_a_release_computes_the_same_as_a_merge_in_memory(
    begin: Callable[..., Project], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = begin(name)
    checked = project.mergegate("check", "profile.yaml")
    assert checked.exit_code == 0, checked.output
    done = project.mergegate("run", "profile.yaml")
    assert done.exit_code == 0, done.output

    release = project.root / "releases" / "latest"
    parents = [load(project.root / "models" / parent)[1] for parent in "ab"]
    expected = average(parents, [0.5, 0.5])
    kind, model = load(release)
    stored, wanted = model.state_dict(), expected.state_dict()
    assert [name for name in stored.keys() | wanted.keys() if not torch.equal(stored[name], wanted[name])] == []
    # Weights in mapped memory may use other kernels.
    computed = outputs(release, model)
    torch.testing.assert_close(computed, outputs(project.root / "models" / "a", expected))
    assert not torch.allclose(computed, outputs(project.root / "models" / "a", parents[0]), rtol=1e-3)
    card = (release / "README.md").read_text()
    assert f"library_name: {kind.library}" in card
    assert kind.pipeline_tag is None or f"pipeline_tag: {kind.pipeline_tag}" in card

    require_a_second_run_without_work(project, monkeypatch)
    require_a_changed_byte_to_be_found(project, release)


def require_a_second_run_without_work(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a process was started")

    with monkeypatch.context() as patch:
        patch.setattr("mergegate.tasks.base.sandbox.SupervisedProcess.__init__", start)
        again = project.mergegate("run", "profile.yaml")
    assert again.exit_code == 0, again.output
    assert "nothing new" in again.output


def require_a_changed_byte_to_be_found(project: Project, release: Path) -> None:
    intact = project.mergegate("verify", str(release))
    assert intact.exit_code == 0, intact.output
    weights = sorted(release.rglob("*.safetensors"))[0]
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.chmod(0o644)
    weights.write_bytes(content)
    damaged = project.mergegate("verify", str(release))
    assert damaged.exit_code != 0
    assert weights.relative_to(release).as_posix() in damaged.output


@pytest.mark.proof
@pytest.mark.parametrize("name", sampled(REFUSED, ["clip"], pytest.mark.proof))
def test_a_kind_that_no_task_can_judge_is_refused_before_the_merge(begin: Callable[..., Project], name: str) -> None:
    require_refusal(begin(name), "mergegate cannot evaluate", "mergegate merge")


@pytest.mark.proof
@pytest.mark.parametrize(("name", "form"), sampled_rows(UNSUITABLE, UNSUITABLE[:1], pytest.mark.proof))
def test_a_task_of_a_form_that_does_not_suit_the_kind_is_refused(
    begin: Callable[..., Project], name: str, form: TaskForm
) -> None:
    require_refusal(begin(name, form), "evaluate.tasks")


def require_refusal(project: Project, *words: str) -> None:
    for command in ("check", "run"):
        done = project.mergegate(command, "profile.yaml")
        assert done.exit_code == 2, done.output
        assert all(word in " ".join(done.output.split()) for word in ("remedy", *words)), done.output
    assert project.artifacts("merge") == set()
