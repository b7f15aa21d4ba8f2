"""Publish to a local directory. A release appears atomically, and a version never changes its content.

::

    releases/demo/3f9a0c71b2de/      a version: complete, immutable
    releases/demo/latest             a symlink to the current version; it moves in one step
    releases/demo/production         an alias: another symlink, to the version that was promoted

mergegate writes a version to a temporary directory next to the final one. It hashes each file while writing it,
compares the hash with that of the file that passed the gate, and flushes the file to the disk. Then one rename makes
the version visible and another moves ``latest``. After a kill, the next run completes the publication.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.merge_core.files import (
    finish_directory,
    fsync,
    fsync_directories,
    hold_lock,
    new_directory,
    try_open_locked,
)
from mergegate.merge_core.parsing import LocalPath, open_plain, read_plain
from mergegate.tasks.release.publish.content import MAX_METADATA_BYTES, PROVENANCE, ReleaseFile, is_content_version
from mergegate.tasks.release.publish.targets.contract import (
    FIRST,
    CurrentRelease,
    PublishRequest,
    PublishTarget,
    Release,
)

LATEST = "latest"
_CHUNK = 1 << 22
# Files that git, a download or the Hub leaves next to a release that was fetched into a directory.
_FOREIGN_FOLDERS = (".cache", ".git")
_FOREIGN_FILE = ".gitattributes"


class DirectoryTarget(PublishTarget):
    """A directory that holds every version of the release and a link to the latest one."""

    reference_form: ClassVar[str] = "the directory of a release"
    current_is_local: ClassVar[bool] = True

    to: Literal["directory"] = "directory"
    path: LocalPath = Field(description="Directory of the releases. Each version is a directory in it.")

    @property
    def address(self) -> str:
        return "."

    def reference_to(self, version: str) -> str:
        """Return the path of a version relative to a version of its variants, in the directory next to this one."""
        return f"../../{self.path.name}/{version}"

    def check(self, root: Path) -> None:
        """Check that the directory is writable or can be created."""
        directory = (root / self.path).absolute()
        ancestor = next(parent for parent in (directory, *directory.parents) if parent.exists())
        # Query the permissions instead of writing a test file: a run with nothing new leaves no trace, not even an
        # updated mtime of a directory.
        if ancestor.is_dir() and os.access(ancestor, os.W_OK | os.X_OK):
            if os.access(ancestor, os.R_OK) and (lock := try_open_locked(ancestor, os.O_RDONLY)) is not None:
                os.close(lock)
            return
        kind = Refused if ancestor.is_dir() else InvalidInput
        raise kind(
            f"publish.path: {directory}",
            found=f"{ancestor} {'is not writable' if ancestor.is_dir() else 'is not a directory'}",
            expected="a directory that mergegate can create and write to",
            remedy="choose another directory, or change its permissions",
        )

    def current_release(self, root: Path) -> CurrentRelease | None:
        """Return the release that ``latest`` points to, or None if nothing has been published yet.

        The release has no head, because only one publisher on one machine writes to the directory at a time.
        """
        latest = root / self.path / LATEST
        return CurrentRelease(latest.resolve()) if latest.is_dir() else None

    def earlier_release(self, root: Path, version: str) -> CurrentRelease | None:
        """Return a version next to ``latest``. ``first`` is the version with the oldest modification time."""
        directory = root / self.path
        versions = _versions_in(directory)
        if not versions:
            return None
        if version == FIRST:
            return CurrentRelease(min(versions, key=lambda path: (path.stat().st_mtime_ns, path.name)).resolve())
        if (path := directory / version) in versions:
            return CurrentRelease(path.resolve())
        raise self._no_such_anchor(version, [path.name for path in versions], str(directory))

    def for_variants(self, suffix: str) -> DirectoryTarget:
        """Return the directory next to this one, such as ``releases/demo-GGUF``."""
        if self.path.name in ("", "..", "~"):
            raise InvalidInput(
                "publish.path",
                found=f"{str(self.path)!r}, so the directory of variants has no name",
                expected="a path that ends with the name of a directory, such as releases/demo",
                remedy="write the name of the directory",
            )
        return self._with_settings(suffix, path=self.path.with_name(f"{self.path.name}-{suffix}"))

    def publish(self, request: PublishRequest) -> Release:
        """Write the version next to the others, then move ``latest``. ``expected_head`` is not used."""
        directory, hashes = (request.root / self.path).resolve(), request.hashes
        destination = directory / request.version
        directory.mkdir(parents=True, exist_ok=True)
        with hold_lock(directory):
            if destination.is_symlink():
                raise Refused(
                    str(destination),
                    found="an alias of this name",
                    expected="a version name that is not an alias",
                    remedy="choose another name for the version",
                )
            is_new = not destination.exists()
            partial_directory = destination.with_name(f".{destination.name}.partial")
            if is_new:
                report = request.progress(sum(file.size for file in request.files))
                with new_directory(destination, partial_directory) as partial:
                    for file in request.files:
                        _write(file, partial / file.name, report)
                    fsync_directories(partial)
                for file in request.files:  # so that the next run need not hash them
                    hashes.remember(destination / file.name, file.sha256)
            else:
                finish_directory(partial_directory)
                expected = {file.name: file.sha256 for file in request.files}
                paths = {path.relative_to(destination).as_posix(): path for path in destination.rglob("*")}
                present = {name for name, path in paths.items() if path.is_file()}
                altered = [name for name in present & set(expected) if hashes.sha256(paths[name]) != expected[name]]
                if differences := sorted({*altered, *(present ^ set(expected))}):
                    raise Refused(
                        str(destination / differences[0]),
                        found="the version is already published with other content",
                        expected="the same content, because a version never changes",
                        remedy="publish under a new version, or remove the altered version",
                    )
            has_moved = _move_link(directory / LATEST, request.version)
            fsync(directory)
        return Release(request.name, request.version, destination, f"{directory.name}/", new=is_new or has_moved)

    def published_file(self, root: Path, version: str, name: str) -> bytes | None:
        directory = root / self.path / version
        return DirectoryRelease(directory).read(name) if (directory / name).is_file() else None

    def set_alias(self, root: Path, version: str, name: str) -> None:
        """Point a symlink called ``name`` to the version, in one step."""
        directory = (root / self.path).resolve()
        self._require_alias_name(name, LATEST)
        versions = [path.name for path in _versions_in(directory)]
        if name in versions:
            raise self._alias_conflict(name, str(directory))
        if version not in versions:
            raise self._no_such_version(version, versions, str(directory))
        with hold_lock(directory):
            _move_link(directory / name, version)
            fsync(directory)

    def resolve_alias(self, root: Path, name: str) -> str | None:
        """Return the version that the symlink ``name`` points to, or None if it points to anything else."""
        link = root / self.path / name
        target = link.readlink() if link.is_symlink() else Path()
        is_version = target == Path(target.name) and target.name and _is_version(link.with_name(target.name))
        return target.name if is_version else None

    @classmethod
    def open(cls, reference: str) -> DirectoryRelease | None:
        return DirectoryRelease(directory) if (directory := Path(reference)).is_dir() else None


@dataclass(frozen=True)
class DirectoryRelease:
    """A release in a local directory. Verification hashes every file."""

    directory: Path

    @property
    def reference(self) -> str:
        return str(self.directory)

    @property
    def version(self) -> str | None:
        name = self.directory.resolve().name
        return name if is_content_version(name) else None

    def files(self) -> Mapping[str, tuple[int, str]]:
        """Return size and sha256 of every file, except those that git or a download added.

        A directory without provenance is not a release. None of its files is read, because it may be ``/``.

        A special entry (a symlink that leaves the directory, a pipe, a device) is not read. It is listed with its kind
        in place of a sha256, so it never matches an expected file. Symlinked directories are not entered.
        """
        identities: dict[str, tuple[int, str]] = {}
        if not os.path.lexists(self.directory / PROVENANCE):
            return identities
        for folder, folders, names in os.walk(self.directory):
            parent = Path(folder)
            links = [name for name in folders if (parent / name).is_symlink()]
            if parent == self.directory:
                folders[:] = [name for name in folders if name in links or name not in _FOREIGN_FOLDERS]
            folders[:] = sorted(set(folders) - set(links))
            for name in [*links, *names]:
                relative = (parent / name).relative_to(self.directory).as_posix()
                # ``names`` has no directories, so anything that is not a plain file is a link, a pipe or the like.
                if relative != _FOREIGN_FILE or not stat.S_ISREG((parent / name).lstat().st_mode):
                    identities[relative] = self._identity(parent / name)
        return dict(sorted(identities.items()))

    def read(self, name: str) -> bytes:
        return read_plain(self.directory / name, MAX_METADATA_BYTES, within=self.directory)

    def download(self) -> Path:
        return self.directory.resolve()

    def _identity(self, path: Path) -> tuple[int, str]:
        try:
            with open_plain(path, within=self.directory) as file:
                digest = hashlib.file_digest(file, "sha256")  # type: ignore[arg-type]  # an unbuffered file suffices
                return file.tell(), digest.hexdigest()
        except FileNotFoundError:
            return 0, "a broken link"
        except InvalidInput as error:
            return 0, error.found


def _is_version(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not path.name.startswith(".")


def _versions_in(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if _is_version(path)] if directory.is_dir() else []


def _move_link(link: Path, version: str) -> bool:
    """Point ``link`` to ``version`` in one step. Return whether it pointed elsewhere before.

    Raise Refused if ``link``, or a temporary link next to it, does not point to a version in the same directory, so
    that mergegate did not create it.
    """
    step = link.with_name(f".{link.name[:200]}.partial")
    for path in (link, step):
        target = path.readlink() if path.is_symlink() else None
        if os.path.lexists(path) and (target is None or target.name in ("", "..") or target != Path(target.name)):
            raise Refused(
                str(path),
                found="a file or directory" if target is None else f"a link to {target}",
                expected="a link to a version in this directory",
                remedy="move it to another directory",
            )
    step.unlink(missing_ok=True)
    if link.is_symlink() and link.readlink() == Path(version):
        return False
    step.symlink_to(version)
    step.rename(link)
    return True


def _write(file: ReleaseFile, path: Path, report: Callable[[int], None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as output:
        for chunk in file.gated_chunks(_CHUNK):
            output.write(chunk)
            report(len(chunk))
        output.flush()
        os.fsync(output.fileno())
