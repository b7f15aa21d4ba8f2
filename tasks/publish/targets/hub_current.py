"""What is released on the Hub now: the champion that a merge is held against, and the commit it stands at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from merge_core.errors import Refused
from tasks.checkpoints.hub import HubAccess, describe, hub_access
from tasks.publish.targets.hub_state import KEPT
from tasks.publish.targets.settings import HubTarget


@dataclass(frozen=True)
class CurrentRelease:
    """``main`` of a repository, downloaded. Hand ``commit`` to ``publish`` as ``base``: it must not have moved."""

    directory: Path
    commit: str


def current_release(target: HubTarget) -> CurrentRelease | None:
    """What ``main`` lists today, or None when there is no repository or nothing in it.

    Raises:
        InvalidInput: when there is no token.
        Refused: when the Hub cannot be asked: a merge must not be let through because its champion was out of reach.
    """
    access = hub_access(target.token_block, writing=True)
    commit = _head(access, target.repo)
    if commit is None or not set(access.listing(target.repo, commit)) - KEPT:
        return None
    from huggingface_hub import snapshot_download

    try:
        place = snapshot_download(target.repo, revision=commit, token=access.token or False, endpoint=access.endpoint)
    except Exception as error:
        raise _unreachable(target.repo, error, access) from None
    return CurrentRelease(Path(place), commit)


def _head(access: HubAccess, repo: str) -> str | None:
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
        found=f"the current release cannot be read: {describe(error, access)}",
        expected="the release that the merge is held against",
        remedy="run again later",
    )
