"""A store behind the local one, that machines share which come and go: any address that fsspec knows.

::

    <address>/<stage>/<key>/<sha256>        a file of an artifact, under its own hash
    <address>/<stage>/<key>.manifest        the artifact's manifest, written last: without it nothing is there
    <address>/<stage>/<key>.json            a stage's value, with its digests
    <address>/<stage>/<key>.lease           somebody is making it, until when

Read through: what is not here is asked for there, compared file by file with its manifest, and only then has its name
in the local store, which looks at it once more. Write behind: what was made here is sent when it is complete, in the
background; what is not sent when a process ends by force is sent by the next one (a note lies in the local store).

It is only a cache. Whatever goes wrong with it is a warning and a miss, and it is left alone for a minute. So a lease
that cannot be had, has expired or was written twice costs computing time and nothing else.
"""

from __future__ import annotations

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

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import regular_files, state_directory
from mergegate.tasks.store.manifest import MANIFEST, ArtifactManifest
from mergegate.tasks.store.transfer import ContentMismatch, receive_directory

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

OUTBOX = ".outbox"  # in the local store: notes of what is still to be sent
_SUFFIX = ".manifest"
_MOST_MANIFEST = 64 << 20
_LEAVE_ALONE_S = 60.0
# Longer than a pause of any machine that is still alive; so long another one waits for one that is not.
LEASE_S = 120.0
_LOOK_AGAIN_S = (0.2, 5.0)
log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class SharedStore:
    """What is shared at ``address``, as one local store sees it.

    Args:
        address: Of fsspec: ``s3://bucket/prefix``, ``file:///mnt/shared``, …
        root: The local store.
        most_bytes: Artifacts that are larger stay where they were made.
        unleased: Stages that nobody waits for: their artifacts may be too large to be shared at all.
    """

    address: str
    root: Path
    most_bytes: int
    unleased: frozenset[str] = frozenset()
    lease_s: float = LEASE_S
    _left_alone_until: float = 0.0
    _queued: dict[tuple[str, str], _Lease | None] = field(default_factory=dict)
    _sender: ThreadPoolExecutor | None = None
    arrived: Counter[str] = field(default_factory=Counter)  # how many artifacts and values of each stage

    def fetch(self, stage: str, key: str, final: Path) -> dict[Path, str]:
        """Bring an artifact to ``final``, where nothing is. Call it with the lock of the key held.

        Returns:
            sha256 of every file that has arrived; empty where nothing has.
        """
        found = self._unless_down(lambda: self._fetch(stage, key, final), f"{stage} {key[:12]} was not fetched")
        self.arrived[stage] += bool(found)
        return found or {}

    def discard(self, stage: str, key: str) -> None:
        """What has arrived is whole and cannot be believed all the same: what is made now takes its place."""
        marker = self._path(stage, f"{key[:32]}{_SUFFIX}")
        self._unless_down(lambda: self._fs.rm_file(marker), f"{stage} {key[:12]} was not removed")

    def fetch_value(self, stage: str, key: str) -> bytes | None:
        """What lies there as the value of a stage; None where nothing does. It is the caller's to be compared."""
        path = self._path(stage, f"{key[:32]}.json")
        found = self._unless_down(lambda: self._content(path), f"{stage} {key[:12]} was not fetched")
        self.arrived[stage] += found is not None
        return found

    def listed(self, stage: str, prefix: str) -> tuple[str, ...]:
        """First 32 digits of the keys of all artifacts of a stage that begin with ``prefix``."""

        def look() -> tuple[str, ...]:
            found = self._fs.glob(f"{self._path(stage, prefix)}*{_SUFFIX}")
            return tuple(sorted(str(one).rpartition("/")[2].removesuffix(_SUFFIX) for one in found))

        return self._unless_down(look, f"{stage} was not listed") or ()

    @contextmanager
    def turn(self, stage: str, key: str, arrive: Callable[[], bool], on_wait: Callable[[], None]) -> Iterator[bool]:
        """Whether it has arrived, now or when somebody else had made it; else it is ours to be made inside the block.

        Args:
            arrive: Fetches it, if it is there.
            on_wait: Called once if somebody else is making it.
        """
        self.send_what_was_left()
        if arrive():
            yield True
            return
        if stage in self.unleased:
            yield False
            return
        lease = _Lease(self, self._path(stage, f"{key[:32]}.lease"))
        pause, told = _LOOK_AGAIN_S[0], False
        while not lease.taken():
            if not told:
                on_wait()
                told = True
            time.sleep(pause)
            pause = min(2 * pause, _LOOK_AGAIN_S[1])
            if arrive():
                yield True
                return
        try:
            if arrive():  # by somebody who was done just before
                yield True
                return
            self._queued[stage, key] = lease
            yield False
        finally:
            if self._queued.pop((stage, key), None) is not None:  # nothing was offered: it failed
                lease.give_back()

    def offer(self, stage: str, key: str, place: Path) -> None:
        """Send what was made, in the background: the directory of an artifact, or the file of a value."""
        lease = self._queued.pop((stage, key), None)
        try:
            if self._size(place) > self.most_bytes:
                log.info("%s %s is not shared: it is larger than what is", stage, key[:12])
                if lease:
                    lease.give_back()
                return
            note = state_directory(self.root / OUTBOX) / f"{stage}-{place.name}"
            note.write_bytes(b"")
        except OSError as error:
            log.warning("%s %s is not shared: %s", stage, key[:12], error)
            if lease:
                lease.give_back()
            return
        self._send_later(stage, place, note, lease)

    def send_what_was_left(self) -> None:
        """Once a process: what an earlier one had no time to send."""
        if self._sender is not None:
            return
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="sharing")  # waited for when the process ends
        with suppress(FileNotFoundError):
            for note in sorted((self.root / OUTBOX).iterdir()):
                stage, _, name = note.name.rpartition("-")
                self._send_later(stage, self.root / stage / name, note, None)

    def settle(self) -> None:
        """Wait until everything that was offered is sent, or could not be."""
        if self._sender is not None:
            self._sender.submit(lambda: None).result()

    def _send_later(self, stage: str, place: Path, note: Path, lease: _Lease | None) -> None:
        def send() -> None:
            try:
                sent = self._unless_down(lambda: self._send(stage, place), f"{stage} {place.name[:12]} was not sent")
                if sent:
                    note.unlink(missing_ok=True)
            finally:
                if lease:
                    lease.give_back()

        if self._sender is None:
            self._sender = ThreadPoolExecutor(1, thread_name_prefix="sharing")
        self._sender.submit(send)

    def _send(self, stage: str, place: Path) -> bool:
        """Files first, the manifest last: whoever finds it finds them."""
        if place.suffix == ".json":
            with suppress(FileNotFoundError):  # gone meanwhile: nobody needs it
                self._write(self._path(stage, place.name), place.read_bytes())
            return True
        marker = self._path(stage, f"{place.name}{_SUFFIX}")
        try:
            content = (place / MANIFEST).read_bytes()
            manifest = ArtifactManifest.model_validate_json(content)
        except (OSError, ValueError):
            return True  # gone or altered meanwhile
        if self._fs.exists(marker):
            return True
        for name, entry in manifest.files.items():
            path = self._path(stage, place.name, entry.sha256)
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.put_file(str(place / name), path)
        self._write(marker, content)
        return True

    def _fetch(self, stage: str, key: str, final: Path) -> dict[Path, str] | None:
        marker = self._path(stage, f"{key[:32]}{_SUFFIX}")
        content = self._content(marker)
        if content is None:
            return None
        try:
            manifest = ArtifactManifest.model_validate_json(content)
        except ValueError:
            return None  # being written, on a file system that shows that; or garbage
        if manifest.key != key and manifest.key[:32] != key:
            return None

        def get(name: str, place: Path) -> None:
            if name == MANIFEST:
                place.write_bytes(content)
            else:
                self._fs.get_file(self._path(stage, key[:32], manifest.files[name].sha256), str(place))

        try:
            return receive_directory(final, _files_of(manifest, content), get)
        except (ContentMismatch, FileNotFoundError) as damage:
            log.warning("%s: %s %s is damaged (%s); it is made again", self.address, stage, key[:12], damage)
            with suppress(Exception):
                self._fs.rm_file(marker)  # so that what is made now takes its place
            return None

    def _content(self, path: str) -> bytes | None:
        try:
            if self._fs.size(path) > _MOST_MANIFEST:
                return None
            content: bytes = self._fs.cat_file(path)
        except FileNotFoundError:
            return None
        return content

    def _write(self, path: str, content: bytes) -> None:
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(path, content)

    def _path(self, *parts: str) -> str:
        return "/".join((self._base, *parts))

    @property
    def _fs(self) -> AbstractFileSystem:
        return self._connected[0]

    @property
    def _base(self) -> str:
        return self._connected[1]

    @cached_property
    def _connected(self) -> tuple[Any, str]:
        import fsspec

        options: dict[str, Any] = {"use_listings_cache": False}
        if self.address.startswith("s3"):
            options["config_kwargs"] = {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 3}}
        fs, base = fsspec.core.url_to_fs(self.address, **options)
        return fs, str(base).rstrip("/")

    def _unless_down(self, ask: Callable[[], T], failed: str) -> T | None:
        """What ``ask`` returns; None where the shared store cannot be asked, with a warning, or could not just now."""
        if time.monotonic() < self._left_alone_until:
            return None
        try:
            return ask()
        except Exception as error:  # every file system of fsspec has errors of its own
            words = " ".join(str(error).split())[:200] or type(error).__name__
            log.warning("the shared store %s: %s: %s; going on without it", self.address, failed, words)
            self._left_alone_until = time.monotonic() + _LEAVE_ALONE_S
            return None

    def _size(self, place: Path) -> int:
        if place.is_dir():
            return sum((place / name).stat().st_size for name in regular_files(place)[0])
        return place.stat().st_size


class _Lease:
    """An object that says who makes something, and until when; renewed by a thread as long as it is held."""

    def __init__(self, store: SharedStore, path: str) -> None:
        self._store, self._path = store, path
        self._owner = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex}"
        self._done, self._mine = threading.Event(), False
        self._unreadable_since = 0.0
        self._writing = threading.Lock()  # or what was given back would be renewed

    def taken(self) -> bool:
        """Take it, if nobody else has it. Where it cannot be asked for, it counts as taken: we go on alone."""
        taken = self._store._unless_down(self._take, "a lease could not be had")
        if taken is False:
            return False
        if taken:
            self._mine = True
            threading.Thread(target=self._renew, daemon=True, name="lease").start()
        return True

    def give_back(self) -> None:
        """Nobody waits for us any more."""
        self._done.set()
        with self._writing, suppress(Exception):
            if self._mine and self._holder()[0] == self._owner:
                self._store._fs.rm_file(self._path)

    def _take(self) -> bool:
        fs = self._store._fs
        fs.makedirs(self._path.rpartition("/")[0], exist_ok=True)
        try:
            self._create(fs)
            return True
        except FileExistsError:
            owner, until = self._holder()
            if until > time.time():
                return False
        # Between this look and the write another may do the same: then both make it, and end alike.
        if owner != self._owner and self._holder() == (owner, until):
            fs.pipe_file(self._path, self._content())
        return self._holder()[0] == self._owner

    def _create(self, fs: AbstractFileSystem) -> None:
        """Write it where nothing is, at once: of two that try only one does. Raises FileExistsError."""
        if "file" in fs.protocol:  # fsspec looks first and writes then, there
            with Path(self._path).open("xb") as file:
                file.write(self._content())
        else:
            fs.pipe_file(self._path, self._content(), mode="create")  # guarded, where the file system has that

    def _holder(self) -> tuple[str, float]:
        """Who has it, and until when. One that says nothing is being written, or garbage: it is waited for as well."""
        try:
            said = json.loads(self._store._fs.cat_file(self._path))
            return str(said["owner"]), min(float(said["until"]), time.time() + 2 * self._store.lease_s)
        except FileNotFoundError:
            return "", 0.0
        except (ValueError, KeyError, TypeError):
            self._unreadable_since = self._unreadable_since or time.time()
            return "", self._unreadable_since + self._store.lease_s

    def _content(self) -> bytes:
        return json.dumps({"owner": self._owner, "until": time.time() + self._store.lease_s}).encode()

    def _renew(self) -> None:
        while not self._done.wait(self._store.lease_s / 4):
            with self._writing, suppress(Exception):
                if self._holder()[0] == self._owner and not self._done.is_set():
                    self._store._fs.pipe_file(self._path, self._content())


def require_shared(address: str, where: str) -> None:
    """See that an address can be used: fsspec knows it, and what it needs is installed.

    Raises:
        InvalidInput: when it cannot.
    """
    import fsspec

    protocol = address.partition("://")[0] if "://" in address else ""
    try:
        if not protocol:
            raise ValueError("no protocol")
        fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise InvalidInput(
            where,
            found=f"{address!r}: {error}",
            expected="an address of fsspec, such as s3://bucket/prefix",
            remedy="install mergegate[s3]" if protocol == "s3" else "correct it, or install what it needs",
        ) from None


def _files_of(manifest: ArtifactManifest, content: bytes) -> dict[str, tuple[int, str]]:
    import hashlib

    own = {MANIFEST: (len(content), hashlib.sha256(content).hexdigest())}
    return {**{name: (entry.size, entry.sha256) for name, entry in manifest.files.items()}, **own}
