"""Names that mean one of the versions on the Hub: tags that move, beside those of versions, which never do.

The Hub has no way to move a tag: it is removed and made again, and for a moment there is none. What was cut off in
between is completed by the next call, which finds the tag missing.

The Hub tells of a tag only its name and its commit, so what is an alias is told by what else is known of the commit: a
version's tag stands alone on it, or the commit says that it released that very version.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from mergegate.merge_core.errors import Refused
from mergegate.tasks.checkpoints.hub import HubAccess, describe_hub_error, is_retryable
from mergegate.tasks.publish.targets.alias import ALIAS_NAME, is_a_version, no_such_version

_ATTEMPTS, _LONGEST_WAIT_S = 6, 16.0


def move_tag(repo: str, version: str, name: str, access: HubAccess) -> None:
    """Have the tag ``name`` stand on the commit of ``version``.

    Raises:
        InvalidInput: when there is no such version, or ``name`` is one.
        Refused: when the Hub says no, or does not answer.
    """
    from huggingface_hub.errors import RepositoryNotFoundError

    for failures in range(_ATTEMPTS):
        try:
            _move(repo, version, name, access)
            return
        except RepositoryNotFoundError:
            raise no_such_version(version, repo) from None
        except _client_errors() as error:
            # Looked at anew each time: a step whose answer was lost has happened.
            if failures == _ATTEMPTS - 1 or not is_retryable(error):
                raise _no_answer(repo, error, access) from None
            time.sleep(min(2.0**failures, _LONGEST_WAIT_S))


def read_tag(repo: str, name: str, access: HubAccess) -> str | None:
    """The version on whose commit the tag ``name`` stands; of several the first, whose contents are the same.

    Raises:
        Refused: when the Hub cannot be asked.
    """
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return version_on(_tags(repo, access), name)
    except RepositoryNotFoundError:
        return None
    except _client_errors() as error:
        raise _no_answer(repo, error, access) from None


def version_on(tags: Mapping[str, str], name: str) -> str | None:
    """The version that an alias means, by all tags (name -> commit): another tag on its commit, sooner one that could
    not be an alias itself.
    """
    others = sorted(tag for tag, commit in tags.items() if tag != name and commit == tags.get(name))
    return next((tag for tag in others if not re.fullmatch(ALIAS_NAME, tag)), others[0] if others else None)


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
    """Whether the commit under the tag says that it released a version of that name."""
    commits = access.api().list_repo_commits(repo, revision=name)
    return bool(commits) and commits[0].title == f"Release {name}"


def _tags(repo: str, access: HubAccess) -> dict[str, str]:
    return {tag.name: tag.target_commit for tag in access.api().list_repo_refs(repo).tags}


def _client_errors() -> tuple[type[Exception], ...]:
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # httpx or httpx2

    return (HTTPError, OSError, ValueError, RuntimeError)


def _no_answer(repo: str, error: Exception, access: HubAccess) -> Refused:
    again = is_retryable(error)
    return Refused(
        f"{repo} on the Hub",
        found=describe_hub_error(error, access),
        expected="a Hub that answers" if again else "a token that may write there",
        remedy="run again later: what was begun is completed" if again else "use another token",
    )
