"""Share artifacts between machines through a second store at any address that fsspec supports.

::

    <address>/<stage>/<key>/<sha256>        a file of an artifact, under its own hash
    <address>/<stage>/<key>.manifest        the artifact's manifest, written last; it makes the artifact visible
    <address>/<stage>/<key>.json            a stage's value, with its digests
    <address>/<stage>/<key>.lease           which machine is building the artifact, and until when

Runs read only the local store. mergegate fetches an artifact that is missing there from the shared store, compares each
file with the manifest, and renames the artifact into the local store, which checks it again. A background thread sends
each new artifact to the shared store. A note in the local store lists pending transfers, so that the next process can
complete them if this one is killed.

The shared store is only a cache. If it fails, mergegate logs a warning and works without it for the next minute. A
lease that is unavailable, expired or taken twice costs only computing time, because both machines build the same
artifact.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mergegate.merge_core.errors import InvalidInput, pip_command
from mergegate.merge_core.files import regular_files, state_directory, write_state
from mergegate.tasks.base.store.manifest import MANIFEST, ArtifactManifest, ContentMismatch, receive_directory

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

OUTBOX = ".outbox"  # Directory in the local store with one note for each pending transfer.
_SUFFIX = ".manifest"
_MAX_MANIFEST_BYTES = 64 << 20
_RETRY_AFTER_S = 60.0
# Longer than any pause of a machine that is still alive. Other machines wait this long for a dead machine.
LEASE_S = 120.0
_POLL_S = (0.2, 5.0)  # Shortest and longest pause between two checks of a lease.
log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class SharedStore:
    """Client of the shared store at ``address``, for one local store."""

    address: str  # Address in fsspec's form, such as ``s3://bucket/prefix`` or ``file:///mnt/shared``.
    root: Path  # Directory of the local store.
    max_bytes: int  # Size limit in bytes. Larger artifacts are not shared.
    # Stages whose artifacts may exceed ``max_bytes``. Machines build these without waiting for each other.
    stages_without_lease: frozenset[str] = frozenset()
    lease_s: float = LEASE_S  # Duration of a lease in seconds. Default: 120.
    _unusable_until: float = 0.0
    _leases: dict[tuple[str, str], _Lease | None] = field(default_factory=dict)
    _sender: ThreadPoolExecutor | None = None
    fetch_counts: Counter[str] = field(
        default_factory=Counter
    )  # Number of artifacts and values fetched for each stage.

    def fetch(self, stage: str, key: str, final: Path) -> dict[Path, str]:
        """Fetch an artifact into the new directory ``final``, or a stage's value into the file ``final``.

        The caller must hold the lock of the key and verify the digests of a value.

        Returns:
            The sha256 of each fetched file by its path. Empty for a value, or if the shared store does not have the
            artifact.
        """
        hashes = self._try(lambda: self._fetch(stage, key, final), f"{stage} {key[:12]} was not fetched")
        self.fetch_counts[stage] += hashes is not None
        return hashes or {}

    def discard(self, stage: str, key: str) -> None:
        """Remove an artifact that the local store has found invalid, to make room for a rebuilt one."""
        marker = self._path(stage, f"{key[:32]}{_SUFFIX}")
        self._try(lambda: self._fs.rm_file(marker), f"{stage} {key[:12]} was not removed")

    def keys(self, stage: str, prefix: str) -> tuple[str, ...]:
        """Return the keys of a stage's artifacts that begin with ``prefix``, each shortened to 32 digits."""

        def list_keys() -> tuple[str, ...]:
            paths = self._fs.glob(f"{self._path(stage, prefix)}*{_SUFFIX}")
            return tuple(sorted(str(path).rpartition("/")[2].removesuffix(_SUFFIX) for path in paths))

        return self._try(list_keys, f"{stage} was not listed") or ()

    @contextmanager
    def reserve(self, stage: str, key: str, fetch: Callable[[], bool], on_wait: Callable[[], None]) -> Iterator[bool]:
        """Wait until the artifact has been fetched or this machine may build it.

        Yields true if the artifact has been fetched. Yields false if the caller has to build it inside the block.

        ``fetch`` tries to fetch the artifact and returns whether it succeeded. ``on_wait`` is called once if another
        machine is building the artifact.
        """
        if self._sender is None:  # send what an earlier process did not send
            self._sender = ThreadPoolExecutor(1, thread_name_prefix="sharing")  # Joined when the process ends.
            with suppress(FileNotFoundError):
                for note in sorted((self.root / OUTBOX).iterdir()):
                    earlier_stage, _, name = note.name.rpartition("-")
                    self._send_later(earlier_stage, self.root / earlier_stage / name, note, None)
        if fetch():
            yield True
            return
        if stage in self.stages_without_lease:
            yield False
            return
        lease = _Lease(self, self._path(stage, f"{key[:32]}.lease"))
        pause, is_waiting = _POLL_S[0], False
        # If the shared store is unavailable, this machine works without it and without a lease.
        while self._try(lease.acquire, "a lease could not be acquired") is False:
            if not is_waiting:
                on_wait()
                is_waiting = True
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S[1])
            if fetch():
                yield True
                return
        try:
            if fetch():  # Another machine may have finished just before.
                yield True
                return
            self._leases[stage, key] = lease
            yield False
        finally:
            if self._leases.pop((stage, key), None) is not None:  # The build failed, so nothing was offered.
                lease.release()

    def offer(self, stage: str, key: str, path: Path) -> None:
        """Send the directory of an artifact or the file of a value to the shared store, in the background."""
        lease = self._leases.pop((stage, key), None)
        try:
            files = [path / name for name in regular_files(path)[0]] if path.is_dir() else [path]
            if sum(file.stat().st_size for file in files) > self.max_bytes:
                log.info("%s %s is not shared, because it is larger than the limit", stage, key[:12])
                if lease:
                    lease.release()
                return
            note = state_directory(self.root / OUTBOX) / f"{stage}-{path.name}"
            note.write_bytes(b"")
        except OSError as error:
            log.warning("%s %s is not shared: %s", stage, key[:12], error)
            if lease:
                lease.release()
            return
        self._send_later(stage, path, note, lease)

    def settle(self) -> None:
        """Wait until each offered artifact has been sent or its transfer has failed."""
        if self._sender is not None:
            self._sender.submit(lambda: None).result()

    def _send_later(self, stage: str, path: Path, note: Path, lease: _Lease | None) -> None:
        def send() -> None:
            try:
                is_sent = self._try(lambda: self._send(stage, path), f"{stage} {path.name[:12]} was not sent")
                if is_sent:
                    note.unlink(missing_ok=True)
            finally:
                if lease:
                    lease.release()

        if self._sender is None:
            self._sender = ThreadPoolExecutor(1, thread_name_prefix="sharing")
        self._sender.submit(send)

    def _send(self, stage: str, path: Path) -> bool:
        """Send the files first and the manifest last, so that a visible artifact is always complete."""
        if path.suffix == ".json":
            with suppress(FileNotFoundError):  # Garbage collection has removed the value, so no run needs it.
                self._write(self._path(stage, path.name), path.read_bytes())
            return True
        marker = self._path(stage, f"{path.name}{_SUFFIX}")
        try:
            content = (path / MANIFEST).read_bytes()
            manifest = ArtifactManifest.model_validate_json(content)
        except (OSError, ValueError):
            return True  # The artifact was removed or altered since it was built.
        if self._fs.exists(marker):
            return True
        for name, entry in manifest.files.items():
            remote = self._path(stage, path.name, entry.sha256)
            self._fs.makedirs(remote.rpartition("/")[0], exist_ok=True)
            self._fs.put_file(str(path / name), remote)
        self._write(marker, content)
        return True

    def _fetch(self, stage: str, key: str, final: Path) -> dict[Path, str] | None:
        if final.suffix == ".json":
            if (value := self._content(self._path(stage, final.name))) is None:
                return None
            state_directory(final.parent)
            write_state(final, value)
            return {}
        marker = self._path(stage, f"{key[:32]}{_SUFFIX}")
        content = self._content(marker)
        if content is None:
            return None
        try:
            manifest = ArtifactManifest.model_validate_json(content)
        except ValueError:
            return None  # The manifest is damaged, or only partially written on a file system that shows partial files.
        if manifest.key != key and manifest.key[:32] != key:
            return None

        def fetch_file(name: str, path: Path) -> None:
            if name == MANIFEST:
                path.write_bytes(content)
            else:
                self._fs.get_file(self._path(stage, key[:32], manifest.files[name].sha256), str(path))

        files = {name: (entry.size, entry.sha256) for name, entry in manifest.files.items()}
        files[MANIFEST] = len(content), hashlib.sha256(content).hexdigest()
        try:
            return receive_directory(final, files, fetch_file)
        except (ContentMismatch, FileNotFoundError) as damage:
            log.warning("%s: %s %s is damaged (%s) and will be rebuilt", self.address, stage, key[:12], damage)
            with suppress(Exception):
                self._fs.rm_file(marker)  # Without its manifest, the rebuilt artifact can replace it.
            return None

    def _content(self, path: str) -> bytes | None:
        try:
            if self._fs.size(path) > _MAX_MANIFEST_BYTES:
                return None
            content: bytes = self._fs.cat_file(path)
        except FileNotFoundError:
            return None
        return content

    def _write(self, path: str, content: bytes) -> None:
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(path, content)

    def _path(self, *parts: str) -> str:
        return "/".join((self._connected[1], *parts))

    @property
    def _fs(self) -> AbstractFileSystem:
        return self._connected[0]

    @cached_property
    def _connected(self) -> tuple[Any, str]:
        import fsspec

        options: dict[str, Any] = {"use_listings_cache": False}
        if self.address.startswith("s3"):
            options["config_kwargs"] = {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 3}}
        fs, base = fsspec.core.url_to_fs(self.address, **options)
        return fs, str(base).rstrip("/")

    def _try(self, request: Callable[[], T], failure: str) -> T | None:
        """Return the result of ``request``, or None if the shared store fails now or failed within the last minute."""
        if time.monotonic() < self._unusable_until:
            return None
        try:
            return request()
        except Exception as error:  # Each file system of fsspec has its own exception types.
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            log.warning("the shared store %s: %s: %s; continuing without it", self.address, failure, reason)
            self._unusable_until = time.monotonic() + _RETRY_AFTER_S
            return None


class _Lease:
    """Object in the shared store that names the machine building an artifact. A thread renews it while it is held."""

    def __init__(self, store: SharedStore, path: str) -> None:
        self._store, self._path = store, path
        self._owner = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex}"
        self._is_released, self._is_mine = threading.Event(), False
        self._unreadable_since = 0.0
        self._writing = threading.Lock()  # Keeps the thread from renewing a lease that was just released.

    def acquire(self) -> bool:
        """Acquire the lease and return true, or return false if another machine holds it."""
        fs = self._store._fs
        fs.makedirs(self._path.rpartition("/")[0], exist_ok=True)
        try:
            # Create the lease atomically, so that only one machine succeeds.
            if "file" in fs.protocol:  # fsspec checks and writes in two steps for local files.
                with Path(self._path).open("xb") as file:
                    file.write(self._content())
            else:
                fs.pipe_file(self._path, self._content(), mode="create")  # Atomic if the file system supports it.
        except FileExistsError:
            owner, until = self._holder()
            if until > time.time():
                return False
            # Another machine may do the same between this check and the write. Then both build the same artifact.
            if owner != self._owner and self._holder() == (owner, until):
                fs.pipe_file(self._path, self._content())
            if self._holder()[0] != self._owner:
                return False
        self._is_mine = True
        threading.Thread(target=self._renew, daemon=True, name="lease").start()
        return True

    def release(self) -> None:
        """Release the lease, so that other machines no longer wait for this one."""
        self._is_released.set()
        with self._writing, suppress(Exception):
            if self._is_mine and self._holder()[0] == self._owner:
                self._store._fs.rm_file(self._path)

    def _holder(self) -> tuple[str, float]:
        """Return owner and end of the lease. An unreadable one may be half-written and counts as held for a while."""
        try:
            content = json.loads(self._store._fs.cat_file(self._path))
            return str(content["owner"]), min(float(content["until"]), time.time() + 2 * self._store.lease_s)
        except FileNotFoundError:
            return "", 0.0
        except (ValueError, KeyError, TypeError):
            self._unreadable_since = self._unreadable_since or time.time()
            return "", self._unreadable_since + self._store.lease_s

    def _content(self) -> bytes:
        return json.dumps({"owner": self._owner, "until": time.time() + self._store.lease_s}).encode()

    def _renew(self) -> None:
        while not self._is_released.wait(self._store.lease_s / 4):
            with self._writing, suppress(Exception):
                if self._holder()[0] == self._owner and not self._is_released.is_set():
                    self._store._fs.pipe_file(self._path, self._content())


def require_shared(address: str, setting: str) -> None:
    """Raise InvalidInput if fsspec does not support ``address`` or the package for it is missing.

    ``setting`` is the setting that contains the address, for the error message.
    """
    import fsspec

    protocol = address.partition("://")[0] if "://" in address else ""
    try:
        if not protocol:
            raise ValueError("no protocol")
        fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise InvalidInput(
            setting,
            found=f"{address!r}: {error}",
            expected="an address that fsspec supports, such as s3://bucket/prefix",
            remedy=pip_command("mergegate[s3]") if protocol == "s3" else "correct it, or install the package for it",
        ) from None
