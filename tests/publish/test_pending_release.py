"""Test manual approval: it names the exact release, and mergegate publishes only the approved files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import ValidationError
from release_samples import Publishable, publishable

from mergegate.merge_core.errors import Refused
from mergegate.tasks.release.publish import PendingRelease, pending_release, publish
from mergegate.tasks.release.publish.targets import Release
from mergegate.tasks.release.publish.targets.directory import DirectoryTarget


@dataclass
class Releases:
    """A target in a directory."""

    root: Path

    @property
    def target(self) -> DirectoryTarget:
        return DirectoryTarget(path=self.root / "releases")

    def pending(self, release: Publishable) -> PendingRelease:
        return pending_release(self.target, self.root, release.parts)

    def publish(self, release: Publishable, approved_digest: str | None = None) -> Release:
        return publish(self.target, self.root, release.parts, approved_digest=approved_digest)


@pytest.fixture
def releases(tmp_path: Path, prefect_api: None) -> Releases:
    return Releases(tmp_path)


@pytest.fixture
def one(tmp_path: Path) -> Publishable:
    return publishable(tmp_path)


def test_an_approved_release_is_published_and_becomes_current(releases: Releases, one: Publishable) -> None:
    asked = releases.pending(one)
    assert not asked.is_current
    assert not releases.target.path.exists(), "a pending release changes nothing"
    assert releases.pending(one) == asked
    released = releases.publish(one, asked.digest)
    assert released.version == asked.version
    assert releases.pending(one) == PendingRelease(asked.version, asked.digest, is_current=True)


def test_an_approval_is_valid_only_for_its_release(tmp_path: Path, releases: Releases, one: Publishable) -> None:
    asked = releases.pending(one)
    other = publishable(tmp_path, weights=b"one bit more")
    with pytest.raises(Refused, match="the release that was approved"):
        releases.publish(other, asked.digest)
    assert not (releases.target.path / "latest").exists()


def test_a_different_release_needs_another_approval(tmp_path: Path, releases: Releases, one: Publishable) -> None:
    releases.publish(one)
    assert not releases.pending(publishable(tmp_path, weights=b"one bit more")).is_current


def test_a_damaged_list_of_checksums_is_not_current(releases: Releases, one: Publishable) -> None:
    releases.publish(one)
    for damage in (b"", b"something else"):
        (releases.target.path / "latest" / "SHA256SUMS").write_bytes(damage)
        assert not releases.pending(one).is_current


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
