"""Test manual approval: it names the exact release, and mergegate publishes only the approved files."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError
from release_samples import Publishable, publishable

from mergegate.merge_core.errors import Refused
from mergegate.tasks.publish import PendingRelease, pending_release, publish
from mergegate.tasks.publish.targets.directory import DirectoryTarget


def pending(what: Publishable, target: DirectoryTarget, root: Path) -> PendingRelease:
    return pending_release(target, root, what.parts)


@pytest.fixture
def target(tmp_path: Path) -> DirectoryTarget:
    return DirectoryTarget(path=tmp_path / "releases")


def test_a_pending_release_changes_nothing(tmp_path: Path, target: DirectoryTarget, prefect_api: None) -> None:
    what = publishable(tmp_path)
    first = pending(what, target, tmp_path)
    assert not first.is_current
    assert not target.path.exists()
    assert pending(what, target, tmp_path) == first


def test_an_approved_release_is_published_and_becomes_current(
    tmp_path: Path, target: DirectoryTarget, prefect_api: None
) -> None:
    what = publishable(tmp_path)
    asked = pending(what, target, tmp_path)
    released = publish(target, tmp_path, what.parts, approved_digest=asked.digest)
    assert released.version == asked.version
    assert pending(what, target, tmp_path) == PendingRelease(asked.version, asked.digest, is_current=True)


def test_an_approval_is_valid_only_for_its_release(tmp_path: Path, target: DirectoryTarget, prefect_api: None) -> None:
    asked = pending(publishable(tmp_path), target, tmp_path)
    other = publishable(tmp_path, weights=b"one bit more")
    with pytest.raises(Refused, match="the release that was approved"):
        publish(target, tmp_path, other.parts, approved_digest=asked.digest)
    assert not (target.path / "latest").exists()


def test_a_different_release_needs_another_approval(tmp_path: Path, target: DirectoryTarget, prefect_api: None) -> None:
    what = publishable(tmp_path)
    publish(target, tmp_path, what.parts)
    other = publishable(tmp_path, weights=b"one bit more")
    assert not pending(other, target, tmp_path).is_current


@pytest.mark.parametrize("damage", [b"", b"something else"])
def test_a_damaged_list_of_checksums_is_not_current(
    tmp_path: Path, target: DirectoryTarget, prefect_api: None, damage: bytes
) -> None:
    what = publishable(tmp_path)
    publish(target, tmp_path, what.parts)
    (target.path / "latest" / "SHA256SUMS").write_bytes(damage)
    assert not pending(what, target, tmp_path).is_current


@pytest.mark.parametrize(
    ("said", "seconds"), [(True, 259_200), ({}, 259_200), ({"timeout": "90 min"}, 5400), (False, None)]
)
def test_approval_can_be_a_flag_or_a_timeout(said: object, seconds: float | None) -> None:
    asks = DirectoryTarget.model_validate({"path": "x", "approval": said}).approval_settings
    assert (asks.timeout_s if asks else None) == seconds


@pytest.mark.parametrize("said", [{"timeout": "3"}, {"timeout": "0 s"}, {"timout": "3 d"}])
def test_an_invalid_approval_is_refused(said: object) -> None:
    with pytest.raises(ValidationError):
        DirectoryTarget.model_validate({"path": "x", "approval": said})
