"""A stage reads exactly the pinned bytes or refuses, whether a file changes before the stage or while it reads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from samples import sampled_rows
from tampering import CHANGES, HARMLESS

from mergegate.merge_core.errors import ChangedInput, InvalidInput
from mergegate.merge_core.files import file_identity
from mergegate.tasks.base.stage import StageValue, input_guard, on_input_change, stage, stages, store, value_stage
from mergegate.tasks.base.stage.stages import DeclaredStage
from mergegate.tasks.models import checkpoints

pytestmark = pytest.mark.usefixtures("home")

Change = Callable[[Path], None]
WEIGHTS = "model.safetensors"
meanwhile: list[Callable[[], None]] = []
read: list[bytes] = []


class Length(StageValue):
    bytes: int

    def summary(self) -> str:
        return f"{self.bytes} bytes"


def bytes_of(models: tuple[checkpoints.Model, ...]) -> bytes:
    """Return the content of all models; after the first one, run the pending change."""
    content = b""
    for number, model in enumerate(models):
        content += (model.directory / WEIGHTS).read_bytes()
        if number == 0 and meanwhile:
            meanwhile.pop(0)()
    read.append(content)
    return content


@stage("copied", version=1, resumable=True)
def copied(out: Path, model: checkpoints.Model, others: tuple[checkpoints.Model, ...] = ()) -> Length:
    with (out / "unfinished.journal").open("ab") as journal:
        journal.write(b"begun\n")
    content = bytes_of((model, *others))
    (out / "copy").write_bytes(content)
    (out / "journal read").write_bytes((out / "unfinished.journal").read_bytes())
    return Length(bytes=len(content))


@value_stage("measured", version=1)
def measured(model: checkpoints.Model) -> Length:
    return Length(bytes=len(bytes_of((model,))))


CALLBACKS = tuple(input_guard._change_callbacks)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_guard, "_change_callbacks", [])  # They would import model libraries.
    meanwhile.clear()
    read.clear()


@pytest.fixture
def model(tmp_path: Path) -> checkpoints.PinnedCheckpoint:
    return pinned(tmp_path / "reverser")


def pinned(directory: Path) -> checkpoints.PinnedCheckpoint:
    directory.mkdir()
    (directory / WEIGHTS).write_bytes(directory.name.encode() * 1000)
    (directory / "config.json").write_text("{}")
    return checkpoints.pin_checkpoints([checkpoints.find_checkpoint(str(directory))], store().hashes)[0]


def refused(model: checkpoints.Model, build: Callable[[], object]) -> None:
    """Check that a build is refused with the name of the model and the file, and stores nothing."""
    with pytest.raises(ChangedInput) as caught:
        build()
    assert caught.value.where.startswith(f"{model.name}: {model.directory}")
    assert caught.value.remedy
    assert caught.value.exit_code == 3
    for name in ("copied", "measured"):
        assert not list((store().root / name).glob("*"))


@pytest.mark.parametrize("file", [WEIGHTS, pytest.param("config.json", marks=pytest.mark.story)])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_was_changed_before_is_not_read(model: checkpoints.PinnedCheckpoint, change: Change, file: str) -> None:
    change(model.directory / file)
    refused(model, lambda: copied.build(model))
    refused(model, lambda: measured.build(model))
    assert not read


@pytest.mark.parametrize(
    ("declared", "file"),
    sampled_rows([(copied, WEIGHTS), (copied, "config.json"), (measured, WEIGHTS)], [(copied, WEIGHTS)]),
)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_changed_meanwhile_is_not_kept(
    model: checkpoints.PinnedCheckpoint, change: Change, declared: DeclaredStage[Any, Any, Any], file: str
) -> None:
    meanwhile[:] = [lambda: change(model.directory / file)]
    refused(model, lambda: declared.build(model))


@pytest.mark.parametrize("touch", HARMLESS.values(), ids=HARMLESS)
def test_the_same_bytes_go_on(model: checkpoints.PinnedCheckpoint, touch: Change) -> None:
    expected = (model.directory / WEIGHTS).read_bytes()
    touch(model.directory / WEIGHTS)
    meanwhile[:] = [lambda: touch(model.directory / WEIGHTS)]
    artifact = copied.build(model)
    assert (artifact.directory / "copy").read_bytes() == expected
    assert len(read) == 2  # The stage reads again, because the file may have had other content while it was touched.
    assert (artifact.directory / "journal read").read_bytes() == b"begun\n"  # The first attempt leaves nothing behind.


def test_other_bytes_that_are_put_back_are_not_in_the_result(
    model: checkpoints.PinnedCheckpoint, tmp_path: Path
) -> None:
    """A file changes before the second one is read, and its bytes and times are restored before the stage ends."""
    other = pinned(tmp_path / "shifter")
    weights = other.directory / WEIGHTS
    content, times = weights.read_bytes(), (weights.stat().st_atime_ns, weights.stat().st_mtime_ns)

    def alter() -> None:
        weights.write_bytes(content[::-1])
        restore.append(True)  # The next check of the files restores the original.

    restore: list[bool] = []
    identities = input_guard._identities

    def put_back(inputs: Any) -> object:
        if restore and restore.pop():
            weights.write_bytes(content)
            os.utime(weights, ns=times)
        return identities(inputs)

    meanwhile[:] = [alter]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(input_guard, "_identities", put_back)
        artifact = copied.build(model, (other,))
    assert read[0] != read[1]
    assert (artifact.directory / "copy").read_bytes() == (model.directory / WEIGHTS).read_bytes() + content


def test_files_that_are_touched_for_ever_end_it(model: checkpoints.PinnedCheckpoint) -> None:
    meanwhile[:] = [(model.directory / WEIGHTS).touch] * 100
    with pytest.raises(ChangedInput, match="touched during all 3 attempts"):
        copied.build(model)
    assert not list((store().root / "copied").glob("*"))


def test_whoever_keeps_what_was_read_is_told(model: checkpoints.PinnedCheckpoint) -> None:
    told: list[bool] = []
    assert checkpoints.model_process.end_model_process in CALLBACKS
    on_input_change(lambda: told.append(True))
    copied.build(model)
    assert not told
    shutil.rmtree(store().root / "copied")
    meanwhile[:] = [(model.directory / WEIGHTS).touch]
    copied.build(model)
    assert told


def fails(found: str, *changes: Callable[[], object]) -> Callable[[], None]:
    def fail() -> None:
        for change in changes:
            change()
        raise InvalidInput("the file", found=found)

    return fail


def test_an_error_that_a_change_brought_about_is_said_to_be_that(model: checkpoints.PinnedCheckpoint) -> None:
    meanwhile[:] = [fails("ends early", lambda: CHANGES["truncated"](model.directory / WEIGHTS))]
    refused(model, lambda: copied.build(model))


def test_an_error_of_another_cause_stays_what_it_is(model: checkpoints.PinnedCheckpoint) -> None:
    meanwhile[:] = [fails("is no model")]
    with pytest.raises(InvalidInput, match="is no model"):
        copied.build(model)


def test_parents_of_a_recipe_and_artifacts_are_looked_at_too(model: checkpoints.PinnedCheckpoint) -> None:
    made = copied.build(model)
    recipe = checkpoints.PinnedRecipe.__new__(checkpoints.PinnedRecipe)  # The code under test reads only its parents.
    object.__setattr__(recipe, "parents", (model,))
    inputs = list(input_guard.pinned_inputs([recipe, {"scores": [made]}, (model,), 3, "text", None]))
    assert [one.label for one in inputs] == [model.name, f"copied {made.key[:12]}", model.name]
    (made.directory / "copy").write_bytes(b"altered")
    with pytest.raises(ChangedInput, match=f"copied {made.key[:12]}"):
        input_guard.require_pinned(inputs, store().hashes)


def test_a_model_that_is_not_pinned_is_not_looked_at(tmp_path: Path) -> None:
    directory = tmp_path / "loose"
    directory.mkdir()
    (directory / WEIGHTS).write_bytes(b"x")
    loose = checkpoints.Model(name="loose", digest="d", directory=directory)
    meanwhile[:] = [(directory / WEIGHTS).touch]
    assert measured.build(loose).value.bytes == 1
    assert len(read) == 1


def test_unfinished_work_is_not_gone_on_with_when_anything_was_done_to_a_file(
    model: checkpoints.PinnedCheckpoint,
) -> None:
    before = checkpoints.files_fingerprint([model])
    assert checkpoints.files_fingerprint([model]) == before
    (model.directory / WEIGHTS).touch()
    assert checkpoints.files_fingerprint([model]) != before


def test_the_place_of_a_file_is_no_matter_but_the_file_is(model: checkpoints.PinnedCheckpoint) -> None:
    weights = model.directory / WEIGHTS
    with weights.open("rb") as opened:
        assert file_identity(opened.fileno()) == file_identity(weights)


def test_every_stage_is_guarded() -> None:
    """The guard is applied in the one place that builds all stages, not in each stage."""
    assert stages.read_pinned is input_guard.read_pinned
