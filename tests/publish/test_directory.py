"""Test publishing to a directory: releases are atomic, versions never change and a second run does nothing."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from target_contract import ALIAS, require_aliases

from mergegate.merge_core.errors import DiskUnavailable, InvalidInput, Refused
from mergegate.merge_core.files import MARK, MARK_CONTENT
from mergegate.merge_core.files.hashing import HashMemo, sha256_file
from mergegate.tasks.release.publish.content import ReleaseFile, content_version, written_file
from mergegate.tasks.release.publish.targets.contract import OnProgress, PublishRequest, Release
from mergegate.tasks.release.publish.targets.directory import DirectoryRelease, DirectoryTarget


@dataclass(frozen=True)
class Releases:
    """A directory for releases, and the files of one."""

    directory: Path
    files: tuple[ReleaseFile, ...]
    hashes: HashMemo

    def publish(
        self,
        version: str = "v1",
        files: tuple[ReleaseFile, ...] | None = None,
        on_progress: OnProgress = lambda done, total: None,
    ) -> Release:
        """Publish as the publish step does."""
        request = PublishRequest(files or self.files, "demo", version, Path(), self.hashes, on_progress=on_progress)
        return DirectoryTarget(path=self.directory).publish(request)

    @property
    def names(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())


@pytest.fixture
def releases(tmp_path: Path) -> Releases:
    (tmp_path / "w").write_bytes(b"weights")
    weights = ReleaseFile("model.safetensors", 7, sha256_file(tmp_path / "w"), tmp_path / "w")
    files = (weights, written_file("licenses/base.txt", "terms"))
    return Releases(tmp_path / "releases", files, HashMemo(tmp_path / "memo.sqlite"))


def test_a_release_holds_every_file_and_latest_points_to_it(releases: Releases) -> None:
    published, place = releases.publish(), releases.directory
    assert published.new
    assert published.location == place / "v1"
    assert (place / "latest" / "model.safetensors").read_bytes() == b"weights"
    assert (place / "latest" / "licenses" / "base.txt").read_text() == "terms"
    assert releases.names == ["latest", "v1"]
    known = {file.name: releases.hashes.recall(place / "v1" / file.name) for file in releases.files}
    assert known == {file.name: file.sha256 for file in releases.files}, "no file is hashed again"


def test_publishing_again_changes_nothing(releases: Releases) -> None:
    told: list[tuple[int, int]] = []
    releases.publish(on_progress=lambda done, total: told.append((done, total)))
    assert told == [(7, 12), (12, 12)]
    before = [path.lstat().st_mtime_ns for path in sorted(releases.directory.rglob("*"))]
    assert not releases.publish(on_progress=lambda done, total: told.append((done, total))).new
    assert len(told) == 2, "there was nothing to write"
    assert [path.lstat().st_mtime_ns for path in sorted(releases.directory.rglob("*"))] == before


def test_a_new_version_moves_latest_and_keeps_the_old_one(releases: Releases) -> None:
    releases.publish("v1")
    releases.publish("v2", (written_file("README.md", "two"),))
    assert (releases.directory / "latest").readlink() == Path("v2")
    assert (releases.directory / "v1" / "model.safetensors").exists()


def test_a_version_never_changes_its_content(releases: Releases) -> None:
    releases.publish()
    with pytest.raises(Refused, match="already published with other content"):
        releases.publish("v1", (written_file("model.safetensors", "other"), releases.files[1]))
    assert (releases.directory / "v1" / "model.safetensors").read_bytes() == b"weights"


def test_altered_files_are_not_published(tmp_path: Path, releases: Releases) -> None:
    (tmp_path / "w").write_bytes(b"Weights")
    with pytest.raises(Refused, match=r"expected: .*the bytes that were evaluated and gated"):
        releases.publish()
    assert not (releases.directory / "v1").exists()
    assert not (releases.directory / "latest").is_symlink()


def test_the_content_is_the_version(releases: Releases) -> None:
    assert content_version(releases.files) == content_version(releases.files[::-1])
    assert content_version(releases.files) != content_version(releases.files[:1])


def test_an_alias_is_a_relative_link_that_moves_in_one_step(tmp_path: Path, releases: Releases) -> None:
    place = releases.directory
    for version in ("v1", "spring", "v2"):
        releases.publish(version)

    def held() -> object:
        others = [path for path in place.rglob("*") if ALIAS not in str(path)]
        return {path: path.is_symlink() or path.stat().st_mtime_ns for path in others}

    require_aliases(DirectoryTarget(path=place), held, lambda: [path.lstat().st_mtime_ns for path in place.iterdir()])
    assert (place / ALIAS).readlink() == Path("v1")
    with pytest.raises(Refused, match="an alias"):
        releases.publish(ALIAS)
    (place / ALIAS).unlink()
    (place / ALIAS).symlink_to(tmp_path)
    assert DirectoryTarget(path=place).resolve_alias(Path(), ALIAS) is None, "it leads elsewhere"


@pytest.mark.parametrize("name", [".v1.partial/notes.txt", ".latest.partial/notes.txt", ".latest.partial", "latest/x"])
def test_files_of_the_user_are_kept(releases: Releases, name: str) -> None:
    file = releases.directory / name
    file.parent.mkdir(parents=True)
    file.write_text("of the user")
    with suppress(Refused, InvalidInput):
        releases.publish()
    assert file.read_text() == "of the user"


def test_a_link_of_the_user_is_not_moved(releases: Releases) -> None:
    releases.directory.mkdir()
    (releases.directory / "latest").symlink_to("/somewhere/else")
    with pytest.raises(Refused, match="a link to /somewhere/else"):
        releases.publish()
    assert (releases.directory / "latest").readlink() == Path("/somewhere/else")


def test_a_run_that_was_killed_just_after_the_rename_is_repaired(releases: Releases) -> None:
    releases.publish()
    partial = releases.directory / ".v1.partial"
    partial.mkdir()
    (partial / MARK).write_bytes(MARK_CONTENT)
    assert not releases.publish().new
    assert not partial.exists()


def test_a_file_system_without_locks_is_named_before_a_run_and_by_it(
    releases: Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    DirectoryTarget(path=releases.directory).check(Path())
    monkeypatch.setattr(fcntl, "flock", refuse)
    for step in (lambda: DirectoryTarget(path=releases.directory).check(Path()), releases.publish):
        with pytest.raises(DiskUnavailable, match=r"does not support locks \(flock\)"):
            step()
    assert releases.names == []


def test_a_directory_without_provenance_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert DirectoryRelease(tmp_path).files() == {}
