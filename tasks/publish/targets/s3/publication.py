"""Publishing to a bucket: look, take the next step, look again, until the release stands there.

What the next step is, and why in that order, stands in ``state``; here is only the talking. Every file is read once: it
is hashed while it is sent, the store compares what arrives with the sha256 that was gated, and what the store says it
holds is compared once more before the pointer moves.
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
    S3Place,
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
    ObservedPlace,
    Pointer,
    SendFiles,
    UpToDate,
    VersionListing,
    step_to,
)

WHOLE_UP_TO = 5 << 30  # bytes: S3 takes no more in one request
_PART = 64 << 20
_MOST_PARTS = 10_000
_SIDE_BY_SIDE = 4  # files
_IN_MEMORY = 8 << 20
_ROUNDS = 20
# What no pointer names and has not been touched for so long belongs to a run that will not go on.
_ABANDONED = timedelta(days=7)
_log = logging.getLogger(__name__)


def publish_s3(
    files: Sequence[ReleaseFile],
    place: S3Place,
    version: str,
    *,
    expected_head: str | None,
    on_progress: OnProgress,
    whole_up_to: int = WHOLE_UP_TO,
) -> bool:
    """Make ``place`` hold exactly ``files`` as ``version``, and its pointer name it. Idempotent.

    Args:
        expected_head: Of the pointer that the release was compared with; None: what it is when we begin.
        whole_up_to: Bytes; larger files go in parts, of which the store keeps no sha256 of the whole.

    Returns:
        Whether anything was changed.

    Raises:
        Refused: when the version exists with other content, the pointer was moved meanwhile, a source is not what was
            gated, the store says no, does not answer, does not keep what was sent, or does not guard its writes.
        InvalidInput: when there are no credentials.
    """
    desired = DesiredVersion(version, {file.name: (file.size, file.sha256) for file in files})
    sending = _Publication(place, desired, {file.name: file for file in files}, on_progress, whole_up_to)
    changed, sent = False, False
    try:
        for _ in range(_ROUNDS):
            observed = sending.look()
            expected_head = observed.head if expected_head is None else expected_head
            match step_to(desired, observed, expected_head):
                case UpToDate():
                    if changed:
                        sending.sweep(observed.pointer)
                    return changed
                case Conflict(found, expected, remedy):
                    raise Refused(place.url, found=found, expected=expected, remedy=remedy)
                case SendFiles(names):
                    if sent:
                        raise _not_kept(place, names)
                    sending.send(names)
                    sent = True
                case MovePointer(pointer, head):
                    sending.move(pointer, head)
            changed = True
    except Exception as error:
        if is_of_client(error):
            raise refusal(place, error) from None
        raise
    raise Refused(
        place.url,
        found="every step is undone as soon as it is taken",
        expected="one publisher at a time",
        remedy="see who else writes there, then run again",
    )


def parse_pointer(place: S3Place, content: bytes) -> Pointer:
    """The pointer as it stands there.

    Raises:
        Refused: when it is none.
    """
    try:
        return Pointer.model_validate_json(content)
    except ValidationError:
        raise Refused(
            f"{place.url}/{POINTER}",
            found="no pointer of a release",
            expected="what a publication has written",
            remedy="name another prefix, or see who wrote it",
        ) from None


def parts_of(size: int) -> int:
    """Bytes of each part, so that there are not more of them than S3 takes; the last may be shorter."""
    return max(_PART, -(-size // _MOST_PARTS))


@dataclass(frozen=True)
class _Publication:
    """A place in a bucket, seen through the few calls that a publication makes."""

    place: S3Place
    desired: DesiredVersion
    files: Mapping[str, ReleaseFile]
    on_progress: OnProgress
    whole_up_to: int
    # Of files that were read here: sha256 over the sha256 of each part of a size.
    _parts: dict[tuple[str, int], str] = field(default_factory=dict)

    @property
    def directory(self) -> str:
        return f"{self.desired.entry.path}/"

    @property
    def listing(self) -> str:
        return f"{LISTINGS}{self.desired.entry.path}.json"

    def look(self) -> ObservedPlace:
        """The place as it is now."""
        there = self.place.read(POINTER)
        names = {name.removeprefix(self.directory) for name, _, _ in self.place.objects(self.directory)}
        with ThreadPoolExecutor(_SIDE_BY_SIDE) as side_by_side:
            wanted = sorted(names & set(self.files))
            holds = list(side_by_side.map(self.holds, wanted))
        listing = self.place.read(self.listing)
        return ObservedPlace(
            pointer=parse_pointer(self.place, there[0]) if there else None,
            head=there[1] if there else NOTHING_THERE,
            listed=listing is not None and listing[0] == self.listing_bytes(),
            held=frozenset(name for name, held in zip(wanted, holds, strict=True) if held),
            foreign=tuple(sorted(names - set(self.files))),
        )

    def listing_bytes(self) -> bytes:
        return VersionListing(files=dict(sorted(self.desired.files.items()))).model_dump_json(indent=1).encode()

    def holds(self, name: str) -> bool:
        """Whether the store's own checksum says that it holds these very bytes."""
        file, there = self.files[name], self.place.head(self.directory + name)
        if there is None or there.size != file.size:
            return False
        if there.sha256 is not None:
            return there.sha256 == file.sha256
        if there.parts_sha256 is not None:
            checksum, part = there.parts_sha256
            return checksum == self.parts_sha256(file, part)
        return streamed_sha256(self.place, self.directory + name) == file.sha256

    def parts_sha256(self, file: ReleaseFile, part: int) -> str:
        """What the store should say of a file that came in parts: of what was sent just now, else of what is gated."""
        if (file.name, part) not in self._parts:
            whole = hashlib.sha256()
            over = hashlib.sha256()
            for data in _read(file, part):
                whole.update(data)
                over.update(hashlib.sha256(data).digest())
            if whole.hexdigest() != file.sha256:
                raise file.altered(whole.hexdigest())
            self._parts[file.name, part] = encoded_sha256(over.digest())
        return self._parts[file.name, part]

    def send(self, names: Sequence[str]) -> None:
        """The listing, then files, several side by side."""
        self.claim()
        done, total, lock = 0, sum(self.files[name].size for name in names), Lock()
        self.on_progress(done, total)

        def sent(count: int) -> None:
            nonlocal done
            with lock:
                done += count
                self.on_progress(done, total)

        with ThreadPoolExecutor(_SIDE_BY_SIDE) as side_by_side:
            waiting = [side_by_side.submit(self.send_file, self.files[name], sent) for name in names]
            try:
                for one in waiting:
                    one.result()
            finally:
                for one in waiting:
                    one.cancel()

    def claim(self) -> None:
        """Write the listing, which says that somebody is at work here; and see that the store guards what is written.

        Raises:
            Refused: when it writes over an object that was to be new: then nobody would notice a second publisher.
        """
        options = {"Key": self.place.key(self.listing), "Body": self.listing_bytes()}
        checksum = encoded_sha256(hashlib.sha256(self.listing_bytes()).digest())
        options |= {"ChecksumAlgorithm": "SHA256", "ChecksumSHA256": checksum, "ContentType": "application/json"}
        self.place.ask("put_object", **options)
        try:
            self.place.ask("put_object", **options, IfNoneMatch="*")
        except Exception as error:
            if status_of_s3(error) in (409, 412):
                return
            raise
        raise Refused(
            self.place.url,
            found="the store writes over what is there, although it was told not to (If-None-Match)",
            expected="guarded writes, as S3 has them: without them two publishers overwrite each other unnoticed",
            remedy="use a newer version of the store, or publish elsewhere",
        )

    def send_file(self, file: ReleaseFile, sent: Callable[[int], None]) -> None:
        """One object; compared with what was gated as it is read.

        Raises:
            Refused: when the source is not what was gated.
        """
        if file.size > self.whole_up_to:
            self.send_in_parts(file, sent)
            return
        key = self.place.key(self.directory + file.name)
        options = {"ChecksumAlgorithm": "SHA256", "ChecksumSHA256": encoded_sha256(bytes.fromhex(file.sha256))}
        if isinstance(file.source, bytes) or file.size <= _IN_MEMORY:
            data = file.read() if isinstance(file.source, bytes) or file.source.is_file() else b""
            found = hashlib.sha256(data).hexdigest()
            if found != file.sha256:
                raise file.altered(found)
            self.place.ask("put_object", Key=key, Body=data, **options)
        else:
            self.send_open(file, file.source, key, options)
        sent(file.size)

    def send_open(self, file: ReleaseFile, source: Path, key: str, options: Mapping[str, Any]) -> None:
        try:
            with _HashedFile(source) as body:
                try:
                    self.place.ask("put_object", Key=key, Body=body, **options)
                finally:
                    found = body.sha256()
        except FileNotFoundError:
            raise file.altered("of nothing: it is not there") from None
        except Exception as error:
            if is_of_client(error) and found is not None and found != file.sha256:
                raise file.altered(found) from None  # the store has noticed, too
            raise
        if found is not None and found != file.sha256:
            raise file.altered(found)

    def send_in_parts(self, file: ReleaseFile, sent: Callable[[int], None]) -> None:
        """A large file, each part with its own sha256; it becomes an object only when all of it is what was gated."""
        part, key = parts_of(file.size), self.place.key(self.directory + file.name)
        begun = self.place.ask(
            "create_multipart_upload", Key=key, ChecksumAlgorithm="SHA256", Metadata={PART_SIZE: str(part)}
        )
        upload = {"Key": key, "UploadId": begun["UploadId"]}
        try:
            whole, over, parts = hashlib.sha256(), hashlib.sha256(), []
            for number, data in enumerate(_read(file, part), 1):
                whole.update(data)
                digest = hashlib.sha256(data).digest()
                over.update(digest)
                checksum = encoded_sha256(digest)
                options = {"ChecksumAlgorithm": "SHA256", "ChecksumSHA256": checksum}
                answer = self.place.ask("upload_part", **upload, PartNumber=number, Body=data, **options)
                parts.append({"PartNumber": number, "ETag": answer["ETag"], "ChecksumSHA256": checksum})
                sent(len(data))
            if whole.hexdigest() != file.sha256:
                raise file.altered(whole.hexdigest())
            self._parts[file.name, part] = encoded_sha256(over.digest())
            self.complete(upload, parts)
        except BaseException:
            with suppress(
                Exception
            ):  # What went wrong first is what is said; the bucket's lifecycle rule has the rest.
                self.place.ask("abort_multipart_upload", **upload)
            raise

    def complete(self, upload: Mapping[str, str], parts: Sequence[Mapping[str, Any]]) -> None:
        """Make the parts an object. Asked again after a lost answer, the store no longer knows the upload."""
        try:
            self.place.ask("complete_multipart_upload", **upload, MultipartUpload={"Parts": parts})
        except Exception as error:
            if status_of_s3(error) != 404:
                raise  # 404: it has happened, or it has not; the next look will tell

    def move(self, pointer: Pointer, head: str) -> None:
        """Write the pointer if it is as it was; whoever was overtaken sees it when looking again."""
        guard = {"IfNoneMatch": "*"} if head == NOTHING_THERE else {"IfMatch": head}
        content = pointer.model_dump_json(indent=1).encode()
        try:
            self.place.ask(
                "put_object", Key=self.place.key(POINTER), Body=content, ContentType="application/json", **guard
            )
        except Exception as error:
            # 404: it was there, and has been removed meanwhile.
            if status_of_s3(error) not in (404, 409, 412):
                raise

    def sweep(self, pointer: Pointer | None) -> None:
        """Remove what runs have left that were cut off long ago. Never a reason to fail: the release stands."""
        try:
            named = {one.path for one in pointer.versions} if pointer else set()
            since = self.place.now() - _ABANDONED
            for name, _, touched in list(self.place.objects(LISTINGS)):
                path = name.removeprefix(LISTINGS).removesuffix(".json")
                if path in named or touched > since:
                    continue
                below = list(self.place.objects(f"{path}/"))
                if any(time > since for _, _, time in below):
                    continue
                _log.info("%s/%s: removed, of a publication that was cut off", self.place.url, path)
                for left in (*(one for one, _, _ in below), name):
                    self.place.ask("delete_object", Key=self.place.key(left))
            for one in self.place.ask("list_multipart_uploads", Prefix=self.place.key("")).get("Uploads", ()):
                if one["Initiated"] < since:
                    self.place.ask("abort_multipart_upload", Key=one["Key"], UploadId=one["UploadId"])
        except Exception as error:
            if not is_of_client(error):
                raise
            _log.warning("%s: leftovers were not looked for: %s", self.place.url, refusal(self.place, error).found)


class _HashedFile(io.RawIOBase):
    """A file that is hashed as it is read from its beginning; reading it anew begins anew."""

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
        """Of the whole file; None where it was not read to its end."""
        return self._hash.hexdigest() if self._file.tell() == self._size else None

    def close(self) -> None:
        self._file.close()
        super().close()


def streamed_sha256(place: S3Place, name: str) -> str:
    """sha256 of an object, every byte of it read."""
    running = hashlib.sha256()
    for chunk in place.stream(name).iter_chunks(1 << 20):
        running.update(chunk)
    return running.hexdigest()


def sha256_there(place: S3Place, name: str, there: S3Answer) -> str:
    """What the store holds: by its own checksum of the whole object, else by reading all of it."""
    return there.sha256 if there.sha256 is not None else streamed_sha256(place, name)


def _read(file: ReleaseFile, part: int) -> Iterator[bytes]:
    if isinstance(file.source, bytes):
        yield from (file.source[start : start + part] for start in range(0, len(file.source), part))
        return
    try:
        with file.source.open("rb") as source:
            while data := source.read(part):
                yield data
    except FileNotFoundError:
        raise file.altered("of nothing: it is not there") from None


def _not_kept(place: S3Place, names: Sequence[str]) -> Refused:
    return Refused(
        place.url,
        found=f"what the store holds afterwards is not what was sent ({', '.join(names) or LISTINGS})",
        expected="the bytes that were evaluated and gated",
        remedy="run again; the pointer was not moved",
    )
