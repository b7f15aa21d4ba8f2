"""Publish to a bucket: read the state, take the next step, and repeat until the release is published.

``state`` decides the steps and their order; this module makes the requests. Every file is read once and hashed while it
is sent. The store compares the received bytes with the gated sha256. Before the pointer moves, mergegate compares the
checksums that the store reports once more.
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from threading import Lock
from typing import Any

from pydantic import ValidationError

from mergegate.merge_core.errors import Refused
from mergegate.tasks.publish.content import ReleaseFile
from mergegate.tasks.publish.targets.contract import OnProgress
from mergegate.tasks.publish.targets.s3.access import (
    PART_SIZE,
    S3Answer,
    S3Location,
    encoded_sha256,
    is_of_client,
    refusal,
)
from mergegate.tasks.publish.targets.s3.access import status_code as status_of_s3
from mergegate.tasks.publish.targets.s3.state import (
    LISTINGS,
    NOTHING_THERE,
    POINTER,
    Conflict,
    DesiredVersion,
    MovePointer,
    ObservedLocation,
    Pointer,
    SendFiles,
    UpToDate,
    VersionListing,
    step_to,
)

WHOLE_UP_TO = 5 << 30  # bytes; limit of S3 for a single request
_PART = 64 << 20
_MAX_PARTS = 10_000
_PARALLEL_FILES = 4
_IN_MEMORY = 8 << 20
_ROUNDS = 20
# Objects older than this that are missing from the pointer belong to an abandoned run.
_ABANDONED = timedelta(days=7)
_log = logging.getLogger(__name__)


def publish_s3(
    files: Sequence[ReleaseFile],
    location: S3Location,
    version: str,
    *,
    expected_head: str | None,
    on_progress: OnProgress,
    whole_up_to: int = WHOLE_UP_TO,
) -> bool:
    """Publish exactly ``files`` as ``version`` and point ``latest.json`` to it. Idempotent.

    Args:
        expected_head: Entity tag of the pointer when the release was compared. None: its value at the start.
        whole_up_to: Largest file that is sent in one request, in bytes. Larger files are sent in parts, for which the
            store has no sha256 of the whole object.

    Returns:
        Whether anything changed.

    Raises:
        Refused: The version exists with different content, the pointer has moved, a source file has changed since the
            gate, or the store rejects a request, does not answer, does not store the files, or ignores write guards.
        InvalidInput: Credentials are missing.
    """
    desired = DesiredVersion(version, {file.name: (file.size, file.sha256) for file in files})
    publication = _Publication(location, desired, {file.name: file for file in files}, on_progress, whole_up_to)
    changed, sent = False, False
    try:
        for _ in range(_ROUNDS):
            observed = publication.look()
            expected_head = observed.head if expected_head is None else expected_head
            match step_to(desired, observed, expected_head):
                case UpToDate():
                    if changed:
                        publication.sweep(observed.pointer)
                    return changed
                case Conflict(found, expected, remedy):
                    raise Refused(location.url, found=found, expected=expected, remedy=remedy)
                case SendFiles(names):
                    if sent:
                        raise _not_kept(location, names)
                    publication.send(names)
                    sent = True
                case MovePointer(pointer, head):
                    publication.move(pointer, head)
            changed = True
    except Exception as error:
        if is_of_client(error):
            raise refusal(location, error) from None
        raise
    raise Refused(
        location.url,
        found="every step is undone as soon as it is taken",
        expected="one publisher at a time",
        remedy="see who else writes there, then run again",
    )


def parse_pointer(location: S3Location, content: bytes) -> Pointer:
    """Parse ``latest.json``.

    Raises:
        Refused: The content is not a pointer.
    """
    try:
        return Pointer.model_validate_json(content)
    except ValidationError:
        raise Refused(
            f"{location.url}/{POINTER}",
            found="no pointer of a release",
            expected="what a publication has written",
            remedy="name another prefix, or see who wrote it",
        ) from None


def parts_of(size: int) -> int:
    """Return the size of each part in bytes. S3 limits the number of parts, and the last one may be shorter."""
    return max(_PART, -(-size // _MAX_PARTS))


@dataclass(frozen=True)
class _Publication:
    """The requests that one publication needs."""

    location: S3Location
    desired: DesiredVersion
    files: Mapping[str, ReleaseFile]
    on_progress: OnProgress
    whole_up_to: int
    # Composite checksums (sha256 over the sha256 of each part) of files that were read, by name and part size.
    _parts: dict[tuple[str, int], str] = field(default_factory=dict)

    @property
    def directory(self) -> str:
        return f"{self.desired.entry.path}/"

    @property
    def listing(self) -> str:
        return f"{LISTINGS}{self.desired.entry.path}.json"

    def look(self) -> ObservedLocation:
        """Read the present state of the location."""
        pointer = self.location.read(POINTER)
        names = {name.removeprefix(self.directory) for name, _, _ in self.location.objects(self.directory)}
        with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
            candidates = sorted(names & set(self.files))
            holds = list(pool.map(self.holds, candidates))
        listing = self.location.read(self.listing)
        return ObservedLocation(
            pointer=parse_pointer(self.location, pointer[0]) if pointer else None,
            head=pointer[1] if pointer else NOTHING_THERE,
            listed=listing is not None and listing[0] == self.listing_bytes(),
            held=frozenset(name for name, held in zip(candidates, holds, strict=True) if held),
            foreign=tuple(sorted(names - set(self.files))),
        )

    def listing_bytes(self) -> bytes:
        return VersionListing(files=dict(sorted(self.desired.files.items()))).model_dump_json(indent=1).encode()

    def holds(self, name: str) -> bool:
        """Return whether the store's checksum confirms that it has exactly this content."""
        file, answer = self.files[name], self.location.head(self.directory + name)
        if answer is None or answer.size != file.size:
            return False
        if answer.sha256 is not None:
            return answer.sha256 == file.sha256
        if answer.parts_sha256 is not None:
            checksum, part_size = answer.parts_sha256
            return checksum == self.parts_sha256(file, part_size)
        return streamed_sha256(self.location, self.directory + name) == file.sha256

    def parts_sha256(self, file: ReleaseFile, part_size: int) -> str:
        """Return the expected composite checksum of a file: of the bytes just sent, or else of the source."""
        if (file.name, part_size) not in self._parts:
            whole = hashlib.sha256()
            composite = hashlib.sha256()
            for data in _read(file, part_size):
                whole.update(data)
                composite.update(hashlib.sha256(data).digest())
            if whole.hexdigest() != file.sha256:
                raise file.altered(whole.hexdigest())
            self._parts[file.name, part_size] = encoded_sha256(composite.digest())
        return self._parts[file.name, part_size]

    def send(self, names: Sequence[str]) -> None:
        """Send the listing, then the files, several in parallel."""
        self.claim()
        done, total, lock = 0, sum(self.files[name].size for name in names), Lock()
        self.on_progress(done, total)

        def sent(count: int) -> None:
            nonlocal done
            with lock:
                done += count
                self.on_progress(done, total)

        with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
            uploads = [pool.submit(self.send_file, self.files[name], sent) for name in names]
            try:
                for upload in uploads:
                    upload.result()
            finally:
                for upload in uploads:
                    upload.cancel()

    def claim(self) -> None:
        """Write the listing, which marks work in progress, and verify that the store honors write guards.

        Raises:
            Refused: The store ignores ``If-None-Match`` and would not stop a second publisher.
        """
        options = {"Key": self.location.key(self.listing), "Body": self.listing_bytes()}
        checksum = encoded_sha256(hashlib.sha256(self.listing_bytes()).digest())
        options |= {"ChecksumAlgorithm": "SHA256", "ChecksumSHA256": checksum, "ContentType": "application/json"}
        self.location.ask("put_object", **options)
        try:
            self.location.ask("put_object", **options, IfNoneMatch="*")
        except Exception as error:
            if status_of_s3(error) in (409, 412):
                return
            raise
        raise Refused(
            self.location.url,
            found="the store writes over what is there, although it was told not to (If-None-Match)",
            expected="guarded writes, as S3 has them: without them two publishers overwrite each other unnoticed",
            remedy="use a newer version of the store, or publish elsewhere",
        )

    def send_file(self, file: ReleaseFile, sent: Callable[[int], None]) -> None:
        """Send one object, and compare it with the gated file while it is read.

        Raises:
            Refused: The source file has changed since the gate.
        """
        if file.size > self.whole_up_to:
            self.send_in_parts(file, sent)
            return
        key = self.location.key(self.directory + file.name)
        options = {"ChecksumAlgorithm": "SHA256", "ChecksumSHA256": encoded_sha256(bytes.fromhex(file.sha256))}
        if isinstance(file.source, bytes) or file.size <= _IN_MEMORY:
            data = file.read() if isinstance(file.source, bytes) or file.source.is_file() else b""
            actual = hashlib.sha256(data).hexdigest()
            if actual != file.sha256:
                raise file.altered(actual)
            self.location.ask("put_object", Key=key, Body=data, **options)
        else:
            self.send_open(file, file.source, key, options)
        sent(file.size)

    def send_open(self, file: ReleaseFile, source: Path, key: str, options: Mapping[str, Any]) -> None:
        try:
            with _HashedFile(source) as body:
                try:
                    self.location.ask("put_object", Key=key, Body=body, **options)
                finally:
                    actual = body.sha256()
        except FileNotFoundError:
            raise file.altered("of nothing: it is not there") from None
        except Exception as error:
            if is_of_client(error) and actual is not None and actual != file.sha256:
                raise file.altered(actual) from None  # the store has noticed, too
            raise
        if actual is not None and actual != file.sha256:
            raise file.altered(actual)

    def send_in_parts(self, file: ReleaseFile, sent: Callable[[int], None]) -> None:
        """Send a large file in parts with a sha256 each. The object is created only if the whole file matches."""
        part_size, key = parts_of(file.size), self.location.key(self.directory + file.name)
        started = self.location.ask(
            "create_multipart_upload", Key=key, ChecksumAlgorithm="SHA256", Metadata={PART_SIZE: str(part_size)}
        )
        upload = {"Key": key, "UploadId": started["UploadId"]}
        try:
            whole, composite, parts = hashlib.sha256(), hashlib.sha256(), []
            for number, data in enumerate(_read(file, part_size), 1):
                whole.update(data)
                digest = hashlib.sha256(data).digest()
                composite.update(digest)
                checksum = encoded_sha256(digest)
                options = {"ChecksumAlgorithm": "SHA256", "ChecksumSHA256": checksum}
                answer = self.location.ask("upload_part", **upload, PartNumber=number, Body=data, **options)
                parts.append({"PartNumber": number, "ETag": answer["ETag"], "ChecksumSHA256": checksum})
                sent(len(data))
            if whole.hexdigest() != file.sha256:
                raise file.altered(whole.hexdigest())
            self._parts[file.name, part_size] = encoded_sha256(composite.digest())
            self.complete(upload, parts)
        except BaseException:
            # Report the original error. If the upload cannot be aborted, the bucket's lifecycle rule removes it.
            with suppress(Exception):
                self.location.ask("abort_multipart_upload", **upload)
            raise

    def complete(self, upload: Mapping[str, str], parts: Sequence[Mapping[str, Any]]) -> None:
        """Combine the parts into an object. After a lost answer, a retry finds that the upload no longer exists."""
        try:
            self.location.ask("complete_multipart_upload", **upload, MultipartUpload={"Parts": parts})
        except Exception as error:
            if status_of_s3(error) != 404:
                raise  # 404: the upload may have been completed; the next read of the state tells

    def move(self, pointer: Pointer, head: str) -> None:
        """Write the pointer unless it has changed. If another publisher was faster, the next read shows it."""
        guard = {"IfNoneMatch": "*"} if head == NOTHING_THERE else {"IfMatch": head}
        content = pointer.model_dump_json(indent=1).encode()
        try:
            self.location.ask(
                "put_object", Key=self.location.key(POINTER), Body=content, ContentType="application/json", **guard
            )
        except Exception as error:
            # 404: the pointer has been removed in the meantime.
            if status_of_s3(error) not in (404, 409, 412):
                raise

    def sweep(self, pointer: Pointer | None) -> None:
        """Remove leftovers of runs that were interrupted long ago. Failures are only logged: the release is done."""
        try:
            named = {item.path for item in pointer.versions} if pointer else set()
            since = self.location.now() - _ABANDONED
            for name, _, modified in list(self.location.objects(LISTINGS)):
                path = name.removeprefix(LISTINGS).removesuffix(".json")
                if path in named or modified > since:
                    continue
                objects = list(self.location.objects(f"{path}/"))
                if any(time > since for _, _, time in objects):
                    continue
                _log.info("%s/%s: removed, of a publication that was cut off", self.location.url, path)
                for leftover in (*(item for item, _, _ in objects), name):
                    self.location.ask("delete_object", Key=self.location.key(leftover))
            for item in self.location.ask("list_multipart_uploads", Prefix=self.location.key("")).get("Uploads", ()):
                if item["Initiated"] < since:
                    self.location.ask("abort_multipart_upload", Key=item["Key"], UploadId=item["UploadId"])
        except Exception as error:
            if not is_of_client(error):
                raise
            _log.warning(
                "%s: leftovers were not looked for: %s", self.location.url, refusal(self.location, error).found
            )


class _HashedFile(io.RawIOBase):
    """A file that is hashed as it is read from the start. Seeking to the start resets the hash."""

    def __init__(self, path: Path) -> None:
        self._file, self._hash = path.open("rb"), hashlib.sha256()
        self._size = path.stat().st_size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, count: int | None = -1) -> bytes:
        data = self._file.read(-1 if count is None else count)
        self._hash.update(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        if (offset, whence) == (0, 0):
            self._hash = hashlib.sha256()
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def sha256(self) -> str | None:
        """Return the sha256 of the file, or None if it was not read to the end."""
        return self._hash.hexdigest() if self._file.tell() == self._size else None

    def close(self) -> None:
        self._file.close()
        super().close()


def streamed_sha256(location: S3Location, name: str) -> str:
    """Download an object and return its sha256."""
    digest = hashlib.sha256()
    for chunk in location.stream(name).iter_chunks(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def stored_sha256(location: S3Location, name: str, answer: S3Answer) -> str:
    """Return the sha256 of an object: the store's own checksum if it has one, or else by downloading the object."""
    return answer.sha256 if answer.sha256 is not None else streamed_sha256(location, name)


def _read(file: ReleaseFile, part_size: int) -> Iterator[bytes]:
    if isinstance(file.source, bytes):
        yield from (file.source[start : start + part_size] for start in range(0, len(file.source), part_size))
        return
    try:
        with file.source.open("rb") as source:
            while data := source.read(part_size):
                yield data
    except FileNotFoundError:
        raise file.altered("of nothing: it is not there") from None


def _not_kept(location: S3Location, names: Sequence[str]) -> Refused:
    return Refused(
        location.url,
        found=f"what the store holds afterwards is not what was sent ({', '.join(names) or LISTINGS})",
        expected="the bytes that were evaluated and gated",
        remedy="run again; the pointer was not moved",
    )
