"""Read the pointer, releases and aliases in a bucket, download a release for comparison, and move aliases.

Each alias is a small object next to the pointer. Verification downloads only objects that were uploaded in parts,
because the store has no sha256 of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from mergegate.merge_core.errors import Refused
from mergegate.tasks.publish.content import MAX_METADATA_BYTES, VERSION_DIGITS, is_content_version
from mergegate.tasks.publish.targets.contract import (
    alias_conflict,
    no_such_version,
)
from mergegate.tasks.publish.targets.download import download_release
from mergegate.tasks.publish.targets.s3_access import (
    S3Location,
    is_of_client,
    parse_pointer,
    refusal,
)
from mergegate.tasks.publish.targets.s3_state import LISTINGS, POINTER, Pointer, ReleasedVersion, VersionListing
from mergegate.tasks.store import merkle

_ROUNDS = 5


@contextmanager
def explained_errors(location: S3Location) -> Iterator[None]:
    """Convert exceptions of the client in the block to Refused, or to InvalidInput if credentials are missing."""
    try:
        yield
    except Exception as error:
        if is_of_client(error):
            raise refusal(location, error) from None
        raise


def read_pointer(location: S3Location) -> tuple[Pointer, str] | None:
    """Return the pointer and its entity tag, or None before the first release."""
    with explained_errors(location):
        stored = location.read(POINTER)
    return (parse_pointer(location, stored[0]), stored[1]) if stored else None


def move_alias(location: S3Location, version: str, name: str) -> None:
    """Point the alias ``name`` to ``version``. After a concurrent move, read the state and try again.

    Raises:
        InvalidInput: There is no such version, or ``name`` is a version.
        Refused: Another process keeps writing the alias, or the object is not an alias.
    """
    stored = read_pointer(location)
    pointer = stored[0] if stored else Pointer(current="", versions=())
    if pointer.find(name):
        raise alias_conflict(name, location.url)
    target = pointer.find(version)
    if target is None:
        raise no_such_version(version, location.url, [item.version for item in pointer.versions])
    for _ in range(_ROUNDS):
        alias = read_alias(location, name)
        if alias is not None and alias[0] == target:
            return
        guard = {"IfNoneMatch": "*"} if alias is None else {"IfMatch": alias[1]}
        with explained_errors(location):
            location.write(f"{name}.json", target.model_dump_json(indent=1).encode(), **guard)
    raise Refused(
        f"{location.url}/{name}.json",
        found="another writer moves the alias each time that mergegate moves it",
        expected="one writer at a time",
        remedy="find out who else writes to this location, then run again",
    )


def read_alias(location: S3Location, name: str) -> tuple[ReleasedVersion, str] | None:
    """Return the version that the alias ``name`` points to and the entity tag of its object, or None.

    Raise Refused if the object is not an alias.
    """
    with explained_errors(location):
        stored = location.read(f"{name}.json")
    if stored is None:
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
        with explained_errors(self.location):
            for name, size, _ in sorted(self.location.objects(directory)):
                answer = self.location.head(name)
                if answer is not None:
                    files[name.removeprefix(directory)] = size, self.location.sha256(name, answer)
        return files

    def read(self, name: str) -> bytes:
        """Return the content of a small file. Raise Refused if it does not exist or is too large."""
        key = f"{self.entry.path}/{name}"
        with explained_errors(self.location):
            answer = self.location.head(key)
            content = self.location.read(key) if answer and answer.size <= MAX_METADATA_BYTES else None
        if content is None:
            problem = f"{answer.size} bytes" if answer else "the file is missing"
            raise Refused(f"{self.reference}: {name}", found=problem, expected="a small file")
        return content[0]

    def download(self) -> Path:
        """Return a directory with the release. Raise Refused if its objects differ from the published files."""
        return download_entry(self.location, self.entry)


def download_entry(location: S3Location, entry: ReleasedVersion) -> Path:
    """Download a version that the pointer lists. Raise Refused if its content differs from the published files."""
    reference = f"{location.url}@{entry.version}"

    def fetch(name: str, path: Path) -> None:
        with path.open("wb") as file:
            for chunk in location.stream(f"{entry.path}/{name}"):
                file.write(chunk)

    with explained_errors(location):
        listing = location.read(f"{LISTINGS}{entry.path}.json")
        try:
            files = VersionListing.model_validate_json(listing[0] if listing else b"").files
        except ValidationError:
            files = {}
        if merkle(files) != entry.digest:
            raise Refused(
                reference,
                found=f"its listing does not match the digest in {POINTER}" if listing else "its listing is missing",
                expected="the release that was published",
                remedy="publish the release again, which repairs altered files",
            )
        return download_release(reference, files, fetch)
