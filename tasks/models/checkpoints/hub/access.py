"""Connect to the Hub: find its endpoint and a credential, and describe its errors.

The token never appears in a text that this module returns. The client would read ``HF_ENDPOINT`` and ``HF_TOKEN`` only
once, at import, so this module reads them at each use and passes them on. For reading, a login on this machine
(``hf auth login``) can replace ``HF_TOKEN``. For writing, the credential is a Secret block, ``HF_TOKEN``, or the OIDC
identity of a CI job (a trusted publisher). The client transfers files with Xet or LFS; ``HF_HUB_DISABLE_XET=1`` selects
LFS.

A CI provider states in an id token which job is running. The Hub exchanges it (RFC 8693) for a token that is valid for
an hour: for one repository if the resource is ``org/name``, or for a user's gated repositories if it is a username.

* GitHub Actions issues a new id token at any time, so the Hub token can be renewed for as long as the job runs.
* Other providers issue one id token in advance (``HF_OIDC_ID_TOKEN``). The Hub token cannot be renewed after that id
  token has expired.

Both tokens exist in the memory of this process only. No ``repr`` and no message contains them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from mergegate.merge_core.errors import InvalidInput, MergegateError, Refused
from mergegate.merge_core.wording import detail
from mergegate.tasks.base.http import (
    TRANSIENT_STATUSES,
    exception_chain,
    is_transient,
    retry_transient,
    status_of,
    token_claims,
)

if TYPE_CHECKING:
    from huggingface_hub import HfApi

RESOURCE, ID_TOKEN = "HF_OIDC_RESOURCE", "HF_OIDC_ID_TOKEN"
_REQUEST_URL, _REQUEST_TOKEN = "ACTIONS_ID_TOKEN_REQUEST_URL", "ACTIONS_ID_TOKEN_REQUEST_TOKEN"
_TRIES = 4  # seven seconds of waiting
_LIFETIME_S = 3600.0  # of a Hub token, if the Hub does not state it
_RENEWAL_S = 1800.0  # remaining time below which a token is renewed, so that a long request does not outlive it
_RETRY_S = 60.0  # pause after a failed renewal, while the present token is valid
# Claims that operators configure on the Hub, or that explain why a token is refused.
_SHOWN_CLAIMS = ("iss", "sub", "aud", "repository", "ref", "workflow", "environment", "project_path")


@dataclass(frozen=True)
class OidcIdentity:
    """Claims of an id token. They are not secret, unlike the token."""

    payload: Mapping[str, Any]  # All claims. Their signature is checked by the Hub.

    @property
    def issuer(self) -> str:
        return str(self.payload.get("iss", ""))

    @property
    def subject(self) -> str:
        return str(self.payload.get("sub", ""))

    @property
    def expires_at(self) -> float:
        """End of the token's validity, in seconds since 1970."""
        expires_at = self.payload.get("exp")
        return float(expires_at) if isinstance(expires_at, int | float) else float("inf")

    def is_for(self, audience: str) -> bool:
        """Return whether the service ``audience`` may accept the token."""
        audiences = self.payload.get("aud") or ()
        return audience in ((audiences,) if isinstance(audiences, str) else tuple(map(str, audiences)))

    def claims_text(self) -> str:
        """Return the claims that a trusted publisher can be limited to as ``name=value``, in one line."""
        return ", ".join(f"{name}={self.payload[name]}" for name in _SHOWN_CLAIMS if name in self.payload)


@dataclass
class TrustedPublisher:
    """Hub token for one resource, obtained on first use and renewed before it expires."""

    endpoint: str  # Address of the Hub, which is also the audience of the id token.
    resource: str  # Repository as ``org/name``, or a username.
    # Id token that was issued in advance. Empty: GitHub Actions issues one for each exchange.
    id_token: str = field(default="", repr=False)
    identity: OidcIdentity | None = field(default=None, init=False, repr=False)
    _token: str | None = field(default=None, init=False, repr=False)
    _renew_at: float = field(default=0.0, init=False, repr=False)
    _expires_at: float = field(default=0.0, init=False, repr=False)
    _secrets: set[str] = field(default_factory=set, init=False, repr=False)
    _lock: Any = field(default_factory=RLock, init=False, repr=False)

    @property
    def is_renewable(self) -> bool:
        """Whether the provider issues a new id token at any time."""
        return not self.id_token

    def token(self) -> str:
        """Return a valid Hub token."""
        with self._lock:
            now = time.time()  # It continues while the machine is suspended, unlike the monotonic clock.
            if self._token is None or now >= self._renew_at:
                try:
                    self._token = self._exchange(now)
                except MergegateError as error:
                    if self._token is None or now >= self._expires_at:
                        raise
                    self._renew_at = min(now + _RETRY_S, self._expires_at)
                    detail("trusted publisher of %s: not renewed yet: %s", self.resource, error.found)
            return self._token

    def discard_token(self) -> None:
        """Discard a token that the Hub rejects, so that the next call of ``token`` obtains another one."""
        with self._lock:
            self._token = None

    def mask(self, text: str) -> str:
        """Return ``text`` without any id token and any Hub token of this publisher."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def _exchange(self, now: float) -> str:
        from huggingface_hub._oidc import exchange_oidc_token

        id_token = self._issue_id_token(now)

        def exchange() -> tuple[str, float]:
            answer = exchange_oidc_token(subject_token=id_token, resource=self.resource, endpoint=self.endpoint)
            return str(answer["access_token"]), float(answer.get("expires_in") or _LIFETIME_S)

        try:
            with _without_request_bodies():
                token, lifetime = retry_transient(_TRIES, sleep=time.sleep)(exchange)
        except _client_errors() as error:
            raise self._refusal(error) from None
        self._secrets.add(token)
        self._expires_at = now + lifetime
        self._renew_at = self._expires_at - min(_RENEWAL_S, lifetime / 2)
        assert self.identity is not None
        job = f"{self.identity.subject} of {self.identity.issuer}"
        detail("trusted publisher of %s: %s has a token for %d s", self.resource, job, lifetime)
        return token

    def _issue_id_token(self, now: float) -> str:
        from huggingface_hub import get_session, hf_raise_for_status

        id_token, source = self.id_token, ID_TOKEN
        if not id_token:
            source = "the id token of GitHub Actions"
            # The client's own function would drop the query that GitHub's address has (``?api-version=2.0``).
            url, request_token = os.environ.get(_REQUEST_URL, ""), os.environ.get(_REQUEST_TOKEN, "")
            url += f"{'&' if '?' in url else '?'}{urlencode({'audience': self.endpoint})}"

            def request_id_token() -> str:
                answer = get_session().get(url, headers={"Authorization": f"Bearer {request_token}"})
                hf_raise_for_status(answer)
                return str(answer.json()["value"])

            self._secrets |= {request_token} - {""}
            try:
                id_token = retry_transient(_TRIES, sleep=time.sleep)(request_id_token)
            except _client_errors() as error:
                raise Refused(
                    source,
                    found=f"GitHub Actions does not issue it: {self.mask(_describe(error))}",
                    expected="an id token for this job",
                    remedy="run the job again, because the id token endpoint belongs to one job only",
                ) from None
        self._secrets.add(id_token)
        try:
            self.identity = OidcIdentity(token_claims(id_token))
        except ValueError as error:
            raise InvalidInput(
                source,
                found=f"it is not a JSON Web Token: {error}",
                expected="the id token that the CI provider issued for this job",
                remedy="let the provider set it, for example with id_tokens in GitLab's .gitlab-ci.yml",
            ) from None
        if now >= self.identity.expires_at:
            ended = datetime.fromtimestamp(self.identity.expires_at, UTC)
            raise InvalidInput(
                source,
                found=f"the id token expired at {ended:%H:%M} UTC, {(now - self.identity.expires_at) / 60:.0f} min ago",
                expected="an id token that is valid when mergegate checks and when it publishes",
                remedy="run again in a new job, where finished stages are cached. An id token that was issued in "
                "advance cannot be renewed; GitHub Actions issues new ones during a run, and HF_TOKEN needs none",
            )
        return id_token

    def _refusal(self, error: Exception) -> MergegateError:
        location, answer = f"trusted publisher of {self.resource}", self.mask(_describe(error))
        status = next((status for cause in exception_chain(error) if (status := status_of(cause))), None)
        if status in (404, 405):
            return Refused(
                location,
                found=f"{self.endpoint} does not exchange id tokens: {answer}",
                expected="a Hub that supports trusted publishers",
                remedy="export HF_TOKEN, or correct HF_ENDPOINT",
            )
        if status is None or is_transient(error):
            return Refused(
                location,
                found=f"the Hub does not exchange the id token now: {answer}",
                expected="a token for this job",
                remedy="check HF_ENDPOINT and the network, or run again later",
            )
        assert self.identity is not None
        settings = f"{self.endpoint}/{self.resource}/settings"
        if not self.identity.is_for(self.endpoint):
            remedy = f"request the id token with the audience {self.endpoint}"
        elif "/" not in self.resource:
            remedy = f"add a publisher with these claims to CI/CD Access on {self.endpoint}/settings/authentication"
        elif self._is_public():
            remedy = f"add a trusted publisher with these claims on {settings}"
        else:
            remedy = (
                "create the repository if it does not exist, because only an existing one has trusted publishers. "
                f"Then add one with these claims on {settings}"
            )
        return Refused(
            location,
            found=f"the Hub does not exchange the id token: {answer}. Its claims: {self.identity.claims_text()}",
            expected=f"an existing {'repository' if '/' in self.resource else 'user'} with a trusted publisher whose "
            f"claims all match exactly, and the audience {self.endpoint}",
            remedy=remedy,
        )

    def _is_public(self) -> bool:
        """Return whether anyone can see the repository. The Hub does not say why it refuses an exchange."""
        from huggingface_hub import HfApi

        try:
            HfApi(endpoint=self.endpoint, token=False, library_name="mergegate").model_info(self.resource)
        except _client_errors():
            return False
        return True


def find_publisher(endpoint: str, resource: str) -> TrustedPublisher | None:
    """Return the publisher for a resource with the OIDC identity of this process, or None if it has no identity."""
    id_token = os.environ.get(ID_TOKEN, "").strip()
    if id_token:
        return _publisher(endpoint, resource, id_token, "")
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return None
    url, request_token = os.environ.get(_REQUEST_URL, ""), os.environ.get(_REQUEST_TOKEN, "")
    if not (url and request_token):
        raise InvalidInput(
            f"trusted publisher of {resource}",
            found="GitHub Actions does not let this job request an id token",
            expected="a job with the permission to write id tokens, which a pull request from a fork never has",
            remedy="add 'permissions: {id-token: write, contents: read}' to the job. Otherwise, export HF_TOKEN, or "
            "set publish.token_block to a Prefect Secret block",
        )
    return _publisher(endpoint, resource, "", f"{url} {request_token}")


@lru_cache(maxsize=32)
def _publisher(endpoint: str, resource: str, id_token: str, _source: str) -> TrustedPublisher:
    """Return the one publisher of this process for a resource, so that its operations share the Hub token."""
    return TrustedPublisher(endpoint, resource, id_token)


def _client_errors() -> tuple[type[Exception], ...]:
    from huggingface_hub.errors import HTTPError, OIDCError  # type: ignore[attr-defined]  # httpx or httpx2

    # ValueError and LookupError mean that the answer is not the expected JSON.
    return (HTTPError, OIDCError, OSError, ValueError, LookupError, TypeError)


def _describe(error: Exception) -> str:
    """Return the status and the OAuth error of an answer, or the reason why there is none, in one line."""
    for cause in exception_chain(error):
        if (status := status_of(cause)) is not None:
            try:
                answer = cause.response.json()  # type: ignore[attr-defined]  # only such causes have a status
                words = [str(answer[name]) for name in ("error", "error_description") if answer.get(name)]
            except (ValueError, AttributeError, TypeError):
                words = []
            return f"{status} {': '.join(words)}".strip()
    if isinstance(error, ValueError | LookupError | TypeError):
        return "the answer is not the expected JSON"
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def _without_request_bodies() -> Iterator[None]:
    """Keep the client from logging requests with their bodies. ``HF_DEBUG`` would show the beginning of id tokens."""
    logger = logging.getLogger("huggingface_hub.utils._http")

    def has_no_body(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("Send:")

    logger.addFilter(has_no_body)
    try:
        yield
    finally:
        logger.removeFilter(has_no_body)


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
