"""Translate the Hub's refusals to serve a model into mergegate errors with a remedy.

The Hub refuses if the repository or revision does not exist, the account has no access, the repository is gated, or the
Hub is unavailable.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mergegate.merge_core.errors import InvalidInput, MergegateError, Refused, suggest
from mergegate.tasks.base.http import exception_chain, status_of
from mergegate.tasks.models.checkpoints.hub.access import HubAccess, describe_hub_error

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def client_errors() -> tuple[type[Exception], ...]:
    """Return the types of all exceptions that the client raises if a request fails."""
    from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]  # httpx or httpx2

    # RuntimeError is raised by hf_xet.
    return (HTTPError, HFValidationError, OSError, RuntimeError)


def hub_refusal(location: str, repo: str, error: Exception, access: HubAccess | None) -> MergegateError:
    """Return a mergegate error for the client's exception ``error``, with the page or setting that fixes the problem.

    ``location`` is the text that the user wrote for the model. ``access`` is None if the environment forbids access to
    the Hub.
    """
    from huggingface_hub import errors

    chain = exception_chain(error)

    def is_a(*kinds: type[BaseException]) -> bool:
        return any(isinstance(cause, kinds) for cause in chain)

    if access is None or is_a(errors.OfflineModeIsEnabled):
        return unreachable_offline(location)
    for cause in chain:
        if isinstance(cause, OSError) and cause.errno in _DISK:
            return Refused(
                location,
                found=f"the file cannot be written to the Hub's cache: {cause.strerror}",
                expected="free space and write permission",
                remedy="free some space, or set HF_HOME to a directory on another disk",
            )
    statuses = [status for cause in chain if (status := status_of(cause)) is not None]
    reader = "the token's account" if access.token else "a user without a token"
    if is_a(errors.GatedRepoError) and not access.token:
        return InvalidInput(
            location,
            found="the repository is gated, and HF_TOKEN is not set",
            expected="HF_TOKEN of an account that has access",
            remedy=f"request access on {access.endpoint}/{repo}, then export HF_TOKEN of that account",
        )
    if is_a(errors.GatedRepoError):
        return Refused(
            location,
            found=f"the repository is gated, and {reader} has no access",
            expected="access to its files",
            remedy=f"request access on {access.endpoint}/{repo}, and export HF_TOKEN of the account with access"
            " (a fine-grained token must also be allowed to read gated repositories)",
        )
    if 401 in statuses and access.token and not is_a(errors.RepositoryNotFoundError):
        return rejected_token(access)
    if is_a(errors.RevisionNotFoundError):
        return InvalidInput(
            location,
            found=f"the repository {repo} has no such branch, tag or commit",
            expected="an existing revision",
            remedy=f"see {access.url(repo, 'main')}",
        )
    if is_a(errors.RepositoryNotFoundError, errors.HFValidationError):
        return InvalidInput(
            location,
            found=f"neither a local directory nor a Hub repository that {reader} can read",
            expected="a path relative to the recipe, or org/name on the Hub",
            remedy="check the spelling. For a private repository, export HF_TOKEN of an account with read access",
        )
    if 403 in statuses:
        return Refused(
            location,
            found=f"the Hub does not let {reader} read the repository: {describe_hub_error(error, access)}",
            expected="read access to the repository",
            remedy=f"open {access.endpoint}/{repo} with that account, or export HF_TOKEN of another account",
        )
    return Refused(
        location,
        found=f"it is not a local directory, and the Hub does not serve it: {describe_hub_error(error, access)}",
        expected="a local directory, or an answer from the Hub",
        remedy="check the spelling and the network, or run again later. Downloaded files are kept",
    )


def unreachable_offline(location: str) -> InvalidInput:
    """Return the error for a model that is not completely cached while the environment forbids access to the Hub."""
    return InvalidInput(
        location,
        found="it is neither a local directory nor complete in the Hub's cache, and HF_HUB_OFFLINE forbids access",
        expected="a path relative to the recipe, or org/name on the Hub",
        remedy="unset HF_HUB_OFFLINE for one run, which downloads it, or correct the spelling",
    )


def combine_hub_errors(problems: Sequence[MergegateError]) -> MergegateError:
    """Return the first error, extended by the messages of the others, so that the user sees all problems in one run."""
    first, *rest = {str(problem): problem for problem in problems}.values()
    if not rest:
        return first
    also = "".join(f"\n  also: {problem.where}: {problem.found}" for problem in rest)
    return type(first)(first.where, found=first.found + also, expected=first.expected, remedy=first.remedy)


def rejected_token(access: HubAccess) -> MergegateError:
    """Return the error for a token that the Hub rejects because it is mistyped, expired or revoked."""
    if access.publisher:
        return Refused(
            f"trusted publisher of {access.publisher.resource}",
            found="the Hub rejects the token that it issued for this job",
            expected="read access with this token",
            remedy="run again later. If it happens again, export HF_TOKEN, or unset HF_OIDC_RESOURCE to read public "
            "models only",
        )
    return InvalidInput(
        "HF_TOKEN",
        found="the Hub does not know this token",
        expected="a valid token",
        remedy=f"create a new one on {access.endpoint}/settings/tokens, or unset HF_TOKEN to read public models only",
    )


_WRITES = "repo.write"
_READING_ROLES = frozenset({"read", "no_access"})


@dataclass(frozen=True)
class Account:
    """Account that a token belongs to, and the permissions of the token."""

    name: str  # Name of the account, which is also its namespace.
    # The account's role in each organization, by name: ``admin``, ``write``, ``contributor`` or ``read``. A role is
    # empty if the Hub does not report it.
    organizations: Mapping[str, str]
    role: str = ""  # Role of the token: ``read``, ``write`` or ``fineGrained``. Empty if the Hub does not report it.
    # Permissions of a fine-grained token by namespace or repository. None for other tokens.
    scopes: Mapping[str, frozenset[str]] | None = None
    everywhere: frozenset[str] = frozenset()  # Permissions of a fine-grained token in all namespaces and repositories.


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
