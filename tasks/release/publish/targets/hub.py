"""Define the Hub target: resolve the credential, check its permissions, read and publish releases, and move aliases.

Each operation creates its own access object, because hours may pass between two operations, and the second must see
commits in between.

Verification downloads nothing large, because the Hub reports the sha256 of a file in large storage. Small files are
downloaded and compared with their git blob id, which proves that the bytes match the listing.

A version is a tag that never moves; an alias is a tag that does. The Hub cannot move a tag, so mergegate deletes it and
creates it again. If that is interrupted, the next call finds the tag missing and creates it. The Hub reports only the
name and commit of a tag. mergegate takes a tag for a version if it is the only one on its commit, or if the commit
message says that it released that version. Every other tag is an alias.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from mergegate.merge_core.errors import InvalidInput, MergegateError, Refused
from mergegate.merge_core.files import is_disk_error
from mergegate.tasks.base.http import retry_transient
from mergegate.tasks.models.checkpoints.hub import (
    HubAccess,
    RemoteFile,
    describe_hub_error,
    git_blob,
    hub_access,
    is_retryable,
    require_write_access,
)
from mergegate.tasks.release.publish.content import is_content_version, sha256_of
from mergegate.tasks.release.publish.targets.contract import (
    ALIAS_NAME,
    FIRST,
    CredentialUse,
    CurrentRelease,
    PublishRequest,
    PublishTarget,
    Release,
)
from mergegate.tasks.release.publish.targets.hub_publication import MAIN, WRITTEN_BY_HUB, publish_hub, transport_errors

_SMALL = 1 << 22  # bytes
_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[^@\s]+))?")
_ATTEMPTS = 6


@contextmanager
def explained_hub_errors(repo: str, access: HubAccess) -> Iterator[None]:
    """Raise Refused, which says that the release cannot be read, for an error of the Hub's client inside the block.

    Errors of mergegate and of the local disk pass.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, MergegateError) or is_disk_error(error):
            raise
        raise Refused(
            f"{repo} on the Hub",
            found=f"the release cannot be read: {describe_hub_error(error, access)}",
            expected="an answer from the Hub",
            remedy="run again later",
        ) from None


def main_commit(access: HubAccess, repo: str) -> str | None:
    """Return the head of ``main``, or None without a repository. Raise Refused if the Hub is unavailable."""
    from huggingface_hub.errors import RepositoryNotFoundError

    with explained_hub_errors(repo, access):
        try:
            return access.api().model_info(repo).sha
        except RepositoryNotFoundError:
            return None


@dataclass(frozen=True)
class HubRelease:
    """A release on the Hub. ``version`` is the tag of its commit that is a content hash, or None."""

    access: HubAccess
    repo: str
    commit: str
    version: str | None
    _small_files: dict[str, bytes] = field(default_factory=dict, repr=False, compare=False, hash=False)

    @property
    def reference(self) -> str:
        return f"{self.repo}@{self.version or self.commit[:12]}"

    def files(self) -> Mapping[str, tuple[int, str]]:
        """Return size and sha256 of every file. Small files are downloaded and hashed."""
        return {
            name: (file.size, file.sha256 if file.sha256 is not None else sha256_of(self.read(name)))
            for name, file in self._listing().items()
            if name not in WRITTEN_BY_HUB
        }

    def read(self, name: str) -> bytes:
        """Return the content of a file; small files are cached."""
        if name in self._small_files:
            return self._small_files[name]
        entry = self._listing()[name]
        with explained_hub_errors(self.repo, self.access), TemporaryDirectory(prefix="mergegate-verify-") as directory:
            file = self.access.api().hf_hub_download(self.repo, name, revision=self.commit, local_dir=directory)
            data = Path(file).read_bytes()
        if (sha256_of(data) if entry.sha256 else git_blob(data)) != (entry.sha256 or entry.blob):
            raise Refused(
                f"{self.reference}: {name}",
                found="bytes that do not match the Hub's own hash",
                expected="the bytes that the Hub lists",
            )
        if len(data) <= _SMALL:
            self._small_files[name] = data
        return data

    def download(self) -> Path:
        from huggingface_hub import snapshot_download

        token, endpoint = self.access.token or False, self.access.endpoint
        with explained_hub_errors(self.repo, self.access):
            return Path(snapshot_download(self.repo, revision=self.commit, token=token, endpoint=endpoint))

    def _listing(self) -> Mapping[str, RemoteFile]:
        with explained_hub_errors(self.repo, self.access):
            return self.access.listing(self.repo, self.commit)


class HubTarget(PublishTarget):
    """A model repository on the Hugging Face Hub. ``main`` is the latest release, and every version is a tag.

    The endpoint comes from ``HF_ENDPOINT``. The credential is a Prefect Secret block, ``HF_TOKEN``, or the OIDC
    identity of a CI job.
    """

    reference_form: ClassVar[str] = "org/name@version on the Hub"

    to: Literal["hub"]
    repo: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$", description="org/name of the repository."
    )
    visibility: Literal["private", "public"] = Field(
        default="private",
        description="Visibility of the repository. A new repository is private until its release is complete. "
        "Default: private.",
    )
    gated: Literal["auto", "manual"] | None = Field(
        default=None,
        description="Whether users must request access to a public repository, and whether requests are approved "
        "automatically or manually. Default: no request is needed.",
    )
    token_block: str | None = Field(
        default=None,
        description="Prefect Secret block that holds the token. Default: the environment variable HF_TOKEN, or else "
        "the OIDC identity of the CI job.",
    )

    @model_validator(mode="after")
    def _require_public_if_gated(self) -> Self:
        if self.gated and self.visibility == "private":
            raise ValueError("a private repository cannot be gated; set 'visibility: public' or remove 'gated'")
        return self

    @property
    def is_public(self) -> bool:
        return self.visibility == "public"

    @property
    def address(self) -> str:
        return self.repo

    @property
    def hub_id(self) -> str:
        return self.repo

    def check(self, root: Path) -> CredentialUse:
        """Raise an error if the credential may not write to the repository. Return the credential without the token."""
        access = self._access()
        can_write = require_write_access(self.repo, access)
        if access.publisher and (identity := access.publisher.identity):
            return CredentialUse(
                place=self.repo,
                kind="oidc",
                name=identity.subject,
                issuer=identity.issuer,
                can_write=can_write,
                renewable=access.publisher.is_renewable,
            )
        if access.block:
            return CredentialUse(place=self.repo, kind="block", name=access.block, can_write=can_write)
        return CredentialUse(place=self.repo, kind="token", name="HF_TOKEN", can_write=can_write)

    def current_release(self, root: Path) -> CurrentRelease | None:
        """Download the latest commit of ``main``. Return None if the repository is empty or missing.

        The ``head`` of the release is this commit.
        """
        access = self._access()
        if (commit := self.current_head(root)) is None:
            return None
        directory = HubRelease(access, self.repo, commit, None).download()
        return CurrentRelease(directory, commit, commit[:12], access.url(self.repo, commit))

    def earlier_release(self, root: Path, version: str) -> CurrentRelease | None:
        """Download the release with a version's tag, or with the oldest tag. Return None without any tag."""
        access = self._access()
        if main_commit(access, self.repo) is None:
            return None
        with explained_hub_errors(self.repo, access):
            tags = self._tags(access)
            commit = tags.get(version)
            if version == FIRST and tags:
                history = [item.commit_id for item in access.api().list_repo_commits(self.repo)]  # newest first
                commit = max(tags.values(), key=lambda item: history.index(item) if item in history else -1)
        if not tags:
            return None
        if commit is None:
            raise self._no_such_anchor(version, list(tags))
        return CurrentRelease(HubRelease(access, self.repo, commit, None).download(), commit)

    def current_head(self, root: Path) -> str | None:
        """Return the latest commit of ``main``, or None if the repository is empty or missing."""
        access = self._access()
        if (commit := main_commit(access, self.repo)) is None:
            return None
        with explained_hub_errors(self.repo, access):
            listing = access.listing(self.repo, commit)
        return commit if set(listing) - WRITTEN_BY_HUB else None

    def for_variants(self, suffix: str) -> HubTarget:
        return self._with_settings(suffix, repo=f"{self.repo}-{suffix}")

    def publish(self, request: PublishRequest) -> Release:
        """Make ``main`` and the version's tag contain exactly the files of the release."""
        access, version = self._access(), request.version
        gated = self.gated or False
        published = publish_hub(request, self.repo, access, visibility=self.visibility, gated=gated)
        return Release(request.name, version, access.url(self.repo, version), self.repo, published.new)

    def published_file(self, root: Path, version: str, name: str) -> bytes | None:
        """Return a small file of the commit with a version's tag, or else of ``main``.

        An interrupted publication may have moved ``main`` without creating the tag.
        """
        access = self._access()
        with explained_hub_errors(self.repo, access):
            commit = self._tags(access).get(version) or main_commit(access, self.repo)
            if commit is None or name not in access.listing(self.repo, commit):
                return None
        return HubRelease(access, self.repo, commit, None).read(name)

    def set_alias(self, root: Path, version: str, name: str) -> None:
        """Move the tag ``name`` to the commit of the version."""
        self._require_alias_name(name, MAIN)
        access = self._access()

        def move() -> None:
            """Move the tag. Each attempt reads the tags again: a request whose answer was lost may have succeeded."""
            tags, api = self._tags(access), access.api()
            if version not in tags:
                raise self._no_such_version(version, list(tags))
            is_version = name == version or (name in tags and version_on(tags, name) is None)
            if not is_version and name in tags:
                commits = api.list_repo_commits(self.repo, revision=name)
                is_version = bool(commits) and commits[0].title == f"Release {name}"
            if is_version:
                raise self._alias_conflict(name)
            if tags.get(name) == tags[version]:
                return
            if name in tags:
                api.delete_tag(self.repo, tag=name)
            api.create_tag(self.repo, tag=name, tag_message=f"{name} is {version}", revision=tags[version])

        try:
            retry_transient(_ATTEMPTS, transient=is_retryable, sleep=lambda seconds: time.sleep(seconds))(move)
        except transport_errors() as error:
            raise self._no_answer(error, access) from None

    def resolve_alias(self, root: Path, name: str) -> str | None:
        """Return the version that the tag ``name`` points to, or None (see :func:`version_on`)."""
        access = self._access()
        try:
            return version_on(self._tags(access), name)
        except transport_errors() as error:
            raise self._no_answer(error, access) from None

    @classmethod
    def open(cls, reference: str) -> HubRelease | None:
        """Open ``org/name`` (the head of ``main``) or ``org/name@revision``. A public repository needs no token."""
        if not (match := _NAME.fullmatch(reference)):
            return None
        access, repo = hub_access(writing=False, repo=match["repo"]), match["repo"]
        try:
            api = access.api()
            info = api.model_info(repo, revision=match["revision"])
            tags = [ref.name for ref in api.list_repo_refs(repo).tags if ref.target_commit == info.sha]
            problem = "" if info.sha else "a repository without commits"
        except Exception as error:
            problem = describe_hub_error(error, access)
            if is_retryable(error):
                problem = f"not a local directory, and unavailable from the Hub ({problem})"
        if problem:
            raise InvalidInput(
                reference,
                found=problem,
                expected="the directory of a release, or org/name@version on the Hub",
                remedy="check the spelling, the network, and HF_TOKEN for a private repository",
            )
        versions = [match["revision"]] if match["revision"] in tags else tags
        return HubRelease(access, repo, str(info.sha), next((tag for tag in versions if is_content_version(tag)), None))

    def _access(self) -> HubAccess:
        return hub_access(self.token_block, writing=True, repo=self.repo)

    def _tags(self, access: HubAccess) -> dict[str, str]:
        """Return the commit of every tag, by name. Empty without a repository."""
        from huggingface_hub.errors import RepositoryNotFoundError

        try:
            return {tag.name: tag.target_commit for tag in access.api().list_repo_refs(self.repo).tags}
        except RepositoryNotFoundError:
            return {}

    def _no_answer(self, error: Exception, access: HubAccess) -> Refused:
        retryable = is_retryable(error)
        return Refused(
            f"{self.repo} on the Hub",
            found=describe_hub_error(error, access),
            expected="an answer from the Hub" if retryable else "a token with write access to the repository",
            remedy="run again later; mergegate completes the move" if retryable else "use another token",
        )


def version_on(tags: Mapping[str, str], name: str) -> str | None:
    """Return the version that the alias ``name`` points to: another tag on its commit, or None without one.

    ``tags`` holds the commit of every tag, by name. If several tags are on the commit, those that cannot be aliases
    come first, in alphabetical order.
    """
    candidates = sorted(tag for tag, commit in tags.items() if tag != name and commit == tags.get(name))
    return next((tag for tag in candidates if not re.fullmatch(ALIAS_NAME, tag)), candidates[0] if candidates else None)
