"""Define the S3 target. Its *pointer* is the object ``latest.json`` (see ``s3_publication``).

Each alias is a small object next to the pointer. Verification downloads only objects that were uploaded in parts,
because the store has no sha256 of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, ValidationError

from mergegate.merge_core.errors import InvalidInput, Refused, suggest
from mergegate.tasks.publish.content import MAX_METADATA_BYTES, VERSION_DIGITS, is_content_version
from mergegate.tasks.publish.targets.contract import (
    ALIAS_NAME,
    FIRST,
    CurrentRelease,
    PublishRequest,
    PublishTarget,
    Release,
)
from mergegate.tasks.publish.targets.download import download_release
from mergegate.tasks.publish.targets.s3_access import S3_URL, S3Location, require_boto3, s3_location
from mergegate.tasks.publish.targets.s3_publication import (
    LISTINGS,
    MAX_SINGLE_REQUEST,
    POINTER,
    Pointer,
    ReleasedVersion,
    S3Publication,
    VersionListing,
    read_pointer,
)
from mergegate.tasks.store import merkle

_ALIAS_ROUNDS = 5
_NAME = re.compile(r"(?P<url>s3://[^@\s]+)(?:@(?P<version>[^@\s]+))?")


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
