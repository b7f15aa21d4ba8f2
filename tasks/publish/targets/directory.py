"""Publishing to a directory: a release is all there or not at all, and a version never changes its content.

::

    releases/demo/3f9a0c71b2de/      a version: complete, immutable
    releases/demo/latest             a link to the version that is published now; it moves in one step
    releases/demo/production         an alias: another such link, to the version that somebody has promoted

A version is written beside its final name, every byte is hashed on the way and compared with what was gated, everything
is fsynced, then one rename makes it exist and another one moves ``latest``. A run that is killed in between is repaired
by running again; a run with nothing new changes nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from mergegate.merge_core.errors import InvalidInput, Refused, suggest
from mergegate.merge_core.files import HashMemo, finish_directory, fsync, fsync_directories, locked, new_directory
from mergegate.merge_core.parsing import LocalPath, is_special, open_plain, read_plain
from mergegate.tasks.publish.content import PROVENANCE, ReleaseFile, is_content_version
from mergegate.tasks.publish.targets.alias import is_a_version, no_such_version, require_alias_name
from mergegate.tasks.publish.targets.contract import FIRST, CurrentRelease, OnProgress, PublishTarget, Release

LATEST = "latest"
_CHUNK = 1 << 22
_MOST_READ = 64 << 20  # of the files that say something of a release
# What git, a download or the Hub leaves beside the files of a release that was fetched into a directory.
_FOREIGN_FOLDERS = (".cache", ".git")
_FOREIGN_FILE = ".gitattributes"


class DirectoryTarget(PublishTarget):
    """A directory that holds every version of the release and a link to the latest one."""

    known_as: ClassVar[str] = "the directory of a release"
    shows_itself: ClassVar[bool] = True

    to: Literal["directory"] = "directory"
    path: LocalPath

    @property
    def address(self) -> str:
        return "."

    def check(self, root: Path) -> None:
        """See that the directory is there and may be written, or can be made."""
        place = (root / self.path).absolute()
        above = next(parent for parent in (place, *place.parents) if parent.exists())
        # Asked, not tried: a run with nothing new leaves no trace, not even a time on a directory.
        if above.is_dir() and os.access(above, os.W_OK | os.X_OK):
            return
        kind = Refused if above.is_dir() else InvalidInput
        raise kind(
            f"publish.path: {place}",
            found=f"{above} {'may not be written' if above.is_dir() else 'is no directory'}",
            expected="a directory that can be made and written",
            remedy="name another, or have its permissions changed",
        )

    def current(self, root: Path) -> CurrentRelease | None:
        """What ``latest`` points to. Without a head: one machine writes there, one publisher at a time."""
        latest = root / self.path / LATEST
        return CurrentRelease(latest.resolve()) if latest.is_dir() else None

    def earlier(self, root: Path, named: str) -> CurrentRelease | None:
        """A version beside ``latest``; the first is the one that was written before all others."""
        directory = root / self.path
        versions = [place for place in directory.iterdir() if _is_version(place)] if directory.is_dir() else []
        if not versions:
            return None
        if named == FIRST:
            return CurrentRelease(min(versions, key=lambda place: (place.stat().st_mtime_ns, place.name)).resolve())
        if (place := directory / named) in versions:
            return CurrentRelease(place.resolve())
        raise InvalidInput(
            "evaluate.anchor",
            found=f"{named!r}, which is no version at {directory}",
            expected=f"{FIRST!r}, or one of its versions",
            remedy=suggest(named, [FIRST, *(place.name for place in versions)]),
        )

    def publish(
        self,
        files: Sequence[ReleaseFile],
        name: str,
        version: str,
        root: Path,
        *,
        expected_head: str | None,
        hashes: HashMemo,
        on_progress: OnProgress,
    ) -> Release:
        """Write the version beside the others, then move ``latest``. There is no head to be expected."""
        directory = (root / self.path).resolve()
        place = directory / version
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory):
            if place.is_symlink():
                raise Refused(str(place), found="an alias", expected="a version", remedy="name the version otherwise")
            fresh = not place.exists()
            if fresh:
                _write_version(files, place, hashes, on_progress)
            else:
                finish_directory(_partial(place))
                _require_same(place, files, hashes)
            moved = _move_link(directory / LATEST, version)
            fsync(directory)
        return Release(name, version, place, f"{directory.name}/", new=fresh or moved)

    def set_alias(self, root: Path, version: str, name: str) -> None:
        """Have a link of that name lead to the version, in one step."""
        directory = (root / self.path).resolve()
        require_alias_name(name, {LATEST})
        known = [place.name for place in directory.iterdir() if _is_version(place)] if directory.is_dir() else []
        if name in known:
            raise is_a_version(name, str(directory))
        if version not in known:
            raise no_such_version(version, str(directory), known)
        with locked(directory):
            _move_link(directory / name, version)
            fsync(directory)

    def aliased(self, root: Path, name: str) -> str | None:
        """Where the link of that name leads, if that is a version."""
        link = root / self.path / name
        to = link.readlink() if link.is_symlink() else Path()
        return to.name if to == Path(to.name) and to.name and _is_version(link.with_name(to.name)) else None

    @classmethod
    def open(cls, named: str) -> DirectoryRelease | None:
        """The directory of that name, whatever lies in it."""
        return DirectoryRelease(place) if (place := Path(named)).is_dir() else None


@dataclass(frozen=True)
class DirectoryRelease:
    """A release in a directory. Every byte is read."""

    directory: Path

    @property
    def where(self) -> str:
        return str(self.directory)

    @property
    def version(self) -> str | None:
        """The name of the directory, where it is a content hash."""
        name = self.directory.resolve().name
        return name if is_content_version(name) else None

    def files(self) -> Mapping[str, tuple[int, str]]:
        """Size and sha256 of every file, without what git or a download left beside them.

        A directory without provenance is not a release. Nothing of it is read, because it may be ``/``.

        What is no file (a link that leads out, a pipe, a device) is listed with its kind in place of a sha256: whoever
        compares finds it listed by nobody. Nothing of it is read, and no linked directory is entered.
        """
        found: dict[str, tuple[int, str]] = {}
        if not os.path.lexists(self.directory / PROVENANCE):
            return found
        for folder, folders, names in os.walk(self.directory):
            place = Path(folder)
            links = [name for name in folders if (place / name).is_symlink()]
            if place == self.directory:
                folders[:] = [name for name in folders if name in links or name not in _FOREIGN_FOLDERS]
            folders[:] = sorted(set(folders) - set(links))
            for name in [*links, *names]:
                relative = (place / name).relative_to(self.directory).as_posix()
                if relative != _FOREIGN_FILE or is_special(place / name):
                    found[relative] = self._identity(place / name)
        return dict(sorted(found.items()))

    def read(self, name: str) -> bytes:
        return read_plain(self.directory / name, _MOST_READ, within=self.directory)

    def _identity(self, path: Path) -> tuple[int, str]:
        try:
            with open_plain(path, within=self.directory) as file:
                digest = hashlib.file_digest(file, "sha256")  # type: ignore[arg-type]  # raw is enough
                return file.tell(), digest.hexdigest()
        except FileNotFoundError:
            return 0, "a link to nowhere"
        except InvalidInput as error:
            return 0, error.found


def _is_version(place: Path) -> bool:
    return place.is_dir() and not place.is_symlink() and not place.name.startswith(".")


def _write_version(files: Sequence[ReleaseFile], place: Path, hashes: HashMemo, on_progress: OnProgress) -> None:
    """All files beside their final place, then one rename; the next run need not read them to know them."""
    done, total = 0, sum(file.size for file in files)

    def wrote(count: int) -> None:
        nonlocal done
        done += count
        on_progress(done, total)

    with new_directory(place, _partial(place)) as partial:
        for file in files:
            _write(file, partial / file.name, wrote)
        fsync_directories(partial)
    for file in files:
        hashes.remember(place / file.name, file.sha256)


def _partial(version: Path) -> Path:
    return version.with_name(f".{version.name}.partial")


def _move_link(link: Path, version: str) -> bool:
    """Point ``link`` to ``version`` in one step. Return whether it pointed elsewhere before.

    Raises:
        Refused: ``link``, or the link that a killed run left next to it, does not lead to a version in the same
            directory, so mergegate did not create it.
    """
    step = link.with_name(f".{link.name[:200]}.partial")
    for path in (link, step):
        target = path.readlink() if path.is_symlink() else None
        if os.path.lexists(path) and (target is None or target.name in ("", "..") or target != Path(target.name)):
            raise Refused(
                str(path),
                found="a file or directory" if target is None else f"a link to {target}",
                expected="a link to a version in this directory",
                remedy="move it away",
            )
    step.unlink(missing_ok=True)
    if link.is_symlink() and link.readlink() == Path(version):
        return False
    step.symlink_to(version)
    step.rename(link)
    return True


def _require_same(place: Path, files: Sequence[ReleaseFile], hashes: HashMemo) -> None:
    expected = {file.name: file.sha256 for file in files}
    present = {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}
    wrong = [name for name, sha256 in expected.items() if name in present and hashes.sha256(place / name) != sha256]
    if odd := sorted({*wrong, *(present ^ set(expected))}):
        raise Refused(
            str(place / odd[0]),
            found="the version is already published with other content",
            expected="a version that never changes",
            remedy="publish under a new version, or remove the altered one by hand",
        )


def _write(file: ReleaseFile, place: Path, wrote: Callable[[int], None]) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    running = hashlib.sha256()
    with place.open("wb") as output:
        if isinstance(file.source, bytes):
            running.update(file.source)
            output.write(file.source)
            wrote(len(file.source))
        else:
            with file.source.open("rb") as source:
                while chunk := source.read(_CHUNK):
                    running.update(chunk)
                    output.write(chunk)
                    wrote(len(chunk))
        output.flush()
        os.fsync(output.fileno())
    if running.hexdigest() != file.sha256:
        raise file.altered(running.hexdigest())
