"""A release that stands in a bucket: the current one downloaded, or any by its name to be read and compared.

To compare, nothing is downloaded that the store keeps a sha256 of; what came in parts is read whole.
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
from mergegate.tasks.publish.targets.s3.access import S3Place, is_of_client, refusal, require_boto3, s3_place
from mergegate.tasks.publish.targets.s3.aliases import read_alias
from mergegate.tasks.publish.targets.s3.publication import parse_pointer, sha256_there
from mergegate.tasks.publish.targets.s3.state import LISTINGS, POINTER, Pointer, ReleasedVersion, VersionListing
from mergegate.tasks.store import merkle

_NAME = re.compile(r"(?P<url>s3://[^@\s]+)(?:@(?P<version>[^@\s]+))?")
_MOST_READ = 64 << 20  # of the files that say something of a release
_CHUNK = 1 << 20
P = ParamSpec("P")
R = TypeVar("R")


def in_words(place: S3Place, ask: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """What ``ask`` returns; what the client raises in it, as a message.

    Raises:
        Refused: when the store says no, or does not answer.
        InvalidInput: when there are no credentials.
    """
    try:
        return ask(*args, **kwargs)
    except Exception as error:
        if is_of_client(error):
            raise refusal(place, error) from None
        raise


def read_pointer(place: S3Place) -> tuple[Pointer, str] | None:
    """The pointer and its entity tag; None before the first release."""
    there = place.read(POINTER)
    return (parse_pointer(place, there[0]), there[1]) if there else None


def download_current(place: S3Place) -> CurrentRelease | None:
    """What the pointer names today, downloaded; its head is the pointer's entity tag."""
    there = in_words(place, read_pointer, place)
    if there is None:
        return None
    pointer, head = there
    if pointer.released is None:
        raise _edited(place, pointer.current)
    version = pointer.released.version
    return CurrentRelease(_download(place, pointer.released), head, version, f"{place.url}@{version}")


def download_named(place: S3Place, named: str) -> CurrentRelease | None:
    """A version that the pointer has named before, or the first of them; None before any.

    Raises:
        InvalidInput: when there is no such version.
        Refused: when the store cannot be asked, or keeps something else than was published.
    """
    there = in_words(place, read_pointer, place)
    if there is None:
        return None
    versions = there[0].versions
    entry = versions[0] if named == FIRST and versions else there[0].named(named)
    if entry is None:
        raise InvalidInput(
            "evaluate.anchor",
            found=f"{named!r}, which is no version at {place.url}",
            expected=f"{FIRST!r}, or one of its versions",
            remedy=suggest(named, [FIRST, *(one.version for one in versions)]),
        )
    return CurrentRelease(_download(place, entry))


@dataclass(frozen=True)
class S3Release:
    """A version in a bucket. ``version``: the hash over its files that the pointer has of it."""

    place: S3Place
    entry: ReleasedVersion

    @property
    def where(self) -> str:
        return f"{self.place.url}@{self.entry.version}"

    @property
    def version(self) -> str:
        return self.entry.digest[:12]

    def files(self) -> Mapping[str, tuple[int, str]]:
        """Size and sha256 of every object that lies there, whatever was to lie there."""
        return in_words(self.place, self._files)

    def read(self, name: str) -> bytes:
        """The bytes of a small file.

        Raises:
            Refused: when it is not there, or too large to say something of a release.
        """
        return in_words(self.place, self._read, name)

    def _files(self) -> dict[str, tuple[int, str]]:
        directory, found = f"{self.entry.path}/", {}
        for name, size, _ in sorted(self.place.objects(directory)):
            there = self.place.head(name)
            if there is not None:
                found[name.removeprefix(directory)] = size, sha256_there(self.place, name, there)
        return found

    def _read(self, name: str) -> bytes:
        there = self.place.head(f"{self.entry.path}/{name}")
        content = self.place.read(f"{self.entry.path}/{name}") if there and there.size <= _MOST_READ else None
        if content is None:
            found = f"{there.size} bytes" if there else "not there"
            raise Refused(f"{self.where}: {name}", found=found, expected="a small file")
        return content[0]


def open_in_bucket(named: str) -> S3Release | None:
    """``s3://bucket/prefix[@version]`` as it stands now; None when ``named`` has another form.

    Raises:
        InvalidInput: when there is no such place or version, or it cannot be asked.
    """
    if not (form := _NAME.fullmatch(named)):
        return None
    require_boto3(named)
    place = s3_place(form["url"], None, named)
    try:
        there = in_words(place, read_pointer, place)
    except Refused as error:
        raise InvalidInput(named, found=error.found, expected=error.expected, remedy=error.remedy) from None
    if there is None:
        raise InvalidInput(
            named,
            found=f"no {POINTER} there",
            expected="s3://bucket/prefix[@version] of a release",
            remedy="check the spelling, and AWS_ENDPOINT_URL_S3 where it is not Amazon's",
        )
    pointer, version = there[0], form["version"] or ""
    entry = pointer.named(version) if version else pointer.released
    if entry is None and re.fullmatch(ALIAS_NAME, version) and (alias := in_words(place, read_alias, place, version)):
        entry = alias[0]
    if entry is None:
        known = [one.version for one in pointer.versions]
        raise InvalidInput(
            named,
            found=f"no version {form['version'] or pointer.current}",
            expected="one of its versions",
            remedy=suggest(form["version"] or pointer.current, known),
        )
    return S3Release(place, entry)


def _download(place: S3Place, entry: ReleasedVersion) -> Path:
    where = f"{place.url}@{entry.version}"
    listing = in_words(place, place.read, f"{LISTINGS}{entry.path}.json")
    try:
        files = VersionListing.model_validate_json(listing[0] if listing else b"").files
    except ValidationError:
        files = {}
    if merkle(files) != entry.digest:
        raise Refused(
            where,
            found=f"its listing is not the one that {POINTER} names" if listing else "its listing is not there",
            expected="the release that was published",
            remedy="publish the release anew: it repairs what was altered",
        )

    def fetch(name: str, path: Path) -> None:
        with path.open("wb") as file:
            for chunk in place.stream(f"{entry.path}/{name}").iter_chunks(_CHUNK):
                file.write(chunk)

    return in_words(place, downloaded_release, where, files, fetch)


def _edited(place: S3Place, version: str) -> Refused:
    return Refused(
        f"{place.url}/{POINTER}",
        found=f"it names a version that it does not list ({version})",
        expected="what a publication has written",
        remedy="see who edited it",
    )
