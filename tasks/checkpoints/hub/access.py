"""Reaching the Hub: where it is, with which token, and what its errors mean. The token is in no text that leaves here.

``HF_ENDPOINT`` and ``HF_TOKEN`` are read when they are needed and handed to the client, which itself would have read
them once, when it was imported. For reading, a login of this machine (``hf auth login``) will do in place of
``HF_TOKEN``; a token that writes must have been meant for it. Whether files travel by Xet or LFS is the client's to
decide (``HF_HUB_DISABLE_XET=1`` in the environment of the process chooses LFS).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.checkpoints.hub.file import RemoteFile
from mergegate.tasks.http import TRANSIENT_STATUSES, exception_chain, is_transient, status_of

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_PUBLIC = "https://huggingface.co"
# Beside what may pass: the repository is not in the state that a step expected, because of a step of ours whose answer
# was lost, one of somebody else's, or a listing that is behind. The same request again would get the same answer; what
# helps is a new look.
LOOK_AGAIN_STATUSES = TRANSIENT_STATUSES | {404, 409, 412}


@dataclass(frozen=True)
class HubAccess:
    """Endpoint and token. The token shows in no representation of it."""

    endpoint: str
    token: str | None = field(default=None, repr=False)
    _listings: dict[tuple[str, str], dict[str, RemoteFile]] = field(
        default_factory=dict, repr=False, compare=False, hash=False
    )

    def api(self) -> HfApi:
        """The library's client."""
        return _client(self.endpoint, self.token)

    def url(self, repo: str, revision: str) -> str:
        """Page of a revision, for people."""
        return f"{self.endpoint}/{repo}/tree/{revision}"

    def listing(self, repo: str, commit: str) -> dict[str, RemoteFile]:
        """Every file of a commit by name, with the Hub's own hashes. A commit never changes: each is asked for once."""
        from huggingface_hub.hf_api import RepoFile

        known = self._listings.get((repo, commit))
        if known is None:
            known = self._listings[repo, commit] = {
                entry.path: RemoteFile(entry.size, entry.blob_id, entry.lfs.sha256 if entry.lfs else None)
                for entry in self.api().list_repo_tree(repo, recursive=True, revision=commit)
                if isinstance(entry, RepoFile)
            }
        return known


@lru_cache(maxsize=4)
def _client(endpoint: str, token: str | None) -> HfApi:
    from huggingface_hub import HfApi

    # False, not None: without a token of ours the library would look for one that somebody logged in with.
    return HfApi(endpoint=endpoint, token=token or False, library_name="mergegate")


def hub_access(token_block: str | None = None, *, writing: bool) -> HubAccess:
    """How to reach the Hub from here.

    Args:
        token_block: Name of a Prefect Secret block with the token; None: ``HF_TOKEN`` of the environment.
        writing: Whether a token is indispensable.

    Raises:
        InvalidInput: when there is no token and one is needed, or the environment forbids the network.
    """
    if is_offline():
        raise InvalidInput(
            "HF_HUB_OFFLINE",
            found="the environment forbids the Hub",
            expected="a way to reach it",
            remedy="unset HF_HUB_OFFLINE, or publish to a directory" if writing else "unset HF_HUB_OFFLINE",
        )
    token = _from_block(token_block) if token_block else os.environ.get("HF_TOKEN", "").strip()
    if writing and not token:
        raise InvalidInput(
            "HF_TOKEN",
            found="not set",
            expected="a token that may write to the repository",
            remedy="export HF_TOKEN, or name a Prefect Secret block in publish.token_block",
        )
    if not (writing or token):
        from huggingface_hub import get_token

        token = get_token() or ""
    return HubAccess(os.environ.get("HF_ENDPOINT", _PUBLIC).rstrip("/"), token or None)


def is_offline() -> bool:
    """Whether the environment forbids to ask the Hub anything."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


def _from_block(name: str) -> str:
    from prefect.blocks.system import Secret

    try:
        block = Secret.load(name, _sync=True)  # type: ignore[call-arg]  # added by Prefect's sync_compatible decorator
    except ValueError:
        raise InvalidInput(
            f"publish.token_block: {name}",
            found="no such Secret block",
            expected="a Prefect Secret block that holds the token",
            remedy="make it in Prefect's pages, or leave token_block out and export HF_TOKEN",
        ) from None
    return str(block.get()).strip()  # type: ignore[union-attr]  # a block, after the synchronous load


def is_retryable(error: BaseException) -> bool:
    """Whether the state should be read again and the next step tried: trouble on the way, not a no."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # httpx or httpx2

    chain = exception_chain(error)
    if any(status_of(cause) is not None for cause in chain) or is_transient(error):
        return is_transient(error, LOOK_AGAIN_STATUSES)
    # The client's own kinds of silence: an error page where it expected its answer, a connection that broke, and what
    # hf_xet raises when an upload is cut off.
    return isinstance(error, RuntimeError) or any(
        isinstance(cause, json.JSONDecodeError | HTTPError) for cause in chain
    )


def describe_hub_error(error: BaseException, access: HubAccess) -> str:
    """What went wrong, in one line, without the token, addresses or request ids."""
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
