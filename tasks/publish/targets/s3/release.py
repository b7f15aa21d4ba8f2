"""Read releases from a bucket: download the current or an earlier one, or open one by name to verify it.

Verification downloads only objects without a sha256 in the store, that is, objects that were uploaded in parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from pydantic import ValidationError

from mergegate.merge_core.errors import InvalidInput, Refused, suggest
from mergegate.tasks.publish.targets.alias import ALIAS_NAME
from mergegate.tasks.publish.targets.contract import FIRST, CurrentRelease
from mergegate.tasks.publish.targets.download import downloaded_release
from mergegate.tasks.publish.targets.s3.access import S3Location, is_of_client, refusal, require_boto3, s3_location
from mergegate.tasks.publish.targets.s3.aliases import read_alias
from mergegate.tasks.publish.targets.s3.publication import parse_pointer, stored_sha256
from mergegate.tasks.publish.targets.s3.state import LISTINGS, POINTER, Pointer, ReleasedVersion, VersionListing
from mergegate.tasks.store import merkle

_NAME = re.compile(r"(?P<url>s3://[^@\s]+)(?:@(?P<version>[^@\s]+))?")
_MAX_METADATA_BYTES = 64 << 20
_CHUNK = 1 << 20
P = ParamSpec("P")
R = TypeVar("R")


def in_words(location: S3Location, ask: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call ``ask``, and convert exceptions of the client to errors for the user.

    Raises:
        Refused: The store rejects the request or does not answer.
        InvalidInput: Credentials are missing.
    """
    try:
        return ask(*args, **kwargs)
    except Exception as error:
        if is_of_client(error):
            raise refusal(location, error) from None
        raise


def read_pointer(location: S3Location) -> tuple[Pointer, str] | None:
    """Return the pointer and its entity tag, or None before the first release."""
    stored = location.read(POINTER)
    return (parse_pointer(location, stored[0]), stored[1]) if stored else None


def download_current(location: S3Location) -> CurrentRelease | None:
    """Download the current release. Its head is the entity tag of the pointer."""
    stored = in_words(location, read_pointer, location)
    if stored is None:
        return None
    pointer, head = stored
    if pointer.released is None:
        raise _edited(location, pointer.current)
    version = pointer.released.version
    return CurrentRelease(_download(location, pointer.released), head, version, f"{location.url}@{version}")


def download_named(location: S3Location, version: str) -> CurrentRelease | None:
    """Download a version that the pointer lists, or the first one. Return None before the first release.

    Raises:
        InvalidInput: There is no such version.
        Refused: The store is unavailable, or its content differs from the published files.
    """
    stored = in_words(location, read_pointer, location)
    if stored is None:
        return None
    versions = stored[0].versions
    entry = versions[0] if version == FIRST and versions else stored[0].named(version)
    if entry is None:
        raise InvalidInput(
            "evaluate.anchor",
            found=f"{version!r}, which is no version at {location.url}",
            expected=f"{FIRST!r}, or one of its versions",
            remedy=suggest(version, [FIRST, *(item.version for item in versions)]),
        )
    return CurrentRelease(_download(location, entry))


@dataclass(frozen=True)
class S3Release:
    """A version in a bucket. ``version`` is the start of the content hash in the pointer."""

    location: S3Location
    entry: ReleasedVersion

    @property
    def where(self) -> str:
        return f"{self.location.url}@{self.entry.version}"

    @property
    def version(self) -> str:
        return self.entry.digest[:12]

    def files(self) -> Mapping[str, tuple[int, str]]:
        """Return size and sha256 of every object below the version's path, whether or not it belongs there."""
        return in_words(self.location, self._files)

    def read(self, name: str) -> bytes:
        """Return the content of a small file.

        Raises:
            Refused: The file does not exist, or is too large for a metadata file.
        """
        return in_words(self.location, self._read, name)

    def _files(self) -> dict[str, tuple[int, str]]:
        directory, files = f"{self.entry.path}/", {}
        for name, size, _ in sorted(self.location.objects(directory)):
            answer = self.location.head(name)
            if answer is not None:
                files[name.removeprefix(directory)] = size, stored_sha256(self.location, name, answer)
        return files

    def _read(self, name: str) -> bytes:
        answer = self.location.head(f"{self.entry.path}/{name}")
        content = (
            self.location.read(f"{self.entry.path}/{name}") if answer and answer.size <= _MAX_METADATA_BYTES else None
        )
        if content is None:
            found = f"{answer.size} bytes" if answer else "not there"
            raise Refused(f"{self.where}: {name}", found=found, expected="a small file")
        return content[0]


def open_in_bucket(reference: str) -> S3Release | None:
    """Open ``s3://bucket/prefix[@version]`` in its present state. Return None if the reference has another form.

    Raises:
        InvalidInput: There is no such prefix or version, or the store is unavailable.
    """
    if not (match := _NAME.fullmatch(reference)):
        return None
    require_boto3(reference)
    location = s3_location(match["url"], None, reference)
    try:
        stored = in_words(location, read_pointer, location)
    except Refused as error:
        raise InvalidInput(reference, found=error.found, expected=error.expected, remedy=error.remedy) from None
    if stored is None:
        raise InvalidInput(
            reference,
            found=f"no {POINTER} there",
            expected="s3://bucket/prefix[@version] of a release",
            remedy="check the spelling, and AWS_ENDPOINT_URL_S3 where it is not Amazon's",
        )
    pointer, version = stored[0], match["version"] or ""
    entry = pointer.named(version) if version else pointer.released
    if (
        entry is None
        and re.fullmatch(ALIAS_NAME, version)
        and (alias := in_words(location, read_alias, location, version))
    ):
        entry = alias[0]
    if entry is None:
        versions = [item.version for item in pointer.versions]
        raise InvalidInput(
            reference,
            found=f"no version {match['version'] or pointer.current}",
            expected="one of its versions",
            remedy=suggest(match["version"] or pointer.current, versions),
        )
    return S3Release(location, entry)


def _download(location: S3Location, entry: ReleasedVersion) -> Path:
    reference = f"{location.url}@{entry.version}"
    listing = in_words(location, location.read, f"{LISTINGS}{entry.path}.json")
    try:
        files = VersionListing.model_validate_json(listing[0] if listing else b"").files
    except ValidationError:
        files = {}
    if merkle(files) != entry.digest:
        raise Refused(
            reference,
            found=f"its listing is not the one that {POINTER} names" if listing else "its listing is not there",
            expected="the release that was published",
            remedy="publish the release anew: it repairs what was altered",
        )

    def fetch(name: str, path: Path) -> None:
        with path.open("wb") as file:
            for chunk in location.stream(f"{entry.path}/{name}").iter_chunks(_CHUNK):
                file.write(chunk)

    return in_words(location, downloaded_release, reference, files, fetch)


def _edited(location: S3Location, version: str) -> Refused:
    return Refused(
        f"{location.url}/{POINTER}",
        found=f"it names a version that it does not list ({version})",
        expected="what a publication has written",
        remedy="see who edited it",
    )
