"""Connect to the Hub: find its endpoint and a token, and describe its errors.

The token never appears in a text that this module returns. The client would read ``HF_ENDPOINT`` and ``HF_TOKEN`` only
once, at import, so this module reads them at each use and passes them on. For reading, a login on this machine
(``hf auth login``) can replace ``HF_TOKEN``. For writing, the token must be set explicitly. The client transfers files
with Xet or LFS; ``HF_HUB_DISABLE_XET=1`` selects LFS.
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
    """One file in the Hub's listing of a commit.

    Attributes:
        size: Size in bytes.
        blob: Git's sha1 of the file.
        sha256: sha256 of the content, or None for a file outside large file storage (LFS or Xet), for which the Hub
            lists only ``blob``.
    """

    size: int
    blob: str
    sha256: str | None = None


def git_blob(data: bytes) -> str:
    """Return git's ID for a file with this content: the sha1 of a header and the bytes, as 40 hex digits."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def snapshots_directory(repo: str) -> Path:
    """Return the directory in the Hub's own cache that holds the commits of ``org/name``. It may not exist."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model") / "snapshots"


@dataclass(frozen=True)
class HubAccess:
    """Endpoint of the Hub and token for it. ``repr`` does not show the token."""

    endpoint: str
    token: str | None = field(default=None, repr=False)
    _listings: dict[tuple[str, str], dict[str, RemoteFile]] = field(
        default_factory=dict, repr=False, compare=False, hash=False
    )

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


def hub_access(token_block: str | None = None, *, writing: bool) -> HubAccess:
    """Return the endpoint and the token for the Hub.

    Args:
        token_block: Name of a Prefect Secret block that holds the token. Default: use ``HF_TOKEN``.
        writing: Whether the caller writes to the Hub, which requires a token.

    Raises:
        InvalidInput: A token is required but not set, the Secret block does not exist, or the environment forbids
            network access.
    """
    if is_offline():
        raise InvalidInput(
            "HF_HUB_OFFLINE",
            found="the environment forbids access to the Hub",
            expected="access to the Hub",
            remedy="unset HF_HUB_OFFLINE, or publish to a directory" if writing else "unset HF_HUB_OFFLINE",
        )
    token = os.environ.get("HF_TOKEN", "").strip()
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
    if writing and not token:
        raise InvalidInput(
            "HF_TOKEN",
            found="the variable is not set",
            expected="a token with write access to the repository",
            remedy="export HF_TOKEN, or set publish.token_block to a Prefect Secret block",
        )
    if not (writing or token):
        from huggingface_hub import get_token

        token = get_token() or ""
    return HubAccess(os.environ.get("HF_ENDPOINT", _PUBLIC).rstrip("/"), token or None)


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
    return text.replace(access.token, "***") if access.token else text
