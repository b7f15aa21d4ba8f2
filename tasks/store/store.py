"""The artifact store: immutable directories, addressed by the key of what made them, complete or absent.

An artifact is written to ``<root>/<stage>/<key>.partial``, fsynced, and renamed to ``<root>/<stage>/<key>``: a
directory with its final name is always whole. Its ``manifest.json`` lists every file with size and sha256; an artifact
is believed only after it agrees with its manifest, and anything else is a miss that says why::

    store = Store(Path(".mergegate/store"))
    artifact = store.build("merge", key, MergeRecord, lambda out: merge(plan, out))   # makes it, or finds it
    artifact.directory, artifact.value, artifact.digest

A stage whose value is all that it makes has no directory: its value lies in ``<root>/<stage>/<key>.json``.

Two processes that want the same key: one builds, the other waits and finds it. The lock is flock(2): the kernel drops
it with the process, so a killed run never leaves one behind.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel

from mergegate.merge_core.files import (
    HASHES,
    JOURNAL,
    Damaged,
    HashMemo,
    fsync,
    fsync_directories,
    locked,
    move_aside,
    read_state,
    regular_files,
    remove_any,
    state_directory,
    write_state,
)
from mergegate.merge_core.wording import detail
from mergegate.tasks.store.keys import digest
from mergegate.tasks.store.manifest import MANIFEST, ArtifactManifest, ValueRecord
from mergegate.tasks.store.shared import SharedStore

log = logging.getLogger(__name__)

R = TypeVar("R", bound=BaseModel)
T = TypeVar("T")

VALUE = "value.json"
LOCKS = "locks"  # the directory of the locks of keys, and of what else is done by one process at a time
TRASH = ".trash"  # what is being deleted; nobody reads it


class StoreMiss(Exception):
    """The artifact cannot be believed; the message says why. Never leaves the pipeline: the stage is run again."""


@dataclass(frozen=True)
class StoredValue(Generic[R]):
    """What a stage says, as it stands in the store.

    ``digest`` (64 hex digits) covers the value, but no field that is marked ``NotInKey``. Used as an input of a later
    stage, it counts as its digest: equal content gives equal keys.
    """

    stage: str
    key: str
    digest: str
    value: R

    def content_key(self) -> str:
        return self.digest


@dataclass(frozen=True)
class Artifact(StoredValue[R]):
    """What a stage made, and what it says about it. ``digest`` covers the content of every file, too."""

    directory: Path
    files: Mapping[str, str]  # relative name -> sha256


class Store:
    """Artifacts below ``root``. ``root`` and everything in it may be deleted at any time; it will be rebuilt.

    Args:
        shared: Asked for what is not here, and told what was made here.
        about_to_read: As of ``HashMemo``.
    """

    def __init__(
        self,
        root: Path,
        shared: SharedStore | None = None,
        about_to_read: Callable[[Path], None] = lambda path: None,
    ) -> None:
        self.root, self.shared = root, shared
        self.hashes = HashMemo(root / HASHES, about_to_read)

    def directory(self, stage: str, key: str) -> Path:
        """Where the artifact stands, or would stand."""
        return self.root / stage / key[:32]

    def open(self, stage: str, key: str, value_type: type[R], *, deep: bool = False) -> Artifact[R]:
        """The artifact, after checking it against its manifest: names, sizes and hashes.

        Args:
            deep: Read every byte, instead of believing hashes of files that have not been touched since.

        Raises:
            StoreMiss: when it is absent, incomplete or altered; the message names the file.
        """
        directory = self.directory(stage, key)
        if not os.path.lexists(directory):
            raise StoreMiss(f"{stage} {key[:12]} is not in the store")
        found = self._opened(stage, directory, value_type, deep=deep)
        if found.key != key:
            raise StoreMiss(f"{directory} belongs to another key")
        return found

    def _opened(self, stage: str, directory: Path, value_type: type[R], *, deep: bool = False) -> Artifact[R]:
        """As :meth:`_open`; what is removed while it is looked at is a miss like any other."""
        try:
            return self._open(stage, directory, value_type, deep=deep)
        except FileNotFoundError as gone:
            raise StoreMiss(f"{gone.filename} was removed while it was looked at") from None

    def _open(self, stage: str, directory: Path, value_type: type[R], *, deep: bool = False) -> Artifact[R]:
        """The artifact in ``directory``, whose key its manifest says. Raises as ``open``."""
        manifest = _believed(
            read_state(directory / MANIFEST, ArtifactManifest.model_validate_json), directory / MANIFEST
        )
        if self.directory(stage, manifest.key) != directory:
            raise StoreMiss(f"{directory} belongs to another key")
        # Only what lies in the directory is looked at, whatever the manifest names.
        present, odd = regular_files(directory)
        if odd:
            raise StoreMiss(f"{directory / min(odd)} is no file")
        for name, entry in manifest.files.items():
            path = directory / name
            if name not in present:
                raise StoreMiss(f"{path} is missing")
            if (size := path.stat().st_size) != entry.size:
                raise StoreMiss(f"{path} has {size} bytes instead of {entry.size}")
            try:
                sha256 = self.hashes.sha256(path, trust=not deep)
            except PermissionError:
                raise StoreMiss(f"{path} is not readable by this user") from None
            if sha256 != entry.sha256:
                raise StoreMiss(f"{path} was altered")
        if extra := sorted(present - set(manifest.files) - {MANIFEST, JOURNAL}):
            raise StoreMiss(f"{directory / extra[0]} is not of this artifact")
        value = _believed(read_state(directory / VALUE, value_type.model_validate_json), directory / VALUE)
        if manifest.digest != _content_digest(
            {name: entry.model_dump() for name, entry in manifest.files.items()}, value
        ):
            raise StoreMiss(f"{directory / MANIFEST} was altered")
        hashes = {name: entry.sha256 for name, entry in manifest.files.items()}
        return Artifact(stage, manifest.key, manifest.digest, value, directory, hashes)

    def family(
        self,
        stage: str,
        prefix: str,
        value_type: type[R],
        *,
        on_damage: Callable[[str], None] = log.warning,
        about_to_read: Callable[[str], None] = lambda key: None,
    ) -> tuple[Artifact[R], ...]:
        """Every artifact of a stage whose key begins with ``prefix`` and that can be believed, in the order of keys.

        Args:
            prefix: See ``family_prefix``.
            on_damage: Told why, of one that is there and cannot be believed: it is left out.
            about_to_read: Told the first 32 digits of the key of each, before it is read.
        """
        self._bring_family(stage, prefix)
        found = []
        for directory in self._finished(stage, prefix):
            about_to_read(directory.name)
            try:
                found.append(self._opened(stage, directory, value_type))
            except StoreMiss as miss:
                on_damage(str(miss))
        return tuple(found)

    def _bring_family(self, stage: str, prefix: str) -> None:
        """Fetch those members that the shared store has and we have not."""
        if (shared := self.shared) is None:
            return
        for key in shared.listed(stage, prefix):
            final = self.directory(stage, key)
            with locked(self._lock_file(stage, key), remove=True):
                if not os.path.lexists(final):
                    for path, sha256 in shared.fetch(stage, key, final).items():
                        self.hashes.remember(path, sha256)

    def hold_family(
        self, stage: str, prefix: str, on_wait: Callable[[], None] = lambda: None
    ) -> AbstractContextManager[None]:
        """Nobody else adds to the family as long as this is held; ``on_wait`` is called once if somebody else does."""
        return locked(self._lock_file(stage, prefix), remove=True, on_wait=on_wait)

    def open_value(self, stage: str, key: str, value_type: type[R]) -> StoredValue[R]:
        """What a stage without files said, after comparing it with its digests.

        Raises:
            StoreMiss: when it is absent or altered.
        """
        path = self._value_file(stage, key)
        if not os.path.lexists(path):
            raise StoreMiss(f"{stage} {key[:12]} is not in the store")

        def parse(content: bytes) -> tuple[ValueRecord, R]:
            record = ValueRecord.model_validate_json(content)
            return record, value_type.model_validate(record.value)

        record, value = _believed(read_state(path, parse), path)
        if record.key != key:
            raise StoreMiss(f"{path} belongs to another key")
        if record.sha256 != digest(record.value) or record.digest != _content_digest({}, value):
            raise StoreMiss(f"{path} was altered")
        return StoredValue(stage, key, record.digest, value)

    def build(
        self,
        stage: str,
        key: str,
        value_type: type[R],
        make: Callable[[Path], R],
        *,
        hashes_of: Callable[[R], Mapping[str, str]] = lambda value: {},
        resumable: bool = False,
        on_wait: Callable[[], None] = lambda: None,
        on_damage: Callable[[str], None] = log.warning,
    ) -> tuple[Artifact[R], bool]:
        """The artifact from the store, or made now. The second value is true when it was made now.

        Args:
            make: Writes files into the directory it is given and returns the value.
            hashes_of: sha256 of files that ``make`` hashed while writing them, by name; they are not read again.
            resumable: ``make`` can resume from what a killed run left in the directory; otherwise it starts empty. A
                file called ``JOURNAL`` in it is no part of the artifact and goes with the sealing.
            on_wait: Called once if another process is building the same artifact.
            on_damage: Told why, if an artifact is there and cannot be believed: it is made again.
        """
        final = self.directory(stage, key)

        def found() -> Artifact[R] | None:
            try:
                artifact = self.open(stage, key, value_type)
            except StoreMiss as miss:
                detail("store: %s", miss)
                if os.path.lexists(final):
                    on_damage(_set_aside(final, miss))
                return None
            (final / JOURNAL).unlink(missing_ok=True)  # of a run that was killed between naming and removing
            return artifact

        def made() -> Artifact[R]:
            self._make(stage, key, make, hashes_of, resumable)
            return self.open(stage, key, value_type)

        def arrive(shared: SharedStore) -> None:
            for path, sha256 in shared.fetch(stage, key, final).items():
                self.hashes.remember(path, sha256)

        with locked(self._lock_file(stage, key), remove=True, on_wait=on_wait):
            return self._found_or_made(stage, key, final, found, made, arrive, on_wait)

    def _found_or_made(
        self,
        stage: str,
        key: str,
        place: Path,
        found: Callable[[], T | None],
        made: Callable[[], T],
        arrive: Callable[[SharedStore], None],
        on_wait: Callable[[], None],
    ) -> tuple[T, bool]:
        """Here, else there, else made now; and whether it was. With the lock of the key held.

        Args:
            place: Where it lies, once it is here.
            arrive: Brings it here from the shared store, if that has it.
        """
        if (known := found()) is not None:
            detail("store: found %s", place)
            return known, False
        if (shared := self.shared) is None:
            return made(), True
        detail("shared store: asked for %s %s", stage, key[:12])
        arrived: list[T] = []

        def look() -> bool:
            arrive(shared)
            if os.path.lexists(place):
                if (one := found()) is not None:
                    arrived.append(one)
                elif place.suffix != ".json":  # a value is written over anyway
                    shared.discard(stage, key)
            return bool(arrived)

        with shared.turn(stage, key, look, on_wait) as made_elsewhere:
            if made_elsewhere:
                return arrived[0], False
            result = made()
            shared.offer(stage, key, place)
            return result, True

    def _make(
        self,
        stage: str,
        key: str,
        make: Callable[[Path], R],
        hashes_of: Callable[[R], Mapping[str, str]],
        resumable: bool,
    ) -> None:
        """Make an artifact beside its place and give it its name."""
        final = self.directory(stage, key)
        partial = final.with_name(final.name + ".partial")
        state_directory(partial.parent)
        if not resumable or partial.is_symlink():
            remove_any(partial)
        state_directory(partial)
        try:
            value = make(partial)
        except Exception:
            with suppress(OSError):  # What went wrong first is what is said.
                if not resumable or not any(partial.iterdir()):
                    remove_any(partial)
            raise
        self._seal(stage, key, partial, value, hashes_of(value))
        partial.rename(final)
        fsync(final.parent)
        # Only now: until the artifact has its name, a kill must not lose what was computed.
        (final / JOURNAL).unlink(missing_ok=True)

    def build_value(
        self,
        stage: str,
        key: str,
        value_type: type[R],
        make: Callable[[], R],
        *,
        on_wait: Callable[[], None] = lambda: None,
        on_damage: Callable[[str], None] = log.warning,
    ) -> tuple[StoredValue[R], bool]:
        """The value from the store, or made now. As :meth:`build`, for a stage that makes no files."""
        path = self._value_file(stage, key)

        def found() -> StoredValue[R] | None:
            try:
                return self.open_value(stage, key, value_type)
            except StoreMiss as miss:
                detail("store: %s", miss)
                if os.path.lexists(path):
                    on_damage(_set_aside(path, miss))
                return None

        def made() -> StoredValue[R]:
            self._seal_value(stage, key, path, make())
            return self.open_value(stage, key, value_type)

        def arrive(shared: SharedStore) -> None:
            if (content := shared.fetch_value(stage, key)) is not None:
                state_directory(path.parent)
                write_state(path, content)

        with locked(self._lock_file(stage, key), remove=True, on_wait=on_wait):
            return self._found_or_made(stage, key, path, found, made, arrive, on_wait)

    def mark_used(self, stage: str, key: str) -> None:
        """Note the time of a use: what has not been used for longest goes first, where room is wanted."""
        for place in (self.directory(stage, key), self._value_file(stage, key)):
            with suppress(OSError):  # the other of the two; one of somebody else; a disk that is read-only
                os.utime(place, follow_symlinks=False)

    def _finished(self, stage: str, prefix: str) -> Iterator[Path]:
        """Directories with a final name."""
        for directory in sorted((self.root / stage).glob(f"{prefix}*")):
            if directory.is_dir() and not directory.suffix:  # .partial, .doomed
                yield directory

    def _seal_value(self, stage: str, key: str, path: Path, value: R) -> None:
        plain = json.loads(value.model_dump_json())
        content = _content_digest({}, value)
        record = {"stage": stage, "key": key, "digest": content, "sha256": digest(plain), "value": plain}
        state_directory(path.parent)
        write_state(path, json.dumps(record, indent=1).encode())

    def _value_file(self, stage: str, key: str) -> Path:
        return self.directory(stage, key).with_suffix(".json")

    def _lock_file(self, stage: str, key: str) -> Path:
        state_directory(self.root, private=True)
        return state_directory(self.root / LOCKS) / f"{stage}-{key[:32]}"

    def _seal(self, stage: str, key: str, partial: Path, value: BaseModel, known: Mapping[str, str]) -> None:
        remove_any(partial / VALUE)
        (partial / VALUE).write_text(value.model_dump_json(indent=1))
        files: dict[str, dict[str, object]] = {}
        # What a run that was killed here has left is no part of it.
        present, odd = regular_files(partial)
        for name in odd:
            remove_any(partial / name)
        for name in sorted(present - {MANIFEST, JOURNAL}):
            path = partial / name
            fsync(path)
            sha256 = known.get(name) or self.hashes.sha256(path, trust=False)
            self.hashes.remember(path, sha256)
            files[name] = {"size": path.stat().st_size, "sha256": sha256}
        manifest = {"stage": stage, "key": key, "digest": _content_digest(files, value), "files": files}
        remove_any(partial / MANIFEST)
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
        fsync(partial / MANIFEST)
        fsync_directories(partial)


def _content_digest(files: Mapping[str, Mapping[str, object]], value: BaseModel) -> str:
    """Of all that a stage made: its files but the value's own, and the value."""
    return digest({"files": {name: entry for name, entry in files.items() if name != VALUE}, "value": value})


def _set_aside(path: Path, miss: StoreMiss) -> str:
    place = move_aside(path)
    return f"{miss}; {f'set aside as {place.name}' if place else 'removed'}"


def _believed(found: T | Damaged | None, path: Path) -> T:
    if isinstance(found, Damaged):
        raise StoreMiss(str(found))
    if found is None:
        raise StoreMiss(f"{path} is missing")
    return found
