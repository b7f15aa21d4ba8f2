"""Define the S3 target, and publish to a bucket: decide the next step, send the files, and remove leftovers.

::

    prefix/latest.json                     the pointer: the current version, and every version with its content hash
    prefix/3f9a0c71b2de/…                  the files of a version, under their own names
    prefix/v2-3f9a0c71b2de/…               the files of a version that has a name
    prefix/.listings/3f9a0c71b2de.json     size and sha256 of every file of a version
    prefix/production.json                 an alias: the version that it points to, in the pointer's format

A version is released once the pointer names it. The state is read again after each step, so a lost answer, a kill or a
second publisher just leads to another state. The order of the steps guarantees:

* The path of a version ends in a hash of its files. So two publishers never write different bytes to one object, and
  the next run completes the work of an interrupted run.
* The pointer moves in one write, after the store's own checksums have confirmed every object. The store rejects the
  write if the pointer is not the one for which it was decided.
* A version that the pointer has named keeps its content.

Every file is read once. The store compares the received bytes with the gated sha256. Before the pointer moves,
mergegate checks the checksums that the store reports once more.

Large files are sent in parts without boto3's multipart upload. That upload would complete an object before the sha256
of the whole file is compared, and over TLS it sends the checksum of a part after the body (``aws-chunked``), which some
compatible stores reject.

Verification downloads only objects that were uploaded in parts, because the store has no sha256 of them.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mergegate.merge_core.errors import InvalidInput, MergegateError, Refused, suggest
from mergegate.tasks.base.store import merkle
from mergegate.tasks.release.publish.content import (
    MAX_METADATA_BYTES,
    VERSION_DIGITS,
    ReleaseFile,
    file_identities,
    is_content_version,
    sha256_of,
)
from mergegate.tasks.release.publish.targets.contract import (
    ALIAS_NAME,
    FIRST,
    CurrentRelease,
    PublishRequest,
    PublishTarget,
    Release,
)
from mergegate.tasks.release.publish.targets.download import download_release
from mergegate.tasks.release.publish.targets.reconcile import Publication, PublicationBlocked, overtaken, version_taken
from mergegate.tasks.release.publish.targets.s3_access import (
    PART_SIZE,
    S3_URL,
    S3Location,
    encoded_sha256,
    require_boto3,
    s3_location,
)

POINTER = "latest.json"
LISTINGS = ".listings/"
NO_POINTER = ""  # head of a location without a pointer
MAX_SINGLE_REQUEST = 5 << 30  # bytes; limit of S3
_PART = 64 << 20
_MAX_PARTS = 10_000
_PARALLEL_FILES = 4
_IN_MEMORY = 8 << 20
# Objects older than this that are missing from the pointer belong to an abandoned run.
_ABANDONED = timedelta(days=7)
_log = logging.getLogger(__name__)
_ALIAS_ROUNDS = 5
_NAME = re.compile(r"(?P<url>s3://[^@\s]+)(?:@(?P<version>[^@\s]+))?")


class ReleasedVersion(BaseModel):
    """One version in the pointer. ``digest`` covers name, size and sha256 of each of its files."""

    model_config = ConfigDict(strict=True, frozen=True)

    version: str
    path: str
    digest: str = Field(pattern="^[0-9a-f]{64}$")


class Pointer(BaseModel):
    """Content of ``latest.json``: the current version, and all versions in the order of their first release."""

    model_config = ConfigDict(strict=True, frozen=True)

    current: str
    versions: tuple[ReleasedVersion, ...]

    def find(self, version: str) -> ReleasedVersion | None:
        """Return the version with this name, or None."""
        return next((item for item in self.versions if item.version == version), None)


class VersionListing(BaseModel):
    """Size in bytes and sha256 of each file of a version, by name."""

    model_config = ConfigDict(strict=True, frozen=True)

    files: dict[str, tuple[int, str]]


@dataclass(frozen=True)
class ObservedLocation:
    """State of a location in a bucket."""

    pointer: Pointer | None  # none before the first release
    head: str  # entity tag of the pointer, or ``NO_POINTER``. A guarded write requires that it has not changed.
    has_listing: bool  # whether the listing of the version exists
    confirmed_files: frozenset[str]  # files of the version whose content the store's own checksums confirm
    foreign_files: tuple[str, ...] = ()  # objects below the version's path that are not in the release


S3Step = tuple[str, ...] | Pointer
"""Names of files to send, in addition to the listing, or the pointer to write if it has not changed."""


class S3Publication(Publication[ObservedLocation, S3Step]):
    """Requests of one publication.

    ``multipart_threshold`` is the largest file that is sent in one request, in bytes. Larger files are sent in parts,
    and the store has no sha256 of the whole object.
    """

    def __init__(self, request: PublishRequest, location: S3Location, multipart_threshold: int) -> None:
        self.request, self.location, self.multipart_threshold = request, location, multipart_threshold
        self.files = {file.name: file for file in request.files}
        identities, version = file_identities(request.files), request.version
        content = (digest := merkle(identities))[:VERSION_DIGITS]
        path = content if version == content else f"{version}-{content}"
        self.entry = ReleasedVersion(version=version, path=path, digest=digest)  # in the pointer
        self.directory = f"{path}/"
        self.listing_name = f"{LISTINGS}{path}.json"
        self.listing = VersionListing(files=dict(sorted(identities.items()))).model_dump_json(indent=1).encode()
        # Composite checksums (sha256 over the sha256 of each part) of files that were read, by name and part size.
        self._composites: dict[tuple[str, int], str] = {}

    @property
    def address(self) -> str:
        return self.location.url

    def head(self, observed_state: ObservedLocation) -> str:
        return observed_state.head

    def kind(self, step: S3Step) -> str:
        return POINTER if isinstance(step, Pointer) else ", ".join(step) or self.listing_name

    def decide(self, observed_state: ObservedLocation, expected_head: str | None) -> S3Step | PublicationBlocked | None:
        """Return the next step. Publication is blocked if another release than the expected one is current."""
        entry, pointer = self.entry, observed_state.pointer
        previous = pointer.find(entry.version) if pointer else None
        if previous is not None and previous.digest != entry.digest:
            return version_taken(entry.version, previous.digest[:VERSION_DIGITS])
        is_current = pointer is not None and pointer.current == entry.version
        if not is_current and observed_state.head != expected_head:
            return overtaken(
                f"another release ({pointer.current if pointer else 'none'}) is current there now",
                "the release that this one was compared with",
            )
        if observed_state.foreign_files:
            return PublicationBlocked(
                f"{observed_state.foreign_files[0]} is among the files of this version but not part of the release",
                "only the files of the release",
                "find out who wrote it, and remove it",
            )
        missing = tuple(sorted(set(self.files) - observed_state.confirmed_files))
        if missing or not observed_state.has_listing:
            return missing
        if is_current:
            return None
        earlier = pointer.versions if pointer else ()
        versions = earlier if previous else (*earlier, entry)
        return Pointer(current=entry.version, versions=versions)

    def execute(self, step: S3Step, observed_state: ObservedLocation) -> bool:
        if not isinstance(step, Pointer):
            self.send(step)
            return True
        guard = {"IfNoneMatch": "*"} if observed_state.head == NO_POINTER else {"IfMatch": observed_state.head}
        self.location.write(POINTER, step.model_dump_json(indent=1).encode(), **guard)
        return False  # If another publisher was faster, the guard fails and the next read shows it.

    def observe(self) -> ObservedLocation:
        pointer, head = read_pointer(self.location) or (None, NO_POINTER)
        names = {name.removeprefix(self.directory) for name, _, _ in self.location.objects(self.directory)}
        candidates = sorted(names & set(self.files))
        with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
            confirmations = list(pool.map(self.is_confirmed, candidates))
        listing = self.location.read(self.listing_name)
        return ObservedLocation(
            pointer=pointer,
            head=head,
            has_listing=listing is not None and listing[0] == self.listing,
            confirmed_files=frozenset(name for name, is_ok in zip(candidates, confirmations, strict=True) if is_ok),
            foreign_files=tuple(sorted(names - set(self.files))),
        )

    def is_confirmed(self, name: str) -> bool:
        """Return whether the store's checksum confirms that the object equals the file that passed the gate."""
        file, answer = self.files[name], self.location.head(self.directory + name)
        if answer is None or answer.size != file.size:
            return False
        if answer.parts_sha256 is None:
            return self.location.sha256(self.directory + name, answer) == file.sha256
        checksum, part_size = answer.parts_sha256
        if (name, part_size) not in self._composites:
            for _ in self._hashed_parts(file, part_size):
                pass  # an earlier process sent the file, so hash it again
        return checksum == self._composites[name, part_size]

    def _hashed_parts(self, file: ReleaseFile, part_size: int) -> Iterator[tuple[bytes, str]]:
        """Yield each part and its sha256. Raise Refused at the end if the whole file is not the gated one."""
        composite = hashlib.sha256()
        for data in file.gated_chunks(part_size):
            part_digest = hashlib.sha256(data).digest()
            composite.update(part_digest)
            yield data, encoded_sha256(part_digest)
        self._composites[file.name, part_size] = encoded_sha256(composite.digest())

    def send(self, names: Sequence[str]) -> None:
        """Send the listing, which marks work in progress, then the files, several in parallel.

        Raise Refused if the store ignores ``If-None-Match``, because it would not stop a second publisher.
        """
        checksum = _checksum(hashlib.sha256(self.listing).digest())
        self.location.write(self.listing_name, self.listing, **checksum)
        if self.location.write(self.listing_name, self.listing, **checksum, IfNoneMatch="*"):
            raise Refused(
                self.location.url,
                found="the store overwrites an object despite 'If-None-Match'",
                expected="guarded writes as in S3, without which two publishers overwrite each other unnoticed",
                remedy="use a newer version of the store, or publish to another target",
            )
        report = self.request.progress(sum(self.files[name].size for name in names))
        report(0)
        with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
            uploads = [pool.submit(self.send_file, self.files[name], report) for name in names]
            try:
                for upload in uploads:
                    upload.result()
            finally:
                for upload in uploads:
                    upload.cancel()

    def send_file(self, file: ReleaseFile, report: Callable[[int], None]) -> None:
        """Send one file. Raise Refused if it has changed since the gate.

        A large file is sent in parts with a sha256 each. The object is created only if the whole file matches.
        """
        key = self.location.key(self.directory + file.name)
        if file.size <= self.multipart_threshold:
            checksum = _checksum(bytes.fromhex(file.sha256))
            if isinstance(file.source, bytes) or file.size <= _IN_MEMORY:
                data = b"".join(file.chunks(_IN_MEMORY))
                if (actual := sha256_of(data)) != file.sha256:
                    raise file.alteration_error(actual)
                self.location.ask("put_object", Key=key, Body=data, **checksum)
            else:
                try:
                    self.location.send_file(key, file.source, **checksum)
                except FileNotFoundError:
                    raise file.alteration_error() from None
                except MergegateError:
                    for _ in file.gated_chunks(_PART):
                        pass  # raises Refused if the store rejected the bytes because they were altered
                    raise
            report(file.size)
            return

        part_size = max(_PART, -(-file.size // _MAX_PARTS))
        started = self.location.ask(
            "create_multipart_upload", Key=key, ChecksumAlgorithm="SHA256", Metadata={PART_SIZE: str(part_size)}
        )
        upload = {"Key": key, "UploadId": started["UploadId"]}
        try:
            parts = []
            for number, (data, sha256) in enumerate(self._hashed_parts(file, part_size), 1):
                part: dict[str, Any] = {"PartNumber": number, "ChecksumSHA256": sha256}
                answer = self.location.ask("upload_part", **upload, **part, Body=data, ChecksumAlgorithm="SHA256")
                parts.append({**part, "ETag": answer["ETag"]})
                report(len(data))
            # 404: an earlier request, whose answer was lost, may have completed the upload
            self.location.ask(
                "complete_multipart_upload", ignored_statuses=(404,), **upload, MultipartUpload={"Parts": parts}
            )
        except BaseException:
            # Report the original error. If the upload cannot be aborted, the bucket's lifecycle rule removes it.
            with suppress(Exception):
                self.location.ask("abort_multipart_upload", **upload)
            raise

    def remove_leftovers(self, pointer: Pointer | None) -> None:
        """Remove files and uploads of runs that were interrupted over seven days ago. Failures are only logged."""
        try:
            released_paths = {item.path for item in pointer.versions} if pointer else set()
            since = self.location.now() - _ABANDONED
            for name, _, modified in list(self.location.objects(LISTINGS)):
                path = name.removeprefix(LISTINGS).removesuffix(".json")
                if path in released_paths or modified > since:
                    continue
                objects = list(self.location.objects(f"{path}/"))
                if any(time > since for _, _, time in objects):
                    continue
                _log.info("removing %s/%s, which an interrupted publication left", self.location.url, path)
                for leftover in (*(item for item, _, _ in objects), name):
                    self.location.ask("delete_object", Key=self.location.key(leftover))
            for item in self.location.ask("list_multipart_uploads", Prefix=self.location.key("")).get("Uploads", ()):
                if item["Initiated"] < since:
                    self.location.ask("abort_multipart_upload", Key=item["Key"], UploadId=item["UploadId"])
        except MergegateError as error:
            _log.warning("leftovers of old publications at %s were not removed: %s", self.location.url, error.found)


def read_pointer(location: S3Location) -> tuple[Pointer, str] | None:
    """Return the pointer and its entity tag, or None before the first release. Raise Refused for another object."""
    if (stored := location.read(POINTER)) is None:
        return None
    try:
        return Pointer.model_validate_json(stored[0]), stored[1]
    except ValidationError:
        raise Refused(
            f"{location.url}/{POINTER}",
            found="not a pointer to a release",
            expected="a pointer that mergegate wrote",
            remedy="use another prefix, or find out who wrote the object",
        ) from None


def _checksum(digest: bytes) -> dict[str, Any]:
    """Return request options with which the store compares the body with a sha256 digest."""
    return {"ChecksumAlgorithm": "SHA256", "ChecksumSHA256": encoded_sha256(digest)}


def read_alias(location: S3Location, name: str) -> tuple[ReleasedVersion, str] | None:
    """Return the version that the alias ``name`` points to and the entity tag of its object, or None.

    Raise Refused if the object is not an alias.
    """
    if (stored := location.read(f"{name}.json")) is None:
        return None
    try:
        return ReleasedVersion.model_validate_json(stored[0]), stored[1]
    except ValidationError:
        raise Refused(
            f"{location.url}/{name}.json",
            found="not an alias of a version",
            expected="an alias that mergegate wrote",
            remedy="choose another name for the alias, or find out who wrote the object",
        ) from None


@dataclass(frozen=True)
class S3Release:
    """A version in a bucket.

    ``version`` is its name if that is a content hash, or else the start of the digest in the pointer over all files.
    """

    location: S3Location
    entry: ReleasedVersion

    @property
    def reference(self) -> str:
        return f"{self.location.url}@{self.entry.version}"

    @property
    def version(self) -> str:
        name = self.entry.version
        return name if is_content_version(name) else self.entry.digest[:VERSION_DIGITS]

    def files(self) -> Mapping[str, tuple[int, str]]:
        """Return size and sha256 of every object below the version's path, even if it is not part of the release."""
        directory, files = f"{self.entry.path}/", {}
        for name, size, _ in sorted(self.location.objects(directory)):
            answer = self.location.head(name)
            if answer is not None:
                files[name.removeprefix(directory)] = size, self.location.sha256(name, answer)
        return files

    def read(self, name: str) -> bytes:
        """Return the content of a small file. Raise Refused if it does not exist or is too large."""
        key = f"{self.entry.path}/{name}"
        answer = self.location.head(key)
        content = self.location.read(key) if answer and answer.size <= MAX_METADATA_BYTES else None
        if content is None:
            problem = f"{answer.size} bytes" if answer else "the file is missing"
            raise Refused(f"{self.reference}: {name}", found=problem, expected="a small file")
        return content[0]

    def download(self) -> Path:
        """Return a directory with the release. Raise Refused if its objects differ from the published files."""
        location, entry = self.location, self.entry

        def fetch(name: str, path: Path) -> None:
            with path.open("wb") as file:
                for chunk in location.stream(f"{entry.path}/{name}"):
                    file.write(chunk)

        listing = location.read(f"{LISTINGS}{entry.path}.json")
        try:
            files = VersionListing.model_validate_json(listing[0] if listing else b"").files
        except ValidationError:
            files = {}
        if merkle(files) != entry.digest:
            raise Refused(
                self.reference,
                found=f"its listing does not match the digest in {POINTER}" if listing else "its listing is missing",
                expected="the release that was published",
                remedy="publish the release again, which repairs altered files",
            )
        return download_release(self.reference, files, fetch)


class S3Target(PublishTarget):
    """A prefix in a bucket: every version under its own path, and ``latest.json``, which names the current version.

    boto3 finds credentials, region and certificates.
    """

    reference_form: ClassVar[str] = "s3://bucket/prefix@version"

    to: Literal["s3"]
    url: str = Field(
        pattern=S3_URL,
        description="Location s3://bucket/prefix. The bucket must exist. No other release may use the prefix.",
    )
    endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://[^/\s@]+/?$",
        description="Address http(s)://host[:port] of a store other than Amazon's. "
        "Default: AWS_ENDPOINT_URL_S3, or Amazon.",
    )
    multipart_threshold: int = Field(
        default=MAX_SINGLE_REQUEST,
        ge=5 << 20,
        le=MAX_SINGLE_REQUEST,
        description="Largest file that is sent in one request, in bytes. Larger files are sent in parts, which is "
        "safer on bad connections, but requires 'verify' to download them. Default: 5 GiB.",
    )

    @property
    def address(self) -> str:
        return s3_location(self.url, self.endpoint, "publish.url").url

    def check(self, root: Path) -> None:
        """Raise an error if the bucket denies listing or writing. This starts and aborts an upload."""
        location = self._location()
        location.ask("head_bucket")
        key = location.key(".listings/check")
        upload = location.ask("create_multipart_upload", Key=key)
        location.ask("abort_multipart_upload", Key=key, UploadId=upload["UploadId"])

    def current_release(self, root: Path) -> CurrentRelease | None:
        """Download the release that the pointer names. Its ``head`` is the entity tag of the pointer."""
        location = self._location()
        if (stored := read_pointer(location)) is None:
            return None
        pointer, head = stored
        entry = pointer.find(pointer.current)
        if entry is None:
            raise Refused(
                f"{location.url}/{POINTER}",
                found=f"the current version {pointer.current} is not in its list of versions",
                expected="a pointer that mergegate wrote",
                remedy="find out who edited the object",
            )
        release = S3Release(location, entry)
        return CurrentRelease(release.download(), head, entry.version, release.reference)

    def earlier_release(self, root: Path, version: str) -> CurrentRelease | None:
        """Download a version that the pointer lists, or the first one. Return None before the first release."""
        location = self._location()
        if (stored := read_pointer(location)) is None:
            return None
        versions = stored[0].versions
        entry = versions[0] if version == FIRST and versions else stored[0].find(version)
        if entry is None:
            raise self._no_such_anchor(version, [item.version for item in versions])
        return CurrentRelease(S3Release(location, entry).download())

    def current_head(self, root: Path) -> str | None:
        stored = read_pointer(self._location())
        return stored[1] if stored else None

    def for_variants(self, suffix: str) -> S3Target:
        return self._with_settings(suffix, url=f"{self.url.removesuffix('/')}-{suffix}")

    def publish(self, request: PublishRequest) -> Release:
        """Send the files of the version, then move the pointer."""
        location, version = self._location(), request.version
        publication = S3Publication(request, location, self.multipart_threshold)
        observed, steps = publication.run(request.expected_head)
        if steps:
            publication.remove_leftovers(observed.pointer)
        return Release(request.name, version, f"{location.url}@{version}", location.url, new=bool(steps))

    def published_file(self, root: Path, version: str, name: str) -> bytes | None:
        """Return a small file of a version that the pointer lists, or None."""
        location = self._location()
        stored = read_pointer(location)
        if stored is None or (entry := stored[0].find(version)) is None:
            return None
        content = location.read(f"{entry.path}/{name}")
        return content[0] if content else None

    def set_alias(self, root: Path, version: str, name: str) -> None:
        """Write the object ``name.json`` next to the pointer. After a concurrent move, read the state and try again."""
        self._require_alias_name(name, POINTER.removesuffix(".json"))
        location = self._location()
        stored = read_pointer(location)
        pointer = stored[0] if stored else Pointer(current="", versions=())
        if pointer.find(name):
            raise self._alias_conflict(name)
        if (target := pointer.find(version)) is None:
            raise self._no_such_version(version, [item.version for item in pointer.versions])
        for _ in range(_ALIAS_ROUNDS):
            alias = read_alias(location, name)
            if alias is not None and alias[0] == target:
                return
            guard = {"IfNoneMatch": "*"} if alias is None else {"IfMatch": alias[1]}
            location.write(f"{name}.json", target.model_dump_json(indent=1).encode(), **guard)
        raise Refused(
            f"{location.url}/{name}.json",
            found="another writer moves the alias each time that mergegate moves it",
            expected="one writer at a time",
            remedy="find out who else writes to this location, then run again",
        )

    def resolve_alias(self, root: Path, name: str) -> str | None:
        alias = read_alias(self._location(), name)
        return alias[0].version if alias else None

    @classmethod
    def open(cls, reference: str) -> S3Release | None:
        """Open ``s3://bucket/prefix[@version or alias]``, at Amazon or at the store of ``AWS_ENDPOINT_URL_S3``."""
        if not (match := _NAME.fullmatch(reference)):
            return None
        require_boto3(reference)
        location = s3_location(match["url"], None, reference)
        if (stored := read_pointer(location)) is None:
            raise InvalidInput(
                reference,
                found=f"no {POINTER} at this location",
                expected="s3://bucket/prefix[@version] of a release",
                remedy="check the spelling, and AWS_ENDPOINT_URL_S3 for a store other than Amazon's",
            )
        pointer = stored[0]
        version = match["version"] or pointer.current
        entry = pointer.find(version)
        if entry is None and match["version"] and re.fullmatch(ALIAS_NAME, version):
            alias = read_alias(location, version)
            entry = alias[0] if alias else None
        if entry is None:
            raise InvalidInput(
                reference,
                found=f"no version {version}",
                expected="one of its versions",
                remedy=suggest(version, [item.version for item in pointer.versions]),
            )
        return S3Release(location, entry)

    def _location(self) -> S3Location:
        require_boto3("publish.to: s3")
        return s3_location(self.url, self.endpoint, "publish.url")
