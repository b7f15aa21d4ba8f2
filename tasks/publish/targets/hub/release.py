"""A release that stands on the Hub: the current one downloaded, or any by its name to be read and compared.

To compare, nothing large is downloaded: the sha256 of a file in large storage is the Hub's own. Small files are read
and compared with git's id of them, so that what was read is what is listed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from mergegate.merge_core.errors import InvalidInput, Refused, suggest
from mergegate.tasks.checkpoints.hub import HubAccess, describe_hub_error, git_blob, hub_access, is_retryable
from mergegate.tasks.publish.checksums import sha256_of
from mergegate.tasks.publish.content import is_content_version
from mergegate.tasks.publish.targets.contract import FIRST, CurrentRelease
from mergegate.tasks.publish.targets.hub.state import WRITTEN_BY_HUB

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[^@\s]+))?")
_SMALL = 1 << 22  # bytes


def download_main(repo: str, access: HubAccess) -> CurrentRelease | None:
    """What ``main`` lists today, or None when there is no repository or nothing in it.

    Raises:
        Refused: when the Hub cannot be asked.
    """
    commit = _main_commit(access, repo)
    if commit is None or not set(access.listing(repo, commit)) - WRITTEN_BY_HUB:
        return None
    return CurrentRelease(_download(repo, commit, access), commit, commit[:12], access.url(repo, commit))


def download_earlier(repo: str, named: str, access: HubAccess) -> CurrentRelease | None:
    """What a version's tag, or the oldest of them (``first``), lists; None when there is no repository or no tag.

    Raises:
        InvalidInput: when there is no such tag.
        Refused: when the Hub cannot be asked.
    """
    if _main_commit(access, repo) is None:
        return None
    try:
        tags = {tag.name: tag.target_commit for tag in access.api().list_repo_refs(repo).tags}
        if named == FIRST and tags:
            order = [commit.commit_id for commit in access.api().list_repo_commits(repo)]  # the newest first
            commit = max(tags.values(), key=lambda one: order.index(one) if one in order else -1)
            return CurrentRelease(_download(repo, commit, access), commit)
    except Refused:
        raise
    except Exception as error:
        raise _unreachable(repo, error, access) from None
    if not tags:
        return None
    if named in tags:
        return CurrentRelease(_download(repo, tags[named], access), tags[named])
    raise InvalidInput(
        "evaluate.anchor",
        found=f"{named!r}, which is no version of {repo}",
        expected=f"{FIRST!r}, or one of its tags",
        remedy=suggest(named, [FIRST, *tags]),
    )


def _download(repo: str, commit: str, access: HubAccess) -> Path:
    from huggingface_hub import snapshot_download

    try:
        place = snapshot_download(repo, revision=commit, token=access.token or False, endpoint=access.endpoint)
    except Exception as error:
        raise _unreachable(repo, error, access) from None
    return Path(place)


def _main_commit(access: HubAccess, repo: str) -> str | None:
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return access.api().model_info(repo).sha
    except RepositoryNotFoundError:
        return None
    except Exception as error:
        raise _unreachable(repo, error, access) from None


def _unreachable(repo: str, error: Exception, access: HubAccess) -> Refused:
    return Refused(
        f"{repo} on the Hub",
        found=f"the current release cannot be read: {describe_hub_error(error, access)}",
        expected="the release that the merge is compared with",
        remedy="run again later",
    )


@dataclass(frozen=True)
class HubRelease:
    """A commit on the Hub. ``version``: the tag on it that is a content hash."""

    access: HubAccess
    repo: str
    commit: str
    version: str | None
    _small_files: dict[str, bytes] = field(default_factory=dict, repr=False, compare=False, hash=False)

    @property
    def where(self) -> str:
        return f"{self.repo}@{self.version or self.commit[:12]}"

    def files(self) -> Mapping[str, tuple[int, str]]:
        """Size and sha256 of every file. Small ones are read."""
        listing = self.access.listing(self.repo, self.commit)
        return {
            name: (file.size, file.sha256 if file.sha256 is not None else sha256_of(self.read(name)))
            for name, file in listing.items()
            if name not in WRITTEN_BY_HUB
        }

    def read(self, name: str) -> bytes:
        """The bytes that the commit lists under ``name``. Small files are kept: each is asked for once.

        Raises:
            Refused: when the Hub hands out other bytes than it lists.
        """
        if name in self._small_files:
            return self._small_files[name]
        listed = self.access.listing(self.repo, self.commit)[name]
        with TemporaryDirectory(prefix="mergegate-verify-") as place:
            file = self.access.api().hf_hub_download(self.repo, name, revision=self.commit, local_dir=place)
            data = Path(file).read_bytes()
        if (sha256_of(data) if listed.sha256 else git_blob(data)) != (listed.sha256 or listed.blob):
            raise Refused(f"{self.where}: {name}", found="other bytes than the Hub lists", expected="what it lists")
        if len(data) <= _SMALL:
            self._small_files[name] = data
        return data


def open_on_hub(named: str) -> HubRelease | None:
    """``org/name[@revision]`` as it stands now; None when ``named`` has another form.

    Raises:
        InvalidInput: when there is no such repository or revision, or the Hub cannot be asked.
    """
    form = _NAME.fullmatch(named)
    if not form:
        return None
    access, repo = hub_access(writing=False), form["repo"]
    try:
        api = access.api()
        facts = api.model_info(repo, revision=form["revision"])
        tags = [ref.name for ref in api.list_repo_refs(repo).tags if ref.target_commit == facts.sha]
    except Exception as error:
        if not is_retryable(error):
            raise _nothing(named, describe_hub_error(error, access)) from None
        raise _nothing(
            named, f"no directory here, and unavailable from the Hub ({describe_hub_error(error, access)})"
        ) from None
    if facts.sha is None:
        raise _nothing(named, "a repository without commits")
    versions = [form["revision"]] if form["revision"] in tags else tags
    return HubRelease(access, repo, facts.sha, next((tag for tag in versions if is_content_version(tag)), None))


def _nothing(named: str, found: str) -> InvalidInput:
    return InvalidInput(
        named,
        found=found,
        expected="the directory of a release, or org/name@version on the Hub",
        remedy="check the spelling, the network, and HF_TOKEN for a private repository",
    )
