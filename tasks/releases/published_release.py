"""A release where it stands, to be read and compared: a directory, or a revision on the Hub.

On the Hub nothing large is downloaded: the sha256 of a file in large storage is the Hub's own. Small files are read and
compared with git's id of them, so that what was read is what is listed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from merge_core.errors import InvalidInput, Refused
from merge_core.store import sha256_file
from tasks.checkpoints.hub import HubAccess, describe, git_blob, is_transient
from tasks.publish import sha256_of
from tasks.publish.targets import KEPT

_VERSION = re.compile(r"[0-9a-f]{12}")
_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[^@\s]+))?")
# What downloading leaves behind.
_FOREIGN = (".cache", ".git")
_SMALL = 1 << 22  # bytes


class PublishedRelease(Protocol):
    """A release that can be looked at. ``version`` is the name that others know it by, if that is a content hash."""

    @property
    def where(self) -> str: ...
    @property
    def version(self) -> str | None: ...
    def files(self) -> Mapping[str, tuple[int, str]]: ...  # name -> size in bytes, sha256
    def read(self, name: str) -> bytes: ...


@dataclass(frozen=True)
class InDirectory:
    """A release in a directory. Every byte is read."""

    directory: Path

    @property
    def where(self) -> str:
        return str(self.directory)

    @property
    def version(self) -> str | None:
        name = self.directory.resolve().name
        return name if _VERSION.fullmatch(name) else None

    def files(self) -> Mapping[str, tuple[int, str]]:
        """Size and sha256 of every file, without what git or a download left beside them."""
        found = {}
        for path in sorted(self.directory.rglob("*")):
            relative = path.relative_to(self.directory)
            if path.is_file() and relative.parts[0] not in _FOREIGN and str(relative) not in KEPT:
                found[relative.as_posix()] = (path.stat().st_size, sha256_file(path))
        return found

    def read(self, name: str) -> bytes:
        return (self.directory / name).read_bytes()


@dataclass(frozen=True)
class OnHub:
    """A commit on the Hub. ``version``: the tag on it that is a content hash."""

    access: HubAccess
    repo: str
    commit: str
    version: str | None
    _read: dict[str, bytes] = field(default_factory=dict, repr=False, compare=False, hash=False)

    @property
    def where(self) -> str:
        return f"{self.repo}@{self.version or self.commit[:12]}"

    def files(self) -> Mapping[str, tuple[int, str]]:
        """Size and sha256 of every file. Small ones are read."""
        listing = self.access.listing(self.repo, self.commit)
        return {
            name: (file.size, file.sha256 if file.sha256 is not None else sha256_of(self.read(name)))
            for name, file in listing.items()
            if name not in KEPT
        }

    def read(self, name: str) -> bytes:
        """The bytes that the commit lists under ``name``. Small files are kept: each is asked for once.

        Raises:
            Refused: when the Hub hands out other bytes than it lists.
        """
        if name in self._read:
            return self._read[name]
        listed = self.access.listing(self.repo, self.commit)[name]
        with TemporaryDirectory(prefix="mergegate-verify-") as place:
            file = self.access.api().hf_hub_download(self.repo, name, revision=self.commit, local_dir=place)
            data = Path(file).read_bytes()
        if (sha256_of(data) if listed.sha256 else git_blob(data)) != (listed.sha256 or listed.blob):
            raise Refused(f"{self.where}: {name}", found="other bytes than the Hub lists", expected="what it lists")
        if len(data) <= _SMALL:
            self._read[name] = data
        return data


def find_release(release: str, access: HubAccess | None) -> PublishedRelease:
    """The release that a person named: a directory, or ``org/name[@revision]`` on the Hub.

    Args:
        access: How to reach the Hub; None when it need not be.

    Raises:
        InvalidInput: when there is no such directory, repository or revision.
    """
    if access is None or is_directory(release):
        if not (place := Path(release)).is_dir():
            raise _nothing(release, "no such directory")
        return InDirectory(place)
    found = _HUB_ID.fullmatch(release)
    if not found:
        raise _nothing(release, "no such directory, and no name on the Hub")
    repo = found["repo"]
    try:
        api = access.api()
        facts = api.model_info(repo, revision=found["revision"])
        tags = [ref.name for ref in api.list_repo_refs(repo).tags if ref.target_commit == facts.sha]
    except Exception as error:
        if not is_transient(error):
            raise _nothing(release, describe(error, access)) from None
        raise _nothing(
            release, f"no directory here, and not to be had from the Hub ({describe(error, access)})"
        ) from None
    if facts.sha is None:
        raise _nothing(release, "a repository without commits")
    named = [found["revision"]] if found["revision"] in tags else tags
    return OnHub(access, repo, facts.sha, next((tag for tag in named if _VERSION.fullmatch(tag)), None))


def is_directory(release: str) -> bool:
    """Whether ``release`` can only be meant as a directory, or is one."""
    return Path(release).is_dir() or not _HUB_ID.fullmatch(release)


def _nothing(release: str, found: str) -> InvalidInput:
    return InvalidInput(
        release,
        found=found,
        expected="the directory of a release, or org/name@version on the Hub",
        remedy="check the spelling, the network, and HF_TOKEN for a private repository",
    )
