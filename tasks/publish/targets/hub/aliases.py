"""Move aliases on the Hub. An alias is a tag that moves; a version is a tag that never does.

The Hub cannot move a tag: mergegate deletes it and creates it again, so for a moment it does not exist. If that is
interrupted, the next call finds the tag missing and completes the move.

The Hub reports only the name and commit of a tag. A tag is taken for a version if it is the only one on its commit, or
if the commit message says that it released that version. Every other tag is an alias.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from mergegate.merge_core.errors import Refused
from mergegate.tasks.checkpoints.hub import HubAccess, describe_hub_error, is_retryable
from mergegate.tasks.publish.targets.alias import ALIAS_NAME, is_a_version, no_such_version

_ATTEMPTS, _MAX_WAIT_S = 6, 16.0


def move_tag(repo: str, version: str, name: str, access: HubAccess) -> None:
    """Point the tag ``name`` to the commit of ``version``.

    Raises:
        InvalidInput: There is no such version, or ``name`` is a version.
        Refused: The Hub rejects the request or does not answer.
    """
    from huggingface_hub.errors import RepositoryNotFoundError

    for failures in range(_ATTEMPTS):
        try:
            _move(repo, version, name, access)
            return
        except RepositoryNotFoundError:
            raise no_such_version(version, repo) from None
        except _client_errors() as error:
            # Each attempt reads the tags again: a request whose answer was lost may have succeeded.
            if failures == _ATTEMPTS - 1 or not is_retryable(error):
                raise _no_answer(repo, error, access) from None
            time.sleep(min(2.0**failures, _MAX_WAIT_S))


def read_tag(repo: str, name: str, access: HubAccess) -> str | None:
    """Return the version whose commit the tag ``name`` points to; the first by name if there are several.

    Raises:
        Refused: The Hub is unavailable.
    """
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return version_on(_tags(repo, access), name)
    except RepositoryNotFoundError:
        return None
    except _client_errors() as error:
        raise _no_answer(repo, error, access) from None


def version_on(tags: Mapping[str, str], name: str) -> str | None:
    """Return the version that an alias means: another tag on its commit. Tags that cannot be aliases come first.

    Args:
        tags: Commit of every tag, by name.
    """
    candidates = sorted(tag for tag, commit in tags.items() if tag != name and commit == tags.get(name))
    return next((tag for tag in candidates if not re.fullmatch(ALIAS_NAME, tag)), candidates[0] if candidates else None)


def _move(repo: str, version: str, name: str, access: HubAccess) -> None:
    tags, api = _tags(repo, access), access.api()
    if version not in tags:
        raise no_such_version(version, repo, list(tags))
    if name == version or (name in tags and (version_on(tags, name) is None or _released(repo, name, access))):
        raise is_a_version(name, repo)
    if tags.get(name) == tags[version]:
        return
    if name in tags:
        api.delete_tag(repo, tag=name)
    api.create_tag(repo, tag=name, tag_message=f"{name} is {version}", revision=tags[version])


def _released(repo: str, name: str, access: HubAccess) -> bool:
    """Return whether the message of the tagged commit says that it released a version of this name."""
    commits = access.api().list_repo_commits(repo, revision=name)
    return bool(commits) and commits[0].title == f"Release {name}"


def _tags(repo: str, access: HubAccess) -> dict[str, str]:
    return {tag.name: tag.target_commit for tag in access.api().list_repo_refs(repo).tags}


def _client_errors() -> tuple[type[Exception], ...]:
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # httpx or httpx2

    return (HTTPError, OSError, ValueError, RuntimeError)


def _no_answer(repo: str, error: Exception, access: HubAccess) -> Refused:
    retryable = is_retryable(error)
    return Refused(
        f"{repo} on the Hub",
        found=describe_hub_error(error, access),
        expected="a Hub that answers" if retryable else "a token that may write there",
        remedy="run again later: what was begun is completed" if retryable else "use another token",
    )
