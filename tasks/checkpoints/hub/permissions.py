"""Check that a credential may write to a repository, so that a release does not fail hours after its start.

This module asks the Hub about the token (``/api/whoami-v2``) and about the repository (``auth-check``). If a
self-hosted Hub supports neither endpoint, the check passes. A token of a trusted publisher belongs to no account, so
only the repository is checked. The Hub does not document whether ``auth-check`` accepts such a token: a denial (403)
refuses the release, and any other answer leaves the question open, as long as the token can read the repository.
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
    """Account that a token belongs to, and the permissions of the token.

    Args:
        name: Name of the account, which is also its namespace.
        organizations: The account's role in each organization, by name: ``admin``, ``write``, ``contributor`` or
            ``read``. A role is empty if the Hub does not report it.
        role: Role of the token: ``read``, ``write`` or ``fineGrained``. Empty if the Hub does not report it.
        scopes: Permissions of a fine-grained token by namespace or repository. None for other tokens.
        everywhere: Permissions of a fine-grained token in all namespaces and repositories.
    """

    name: str
    organizations: Mapping[str, str]
    role: str = ""
    scopes: Mapping[str, frozenset[str]] | None = None
    everywhere: frozenset[str] = frozenset()


def parse_account(answer: Mapping[str, Any]) -> Account:
    """Return the account in a response of ``whoami-v2``. Missing fields become empty values."""
    token = _mapping(_mapping(answer.get("auth")).get("accessToken"))
    fine = _mapping(token.get("fineGrained"))
    scopes: dict[str, frozenset[str]] = {}
    for scope in fine.get("scoped") or ():
        name = str(_mapping(_mapping(scope).get("entity")).get("name", ""))
        scopes[name] = scopes.get(name, frozenset()) | frozenset(map(str, _mapping(scope).get("permissions") or ()))
    return Account(
        name=str(answer.get("name", "")),
        organizations={
            str(_mapping(organization).get("name", "")): str(_mapping(organization).get("roleInOrg") or "")
            for organization in answer.get("orgs") or ()
        },
        role=str(token.get("role") or ""),
        scopes=scopes if fine else None,
        everywhere=frozenset(map(str, fine.get("global") or ())),
    )


def find_write_refusal(account: Account, repo: str, endpoint: str) -> Refused | None:
    """Return an error if the account's token cannot write to ``repo`` (``org/name``), or None if it may."""
    namespace = repo.partition("/")[0]
    page = f"{endpoint}/settings/tokens"

    def make_refusal(found: str, expected: str, remedy: str) -> Refused:
        return Refused(f"publish.repo: {repo}", found=found, expected=expected, remedy=remedy)

    if namespace != account.name and namespace not in account.organizations:
        namespaces = [account.name, *account.organizations]
        return make_refusal(
            f"the token belongs to {account.name}, which is not a member of {namespace}",
            f"a repository of {' or '.join(namespaces)}",
            f"{suggest(namespace, namespaces)}. Otherwise, export HF_TOKEN of a member",
        )
    role = account.organizations.get(namespace, "")
    if namespace != account.name and role in _READING_ROLES:
        return make_refusal(
            f"{account.name} has read access only in {namespace}",
            "a member with write access",
            f"ask an administrator to change the role on {endpoint}/organizations/{namespace}/settings/members",
        )
    if account.role == "read":
        return make_refusal("the token has read access only", "a token with write access", f"create one on {page}")
    if account.role == "fineGrained" and account.scopes is not None:
        permissions = (
            account.scopes.get(namespace, frozenset()) | account.scopes.get(repo, frozenset()) | account.everywhere
        )
        if _WRITES not in permissions:
            return make_refusal(
                f"the fine-grained token has no write access to {namespace} or {repo}",
                f"write access to contents of the repositories of {namespace}",
                f"edit its permissions on {page}",
            )
    return None


def require_write_access(repo: str, access: HubAccess) -> bool | None:
    """Raise an error unless the credential is valid and may write to ``repo``.

    The repository need not exist yet, unless the credential is a trusted publisher.

    Returns:
        True if the Hub confirms the permission, or None if it supports no such question.

    Raises:
        InvalidInput: The Hub does not know the token.
        Refused: The credential may not write to the repository, or the Hub is not reachable.
    """
    if access.publisher is not None:
        return _require_publisher_access(repo, access)
    try:
        answer = access.api().whoami()
    except client_errors() as error:
        if status_of(error) == 404:
            return None
        raise rejected_token(access) if status_of(error) == 401 else _unanswered(repo, error, access) from None
    if (refusal := find_write_refusal(parse_account(answer), repo, access.endpoint)) is not None:
        raise refusal
    try:
        access.api().auth_check(repo, write=True)
    except client_errors() as error:
        # The repository does not exist and will be created. In its own namespace, an account sees all repositories.
        if status_of(error) == 404:
            return True
        if status_of(error) in (401, 403):
            raise Refused(
                f"publish.repo: {repo}",
                found=f"the Hub does not let the token write: {describe_hub_error(error, access)}",
                expected="a token with write access",
                remedy=f"open {access.endpoint}/{repo}/settings with that account",
            ) from None
        raise _unanswered(repo, error, access) from None
    return True


def _require_publisher_access(repo: str, access: HubAccess) -> bool | None:
    api, settings = access.api(), f"{access.endpoint}/{repo}/settings"
    try:
        api.auth_check(repo, write=True)
        return True
    except client_errors() as error:
        if status_of(error) == 403:
            raise Refused(
                f"publish.repo: {repo}",
                found=f"the trusted publisher may not write: {describe_hub_error(error, access)}",
                expected="a trusted publisher with write access",
                remedy=f"clear 'Read-only' for this publisher on {settings}",
            ) from None
        if status_of(error) not in (400, 401, 404, 405):
            raise _unanswered(repo, error, access) from None
    try:
        api.model_info(repo)
    except client_errors() as error:
        if status_of(error) in (401, 403, 404):
            raise Refused(
                f"publish.repo: {repo}",
                found="the repository does not exist, or the trusted publisher has no access to it: "
                f"{describe_hub_error(error, access)}",
                expected="an existing repository, because a trusted publisher cannot create one",
                remedy=f"create the repository on {access.endpoint}/new, and add a trusted publisher on {settings}",
            ) from None
        raise _unanswered(repo, error, access) from None
    return None


def _unanswered(repo: str, error: Exception, access: HubAccess) -> MergegateError:
    return Refused(
        f"publish.repo: {repo}",
        found=f"the Hub did not answer whether the token has write access: {describe_hub_error(error, access)}",
        expected="an answer before the merge starts",
        remedy="run again later",
    )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
