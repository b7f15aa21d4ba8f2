"""Whose a token is and what it may do, so that a release is not refused hours after it was begun.

What the Hub says of a token (``/api/whoami-v2``) and what it says of one repository (``auth-check``) are asked here;
what follows from the first is decided by pure functions. A self-hosted Hub that knows neither question is believed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mergegate.merge_core.errors import MergegateError, Refused, suggest
from mergegate.tasks.checkpoints.hub.access import HubAccess, describe_hub_error
from mergegate.tasks.checkpoints.hub.errors import client_errors, rejected_token
from mergegate.tasks.http import status_of

_WRITES = "repo.write"
_READING_ROLES = frozenset({"read", "no_access"})


@dataclass(frozen=True)
class Account:
    """Whose a token is.

    Args:
        name: Of the account: its own namespace.
        organizations: Name → role in it (``admin``, ``write``, ``contributor``, ``read``; empty: not said).
        role: Of the token: ``read``, ``write`` or ``fineGrained``; empty: not said.
        scopes: Of a fine-grained token: namespace or repository → what it may do there.
        everywhere: Of a fine-grained token: what it may do in all of them.
    """

    name: str
    organizations: Mapping[str, str]
    role: str = ""
    scopes: Mapping[str, frozenset[str]] | None = None
    everywhere: frozenset[str] = frozenset()


def parse_account(answer: Mapping[str, Any]) -> Account:
    """The answer of ``whoami-v2``; what it does not say counts as not said."""
    token = _mapping(_mapping(answer.get("auth")).get("accessToken"))
    fine = _mapping(token.get("fineGrained"))
    scopes: dict[str, frozenset[str]] = {}
    for scope in fine.get("scoped") or ():
        name = str(_mapping(_mapping(scope).get("entity")).get("name", ""))
        scopes[name] = scopes.get(name, frozenset()) | frozenset(map(str, _mapping(scope).get("permissions") or ()))
    return Account(
        name=str(answer.get("name", "")),
        organizations={
            str(_mapping(one).get("name", "")): str(_mapping(one).get("roleInOrg") or "")
            for one in answer.get("orgs") or ()
        },
        role=str(token.get("role") or ""),
        scopes=scopes if fine else None,
        everywhere=frozenset(map(str, fine.get("global") or ())),
    )


def why_not(account: Account, repo: str, endpoint: str) -> Refused | None:
    """Why this account's token cannot write to ``repo`` (``org/name``), or None when nothing speaks against it."""
    space = repo.partition("/")[0]
    page = f"{endpoint}/settings/tokens"

    def refused(found: str, expected: str, remedy: str) -> Refused:
        return Refused(f"publish.repo: {repo}", found=found, expected=expected, remedy=remedy)

    if space != account.name and space not in account.organizations:
        spaces = [account.name, *account.organizations]
        return refused(
            f"the token is of {account.name}, who is not {space} and no member of it",
            f"a repository of {' or '.join(spaces)}",
            f"{suggest(space, spaces)}; or export HF_TOKEN of a member",
        )
    role = account.organizations.get(space, "")
    if space != account.name and role in _READING_ROLES:
        return refused(
            f"{account.name} may only read in {space}",
            "a member who may write",
            f"have the role changed on {endpoint}/organizations/{space}/settings/members",
        )
    if account.role == "read":
        return refused("the token may only read", "a token that may write", f"make one on {page}")
    if account.role == "fineGrained" and account.scopes is not None:
        granted = account.scopes.get(space, frozenset()) | account.scopes.get(repo, frozenset()) | account.everywhere
        if _WRITES not in granted:
            return refused(
                f"the fine-grained token may not write to {space} or {repo}",
                f"write access to contents of the repositories of {space}",
                f"edit its permissions on {page}",
            )
    return None


def require_write_access(repo: str, access: HubAccess) -> None:
    """See that the token is valid, may write to ``repo``, and that the Hub agrees if the repository exists.

    Raises:
        InvalidInput: for a token that the Hub does not know.
        Refused: for one that may not write, or a Hub that cannot be asked.
    """
    try:
        answer = access.api().whoami()
    except client_errors() as error:
        if status_of(error) == 404:
            return
        raise rejected_token(access) if status_of(error) == 401 else _unanswered(repo, error, access) from None
    if (no := why_not(parse_account(answer), repo, access.endpoint)) is not None:
        raise no
    try:
        access.api().auth_check(repo, write=True)
    except client_errors() as error:
        if status_of(error) == 404:  # it will be made: in a namespace of ours nothing is hidden from us
            return
        if status_of(error) in (401, 403):
            raise Refused(
                f"publish.repo: {repo}",
                found=f"the Hub does not let the token write: {describe_hub_error(error, access)}",
                expected="a token that may write to it",
                remedy=f"look at {access.endpoint}/{repo}/settings with that account",
            ) from None
        raise _unanswered(repo, error, access) from None


def _unanswered(repo: str, error: Exception, access: HubAccess) -> MergegateError:
    return Refused(
        f"publish.repo: {repo}",
        found=f"the Hub cannot be asked whether the token may write: {describe_hub_error(error, access)}",
        expected="an answer before anything is merged",
        remedy="run again later",
    )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
