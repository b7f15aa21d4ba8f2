"""Connect to the Hub: find its endpoint and a credential, and describe its errors.

The token never appears in a text that this module returns. The client would read ``HF_ENDPOINT`` and ``HF_TOKEN`` only
once, at import, so this module reads them at each use and passes them on. For reading, a login on this machine
(``hf auth login``) can replace ``HF_TOKEN``. For writing, the credential is a Secret block, ``HF_TOKEN``, or the OIDC
identity of a CI job (``trusted_publisher``). The client transfers files with Xet or LFS; ``HF_HUB_DISABLE_XET=1``
selects LFS.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.checkpoints.hub.trusted_publisher import ID_TOKEN, RESOURCE, TrustedPublisher, find_publisher
from mergegate.tasks.http import TRANSIENT_STATUSES, exception_chain, is_transient, status_of

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_PUBLIC = "https://huggingface.co"
# Besides transient failures, these statuses mean that the repository is not in the state that a step expected. Either
# the response to an earlier step was lost, another client changed the repository, or a listing is out of date.
# Repeating the request would return the same response, so the caller has to read the state again.
LOOK_AGAIN_STATUSES = TRANSIENT_STATUSES | {404, 409, 412}


@dataclass(frozen=True)
class RemoteFile:
    """One file in the Hub's listing of a commit."""

    size: int  # Size in bytes.
    blob: str  # Git's sha1 of the file.
    # sha256 of the content, or None for a file outside large file storage (LFS or Xet), for which the Hub lists only
    # ``blob``.
    sha256: str | None = None


def git_blob(data: bytes) -> str:
    """Return git's ID for a file with this content: the sha1 of a header and the bytes, as 40 hex digits."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def snapshots_directory(repo: str) -> Path:
    """Return the directory in the Hub's own cache that holds the commits of ``org/name``. It may not exist."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.file_download import repo_folder_name

    try:
        folder = repo_folder_name(repo_id=repo, repo_type="model")
    except HFValidationError as error:
        raise InvalidInput(
            f"{repo!r:.80}", found=f"{error!s:.200}", expected="an existing directory, or org/name on the Hub"
        ) from None
    return Path(constants.HF_HUB_CACHE) / folder / "snapshots"


@dataclass(frozen=True)
class HubAccess:
    """Endpoint of the Hub and credential for it. ``repr`` does not show the token."""

    endpoint: str
    # Token of ``HF_TOKEN``, a Secret block or a login. None: no token, or that of ``publisher``.
    fixed_token: str | None = field(default=None, repr=False)
    publisher: TrustedPublisher | None = None  # Source of short-lived tokens, or None.
    block: str = ""  # Name of the Secret block that holds the token. Empty if there is none.
    _listings: dict[tuple[str, str], dict[str, RemoteFile]] = field(
        default_factory=dict, repr=False, compare=False, hash=False
    )

    @property
    def token(self) -> str | None:
        """Token that is valid now. A short-lived one is renewed before it expires."""
        return self.publisher.token() if self.publisher else self.fixed_token

    def discard_token(self) -> bool:
        """Discard a short-lived token that the Hub rejects. Return False if the token is not short-lived."""
        if self.publisher is None:
            return False
        self.publisher.discard_token()
        return True

    def mask(self, text: str) -> str:
        """Return ``text`` without the token."""
        if self.publisher:
            return self.publisher.mask(text)
        return text.replace(self.fixed_token, "***") if self.fixed_token else text

    def api(self) -> HfApi:
        """Return the ``huggingface_hub`` client for this endpoint and token."""
        return _client(self.endpoint, self.token)

    def url(self, repo: str, revision: str) -> str:
        """Return the address of the web page for a revision."""
        return f"{self.endpoint}/{repo}/tree/{revision}"

    def listing(self, repo: str, commit: str) -> dict[str, RemoteFile]:
        """Return all files of a commit by name, with the Hub's own hashes.

        A commit never changes, so each listing is requested once.
        """
        from huggingface_hub.hf_api import RepoFile

        files = self._listings.get((repo, commit))
        if files is None:
            files = self._listings[repo, commit] = {
                entry.path: RemoteFile(entry.size, entry.blob_id, entry.lfs.sha256 if entry.lfs else None)
                for entry in self.api().list_repo_tree(repo, recursive=True, revision=commit)
                if isinstance(entry, RepoFile)
            }
        return files


@lru_cache(maxsize=4)
def _client(endpoint: str, token: str | None) -> HfApi:
    from huggingface_hub import HfApi

    # With None instead of False, the library would fall back to the token of a login on this machine.
    return HfApi(endpoint=endpoint, token=token or False, library_name="mergegate")


def hub_access(token_block: str | None = None, *, writing: bool, repo: str | None = None) -> HubAccess:
    """Return the endpoint and the credential for the Hub.

    For writing, the credential is the first of these: the Secret block, an OIDC identity if ``HF_OIDC_RESOURCE`` names
    a repository, ``HF_TOKEN``, and any OIDC identity of this process. For reading, it is ``HF_TOKEN``, an OIDC identity
    if ``HF_OIDC_RESOURCE`` names ``repo`` or a user, or a login on this machine.

    Args:
        token_block: Name of a Prefect Secret block that holds the token. Default: no block.
        writing: Whether the caller writes to the Hub, which requires a credential.
        repo: Repository that the caller accesses, as ``org/name``. A token from an OIDC identity is valid for this
            repository only. None: use no identity for writing.

    Raises:
        InvalidInput: A credential is required but there is none, the Secret block does not exist, ``HF_OIDC_RESOURCE``
            names another repository, or the environment forbids network access.
        Refused: The Hub does not exchange the OIDC identity for a token.
    """
    if is_offline():
        raise InvalidInput(
            "HF_HUB_OFFLINE",
            found="the environment forbids access to the Hub",
            expected="access to the Hub",
            remedy="unset HF_HUB_OFFLINE, or publish to a directory" if writing else "unset HF_HUB_OFFLINE",
        )
    endpoint = os.environ.get("HF_ENDPOINT", _PUBLIC).rstrip("/")
    token, resource = os.environ.get("HF_TOKEN", "").strip(), os.environ.get(RESOURCE, "").strip()
    if token_block:
        from prefect.blocks.system import Secret

        try:
            block = Secret.load(token_block, _sync=True)  # type: ignore[call-arg]  # added by sync_compatible
        except ValueError:
            raise InvalidInput(
                f"publish.token_block: {token_block}",
                found="Prefect has no Secret block with this name",
                expected="a Prefect Secret block that contains the token",
                remedy="create it in Prefect's dashboard, or remove token_block and export HF_TOKEN",
            ) from None
        token = str(block.get()).strip()  # type: ignore[union-attr]  # a block, after the synchronous load
        if not token:
            raise InvalidInput(
                f"publish.token_block: {token_block}",
                found="the Secret block is empty",
                expected="a Prefect Secret block that contains the token",
                remedy="enter the token in Prefect's dashboard",
            )
        return HubAccess(endpoint, token, block=token_block)
    is_repository = "/" in resource
    if writing and repo and is_repository:
        if resource != repo:
            raise InvalidInput(
                RESOURCE,
                found=f"{resource}, but the release is published to {repo}",
                expected=f"no value, or {repo}, because a token is valid for one repository",
                remedy=f"unset {RESOURCE}; mergegate then requests a token for each repository that it writes to",
            )
        publisher = _require_publisher(endpoint, resource)
    elif token:
        return HubAccess(endpoint, token)
    elif writing:
        identity = find_publisher(endpoint, repo) if repo else None
        if identity is None:
            raise InvalidInput(
                "HF_TOKEN",
                found="the variable is not set, the profile has no publish.token_block, and this process has no OIDC "
                "identity",
                expected=f"a token or an identity with write access to {repo or 'the repository'}",
                remedy="export HF_TOKEN, or set publish.token_block to a Prefect Secret block. In a CI job, you can "
                f"instead add a trusted publisher on {endpoint}/{repo or 'org/name'}/settings, and let the job request "
                "an id token",
            )
        publisher = identity
    elif resource and (not is_repository or resource == repo):
        publisher = _require_publisher(endpoint, resource)
    else:
        from huggingface_hub import get_token

        # With a resource, the client would request a token for it, which is of no use for another repository.
        return HubAccess(endpoint, None if resource else get_token())
    publisher.token()  # A refusal is reported here instead of in the middle of an operation.
    return HubAccess(endpoint, publisher=publisher)


def _require_publisher(endpoint: str, resource: str) -> TrustedPublisher:
    if (publisher := find_publisher(endpoint, resource)) is None:
        raise InvalidInput(
            RESOURCE,
            found=f"it is set to {resource}, but this process has no OIDC identity",
            expected=f"a job of GitHub Actions, or an id token in {ID_TOKEN}",
            remedy=f"set {ID_TOKEN} to the id token of the CI provider, or unset {RESOURCE} and export HF_TOKEN",
        )
    return publisher


def is_offline() -> bool:
    """Return whether ``HF_HUB_OFFLINE`` forbids requests to the Hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


def is_retryable(error: BaseException) -> bool:
    """Return whether the caller should retry after reading the Hub's state again.

    This is the case for transport problems, but not if the Hub denies the request.
    """
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # httpx or httpx2

    chain = exception_chain(error)
    if any(status_of(cause) is not None for cause in chain) or is_transient(error):
        return is_transient(error, LOOK_AGAIN_STATUSES)
    # These errors of the client mean that no valid response arrived: JSONDecodeError for an error page, HTTPError for a
    # broken connection, and RuntimeError of hf_xet for an interrupted upload.
    return isinstance(error, RuntimeError) or any(
        isinstance(cause, json.JSONDecodeError | HTTPError) for cause in chain
    )


def describe_hub_error(error: BaseException, access: HubAccess) -> str:
    """Return a one-line description of the error, without the token, addresses and request IDs."""
    text = ""
    for cause in exception_chain(error):
        status = status_of(cause)
        message = str(getattr(cause, "server_message", None) or "").strip()
        if status is not None:
            text = f"{status} {message}".strip()
            break
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        text = " ".join(lines[:2]) or type(cause).__name__
    return access.mask(text)
