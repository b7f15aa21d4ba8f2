"""Store artifacts as immutable directories, each under its key and either complete or absent.

The store writes an artifact to ``<root>/<stage>/<key>.partial``, flushes it to the disk, and renames it to
``<root>/<stage>/<key>``. A directory with its final name is therefore complete. Its ``manifest.json`` lists every file
with size and sha256. An artifact that disagrees with its manifest counts as missing::

    store = Store(Path(".mergegate/store"))
    artifact, is_new = store.build("merge", key, MergeRecord, lambda out: merge(plan, out))   # opens or builds it
    artifact.directory, artifact.value, artifact.digest

A stage that writes no files has no directory. Its value is in ``<root>/<stage>/<key>.json``.

If two processes need the same key, one builds the artifact while the other waits and then opens it. They use flock(2)
locks, which the kernel releases when a process ends, so a killed run leaves no lock behind.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
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
    read_state,
    regular_files,
    remove_any,
    state_directory,
    write_state,
)
from mergegate.merge_core.wording import detail
from mergegate.tasks.base.store.manifest import MANIFEST, ArtifactManifest, ValueRecord, digest
from mergegate.tasks.base.store.shared import SharedStore

log = logging.getLogger(__name__)

R = TypeVar("R", bound=BaseModel)
T = TypeVar("T")

VALUE = "value.json"
LOCKS = "locks"  # Directory for the locks of keys and of other exclusive operations.
TRASH = ".trash"  # Directory for entries that are being deleted. No run reads it.


class StoreMiss(Exception):
    """The store has no intact result for a key. The message gives the reason. The pipeline runs the stage again."""


@dataclass(frozen=True)
class StoredValue(Generic[R]):
    """Stored result of a stage.

    ``digest`` (64 hex digits) covers the value except for fields marked ``NotInKey``. It represents the value in the
    keys of later stages, so that equal content gives equal keys.
    """

    stage: str
    key: str
    digest: str
    value: R

    def content_key(self) -> str:
        """Return the digest as the canonical form of this value in the keys of later stages."""
        return self.digest


@dataclass(frozen=True)
class Artifact(StoredValue[R]):
    """Stored result of a stage and the files that the stage wrote. ``digest`` covers the files, too."""

    directory: Path
    files: Mapping[str, str]  # The sha256 of each file by its relative name.


@dataclass(frozen=True)
class BuildCallbacks:
    """Callbacks for :meth:`Store.build` and :meth:`Store.build_value`."""

    on_wait: Callable[[], None] = lambda: None  # Called once if another process is building the same result.
    # Called with the reason if the stored result is damaged and has to be built again.
    on_damage: Callable[[str], None] = log.warning
    # Called with the built value. Returns the sha256, by name, of files that the build hashed while writing them. The
    # store does not hash these files again.
    hashes_of: Callable[[Any], Mapping[str, str]] = lambda value: {}


@dataclass(frozen=True)
class _Entry(Generic[T]):
    """Path of one result in the store, and functions that open it (or raise StoreMiss) and create it."""

    stage: str
    key: str
    path: Path
    open: Callable[[], T]
    create: Callable[[], None]
    callbacks: BuildCallbacks

    def find(self) -> T | None:
        """Return the result, or None if the store has no intact one. A damaged one is removed."""
        try:
            return self.open()
        except StoreMiss as miss:
            detail("store: %s", miss)
            if os.path.lexists(self.path):
                remove_any(self.path)
                self.callbacks.on_damage(f"{miss}; removed")
            return None


class Store:
    """Artifact store in the directory ``root``. Users may delete anything in it, because runs rebuild what they miss.

    Args:
        root: Directory of the store.
        shared_store: Store from which missing artifacts are fetched and to which new ones are sent. Default: none.
        about_to_read: Function called with the path of each file before the store hashes it (see :class:`HashMemo`).
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
        """Return the path of an artifact's directory, which need not exist."""
        return self.root / stage / key[:32]

    def open(self, stage: str, key: str, value_type: type[R], *, deep: bool = False) -> Artifact[R]:
        """Open an artifact and compare the names, sizes and hashes of its files with its manifest.

        With ``deep``, this hashes every file again. By default, it uses the cached hashes of unchanged files.

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
        """Open the artifact in ``directory``, whose manifest states the key. Raise StoreMiss as :meth:`open` does."""
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
        """Return all intact artifacts of a stage whose keys begin with ``prefix``, ordered by key.

        For ``prefix``, see :func:`family_prefix`. ``about_to_read`` is called with the first 32 digits of each key
        before that artifact is read. ``on_damage`` is called with the reason for each damaged artifact, which the
        result omits.
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
        """Lock a family so that no other process adds members to it; see :func:`family_prefix` for ``prefix``.

        ``on_wait`` is called once if another process holds the lock.
        """
        return hold_lock(self._lock_file(stage, prefix), remove=True, on_wait=on_wait)

    def open_value(self, stage: str, key: str, value_type: type[R]) -> StoredValue[R]:
        """Return the value of a stage that writes no files. Raise StoreMiss if it is missing or altered."""
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
        """Open the artifact with this key, or build it if the store does not have it.

        Args:
            stage: Name of the stage.
            key: Key of the stage call (see :func:`stage_key`).
            value_type: Type of the value, for validation.
            make: Function that writes files into the given directory and returns the value.
            resumable: Whether the directory for ``make`` keeps the files of a killed run, so that ``make`` can resume.
                By default it is empty. A file named ``JOURNAL`` in it is removed when the artifact is complete.
            callbacks: Callbacks for waiting, damage and known hashes.

        Returns:
            The artifact, and whether this call built it.
        """
        final = self.directory(stage, key)

        def open_artifact() -> Artifact[R]:
            artifact = self.open(stage, key, value_type)
            # The journal goes last, so that a kill before the rename loses no completed work.
            (final / JOURNAL).unlink(missing_ok=True)
            return artifact

        def create() -> None:
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

        return self._find_or_create(_Entry(stage, key, final, open_artifact, create, callbacks))

    def _find_or_create(self, entry: _Entry[T]) -> tuple[T, bool]:
        """Find the result locally or in the shared store, or create it. Return it and whether this call created it."""
        stage, key, path, shared = entry.stage, entry.key, entry.path, self.shared
        with hold_lock(self._lock_file(stage, key), remove=True, on_wait=entry.callbacks.on_wait):
            if (cached := entry.find()) is not None:
                detail("store: found %s", path)
                return cached, False
            if shared is None:
                entry.create()
                return entry.open(), True
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

            with shared.reserve(stage, key, try_fetch, entry.callbacks.on_wait) as is_fetched:
                if is_fetched:
                    return fetched[0], False
                entry.create()
                result = entry.open()
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
        """Return the value with this key, or compute it. Works as :meth:`build` for a stage that writes no files."""
        path = self._value_file(stage, key)

        def create() -> None:
            value = make()
            plain = json.loads(value.model_dump_json())
            content = _content_digest({}, value)
            record = {"stage": stage, "key": key, "digest": content, "sha256": digest(plain), "value": plain}
            state_directory(path.parent)
            write_state(path, json.dumps(record, indent=1).encode())

        open_value = partial(self.open_value, stage, key, value_type)
        return self._find_or_create(_Entry(stage, key, path, open_value, create, callbacks))

    def mark_used(self, stage: str, key: str) -> None:
        """Set the time of last use to now, because garbage collection removes the least recently used entries first."""
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
    """Return the digest of a stage's value and files. The file that contains the value does not count."""
    return digest({"files": {name: entry for name, entry in files.items() if name != VALUE}, "value": value})


def _require_valid(state: T | Damaged | None, path: Path) -> T:
    if isinstance(state, Damaged):
        raise StoreMiss(str(state))
    if state is None:
        raise StoreMiss(f"{path} is missing")
    return state
