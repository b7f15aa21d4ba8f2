"""Translate the Hub's refusals to serve a model into mergegate errors with a remedy.

The Hub refuses if the repository or revision does not exist, the account has no access, the repository is gated, or the
Hub is unavailable.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from mergegate.merge_core.errors import InvalidInput, MergegateError, Refused
from mergegate.tasks.checkpoints.hub.access import HubAccess, describe_hub_error
from mergegate.tasks.http import exception_chain, status_of

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
