"""Test publishing to a directory: releases are atomic, versions never change and a second run does nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest
from alias_contract import ALIAS, require_aliases
from samples import sampled

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.merge_core.files import MARK, MARK_CONTENT
from mergegate.merge_core.files.hashing import HashMemo, sha256_file
from mergegate.tasks.publish.content import ReleaseFile, content_version, written_file
from mergegate.tasks.publish.targets.contract import OnProgress, PublishRequest, Release
from mergegate.tasks.publish.targets.directory import DirectoryRelease, DirectoryTarget


@pytest.fixture
def hashes(tmp_path: Path) -> HashMemo:
    return HashMemo(tmp_path / "memo.sqlite")


def publish_directory(
    files: tuple[ReleaseFile, ...],
    directory: Path,
    version: str,
    hashes: HashMemo,
    on_progress: OnProgress = lambda done, total: None,
) -> Release:
    """Publish to a directory as the publish step does."""
    request = PublishRequest(files, "demo", version, Path(), hashes, on_progress=on_progress)
    return DirectoryTarget(path=directory).publish(request)


def stored(path: Path, name: str, data: bytes) -> ReleaseFile:
    path.write_bytes(data)
    return ReleaseFile(name, len(data), sha256_file(path), path)


@pytest.fixture
def files(tmp_path: Path) -> tuple[ReleaseFile, ...]:
    return (stored(tmp_path / "w", "model.safetensors", b"weights"), written_file("licenses/base.txt", "terms"))


def test_a_release_holds_every_file_and_latest_points_to_it(
    tmp_path: Path, files: tuple[ReleaseFile, ...], hashes: HashMemo
) -> None:
    published = publish_directory(files, tmp_path / "releases", "v1", hashes)
    assert published.new
    assert published.location == tmp_path / "releases" / "v1"
    assert (tmp_path / "releases" / "latest" / "model.safetensors").read_bytes() == b"weights"
    assert (tmp_path / "releases" / "latest" / "licenses" / "base.txt").read_text() == "terms"
    assert sorted(path.name for path in (tmp_path / "releases").iterdir()) == ["latest", "v1"]


def test_a_published_file_is_not_hashed_again(tmp_path: Path, files: tuple[ReleaseFile, ...], hashes: HashMemo) -> None:
    place = publish_directory(files, tmp_path / "releases", "v1", hashes).location
    assert {file.name: hashes.recall(Path(place) / file.name) for file in files} == {
        file.name: file.sha256 for file in files
    }


def test_publishing_again_changes_nothing(tmp_path: Path, files: tuple[ReleaseFile, ...], hashes: HashMemo) -> None:
    target = tmp_path / "releases"
    publish_directory(files, target, "v1", hashes)
    before = [path.lstat().st_mtime_ns for path in sorted(target.rglob("*"))]
    assert not publish_directory(files, target, "v1", hashes).new
    assert [path.lstat().st_mtime_ns for path in sorted(target.rglob("*"))] == before


def test_progress_reports_every_byte(tmp_path: Path, files: tuple[ReleaseFile, ...], hashes: HashMemo) -> None:
    told: list[tuple[int, int]] = []
    publish_directory(files, tmp_path / "releases", "v1", hashes, lambda done, total: told.append((done, total)))
    assert told == [(7, 12), (12, 12)]
    publish_directory(files, tmp_path / "releases", "v1", hashes, lambda done, total: told.append((done, total)))
    assert len(told) == 2, "there was nothing to write"


def test_a_new_version_moves_latest_and_keeps_the_old_one(
    tmp_path: Path, files: tuple[ReleaseFile, ...], hashes: HashMemo
) -> None:
    target = tmp_path / "releases"
    publish_directory(files, target, "v1", hashes)
    publish_directory((written_file("README.md", "two"),), target, "v2", hashes)
    assert (target / "latest").readlink() == Path("v2")
    assert (target / "v1" / "model.safetensors").exists()


def test_a_version_never_changes_its_content(tmp_path: Path, files: tuple[ReleaseFile, ...], hashes: HashMemo) -> None:
    publish_directory(files, tmp_path / "releases", "v1", hashes)
    with pytest.raises(Refused, match="already published with other content"):
        publish_directory((written_file("model.safetensors", "other"), files[1]), tmp_path / "releases", "v1", hashes)
    assert (tmp_path / "releases" / "v1" / "model.safetensors").read_bytes() == b"weights"


def test_altered_files_are_not_published(tmp_path: Path, files: tuple[ReleaseFile, ...], hashes: HashMemo) -> None:
    (tmp_path / "w").write_bytes(b"Weights")
    with pytest.raises(Refused, match=r"expected: .*the bytes that were evaluated and gated"):
        publish_directory(files, tmp_path / "releases", "v1", hashes)
    assert not (tmp_path / "releases" / "v1").exists()
    assert not (tmp_path / "releases" / "latest").is_symlink()


def test_the_content_is_the_version(files: tuple[ReleaseFile, ...]) -> None:
    assert content_version(files) == content_version(files[::-1])
    assert content_version(files) != content_version(files[:1])


SYSCALLS = ["os.fsync", "pathlib.Path.rename", "pathlib.Path.symlink_to"]


@pytest.mark.story
@pytest.mark.parametrize("call", SYSCALLS)
@pytest.mark.parametrize("nth", sampled([0, 1, 2], [1]))
def test_a_publication_killed_at_any_step_is_whole_or_absent_and_the_next_run_completes_it(
    tmp_path: Path, files: tuple[ReleaseFile, ...], hashes: HashMemo, call: str, nth: int
) -> None:
    target = tmp_path / "releases"
    module, _, name = call.rpartition(".")
    script = textwrap.dedent(f"""
        import os, pathlib, signal, sys
        from pathlib import Path
        from mergegate.merge_core.files import HashMemo
        from mergegate.tasks.publish.content import ReleaseFile, written_file
        from mergegate.tasks.publish.targets import PublishRequest
        from mergegate.tasks.publish.targets.directory import DirectoryTarget
        original, calls = {call}, 0
        def dies(*arguments, **options):
            global calls
            calls += 1
            if calls > {nth}:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)
        {module}.{name} = dies
        files = (
            ReleaseFile("model.safetensors", 7, {files[0].sha256!r}, Path({str(files[0].source)!r})),
            written_file("licenses/base.txt", "terms"),
        )
        request = PublishRequest(files, "demo", "v1", Path(), HashMemo(Path({str(tmp_path / "m2")!r})))
        DirectoryTarget(path=Path({str(target)!r})).publish(request)
    """)
    code = subprocess.run([sys.executable, "-c", script], check=False).returncode
    assert code in (-signal.SIGKILL, 0)
    if (target / "v1").exists():
        assert sorted(path.name for path in (target / "v1").iterdir()) == ["licenses", "model.safetensors"]
    publish_directory(files, target, "v1", hashes)
    assert sorted(path.name for path in target.iterdir()) == ["latest", "v1"]
    assert (target / "latest" / "model.safetensors").read_bytes() == b"weights"


def test_an_alias_is_a_relative_link_that_moves_in_one_step(
    tmp_path: Path, files: tuple[ReleaseFile, ...], hashes: HashMemo
) -> None:
    place = tmp_path / "releases"
    for version in ("v1", "spring", "v2"):
        publish_directory(files, place, version, hashes)

    def held() -> object:
        return {
            path: path.is_symlink() or path.stat().st_mtime_ns for path in place.rglob("*") if ALIAS not in str(path)
        }

    require_aliases(DirectoryTarget(path=place), held, lambda: [path.lstat().st_mtime_ns for path in place.iterdir()])
    assert (place / ALIAS).readlink() == Path("v1")
    with pytest.raises(Refused, match="an alias"):
        publish_directory(files, place, ALIAS, hashes)
    (place / ALIAS).unlink()
    (place / ALIAS).symlink_to(tmp_path)
    assert DirectoryTarget(path=place).resolve_alias(Path(), ALIAS) is None, "it leads elsewhere"


@pytest.mark.parametrize("name", [".v1.partial/notes.txt", ".latest.partial/notes.txt", ".latest.partial", "latest/x"])
def test_files_of_the_user_are_kept(
    tmp_path: Path, files: tuple[ReleaseFile, ...], hashes: HashMemo, name: str
) -> None:
    file = tmp_path / "releases" / name
    file.parent.mkdir(parents=True)
    file.write_text("of the user")
    with suppress(Refused, InvalidInput):
        publish_directory(files, tmp_path / "releases", "v1", hashes)
    assert file.read_text() == "of the user"


def test_a_link_of_the_user_is_not_moved(tmp_path: Path, files: tuple[ReleaseFile, ...], hashes: HashMemo) -> None:
    (tmp_path / "releases").mkdir()
    (tmp_path / "releases" / "latest").symlink_to("/somewhere/else")
    with pytest.raises(Refused, match="a link to /somewhere/else"):
        publish_directory(files, tmp_path / "releases", "v1", hashes)
    assert (tmp_path / "releases" / "latest").readlink() == Path("/somewhere/else")


def test_a_run_that_was_killed_just_after_the_rename_is_repaired(
    tmp_path: Path, files: tuple[ReleaseFile, ...], hashes: HashMemo
) -> None:
    publish_directory(files, tmp_path / "releases", "v1", hashes)
    partial = tmp_path / "releases" / ".v1.partial"
    partial.mkdir()
    (partial / MARK).write_bytes(MARK_CONTENT)
    assert not publish_directory(files, tmp_path / "releases", "v1", hashes).new
    assert not partial.exists()


def test_a_directory_without_provenance_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert DirectoryRelease(tmp_path).files() == {}
