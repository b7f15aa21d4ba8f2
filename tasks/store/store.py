"""Store artifacts as immutable directories that are addressed by their key and either complete or absent.

The store writes an artifact to ``<root>/<stage>/<key>.partial``, syncs it, and renames it to
``<root>/<stage>/<key>``. A directory with its final name is therefore always complete. Its ``manifest.json`` lists
every file with size and sha256. An artifact is used only if it agrees with its manifest; anything else is a miss with
a reason::

    store = Store(Path(".mergegate/store"))
    artifact, is_new = store.build("merge", key, MergeRecord, lambda out: merge(plan, out))   # opens or builds it
    artifact.directory, artifact.value, artifact.digest

A stage that writes no files has no directory. Its value is in ``<root>/<stage>/<key>.json``.

If two processes need the same key, one builds the artifact while the other waits and then opens it. The lock uses
flock(2). The kernel releases it when the process ends, so a killed run never leaves a lock behind.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from mergegate.merge_core.files import (
    HASHES,
    JOURNAL,
    Damaged,
    HashMemo,
    fsync,
    fsync_directories,
    hold_lock,
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
LOCKS = "locks"  # Directory for the locks of keys and of other exclusive operations.
TRASH = ".trash"  # Directory for entries that are being deleted. No run reads it.


class StoreMiss(Exception):
    """The artifact is missing or damaged. The message gives the reason.

    The pipeline handles this exception by running the stage again, so it never reaches the user.
    """


@dataclass(frozen=True)
class StoredValue(Generic[R]):
    """Stored result of a stage.

    ``digest`` (64 hex digits) covers the value except for fields marked ``NotInKey``. As an input of a later stage, the
    value counts as its digest, so that equal content gives equal keys.
    """

    stage: str
    key: str
    digest: str
    value: R

    def content_key(self) -> str:
        """Return the digest, which represents this value in the keys of later stages."""
        return self.digest


@dataclass(frozen=True)
class Artifact(StoredValue[R]):
    """Stored result of a stage together with the files that it wrote. ``digest`` covers all files, too."""

    directory: Path
    files: Mapping[str, str]  # The sha256 of each file by its relative name.


@dataclass(frozen=True)
class BuildCallbacks:
    """Callbacks of a build.

    Attributes:
        on_wait: Called once if another process is building the same result.
        on_damage: Called with the reason if a stored result is damaged and has to be built again.
        hashes_of: Returns the sha256 of files that the build hashed while writing them, by name, for the built value.
            These files are not read again.
    """

    on_wait: Callable[[], None] = lambda: None
    on_damage: Callable[[str], None] = log.warning
    hashes_of: Callable[[Any], Mapping[str, str]] = lambda value: {}


@dataclass(frozen=True)
class _Entry(Generic[T]):
    """How to find and create one result in the store.

    Attributes:
        path: Directory or file of the result.
        find: Opens the result in this store, or returns None.
        create: Creates the result.
    """

    stage: str
    key: str
    path: Path
    find: Callable[[], T | None]
    create: Callable[[], T]


class Store:
    """Artifact store in the directory ``root``.

    Users may delete ``root`` or anything in it at any time. mergegate rebuilds it.

    Args:
        shared: Shared store from which missing artifacts are fetched and to which new ones are sent. Default: none.
        about_to_read: Function called with a path before the file is hashed. See :class:`HashMemo`.
    """

    def __init__(
        self,
        root: Path,
        shared_store: SharedStore | None = None,
        about_to_read: Callable[[Path], None] = lambda path: None,
    ) -> None:
        self.root, self.shared = root, shared_store
        self.hashes = HashMemo(root / HASHES, about_to_read)

    def directory(self, stage: str, key: str) -> Path:
        """Return the directory of an artifact, whether or not it exists."""
        return self.root / stage / key[:32]

    def open(self, stage: str, key: str, value_type: type[R], *, deep: bool = False) -> Artifact[R]:
        """Return an artifact after comparing its files with its manifest: names, sizes and hashes.

        With ``deep``, this reads every byte instead of using the cached hashes of unchanged files.

        Raises:
            StoreMiss: The artifact is missing, incomplete or altered. The message names the file.
        """
        directory = self.directory(stage, key)
        if not os.path.lexists(directory):
            raise StoreMiss(f"{stage} {key[:12]} is not in the store")
        artifact = self._open(stage, directory, value_type, deep=deep)
        if artifact.key != key:
            raise StoreMiss(f"{directory} belongs to another key")
        return artifact

    def _open(self, stage: str, directory: Path, value_type: type[R], *, deep: bool = False) -> Artifact[R]:
        """Open the artifact in ``directory`` with the key in its manifest. Raise StoreMiss as :meth:`open` does."""
        try:
            manifest = _require_valid(
                read_state(directory / MANIFEST, ArtifactManifest.model_validate_json), directory / MANIFEST
            )
            if self.directory(stage, manifest.key) != directory:
                raise StoreMiss(f"{directory} belongs to another key")
            # Read only files inside the directory, even if the manifest names others.
            present, special = regular_files(directory)
            if special:
                raise StoreMiss(f"{directory / min(special)} is not a regular file")
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
                raise StoreMiss(f"{directory / extra[0]} is not part of this artifact")
            value = _require_valid(read_state(directory / VALUE, value_type.model_validate_json), directory / VALUE)
            entries = {name: entry.model_dump() for name, entry in manifest.files.items()}
            if manifest.digest != _content_digest(entries, value):
                raise StoreMiss(f"{directory / MANIFEST} was altered")
            hashes = {name: entry.sha256 for name, entry in manifest.files.items()}
            return Artifact(stage, manifest.key, manifest.digest, value, directory, hashes)
        except FileNotFoundError as error:
            raise StoreMiss(f"{error.filename} was removed during the check") from None

    def family(
        self,
        stage: str,
        prefix: str,
        value_type: type[R],
        *,
        on_damage: Callable[[str], None] = log.warning,
        about_to_read: Callable[[str], None] = lambda key: None,
    ) -> tuple[Artifact[R], ...]:
        """Return every intact artifact of a stage whose key begins with ``prefix``, ordered by key.

        For ``prefix``, see :func:`family_prefix`. ``on_damage`` is called with the reason for each damaged artifact,
        which is omitted from the result. ``about_to_read`` is called with the first 32 digits of each key before its
        artifact is read.
        """
        for key in self.shared.keys(stage, prefix) if self.shared else ():
            final = self.directory(stage, key)
            with hold_lock(self._lock_file(stage, key), remove=True):
                if self.shared is not None and not os.path.lexists(final):
                    self._remember(self.shared.fetch(stage, key, final))
        artifacts = []
        for directory in sorted((self.root / stage).glob(f"{prefix}*")):
            if directory.suffix or not directory.is_dir():  # skips .partial and .doomed directories
                continue
            about_to_read(directory.name)
            try:
                artifacts.append(self._open(stage, directory, value_type))
            except StoreMiss as miss:
                on_damage(str(miss))
        return tuple(artifacts)

    def hold_family(
        self, stage: str, prefix: str, on_wait: Callable[[], None] = lambda: None
    ) -> AbstractContextManager[None]:
        """Lock a family, so that no other process adds members to it.

        For ``prefix``, see :func:`family_prefix`. ``on_wait`` is called once if another process holds the lock.
        """
        return hold_lock(self._lock_file(stage, prefix), remove=True, on_wait=on_wait)

    def open_value(self, stage: str, key: str, value_type: type[R]) -> StoredValue[R]:
        """Return the value of a stage that writes no files, after comparing it with its digests.

        Raises:
            StoreMiss: The value is missing or altered.
        """
        path = self._value_file(stage, key)
        if not os.path.lexists(path):
            raise StoreMiss(f"{stage} {key[:12]} is not in the store")

        def parse(content: bytes) -> tuple[ValueRecord, R]:
            record = ValueRecord.model_validate_json(content)
            return record, value_type.model_validate(record.value)

        record, value = _require_valid(read_state(path, parse), path)
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
        resumable: bool = False,
        callbacks: BuildCallbacks = BuildCallbacks(),
    ) -> tuple[Artifact[R], bool]:
        """Return the artifact from the store, or build it if it is missing.

        Args:
            stage: Name of the stage.
            key: Key of the stage call (see :func:`stage_key`).
            value_type: Type that the stored value is validated as.
            make: Function that writes files into the given directory and returns the value.
            resumable: Whether ``make`` can resume from the files of a killed run in the directory. By default the
                directory starts empty. A file named ``JOURNAL`` in it is not part of the artifact and is removed when
                the artifact is complete.
            callbacks: Callbacks for waiting, damage and known hashes.

        Returns:
            The artifact, and whether this call built it.
        """
        final = self.directory(stage, key)

        def find() -> Artifact[R] | None:
            try:
                artifact = self.open(stage, key, value_type)
            except StoreMiss as miss:
                detail("store: %s", miss)
                if os.path.lexists(final):
                    callbacks.on_damage(_set_aside(final, miss))
                return None
            # A run that was killed just after the rename leaves its journal.
            (final / JOURNAL).unlink(missing_ok=True)
            return artifact

        def create() -> Artifact[R]:
            partial = final.with_name(final.name + ".partial")
            state_directory(partial.parent)
            if not resumable or partial.is_symlink():
                remove_any(partial)
            state_directory(partial)
            try:
                value = make(partial)
            except Exception:
                with suppress(OSError):  # Report the first error.
                    if not resumable or not any(partial.iterdir()):
                        remove_any(partial)
                raise
            self._seal(stage, key, partial, value, callbacks.hashes_of(value))
            partial.rename(final)
            fsync(final.parent)
            # Remove the journal last, so that a kill before the rename loses no completed work.
            (final / JOURNAL).unlink(missing_ok=True)
            return self.open(stage, key, value_type)

        return self._find_or_create(_Entry(stage, key, final, find, create), callbacks.on_wait)

    def _find_or_create(self, entry: _Entry[T], on_wait: Callable[[], None]) -> tuple[T, bool]:
        """Return the result from this store or the shared store, or create it under the lock of its key.

        Returns:
            The result, and whether this call created it.
        """
        stage, key, path, shared = entry.stage, entry.key, entry.path, self.shared
        with hold_lock(self._lock_file(stage, key), remove=True, on_wait=on_wait):
            if (cached := entry.find()) is not None:
                detail("store: found %s", path)
                return cached, False
            if shared is None:
                return entry.create(), True
            detail("shared store: requesting %s %s", stage, key[:12])
            fetched: list[T] = []

            def try_fetch() -> bool:
                self._remember(shared.fetch(stage, key, path))
                if os.path.lexists(path):
                    if (result := entry.find()) is not None:
                        fetched.append(result)
                    elif path.suffix != ".json":  # A value will be overwritten anyway.
                        shared.discard(stage, key)
                return bool(fetched)

            with shared.reserve(stage, key, try_fetch, on_wait) as is_fetched:
                if is_fetched:
                    return fetched[0], False
                result = entry.create()
                shared.offer(stage, key, path)
                return result, True

    def build_value(
        self,
        stage: str,
        key: str,
        value_type: type[R],
        make: Callable[[], R],
        callbacks: BuildCallbacks = BuildCallbacks(),
    ) -> tuple[StoredValue[R], bool]:
        """Return the value from the store, or compute it. Like :meth:`build`, for a stage that writes no files."""
        path = self._value_file(stage, key)

        def find() -> StoredValue[R] | None:
            try:
                return self.open_value(stage, key, value_type)
            except StoreMiss as miss:
                detail("store: %s", miss)
                if os.path.lexists(path):
                    callbacks.on_damage(_set_aside(path, miss))
                return None

        def create() -> StoredValue[R]:
            value = make()
            plain = json.loads(value.model_dump_json())
            content = _content_digest({}, value)
            record = {"stage": stage, "key": key, "digest": content, "sha256": digest(plain), "value": plain}
            state_directory(path.parent)
            write_state(path, json.dumps(record, indent=1).encode())
            return self.open_value(stage, key, value_type)

        return self._find_or_create(_Entry(stage, key, path, find, create), callbacks.on_wait)

    def mark_used(self, stage: str, key: str) -> None:
        """Record the time of use, so that garbage collection removes the least recently used entries first."""
        for path in (self.directory(stage, key), self._value_file(stage, key)):
            with suppress(OSError):  # Only one of the two exists, and it may be read-only or belong to another user.
                os.utime(path, follow_symlinks=False)

    def _remember(self, hashes: Mapping[Path, str]) -> None:
        for path, sha256 in hashes.items():
            self.hashes.remember(path, sha256)

    def _value_file(self, stage: str, key: str) -> Path:
        return self.directory(stage, key).with_suffix(".json")

    def _lock_file(self, stage: str, key: str) -> Path:
        state_directory(self.root, private=True)
        return state_directory(self.root / LOCKS) / f"{stage}-{key[:32]}"

    def _seal(self, stage: str, key: str, partial: Path, value: BaseModel, hashes: Mapping[str, str]) -> None:
        remove_any(partial / VALUE)
        (partial / VALUE).write_text(value.model_dump_json(indent=1))
        files: dict[str, dict[str, object]] = {}
        # Links, pipes and manifests that a killed run left here are not part of the artifact.
        present, special = regular_files(partial)
        for name in special:
            remove_any(partial / name)
        for name in sorted(present - {MANIFEST, JOURNAL}):
            path = partial / name
            fsync(path)
            sha256 = hashes.get(name) or self.hashes.sha256(path, trust=False)
            self.hashes.remember(path, sha256)
            files[name] = {"size": path.stat().st_size, "sha256": sha256}
        manifest = {"stage": stage, "key": key, "digest": _content_digest(files, value), "files": files}
        remove_any(partial / MANIFEST)
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
        fsync(partial / MANIFEST)
        fsync_directories(partial)


def _content_digest(files: Mapping[str, Mapping[str, object]], value: BaseModel) -> str:
    """Return the digest of a stage's files, except the file of the value, and of its value."""
    return digest({"files": {name: entry for name, entry in files.items() if name != VALUE}, "value": value})


def _set_aside(path: Path, miss: StoreMiss) -> str:
    aside = move_aside(path)
    return f"{miss}; {f'set aside as {aside.name}' if aside else 'removed'}"


def _require_valid(state: T | Damaged | None, path: Path) -> T:
    if isinstance(state, Damaged):
        raise StoreMiss(str(state))
    if state is None:
        raise StoreMiss(f"{path} is missing")
    return state
